"""With other wrappers, in every order: the results of DistributedDataParallel, or an error before a weight changes."""

import pytest
import torch

from parallel.data_parallel.frameworks import by_ddp, in_accelerate, in_fabric, in_lightning, in_torch
from worlds import World


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    world = World(tmp_path_factory.mktemp("ranks"), 2, 1)
    yield world
    world.close()


@pytest.fixture(scope="module")
def expected(ranks):
    return ranks.run(by_ddp)[0]


COMPANY = "averages or shards the gradients of this model too"
AT_ONCE = "averages gradients by itself"
SHARDED = "FSDP"
EQUAL = None
CASES = [
    (in_torch, {"order": "DDP around the wrapper"}, COMPANY),
    (in_torch, {"order": "DDP around a module that has the wrapper"}, COMPANY),
    (in_torch, {"order": "the wrapper around DDP"}, AT_ONCE),
    (in_torch, {"order": "DDP around the model, before the wrapper"}, COMPANY),
    (in_torch, {"order": "DDP around the model, after the wrapper"}, COMPANY),
    (in_torch, {"order": "DDP that is not used"}, EQUAL),
    (in_torch, {"order": "fully_shard of the wrapper"}, COMPANY),
    (in_torch, {"order": "fully_shard of the model"}, COMPANY),
    (in_torch, {"order": "fully_shard of a layer"}, COMPANY),
    (in_torch, {"order": "the wrapper around fully_shard"}, SHARDED),
    (in_torch, {"order": "FSDP around the wrapper"}, COMPANY),
    (in_torch, {"order": "the wrapper around FSDP"}, SHARDED),
    (in_torch, {"order": "torch.compile of the wrapper, in_order"}, EQUAL),
    (in_torch, {"order": "torch.compile of the wrapper, no_barrier"}, EQUAL),
    (in_torch, {"order": "torch.compile of the wrapper, reverse_first_k"}, EQUAL),
    (in_torch, {"order": "torch.compile of the wrapper, auto"}, EQUAL),
    (in_torch, {"order": "torch.compile of the model, after the wrapper"}, EQUAL),
    (in_accelerate, {"order": "prepare(optimizer), then the wrapper"}, EQUAL),
    (in_accelerate, {"order": "the wrapper, then prepare(optimizer)"}, EQUAL),
    (in_accelerate, {"order": "the wrapper, then prepare(wrapper)"}, COMPANY),
    (in_accelerate, {"order": "the wrapper, then prepare(model)"}, COMPANY),
    (in_accelerate, {"order": "prepare(model), then the wrapper around that"}, AT_ONCE),
    (in_accelerate, {"order": "prepare(model), then the wrapper around the model"}, EQUAL),
    (in_accelerate, {"order": "prepare(model), then the wrapper, which is not used"}, COMPANY),
    (in_lightning, {"order": "in its constructor", "strategy": "ddp"}, COMPANY),
    (in_lightning, {"order": "in configure_optimizers", "strategy": "ddp"}, COMPANY),
    (in_lightning, {"order": "in on_train_start", "strategy": "ddp"}, COMPANY),
    (in_lightning, {"order": "in its constructor", "strategy": "auto"}, EQUAL),
    (in_lightning, {"order": "in configure_optimizers", "strategy": "auto"}, EQUAL),
    (in_lightning, {"order": "in on_train_start", "strategy": "auto"}, EQUAL),
    (in_fabric, {"order": "setup(wrapper)"}, COMPANY),
    (in_fabric, {"order": "setup(model), then the wrapper around that"}, AT_ONCE),
    (in_fabric, {"order": "setup(model), then the wrapper around the model"}, EQUAL),
]


@pytest.mark.parametrize(("scenario", "arguments", "said"), CASES, ids=lambda o: getattr(o, "__name__", str(o)[:60]))
def test_in_every_order(ranks, expected, scenario, arguments, said):
    for answer in ranks.run(scenario, **arguments).values():
        if said is EQUAL:
            assert isinstance(answer, torch.Tensor), answer
            assert torch.equal(answer, expected)
        else:
            assert isinstance(answer, str)
            assert said in answer
            assert not answer.startswith("too late")
