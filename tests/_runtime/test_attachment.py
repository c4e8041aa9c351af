"""Everything that attaches has the same verbs."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import gradweave
from gradweave._runtime.attachment import AccumulatingAttachment, Attachment


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


ATTACHMENTS = {
    "fuse": lambda model: gradweave.fuse(model, sgd(model), "forward"),
    "fuse auto": lambda model: gradweave.fuse(model, sgd(model)),
    "reorder": lambda model: gradweave.reorder(model, "side_stream"),
    "DASO": lambda model: gradweave.DASO(model, sgd(model)),
    "DataParallel": lambda model: gradweave.DataParallel(model, sgd(model)),
    "Pipeline": lambda model: gradweave.Pipeline(model, functional.mse_loss, microbatches=2, policy="gpipe"),
    "compile": lambda model: gradweave.compile(model, lambda m, x: m(x).sum(), sgd(model), lower="replay"),
    "Eva": lambda model: gradweave.Eva(model, lr=0.1),
}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", ATTACHMENTS)
def test_it_explains_itself_and_lets_go_at_the_end_of_a_context(name, model):
    before = [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()]
    attachment = ATTACHMENTS[name](model)
    assert isinstance(attachment, Attachment)
    assert attachment.is_attached
    assert attachment.explain()
    with attachment as itself:
        assert itself is attachment
    assert not attachment.is_attached
    assert "detached" in attachment.explain()
    attachment.detach()
    assert [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()] == before


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", ["fuse", "fuse auto", "DASO", "DataParallel", "compile"])
def test_micro_batches_have_one_context_under_both_names(name, model):
    with ATTACHMENTS[name](model) as attachment:
        assert isinstance(attachment, AccumulatingAttachment)
        for context in (attachment.no_update, attachment.no_sync):
            with context():
                pass
