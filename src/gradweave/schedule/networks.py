"""Costs of well-known networks from operation and byte counts: estimates to plan with.

A task takes as long as its arithmetic or its memory traffic, whichever is longer, plus a fixed
time to start it. Measured costs are better; these need no device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from gradweave.errors import ArgumentError
from gradweave.schedule.convnets import densenet121, mobilenet_v3_large, resnet50
from gradweave.schedule.costs import Costs, LayerCost
from gradweave.schedule.shapes import LayerShape
from gradweave.schedule.tasks import Demand
from gradweave.schedule.transformers import bert_large, gpt

_ACTIVATION_BYTES = 2
_GRADIENT_BYTES = 4
_UPDATE_BYTES = 28
"""AdamW in one pass: reads weight, gradient and two moments, writes all but the gradient, fp32."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """Rates of a device. The defaults are what an H200 reaches in bf16, not its data sheet.

    Attributes:
        flops: Floating-point operations per second.
        bandwidth: Bytes per second to and from memory.
        start_seconds: Time from one kernel to the next.
    """

    flops: float = 790e12
    bandwidth: float = 4.3e12
    start_seconds: float = 4e-6

    def cost(self, multiplies: float, size: float) -> tuple[float, Demand]:
        """Seconds of a task, and the shares of the device it takes meanwhile."""
        arithmetic, traffic = 2 * multiplies / self.flops, size / self.bandwidth
        seconds = max(arithmetic, traffic) + self.start_seconds
        return seconds, Demand(arithmetic / seconds, traffic / seconds) if seconds else Demand()


ARITHMETIC_ONLY = Hardware(bandwidth=float("inf"), start_seconds=0.0)
"""Time in proportion to operations: the model that papers reason with."""

NETWORKS: dict[str, Callable[[], list[LayerShape]]] = {
    "resnet50": resnet50,
    "densenet121": densenet121,
    "mobilenet_v3_large": mobilenet_v3_large,
    "bert_large": bert_large,
    "gpt2": partial(gpt, 12, 768, 1024),
    "gpt2_medium": partial(gpt, 24, 1024, 1024),
    "gpt2_large": partial(gpt, 36, 1280, 1024),
    "gpt2_xl": partial(gpt, 48, 1600, 1024),
    "gpt3_1.3b": partial(gpt, 24, 2048, 2048),
    "gpt3_2.7b": partial(gpt, 32, 2560, 2048),
    "gpt3_6.7b": partial(gpt, 32, 4096, 2048),
    "gpt3_13b": partial(gpt, 40, 5120, 2048),
    "gpt3_175b": partial(gpt, 96, 12288, 2048),
}


def network(name: str, *, batch: int = 32, hardware: Hardware = Hardware()) -> Costs:
    """Estimated costs of a well-known network.

    Args:
        name: One of :data:`NETWORKS`.
        batch: Samples per micro-batch.
        hardware: The device to estimate for.
    """
    if name not in NETWORKS:
        raise ArgumentError("network", name, f"use one of uniform, {', '.join(NETWORKS)}, or a cost file")
    if batch < 1:
        raise ArgumentError("batch", batch, "give at least 1 sample")
    shapes = NETWORKS[name]()
    layers = tuple(_cost(shape, batch, hardware, first=i == 0) for i, shape in enumerate(shapes))
    return Costs(layers, name=name, source="operation counts")


def _cost(shape: LayerShape, batch: int, hardware: Hardware, *, first: bool) -> LayerCost:
    inputs, outputs = (batch * elements * _ACTIVATION_BYTES for elements in (shape.inputs, shape.outputs))
    weights = shape.parameters * _ACTIVATION_BYTES
    traffic = inputs + outputs + weights
    multiplies, extra = batch * shape.multiplies, batch * shape.extra_multiplies
    forward, forward_demand = hardware.cost(multiplies + extra, traffic)
    input_grad, input_grad_demand = hardware.cost(multiplies + 2 * extra, traffic)
    weight_grad, weight_grad_demand = hardware.cost(multiplies, traffic)
    update, update_demand = hardware.cost(0, shape.parameters * _UPDATE_BYTES)
    return LayerCost(
        name=shape.name,
        forward=forward,
        input_grad=0.0 if first else input_grad,
        weight_grad=weight_grad,
        update=update,
        input_bytes=inputs,
        output_bytes=outputs,
        parameter_bytes=shape.parameters * _GRADIENT_BYTES,
        block=shape.block,
        forward_demand=forward_demand,
        input_grad_demand=input_grad_demand,
        weight_grad_demand=weight_grad_demand,
        update_demand=update_demand,
    )
