"""The operations of forward and backward, noted while they run, as a graph that can be run task by task.

Nothing is traced: the model runs once, eagerly, and what it does on the device is written down. That takes little more
than the step itself, where tracing takes many seconds, and the operations are those of a loop, with their kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import getitem
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node
from torch.utils.weak import WeakTensorKeyDictionary

from gradweave._compat.dispatch import EveryResult
from gradweave.compiler.api import loss_and_more
from gradweave.compiler.passes.placement import split_convolutions_of
from gradweave.compiler.trace import changed_by, note_phase
from gradweave.errors import GradweaveError
from gradweave.step_graph.recording import Mark, run_graph
from gradweave.step_graph.tasks import module_names, tasks_among

_aten = torch.ops.aten
_UNWRITTEN = (_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided)
"""What gives memory that somebody has yet to write."""


class Operations:
    """Forward and backward of one batch, operation by operation.

    Args:
        graph: Of the operations.
        inputs: Of the graph.
        gradients: What gives the gradients of the parameters that have one.
        trainable: All that are to be trained; those that the graph does not read belong to no layer.
        model: Whose modules are the layers.

    Attributes:
        layers: The names of the modules that are its layers, by their number.
    """

    def __init__(
        self,
        graph: Graph,
        inputs: Sequence[torch.Tensor],
        gradients: dict[nn.Parameter, Node],
        trainable: Sequence[nn.Parameter],
        model: nn.Module,
    ) -> None:
        placeholder_of = dict(zip(map(id, inputs), (n for n in graph.nodes if n.op == "placeholder"), strict=True))
        params = [p for p in trainable if id(p) in placeholder_of]
        owner = {placeholder_of[id(p)]: index for index, p in enumerate(params)}
        given: dict[Node, list[int]] = {}
        for index, p in enumerate(params):
            if p in gradients:
                given.setdefault(gradients[p], []).append(index)
        self._device = params[0].device.type
        self._graph = graph
        self._inputs = list(inputs)
        self._tasks = tasks_among(list(graph.nodes), owner, module_names(params, model), given)
        self.layers = self._tasks.layers

    def run(self, mark: Mark) -> None:
        """Does everything once more, each task of a layer in a context of its own.

        What autocast has cast was noted already.
        """
        with torch.no_grad(), torch.autocast(self._device, enabled=False):
            run_graph(nn.Module(), self._graph, self._inputs, self._tasks.places, mark)


class UnseenError(GradweaveError):
    """A step does something that is not an operation of torch's, or one that cannot be done again on its own."""


def differentiate(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    params: Sequence[nn.Parameter],
    batch: Sequence[Any],
    *,
    between: Callable[[], None] = lambda: None,
) -> tuple[torch.Tensor, dict[nn.Parameter, torch.Tensor]]:
    """The loss, and the gradients of the parameters it depends on; ``between`` is called before backward."""
    loss, _ = loss_and_more(loss_fn(model, *batch))
    between()
    grads = torch.autograd.grad(loss, params, allow_unused=True) if params and loss.requires_grad else ()
    found = {p: grad for p, grad in zip(params, grads, strict=False) if grad is not None}
    if not found:
        raise GradweaveError("the loss depends on no parameter of the optimizer that requires a gradient")
    return loss, found


def record_operations(
    model: nn.Module, loss_fn: Callable[..., Any], params: Sequence[nn.Parameter], batch: Sequence[Any]
) -> Operations:
    """Takes model and batch through forward and backward, and notes what is done.

    Raises:
        UnseenError: If not all of it could be seen: kernels of the user's own, or results whose size depends on data.
    """
    notes = _Notes()
    torch.clear_autocast_cache()  # casts that an autocast around this call has from before would not be seen
    with EveryResult(notes.operation):
        loss, grads = differentiate(model, loss_fn, params, batch, between=notes.begin_backward)
    made = {p: notes.node_of(grad) for p, grad in grads.items()}
    notes.check(loss, made)
    _remove_unread(notes.graph, set(made.values()))
    split_convolutions_of(notes.graph)
    notes.graph.output(())
    return Operations(notes.graph, notes.inputs, made, params, model)


class _Notes:
    """A graph that grows with every operation.

    Tensors are known as long as they live, so that noting keeps nothing in memory but what was there before the step.

    Attributes:
        graph: Of what was done so far.
        inputs: The tensors that no operation has made, in the order of the graph's inputs.
    """

    def __init__(self) -> None:
        self.graph = Graph()
        self.inputs: list[torch.Tensor] = []
        self._phase = "forward"
        self._nodes = WeakTensorKeyDictionary()
        self._last_input: Node | None = None

    def begin_backward(self) -> None:
        """From here on, what runs is backward."""
        self._phase = "backward"

    def operation(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Notes an operation that has run."""
        if function is _aten.detach.default:
            self._nodes[result] = self.node_of(args[0])
            return
        if _has_size_from_data(function, args):
            raise UnseenError(f"the size of what {function} returns depends on data")
        if not _holds_tensors(result) and not function._schema.is_mutable:
            return
        given = self._noted(args)
        node = self.graph.call_function(function, given, self._noted(kwargs))
        note_phase(node, self._phase)
        self._note_result(result, node)

    def node_of(self, tensor: torch.Tensor) -> Node:
        """What made a tensor; an input of the graph if nothing did."""
        node: Node | None = self._nodes.get(tensor)
        if node is None:
            before = next(iter(self.graph.nodes), None) if self._last_input is None else self._last_input.next
            with self.graph.inserting_before(before):
                node = self._last_input = self.graph.placeholder(f"input_{len(self.inputs)}")
            self.inputs.append(tensor)
            self._nodes[tensor] = node
        return node

    def check(self, loss: torch.Tensor, gradients: dict[nn.Parameter, Node]) -> None:
        """That everything between weights, loss and gradients was seen."""
        unwritten = (n for n in self.graph.nodes if getattr(n.target, "overloadpacket", None) in _UNWRITTEN)
        if any(node not in changed_by(user) for node in unwritten for user in node.users):
            raise UnseenError("something is read that no operation has written")
        end = self.node_of(loss)
        above = {end}
        for node in reversed(self.graph.nodes):
            if node in above:
                above.update(node.all_input_nodes)
        below = {end}
        for node in self.graph.nodes:
            if not below.isdisjoint(node.all_input_nodes):
                below.add(node)
        if not all(self.node_of(p) in above and gradient in below for p, gradient in gradients.items()):
            raise UnseenError("not all of what is between a weight and its gradient are operations of torch")

    def _noted(self, value: Any) -> Any:
        """Arguments with nodes in the place of tensors."""
        if isinstance(value, torch.Tensor):
            return self.node_of(value)
        if isinstance(value, (list, tuple)):
            return tuple(map(self._noted, value)) if isinstance(value, tuple) else list(map(self._noted, value))
        return {key: self._noted(one) for key, one in value.items()} if isinstance(value, dict) else value

    def _note_result(self, result: Any, node: Node) -> None:
        if isinstance(result, torch.Tensor):
            self._nodes[result] = node
        elif isinstance(result, (list, tuple)):
            for index, part in enumerate(result):
                if _holds_tensors(part):
                    of_part = self.graph.call_function(getitem, (node, index))
                    note_phase(of_part, self._phase)
                    self._note_result(part, of_part)


def _has_size_from_data(function: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operation must wait for its result to know its size; indexing need not, unless it is by a mask."""
    if torch.Tag.dynamic_output_shape not in function.tags:
        return False
    if function is not _aten.index.Tensor:
        return True
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_holds_tensors, value))
    return isinstance(value, torch.Tensor)


def _remove_unread(graph: Graph, wanted: set[Node]) -> None:
    """Removes parts of results that nobody reads: a graph that is run would keep them to its end."""
    for node in reversed(list(graph.nodes)):
        if node.target is getitem and not node.users and node not in wanted:
            graph.erase_node(node)
