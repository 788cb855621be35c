"""A small causal transformer over bytes, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from squinchcomm.demo.corpus import VOCABULARY


class Block(nn.Module):
    """Pre-norm attention and feed-forward; (batch, time, width) in and out."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.feed_norm = nn.LayerNorm(width)
        self.feed_in = nn.Linear(width, 4 * width)
        self.feed_out = nn.Linear(4 * width, width)
        # A layer starts as the identity, so that depth does not blow up the first steps.
        nn.init.zeros_(self.attention_out.weight)
        nn.init.zeros_(self.feed_out.weight)

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        batch, time, width = x.shape
        packed = self.attention_in(self.attention_norm(x)).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = packed.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.feed_out(functional.gelu(self.feed_in(self.feed_norm(x))))


class ByteTransformer(nn.Module):
    """Predicts each next byte; the same seed gives the same weights on every rank."""

    def __init__(self, *, width: int, layers: int, heads: int, length: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean cross-entropy in nats a byte, over all positions of (batch, time + 1) int64 tokens."""
        x = self.embedding(tokens[:, :-1]) + self.position
        logits = functional.linear(self.norm(self.blocks(x)), self.embedding.weight)
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
