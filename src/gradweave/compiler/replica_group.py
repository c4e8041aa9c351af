"""The ranks that train replicas of a model by compiled steps, and what they send each other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from gradweave._compat.distributed import has_ended, name_of_group
from gradweave._logging import announce
from gradweave._runtime.buckets import MESSAGE_BYTES, bytes_of, message_params, params_by_layer
from gradweave._runtime.lendable_ranks import lendable_ranks
from gradweave._runtime.optimizer_steps.independence import check_independent
from gradweave._runtime.peers.gradient_messages import GradientMessages, real_numbers
from gradweave._runtime.peers.groups import common_name
from gradweave._runtime.peers.link import measure_all_reduce
from gradweave._runtime.peers.lockstep import Changes
from gradweave._runtime.peers.replica_state import BufferBroadcast, ReplicaCheck, broadcast_state
from gradweave._runtime.peers.same_on_ranks import same_on_ranks
from gradweave.compiler.gradients import Signals
from gradweave.errors import GradweaveError, UnsupportedError
from gradweave.schedule.links import Link

_TECHNIQUE = "compile"
Layout = list[tuple[int, tuple[int, ...]]]
_MOST_MIXED = 3
"""Steps that ranks take in different ways until all of them update outside of their graphs."""


def named_replicas(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield what must be the same on all ranks, by name: the model's parameters, and others that are trained."""
    yield from model.named_parameters(remove_duplicate=False)
    known = {id(p) for p in model.parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for place, p in enumerate(group["params"]):
            if id(p) not in known:
                yield f"of group {number} of the optimizer, number {place}", p


class ReplicaGroup:
    """Replicas of a model, one per rank, which average gradients as DistributedDataParallel does.

    A step sends the same messages whether it is a graph or runs eagerly, so that a rank may do the one while another
    does the other: a batch of another shape, say, has one of them make a graph while the others wait. The messages are
    made of whole layers, from the last to the first. They carry the parameters that the optimizer trains, except for
    those that no rank has had a gradient of since the first step, or since what is trained has changed.

    Equal averages make equal weights only if all ranks update by the same kernels: those of a compiled graph round
    otherwise than the optimizer's own. So ranks tell each other, in the first message, how they update. After a step in
    which they differ, all take the first rank's weights and state; and after a few such steps, all update outside of
    their graphs. In the same way a rank tells that it has a gradient of a parameter that the messages leave out: then
    those are averaged, too.

    Args:
        model: The model; its weights and buffers become the first rank's.
        optimizer: The optimizer.
        group: The ranks.
        dtype: Dtype in which gradients travel; None for their own.
        updates_depend: Whether the update of one parameter depends on the gradients of others, as under clipping by a
            common norm, so that a late gradient cannot be made up for.

    Attributes:
        size: Number of ranks.
        held_back: Number of first layers whose gradients are sent at the end of backward, first layer first.
        updates_apart: Whether updates run outside of graphs.
        plan_number: Number of the present messages; another one for other messages.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        group: dist.ProcessGroup,
        *,
        dtype: torch.dtype | None = None,
        updates_depend: bool = False,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._group = group
        self.size = dist.get_world_size(group)
        self._ranks = dist.get_process_group_ranks(group)
        self.name = name_of_group(group)
        self.share = 1.0 / self.size
        self.dtype = dtype
        self.updates_apart = False
        self._mixed_steps = 0
        self._is_mixed = False
        self._changes = Changes(common_name("gradweave-compile", group), technique=_TECHNIQUE, timeout=None)
        self._buffers = BufferBroadcast(model, group)
        self._check = ReplicaCheck(
            model, optimizer, group, technique=_TECHNIQUE, named=lambda: named_replicas(model, optimizer)
        )
        self._buffers_are_due = True
        self._calls = 0
        self._has_failed = False
        self._is_over: GradweaveError | None = None
        self.held_back = 0
        self._settle: Callable[[], None] = lambda: None
        self._lent = lendable_ranks(optimizer)
        self._updates_depend = updates_depend or self._lent is not None
        broadcast_state([*(p for _, p in named_replicas(model, optimizer)), *model.buffers()], group)
        # What is trained was compared before: every later change is agreed on.
        self._trained = self._trained_now()
        self._layout = _layout_of(self._trained)
        self._knows_unused = False
        self._unused: dict[nn.Parameter, None] = {}
        self.plan_number = 0
        self._make_messages()
        if self._lent is not None:
            self._lent.lend(group, lender=_TECHNIQUE)

    def close(self) -> None:
        """Take back from the optimizer what it was lent."""
        if self._lent is not None:
            self._lent.take_back()
            self._lent = None

    @property
    def messages(self) -> tuple[tuple[nn.Parameter, ...], ...]:
        """The parameters of each message, in the order of sending."""
        return self._messages.messages

    @property
    def is_learning(self) -> bool:
        """Whether the next step must run eagerly on all ranks, to tell them which parameters have no gradient."""
        return not self._knows_unused

    def explain(self) -> str:
        """Return the number of ranks and of the messages of a step, and where the update runs."""
        where = ", and update outside of their graphs" if self.updates_apart else ""
        return f"{self.size} ranks average {len(self.messages)} message(s) a step{where}"

    # A step

    def begin_step(self, *, update: bool) -> None:
        """Share buffers and compare replicas, where it is time; all ranks call it before each step.

        Args:
            update: Whether the step updates, and so averages.
        """
        if self._is_over is not None:
            raise self._is_over
        if has_ended(self._group):
            raise GradweaveError("compile: the process group of mesh= has ended; make groups and compile() again")
        self._calls += 1
        if self._has_failed:
            # The others are in another step, unless theirs has failed too: messages of both must not meet.
            self._changes.agree("a step has failed", str(self._calls), self._ranks)
            self._has_failed = False
        trained = self._trained_now()
        layout = _layout_of(trained)
        if layout != self._layout:
            self._change(trained, layout)
        # As DistributedDataParallel: before the first forward of each round of micro-batches.
        if self._buffers_are_due:
            self._buffers.run()
        self._buffers_are_due = update
        if update:
            self._check.begin_round(is_unsettled=False)

    def step_failed(self) -> None:
        """Note that an error has ended a step."""
        self._has_failed = True

    def average(self) -> None:
        """Average all gradients that are there: for a step that updates eagerly."""
        unplanned = any(p.grad is not None for p in self._unused)
        unused, sums = self._messages.average(Signals.of(True, has_unplanned=unplanned))
        if not self._knows_unused:  # all ranks see the same flags
            self._knows_unused = True
            self._leave_out(unused)
        elif sums:
            self._take_in(Signals(*sums))

    def hear(self, signals: torch.Tensor) -> bool:
        """Take in what all ranks have told in a step that was a graph, which has updated.

        Returns:
            Whether parameters have got gradients from other ranks that the graph knew nothing of.
        """
        return self._take_in(Signals(*real_numbers(signals)))

    def end_step(self) -> None:
        """Note that weights were updated; make them equal again where ranks have updated in different ways."""
        if self._is_mixed or self._check.wants_weights:
            self._settle()
        if self._is_mixed:
            self._is_mixed = False
            with same_on_ranks(self._group, technique=_TECHNIQUE) as facts:  # what is sent must be alike
                facts |= {name: f"{tuple(x.shape)} {x.dtype}" for name, x in self._everything()}
            broadcast_state((tensor for _, tensor in self._everything()), self._group)
            self._mixed_steps += 1
            if self._mixed_steps == _MOST_MIXED:
                self.updates_apart = True
                announce(
                    f"compile: {_MOST_MIXED} times some ranks have taken a step as a graph and others otherwise, which "
                    "rounds otherwise; from here on all update outside of their graphs, and no rank waits for the "
                    "first one's weights; give all ranks batches of the same shapes to keep updates in the graph",
                    level=logging.WARNING,
                )
        self._check.step_taken()

    def settle_by(self, settle: Callable[[], None]) -> None:
        """Have weights settled before they are looked at: steps may leave updates to the next one.

        Args:
            settle: Does the updates that are left.
        """
        self._settle = settle

    def hold_back(self, count: Callable[[Link], int]) -> None:
        """Send the gradients of some first layers at the end of backward, first layer first; on all ranks alike.

        Args:
            count: Returns the number of layers, given the link between the ranks; the first rank is asked.
        """
        params = self._held()
        device = params[0].device
        link = measure_all_reduce(self._group, device, sum(map(bytes_of, params)))
        found = torch.zeros(1, dtype=torch.int64, device=device)
        if dist.get_rank(self._group) == 0:
            found += count(link)
        dist.broadcast(found, group_src=0, group=self._group)
        self.held_back = int(found)
        self._make_messages()

    def _take_in(self, signals: Signals) -> bool:
        self._is_mixed = signals.is_mixed
        if not signals.has_unplanned:
            return False
        if self._updates_depend or self._is_coupled():
            # Some ranks have updated, and others have not.
            self._is_over = UnsupportedError(
                "parameters that come to have gradients on some ranks",
                "no rank had one of them in the first step, and the update of the others depends on them",
                "let them take part in the first step of one rank at least, and start again from a checkpoint",
            )
            raise self._is_over
        unused, _ = self._messages_of(list(self._unused)).average()
        self._leave_out(unused)
        return True

    def _leave_out(self, unused: Sequence[nn.Parameter]) -> None:
        """Leave parameters that no rank has a gradient of out of the messages; not all: there must be a message."""
        self._unused = dict.fromkeys(unused) if len(unused) < len(self._trained) else {}
        self._make_messages()

    def _is_coupled(self) -> bool:
        """Return whether the optimizer cannot update some parameters after the others."""
        try:
            check_independent(self._optimizer, remedy="")
        except UnsupportedError:
            return True
        return False

    def _everything(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield weights, and tensors of the optimizer's state, in an order that is the same on all ranks."""
        for name, p in named_replicas(self._model, self._optimizer):
            yield f"parameter {name}", p
            state = self._optimizer.state.get(p, {})
            for key in sorted(state, key=str):
                if isinstance(state[key], torch.Tensor):
                    yield f"the optimizer's {key} of parameter {name}", state[key]

    # What is trained

    def _change(self, trained: list[nn.Parameter], layout: Layout) -> None:
        """Make messages for other parameters than before, once all ranks have come to the same change."""
        names = {id(p): name for name, p in named_replicas(self._model, self._optimizer)}
        described = "; ".join(f"{names[id(p)]} {tuple(p.shape)} {p.stride()}" for p in trained)
        what = "which parameters are trained, or how they lie in memory, has changed"
        self._changes.agree(what, described, self._ranks)
        known = {id(p) for p in (*self._model.parameters(), *self._trained)}
        broadcast_state([p for p in trained if id(p) not in known], self._group)
        self._trained, self._layout = trained, layout
        self._learn()

    def _learn(self) -> None:
        """Forget which parameters have no gradient: until the next step has told, a gradient of each may come."""
        self._knows_unused = False
        self._unused = {}
        self._make_messages()

    def _make_messages(self) -> None:
        self._messages = self._messages_of([p for p in self._trained if p not in self._unused])
        self.plan_number += 1
        # An optimizer with statistics of its own sends those of all its parameters, and a graph knows only its own.
        if self._lent is not None and sum(map(len, self.messages)) < len(self._held()):
            self.updates_apart = True

    def _messages_of(self, params: Sequence[nn.Parameter]) -> GradientMessages:
        layers = params_by_layer(self._model, params)
        return GradientMessages(message_params(layers, self.held_back, MESSAGE_BYTES), self._group, self.dtype)

    def _trained_now(self) -> list[nn.Parameter]:
        """Return what the next step may update: one that was frozen may have a gradient of an earlier micro-batch."""
        return [p for p in self._held() if p.requires_grad or p.grad is not None]

    def _held(self) -> list[nn.Parameter]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]


def _layout_of(params: Sequence[nn.Parameter]) -> Layout:
    """Return what messages depend on: which parameters there are, and how they lie in memory."""
    return [(id(p), p.stride()) for p in params]
