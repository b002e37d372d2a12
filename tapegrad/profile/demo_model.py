"""The demo's model: a character-level transformer decoder, written as a user would write it.

Pre-LN blocks (Xiong et al., arXiv 2002.04745), causal attention, a GELU MLP four times as wide, learned positions
(Radford et al., GPT-2, 2019).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import tapegrad as tg
from tapegrad import nn

if TYPE_CHECKING:
    from numpy.typing import DTypeLike


def waves(shape: tuple[int, ...], dtype: DTypeLike, generator: tg.random.Generator) -> tg.Tensor:
    """Where positions start to learn from: sines and cosines (Vaswani et al., 2017), of which neighbours are alike."""
    positions, width = shape
    frequencies = tg.exp(tg.arange(width // 2, dtype=dtype) * (-2 * math.log(1e4) / width))
    angles = tg.arange(positions, dtype=dtype)[:, None] * frequencies
    return tg.concat([tg.sin(angles), tg.cos(angles)], axis=1)


class Block(nn.Layer):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``; (b, t, width) to the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNormalization(epsilon=1e-5)
        self.attention = nn.MultiHeadAttention(heads, width // heads)
        self.norm_2 = nn.LayerNormalization(epsilon=1e-5)
        self.expand = nn.Dense(4 * width, activation="gelu")
        self.contract = nn.Dense(width)

    def call(self, x: tg.Tensor) -> tg.Tensor:
        x = x + self.attention(self.norm_1(x), use_causal_mask=True)
        return x + self.contract(self.expand(self.norm_2(x)))


class CharTransformer(nn.Layer):
    """Logits of the next character; integers (b, t) with t up to ``context`` -> (b, t, vocabulary).

    Where ``recompute_blocks`` is true, each block runs under ``recompute_grad``.
    """

    def __init__(self, vocabulary: int, context: int, width: int = 128, heads: int = 4, blocks: int = 6) -> None:
        super().__init__()
        self.context = context
        self.characters = nn.Embedding(vocabulary, width, embeddings_initializer=nn.initializers.normal(1.0))
        self.positions = nn.Embedding(context, width, embeddings_initializer=waves)
        self.blocks = [Block(width, heads) for _ in range(blocks)]
        self.norm = nn.LayerNormalization(epsilon=1e-5)
        self.head = nn.Dense(vocabulary, use_bias=False, kernel_initializer=nn.initializers.normal(0.02))
        self.recompute_blocks = False

    def call(self, tokens: tg.Tensor) -> tg.Tensor:
        x = self.characters(tokens) + self.positions(tg.arange(tokens.shape[-1]))
        for block in self.blocks:
            x = tg.recompute_grad(block)(x) if self.recompute_blocks else block(x)
        return self.head(self.norm(x))


def loss_of(model: CharTransformer, tokens: tg.Tensor, labels: tg.Tensor) -> tg.Tensor:
    """Mean cross entropy in nats per character; tokens and labels: integers (b, t)."""
    return tg.mean(tg.cross_entropy(model(tokens), labels))


def loss_and_gradients(
    model: CharTransformer, tokens: tg.Tensor, labels: tg.Tensor
) -> tuple[tg.Tensor, list[tg.Tensor], list[tg.Variable]]:
    """The loss, its gradients, and the variables they belong to."""
    with tg.GradientTape() as tape:
        loss = loss_of(model, tokens, labels)
    variables = model.trainable_variables
    return loss, tape.gradient(loss, variables), variables
