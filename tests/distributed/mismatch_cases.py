"""Ranks that do not do the same: every one gets an error that names both sides, and none gets numbers or waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import tapegrad as tg
from tapegrad import distributed as dist
from tapegrad.distributed import Group
from tapegrad.errors import DistributedError

Act = Callable[[Group], Any]


def refused(group: Group, first: Act, other: Act, *words: str, check: Any = "each") -> str:
    """The error that all ranks get where rank 0 does ``first`` and the others ``other``, in a group of their own."""
    part = group.split(0)
    part.line.check = check
    try:
        text = f"no error, but {(other if group.rank else first)(part)}"
    except DistributedError as e:
        text = str(e)
    texts = group.exchange_objects(text)
    assert len(set(texts)) == 1, texts
    sides = "rank 0:", "rank 1:" if group.size == 2 else "ranks 1, 2:"
    for word in (*sides, __file__, "bytes)", *words):
        assert word in text, (word, text)
    return text


def summed(x: Any, **how: Any) -> Act:
    return lambda group: dist.all_reduce(x, group=group, **how)


def case_shapes(group: Group) -> None:
    refused(group, summed(np.ones(4)), summed(np.ones(5)), "all_reduce #1 of float64 (4,)", "(5,)", "32 bytes")
    refused(group, summed(np.ones(100_000)), summed(np.ones(200_000)), "(800000 bytes)", "(1600000 bytes)")
    refused(group, summed(np.ones((2, 3))), summed(np.ones((3, 2))), "(2, 3)", "(3, 2)")
    refused(group, summed(np.ones(())), summed(np.ones(0)), "float64 ()", "float64 (0,)")


def case_dtypes(group: Group) -> None:
    refused(group, summed(np.ones(4)), summed(np.ones(8, np.float32)), "float64 (4,)", "float32 (8,)")
    refused(group, summed(np.ones(4, int)), summed(np.ones(4)), "int64 (4,)", "float64 (4,)")


def case_operations(group: Group) -> None:
    x = np.ones(4)
    refused(group, summed(x), summed(x, op="max"), "op=sum", "op=max")
    refused(group, summed(x), summed(x, exact=False), "exact=True", "exact=False")
    refused(group, summed(x), lambda g: dist.all_gather(x, group=g), "all_reduce #1", "sizes of all_gather #1")
    refused(group, summed(x), lambda g: g.barrier(), "all_reduce #1", "barrier #1")
    refused(group, lambda g: g.exchange_objects(x), lambda g: g.barrier(), "exchange_objects #1", "barrier #1")
    cast = lambda root: lambda g: dist.broadcast(x, root, group=g)
    refused(group, cast(0), cast(1), "root=0", "root=1")
    gathered = lambda axis: lambda g: dist.all_gather(np.ones((2, 2)), axis, group=g)
    refused(group, gathered(0), gathered(1), "axis=0", "axis=1")
    shifted = lambda offset: lambda g: dist.shift(x, offset, group=g)
    refused(group, shifted(1), shifted(-1), "offset=1", "offset=-1")
    away = lambda n: lambda g: dist.all_to_all(np.ones((6, n)), group=g)
    refused(group, away(2), away(3), "float64 ('*', 2), from axis 0 to axis 0", "float64 ('*', 3)")


def case_sizes(group: Group) -> None:
    def gathered(n: int) -> Act:
        return lambda g: dist.all_gather(np.ones(n), group=g, sizes=(2, *[n] * (g.size - 1)))

    refused(group, gathered(2), gathered(3), "sizes=(2, 2", "sizes=(2, 3")
    cut = lambda a, b: lambda g: dist.reduce_scatter(np.ones(6), group=g, sizes=(a, b, *[0] * (g.size - 2)))
    refused(group, cut(2, 4), cut(3, 3), "sizes=(2, 4", "sizes=(3, 3")


def case_other_axes(group: Group) -> None:
    gathered = lambda *shape: lambda g: dist.all_gather(np.ones(shape), group=g)
    refused(group, gathered(2, 3), gathered(2, 4), "all_gather #2 of float64 ('*', 3)", "float64 ('*', 4)")
    refused(group, gathered(2, 3), gathered(2), "sizes of all_gather #1 of float64, 2 axes", "1 axes")
    scattered = lambda *shape: lambda g: dist.reduce_scatter(np.ones(shape), group=g)
    refused(group, scattered(4, 3), scattered(5, 3), "reduce_scatter #1 of float64 (4, 3)", "(5, 3)")


def case_grids(group: Group) -> None:
    """Of another shape than the others', also where that fills no group, and halos of another width."""
    n = group.size
    grid = lambda *shape, **how: lambda g: dist.Grid(shape, group=g, **how)
    refused(group, grid(n, 1), grid(1, n), f"grid #1 of ({n}, 1) ranks", f"grid #1 of (1, {n}) ranks")
    refused(group, grid(n), grid(n, 1), f"grid #1 of ({n},) ranks", f"({n}, 1) ranks")
    refused(group, grid(n), grid(n + 1), f"({n},) ranks", f"({n + 1},) ranks")
    refused(group, grid(n), grid(n, periodic=True), "periodic=[False]", "periodic=[True]")

    def halos(width: int, columns: int) -> Act:
        return lambda g: dist.halo_exchange(np.ones((4, columns)), width, dist.Grid((n,), group=g))

    refused(group, halos(1, 3), halos(2, 3), "shift #1 of float64 (1, 3)", "shift #1 of float64 (2, 3)")
    refused(group, halos(1, 3), halos(1, 2), "float64 (1, 3)", "float64 (1, 2)")


def case_orders(group: Group) -> None:
    a, b = np.ones(4), np.ones(5)

    def both(*xs: np.ndarray) -> Act:
        return lambda g: [dist.all_reduce(x, group=g) for x in xs]

    refused(group, both(a, b), both(b, a), "#1 of float64 (4,)", "#1 of float64 (5,)")
    refused(group, both(a, b, b), both(a, b, a), "#3 of float64 (5,)", "#3 of float64 (4,)")


def walked(inside: int, outside: int) -> Act:
    """A gradient through some collectives; others are called before it is recorded."""

    def act(group: Group) -> tg.Tensor:
        w = tg.Variable(np.ones(4), name="w")
        x = w.value()
        for _ in range(outside):
            x = dist.all_reduce(x, group=group)
        with tg.GradientTape() as tape:
            y = w * x
            for _ in range(inside):
                y = dist.all_reduce(y, group=group)
        return tape.gradient(y, w)

    return act


def case_walks(group: Group) -> None:
    part = group.split(0)
    text = "none"
    try:
        (walked(1, 1) if group.rank else walked(2, 0))(part)
    except DistributedError as e:
        text = str(e)
    assert "the ranks' tapes hold different collectives" in text and "rank 0: 2, rank 1: 1" in text, text
    refused(group, walked(1, 0), lambda g: [walked(0, 1)(g), g.barrier()], "gradient #2", "barrier #2")


def gradients(*names: str, dtype: str = "float64", **how: Any) -> Act:
    """Of some variables of one shape."""

    def act(g: Group) -> Any:
        ws = [tg.Variable(np.ones(3, dtype), name=name) for name in names]
        with dist.GradientTape(group=g, **how) as tape:
            loss = sum((tg.sum(w * w) for w in ws), tg.asarray(0.0))
        return tape.gradient(loss, ws)

    return act


def case_variables(group: Group) -> None:
    """Other variables, or as many of another name, whose gradients would be summed with those of the others."""
    refused(group, gradients("w"), gradients("w", "v"), "gradient #1 of 1 variables", "gradient #1 of 2 variables")
    refused(group, gradients("w"), gradients("v"), "1 variables (w float64 (3,))", "1 variables (v float64 (3,))")
    refused(group, gradients("w"), gradients("w", dtype="float32"), "w float64 (3,)", "w float32 (3,)")
    many = [f"layer/{c}" for c in "abcdefgh"]
    refused(group, gradients(*many), gradients(*many[:-1], "z"), "8 variables (layer/a", "layer/f float64 (3,); ...)")
    for name, first, other in (("average", False, True), ("exact", True, False), ("bucket_bytes", 8, 9)):
        how = ({name: first}, {name: other})
        refused(group, gradients("w", **how[0]), gradients("w", **how[1]), f"{name}={first}", f"{name}={other}")
    counted = gradients(*(["w"] if group.rank else ["w_1"]))(group)  # by other variables that a rank has made
    np.testing.assert_array_equal(np.asarray(counted[0]), np.full(3, 2.0 * group.size))


def case_shards(group: Group) -> None:
    def sharded(stage: int, make: Callable[[], Any] = lambda: tg.optim.SGD(0.1)) -> Act:
        return lambda g: dist.shard([tg.Variable(np.ones(4), name="w")], make(), stage=stage, group=g)

    refused(group, sharded(1), sharded(2), "shard #1 of stage=1, SGD", "shard #1 of stage=2, SGD")
    refused(group, sharded(1), sharded(7), "shard #1 of stage=1, SGD", "shard #1 of stage=7, SGD")
    refused(group, sharded(1), sharded(1, tg.optim.Adam), "stage=1, SGD", "stage=1, Adam")
    w, optimizer = tg.Variable(np.ones(4), name="w"), tg.optim.Adam()
    if group.rank == 1:
        optimizer.build([w])
    told = ""
    try:
        dist.shard([w], optimizer)
    except DistributedError as e:
        told = str(e)
    assert all("has state already, on some rank" in text for text in group.exchange_objects(told)), told


def case_checked_at_each_step(group: Group) -> None:
    """What differs is found before a gradient is returned, and its first difference is named."""
    for first, other, words in (
        (summed(np.ones(4)), summed(np.ones(8, np.float32)), ("all_reduce #1 of float64", "all_reduce #1 of float32")),
        (summed(np.ones(4)), summed(np.ones(4), op="max"), ("op=sum", "op=max")),
    ):
        then = lambda act: lambda g: [act(g), walked(1, 0)(g)]
        refused(group, then(first), then(other), *words, check="step")
    shared = lambda g: dist.reduce(np.ones(4), g.size - 1, group=g)
    refused(
        group, lambda g: [shared(g), g.barrier()], lambda g: [g.barrier()], "reduce #1", "barrier #1", check="step"
    ) if group.size == 2 else None


def case_bad_input(group: Group) -> None:
    for act, words in (
        (lambda: dist.broadcast(np.ones(2), group.size), f"broadcast: there is no rank {group.size}"),
        (lambda: dist.gather(np.ones(2), -group.size - 1), f"gather: there is no rank {-group.size - 1}"),
        (lambda: dist.all_reduce(np.ones(2), "median"), "all_reduce: op is"),
        (lambda: group.split(None), "split: color is an int of at least 0, not None"),
        (lambda: group.split(0, -1), "split: key is an int of at least 0, not -1"),
        (lambda: dist.init(timeout=3), "init: called before"),
        (lambda: dist.init(check="step"), "init: called before"),
    ):
        try:
            act()
        except DistributedError as e:
            assert words in str(e), e
        else:
            raise AssertionError(words)
    assert dist.init() is group
