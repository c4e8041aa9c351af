"""Private names of eager torch: optimizers, hooks, autograd, scalers."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from operator import attrgetter
from types import FunctionType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

disabled_torch_function = torch._C._disabled_torch_function_impl
"""As ``__torch_function__`` of a subclass: functions see it as a plain tensor."""


map_nested = tree_map
"""Applies a function to every leaf of nested containers."""


DispatchMode = torch.utils._python_dispatch.TorchDispatchMode
"""A context that sees, or changes, the operations that run."""

ConvolutionModule = torch.nn.modules.conv._ConvNd
"""What all convolution modules have in common."""

NO_BACKWARD = -1
"""What :func:`current_backward` says where none is running."""

no_torch_function = torch._C.DisableTorchFunctionSubclass
"""Context in which subclasses' ``__torch_function__`` is not consulted."""


def alias_of(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor with a tensor's memory, made without asking the tensor's class."""
    with no_torch_function():
        return torch.Tensor.detach(tensor)


def use_count(tensor: torch.Tensor) -> int:
    """Return how often C++ refers to a tensor; ``torch.utils.swap_tensors`` asks this first."""
    count: int = torch.Tensor._use_count(tensor)  # type: ignore[attr-defined]
    return count


def other_function_modes() -> int:
    """How many modes besides the one that is being asked want to see torch's functions."""
    return int(torch._C._len_torch_function_stack())


def without_function_mode(kind: type[TorchFunctionMode]) -> AbstractContextManager[Any]:
    """Context in which the innermost mode is left, if it is one of a kind; all others stay."""
    innermost = torch.overrides._get_current_function_mode()
    return torch.overrides._pop_mode_temporarily() if isinstance(innermost, kind) else nullcontext()


def function_modes() -> list[TorchFunctionMode]:
    """The modes besides the one that is being asked that want to see torch's functions, the innermost last."""
    modes: list[TorchFunctionMode] = torch.overrides._get_current_function_mode_stack()
    return modes


def is_device_mode(mode: TorchFunctionMode) -> bool:
    """Whether a mode only says where new tensors are made, as ``torch.set_default_device`` has one do."""
    return isinstance(mode, torch.utils._device.DeviceContext)


def enter_function_mode(mode: TorchFunctionMode) -> None:
    """Enters a mode that somebody else leaves."""
    torch.overrides._push_mode(mode)


def leave_function_mode(mode: TorchFunctionMode) -> None:
    """Leaves a mode that is active, also one that others were entered inside of; these stay."""
    inside = []
    while (innermost := torch.overrides._pop_mode()) is not mode:
        inside.append(innermost)
    for other in reversed(inside):
        torch.overrides._push_mode(other)


def part_by_part(function: Any, *, traceable: bool = False, **others: Any) -> Callable[..., Any]:
    """A function of ``torch.nn.functional`` that asks nobody whether to run it, so that the ones it calls are asked.

    Its own first lines would hand it to a mode as a whole, which is left for as long as it runs. Other names are what
    they are now: make it anew for each call.

    Args:
        function: The function.
        traceable: For Dynamo, which looks names up in the module that a function says it is of, unless it says none.
        others: What it finds under names of its module in their place.
    """
    names = {**function.__globals__, "has_torch_function": lambda _: False, **others}
    if traceable:
        del names["__name__"]
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def own_step(optimizer: Optimizer) -> Callable[[Optimizer], Any]:
    """The update of an optimizer's class, without the step hooks that torch wraps around it."""
    step = type(optimizer).step
    return getattr(step, "__wrapped__", step)


def step_pre_hooks(optimizer: Optimizer) -> dict[int, Any]:
    """The hooks that run before a step, in their order."""
    return optimizer._optimizer_step_pre_hooks


def hooks_of_all() -> bool:
    """Whether hooks are there that are called for every module, or before every optimizer's step."""
    module = torch.nn.modules.module
    return bool(
        module._global_forward_hooks
        or module._global_forward_pre_hooks
        or module._global_backward_hooks
        or module._global_backward_pre_hooks
        or _global_optimizer_pre_hooks
    )


CriterionModule = torch.nn.modules.loss._Loss
"""What torch's losses have in common."""


def put_first_behind_step(optimizer: Optimizer, hook: int) -> None:
    """Makes one of the hooks that run behind a step the first of them."""
    hooks: dict[int, Any] = optimizer._optimizer_step_post_hooks
    others = [(number, callback) for number, callback in hooks.items() if number != hook]
    for number, _ in others:
        del hooks[number]
    hooks.update(others)


@contextmanager
def without_step_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Context in which an optimizer's hooks do not run, also where its step calls its parent's."""
    before, behind = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    try:
        yield
    finally:
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = before, behind


def load_hooks(module: torch.nn.Module) -> list[Any]:
    """The hooks that run after a module has loaded a state dict."""
    return list(module._load_state_dict_post_hooks.values())


def has_one_hook(module: torch.nn.Module) -> bool:
    """Whether a module's forward has one hook behind it, and none in front."""
    return len(module._forward_hooks) == 1 and not module._forward_pre_hooks


def forward_hooks(module: torch.nn.Module) -> list[Any]:
    """The hooks that run before a module's forward."""
    return list(module._forward_pre_hooks.values())


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Calls back when the backward that is now running is through; not if it fails."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


current_backward: Callable[[], int] = torch._C._current_graph_task_id
"""A number for the backward that is now running; one inside another has its own."""


def metadata_guard(cls: type[torch.Tensor], like: torch.Tensor) -> Any:
    """A tensor of a subclass that looks like another one and has no data."""
    return torch.Tensor._make_wrapper_subclass(
        cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device, requires_grad=False
    )


saved_tensors_hooks: Callable[[], Any] = partial(torch._C._autograd._top_saved_tensors_default_hooks, False)
"""To whom what autograd saves is handed, as under activation checkpointing; None if to nobody."""


def saved_tensors_are_hooked() -> bool:
    """Whether what autograd saves is handed to somebody."""
    return saved_tensors_hooks() is not None


def is_being_traced() -> bool:
    """Whether the code that runs now is being made into a graph, by Dynamo or by the older tracer."""
    return torch.compiler.is_compiling() or bool(torch._C._is_tracing())


@contextmanager
def not_traced() -> Iterator[None]:
    """Context in which the older tracer does not see what runs."""
    state = torch._C._get_tracing_state()
    if state is None:
        yield
        return
    set_state: Any = torch._C._set_tracing_state  # type: ignore[attr-defined]
    set_state(None)
    try:
        yield
    finally:
        set_state(state)


keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
"""Whether the backward that is now running leaves its graph as it is, for another one."""


def asked_for_fake_tensor() -> bool:
    """Whether torch calls the method from whose code this is called to make a tensor without data of another one."""
    return sys._getframe(2).f_globals.get("__name__") == "torch._subclasses.meta_utils"


def asked_by_script() -> bool:
    """Whether it is torch.jit.script that reads the property from whose code this is called."""
    return str(sys._getframe(2).f_globals.get("__name__")).startswith("torch.jit")


def parameters_behind(result: torch.Tensor) -> list[torch.nn.Parameter]:
    """The parameters that would get a gradient from a backward of a result."""
    found, seen, left = [], {None}, [result.grad_fn]
    while left:
        node: Any = left.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.nn.Parameter):
            found.append(leaf)
        left += [following for following, _ in node.next_functions]
    return found


def in_forward_mode() -> bool:
    """Whether forward-mode derivatives are being computed."""
    return torch.autograd.forward_ad._current_level >= 0


def is_parametrized(module: torch.nn.Module) -> bool:
    """Whether reading a module's weight computes it."""
    return torch.nn.utils.parametrize.is_parametrized(module)


function_transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
"""What ``torch.func`` is doing to the code that runs now (grad, vjp, jvp, vmap, ...); None if nothing."""


def in_function_transform() -> bool:
    """Whether ``torch.func`` is transforming the code that runs now."""
    return function_transform() is not None


watchers: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""How many modes see, or trace, the operations that run now."""


def lasting_node(y: torch.Tensor) -> tuple[Any, int] | None:
    """What autograd has made of the operation that gave a tensor, and which of its outputs that is.

    Of a view it is what gave its base: a view gets another node when the base is changed in place. None if the
    view is more than another shape.
    """
    base = y._base
    if base is not None:
        if not (base.numel() == y.numel() and base.is_contiguous() and y.is_contiguous()):
            return None
        y = base
    node = y.grad_fn
    return None if node is None else (node, y.output_nr)


def kept_copy(node: Any) -> torch.Tensor | None:
    """What a layer's node keeps of the layer's input, which autocast may have made of it; None if it does not say.

    Not to be asked where what autograd saves is handed to somebody, who would be asked in turn.
    """
    try:
        kept = getattr(node, _INPUT_OF.get(node.name(), ""), None)
    except RuntimeError:  # a backward has been there already
        return None
    return kept if isinstance(kept, torch.Tensor) else None


_INPUT_OF = {"AddmmBackward0": "_saved_mat1", "ConvolutionBackward0": "_saved_input"}


version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
"""How often a tensor's memory has been changed in place."""


def notes_of_node(node: Any) -> dict[Any, Any]:
    """Notes that are kept with a node of autograd, for as long as it lives."""
    notes: dict[Any, Any] = node.metadata
    return notes


def stream_teller(device: torch.device) -> Callable[[], int]:
    """What tells the number of the stream that work on a device goes to now; 0 for the default one."""
    return partial(torch._C._cuda_getCurrentRawStream, device.index) if device.type == "cuda" else int


def outside_function_transforms() -> AbstractContextManager[Any]:
    """Context in which ``torch.func`` leaves the code alone that it is transforming."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether a module runs outside the reach of ``__torch_function__``: compiled or scripted."""
    from torch._dynamo import OptimizedModule

    return isinstance(module, (OptimizedModule, torch.jit.ScriptModule)) or (
        getattr(module, "_compiled_call_impl", None) is not None
    )


def is_compiled_outside(module: torch.nn.Module) -> bool:
    """Whether a module is what ``torch.compile(module)`` returns: its own hooks run outside of what is compiled."""
    from torch._dynamo import OptimizedModule

    return isinstance(module, OptimizedModule)


def inside_of_compiled(module: torch.nn.Module) -> torch.nn.Module:
    """The model that ``torch.compile(model)`` was given, of what it returned; any other one as it is."""
    return module._orig_mod if is_compiled_outside(module) else module  # type: ignore[return-value]


def without_new_function_modes(known: int) -> AbstractContextManager[Any]:
    """Context in which no mode sees torch's functions, if there are more of them than were known."""
    return torch._C.DisableTorchFunction() if other_function_modes() > known else nullcontext()


def set_version(tensors: list[torch.Tensor], versions: list[int]) -> None:
    """Says how often tensors have been changed in place."""
    torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """Context in which no mode sees, or traces, the operations that run."""
    if watchers() == 0:
        return nullcontext()
    return torch.utils._python_dispatch._disable_current_modes()


def memory_of(tensor: torch.Tensor) -> int:
    """What names the memory behind a tensor, the same for all views of it."""
    return int(tensor.untyped_storage()._cdata)


def norms_of(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The norm of each of many tensors, in one go."""
    return list(torch._foreach_norm(tensors))


def add_one(tensors: list[torch.Tensor]) -> None:
    """Adds 1 to each of many tensors, in one go."""
    torch._foreach_add_(tensors, 1)


def storage_users(tensor: torch.Tensor) -> int:
    """How many tensors share a tensor's memory, itself included."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)) - 1  # without the one that is asked here


_use_count: Callable[[int], int] = torch._C._storage_Use_Count
_references_to = sys.getrefcount


def is_sole_user(tensor: torch.Tensor) -> bool:
    """Whether nothing else refers to a tensor's memory: no tensor, no storage, no array that it was made from."""
    storage = tensor.untyped_storage()
    return (
        _use_count(storage._cdata) == _SOLE_USE and _references_to(storage) == _SOLE_REFERENCE and storage.resizable()
    )


def are_kept(grads: Sequence[torch.Tensor | None]) -> bool:
    """Return whether anything but ``.grad`` can see one of the gradients in a list, and could before this backward.

    A backward puts a new tensor into ``.grad``, whose version is 0, or adds in place to the one that is there.
    """
    return any(
        type(grad) is torch.Tensor
        and grad._version > 0
        and (_references_to(grad) > _REFERENCES_TO_GRADIENT or storage_users(grad) > 1)
        for grad in grads
    )


def _references_to_gradient() -> int:
    p = torch.nn.Parameter(torch.empty(1))
    p.grad = torch.empty(1)
    return next(_references_to(grad) for grad in [p.grad])


_REFERENCES_TO_GRADIENT = _references_to_gradient()
"""How many there are to one that is in ``.grad``, and in a list that a generator goes through."""


def _references() -> tuple[int, int]:
    tensor = torch.empty(1)
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


_SOLE_USE, _SOLE_REFERENCE = _references()
"""What both say where that is so, as asked there."""


def free_matmul_workspaces() -> None:
    """Frees what cuBLAS keeps for every thread and stream that has multiplied; it is made anew where needed.

    An eager step leaves two on a GPU, of its forward's and its backward's thread: on an H200 64 MiB.
    """
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()


def flat_leaves(value: Any) -> list[Any]:
    """The leaves of nested containers, in order."""
    leaves: list[Any] = tree_leaves(value)
    return leaves


unscale_in_place = torch._amp_foreach_non_finite_check_and_unscale_
"""Multiplies tensors by a factor and notes, as 1, if any is not finite."""


update_scale_in_place = torch._amp_update_scale_
"""Lets a loss scale grow or back off."""


def scaler_tensors(scaler: torch.amp.GradScaler) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale and the growth tracker, which exist once something was scaled."""
    return scaler._scale, scaler._growth_tracker  # type: ignore[return-value]


def ready_scaler_tensors(scaler: torch.amp.GradScaler, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, made if nothing was scaled yet."""
    if scaler._scale is None:
        scaler._lazy_init_scale_growth_tracker(device)
    return scaler_tensors(scaler)


def mark_stepped(optimizer: Optimizer) -> None:
    """Tells schedulers and hooks behind the step that one was taken without ``optimizer.step()``."""
    optimizer._opt_called = True  # type: ignore[attr-defined]
    for hook in (*optimizer._optimizer_step_post_hooks.values(), *_global_optimizer_post_hooks.values()):
        hook(optimizer, (optimizer,), {})


def will_be_accumulated(param: torch.Tensor) -> bool:
    """Whether the backward that is now running puts a leaf's gradient into ``.grad``, and does not return it."""
    return _is_reached(param, if_returned=False)


def gets_gradient(param: torch.Tensor) -> bool:
    """Whether the backward that is now running computes a leaf's gradient, to put it into ``.grad`` or to return it."""
    return _is_reached(param, if_returned=True)


def _is_reached(param: torch.Tensor, *, if_returned: bool) -> bool:
    try:
        return bool(torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(param).node))
    except RuntimeError:  # of a leaf that torch.autograd.grad() was asked for
        return if_returned


def has_backward_hooks(module: torch.nn.Module) -> bool:
    """Whether somebody is called when backward comes to a module, or leaves it."""
    return bool(module._backward_hooks) or bool(module._backward_pre_hooks)


def gradient_hooks(param: torch.Tensor) -> int:
    """How many are to be called with a parameter's gradient."""
    return len(param._backward_hooks or ()) + len(param._post_accumulate_grad_hooks or ())


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copies each source into its target; on a GPU in few kernels."""
    if targets:
        torch._foreach_copy_(targets, sources)


_MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextmanager
def hooks_suspended(module: torch.nn.Module) -> Iterator[None]:
    """Context in which a module and its parts have no hooks but those of torch's that compute weights."""
    suspended = [(part, name, vars(part)[name]) for part in module.modules() for name in _MODULE_HOOKS]
    for part, name, hooks in suspended:
        vars(part)[name] = OrderedDict((key, hook) for key, hook in hooks.items() if _computes_a_weight(hook))
    try:
        yield
    finally:
        for part, name, hooks in suspended:
            vars(part)[name] = hooks


def _computes_a_weight(hook: Any) -> bool:
    """As weight and spectral norm and pruning do."""
    return any(base.__module__.startswith("torch.nn.utils.") for base in type(hook).__mro__)


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd knows a tensor as a view of another one."""
    return bool(tensor._is_view())
