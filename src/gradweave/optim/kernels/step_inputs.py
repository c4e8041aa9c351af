"""What kernels get of a step: shapes and addresses of its tensors, or the reason why it is not for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from gradweave.optim.kernels.step_tables import FlatShape, LayerShape
from gradweave.optim.state import SGD, ParameterGroup, ParameterInGroup, ParameterState

if TYPE_CHECKING:
    from gradweave.optim.base import Layer


class Unsuitable(Exception):  # noqa: N818
    """Why the kernels do not take a step."""


def groups_of(layers: list[Layer], others: list[ParameterInGroup], device: torch.device) -> dict[int, ParameterGroup]:
    """Groups by identity, in the order of their number; numbers that are tensors are not for the kernels."""
    groups = {id(group): group for group in [*(layer.group for layer in layers), *(group for _, group in others)]}
    for group in groups.values():
        values = (
            *(group["momentum"], group["weight_decay"], group["damping"], group["output_damping"]),
            *(group["running_average"], group["eps"], *group["betas"]),
        )
        if any(isinstance(value, torch.Tensor) for value in values):
            raise Unsuitable("hyperparameters besides lr are tensors")
        lr = group["lr"]
        if isinstance(lr, torch.Tensor) and lr.device != device:
            raise Unsuitable(f"lr is a tensor on {lr.device}")
    return groups


def addresses_of(optimizer: Any, layers: list[Layer], others: list[ParameterInGroup]) -> dict[str, list[int]]:
    """Where everything is."""
    tensors = {
        "fixed": [x for layer in layers for x in _fixed_of(layer)],
        "gradients": [x for layer in layers for x in (layer.grad, layer.bias_grad)],
        "flat_fixed": [x for p, group in others for x in _flat_state(p, optimizer.state[p], group)],
        "flat_gradients": [p.grad for p, _ in others],
    }
    return {name: [0 if x is None else x.data_ptr() for x in values] for name, values in tensors.items()}


def gradients_are_plain(layers: list[Layer], others: list[ParameterInGroup], addresses: dict[str, list[int]]) -> bool:
    """Whether gradients are such as those of a step whose shapes were looked at, all of them aligned."""
    if any(address % 16 for name in ("gradients", "flat_gradients") for address in addresses[name]):
        return False
    pairs: list[tuple[Any, Any]] = [(layer.weight, layer.grad) for layer in layers]
    pairs += [(layer.bias, layer.bias_grad) for layer in layers if layer.bias is not None]
    pairs += [(p, p.grad) for p, _ in others]
    return all(type(g) is torch.Tensor and g.dtype == torch.float32 and g.stride() == p.stride() for p, g in pairs)


def layer_shape(layer: Layer, groups: dict[int, ParameterGroup], device: torch.device) -> LayerShape:
    """What a layer's tables depend on."""
    weight, state = layer.weight, layer.state
    vectors, outputs, record = state["input_vector"], state.get("output_vector"), state["record"]
    taps = _taps(weight, layer.grad, state["momentum_buffer"])
    memory = [weight, layer.grad, state["momentum_buffer"], vectors, record, state["size"]]
    if outputs is not None:
        memory.append(outputs)
    if layer.bias is not None and layer.bias_grad is not None and layer.bias_state is not None:
        bias = [layer.bias, layer.bias_grad, layer.bias_state["momentum_buffer"]]
        _taps(*bias)
        memory += bias
    _check(memory, device)
    count = vectors.shape[0]
    rows = weight.shape[0] // count
    columns = weight.numel() // weight.shape[0]
    aligned = all(x.data_ptr() % 16 == 0 for x in memory[:3])
    member = list(groups).index(id(layer.group))
    return LayerShape(
        member, count, rows, columns, taps, outputs is not None, layer.bias is not None,
        layer.columns_first, aligned,
    )  # fmt: skip


def flat_shape(
    p: torch.Tensor,
    group: ParameterGroup,
    state: ParameterState,
    groups: dict[int, ParameterGroup],
    device: torch.device,
) -> FlatShape:
    """What the chunks of a parameter without vectors depend on."""
    own = _flat_state(p, state, group)
    _check([x for x in (p.grad, *own) if x is not None], device)
    memory = [x for x in (p.grad, *own[:3]) if x is not None]
    _taps(*memory)
    aligned = all(x.data_ptr() % 16 == 0 for x in memory)
    return FlatShape(list(groups).index(id(group)), p.numel(), aligned)


def _check(memory: list[torch.Tensor], device: torch.device) -> None:
    for x in memory:
        if type(x) not in (torch.Tensor, torch.nn.Parameter):
            raise Unsuitable(f"a tensor is a {type(x).__name__}")
        if x.dtype != torch.float32 or x.device != device:
            raise Unsuitable(f"a parameter, its gradient or its state is of {x.dtype} on {x.device}")
        if x.numel() == 0 or x.numel() >= 2**31:
            raise Unsuitable(f"a parameter has {x.numel()} elements")


def _taps(*tensors: torch.Tensor) -> int:
    """How many taps of a kernel come before channels in memory: 1 for what is contiguous."""
    orders = set()
    for x in tensors:
        if x.is_contiguous():
            orders.add(1)
        elif x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
            orders.add(x.shape[2] * x.shape[3])
        else:
            raise Unsuitable(f"a parameter of shape {tuple(x.shape)} or its gradient is not contiguous")
    if len(orders) > 1:
        raise Unsuitable("a gradient is stored in another order than its parameter")
    return orders.pop()


def _fixed_of(layer: Layer) -> list[torch.Tensor | None]:
    state, bias_state = layer.state, layer.bias_state or {}
    own = [layer.weight, state["momentum_buffer"], layer.bias, bias_state.get("momentum_buffer")]
    return [*own, state["record"], state["input_vector"], state.get("output_vector"), state["size"]]


def _flat_state(p: torch.Tensor, state: ParameterState, group: ParameterGroup) -> list[torch.Tensor | None]:
    if group["rule"] == SGD:
        return [p, state["momentum_buffer"], None, None]
    return [p, state["exp_avg"], state["exp_avg_sq"], state["step"]]
