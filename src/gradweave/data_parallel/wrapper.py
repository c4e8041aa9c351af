"""``DataParallel``: replicas that average gradients without a barrier between steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from gradweave.compat.eager import current_backward, flat_leaves, no_torch_function
from gradweave.compat.tracing import NO_BACKWARD
from gradweave.data_parallel.buffers import BufferSharing
from gradweave.data_parallel.checks import check, check_same, share_state
from gradweave.data_parallel.choosing import STOCK, Arrangement, Choice
from gradweave.data_parallel.held_back import HeldBack, Watched
from gradweave.data_parallel.layers import Layer, UseOrder, messages
from gradweave.data_parallel.reducer import Reducer
from gradweave.data_parallel.updates import AveragedUpdates
from gradweave.errors import ArgumentError, GradweaveError
from gradweave.fusion.hooks import StepHooks
from gradweave.marks import mark_data_parallel
from gradweave.split.queue import WeightGradientQueue
from gradweave.split.streams import InLine

POLICIES = ("auto", "reverse_first_k", "no_barrier", "in_order")
BUCKET_BYTES = 4 * 2**20
"""Small enough for the first layers' gradients not to wait for much else, large enough for a slow link's latency."""


class DataParallel(nn.Module):
    """Trains replicas of a model, one per rank, that average their gradients while computing.

    Results are those of ``DistributedDataParallel``: the same averages, the same updates. But an update
    waits for nothing but its own gradients, and happens just before its layer is used again; and the weight
    gradients of the first ``k`` layers are computed last, first layer first, so that what the next forward
    needs first is also sent first. The loop stays as it is. Whoever looks at a gradient or a weight sees
    it averaged, and updated: clipping by norm works, and waits for all gradients. Without a process group there
    is one rank, which has nothing to average.

    Args:
        model: The same on all ranks; the first rank's weights and buffers are given to all.
        optimizer: Of its parameters; one that treats them independently.
        policy: ``"reverse_first_k"`` as described; ``"no_barrier"`` holds nothing back; ``"in_order"`` does what
            DistributedDataParallel does. ``"auto"`` measures some steps, simulates, tries what is promised to
            be faster, and keeps it only if it is.
        k: Layers to hold back, for ``"reverse_first_k"``: a number, ``"all"``, or None to search it by simulation.
        bucket_bytes: Of gradients that travel in one message.
        byte_budget: Bytes that weight gradients which are held back may keep alive; None for no bound.
        reduce_dtype: What gradients travel as, such as ``torch.bfloat16``; None for their own precision.
        broadcast_buffers: Give everybody the first rank's buffers before every forward in training.
        process_group: Ranks that train together; None for all.
        timeout: Seconds after which a rank that does not answer counts as lost; None for torch's default.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        policy: str = "auto",
        k: int | str | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        byte_budget: int | None = None,
        reduce_dtype: torch.dtype | None = None,
        broadcast_buffers: bool = True,
        process_group: dist.ProcessGroup | None = None,
        timeout: float | None = None,
    ) -> None:
        super().__init__()
        _check_options(policy, k, bucket_bytes, byte_budget, reduce_dtype)
        check(model, optimizer)
        self.module = model
        self._optimizer = optimizer
        self._device = next(model.parameters()).device
        self._policy, self._k = policy, k
        self._bucket_bytes, self._byte_budget, self._dtype = bucket_bytes, byte_budget, reduce_dtype
        self._size = dist.get_world_size(process_group) if dist.is_initialized() else 1
        self._group: dist.ProcessGroup | None = None
        self._sharing: BufferSharing | None = None
        if self._size > 1:
            check_same(model, process_group)
            ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
            limit = None if timeout is None else timedelta(seconds=timeout)
            self._group = dist.new_group(ranks, timeout=limit)
            share_state(model, self._group)
            if broadcast_buffers:
                self._sharing = BufferSharing(model, dist.new_group(ranks, timeout=limit))
        self._order: UseOrder | None = None
        self._layers: list[Layer] = []
        self._reducer: Reducer | None = None
        self._updates: AveragedUpdates | None = None
        self._hooks: StepHooks | None = None
        self._choice: Choice | None = None
        self._arrangement = STOCK
        self._trained: tuple[bool, ...] = ()
        self._stepped = False
        self._begun = NO_BACKWARD
        self._queue = WeightGradientQueue(InLine())
        self._behind_step = optimizer.register_step_post_hook(self._note_step)
        mark_data_parallel(optimizer, self)
        self._learn()

    # What users call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        if self._reducer is None:
            return self.module(*args, **kwargs)
        if not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        if self._stepped:
            self._stepped = False
            self._advance()
        if self._sharing is not None and self.training and self._reducer.enabled:
            self._sharing.share()
        with self._split():
            result = self.module(*args, **kwargs)
        for leaf in flat_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(self._backward_begins)
        return result

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside only accumulate gradients: for all micro-batches of a step but the last."""
        before = self._attached().enabled
        self._set_syncs(False)
        try:
            yield
        finally:
            self._set_syncs(before)

    def _set_syncs(self, enabled: bool) -> None:
        if self._reducer is not None:
            self._reducer.enabled = enabled

    def flush(self) -> None:
        """Applies every update that step() has decided; reading a weight does this for what it needs."""
        if self._updates is not None:
            self._updates.flush()

    def detach(self) -> nn.Module:
        """Applies what is pending, lets go of model and optimizer, and returns the model."""
        if self._reducer is not None:
            self._arrange(None)
            self._behind_step.remove()
            mark_data_parallel(self._optimizer, None)
        return self.module

    def explain(self) -> str:
        """What is done, and why."""
        if self._reducer is None:
            return "detached"
        why = f" ({self._choice.reason})" if self._choice is not None else ""
        return f"{self._size} rank(s), {len(self._reducer.buckets)} message(s) a step, {self._arrangement}{why}"

    @property
    def k(self) -> int:
        """How many layers are held back now."""
        return self._arrangement.k

    @property
    def most_bytes_held(self) -> int:
        """The most bytes that held-back weight gradients have kept alive at once."""
        return self._queue.most_held

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own, with the model's own names."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Loads the model's own; load the same on all ranks."""
        self.flush()
        return self.module.load_state_dict(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's own, with the model's own names."""
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """The model's own, with the model's own names."""
        return self.module.named_buffers(*args, **kwargs)

    # How steps are arranged

    def _learn(self) -> None:
        """Takes the next step in stock order, to see in which order layers are used."""
        self._trained = self._requires_grad()
        self._choice = None
        self._order = UseOrder(self.module)
        self._layers = self._order.layers(self._order.numbers())
        self._arrange(STOCK)

    def _requires_grad(self) -> tuple[bool, ...]:
        with no_torch_function():
            return tuple(p.requires_grad for p in self.module.parameters())

    def _note_step(self, *_: Any) -> None:
        self._stepped = True

    def _advance(self) -> None:
        """A step is through and the next begins: decides how to take it. All ranks come here together."""
        if self._requires_grad() != self._trained:
            if self._order is not None:
                self._order.close()
            self._learn()
            return
        if self._order is not None:
            self._settle_order(self._order)
            self._order = None
            given = self._given()
            if given is not None or self._group is None:
                self._arrange(given or STOCK)
                return
            self._choice = Choice(
                self._layers, self._optimizer, self._group, self._device, self._bucket_bytes, self._byte_budget,
                confirm=self._policy == "auto",
            )  # fmt: skip
        if self._choice is not None and not self._choice.is_made:
            wanted = self._choice.step_begins()
            if wanted != self._arrangement:
                self._arrange(wanted)

    def _settle_order(self, order: UseOrder) -> None:
        order.close()
        agreed = [order.numbers()]
        if self._group is not None:
            dist.broadcast_object_list(agreed, dist.get_global_rank(self._group, 0), group=self._group)
        self._layers = order.layers(agreed[0])

    def _given(self) -> Arrangement | None:
        """What the user has asked for; None if it is to be found out, among several ranks."""
        if self._policy in ("no_barrier", "in_order"):
            return Arrangement(barrier=self._policy == "in_order")
        if self._k is None:
            return None
        if self._k == "all":
            return Arrangement(barrier=False, k=len(self._layers))
        if int(self._k) > len(self._layers):
            raise ArgumentError("k", self._k, f"give 0 to {len(self._layers)}, the number of layers, or 'all'")
        return Arrangement(barrier=False, k=int(self._k))

    def _arrange(self, arrangement: Arrangement | None) -> None:
        """Takes steps differently from now on; None lets go."""
        if self._updates is not None:
            self._updates.detach()
        if self._hooks is not None:
            self._hooks.remove()
        syncs = self._reducer.enabled if self._reducer is not None else True
        if self._reducer is not None:
            self._reducer.close()
        self._updates = self._hooks = self._reducer = None
        if arrangement is None:
            return
        self._arrangement = arrangement
        alone = self._group is None and arrangement.barrier
        buckets = [] if alone else messages(self._layers, arrangement.k, self._bucket_bytes)
        self._reducer = Reducer(
            buckets, self._group, self._size, dtype=self._dtype, barrier=arrangement.barrier, begins=self.flush
        )
        self._set_syncs(syncs)
        self._queue = WeightGradientQueue(InLine(), self._byte_budget)
        if not arrangement.barrier:
            self._updates = AveragedUpdates(self.module, self._optimizer, self._reducer)
            self._hooks = StepHooks(self._optimizer, self._updates.before_step, self._updates.after_step)

    # In forward and backward

    def _split(self) -> AbstractContextManager[Any]:
        choice = self._choice
        if choice is not None and choice.watch is not None:
            return Watched(WeightGradientQueue(choice.watch), self._layers)
        held = {n: layer.module for n, layer in enumerate(self._layers[: self._arrangement.k]) if layer.can_wait}
        if not held or self._updates is None:
            return nullcontext()
        return HeldBack(self._queue, held, self._updates.resolve)

    def _backward_begins(self, _: torch.Tensor) -> None:
        running = current_backward()
        if running == self._begun or self._reducer is None:
            return
        self._begun = running
        self._reducer.before_backward()
        if self._choice is not None and self._choice.watch is not None:
            self._choice.watch.backward_begins()

    def _attached(self) -> Reducer:
        if self._reducer is None:
            raise GradweaveError("this DataParallel is detached; wrap the model again")
        return self._reducer


def _check_options(
    policy: str, k: int | str | None, bucket_bytes: int, byte_budget: int | None, dtype: torch.dtype | None
) -> None:
    if policy not in POLICIES:
        raise ArgumentError("policy", policy, f"use one of {', '.join(POLICIES)}")
    if k is not None and policy != "reverse_first_k":
        raise ArgumentError("k", k, 'is for policy="reverse_first_k"')
    if isinstance(k, str) and k != "all":
        raise ArgumentError("k", k, "give a number of layers, 'all', or None")
    if isinstance(k, int) and k < 0:
        raise ArgumentError("k", k, "give 0 or more layers, 'all', or None")
    if bucket_bytes < 1:
        raise ArgumentError("bucket_bytes", bucket_bytes, "give at least 1")
    if byte_budget is not None and byte_budget < 0:
        raise ArgumentError("byte_budget", byte_budget, "give 0 or more bytes, or None for no bound")
    if dtype is not None and not dtype.is_floating_point:
        raise ArgumentError("reduce_dtype", dtype, "give a floating point type, such as torch.bfloat16, or None")
