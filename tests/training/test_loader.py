"""The loader: order, structure, workers, and going on in the middle of an epoch."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.errors import NotATensorError, ShapeError, StructureError, TapegradError
from tapegrad.training import DataLoader

X, Y = np.arange(20.0, dtype=np.float32).reshape(10, 2), np.arange(10)


class Rows:
    """Examples that are there one by one."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Any:
        return self.rows[i]


class Made(Rows):
    """Examples that are made when they are asked for; it is pickled for workers."""

    def __init__(self, n: int = 10, broken: int | None = None) -> None:
        super().__init__(range(n))
        self.broken = broken

    def __getitem__(self, i: int) -> Any:
        if i == self.broken:
            raise ValueError(f"example {i} is broken")
        return {"x": np.full(3, i, np.float32), "y": i, "z": i / 2}


def test_a_list_of_examples_is_no_structure_of_arrays() -> None:
    squares = [(np.full((3, 3), i), np.full((3, 3), -i)) for i in range(5)]  # an image and its mask
    image, mask = next(iter(DataLoader(squares, 4)))
    assert image.shape == mask.shape == (4, 3, 3) and mask.numpy()[:, 0, 0].tolist() == [0, -1, -2, -3]
    assert next(iter(DataLoader(list(zip(X, Y)), 2)))[1].tolist() == [0, 1]
    assert next(iter(DataLoader([{"x": X[i]} for i in range(4)], 3)))["x"].shape == (3, 2)
    assert next(iter(DataLoader([5, 6, 7], 2))).tolist() == next(iter(DataLoader(list(np.arange(5, 8)), 2))).tolist()
    assert [x.shape for x in next(iter(DataLoader([X, Y], 4)))] == [(4, 2), (4,)]


def test_what_workers_cannot_be_sent_is_told() -> None:
    with pytest.raises(TapegradError, match="workers are processes.*local object.*top of a module"):
        next(iter(DataLoader(Made(), 2, workers=1, collate=lambda examples: examples)))


def rows(of: Any) -> list[list[int]]:
    return [y.tolist() for _, y in of]


@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_batches_in_order(prefetch: int) -> None:
    made = DataLoader((X, tg.asarray(Y)), 4, prefetch=prefetch)
    batches = list(made)
    assert len(made) == 3 and [type(x) for x in batches[0]] == [tg.Tensor, tg.Tensor]
    assert [y.tolist() for _, y in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert batches[0][0].dtype == np.float32
    np.testing.assert_array_equal(np.concatenate([x.numpy() for x, _ in batches]), X)
    dropping = DataLoader((X, Y), 4, drop_last=True, prefetch=prefetch)
    assert len(dropping) == 2 and rows(dropping) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert list(DataLoader(X[:0], 4, prefetch=prefetch)) == []
    assert repr(made) == "DataLoader(10 examples in batches of 4)"
    one = next(iter(DataLoader({"a": X, "b": [Y]}, 3, prefetch=prefetch)))
    assert one["b"][0].tolist() == [0, 1, 2] and one["a"].shape == (3, 2)


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    def orders(seed: int) -> list[list[list[int]]]:
        made = DataLoader((X, Y), 4, shuffle=True, seed=seed)
        return [rows(made) for _ in range(3)]

    first, state = orders(5), tg.random.default_generator.state
    tg.random.uniform((3,))  # the global stream does not matter
    assert first == orders(5) and first != orders(6) and first[0] != first[1] != first[2]
    assert all(sorted(sum(epoch, [])) == list(range(10)) for epoch in first)
    tg.random.default_generator.state = state
    orders(5)
    assert tg.random.default_generator.state == state


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("taken", range(13))
def test_going_on_after_any_batch(taken: int, prefetch: int) -> None:
    made, seen, state = DataLoader((X, Y), 3, shuffle=True, seed=1, prefetch=prefetch), [], None
    for _ in range(3):
        for _, y in made:
            seen.append(y.tolist())
            if len(seen) == taken + 1:
                state = made.state_dict()
    if state is None:
        state = made.state_dict()
        assert state == {"seed": 1, "epoch": 3, "batch": 0}
    other = DataLoader((X, Y), 3, shuffle=True, prefetch=prefetch)
    other.load_state_dict(state)
    rest = []
    while other.epoch < 3:
        rest += rows(other)
    assert rest == seen[taken + 1 :]


def test_epochs_and_a_loop_that_is_left() -> None:
    made = DataLoader((X, Y), 4, shuffle=True)
    first = rows(DataLoader((X, Y), 4, shuffle=True))
    assert made.epoch == 0
    for _, y in made:
        assert y.tolist() == first[0] and made.state_dict() == {"seed": 0, "epoch": 0, "batch": 1}
        break
    assert not any(t.name.startswith("tapegrad-loader") for t in threading.enumerate())
    assert rows(made) != first  # the next epoch
    assert made.epoch == 2 and made.state_dict()["batch"] == 0
    for wrong in ({"epoch": 1}, {"seed": 0, "epoch": 0, "batch": 4}, {"seed": 0, "epoch": -1, "batch": 0}):
        with pytest.raises(TapegradError, match="wanted seed, epoch and batch, at most 3 of them"):
            made.load_state_dict(wrong)


@pytest.mark.parametrize("workers", [0, 2])
def test_examples_one_by_one(workers: int) -> None:
    batches = list(DataLoader(Made(), 4, shuffle=True, workers=workers))
    order = sum((b["y"].tolist() for b in batches), [])
    assert sorted(order) == list(range(10)) and order != sorted(order)
    assert batches[0]["x"].shape == (4, 3) and batches[0]["z"].dtype == np.float32 and batches[0]["y"].dtype == np.int64
    for b in batches:
        np.testing.assert_array_equal(b["x"].numpy()[:, 0], b["y"].numpy())
        np.testing.assert_array_equal(b["z"].numpy(), b["y"].numpy() / 2)
    with pytest.raises(ValueError, match="example 7 is broken"):
        list(DataLoader(Made(broken=7), 4, workers=workers))


def test_collating_and_what_cannot_be_collated() -> None:
    ragged = Rows([np.arange(n) for n in (1, 3, 2)])
    with pytest.raises(ShapeError, match=r"examples of shapes \[\(1,\), \(2,\), \(3,\)\] do not make a batch"):
        list(DataLoader(ragged, 3))
    (batch,) = DataLoader(ragged, 3, collate=lambda xs: np.stack([np.pad(x, (0, 3 - len(x))) for x in xs]))
    assert batch.tolist() == [[0, 0, 0], [0, 1, 2], [0, 1, 0]]
    with pytest.raises(StructureError, match="structure"):
        list(DataLoader(Rows([(1, 2), 3]), 2))
    named = DataLoader(Rows([1, 2]), 2, collate=lambda xs: {"x": np.array(xs), "names": [f"n{x}" for x in xs]})
    assert next(iter(named))["names"] == ["n1", "n2"]


def test_wrong_use() -> None:
    for options in ({"batch_size": 0}, {"workers": -1}, {"prefetch": 1.5}, {"seed": -1}):
        with pytest.raises(TapegradError, match="wanted a"):
            DataLoader(X, **options)
    with pytest.raises(ShapeError, match=r"as many examples on their first axes, got \[\(10,\), \(9,\)\]"):
        DataLoader((X, Y[:9]))
    with pytest.raises(ShapeError, match="as many examples"):
        DataLoader(np.float32(3))
    with pytest.raises(NotATensorError, match=r"wanted arrays, or an object with len\(\) and \[i\], got generator"):
        DataLoader(i for i in range(3))


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_batches_are_sent_ahead_to_the_device(prefetch: int) -> None:
    """While one is computed with, the next one is there, and not more."""
    rows = np.ones((10, 1024), "float32")
    with tg.measure() as m:
        before = m.live_bytes
        for i, batch in enumerate(DataLoader(rows, 2, device="cpu", prefetch=prefetch)):
            assert (m.live_bytes - before) // batch.nbytes == (2 if prefetch and i < 4 else 1)
