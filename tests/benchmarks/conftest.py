import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    """The scripts can be imported; what they compile runs as it is, since which formula they compute is asked here."""
    known = set(sys.modules)
    monkeypatch.syspath_prepend(str(SCRIPTS))
    allows_rnn, traces_autograd = torch._dynamo.config.allow_rnn, torch._dynamo.config.trace_autograd_ops
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")
    torch._dynamo.config.allow_rnn, torch._dynamo.config.trace_autograd_ops = allows_rnn, traces_autograd
    for name in set(sys.modules) - known:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == SCRIPTS:
            del sys.modules[name]
