"""What two ranks do with Eva, from one launch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from gradweave import compile as compile_step
from gradweave import fuse
from gradweave._runtime.replicas import ReplicaError
from gradweave.errors import ArgumentError, GradweaveError
from gradweave.optim import Eva, EvaF, EvaS
from optim.models import loss_of, make_mlp, rows, train, weights
from ranks import agree_and_leave

DDP = nn.parallel.DistributedDataParallel
CAPTURED = [Eva, EvaF]


def own(rank, count=4):
    """A rank's batches, of another size on each."""
    return [x[:4] if rank else x[4:] for x in rows(count)]


def are_alike(tensor):
    everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, tensor)
    return all(torch.equal(everyone[0], other) for other in everyone)


def raised(kind, do):
    try:
        do()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def any_order(rank, made_before):
    """Made before the ranks were, before the wrapper, from what is inside of it, and from the wrapper."""
    for cls in CAPTURED:
        ends = []
        for order in ("before the ranks", "before the wrapper", "of the module", "of the wrapper", "named"):
            if order == "before the ranks":
                model, optimizer = made_before[cls]
                wrapper = DDP(model)
            elif order in ("before the wrapper", "named"):
                model = make_mlp()
                optimizer = cls(model, lr=0.02, **({"process_group": dist.group.WORLD} if order == "named" else {}))
                wrapper = DDP(model)
            else:
                model = make_mlp()
                wrapper = DDP(model)
                optimizer = cls(wrapper if order == "of the wrapper" else wrapper.module, lr=0.02)
            train(wrapper, optimizer, own(rank))
            ends.append(weights(model))
            assert are_alike(ends[-1]), (cls, order)
        assert all(torch.equal(ends[0], other) for other in ends), cls


def fused(rank):
    """Updates of forward-fusion come later, and vectors are averaged once in a step, whatever the other rank does."""
    for cls in CAPTURED:
        ends = []
        for attached, wrapped_first in (((), True), ((0, 1), True), ((0, 1), False), ((1,), True)):
            model = make_mlp()
            optimizer = cls(model, lr=0.02)
            wrapper = DDP(model) if wrapped_first else None
            fusion = fuse(wrapper or model, optimizer, "forward") if rank in attached else None
            train(wrapper or DDP(model), optimizer, own(rank))
            if fusion:
                fusion.detach()
            ends.append(weights(model))
            assert are_alike(ends[-1])
        assert all(torch.equal(ends[0], other) for other in ends), cls


def by_hand(rank):
    """Gradients averaged by the loop: all ranks count."""
    model = make_mlp()
    optimizer = Eva(model, lr=0.02)
    for x in own(rank):
        loss_of(model, x).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, dist.ReduceOp.AVG if dist.get_backend() == "nccl" else dist.ReduceOp.SUM)
            p.grad /= 2
        optimizer.step()
        optimizer.zero_grad()
    assert are_alike(weights(model))
    assert optimizer.ranks.group() is dist.group.WORLD


def a_model_of_ones_own(rank):
    """Refused on both ranks, before anything has changed, unless no group is asked for."""
    zeroth, first = dist.new_group([0]), dist.new_group([1])
    for cls in CAPTURED:
        model = make_mlp(seed=rank)
        before = weights(model)
        optimizer = cls(model, lr=0.02)
        message = raised(ReplicaError, lambda m=model, o=optimizer: train(m, o, own(rank)))
        for part in (cls.__name__, "before update 1", "process_group=None"):
            assert part in message, message
        assert torch.equal(weights(model), before)
        by_itself, other = make_mlp(seed=rank), make_mlp(seed=rank)
        train(by_itself, cls(by_itself, lr=0.02, process_group=[zeroth, first][rank]), own(rank))
        train(other, cls(other, lr=0.02, process_group=None), own(rank))
        assert torch.equal(weights(by_itself), weights(other))


def gradients_of_ones_own(rank):
    """Nobody averages gradients: seen in the second step."""
    model = make_mlp()
    assert "before update 2" in raised(ReplicaError, lambda: train(model, Eva(model, lr=0.02), own(rank)))


def a_wrapper_of_more_ranks(rank):
    """Vectors of one's own under a wrapper that averages: refused before anything has changed."""
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    for group in (None, alone):
        for wrapped_first in (True, False):
            model = make_mlp()
            trained = DDP(model) if wrapped_first else model
            optimizer = Eva(trained, lr=0.02, process_group=group)
            trained = trained if wrapped_first else DDP(model)
            before = weights(model)
            message = raised(ArgumentError, lambda m=trained, o=optimizer: train(m, o, own(rank)))
            assert "averages gradients over ranks [0, 1]" in message, message
            assert torch.equal(weights(model), before)


def other_settings(rank):
    """Named as the cause."""
    model = make_mlp()
    message = raised(ReplicaError, lambda: train(DDP(model), Eva(model, lr=0.02 * (1 + rank)), own(rank)))
    assert "lr of group 0 is 0.02 on rank 0 and 0.04 on rank 1" in message, message


def another_layer(rank):
    """A layer that one rank has frozen, when the optimizer is made: messages would be of different lengths."""
    model = make_mlp()
    if rank:
        model[2].requires_grad_(False)
    assert "sizes of vectors" in raised(ReplicaError, lambda: train(model, Eva(model, lr=0.02), own(rank)))


def a_wrapper_of_fewer_ranks(rank):
    """Its group counts, though the wrapper was made later."""
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    model, other = make_mlp(), make_mlp()
    optimizer = Eva(model, lr=0.02)
    train(DDP(model, process_group=alone), optimizer, own(rank))
    train(other, Eva(other, lr=0.02, process_group=None), own(rank))
    assert torch.equal(weights(model), weights(other))
    elsewhere = [dist.new_group([1]), dist.new_group([0])][rank]
    raised(ArgumentError, lambda: Eva(make_mlp(), process_group=elsewhere))


class Branches(nn.Module):
    """A layer that only the first rank uses."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second, self.head = nn.Linear(6, 16), nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.first(x) + self.second(x) if dist.get_rank() == 0 else self.second(x))


def odd_loops(rank):
    """Accumulation without messages, a layer that is not used everywhere, steps without any gradient."""
    for cls in CAPTURED:
        model = Branches()
        optimizer = cls(model, lr=0.02)
        wrapper = DDP(model, find_unused_parameters=True)
        for number, x in enumerate(own(rank, 6)):
            if number % 2 == 0:
                with wrapper.no_sync():
                    loss_of(wrapper, x).backward()
                continue
            loss_of(wrapper, x).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert are_alike(weights(model)), cls
        if rank == 0:
            loss_of(model, own(rank)[0]).backward()
            for p in model.parameters():
                p.grad.zero_()
        optimizer.step()  # the other rank has no gradient, and is not waited for in vain


def uneven_inputs(rank):
    model = make_mlp()
    wrapper = DDP(model)
    optimizer = Eva(model, lr=0.02)
    before = weights(model)
    with wrapper.join(throw_on_early_termination=False):
        loss_of(wrapper, own(rank)[0]).backward()
        assert "same number of batches" in raised(GradweaveError, optimizer.step)
    assert torch.equal(weights(model), before)


def compiled_steps(rank):
    """A compiled step without a mesh averages nothing: refused before it changes anything, or each rank for itself."""
    model, other = make_mlp(), make_mlp()
    before = weights(model)
    x = own(rank)[0]
    message = raised(GradweaveError, lambda: compile_step(model, loss_of, Eva(model), lower="replay")(x))
    assert "which compile() does with mesh= only" in message
    assert torch.equal(weights(model), before)
    compile_step(model, loss_of, Eva(model, process_group=None), lower="replay")(x)
    train(other, Eva(other, process_group=None), [x])
    assert torch.equal(weights(model), weights(other))


def lent(rank):
    """Another technique says over whom."""
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    model, other = make_mlp(seed=rank), make_mlp(seed=rank)
    optimizer = Eva(model, lr=0.02)
    optimizer.ranks.lend(alone, lender="DASO")
    train(model, optimizer, own(rank))
    train(other, Eva(other, lr=0.02, process_group=None), own(rank))
    assert torch.equal(weights(model), weights(other))
    optimizer.ranks.take_back()
    assert optimizer.ranks.group() is dist.group.WORLD
    raised(ArgumentError, lambda: Eva(make_mlp(), process_group=None).ranks.lend(dist.group.WORLD, lender="DASO"))
    Eva(make_mlp(), process_group=alone).ranks.lend(alone, lender="DASO")


def sharded_later(rank):
    """FSDP of the model or of a layer, after the optimizer was made: refused before anything has changed."""
    for cls in (*CAPTURED, EvaS):
        for whole in (True, False):
            model = make_mlp()
            optimizer = cls(model, lr=0.02)
            options = {"device_id": torch.device("cpu"), "use_orig_params": True}
            if whole:
                wrapper = FullyShardedDataParallel(model, **options)
            else:
                wrapper = model
                model[2] = FullyShardedDataParallel(model[2], **options)
            before = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
            message = raised(GradweaveError, lambda: train(wrapper, optimizer, own(rank)))  # noqa: B023
            assert "FSDP" in message or "weights differ between ranks" in message, message
            assert all(map(torch.equal, before, optimizer.param_groups[0]["params"]))


def run_all(rank, store):
    made_before = {}
    for cls in CAPTURED:
        model = make_mlp()
        made_before[cls] = model, cls(model, lr=0.02)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    any_order(rank, made_before)
    for scenario in (
        fused, by_hand, a_model_of_ones_own, gradients_of_ones_own, another_layer, a_wrapper_of_fewer_ranks,
        a_wrapper_of_more_ranks, other_settings, odd_loops,
        uneven_inputs, compiled_steps, lent, sharded_later,
    ):  # fmt: skip
        scenario(rank)
        dist.barrier()
    agree_and_leave([torch.zeros(1)])
