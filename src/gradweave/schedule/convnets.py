"""Layer counts of convolutional networks at 224 x 224, parameter for parameter."""

from __future__ import annotations

from gradweave.schedule.shapes import LayerShape


class _Image:
    """Follows an image's shape through convolutions and lists them."""

    def __init__(self, channels: int = 3, side: int = 224) -> None:
        self.channels = channels
        self.side = side
        self.block = "stem"
        self.layers: list[LayerShape] = []

    def conv(
        self, name: str, out: int, kernel: int, stride: int = 1, *, groups: int = 1, norm: int | None = None
    ) -> None:
        """A convolution without bias and its norm, over ``out`` channels unless said otherwise."""
        side = -(-self.side // stride)
        weights = out * self.channels // groups * kernel * kernel
        inputs, outputs = self.channels * self.side**2, out * side**2
        parameters = weights + 2 * (out if norm is None else norm)
        self.layers.append(
            LayerShape(f"{self.block}.{name}", self.block, weights * side**2, inputs, outputs, parameters)
        )
        self.channels, self.side = out, side

    def pointwise(self, name: str, inputs: int, outputs: int) -> None:
        """A linear layer with bias on pooled features; the image goes on as it was."""
        parameters = inputs * outputs + outputs
        self.layers.append(
            LayerShape(f"{self.block}.{name}", self.block, inputs * outputs, inputs, outputs, parameters)
        )

    def pool(self, stride: int = 2) -> None:
        self.side //= stride


def resnet50() -> list[LayerShape]:
    """ResNet-50 (He et al. 2015), as torchvision has it."""
    image = _Image()
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
                image.channels, image.side = entered, side
                image.conv("downsample", 4 * width, 1, stride)
                image.side = left
    image.block = "head"
    image.pointwise("fc", 2048, 1000)
    return image.layers


def densenet121() -> list[LayerShape]:
    """DenseNet-121 (Huang et al. 2016), growth 32; a norm precedes each convolution."""
    growth, image = 32, _Image()
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
    features = image.channels
    image.pointwise("fc", features, 1000)
    last = image.layers[-1]
    image.layers[-1] = LayerShape(last.name, last.block, last.multiplies, last.inputs, last.outputs,
                                  last.parameters + 2 * features)  # fmt: skip
    return image.layers


_MOBILENET_V3_LARGE = (
    # kernel, expanded, out, squeeze-and-excite, stride
    (3, 16, 16, False, 1), (3, 64, 24, False, 2), (3, 72, 24, False, 1), (5, 72, 40, True, 2),
    (5, 120, 40, True, 1), (5, 120, 40, True, 1), (3, 240, 80, False, 2), (3, 200, 80, False, 1),
    (3, 184, 80, False, 1), (3, 184, 80, False, 1), (3, 480, 112, True, 1), (3, 672, 112, True, 1),
    (5, 672, 160, True, 2), (5, 960, 160, True, 1), (5, 960, 160, True, 1),
)  # fmt: skip


def mobilenet_v3_large() -> list[LayerShape]:
    """MobileNetV3-Large (Howard et al. 2019), as torchvision has it."""
    image = _Image()
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
    """Nearest multiple of ``divisor``, not more than a tenth below ``channels``."""
    rounded = max(divisor, (channels + divisor // 2) // divisor * divisor)
    return rounded if rounded >= 0.9 * channels else rounded + divisor
