"""Private names of torch's tracers and compilers."""

from __future__ import annotations

import logging
import math
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from types import FunctionType
from typing import Any

import torch

from gradweave._compat.dynamo import sizes_unmarked, without_failing_metrics
from gradweave._logging import announce
from gradweave.errors import ArgumentError, GradweaveError


def trace_to_graph(function: Callable[..., Any], *, as_eager: bool = False) -> Callable[..., torch.fx.GraphModule]:
    """Return a function that records the ATen operations which another one runs on fake tensors, with annotations.

    Args:
        function: The function that is recorded.
        as_eager: Whether they must be the operations that an eager call runs. Otherwise some, such as interpolations,
            are taken apart as torch's compilers want them, which gives other bits.
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.traceback import preserve_node_meta

    def trace(*args: Any) -> torch.fx.GraphModule:
        with preserve_node_meta(), _arithmetic_recorded(), _divisions_guarded():
            if as_eager:
                return _as_in_training(make_fx(_keeping_casts(function))(*args))
            with enable_python_dispatcher(), _recurrent_layers_step_by_step():
                return make_fx(function)(*args)

    return trace


@contextmanager
def _arithmetic_recorded() -> Iterator[None]:
    """Return a context in which functions of numbers are operations where the numbers are symbols.

    Those of ``math`` would ask for the value of a step count, and be right for that step only. Adafactor takes values
    out of tensors with ``item()``: its ``min`` and ``max`` would compare them while tracing, where tensors have none.
    """
    from torch.optim import _adafactor

    names, functions = vars(_adafactor), vars(math)
    before = {name: functions[name] for name in MATH_OF_SYMBOLS}
    functions.update({name: _of_symbols(function, MATH_OF_SYMBOLS[name]) for name, function in before.items()})
    names.update(min=_in_order(torch.sym_min), max=_in_order(torch.sym_max))
    try:
        yield
    finally:
        del names["min"], names["max"]
        functions.update(before)


def _power(base: Any, exponent: Any) -> Any:
    return torch.sym_float(base) ** torch.sym_float(exponent)


MATH_OF_SYMBOLS: dict[str, Callable[..., Any]] = {
    "pow": _power,
    **{name: getattr(torch, f"_sym_{name}") for name in ("sqrt", "cos", "sin", "log2")},
}
"""Functions of ``math`` by name, as torch has them for symbols; an operation of a graph is the latter."""


def _of_symbols(function: Callable[..., Any], recorded: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*numbers: Any) -> Any:
        return recorded(*numbers) if any(map(is_symbolic, numbers)) else function(*numbers)

    return call


@contextmanager
def _divisions_guarded() -> Iterator[None]:
    """Return a context in which a division of symbols is a branch on whether the divisor is zero, as it is in Python.

    An optimizer may catch the error: what it does then would be traced, and taken for right with other numbers, too.
    """
    kinds = (torch.SymFloat, torch.SymInt)
    before = {(kind, name): getattr(kind, name) for kind in kinds for name in _DIVISIONS if hasattr(kind, name)}
    for (kind, name), divide in before.items():
        setattr(kind, name, _guarded(divide, reverse=name.startswith("__r")))
    try:
        yield
    finally:
        for (kind, name), divide in before.items():
            setattr(kind, name, divide)


_DIVISIONS = ("__truediv__", "__rtruediv__", "__floordiv__", "__rfloordiv__", "__mod__", "__rmod__")


def _guarded(divide: Callable[[Any, Any], Any], *, reverse: bool) -> Callable[[Any, Any], Any]:
    @wraps(divide)
    def call(number: Any, other: Any) -> Any:
        divisor = number if reverse else other
        if is_symbolic(divisor) and divisor.node.has_hint() and bool(divisor == 0):
            raise ZeroDivisionError("division by zero")
        return divide(number, other)

    return call


def _in_order(choose: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a choice whose operation has the numbers in the given order, by which Python decides where one is nan."""

    def recorded(one: Any, other: Any) -> Any:
        if isinstance(other, torch.SymFloat) and not isinstance(one, torch.SymFloat):
            one = torch.SymFloat(other.node.wrap_float(float(one)))
        return choose(one, other)

    return recorded


def _as_in_training(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Have recorded operations that look at autograd's mode run as in a forward that is differentiated.

    oneDNN's LSTM, which is the CPU's, keeps what its backward needs only where gradients are on: not in a replay.
    """
    target = torch.ops.aten.mkldnn_rnn_layer.default
    nodes = graph.graph.find_nodes(op="call_function", target=target)
    for node in nodes:
        node.target = _lstm_in_training
    if nodes:
        graph.recompile()
    return graph


def _lstm_in_training(*args: Any) -> Any:
    with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():  # the mode, but nothing that autograd records
        return torch.ops.aten.mkldnn_rnn_layer.default(*args)


class LongSequenceError(GradweaveError):
    """Recurrent layers over so long a sequence that a graph of their single steps takes too long to compile."""


_MOST_CELLS = 128
"""Steps of recurrent layers in one graph; Inductor takes nearly a second for each on a slow CPU."""


@contextmanager
def _recurrent_layers_step_by_step() -> Iterator[None]:
    """Return a context in which torch's decompositions of recurrent layers are ATen operations on any device.

    On a CPU that of an LSTM would be oneDNN's if the batch requires no gradient, as if there was nothing to train;
    Inductor has no kernel for that in a graph with its backward.

    On a GPU the decompositions have no other choice, so nothing that Inductor compiles calls cuDNN's layers.
    ``flatten_parameters`` has made the weights views of one buffer there, which do not overlap. A graph writes them in
    place, so they stay that. A replay on a GPU has not been tried.
    """
    from torch._decomp import decompositions

    select = decompositions.select_one_layer_lstm_function
    run: Callable[..., Any] = decompositions._rnn_helper
    cells = 0

    def run_short(batch: Any, hidden: Any, params: Any, has_biases: bool, layers: int, *options: Any) -> Any:
        *_, bidirectional, batch_first, layer_function = options
        sizes = getattr(layer_function, "keywords", {}).get("batch_sizes")  # of packed sequences
        steps = len(sizes) if sizes is not None else batch.shape[1 if batch_first else 0]
        nonlocal cells
        cells += steps * layers * (2 if bidirectional else 1)
        if cells > _MOST_CELLS:
            raise LongSequenceError(f"{cells} steps of recurrent layers, more than {_MOST_CELLS}, take long to compile")
        return run(batch, hidden, params, has_biases, layers, *options)

    decompositions.select_one_layer_lstm_function = lambda *_: decompositions.one_layer_lstm
    decompositions._rnn_helper = run_short
    try:
        yield
    finally:
        decompositions.select_one_layer_lstm_function, decompositions._rnn_helper = select, run


def _keeping_casts(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that autocast casts a weight once for all its uses, as in an eager call.

    Tracing turns autocast's cache off: each use would have a cast, and a gradient, of its own, summed up in float32.
    """
    keep = torch.is_autocast_cache_enabled()

    @wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        before = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(keep)
        try:
            return function(*args, **named)
        finally:
            torch.set_autocast_cache_enabled(before)

    return call


class _AsEager(torch.nn.Module):
    """A graph that runs the operations of an eager call, even if torch's compilers would decompose some of them."""

    def __init__(self, graph: torch.fx.GraphModule) -> None:
        super().__init__()
        self.graph = graph
        self._run = _keeping_casts(torch.fx.Interpreter(graph).run)

    def forward(self, *inputs: Any) -> Any:
        """Run the graph."""
        with torch._C._DisablePythonDispatcher():
            return self._run(*inputs)


def fake_mode() -> Any:
    """Return a mode in which tensors have no data, and numbers may be symbols."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


def fake_of(mode: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without data that is like another one, its shape fixed."""
    fake: torch.Tensor = mode.from_tensor(tensor.detach(), static_shapes=True)
    return fake


def number_symbol(mode: Any, name: str, value: float) -> Any:
    """Return a number that tracing keeps as an input; ``value`` decides branches on it, which are remembered."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    environment, source = mode.shape_env, ConstantSource(name)
    symbol = environment.create_symbol(
        value,
        source=source,
        dynamic_dim=DimDynamic.DYNAMIC,
        constraint_dim=None,
        positive=None,
        do_not_specialize_zero_one=True,
    )
    create = environment.create_symintnode if isinstance(value, int) else environment.create_symfloatnode
    return create(symbol, hint=value, source=source)


def is_settled(symbol: Any) -> bool:
    """Return whether what was traced is right for one value of a symbol only."""
    return is_symbolic(symbol) and bool(symbol.node.expr.is_number)


def drop_last_outputs(graph: torch.fx.GraphModule, count: int) -> list[Any]:
    """Remove the last outputs of a graph that returns a list of values, and return their nodes."""
    from torch.utils._pytree import tree_structure

    (outputs,) = graph.graph.output_node().args
    kept, dropped = list(outputs)[: len(outputs) - count], list(outputs)[len(outputs) - count :]  # type: ignore
    graph.graph.output_node().args = (kept,)
    codegen: Any = graph.graph._codegen
    codegen.pytree_info = codegen.pytree_info._replace(out_spec=tree_structure([0] * len(kept)))
    graph.recompile()
    return dropped


def names_of(symbols: list[Any]) -> list[Any]:
    """Return the names by which branches know symbols; call it before tracing, which may replace symbols by values."""
    return [symbol.node.expr for symbol in symbols]


def guards_of(mode: Any, names: list[Any]) -> Callable[[Any], bool]:
    """Return a function that tells whether other values would take every branch that the symbols took."""
    known = set(names)
    branches = [guard.expr for guard in mode.shape_env.guards if guard.expr.free_symbols <= known]
    held: tuple[Any, ...] | None = None

    def hold(values: Any) -> bool:
        # Called at each step, mostly with the numbers of the last one; substitution costs a millisecond.
        nonlocal held
        given = tuple(values)
        if given == held:
            return True
        bound = dict(zip(names, given, strict=True))
        holds = all(bool(branch.subs(bound)) for branch in branches)
        held = given if holds else held
        return holds

    return hold


def _data_dependent_branch() -> type[Exception]:
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return GuardOnDataDependentSymNode


class DataDependentError(Exception):
    """Stands for torch's own error in ``except``: traced code branched on a value that is known only at run time."""


@contextmanager
def as_if_compiling(enabled: bool) -> Iterator[None]:
    """Return a context in which ``torch.compiler.is_compiling()`` holds: optimizers then keep to tensors."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = enabled or before
    try:
        yield
    except _data_dependent_branch() as error:
        raise DataDependentError(str(error)) from error
    finally:
        torch.compiler._is_compiling_flag = before


def traces_entered_modes() -> bool:
    """Return whether Dynamo traces function modes that one hook enters and another leaves; torch 2.13 does."""
    version = torch.__version__.split("+")[0].split(".")
    return (int(version[0]), int(version[1])) >= (2, 13)


@contextmanager
def as_it_was() -> Iterator[None]:
    """Return a context for tracing that restores autocast and all modes, even if the code inside fails."""
    functorch = torch._C._functorch
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    autocast = [(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in devices]
    cache, nesting = torch.is_autocast_cache_enabled(), torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    transforms = len(functorch.get_interpreter_stack() or ())
    functions = torch._C._len_torch_function_stack()
    try:
        yield
    except BaseException:
        for _ in range(len(functorch.get_interpreter_stack() or ()) - transforms):
            functorch.pop_dynamic_layer_stack()
        for _ in range(torch._C._len_torch_function_stack() - functions):
            torch.overrides._pop_mode()
        for device, enabled, dtype in autocast:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(cache)
        while torch.autocast_increment_nesting() > nesting:
            torch.autocast_decrement_nesting()
            torch.autocast_decrement_nesting()
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        raise


def is_any_autocast_enabled() -> bool:
    """Return whether autocast is on, for any kind of device."""
    return bool(torch._C._is_any_autocast_enabled())


def enters_autocast(node: torch.fx.Node) -> bool:
    """Return whether a node of a graph that Dynamo captured enters autocast."""
    return node.target is torch.amp.autocast_mode._enter_autocast


def schema_of(target: Any) -> Any:
    """Return the schema of an operation; None for anything else that a node may call."""
    return getattr(target, "_schema", None)


def is_symbolic(value: Any) -> bool:
    """Return whether a traced value is a number that is known only when the graph runs."""
    return isinstance(value, (torch.SymFloat, torch.SymInt))


def rematerialize(
    forward: torch.fx.GraphModule, inputs: list[torch.Tensor], budget: float, *, decompose: bool
) -> Callable[..., Any]:
    """Return a forward with a backward of its own that keeps a share of the activations, by torch's partitioner.

    Args:
        forward: The graph that Dynamo captured.
        inputs: Tensors without data.
        budget: The share, from 0 to 1.
        decompose: Whether to decompose operations as Inductor does, so that parts of them can be recomputed; the
            results are then Inductor's, to rounding.
    """
    from torch._functorch import config
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._functorch.aot_autograd import aot_module_simplified
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch.utils.checkpoint import CheckpointPolicy

    def keep(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:  # noqa: ARG001
        return make_boxed_func(gm.forward)

    def partition(joint: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        for node in filter(_draws_random_numbers, joint.graph.nodes):
            if isinstance(node.meta.get("val"), torch.Tensor):
                node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)
            elif budget < 1:
                remedy = f'would draw the numbers of {node.target} again; give None or 1, or lower="inductor"'
                raise ArgumentError("memory_budget", budget, remedy)
        return min_cut_rematerialization_partition(joint, *args, **kwargs)

    table = None
    if decompose:
        from torch._inductor import lowering  # noqa: F401  (torch 2.11: max_pool2d's decomposition takes it for imported)
        from torch._inductor.decomposition import select_decomp_table

        table = select_decomp_table()
    settings: dict[str, Any] = {"activation_memory_budget": budget}
    if hasattr(config, "force_non_lazy_backward_lowering"):
        settings["force_non_lazy_backward_lowering"] = True
    target: Any = forward if decompose else _AsEager(forward)
    with config.patch(settings), _recurrent_layers_step_by_step():
        split: Callable[..., Any] = aot_module_simplified(
            target,
            inputs,
            fw_compiler=keep,
            bw_compiler=keep,
            partition_fn=partition,
            decompositions=table,
        )
    return split


def _draws_random_numbers(node: torch.fx.Node) -> bool:
    """Return whether an operation gives another result each time; attention without dropout does not."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    for position, argument in enumerate(arguments):
        if argument.name == "dropout_p":
            given = node.args[position] if position < len(node.args) else node.kwargs.get("dropout_p", 0.0)
            return bool(given != 0)
    return True


def compile_with_inductor(
    graph: torch.fx.GraphModule, inputs: list[torch.Tensor], combine: Callable[[Any], list[list[Any]]]
) -> Callable[..., Any]:
    """Compile a graph of ATen operations, in-place ones included, to a function of its inputs.

    Args:
        graph: The graph.
        inputs: Examples of its inputs.
        combine: Return groups of nodes of Inductor's scheduler that become one kernel each. If Inductor fails at
            that, it compiles without.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.scheduler import ForeachKernelSchedulerNode

    mode = fake_mode()
    examples = [fake_of(mode, x) for x in inputs]
    before = ForeachKernelSchedulerNode.group_algorithm_for_combo_kernels
    ForeachKernelSchedulerNode.set_group_algorithm_for_combo_kernels(combine)
    copied = torch.fx.Graph()
    copied.output(copied.graph_copy(graph.graph, {}))
    try:
        settings = config.patch(combo_kernels=True, reorder_for_peak_memory=False)
        with tracing(TracingContext(mode)), settings:
            compiled: Any = compile_fx(torch.fx.GraphModule(graph, copied), examples)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # Inductor raises whatever its code runs into
        announce(f"compile: small kernels are not combined: {type(error).__name__}")
        with tracing(TracingContext(mode)):
            compiled = compile_fx(graph, examples)
    finally:
        ForeachKernelSchedulerNode.set_group_algorithm_for_combo_kernels(before)
    return compiled  # type: ignore[no-any-return]


def scheduled_before(scheduler: Any, node: Any) -> list[Any]:
    """Return the nodes of Inductor's scheduler that a node needs."""
    needed: list[Any] = scheduler._get_unmet_dep_nodes(node)
    return needed


def elements_of(node: Any) -> int | None:
    """Return the number of elements that one of Inductor's kernels on a GPU covers; None for other nodes."""
    from torch._inductor.scheduler import FusedSchedulerNode, SchedulerNode

    device = node.get_device()
    if type(node) not in (SchedulerNode, FusedSchedulerNode) or device is None or device.type != "cuda":
        return None
    total = 1
    for size in node.group[1]:
        total *= size
    return int(total) if getattr(total, "is_number", True) else None


def made_by_mixed_reductions(scheduler: Any) -> set[str]:
    """Return the buffers of kernels that reduce in two directions at once; their readers cannot be combined."""
    from torch._inductor import scheduler as module

    kind = getattr(module, "FusedMixOrderReductions", ())
    return {name for node in scheduler.nodes if isinstance(node, kind) for name in node.get_buffer_names()}


class DynamoError(Exception):
    """Stands for torch's own errors in ``except``: a function cannot be captured whole."""


class TooManyVariantsError(DynamoError):
    """A function was captured as often as allowed, and is called in yet another way."""


def _with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of a function with code of its own: Dynamo counts variants by code, not by function."""
    code = function.__code__.replace()
    return FunctionType(code, function.__globals__, function.__name__, None, function.__closure__)


@contextmanager
def _whole_functions() -> Iterator[None]:
    """Return a context in which Dynamo does not decompose functions that it decomposes whatever its settings say."""
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    handlers: dict[Any, Any] = TorchInGraphFunctionVariable._get_handlers()
    taken = {function: handlers.pop(function) for function in _TAKEN_APART if function in handlers}
    try:
        yield
    finally:
        handlers.update(taken)


_TAKEN_APART = (torch.addcdiv, torch._foreach_lerp_)


@contextmanager
def _compiling_unseen(asked: list[str]) -> Iterator[None]:
    """Return a context in which Dynamo answers a user's code that it is not compiling, as an eager step does.

    Mamba of transformers, for example, computes its scan in another way where it is compiled. Code of torch and
    gradweave asks for other reasons: it is made for Dynamo.

    Args:
        asked: Is extended by the module that has asked.
    """
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    handlers: dict[Any, Any] = TorchInGraphFunctionVariable._get_handlers()
    before = {function: handlers[function] for function in _QUESTIONS if function in handlers}

    def answer(variable: Any, tx: Any, *args: Any, **named: Any) -> Any:
        module = str(tx.f_globals.get("__name__"))
        if module.partition(".")[0] in ("torch", "gradweave"):
            return before[variable.value](variable, tx, *args, **named)
        asked.append(module)
        return VariableTracker.build(tx, False)

    handlers.update(dict.fromkeys(before, answer))
    try:
        yield
    finally:
        handlers.update(before)


_QUESTIONS = (
    torch.compiler.is_compiling,
    torch.compiler.is_dynamo_compiling,
    torch._utils.is_compiling,
)


def dynamo_compile(
    function: Callable[..., Any], backend: Callable[..., Any], variants: int, *, exact: bool = False
) -> tuple[Callable[..., Any], Callable[[], None]]:
    """Return a function that a backend compiles whole, once for each shape, up to a number of variants.

    Errors of the backend come through; what Dynamo refuses is a :class:`DynamoError` that names the user's file and
    line.

    Args:
        function: The function.
        backend: Called with the graph; returns what runs it.
        variants: The most variants that there may be.
        exact: Whether the graph must have the operations that an eager call runs: none of them decomposed, and those of
            code that asks whether it is compiled as if it was not, unless that cannot be a graph.

    Returns:
        The function, and one that frees all that was compiled for it.
    """
    import torch._dynamo
    from torch._C._dynamo.eval_frame import reset_code
    from torch._dynamo import exc
    from torch._dynamo.symbolic_convert import InstructionTranslator

    own = _with_own_code(function)

    def with_fixed_numbers(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        translator = InstructionTranslator.current_tx()
        if translator.output.random_calls:  # of a generator of its own, the first numbers would be those of all steps
            raise DynamoError("it draws numbers with Python's random, which a graph cannot")
        if _overflows(translator.output.side_effects):  # Dynamo takes deques for ones without maxlen
            raise DynamoError("it puts more into a deque than its maxlen, which a graph would keep")
        return backend(gm, inputs)

    compiled = torch.compile(own, backend=with_fixed_numbers, fullgraph=True, dynamic=False)
    refusals = (exc.Unsupported, exc.UserError, exc.TorchRuntimeError)

    settings: Any = torch._dynamo.config.patch(  # once: making it takes longer than all that a step else does here
        {
            "recompile_limit": variants,
            "accumulated_recompile_limit": 1024,
            "skip_nnmodule_hook_guards": False,
            "use_numpy_random_stream": True,
            "enable_dynamo_decompositions": not exact,
            "ignore_logging_functions": _silent_functions(),
            # Refused otherwise, as forwards whose graph grows with their sequences. What they call is traced here like
            # anything else, and a step whose trace fails runs eagerly.
            "allow_rnn": True,
        }
    )

    asked: list[str] = []
    is_seen = not exact

    def captured(*args: Any, **named: Any) -> Any:
        nonlocal is_seen
        if not is_seen:
            asked.clear()
            try:
                with _compiling_unseen(asked):
                    return compiled(*args, **named)
            except refusals:
                if not asked:
                    raise
        result = compiled(*args, **named)
        is_seen = True
        return result

    def call(*args: Any, **named: Any) -> Any:
        seen = _whole_functions() if exact else nullcontext()
        with settings, seen, sizes_unmarked((args, named)), without_failing_metrics():
            try:
                return captured(*args, **named)
            except exc.BackendCompilerFailed as error:
                raise error.inner_exception from error
            except exc.FailOnRecompileLimitHit as error:
                raise TooManyVariantsError(str(error)) from error
            except refusals as error:
                raise DynamoError(str(error)) from error

    return call, partial(reset_code, own.__code__)


def _overflows(effects: Any) -> bool:
    """Return whether a deque of the user's would have become longer than its ``maxlen``."""
    for value in effects.keepalive:
        if isinstance(value, deque) and value.maxlen is not None:
            known = effects.id_to_variable.get(id(value))
            if known is not None and len(known.items) > value.maxlen:
                return True
    return False


_LOGGING_METHODS = ("debug", "info", "warning", "warn", "error", "exception", "critical", "log")


def _silent_functions() -> set[Any]:
    """Return functions that only tell the user something: a graph leaves them out, instead of being refused.

    Libraries add methods of their own to loggers, such as ``warning_once``. Methods that return a value, on which a
    forward may branch, are not among them.
    """
    own = {vars(logging.Logger).get(name + form) for name in _LOGGING_METHODS for form in ("", "_once", "_advice")}
    of_module = {getattr(logging, name, None) for name in _LOGGING_METHODS}
    return {*own, *of_module, warnings.warn, warnings.warn_explicit, print} - {None}


def compile_lock() -> AbstractContextManager[Any]:
    """Return the lock to hold while tracing or compiling, as Dynamo does: torch keeps that state in globals."""
    from torch._dynamo.convert_frame import compile_lock as lock

    return lock


def is_traced_to_operations() -> bool:
    """Return whether ``make_fx`` records the operations that run now."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return get_proxy_mode() is not None
