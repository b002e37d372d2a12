"""Small training programs, with a plan or without one."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import tapegrad as tg
from tapegrad import nn
from tapegrad.nn import functional
from tapegrad.profile.recorder import Session
from tapegrad.remat.plan import Action, Key, apply_plan
from tapegrad.tracing.run import Run

META: dict[str, Any] = {
    "tapegrad": "0", "program": "programs.py", "argv": ["programs.py"], "device": {"name": "cpu", "total_bytes": None},
    "outcome": {"kind": "finished", "code": 0, "message": ""},
}  # fmt: skip


class Attending(nn.Layer):
    """A block of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = [nn.LayerNormalization(), nn.LayerNormalization()]
        self.attention = nn.MultiHeadAttention(2, width // 2)
        self.layers_ = [nn.Dense(4 * width, activation="gelu"), nn.Dense(width)]

    def attend(self, x: tg.Tensor) -> tg.Tensor:
        return self.attention(self.norms[0](x), use_causal_mask=True)

    def call(self, x: tg.Tensor) -> tg.Tensor:
        x = x + self.attend(x)
        return x + self.layers_[1](self.layers_[0](self.norms[1](x)))


class Convolved(nn.Layer):
    """State that a call changes, and random numbers."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2D(channels, 3, padding="same")
        self.norm = nn.BatchNormalization()
        self.drop = nn.Dropout(0.2)

    def call(self, x: tg.Tensor, training: bool = False) -> tg.Tensor:
        return self.drop(functional.relu(self.norm(self.conv(x), training=training)), training=training)


def attend(x: tg.Tensor, wq: tg.Variable, wk: tg.Variable, wv: tg.Variable) -> tg.Tensor:
    q, k, v = (tg.matmul(x, w) for w in (wq, wk, wv))
    scores = tg.matmul(q, tg.permute_dims(k, (0, 2, 1))) / 8.0
    return tg.matmul(tg.softmax(scores), v)


def gated(x: tg.Tensor, w: tg.Variable, b: tg.Variable, v: tg.Variable) -> tg.Tensor:
    """Its result pends, and its cotangents are sums that pend."""
    y = tg.matmul(tg.tanh(tg.matmul(x, w) + b), v)
    return x + tg.sigmoid(y) * y


def step(loss_of: Callable[[], tg.Tensor], variables: Sequence[tg.Variable], optimizer: Any) -> list[bytes]:
    with tg.GradientTape() as tape:
        loss = loss_of()
    gradients = tape.gradient(loss, list(variables))
    found = [g.numpy().tobytes() for g in gradients]
    optimizer.apply(gradients, variables)
    return found


def transformer(steps: int = 2) -> list[list[bytes]]:
    tg.random.seed(0)
    blocks, head = [Attending(64) for _ in range(3)], nn.Dense(10)
    x = tg.random.normal((16, 40, 64))

    def loss() -> tg.Tensor:
        h = x
        for block in blocks:
            h = block(h)
        return tg.mean(tg.square(head(h)))

    loss()  # builds
    variables = [v for layer in [*blocks, head] for v in layer.trainable_variables]
    optimizer = tg.optim.Adam(1e-3)
    return [step(loss, variables, optimizer) for _ in range(steps)]


def convolutions(steps: int = 2) -> list[list[bytes]]:
    tg.random.seed(1)
    blocks, head = [Convolved(8) for _ in range(3)], nn.Dense(4)
    x = tg.random.normal((8, 8, 16, 16))

    def loss() -> tg.Tensor:
        h = x
        for block in blocks:
            h = h + block(h, training=True)
        return tg.mean(tg.square(head(h)))

    loss()
    variables = [v for layer in [*blocks, head] for v in layer.trainable_variables]
    optimizer = tg.optim.SGD(1e-2)
    found = [step(loss, variables, optimizer) for _ in range(steps)]
    return [*found, [v.numpy().tobytes() for block in blocks for v in block.variables]]


def functions(steps: int = 2) -> list[list[bytes]]:
    tg.random.seed(2)
    weights = [[tg.Variable(tg.random.normal((64, 64)) * 0.1) for _ in range(3)] for _ in range(3)]
    x = tg.random.normal((8, 96, 64))

    def loss() -> tg.Tensor:
        h = x
        for w in weights:
            h = h + attend(h, *w)
        return tg.mean(tg.square(h))

    optimizer = tg.optim.SGD(1e-2)
    return [step(loss, [v for w in weights for v in w], optimizer) for _ in range(steps)]


def residual(steps: int = 2) -> list[list[bytes]]:
    tg.random.seed(5)
    sizes = ((128, 256), (256,), (256, 128))
    weights = [[tg.Variable(tg.random.normal(size) * 0.1) for size in sizes] for _ in range(4)]
    x = tg.random.normal((512, 128))
    held = [x]

    def loss() -> tg.Tensor:
        held[0] = x
        for w in weights:
            held[0] = gated(held[0], *w)
        return tg.mean(held[0] ** 2)

    optimizer = tg.optim.SGD(1e-2)
    return [step(loss, [v for w in weights for v in w], optimizer) for _ in range(steps)]


def accumulated(steps: int = 2) -> list[list[bytes]]:
    """Two tapes in a step, so that each number means two calls."""
    tg.random.seed(4)
    blocks = [Attending(64), Attending(64), nn.Dense(10)]
    batches = [tg.random.normal((8, 40, 64)) for _ in range(2)]

    def gradients(x: tg.Tensor) -> list[tg.Tensor]:
        with tg.GradientTape() as tape:
            for block in blocks:
                x = block(x)
            loss = tg.mean(tg.square(x))
        return tape.gradient(loss, [v for block in blocks for v in block.trainable_variables])

    optimizer = tg.optim.SGD(1e-2)
    found = []
    for _ in range(steps):
        total = [a + b for a, b in zip(*map(gradients, batches), strict=True)]
        found.append([g.numpy().tobytes() for g in total])
        optimizer.apply(total, [v for block in blocks for v in block.trainable_variables])
    return found


def elementwise(steps: int = 2) -> list[list[bytes]]:
    """Nothing that a checkpoint could help."""
    tg.random.seed(3)
    v = tg.Variable(tg.random.normal((300, 128)))
    optimizer = tg.optim.SGD(1e-2)
    return [step(lambda: tg.sum(tg.tanh(v) * 2.0), [v], optimizer) for _ in range(steps)]


def layer_key(cls: type[nn.Layer]) -> Key:
    """What calls of a layer are calls of."""
    code = inspect.unwrap(cls.call).__code__
    return "layer", cls.__qualname__, code.co_filename, code.co_firstlineno


def run(name: str, actions: Sequence[Action] = ()) -> tuple[Run, list[list[bytes]]]:
    """What the program ``name`` does with memory under a plan, and the bits of its gradients."""
    session = Session()
    gc.collect()
    with apply_plan(actions) as applied:
        session.start()
        try:
            found = globals()[name]()
        finally:
            session.stop()
    assert applied.unmet() == []
    return session.run(META, source=False), found
