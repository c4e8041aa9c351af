"""``DataParallel``: replicas that average gradients without a barrier between steps."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from gradweave._compat.dynamo import between_graphs
from gradweave._compat.functions import flat_leaves, no_torch_function
from gradweave._logging import announce
from gradweave._runtime.attachment import AccumulatingAttachment
from gradweave._runtime.buckets import MESSAGE_BYTES, message_params
from gradweave._runtime.claims import Technique, claim_model, claim_optimizer
from gradweave._runtime.optimizer_steps.hooks import StepHooks
from gradweave._runtime.peers.groups import common_name, end_group, new_group
from gradweave._runtime.peers.lockstep import Changes
from gradweave._runtime.peers.replica_messages import naming_lost_peers
from gradweave._runtime.peers.replica_state import BufferBroadcast, ReplicaCheck, broadcast_state
from gradweave._runtime.peers.same_on_ranks import (
    describe_buffers,
    describe_optimizer,
    describe_parameters,
    same_on_ranks,
)
from gradweave._runtime.replicas import Lookout
from gradweave._runtime.split_calls.queue import InlineLane, WeightGradientQueue
from gradweave._runtime.wrapped_optimizers import without_wrapper
from gradweave.errors import ArgumentError, GradweaveError, LostPeerError
from gradweave.parallel.data_parallel.autotune import STOCK, Arrangement, State, Tuner
from gradweave.parallel.data_parallel.checks import check, refuse_averager
from gradweave.parallel.data_parallel.deferred_updates import AveragedUpdates
from gradweave.parallel.data_parallel.layers import Layer, UseOrder
from gradweave.parallel.data_parallel.reducer import Reducer
from gradweave.parallel.data_parallel.reverse_first_k import HeldBack, calls_by_layer
from gradweave.parallel.data_parallel.step_costs import StepWatch

Policy = Literal["auto", "reverse_first_k", "no_barrier", "in_order"]
POLICIES: tuple[Policy, ...] = get_args(Policy)


class DataParallel(nn.Module, AccumulatingAttachment):
    """Trains replicas of a model, one per rank, that average their gradients while computing.

    Results are those of ``DistributedDataParallel``: the same averages, the same updates. But an update waits for its
    own gradients only, and runs just before its layer is used again; and the weight gradients of the first ``k`` layers
    are computed last, first layer first, so that what the next forward needs first is also sent first. The loop stays
    as it is. A gradient that the loop reads is averaged, and a weight is updated: clipping by norm works, and waits for
    all gradients. Without a process group there is one rank, which has nothing to average.

    Its states, and what leads from one to the next, are those of :class:`~.autotune.State`.

    Args:
        model: The model, the same on all ranks; the first rank's weights and buffers are given to all.
        optimizer: The optimizer of its parameters, which must treat them independently.
        policy: ``"reverse_first_k"`` as described; ``"no_barrier"`` holds nothing back; ``"in_order"`` does what
            DistributedDataParallel does. ``"auto"`` measures some steps, simulates, tries an arrangement that the
            simulation finds faster, and keeps it only if it is.
        k: Number of layers to hold back with ``"reverse_first_k"``, or ``"all"``; None to search it by simulation.
        bucket_bytes: Bytes of gradients at which a message is full; it carries whole layers, so it may hold more.
        byte_budget: Bytes that held-back weight gradients may keep alive; None for no bound.
        reduce_dtype: Dtype in which gradients travel, such as ``torch.bfloat16``; None for their own.
        broadcast_buffers: Give all ranks the first rank's buffers before every forward in training.
        process_group: The ranks that train together; None for all.
        timeout: Seconds after which a rank that does not answer counts as lost; None for torch's default.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        policy: Policy = "auto",
        k: int | Literal["all"] | None = None,
        bucket_bytes: int = MESSAGE_BYTES,
        byte_budget: int | None = None,
        reduce_dtype: torch.dtype | None = None,
        broadcast_buffers: bool = True,
        process_group: dist.ProcessGroup | None = None,
        timeout: float | None = None,
    ) -> None:
        super().__init__()
        if timeout is not None and process_group is not None:
            raise ArgumentError("timeout", timeout, "a process_group has its own timeout; give it to dist.new_group()")
        self._size = _size_of(process_group)
        optimizer = without_wrapper(optimizer)

        with same_on_ranks(process_group, technique="DataParallel", alone=self._size == 1) as facts:
            _check_options(policy, k, bucket_bytes, byte_budget, reduce_dtype)
            check(model, optimizer)
            options = (policy, k, bucket_bytes, byte_budget, reduce_dtype, broadcast_buffers)
            facts["the options"] = str(options)
            facts |= describe_optimizer(optimizer)
            facts |= describe_parameters(model.named_parameters(remove_duplicate=False))
            facts |= describe_buffers(model.named_buffers())
        self._changes: Changes | None = None
        if self._size > 1:
            name = common_name("gradweave-data-parallel", process_group)
            self._changes = Changes(name, technique="DataParallel", timeout=timeout)
        self.module = model
        self._optimizer = optimizer
        self._device = next(model.parameters()).device
        self._policy, self._k = policy, k
        self._bucket_bytes, self._byte_budget, self._dtype = bucket_bytes, byte_budget, reduce_dtype
        self._group: dist.ProcessGroup | None = None
        self._buffer_broadcast: BufferBroadcast | None = None
        self._replica_check: ReplicaCheck | None = None
        self._state = State.DETACHED
        self._order: UseOrder
        self._layers: list[Layer] = []
        self._tuner: Tuner | None = None
        self._arrangement = STOCK
        self._reducer = _no_reducer()
        self._updates: AveragedUpdates | None = None
        self._trained: tuple[Any, ...] = ()
        self._has_stepped = False
        self._queue = WeightGradientQueue(InlineLane())
        self.register_load_state_dict_pre_hook(_with_own_names)  # type: ignore[no-untyped-call]
        with ExitStack() as attached:
            self._attach(attached, process_group, timeout, broadcast_buffers)
            self._attached_by = attached.pop_all()

    def _attach(
        self, attached: ExitStack, process_group: dist.ProcessGroup | None, timeout: float | None, buffers: bool
    ) -> None:
        """Attach step by step, each with the callback that undoes it."""
        attached.callback(self._forget_groups)
        if self._size > 1:

            def own_group() -> dist.ProcessGroup:
                limit = None if timeout is None else timedelta(seconds=timeout)
                made = new_group([range(self._size)], made_by_all=True, timeout=limit)
                attached.callback(end_group, made)
                # After this message all ranks are connected: a rank that ends the group at once, because the rest of
                # its attach fails, does not make the others fail while they connect.
                dist.all_reduce(torch.ones(1, device=self._device), group=made)
                return made

            self._group = process_group or own_group()
            if buffers:
                self._buffer_broadcast = BufferBroadcast(self.module, process_group or own_group())
            self._replica_check = ReplicaCheck(self.module, self._optimizer, self._group, technique="DataParallel")
        attached.callback(self._stop)
        attached.callback(self._optimizer.register_step_post_hook(self._step_taken).remove)
        attached.callback(StepHooks(self._optimizer, self._before_step, self._after_step).remove)
        claim_optimizer(self._optimizer, Technique.DATA_PARALLEL, self, attached)
        claim_model(self.module, Technique.DATA_PARALLEL, self, attached)
        self._lookout = Lookout(self.module, refuse_averager)
        attached.callback(self._lookout.close)
        self._learn()
        if self._group is not None:
            broadcast_state((*self.module.parameters(), *self.module.buffers()), self._group)

    def _stop(self) -> None:
        """Apply what is pending; from here on the loop is stock."""
        self._stop_observing()
        self._release()
        self._state = State.DETACHED

    def _forget_groups(self) -> None:
        self._group = self._buffer_broadcast = self._replica_check = None

    # What users call

    @between_graphs
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward."""
        if self._state is State.DETACHED or not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        self._lookout.look()
        self._reducer.check_ended()
        if self._now_trained() != self._trained:
            self._lookout.look_inside()
            self._agree_on_trained()
            self._learn()
        elif self._has_stepped:
            self._advance()
        self._has_stepped = False
        if self._buffer_broadcast is not None and self.module.training and self._reducer.enabled:
            self._buffer_broadcast.run()
        watch = self._tuner.watch if self._tuner is not None else None
        with self._intercepted(watch):
            result = self.module(*args, **kwargs)
        if watch is not None:
            self._tell_of_backward(watch, result)
        return result

    @contextmanager
    def no_update(self) -> Iterator[None]:
        """Return a context in which backwards only accumulate: for all micro-batches of a step but the last."""
        before = self._attached().enabled
        self._reducer.enabled = False
        try:
            yield
        finally:
            self._reducer.enabled = before

    def flush(self) -> None:
        """Apply all updates that step() has left pending; reading a weight applies the update of that weight."""
        if self._updates is not None:
            self._updates.flush()

    def detach(self) -> nn.Module:
        """Apply all pending updates, detach from model and optimizer, and return the model.

        Call it on all ranks: it ends the process groups that were made for it, with their connections and threads.

        After a :class:`LostPeerError`, updates whose gradients are lost are left out: their weights are as they were
        before the last step.
        """
        if self.is_attached:
            self._attached_by.close()
        return self.module

    @property
    def is_attached(self) -> bool:
        """Whether the attachment is in force."""
        return self._state is not State.DETACHED

    def explain(self) -> str:
        """Return the number of ranks and messages, the arrangement of steps, and the reason for it."""
        if not self.is_attached:
            return "detached"
        why = f" ({self._tuner.reason})" if self._tuner is not None else ""
        return f"{self._size} rank(s), {len(self._reducer.messages)} message(s) a step, {self._arrangement}{why}"

    @property
    def k(self) -> int:
        """Number of layers that are held back now."""
        return self._arrangement.k

    @property
    def most_bytes_held(self) -> int:
        """The most bytes that held-back weight gradients have kept alive at once."""
        return self._queue.peak_bytes

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's state, with the model's own names."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the model's state; load the same on all ranks."""
        return self.module.load_state_dict(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        return copy.deepcopy(self.module, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self.module,)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the model's parameters, with the model's own names."""
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the model's buffers, with the model's own names."""
        return self.module.named_buffers(*args, **kwargs)

    # How steps are arranged

    def _learn(self) -> None:
        """Take the next step in stock order, to observe the order in which layers are used."""
        self._stop_observing()
        trained = self._now_trained()
        self._order = UseOrder(self.module)
        self._state = State.LEARNING
        self._layers = self._order.layers(self._order.numbers())
        self._arrange(STOCK)
        self._trained = trained  # last: if the rest has failed, the next forward does not train without averages

    def _stop_observing(self) -> None:
        if self._state is State.LEARNING:
            self._order.close()
        if self._tuner is not None:
            self._tuner.close()
            self._tuner = None

    def _agree_on_trained(self) -> None:
        """Wait until all ranks have come to the same change of what is trained; raise ReplicaError if one does not."""
        if self._changes is None or self._group is None:
            return
        with no_torch_function():
            trained = [str(n) for n, p in enumerate(self.module.parameters()) if p.requires_grad]
        ranks = dist.get_process_group_ranks(self._group)
        self._changes.agree("which parameters are trained has changed", ",".join(trained), ranks)

    def _now_trained(self) -> tuple[Any, ...]:
        with no_torch_function():
            return tuple((id(p), p.requires_grad) for p in self.module.parameters())

    def _before_step(self, is_last: bool) -> None:
        # The updates are looked up here, not when the hook is made: a closure's forward, inside of this step, may have
        # come to another arrangement.
        if self._updates is not None:
            self._updates.before_step(is_last)

    def _after_step(self) -> None:
        if self._updates is not None:
            self._updates.after_step()

    def _step_taken(self, *_: Any) -> None:
        self._has_stepped = True
        if self._replica_check is not None:
            self._replica_check.step_taken()

    def _advance(self) -> None:
        """Begin a step, in the arrangement that ranks agreed on in the last backward."""
        if self._state is State.LEARNING:
            self._end_learning()
        elif self._tuner is not None:
            wanted = self._tuner.next_arrangement()
            if wanted != self._arrangement:
                self._arrange(wanted)

    def _end_learning(self) -> None:
        given = self._given_arrangement()
        self._order.close()
        if given is None and self._group is not None:
            self._tuner = Tuner(
                self._layers, self._optimizer, self._group, self._device, bucket_bytes=self._bucket_bytes,
                byte_budget=self._byte_budget, confirm=self._policy == "auto",
            )  # fmt: skip
            self._state = self._tuner.state
        else:
            self._arrange(given or STOCK)
            self._state = State.SETTLED

    def _backward_begins(self) -> None:
        """Agree with the other ranks on what comes next; the first gradient is there, and no message on its way.

        Ranks agree here, and not in forward or step, since all ranks come here equally often: a rank that did not would
        make the others wait for gradients anyway. A forward or a step may be left out on one of them.
        """
        self.flush()
        if self._replica_check is None or self._group is None:
            return
        self._replica_check.begin_round(is_unsettled=self._state is not State.SETTLED)
        if self._state is State.LEARNING:
            agreed = [self._order.numbers()]
            with naming_lost_peers("the order of layers could not be agreed on"):
                dist.broadcast_object_list(agreed, dist.get_global_rank(self._group, 0), group=self._group)
            self._layers = self._order.layers(agreed[0])
        elif self._tuner is not None:
            self._state = self._tuner.agree()

    def _given_arrangement(self) -> Arrangement | None:
        """Return the arrangement that the user has asked for; None if several ranks are to search for it."""
        if self._policy in ("no_barrier", "in_order"):
            return Arrangement(barrier=self._policy == "in_order")
        if self._k is None:
            return None
        if self._k == "all":
            return Arrangement(barrier=False, k=len(self._layers))
        if int(self._k) > len(self._layers):
            raise ArgumentError("k", self._k, f"give 0 to {len(self._layers)}, the number of layers, or 'all'")
        return Arrangement(barrier=False, k=int(self._k))

    def _arrange(self, arrangement: Arrangement) -> None:
        """Take steps in another arrangement from now on."""
        syncs = self._reducer.enabled
        self._release()
        alone = self._group is None and arrangement.barrier
        buckets = (
            [] if alone else message_params([layer.params for layer in self._layers], arrangement.k, self._bucket_bytes)
        )
        self._reducer = Reducer(
            buckets, self._group, dtype=self._dtype, barrier=arrangement.barrier, begins=self._backward_begins,
            accumulates=self._before_adding,
        )  # fmt: skip
        self._reducer.enabled = syncs
        self._queue = WeightGradientQueue(InlineLane(), self._byte_budget)
        if not arrangement.barrier:
            self._updates = AveragedUpdates(self.module, self._optimizer, self._reducer)
        self._arrangement = arrangement

    def _release(self) -> None:
        """End the arrangement: apply what is pending, and remove the hooks from parameters."""
        is_lost = self._settle()
        if self._updates is not None:
            self._updates.detach()
        self._reducer.close(discard=is_lost)
        self._updates, self._reducer = None, _no_reducer()

    # In forward and backward

    def _intercepted(self, watch: StepWatch | None) -> AbstractContextManager[Any]:
        """Return the context of a forward in which the calls of some layers are split, for this arrangement."""
        if watch is not None:
            return calls_by_layer(WeightGradientQueue(watch), self._layers)
        held = {n: layer.module for n, layer in enumerate(self._layers[: self._arrangement.k]) if layer.can_wait}
        if not held or self._updates is None:
            return nullcontext()
        return HeldBack(self._queue, held, self._updates.resolve)

    def _tell_of_backward(self, watch: StepWatch, result: Any) -> None:
        """Tell the watch when a backward comes from the loss to what the model has returned."""
        for output in flat_leaves(result):
            if isinstance(output, torch.Tensor) and output.requires_grad and not output.is_leaf:
                output.register_hook(lambda _: watch.backward_begins())

    def _before_adding(self, p: nn.Parameter) -> None:
        """Apply the pending update of a parameter, which uses its gradient, before a backward adds to that."""
        if self._updates is not None:
            self._updates.resolve(p)

    def _settle(self) -> bool:
        """Apply what is pending; return whether a rank is lost, so that some updates had to be left out."""
        try:
            self.flush()
            self._reducer.wait()
        except LostPeerError as error:
            if self._updates is not None:
                self._updates.discard()
            announce(f"DataParallel: updates that were pending are left out: {error}")
            return True
        return False

    def _attached(self) -> Reducer:
        if not self.is_attached:
            raise GradweaveError("this DataParallel is detached; wrap the model again")
        return self._reducer


def _no_reducer() -> Reducer:
    """Return the reducer of no parameters, which a detached DataParallel has."""
    return Reducer([], None)


def _check_options(
    policy: str, k: int | str | None, bucket_bytes: int, byte_budget: int | None, dtype: torch.dtype | None
) -> None:
    if policy not in POLICIES:
        raise ArgumentError("policy", policy, f"use one of {', '.join(POLICIES)}")
    if k is not None and policy != "reverse_first_k":
        raise ArgumentError("k", k, 'use it with policy="reverse_first_k"')
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


def _size_of(group: dist.ProcessGroup | None) -> int:
    if not dist.is_initialized():
        return 1
    if dist.get_rank(group) < 0:
        raise ArgumentError("process_group", group, "this rank is not in it; wrap the model on its own ranks only")
    return dist.get_world_size(group)


def _with_own_names(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
    """Let a module that has the wrapper inside load what it has saved: names without ``module.``."""
    for name in [name for name in state if name.startswith(prefix)]:
        state[f"{prefix}module.{name.removeprefix(prefix)}"] = state.pop(name)


def _itself(module: nn.Module) -> nn.Module:
    return module
