"""Layer counts of transformers, parameter for parameter."""

from __future__ import annotations

from gradweave.schedule.shapes import LayerShape


def _block(name: str, width: int, tokens: int) -> list[LayerShape]:
    """Attention and a fourfold MLP, with biases and two norms."""

    def linear(part: str, inputs: int, outputs: int, norms: int = 0, extra: int = 0) -> LayerShape:
        parameters = inputs * outputs + outputs + norms * 2 * width
        return LayerShape(f"{name}.{part}", name, tokens * inputs * outputs, tokens * inputs, tokens * outputs,
                          parameters, extra)  # fmt: skip

    return [
        linear("qkv", width, 3 * width, norms=1),
        linear("attention_out", width, width, extra=2 * tokens * tokens * width),
        linear("mlp_up", width, 4 * width, norms=1),
        linear("mlp_down", 4 * width, width),
    ]


def gpt(
    blocks: int, width: int, tokens: int, vocabulary: int = 50257, positions: int | None = None
) -> list[LayerShape]:
    """A GPT with learned positions and a head tied to the embedding, which owns their weight."""
    embedding = vocabulary * width + (positions or tokens) * width
    layers = [LayerShape("embedding", "embedding", 0, tokens, tokens * width, embedding)]
    for number in range(blocks):
        layers += _block(f"block{number}", width, tokens)
    head = LayerShape("head", "head", tokens * width * vocabulary, tokens * width, tokens * vocabulary, 2 * width)
    return [*layers, head]


def bert_large(tokens: int = 512) -> list[LayerShape]:
    """BERT-Large (Devlin et al. 2018), uncased, with its pooler."""
    width, vocabulary = 1024, 30522
    embedding = (vocabulary + 512 + 2) * width + 2 * width
    layers = [LayerShape("embedding", "embedding", 0, tokens, tokens * width, embedding)]
    for number in range(24):
        layers += _block(f"block{number}", width, tokens)
    return [*layers, LayerShape("pooler", "head", width * width, width, width, width * width + width)]
