"""A layer by its shape: operations, elements and parameters, for one sample."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Counts for one sample.

    Attributes:
        name: The layer's name.
        block: The block it belongs to.
        multiplies: Multiply-adds of the forward; the input gradient and the weight gradient
            take as many each.
        inputs: Elements of its input.
        outputs: Elements of its output.
        parameters: Its parameters, with those of a norm that follows it.
        extra_multiplies: Multiply-adds of work without weights beside it (attention's own
            products), once in the forward and twice in the input gradient.
    """

    name: str
    block: str
    multiplies: int
    inputs: int
    outputs: int
    parameters: int
    extra_multiplies: int = 0
