"""What tests of saving share: ranks that are threads, slices of values, trees and their bits."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

import tapegrad as tg
from tapegrad import nest, nn

X = np.random.default_rng(5).normal(size=(8, 3)).astype("f4")
Y = np.random.default_rng(6).normal(size=(8, 2)).astype("f4")


class ThreadGroup:
    """One of several ranks that are threads of this process."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, given: list[bytes]) -> None:
        self.rank, self.size, self._barrier, self._given = rank, size, barrier, given

    def exchange_objects(self, x: object) -> list[Any]:
        self._given[self.rank] = pickle.dumps(x)
        self._barrier.wait(20)
        told = [pickle.loads(data) for data in self._given]
        self._barrier.wait(20)
        return told


def on_ranks(size: int, f: Callable[[Any], Any]) -> list[Any]:
    """What ``f(group)`` returns or raises on each of ``size`` ranks."""
    barrier, given, results = threading.Barrier(size), [b""] * size, [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = f(ThreadGroup(rank, size, barrier, given))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def all_well(results: list[Any]) -> list[Any]:
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


class Part:
    """The elements from ``start`` to ``stop`` of an array."""

    def __init__(self, whole: Any, start: int, stop: int) -> None:
        self.global_shape, self.dtype, self.slice = whole.shape, whole.dtype, (start, stop)
        self.data = whole.reshape(-1)[start:stop].copy()

    def local(self) -> Any:
        return self.data

    def assign(self, x: Any) -> None:
        assert x.shape == self.data.shape and x.dtype == self.data.dtype
        self.data = x


def part_of(whole: Any, rank: int, size: int) -> Part:
    """About as many elements for each rank, in their order."""
    return Part(whole, whole.size * rank // size, whole.size * (rank + 1) // size)


class Model(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = [nn.Sequential([nn.Dense(4, activation="tanh"), nn.Dropout(0.3), nn.LayerNormalization()])]
        self.head = nn.Dense(2)

    def call(self, x: Any, training: bool = False) -> Any:
        return self.head(self.blocks[0](x, training=training))


def training(seed: int, make: Callable[[], tg.optim.Optimizer]) -> dict[str, Any]:
    """All that a resumed training needs."""
    tg.random.seed(seed)
    model = Model()
    model(X)
    stream = tg.random.Generator(seed)
    return {"model": model, "optimizer": make(), "step": 0, "dropout": tg.random.default_generator, "noise": stream}


def train(tree: dict[str, Any], steps: int) -> None:
    model, optimizer = tree["model"], tree["optimizer"]
    for _ in range(steps):
        x = tg.asarray(X) + tree["noise"].normal(X.shape)
        with tg.GradientTape() as tape:
            loss = nn.functional.mse_loss(model(x, training=True), Y)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        tree["step"] += 1


def bits(tree: Any) -> list[Any]:
    """Every value of a tree, to be compared."""
    found: list[Any] = []
    for name, leaf in nest.named(tree):
        if isinstance(leaf, nn.Layer | tg.optim.Optimizer):
            found += [(name, v.shape, v.numpy().tobytes()) for v in leaf.variables]
        elif isinstance(leaf, tg.random.Generator):
            found.append((name, leaf.state))
        elif hasattr(leaf, "dtype"):
            x = leaf.numpy() if isinstance(leaf, tg.Tensor | tg.Variable) else leaf
            found.append((name, str(x.dtype), x.shape, x.tobytes()))
        else:
            found.append((name, repr(leaf)))
    return found
