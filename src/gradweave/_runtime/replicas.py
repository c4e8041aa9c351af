"""Invariants of ranks that train replicas of a model: nothing else averages gradients, and weights are equal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from gradweave._compat.distributed import active_ddp, ddp_parameters, is_distributed_tensor, is_managed_by_fsdp
from gradweave._compat.functions import no_torch_function
from gradweave._compat.modules import inside_of_compiled
from gradweave._runtime.module_hook import ModuleHook
from gradweave.errors import GradweaveError

LONGEST_PAUSE = 512
"""Comparisons are made in rounds 0, 1, 2, 4, 8 and so on, and from here on at each multiple: each reads all weights."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROW = 1021
"""Words are summed up in this number of columns of different weight, so that swapped words are noticed."""
_ODD = -7046029254386353131
"""An odd factor without a pattern: multiplication by it modulo 2**64 loses no bits."""


_UNKNOWN_CAUSE = (
    "the optimizer's update is not the same on all ranks (noise, or statistics of its own that are not averaged), or "
    "weights were loaded or changed on some ranks only"
)


class ReplicaError(GradweaveError):
    """Replicas are not equal: their weights differ, or something else averages them too."""


# Something else that averages


@dataclass(frozen=True)
class Averager:
    """A wrapper that averages or shards a model's gradients besides the technique that asks.

    Attributes:
        name: Its class, as its user knows it.
        group: The ranks that it averages over; None if they are not known.
    """

    name: str
    group: Any = None


def averager_around(model: nn.Module) -> Averager | None:
    """Return the wrapper inside whose forward this is called, if it averages a parameter of the model.

    A DistributedDataParallel that was only constructed does no harm: it averages after its own forwards only.
    """
    wrapper = active_ddp()
    if wrapper is None or not torch.is_grad_enabled():
        return None
    averaged = {id(p) for p in ddp_parameters(wrapper)}
    with no_torch_function():
        meets = any(id(p) in averaged for p in model.parameters())
    return Averager(type(wrapper).__name__, wrapper.process_group) if meets else None


def averager_inside(model: nn.Module) -> Averager | None:
    """Return the wrapper that shards a model, or averages a part of it."""
    for module in model.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            return Averager(type(module).__name__, module.process_group)
        if isinstance(module, nn.DataParallel):
            return Averager("torch.nn.DataParallel")
        if is_managed_by_fsdp(module):
            return Averager("FSDP")
    with no_torch_function():
        sharded = any(is_distributed_tensor(p) for p in model.parameters())
    return Averager("FSDP, or another technique that makes parameters distributed tensors") if sharded else None


class Lookout:
    """Lookout in a model's forwards for something else that averages it, before it does.

    In the first forwards every module looks, since a wrapper may bypass the model's own forward, as a Lightning module
    does; later only the model itself does.

    Args:
        model: The model.
        refuse: Called with the averager that was found; raises unless it is allowed.
        forwards: Number of forwards in which each of the model's modules looks.
    """

    def __init__(self, model: nn.Module, refuse: Callable[[Averager], None], *, forwards: int = 3) -> None:
        # Dynamo cannot trace hooks that hold on to what torch.compile() has returned.
        model = self._model = inside_of_compiled(model)
        self._refuse = refuse
        self._forwards = forwards
        self._hooks: dict[int, Any] = {}
        self._left: dict[int, int] = {}
        try:
            self._hooks[id(model)] = model.register_forward_pre_hook(ModuleHook(self._enters), prepend=True)
            for module in model.modules():
                scripted = isinstance(module, torch.jit.ScriptModule)  # takes no hooks, and has no wrapper inside
                if module is not model and not scripted and next(module.parameters(recurse=False), None) is not None:
                    self._left[id(module)] = forwards
                    self._hooks[id(module)] = module.register_forward_pre_hook(ModuleHook(self._enters_part))
        except BaseException:
            self.close()
            raise

    def look(self) -> None:
        """Look for a wrapper around the caller."""
        found = averager_around(self._model)
        if found is not None:
            self._refuse(found)

    def look_inside(self) -> None:
        """Look for wrappers of the model's parts."""
        found = averager_inside(self._model)
        if found is not None:
            self._refuse(found)

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {}

    def _enters(self, *_: Any) -> None:
        self.look()
        if self._forwards > 0 and torch.is_grad_enabled():
            self._forwards -= 1
            self.look_inside()

    def _enters_part(self, module: nn.Module, _: Any) -> None:
        self.look()
        if torch.is_grad_enabled():
            self._left[id(module)] -= 1
            if self._left[id(module)] <= 0 and id(module) in self._hooks:
                self._hooks.pop(id(module)).remove()


# Weights that are equal


def is_due(number: int) -> bool:
    """Return whether to compare weights in a round, counted from 0: often at first, then now and then."""
    return number & (number - 1) == 0 or number % LONGEST_PAUSE == 0


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """Return 64 bits, on the tensor's device, that almost certainly differ if any bit of the tensor does."""
    flat = tensor.detach()
    flat = (torch.view_as_real(flat.resolve_conj()) if flat.is_complex() else flat).reshape(-1)
    words = flat.view(_WORDS[flat.element_size()])
    weights = (2 * torch.arange(_ROW, device=words.device) + 1) * _ODD
    whole = words.numel() // _ROW * _ROW
    rest = (words[whole:].to(torch.int64) * weights[: words.numel() - whole]).sum()
    if not whole:
        return rest
    columns = words[:whole].view(-1, _ROW).sum(0, dtype=torch.int64)
    return rest + (columns * weights).sum()


class Replicas:
    """Comparison of the weights of a group's ranks: one reduction per parameter, and one message of a few numbers.

    All ranks must make a comparison at the same point of their program, between the same messages of the group: count
    events that they share, such as averages of gradients, not those of each rank.

    Args:
        named: Return the parameters to compare, with names that are the same on all ranks.
        group: The ranks; None for all.
        of: Owner of the weights, for messages.
        facts: Return settings that should be the same on all ranks, by name: possible causes of a difference.
    """

    def __init__(
        self,
        named: Callable[[], Iterable[tuple[str, torch.Tensor]]],
        group: dist.ProcessGroup | None,
        *,
        of: str,
        facts: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self._named = named
        self._group = group
        self._of = of
        self._facts = facts
        self._rounds = 0
        self._names: list[str] = []
        self._digests: torch.Tensor | None = None

    @torch.no_grad()
    def take(self) -> None:
        """Keep digests of the present weights for the next comparison, without waiting for a GPU."""
        named = list(self._named())
        self._names = [name for name, _ in named]
        self._digests = None
        if named:
            device = named[0][1].device
            self._digests = torch.stack([digest(p).to(device) for _, p in named])

    def compare(self, when: str, numbers: Mapping[str, int] | None = None) -> None:
        """Raise ReplicaError on all ranks if weights or numbers differ.

        Args:
            when: Point in the training, for the message.
            numbers: Numbers by name that must be the same on all ranks.
        """
        numbers = numbers or {}
        given = torch.tensor(list(numbers.values()), dtype=torch.int64)
        if self._digests is None:
            device = next((p.device for _, p in self._named()), given.device)
            weights = torch.zeros(2, dtype=torch.int64, device=device)
        else:
            factors = 2 * torch.arange(len(self._names), device=self._digests.device) + 1
            weights = torch.stack([(self._digests * factors * _ODD).sum(), factors.sum()])
        mine = torch.cat([weights, given.to(weights.device)])
        # The maximum of ~x is ~ of the minimum: one reduction yields both, and ranks are equal if these are.
        most = torch.cat([mine, ~mine])
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self._group)
        most, least = most.cpu().chunk(2)
        if not torch.equal(most, ~least):
            self._tell(when, numbers)

    def check(self, when: str) -> None:
        """Compare the present weights."""
        self.take()
        self.compare(when)

    def check_now_and_then(self) -> None:
        """Count a round, and check the weights if it is due; call this before they change in the round."""
        now = self._rounds
        self._rounds += 1
        if is_due(now):
            self.check(f"before update {now + 1}")

    def _tell(self, when: str, numbers: Mapping[str, int]) -> None:
        """Find out what differs, and raise ReplicaError."""
        own = dict(zip(self._names, [] if self._digests is None else self._digests.tolist(), strict=True))
        everyone: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(everyone, (own, {**numbers, **self._facts()}), group=self._group)
        ranks = dist.get_process_group_ranks(self._group)
        first, facts = everyone[0]
        apart = list(_apart([weights for weights, _ in everyone]))
        others = [rank for rank, (weights, _) in zip(ranks, everyone, strict=True) if weights != first]
        causes = [
            f"{name} is {facts.get(name)} on rank {ranks[0]} and {theirs.get(name)} on rank {rank}"
            for rank, (_, theirs) in zip(ranks, everyone, strict=True)
            for name in _apart([facts, theirs])
        ]
        reason = causes[0] if causes else _UNKNOWN_CAUSE
        what = "ranks are apart"
        if apart:
            what = (
                f"weights differ between ranks: {len(apart)} of {len(first)} parameters, {apart[0]!r} the first, "
                f"on ranks {_listed(others)} from those on rank {ranks[0]}"
            )
        raise ReplicaError(
            f"{self._of}: {when}, {what}; {reason}; do the same on all ranks, and start again from a checkpoint"
        )


# What ranks begin with


def settings_of(optimizer: Optimizer) -> dict[str, str]:
    """Return an optimizer's class and the hyperparameters of its groups, by name, for comparison with other ranks'."""
    kind = type(optimizer)
    told = {"the optimizer": f"{kind.__module__}.{kind.__qualname__}"}
    for number, group in enumerate(optimizer.param_groups):
        told[f"the number of parameters in group {number}"] = str(len(group["params"]))
        for name, value in group.items():
            if name != "params" and (written := _written(value)) is not None:
                told[f"{name} of group {number}"] = written
    return told


def _written(value: Any) -> str | None:
    """Return a plain value as text; None for one whose text may differ although it is equal."""
    if isinstance(value, torch.Tensor):
        return str(value.tolist()) if value.numel() < _ROW else None
    if isinstance(value, (list, tuple)):
        parts = [_written(part) for part in value]
        return None if None in parts else str(parts)
    return str(value) if value is None or isinstance(value, (bool, int, float, str, torch.dtype)) else None


def _apart(told: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the names whose values are not all equal, in order of their first appearance."""
    for name in {name: None for one in told for name in one}:
        if any(name not in one or one[name] != told[0].get(name) for one in told):
            yield name


def _listed(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown} and {len(ranks) - 8} more" if len(ranks) > 8 else shown
