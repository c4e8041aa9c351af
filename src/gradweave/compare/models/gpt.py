"""A GPT (Radford et al. 2019)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        mixed: torch.Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return mixed


class GPT(nn.Module):
    """A decoder with learned positions; the defaults are GPT-2 small with a head of its own.

    Args:
        vocabulary: Number of tokens to choose from.
        width: Size of the residual stream.
        blocks: Number of blocks.
        heads: Attention heads.
        tokens: Length of the longest sequence.
        recompute: Recompute each block's activations in backward instead of keeping them.
    """

    def __init__(
        self,
        *,
        vocabulary: int = 50304,
        width: int = 768,
        blocks: int = 12,
        heads: int = 12,
        tokens: int = 1024,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.recompute = recompute
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits of the next token at each position."""
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits
