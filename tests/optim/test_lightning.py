"""The family in Lightning: what a loop of one's own gives, with clipping, loss scales, and on two ranks."""

import socket

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision

from gradweave.optim import Eva, EvaF, EvaS
from optim.lightning_runs import CLIP, by_hand, in_lightning
from ranks import run_ranks

FAMILY = [Eva, EvaF, EvaS]


def scaler():
    return torch.amp.GradScaler("cpu", init_scale=2.0**8)


@pytest.mark.parametrize("cls", FAMILY)
def test_clipping_in_mixed_precision(cls, tmp_path):
    found = in_lightning(cls, tmp_path, precision="bf16-mixed", gradient_clip_val=CLIP)
    assert torch.equal(found, by_hand(cls, dtype=torch.bfloat16))


@pytest.mark.parametrize("clip", [CLIP, 0])
def test_clipping_under_a_loss_scale(clip, tmp_path):
    precision = MixedPrecision("16-mixed", "cpu", scaler=scaler())
    found = in_lightning(Eva, tmp_path, plugins=[precision], gradient_clip_val=clip or None)
    assert torch.equal(found, by_hand(Eva, dtype=torch.half, scaler=scaler(), clip=clip))


def test_only_a_scaler_is_told_that_steps_take_off_its_scale(tmp_path):
    net = torch.nn.Linear(6, 16)
    optimizer = Eva(net)
    assert not optimizer._step_supports_amp_scaling
    seen = []
    taking = optimizer.step
    optimizer.step = lambda: (seen.append(optimizer.grad_scale), taking())
    one = scaler()
    one.scale(net(torch.ones(2, 6)).sum()).backward()
    one.step(optimizer)
    assert seen == [2.0**8]


WORKER = """
import os, sys
rank, store = int(sys.argv[1]), sys.argv[2]
os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
os.environ |= {"GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[3], "TORCHELASTIC_RUN_ID": "1"}
import torch
from gradweave.optim import Eva, EvaF
from optim.lightning_runs import CLIP, in_lightning
from ranks import agree_and_leave

ends = []
for cls in (Eva, EvaF):
    found = in_lightning(cls, os.path.dirname(store), rank, strategy="ddp", devices=2, gradient_clip_val=CLIP)
    ends.append(found)
agree_and_leave([torch.cat(ends)])
"""


def test_two_ranks_have_the_same_weights(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    run_ranks(WORKER, tmp_path / "store", str(port))
