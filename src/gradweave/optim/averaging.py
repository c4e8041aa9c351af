"""Averaging of statistics over data-parallel ranks: which ranks they are, and whether these train one model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from gradweave._compat.distributed import active_ddp, finish_sum, joins_uneven_inputs, name_of_group, start_sum
from gradweave._compat.tracing import is_traced_to_operations
from gradweave._runtime.claims import pipeline_part
from gradweave._runtime.replicas import ReplicaError, Replicas, settings_of
from gradweave.errors import ArgumentError, GradweaveError, UnsupportedError
from gradweave.step_graph.nodes import phase

DEFAULT = "default"
"""The ranks that average gradients, as far as they are known: DistributedDataParallel's, or else all."""


class Ranks:
    """The ranks that train one model together, as known to its optimizer.

    They are determined in each step, not in the constructor: frameworks wrap the model later, and a script may start
    the ranks later.

    Args:
        model: The optimizer's model, which may be wrapped already.
        process_group: The user's choice: a group, None for no averaging, or :data:`DEFAULT`.

    Attributes:
        wrapper: The DistributedDataParallel that contains the model, as far as one was seen.
    """

    def __init__(self, model: nn.Module, process_group: dist.ProcessGroup | str | None) -> None:
        if isinstance(process_group, str) and process_group != DEFAULT:
            raise ArgumentError("process_group", process_group, "give a process group, None, or leave it out")
        if process_group is not None and not isinstance(process_group, str):
            _check_member(process_group)
        self._given = process_group
        self._part = pipeline_part(model)
        self._lent: dist.ProcessGroup | None = None
        self._lender: str | None = None
        self.wrapper = model if isinstance(model, nn.parallel.DistributedDataParallel) else None
        self._seen: dict[int, nn.parallel.DistributedDataParallel] = {}
        self._checked: set[int] = set()

    @property
    def lender(self) -> str | None:
        """The technique that lent its ranks, and ensures that these have the same weights; None if none did."""
        return self._lender

    def lend(self, group: dist.ProcessGroup | None, *, lender: str) -> None:
        """Average over the ranks of another technique, which averages gradients over them.

        Args:
            group: Those ranks; None for none besides this one.
            lender: The technique, for messages.

        Raises:
            ArgumentError: If the user has given other ranks.
            UnsupportedError: If a technique has lent its ranks already.
        """
        wanted = _members(group)
        if self._lender is not None:
            raise UnsupportedError("Eva", f"it averages over the ranks of {self._lender} already")
        if not isinstance(self._given, str) and _members(self._given) != wanted:
            raise ArgumentError(
                "process_group",
                _members(self._given),
                f"is not the group that {lender} averages gradients over, {wanted}; leave it out",
            )
        self._lent, self._lender = group, lender

    def take_back(self) -> None:
        """Undo :meth:`lend`."""
        self._lent = self._lender = None

    def note_forward(self) -> None:
        """Remember the DistributedDataParallel that a forward is running in; called by layers' hooks."""
        wrapper = active_ddp()
        if wrapper is not None:
            self._seen[id(wrapper.process_group)] = wrapper

    def group(self) -> dist.ProcessGroup | None:
        """Return the group to average over in this step; None for no averaging."""
        if self._lender is not None:
            return self._lent
        if not isinstance(self._given, str):
            self._check_given()
            return self._given
        if self._part is not None:  # other ranks of a pipeline have other layers
            group: dist.ProcessGroup | None = self._part.replicas()
            return group
        if not (dist.is_available() and dist.is_initialized()):
            return None
        self._find_wrapper()
        if self.wrapper is not None:
            if joins_uneven_inputs(self.wrapper):
                raise GradweaveError(
                    "Eva averages vectors over ranks in each step, and under DistributedDataParallel.join() ranks end "
                    "at different steps; give all ranks the same number of batches"
                )
            return self.wrapper.process_group
        return dist.group.WORLD if dist.get_world_size() > 1 else None

    def _check_given(self) -> None:
        """Raise ArgumentError where gradients are averaged over ranks that the user left out: weights would diverge."""
        given = None if isinstance(self._given, str) else self._given
        wrappers = [*self._seen.values(), *([] if self.wrapper is None else [self.wrapper])]
        for group in {id(wrapper.process_group): wrapper.process_group for wrapper in wrappers}.values():
            if id(group) not in self._checked and {*_members(group)} - {*_members(given)}:
                raise ArgumentError(
                    "process_group",
                    None if given is None else _members(given),
                    f"DistributedDataParallel averages gradients over ranks {_members(group)}, whose weights would "
                    "differ with vectors of their own; leave it out, or wrap the model over the same ranks",
                )
            self._checked.add(id(group))
        self._seen.clear()

    def _find_wrapper(self) -> None:
        """Keep the wrapper of the forwards since the last step; raise GradweaveError if there are several."""
        if len(self._seen) > 1:
            raise GradweaveError(
                "parts of the model are under DistributedDataParallel of different ranks, and vectors are averaged "
                "over one group; make an optimizer for each part, with its process_group="
            )
        for wrapper in self._seen.values():
            self.wrapper = wrapper
        self._seen.clear()


class ReplicaCheck:
    """A check, in the first steps and from time to time, that the ranks that are averaged over train one model.

    Args:
        of: The optimizer's class, for messages.
        model: The model, for the names of parameters in messages.
    """

    def __init__(self, of: str, model: nn.Module) -> None:
        self._of = of
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._group: dist.ProcessGroup | None = None
        self._replicas: Replicas | None = None
        self._sizes: list[int] = []
        self._compared: list[tuple[str, torch.Tensor]] = []
        self._optimizer: Optimizer | None = None

    def check(
        self,
        group: dist.ProcessGroup,
        params: Iterable[torch.Tensor],
        message: list[torch.Tensor],
        optimizer: Optimizer,
    ) -> None:
        """Raise ReplicaError on all ranks, before anything has changed, if their weights or messages differ.

        Args:
            group: The ranks.
            params: The parameters that are trained.
            message: The tensors to be averaged: of the same sizes on all ranks, or one flat message would mix them up.
            optimizer: The optimizer, whose settings may be the cause.
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


def average_records(records: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Average records over ranks, in place, in one flat message.

    They are averaged and not summed: output vectors are then those of the averaged gradients, and input vectors, being
    divided by the average number of places, are right for unequal batches too.
    """
    if not records or dist.get_world_size(group) == 1:
        return
    sizes = [record.numel() for record in records]
    with phase("communication"):  # in the graph of a step that is traced
        flat = torch.cat([record.flatten() for record in records])
        if is_traced_to_operations():
            flat = finish_sum(start_sum(flat, name_of_group(group)))
        else:
            dist.all_reduce(flat, group=group)
        parts = (flat / dist.get_world_size(group)).split(sizes)
    for record, part in zip(records, parts, strict=True):
        record.copy_(part.view(record.shape))


def _members(group: dist.ProcessGroup | None) -> list[int]:
    """Return the ranks of a group; only this one for None."""
    if not (dist.is_available() and dist.is_initialized()):
        return [0]
    return [dist.get_rank()] if group is None else sorted(dist.get_process_group_ranks(group))


def _check_member(group: Any) -> None:
    """Raise ArgumentError unless this rank is in a group."""
    if not (dist.is_available() and dist.is_initialized()):
        raise ArgumentError("process_group", group, "call torch.distributed.init_process_group() first")
    if group == dist.GroupMember.NON_GROUP_MEMBER or dist.get_rank(group) < 0:
        raise ArgumentError("process_group", group, "this rank is not in it; give each rank a group of its own")
