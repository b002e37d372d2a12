"""Train a small character-level transformer on the source of Python's standard library."""

import argparse
import random
import sysconfig
from pathlib import Path

import tapegrad as tg
from tapegrad import nn, optim

CONTEXT, WIDTH, HEADS, BLOCKS = 128, 96, 4, 6


class Block(nn.Layer):
    """Attention, then two dense layers, each beside a shortcut; (batch, context, width) to the same."""

    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNormalization(), nn.LayerNormalization()
        self.attention = nn.MultiHeadAttention(HEADS, WIDTH // HEADS)
        self.expand, self.contract = nn.Dense(4 * WIDTH, activation="gelu"), nn.Dense(WIDTH)

    def mlp(self, x):
        return self.contract(self.expand(self.norm_2(x)))

    def call(self, x):
        x = x + self.attention(self.norm_1(x), use_causal_mask=True)
        return x + self.mlp(x)


class Transformer(nn.Layer):
    """Logits of the next character; integers (batch, context) -> (batch, context, vocabulary)."""

    def __init__(self, vocabulary):
        super().__init__()
        self.characters, self.positions = nn.Embedding(vocabulary, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = [Block() for _ in range(BLOCKS)]
        self.norm, self.head = nn.LayerNormalization(), nn.Dense(vocabulary)

    def call(self, tokens):
        x = self.characters(tokens) + self.positions(tg.arange(CONTEXT))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def main():
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, default=10)
    options.add_argument("--batch", type=int, default=16)
    options.add_argument("--captured", action="store_true", help="replay the step, from the third on, by tg.function")
    args = options.parse_args()

    folder = Path(sysconfig.get_path("stdlib"))
    text = "".join((folder / f"{name}.py").read_text("utf-8") for name in ("argparse", "typing", "doctest", "inspect"))
    vocabulary = sorted(set(text))
    numbers = [vocabulary.index(c) for c in text]
    chance = random.Random(0)
    tg.random.seed(0)
    model, optimizer = Transformer(len(vocabulary)), optim.Adam(1e-3)

    def train(tokens, labels):
        with tg.GradientTape() as tape:
            loss = tg.mean(tg.cross_entropy(model(tokens), labels))
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    train_step = tg.function(train) if args.captured else train
    for step in range(args.steps):
        starts = [chance.randrange(len(numbers) - CONTEXT) for _ in range(args.batch)]
        tokens = tg.asarray([numbers[i : i + CONTEXT] for i in starts], dtype="int32")
        labels = tg.asarray([numbers[i + 1 : i + CONTEXT + 1] for i in starts], dtype="int32")
        print(f"step {step + 1}: loss {float(train_step(tokens, labels)):.3f}")


if __name__ == "__main__":
    main()
