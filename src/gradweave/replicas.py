"""What must hold wherever ranks train replicas of a model: nothing else averages, and weights are equal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradweave.compat.distributed import active_ddp, ddp_parameters, is_distributed_tensor, is_managed_by_fsdp
from gradweave.compat.eager import no_torch_function
from gradweave.errors import GradweaveError
from gradweave.module_hook import ModuleHook

LONGEST_PAUSE = 512
"""Checks are made at rounds 0, 1, 2, 4, 8 and so on, and from here on at each multiple: each reads all weights."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROW = 1021
"""Words are summed up in columns of so many, which weigh differently: two that change places are noticed."""
_ODD = -7046029254386353131
"""An odd factor without a pattern, which wraps around in 64 bits."""


_UNKNOWN_CAUSE = (
    "the optimizer's update is not the same on all ranks (noise, or statistics of its own that are not averaged), or "
    "weights were loaded or changed on some ranks only"
)


class ReplicaError(GradweaveError):
    """Replicas are not what they should be: their weights differ, or something else averages them too."""


# Something else that averages


@dataclass(frozen=True)
class Averager:
    """What averages or shards a model's gradients besides whoever asks.

    Attributes:
        name: Its class, as its user knows it.
        group: Over whose ranks; None where it does not say.
    """

    name: str
    group: Any = None


def averager_around(model: nn.Module) -> Averager | None:
    """Return the wrapper inside of whose forward this is called, if it averages a parameter of the model.

    That a DistributedDataParallel was made of the model does no harm: it averages behind its own forwards only.
    """
    wrapper = active_ddp()
    if wrapper is None or not torch.is_grad_enabled():
        return None
    averaged = {id(p) for p in ddp_parameters(wrapper)}
    with no_torch_function():
        meets = any(id(p) in averaged for p in model.parameters())
    return Averager(type(wrapper).__name__, wrapper.process_group) if meets else None


def averager_inside(model: nn.Module) -> Averager | None:
    """Return what shards a model, or averages a part of it by itself."""
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
    """Looks from inside of a model's forwards for something else that averages it, before it has.

    In the first forwards every module looks, since a wrapper may go past the model's own forward, as a Lightning
    module does; later only the model itself.

    Args:
        model: Whose forwards.
        refuse: Called with what was found; raises, unless it is right.
        forwards: Of the model's modules, how many times each looks.
    """

    def __init__(self, model: nn.Module, refuse: Callable[[Averager], None], *, forwards: int = 3) -> None:
        self._model = model
        self._refuse = refuse
        self._forwards = forwards
        self._hooks = {id(model): model.register_forward_pre_hook(ModuleHook(self._enters), prepend=True)}
        self._left: dict[int, int] = {}
        for module in model.modules():
            if module is not model and next(module.parameters(recurse=False), None) is not None:
                self._left[id(module)] = forwards
                self._hooks[id(module)] = module.register_forward_pre_hook(ModuleHook(self._enters_part))

    def look(self) -> None:
        """Looks for what is around the code that calls this."""
        found = averager_around(self._model)
        if found is not None:
            self._refuse(found)

    def look_inside(self) -> None:
        """Looks for what has been made of the model and its parts."""
        found = averager_inside(self._model)
        if found is not None:
            self._refuse(found)

    def close(self) -> None:
        """Looks no more."""
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


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """Return 64 bits that tell apart tensors which differ in any bit, of whatever type; stays on the device."""
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
    """Compares the weights of all ranks of a group: one reduction per parameter, and one message of four numbers.

    All ranks must come here at the same points of their program, between the same messages of the group, also where
    it turns out that nothing is due: count what they do together, such as gradients that were averaged, and not
    what each does by itself.

    Args:
        named: The parameters to compare, by name, as they are when asked; the same on all ranks.
        group: Whose ranks; None for all of them.
        of: What has them, for messages.
        facts: What else should be the same on all ranks and may be the cause where weights differ, by name.
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

    def check_now_and_then(self) -> None:
        """Counts a round and, in the first and once in a while, checks; call it before weights change in it."""
        now = self._rounds
        self._rounds += 1
        if (now & (now - 1)) == 0 or now % LONGEST_PAUSE == 0:
            self.check(f"before update {now + 1}")

    @torch.no_grad()
    def check(self, when: str) -> None:
        """Raise the same error on all ranks if their weights differ in a single bit."""
        named = list(self._named())
        if not named:
            return
        device = named[0][1].device
        own = torch.stack([digest(p).to(device) for _, p in named])
        numbers = 2 * torch.arange(len(named), device=device) + 1
        mixed = torch.stack([(own * numbers * _ODD).sum(), numbers.sum()])
        largest = torch.cat([mixed, ~mixed])
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
        top, count, bottom, fewest = largest.tolist()
        if (top, count) != (~bottom, ~fewest):
            self._tell(when, {name: int(bits) for (name, _), bits in zip(named, own.tolist(), strict=True)})

    def _tell(self, when: str, own: dict[str, int]) -> None:
        """Finds out what differs, and raises."""
        everyone: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(everyone, (own, dict(self._facts())), group=self._group)
        ranks = dist.get_process_group_ranks(self._group)
        first, facts = everyone[0]
        apart = list(_apart([weights for weights, _ in everyone]))
        others = [rank for rank, (weights, _) in zip(ranks, everyone, strict=True) if weights != first]
        what = f"{len(apart)} of {len(first)} parameters" + (f", {apart[0]!r} the first," if apart else "")
        causes = [
            f"{name} is {facts.get(name)} on rank {ranks[0]} and {theirs.get(name)} on rank {rank}"
            for rank, (_, theirs) in zip(ranks, everyone, strict=True)
            for name in _apart([facts, theirs])
        ]
        reason = causes[0] if causes else _UNKNOWN_CAUSE
        raise ReplicaError(
            f"{self._of}: weights differ between ranks {when}: {what} on ranks {_listed(others)} from those on rank "
            f"{ranks[0]}; {reason}; do the same on all ranks, and start again from a checkpoint"
        )


def _apart(told: list[dict[str, Any]]) -> Iterator[str]:
    """The names of what is not the same everywhere, in the order of the first."""
    for name in {name: None for one in told for name in one}:
        if any(name not in one or one[name] != told[0].get(name) for one in told):
            yield name


def _listed(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown} and {len(ranks) - 8} more" if len(ranks) > 8 else shown
