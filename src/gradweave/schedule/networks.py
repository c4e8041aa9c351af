"""Costs of well-known networks from operation and byte counts: estimates to plan with.

A task takes as long as its arithmetic or its memory traffic, whichever is longer, plus a fixed time to start it.
Measured costs are better; these need no device. Layers are counted parameter for parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from gradweave.errors import ArgumentError
from gradweave.schedule.costs import Costs, LayerCost
from gradweave.schedule.tasks import Demand

_ACTIVATION_BYTES = 2
_GRADIENT_BYTES = 4
_UPDATE_BYTES = 28
"""AdamW in one pass: reads weight, gradient and two moments, writes all but the gradient, in fp32."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Operation, element and parameter counts of a layer, for one sample.

    Attributes:
        name: The layer's name.
        block: The block it belongs to.
        multiplies: Multiply-adds of the forward; the input gradient and the weight gradient take as many each.
        inputs: Elements of its input.
        outputs: Elements of its output.
        parameters: Its parameters, including those of a norm that follows it.
        extra_multiplies: Multiply-adds of weightless work that goes with it (attention's own products), spent once in
            the forward and twice in the input gradient.
    """

    name: str
    block: str
    multiplies: int
    inputs: int
    outputs: int
    parameters: int
    extra_multiplies: int = 0


@dataclass(frozen=True, slots=True)
class Hardware:
    """Rates of a device. The defaults are what an H200 reaches in bf16, not its data sheet.

    Attributes:
        flops: Floating-point operations per second.
        bandwidth: Bytes per second to and from memory.
        start_seconds: Seconds from one kernel to the next.
    """

    flops: float = 790e12
    bandwidth: float = 4.3e12
    start_seconds: float = 4e-6

    def cost(self, multiplies: float, size: float) -> tuple[float, Demand]:
        """Return the seconds of a task and the shares of the device that it takes meanwhile."""
        arithmetic, traffic = 2 * multiplies / self.flops, size / self.bandwidth
        seconds = max(arithmetic, traffic) + self.start_seconds
        return seconds, Demand(arithmetic / seconds, traffic / seconds) if seconds else Demand()


ARITHMETIC_ONLY = Hardware(bandwidth=float("inf"), start_seconds=0.0)
"""Time in proportion to operations: the model that papers reason with."""


class _ConvolutionCounter:
    """Follows an image's shape through convolutions and lists their layers.

    Args:
        channels: Channels of the image.
        side: Its height and width.
    """

    def __init__(self, channels: int = 3, side: int = 224) -> None:
        self.channels = channels
        self.side = side
        self.block = "stem"
        self.layers: list[LayerShape] = []

    def conv(
        self, name: str, out: int, kernel: int, stride: int = 1, *, groups: int = 1, norm: int | None = None
    ) -> None:
        """Add a convolution without bias and a norm over ``norm`` channels (default: ``out``)."""
        side = -(-self.side // stride)
        weights = out * self.channels // groups * kernel * kernel
        inputs, outputs = self.channels * self.side**2, out * side**2
        parameters = weights + 2 * (out if norm is None else norm)
        self._add(name, weights * side**2, inputs, outputs, parameters)
        self.channels, self.side = out, side

    def pointwise(self, name: str, inputs: int, outputs: int, *, norm: int = 0) -> None:
        """Add a linear layer with bias on pooled features, after a norm; the image itself is left as it was."""
        self._add(name, inputs * outputs, inputs, outputs, inputs * outputs + outputs + 2 * norm)

    def pool(self, stride: int = 2) -> None:
        """Shrink the image, without a layer of its own."""
        self.side //= stride

    def _add(self, name: str, multiplies: int, inputs: int, outputs: int, parameters: int) -> None:
        self.layers.append(LayerShape(f"{self.block}.{name}", self.block, multiplies, inputs, outputs, parameters))


def resnet50() -> list[LayerShape]:
    """Return the layers of ResNet-50 (He et al. 2015), as in torchvision."""
    image = _ConvolutionCounter()
    image.conv("conv", 64, 7, 2)
    image.pool()
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), start=1):
        for number in range(blocks):
            image.block = f"layer{stage}.{number}"
            stride = 2 if number == 0 and stage > 1 else 1
            entered, side = image.channels, image.side
            image.conv("conv1", width, 1)
            image.conv("conv2", width, 3, stride)
            image.conv("conv3", 4 * width, 1)
            if number == 0:
                left = image.side
                # The shortcut convolves what entered the block, not what its body made of it.
                image.channels, image.side = entered, side
                image.conv("downsample", 4 * width, 1, stride)
                image.side = left
    image.block = "head"
    image.pointwise("fc", 2048, 1000)
    return image.layers


def densenet121() -> list[LayerShape]:
    """Return the layers of DenseNet-121 (Huang et al. 2016), growth 32; a norm precedes each convolution."""
    growth, image = 32, _ConvolutionCounter()
    image.conv("conv", 64, 7, 2)
    image.pool()
    for stage, layers in enumerate((6, 12, 24, 16), start=1):
        image.block = f"dense{stage}"
        for number in range(layers):
            entered = image.channels
            image.conv(f"{number}.conv1", 4 * growth, 1, norm=entered)
            image.conv(f"{number}.conv2", growth, 3, norm=4 * growth)
            image.channels = entered + growth
        if stage < 4:
            image.conv("transition", image.channels // 2, 1, norm=image.channels)
            image.pool()
    image.block = "head"
    image.pointwise("fc", image.channels, 1000, norm=image.channels)
    return image.layers


_MOBILENET_V3_LARGE = (
    # kernel, expanded, out, squeeze-and-excite, stride
    (3, 16, 16, False, 1), (3, 64, 24, False, 2), (3, 72, 24, False, 1), (5, 72, 40, True, 2),
    (5, 120, 40, True, 1), (5, 120, 40, True, 1), (3, 240, 80, False, 2), (3, 200, 80, False, 1),
    (3, 184, 80, False, 1), (3, 184, 80, False, 1), (3, 480, 112, True, 1), (3, 672, 112, True, 1),
    (5, 672, 160, True, 2), (5, 960, 160, True, 1), (5, 960, 160, True, 1),
)  # fmt: skip


def mobilenet_v3_large() -> list[LayerShape]:
    """Return the layers of MobileNetV3-Large (Howard et al. 2019), as in torchvision."""
    image = _ConvolutionCounter()
    image.conv("conv", 16, 3, 2)
    for number, (kernel, expanded, out, squeeze, stride) in enumerate(_MOBILENET_V3_LARGE):
        image.block = f"bneck{number}"
        if expanded != image.channels:
            image.conv("expand", expanded, 1)
        image.conv("depthwise", expanded, kernel, stride, groups=expanded)
        if squeeze:
            squeezed = _divisible(expanded // 4)
            image.pointwise("squeeze", expanded, squeezed)
            image.pointwise("excite", squeezed, expanded)
        image.conv("project", out, 1)
    image.block = "head"
    image.conv("conv", 960, 1)
    image.pointwise("hidden", 960, 1280)
    image.pointwise("fc", 1280, 1000)
    return image.layers


def _divisible(channels: int, divisor: int = 8) -> int:
    """Return the nearest multiple of ``divisor`` that is at most a tenth below ``channels``."""
    rounded = max(divisor, (channels + divisor // 2) // divisor * divisor)
    return rounded if rounded >= 0.9 * channels else rounded + divisor


def gpt(
    blocks: int, width: int, tokens: int, vocabulary: int = 50257, positions: int | None = None
) -> list[LayerShape]:
    """Return the layers of a GPT with learned positions; its head is tied to the embedding, which owns the weight.

    Args:
        blocks: Number of blocks.
        width: Size of the residual stream.
        tokens: Length of a sequence.
        vocabulary: Number of tokens to choose from.
        positions: Number of learned positions (default: ``tokens``).
    """
    embedding = vocabulary * width + (positions or tokens) * width
    layers = [LayerShape("embedding", "embedding", 0, tokens, tokens * width, embedding)]
    for number in range(blocks):
        layers += _transformer_block(f"block{number}", width, tokens)
    head = LayerShape("head", "head", tokens * width * vocabulary, tokens * width, tokens * vocabulary, 2 * width)
    return [*layers, head]


def bert_large(tokens: int = 512) -> list[LayerShape]:
    """Return the layers of BERT-Large (Devlin et al. 2018), uncased, with its pooler."""
    width, vocabulary = 1024, 30522
    embedding = (vocabulary + 512 + 2) * width + 2 * width
    layers = [LayerShape("embedding", "embedding", 0, tokens, tokens * width, embedding)]
    for number in range(24):
        layers += _transformer_block(f"block{number}", width, tokens)
    return [*layers, LayerShape("pooler", "head", width * width, width, width, width * width + width)]


def _transformer_block(name: str, width: int, tokens: int) -> list[LayerShape]:
    """Return attention and a fourfold MLP, with biases and two norms."""

    def linear(part: str, inputs: int, outputs: int, norms: int = 0, extra: int = 0) -> LayerShape:
        return LayerShape(
            f"{name}.{part}",
            name,
            multiplies=tokens * inputs * outputs,
            inputs=tokens * inputs,
            outputs=tokens * outputs,
            parameters=inputs * outputs + outputs + norms * 2 * width,
            extra_multiplies=extra,
        )

    return [
        linear("qkv", width, 3 * width, norms=1),
        linear("attention_out", width, width, extra=2 * tokens * tokens * width),
        linear("mlp_up", width, 4 * width, norms=1),
        linear("mlp_down", 4 * width, width),
    ]


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
    """Return the estimated costs of a well-known network.

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
    """Return the cost of a layer; the first one has no input gradient, since data needs none."""
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
