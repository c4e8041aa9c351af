"""The GPT of the zoo as JAX compiles it: one ``jit`` of forward, backward and AdamW, buffers donated.

It starts from the weights of the torch model, so that the losses of both can be compared.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

BETAS, EPS, DECAY = (0.9, 0.999), 1e-8, 1e-2


def train_with_jax(model: nn.Module, *, lr: float) -> Callable[[tuple[torch.Tensor, torch.Tensor]], Any]:
    """A function that takes one training step on a batch of tokens and targets."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax
    from jax import numpy as np

    heads = model.blocks[0].heads  # type: ignore[index, union-attr]
    weights = {name: np.asarray(p.detach().cpu().numpy()) for name, p in model.named_parameters()}
    blocks = len(model.blocks)  # type: ignore[arg-type]

    def normalize(p: Any, name: str, x: Any) -> Any:
        x = x.astype(np.float32)
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        return scaled * p[f"{name}.weight"] + p[f"{name}.bias"]

    def linear(p: Any, name: str, x: Any) -> Any:
        half = np.bfloat16
        return x.astype(half) @ p[f"{name}.weight"].astype(half).T + p[f"{name}.bias"].astype(half)

    def loss_of(p: Any, tokens: Any, targets: Any) -> Any:
        batch, length = tokens.shape
        x = p["embedding.weight"][tokens] + p["position.weight"][:length]
        width = x.shape[-1]
        for number in range(blocks):
            block = f"blocks.{number}"
            qkv = linear(p, f"{block}.qkv", normalize(p, f"{block}.norm1", x))
            query, key, value = (
                part.reshape(batch, length, heads, width // heads) for part in np.split(qkv, 3, axis=-1)
            )
            mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")
            x = x + linear(p, f"{block}.out", mixed.reshape(batch, length, width))
            hidden = jax.nn.gelu(linear(p, f"{block}.up", normalize(p, f"{block}.norm2", x)), approximate=False)
            x = x + linear(p, f"{block}.down", hidden)
        last = normalize(p, "norm", x).astype(np.bfloat16)
        logits = (last @ p["head.weight"].astype(np.bfloat16).T).astype(np.float32)
        picked = np.take_along_axis(logits, targets[..., None], -1)[..., 0]
        return (jax.nn.logsumexp(logits, -1) - picked).mean()

    def step(p: Any, mean: Any, square: Any, count: Any, tokens: Any, targets: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(p, tokens, targets)
        count = count + 1
        mean = jax.tree.map(lambda m, g: BETAS[0] * m + (1 - BETAS[0]) * g, mean, grads)
        square = jax.tree.map(lambda s, g: BETAS[1] * s + (1 - BETAS[1]) * g * g, square, grads)

        def update(w: Any, m: Any, s: Any) -> Any:
            root = np.sqrt(s / (1 - BETAS[1] ** count)) + EPS
            return w * (1 - lr * DECAY) - lr * (m / (1 - BETAS[0] ** count)) / root

        return jax.tree.map(update, p, mean, square), mean, square, count, loss

    compiled = jax.jit(step, donate_argnums=(0, 1, 2, 3))
    zeros = [jax.tree.map(np.zeros_like, weights) for _ in range(2)]
    state: list[Any] = [weights, *zeros, np.zeros(())]
    known: dict[int, Any] = {}

    def call(batch: tuple[torch.Tensor, torch.Tensor]) -> Any:
        if id(batch) not in known:
            known[id(batch)] = batch, [np.asarray(part.cpu().numpy()) for part in batch]
        *state[:], loss = compiled(*state, *known[id(batch)][1])
        return loss

    call.wait = lambda: jax.block_until_ready(state)  # type: ignore[attr-defined]
    return call
