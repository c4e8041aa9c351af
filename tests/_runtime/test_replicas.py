import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from gradweave._runtime.replicas import Lookout, ReplicaError, Replicas, digest
from worlds import World

TYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128, torch.int8,
    torch.int64, torch.uint8, torch.float8_e4m3fn,
]  # fmt: skip


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    world = World(tmp_path_factory.mktemp("two"), 2, 1)
    yield world
    world.close()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (5,), (1021,), (7, 3, 5, 25)], ids=str)
def test_a_digest_tells_a_single_bit_whatever_the_type(dtype, shape):
    tensor = torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert digest(tensor) == digest(tensor.clone())
    for place in (0, tensor.numel() - 1):
        changed = tensor.clone()
        words = (torch.view_as_real(changed) if changed.is_complex() else changed).view(-1).view(torch.uint8)
        words[place * tensor.element_size()] ^= 1
        assert digest(changed) != digest(tensor)


def test_a_digest_does_not_depend_on_the_layout_and_does_on_the_order():
    tensor = torch.randn(2, 3, 40, 50)
    assert digest(tensor) == digest(tensor.to(memory_format=torch.channels_last))
    assert digest(tensor) != digest(tensor.flip(0))
    assert digest(torch.tensor([1.0, -1.0])) != digest(torch.tensor([-1.0, 1.0]))
    assert digest(torch.zeros(0)) == digest(torch.zeros(0))


def compares(*, change, round_of_it):
    """Count rounds; before one the second rank changes something. Return the round of the error, and the error."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 40), nn.BatchNorm1d(40), nn.Linear(40, 2).bfloat16())
    facts = {"lr of group 0": "0.1"}
    replicas = Replicas(model.named_parameters, None, of="Sequential", facts=lambda: facts)
    for number in range(9):
        if number == round_of_it and dist.get_rank() == 1:
            if change == "a weight":
                model[2].weight.data[1, 7] += 1
            if change == "a setting":
                model[0].weight.data.mul_(2)
                facts["lr of group 0"] = "0.2"
            if change == "a layer":
                model.append(nn.Linear(2, 2))
        try:
            replicas.check_now_and_then()
        except ReplicaError as error:
            return number, str(error)
    return 9, ""


def test_weights_that_are_equal_are_no_error(two):
    assert two.run(compares, change="nothing", round_of_it=0) == {0: (9, ""), 1: (9, "")}


@pytest.mark.parametrize(
    ("change", "at", "noticed", "said"),
    [
        ("a weight", 0, 0, "before update 1, weights differ between ranks: 1 of 6 parameters, '2.weight' the first,"),
        ("a weight", 1, 1, "the optimizer's update is not the same on all ranks"),
        ("a weight", 5, 8, "weights were loaded or changed on some ranks only"),
        ("a setting", 2, 2, "lr of group 0 is 0.1 on rank 0 and 0.2 on rank 1"),
        ("a layer", 1, 1, "'3.weight' the first"),
    ],
)
def test_weights_that_differ_are_the_same_error_on_all_ranks(two, change, at, noticed, said):
    answers = two.run(compares, change=change, round_of_it=at)
    assert answers[0] == answers[1]
    assert answers[0][0] == noticed
    assert said in answers[0][1]


def looks(*, wrapper):
    """Run a forward through a wrapper around a model with a lookout; return what is found."""
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 3)), nn.Linear(3, 3))
    apart = nn.Linear(3, 3)
    found = []
    around = {}
    if wrapper == "DDP before":
        around = {"it": DistributedDataParallel(model)}
    Lookout(model, lambda averager: found.append(averager.name))
    if wrapper == "DDP":
        around["it"] = DistributedDataParallel(model)
    if wrapper == "DDP of a part":
        model[0] = DistributedDataParallel(model[0])
    if wrapper == "DDP that bypasses forward":
        around["it"] = DistributedDataParallel(Bypass(model))
    if wrapper == "DDP that ignores it":
        beside = nn.ModuleList([model, apart])
        beside.forward = lambda x: model(x) + apart(x)
        beside._ddp_params_and_buffers_to_ignore = [name for name, _ in beside.named_parameters() if name[0] == "0"]
        around["it"] = DistributedDataParallel(beside)
    if wrapper == "DDP that is not used":
        DistributedDataParallel(model)
    if wrapper == "FSDP2":
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    if wrapper == "FSDP":
        around["it"] = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    if wrapper == "replicate":
        from torch.distributed._composable.replicate import replicate

        replicate(model)
    if wrapper == "a copy":
        around["it"] = DistributedDataParallel(copy.deepcopy(model))
    if wrapper == "evaluation":
        around["it"] = DistributedDataParallel(model)
        with torch.no_grad():
            around["it"](torch.ones(1, 3))
        dist.barrier()
        return found
    made = around.get("it", model)(torch.ones(1, 3))
    made.sum().backward()
    dist.barrier()
    return found


class Bypass(nn.Module):
    """Calls parts of the model and not the model itself, as a Lightning module's training_step may."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model[1](self.model[0](x))


@pytest.mark.parametrize(
    ("wrapper", "name"),
    [
        ("DDP", "DistributedDataParallel"), ("DDP before", "DistributedDataParallel"),
        ("DDP of a part", "DistributedDataParallel"), ("DDP that bypasses forward", "DistributedDataParallel"),
        ("FSDP2", "FSDP"), ("FSDP", "FSDP"), ("replicate", "DistributedDataParallel"),
    ],
)  # fmt: skip
def test_what_else_averages_is_found_in_the_first_forward(two, wrapper, name):
    for found in two.run(looks, wrapper=wrapper).values():
        assert found
        assert set(found) == {name}


@pytest.mark.parametrize("wrapper", ["nothing", "DDP that is not used", "DDP that ignores it", "a copy", "evaluation"])
def test_what_does_not_average_the_model_is_no_alarm(two, wrapper):
    assert two.run(looks, wrapper=wrapper) == {0: [], 1: []}
