"""Over which ranks an optimizer averages what gradients do not carry."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from gradweave._compat.distributed import active_ddp, joins_uneven_inputs
from gradweave._runtime.claims import pipeline_part
from gradweave._runtime.replicas import ReplicaError, Replicas, settings_of
from gradweave.errors import ArgumentError, GradweaveError

DEFAULT = "default"
"""The ranks that average gradients, as far as they are known: DistributedDataParallel's, or all there are."""


class Ranks:
    """The ranks that train one model together, as an optimizer sees them; what they are is decided in each step.

    Not when the optimizer is made: frameworks wrap the model later, and a script may start the ranks later.

    Args:
        model: The optimizer's, which may be wrapped already.
        process_group: The user's choice: a group, None for no averaging, or :data:`DEFAULT`.

    Attributes:
        wrapper: The DistributedDataParallel that has the model, as far as it was seen.
    """

    def __init__(self, model: nn.Module, process_group: Any) -> None:
        if isinstance(process_group, str) and process_group != DEFAULT:
            raise ArgumentError("process_group", process_group, "give a process group, None, or leave it out")
        if process_group is not None and not isinstance(process_group, str):
            _check_member(process_group)
        self._given = process_group
        self._is_part = pipeline_part(model) is not None
        self._lent: Any = None
        self._lender: str | None = None
        self.wrapper: Any = model if isinstance(model, nn.parallel.DistributedDataParallel) else None
        self._seen: dict[int, Any] = {}
        self._checked: set[int] = set()

    @property
    def are_given(self) -> bool:
        """Whether the user has said which ranks, or none."""
        return not isinstance(self._given, str)

    @property
    def lender(self) -> str | None:
        """The technique that has said which ranks, and vouches that these have the same weights; None if none has."""
        return self._lender

    def lend(self, group: Any, *, lender: str) -> None:
        """Has another technique say over which ranks gradients are averaged: no others may be averaged over.

        Args:
            group: Those ranks; None for none besides this one.
            lender: Whose word it is, for messages.

        Raises:
            ArgumentError: If the user has given other ranks, or the model is under a DistributedDataParallel of others.
        """
        wanted = _members(group)
        if self._lender is not None:
            raise ArgumentError("optimizer", "Eva", f"averages over the ranks of {self._lender} already")
        if self.are_given and _members(self._given) != wanted:
            raise ArgumentError(
                "process_group",
                _members(self._given),
                f"is not the group that {lender} averages gradients over, {wanted}; leave it out",
            )
        self._lent, self._lender = group, lender

    def take_back(self) -> None:
        """Ends what :meth:`lend` began."""
        self._lent = self._lender = None

    def look(self) -> None:
        """Takes note of the DistributedDataParallel that a forward is running in; called by layers' hooks."""
        wrapper = active_ddp()
        if wrapper is not None:
            self._seen[id(wrapper.process_group)] = wrapper

    def group(self) -> Any:
        """The group to average over in this step; None for none."""
        if self._lender is not None:
            return self._lent
        if self.are_given:
            self._check_given()
            return self._given
        if self._is_part or not (dist.is_available() and dist.is_initialized()):
            return None  # other ranks of a pipeline have other layers
        self._find_wrapper()
        if self.wrapper is not None:
            if joins_uneven_inputs(self.wrapper):
                raise GradweaveError(
                    "averages vectors over ranks in each step, and under DistributedDataParallel.join() ranks end at "
                    "different steps; give all ranks the same number of batches"
                )
            return self.wrapper.process_group
        return dist.group.WORLD if dist.get_world_size() > 1 else None

    def _check_given(self) -> None:
        """Raises where gradients are averaged over ranks that the user has left out: their weights would part."""
        wrappers = [*self._seen.values(), *([] if self.wrapper is None else [self.wrapper])]
        for group in {id(wrapper.process_group): wrapper.process_group for wrapper in wrappers}.values():
            if id(group) not in self._checked and {*_members(group)} - {*_members(self._given)}:
                raise ArgumentError(
                    "process_group",
                    None if self._given is None else _members(self._given),
                    f"DistributedDataParallel averages gradients over ranks {_members(group)}, whose weights would "
                    "differ with vectors of their own; leave it out, or wrap the model over the same ranks",
                )
            self._checked.add(id(group))
        self._seen.clear()

    def _find_wrapper(self) -> None:
        """Of what forwards since the last step have run in."""
        if len(self._seen) > 1:
            raise GradweaveError(
                "parts of the model are under DistributedDataParallel of different ranks, and vectors are averaged "
                "over one group; make an optimizer for each part, with its process_group="
            )
        for wrapper in self._seen.values():
            self.wrapper = wrapper
        self._seen.clear()


class Alike:
    """Sees to it, in the first steps and once in a while, that the ranks that are averaged over train one model.

    Args:
        of: Whose ranks, for messages.
        model: Whose parameters have names.
    """

    def __init__(self, of: str, model: nn.Module) -> None:
        self._of = of
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._group: Any = None
        self._replicas: Replicas | None = None
        self._sizes: list[int] = []
        self._compared: list[tuple[str, torch.Tensor]] = []
        self._optimizer: Optimizer | None = None

    def check(
        self, group: Any, params: Iterable[torch.Tensor], message: list[torch.Tensor], optimizer: Optimizer
    ) -> None:
        """Raises on all ranks, before anything has changed, if they have other weights or other messages to average.

        Args:
            group: The ranks.
            params: What is trained.
            message: What is to be averaged: as long on all ranks, or they would mix it up.
            optimizer: Whose settings may be the cause.
        """
        sizes = [tensor.numel() for tensor in message]
        if self._replicas is None or group is not self._group:
            self._replicas = Replicas(lambda: self._compared, group, of=self._of, facts=self._facts)
            self._group, self._sizes = group, sizes
        self._compared = [("the sizes of vectors", torch.tensor(sizes, device=message[0].device))]
        self._compared += [(self._names.get(id(p), f"parameter {number}"), p) for number, p in enumerate(params)]
        self._optimizer = optimizer
        try:
            if sizes != self._sizes:
                self._replicas.check("since layers were added")
            self._replicas.check_now_and_then()
        except ReplicaError as error:
            raise ReplicaError(
                f"{error}. Vectors are averaged over these ranks: if each trains a model of its own, give "
                "process_group=None; if each has a part of one, or some train together, the group of those that have "
                "the same weights"
            ) from None
        finally:
            self._sizes = sizes
            self._compared = []
            self._optimizer = None

    def _facts(self) -> dict[str, str]:
        return {} if self._optimizer is None else settings_of(self._optimizer)


def _members(group: Any) -> list[int]:
    """The ranks of a group; this one alone of none."""
    if not (dist.is_available() and dist.is_initialized()):
        return [0]
    return [dist.get_rank()] if group is None else sorted(dist.get_process_group_ranks(group))


def _check_member(group: Any) -> None:
    if not (dist.is_available() and dist.is_initialized()):
        raise ArgumentError("process_group", group, "call torch.distributed.init_process_group() first")
    if group == dist.GroupMember.NON_GROUP_MEMBER or dist.get_rank(group) < 0:
        raise ArgumentError("process_group", group, "this rank is not in it; give each rank a group of its own")
