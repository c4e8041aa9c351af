"""``DataParallel``: replicas that average gradients without a barrier between steps."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from gradweave._compat.dynamo import between_graphs
from gradweave._compat.eager import flat_leaves, no_torch_function
from gradweave._logging import announce
from gradweave._runtime.attachment import AccumulatingAttachment
from gradweave._runtime.buckets import message_params
from gradweave._runtime.claims import Technique, claim_model, claim_optimizer
from gradweave._runtime.optimizer_steps.hooks import StepHooks
from gradweave._runtime.peers.groups import common_name, end_group, new_group
from gradweave._runtime.peers.lockstep import Changes
from gradweave._runtime.peers.same_on_ranks import (
    describe_buffers,
    describe_optimizer,
    describe_parameters,
    same_on_ranks,
)
from gradweave._runtime.replicas import Lookout
from gradweave._runtime.split_calls.queue import InLine, WeightGradientQueue
from gradweave._runtime.wrapped_optimizers import without_wrapper
from gradweave.errors import ArgumentError, GradweaveError, LostPeerError
from gradweave.parallel.data_parallel.autotune import STOCK, Arrangement, Choice
from gradweave.parallel.data_parallel.buffers import BufferSharing, share_state
from gradweave.parallel.data_parallel.checks import check, refuse_averager
from gradweave.parallel.data_parallel.deferred_updates import AveragedUpdates
from gradweave.parallel.data_parallel.failures import naming_lost_peers
from gradweave.parallel.data_parallel.layers import Layer, UseOrder
from gradweave.parallel.data_parallel.reducer import Reducer
from gradweave.parallel.data_parallel.replica_check import Together
from gradweave.parallel.data_parallel.reverse_first_k import HeldBack, Watched
from gradweave.parallel.data_parallel.step_costs import StepWatch

POLICIES = ("auto", "reverse_first_k", "no_barrier", "in_order")
BUCKET_BYTES = 4 * 2**20
"""Small enough for the first layers' gradients not to wait for much else, large enough for a slow link's latency."""


class DataParallel(nn.Module, AccumulatingAttachment):
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
        bucket_bytes: At how many bytes of gradients a message is full; it carries whole layers, so it may hold more.
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
        if timeout is not None and process_group is not None:
            raise ArgumentError("timeout", timeout, "is the process_group's own; give it where that is made")
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
        self._sharing: BufferSharing | None = None
        self._order: UseOrder | None = None
        self._layers: list[Layer] = []
        self._reducer: Reducer | None = None
        self._updates: AveragedUpdates | None = None
        self._choice: Choice | None = None
        self._together: Together | None = None
        self._arrangement = STOCK
        self._trained: tuple[Any, ...] = ()
        self._stepped = False
        self._queue = WeightGradientQueue(InLine())
        self.register_load_state_dict_pre_hook(_with_own_names)  # type: ignore[no-untyped-call]
        with ExitStack() as attached:
            self._attach(attached, process_group, timeout, broadcast_buffers)
            self._attached_by = attached.pop_all()

    def _attach(
        self, attached: ExitStack, process_group: dist.ProcessGroup | None, timeout: float | None, buffers: bool
    ) -> None:
        """Attaches step by step, and says how each is undone."""
        attached.callback(self._let_go_of_groups)
        if self._size > 1:

            def own_group() -> dist.ProcessGroup:
                limit = None if timeout is None else timedelta(seconds=timeout)
                made = new_group([range(self._size)], made_by_all=True, timeout=limit)
                attached.callback(end_group, made)
                # After this all ranks have made it: one that ends it at once does not close the door on others.
                dist.all_reduce(torch.ones(1, device=self._device), group=made)
                return made

            self._group = process_group or own_group()
            if buffers:
                self._sharing = BufferSharing(self.module, process_group or own_group())
            self._together = Together(self.module, self._optimizer, self._group)
        attached.callback(self._let_go_of_steps)
        attached.callback(self._optimizer.register_step_post_hook(self._note_step).remove)
        attached.callback(StepHooks(self._optimizer, self._before_step, self._after_step).remove)
        claim_optimizer(self._optimizer, Technique.DATA_PARALLEL, self, attached)
        claim_model(self.module, Technique.DATA_PARALLEL, self, attached)
        self._lookout = Lookout(self.module, refuse_averager)
        attached.callback(self._lookout.close)
        self._learn()
        if self._group is not None:
            share_state(self.module, self._group)

    def _let_go_of_steps(self) -> None:
        if self._order is not None:
            self._order.close()
        if self._choice is not None:
            self._choice.close()
        self._arrange(None)
        self._order = self._choice = None

    def _let_go_of_groups(self) -> None:
        self._group = self._sharing = self._together = None

    # What users call

    @between_graphs
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        if self._reducer is None:
            return self.module(*args, **kwargs)
        if not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        self._lookout.look()
        self._reducer.check_ended()
        if self._now_trained() != self._trained:
            self._lookout.look_inside()
            self._agree_on_trained()
            self._learn()
        elif self._stepped:
            self._advance()
        self._stepped = False
        if self._sharing is not None and self.module.training and self._reducer.enabled:
            self._sharing.share()
        watch = self._choice.watch if self._choice is not None else None
        with self._split(watch):
            result = self.module(*args, **kwargs)
        if watch is not None:
            self._watch_backward(watch, result)
        return result

    @contextmanager
    def no_update(self) -> Iterator[None]:
        """Return a context in which backwards only accumulate: for all micro-batches of a step but the last."""
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
        """Applies what is pending, lets go of model and optimizer, and returns the model.

        Process groups that were made for it are ended, with their connections and threads; call it on all ranks.

        After a :class:`LostPeerError`, updates whose gradients are lost are left out: their weights are as they were
        before the last step.
        """
        if self._reducer is not None:
            self._attached_by.close()
        return self.module

    @property
    def is_attached(self) -> bool:
        """Whether it has not been detached."""
        return self._reducer is not None

    def explain(self) -> str:
        """Return what is done, and why."""
        if self._reducer is None:
            return "detached"
        why = f" ({self._choice.reason})" if self._choice is not None else ""
        return f"{self._size} rank(s), {len(self._reducer.messages)} message(s) a step, {self._arrangement}{why}"

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
        return self.module.load_state_dict(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        return copy.deepcopy(self.module, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self.module,)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's own, with the model's own names."""
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """The model's own, with the model's own names."""
        return self.module.named_buffers(*args, **kwargs)

    # How steps are arranged

    def _learn(self) -> None:
        """Takes the next step in stock order, to see in which order layers are used."""
        if self._order is not None:
            self._order.close()
        if self._choice is not None:
            self._choice.close()
        self._trained = self._now_trained()
        self._choice = None
        self._order = UseOrder(self.module)
        self._layers = self._order.layers(self._order.numbers())
        self._arrange(STOCK)

    def _agree_on_trained(self) -> None:
        """Sees to it that all ranks begin to learn at the same step, and train the same."""
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
        """Asks who does updates only now: a closure's forward may have come to another arrangement."""
        if self._updates is not None:
            self._updates.before_step(is_last)

    def _after_step(self) -> None:
        if self._updates is not None:
            self._updates.after_step()

    def _note_step(self, *_: Any) -> None:
        self._stepped = True
        if self._together is not None:
            self._together.stepped()

    def _advance(self) -> None:
        """A step is through and the next begins: takes it as ranks have agreed to."""
        if self._order is not None:
            self._order.close()
            self._order = None
            given = self._given()
            if given is not None or self._group is None:
                self._arrange(given or STOCK)
                return
            self._choice = Choice(
                self._layers, self._optimizer, self._group, self._device, self._bucket_bytes, self._byte_budget,
                confirm=self._policy == "auto",
            )  # fmt: skip
        if self._choice is not None:
            wanted = self._choice.step_begins()
            if wanted != self._arrangement:
                self._arrange(wanted)

    def _backward_begins(self) -> None:
        """The first gradient is there and none is on its way: the place where ranks agree on what comes next.

        All ranks come here as often as all others, as they would wait for gradients otherwise; that cannot be said of
        their forwards and steps.
        """
        self.flush()
        if self._together is None or self._group is None:
            return
        is_choosing = self._choice is not None and not self._choice.is_made
        self._together.meet(is_unsettled=self._order is not None or is_choosing)
        if self._order is not None:
            agreed = [self._order.numbers()]
            with naming_lost_peers("the order of layers could not be agreed on"):
                dist.broadcast_object_list(agreed, dist.get_global_rank(self._group, 0), group=self._group)
            self._layers = self._order.layers(agreed[0])
        elif self._choice is not None:
            self._choice.agree()

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
        syncs = self._reducer.enabled if self._reducer is not None else True
        lost = self._settle()
        if self._updates is not None:
            self._updates.detach()
        if self._reducer is not None:
            self._reducer.close(give_up=lost)
        self._updates = self._reducer = None
        if arrangement is None:
            return
        self._arrangement = arrangement
        alone = self._group is None and arrangement.barrier
        buckets = (
            [] if alone else message_params([layer.params for layer in self._layers], arrangement.k, self._bucket_bytes)
        )
        self._reducer = Reducer(
            buckets, self._group, dtype=self._dtype, barrier=arrangement.barrier, begins=self._backward_begins,
            accumulates=self._before_adding,
        )  # fmt: skip
        self._set_syncs(syncs)
        self._queue = WeightGradientQueue(InLine(), self._byte_budget)
        if not arrangement.barrier:
            self._updates = AveragedUpdates(self.module, self._optimizer, self._reducer)

    # In forward and backward

    def _split(self, watch: StepWatch | None) -> AbstractContextManager[Any]:
        if watch is not None:
            return Watched(WeightGradientQueue(watch), self._layers)
        held = {n: layer.module for n, layer in enumerate(self._layers[: self._arrangement.k]) if layer.can_wait}
        if not held or self._updates is None:
            return nullcontext()
        return HeldBack(self._queue, held, self._updates.resolve)

    def _watch_backward(self, watch: StepWatch, result: Any) -> None:
        for made in flat_leaves(result):
            if isinstance(made, torch.Tensor) and made.requires_grad and not made.is_leaf:
                made.register_hook(lambda _: watch.backward_begins())

    def _before_adding(self, p: nn.Parameter) -> None:
        """An update that was decided with a gradient must be done before anything is added to it."""
        if self._updates is not None:
            self._updates.resolve(p)

    def _settle(self) -> bool:
        """Applies what is pending; says whether that could not be done because a rank is lost."""
        try:
            self.flush()
            if self._reducer is not None:
                self._reducer.wait()
        except LostPeerError as error:
            if self._updates is not None:
                self._updates.discard()
            announce(f"DataParallel: updates that were pending are left out: {error}")
            return True
        return False

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


def _size_of(group: dist.ProcessGroup | None) -> int:
    if not dist.is_initialized():
        return 1
    if dist.get_rank(group) < 0:
        raise ArgumentError("process_group", group, "this rank is not in it; wrap the model on its own ranks only")
    return dist.get_world_size(group)


def _with_own_names(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
    """A module that has the wrapper inside loads what it has saved: names without ``module.``."""
    for name in [name for name in state if name.startswith(prefix)]:
        state[f"{prefix}module.{name.removeprefix(prefix)}"] = state.pop(name)


def _itself(module: nn.Module) -> nn.Module:
    return module
