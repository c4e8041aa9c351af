import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

from gradweave.compare.variants import LEARNING_RATES
from gradweave.compare.workloads import WORKLOADS, Workload, find_workload
from gradweave.errors import ArgumentError


@pytest.mark.parametrize("name", [name for name in WORKLOADS if name != "gpt2"])
def test_built_in_workloads_have_a_loss_that_can_be_lowered(name):
    workload = WORKLOADS[name]
    torch.manual_seed(0)
    model = workload.make_model()
    x, y = workload.make_data(2, torch.Generator().manual_seed(0))[0]
    loss = workload.loss(model(x), y)
    loss.backward()
    assert torch.isfinite(loss)
    assert all(p.grad is not None for p in model.parameters())


@pytest.fixture
def mine(monkeypatch, tmp_path):
    module = types.ModuleType("my_models")
    module.classifier = lambda: nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 5))
    module.workload = lambda: Workload(
        "own", lambda: nn.Linear(2, 2), WORKLOADS["mlp"].make_data, WORKLOADS["mlp"].loss
    )
    module.wrong = lambda: 3
    module.failing = lambda: 1 / 0
    module.other_input = lambda: nn.Linear(7, 7)
    module.number = 3
    module.leaving = lambda: sys.exit(3)
    monkeypatch.setitem(sys.modules, "my_models", module)
    for name, text in (("broken", "def f(:"), ("leaving", "import sys\nsys.exit(3)"), ("failing", "None.nothing")):
        (tmp_path / f"{name}_models.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)


def test_a_users_own_factory(mine):
    workload = find_workload("my_models:classifier")
    x, y = workload.make_data(4, torch.Generator())[0]
    assert x.shape == (4, 3, 224, 224)
    assert y.max() < 5
    assert find_workload("my_models:workload").name == "own"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet", "--model='resnet': use one of mlp"),
        ("no_such_package:thing", "cannot be imported"),
        ("my_models:nothing", "my_models has no nothing"),
        ("my_models:wrong", "returned int"),
        ("my_models:failing", "failed when called: ZeroDivisionError"),
        ("my_models:other_input", "does not classify images"),
        ("my_models:number", "is not callable; name a function"),
        ("my_models:leaving", "--model='my_models:leaving': failed when called: it called sys.exit(3)"),
        (":f", "'' is not the name of a module"),
        ("..my_models:f", "'..my_models' is not the name of a module"),
        ("broken_models:f", "broken_models fails when imported: SyntaxError"),
        ("leaving_models:f", "leaving_models fails when imported: it called sys.exit(3) (leaving_models.py, line 2)"),
        ("failing_models:f", "failing_models fails when imported: AttributeError"),
        ("transformers:nonsense", "transformers cannot make its configuration: ValueError"),
    ],
)
def test_mistakes_are_named(mine, name, message):
    with pytest.raises(ArgumentError) as error:
        find_workload(name)
    assert message in str(error.value)


@pytest.mark.parametrize("name", ["mlp", "autoencoder"])
def test_a_batch_larger_than_the_data_is_refused_and_the_largest_is_taken(name):
    make = WORKLOADS[name].make_data
    with pytest.raises(ArgumentError, match="--batch=1798: there are only 1,797 samples"):
        make(1798, torch.Generator())
    assert [len(x) for x, _ in make(1797, torch.Generator())] == [1797]


def test_the_example_in_the_docs_is_a_workload_that_trains():
    page = (Path(__file__).parents[2] / "docs" / "compare.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0]
    made: dict = {}
    exec(compile(code, "docs/compare.md", "exec"), made)
    workload = made["make"]()
    x, y = workload.make_data(workload.default_batch, torch.Generator())[0]
    assert len(x) == workload.default_batch
    workload.loss(workload.make_model()(x), y).backward()


def test_the_rates_in_the_docs_are_those_that_are_used():
    page = (Path(__file__).parents[2] / "docs" / "compare.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    names = rows[0][1:]
    assert sorted(names) == sorted(LEARNING_RATES)
    table = {row[0].strip("`"): row[1:] for row in rows[2:6]}
    assert dict(zip(names, map(float, table.pop("usual")), strict=True)) == LEARNING_RATES
    for model, cells in table.items():
        own = {name: float(cell) for name, cell in zip(names, cells, strict=True) if cell != "usual"}
        assert own == WORKLOADS[model].learning_rates
    assert {name for name, workload in WORKLOADS.items() if workload.learning_rates} == set(table)
