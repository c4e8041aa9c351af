"""Operations recorded while a model runs eagerly.

Nothing is traced: the model runs once, and its operations on the device are written down. That takes little more than
the step itself, where tracing takes many seconds, and the operations are those of an eager loop, with their kernels.
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
from gradweave._compat.tracing import schema_of
from gradweave.errors import GradweaveError
from gradweave.profile.operations import Operations, differentiate_eagerly
from gradweave.step_graph.nodes import Phase, changed_by, has_data_dependent_size, set_phase

_aten = torch.ops.aten
_UNINITIALIZED = (_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided)
"""Operations that return memory whose contents another operation must write before it is read."""


class UnseenError(GradweaveError):
    """A step with work that is no operation of torch's, or with an operation that cannot be repeated on its own."""


def record_operations(
    model: nn.Module, loss_fn: Callable[..., Any], params: Sequence[nn.Parameter], batch: Sequence[Any]
) -> Operations:
    """Run model and batch through forward and backward, and record the operations.

    Raises:
        UnseenError: If not all of it could be seen: kernels of the user's own, or results whose size depends on data.
    """
    recorder = _Recorder()
    # Casts that an autocast around this call has cached would not run, and so not be seen.
    torch.clear_autocast_cache()
    with EveryResult(recorder.record):
        loss, grads = differentiate_eagerly(model, loss_fn, params, batch, between=recorder.begin_backward)
    gradients = {p: recorder.node_of(grad) for p, grad in grads.items()}
    recorder.check(loss, gradients)
    _remove_unread(recorder.graph, set(gradients.values()))
    recorder.graph.output(())
    return Operations(recorder.graph, recorder.inputs, gradients, params, model)


class _Recorder:
    """A graph that grows with every operation.

    Tensors are referenced weakly, so that recording keeps nothing in memory but what was there before the step.

    Attributes:
        graph: Of the operations so far.
        inputs: The tensors that no operation has returned, in the order of the graph's inputs.
    """

    def __init__(self) -> None:
        self.graph = Graph()
        self.inputs: list[torch.Tensor] = []
        self._phase: Phase = "forward"
        self._nodes = WeakTensorKeyDictionary()
        self._last_input: Node | None = None

    def begin_backward(self) -> None:
        """Assign the operations from here on to backward."""
        self._phase = "backward"

    def record(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Append an operation that has run."""
        if function is _aten.detach.default:
            self._nodes[result] = self.node_of(args[0])
            return
        if has_data_dependent_size(function, _indices(function, args)):
            raise UnseenError(f"the size of what {function} returns depends on data")
        if not _holds_tensors(result) and not schema_of(function).is_mutable:
            return
        node = self.graph.call_function(function, self._to_nodes(args), self._to_nodes(kwargs))
        set_phase(node, self._phase)
        self._record_result(result, node)

    def node_of(self, tensor: torch.Tensor) -> Node:
        """Return the node that a tensor is the result of; an input of the graph if there is none."""
        node: Node | None = self._nodes.get(tensor)
        if node is None:
            before = next(iter(self.graph.nodes), None) if self._last_input is None else self._last_input.next
            with self.graph.inserting_before(before):
                node = self._last_input = self.graph.placeholder(f"input_{len(self.inputs)}")
            self.inputs.append(tensor)
            self._nodes[tensor] = node
        return node

    def check(self, loss: torch.Tensor, gradients: dict[nn.Parameter, Node]) -> None:
        """Raise UnseenError unless everything between weights, loss and gradients was seen.

        Work outside of torch's operations leaves a gap: memory that is read and was never written, or a weight or a
        gradient that no path of operations joins to the loss.
        """
        uninitialized = (n for n in self.graph.nodes if getattr(n.target, "overloadpacket", None) in _UNINITIALIZED)
        if any(node not in changed_by(user) for node in uninitialized for user in node.users):
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

    def _to_nodes(self, value: Any) -> Any:
        """Return arguments with nodes in the place of tensors."""
        if isinstance(value, torch.Tensor):
            return self.node_of(value)
        if isinstance(value, (list, tuple)):
            return tuple(map(self._to_nodes, value)) if isinstance(value, tuple) else list(map(self._to_nodes, value))
        return {key: self._to_nodes(one) for key, one in value.items()} if isinstance(value, dict) else value

    def _record_result(self, result: Any, node: Node) -> None:
        if isinstance(result, torch.Tensor):
            self._nodes[result] = node
        elif isinstance(result, (list, tuple)):
            for index, part in enumerate(result):
                if _holds_tensors(part):
                    item = self.graph.call_function(getitem, (node, index))
                    set_phase(item, self._phase)
                    self._record_result(part, item)


def _indices(function: Any, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return the index tensors of an indexing operation; slices are None there, and select by position."""
    return [index for index in args[1] if index is not None] if function is _aten.index.Tensor else []


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_holds_tensors, value))
    return isinstance(value, torch.Tensor)


def _remove_unread(graph: Graph, wanted: set[Node]) -> None:
    """Remove parts of results that no operation reads: running the graph would keep them to its end."""
    for node in reversed(list(graph.nodes)):
        if node.target is getitem and not node.users and node not in wanted:
            graph.erase_node(node)
