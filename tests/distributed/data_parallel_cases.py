"""Data parallel on several ranks: the bits of one process that adds the same micro-batches' gradients."""

from __future__ import annotations

import hashlib
import warnings
from typing import Any

import numpy as np

import tapegrad as tg
from tapegrad import distributed as dist
from tapegrad.distributed import Group
from tapegrad.nn import functional as F

STEPS, BATCH = 6, 5


class Model:
    """A small network, one of whose variables is used on some ranks only, and one on none."""

    def __init__(self, seed: int = 0, dtype: str = "float32") -> None:
        rng = np.random.default_rng(seed)
        self.weights = [tg.Variable(rng.normal(size=s).astype(dtype) * 0.4) for s in ((7, 9), (9, 9), (9, 3))]
        self.biases = [tg.Variable(np.zeros(n, dtype)) for n in (9, 9, 3)]
        self.scale = tg.Variable(np.ones(3, dtype))
        self.unused = tg.Variable(np.ones(2, dtype))
        self.variables = [*self.weights, *self.biases, self.scale, self.unused]

    def layer(self, h: Any, i: int) -> Any:
        return tg.tanh(h @ self.weights[i] + self.biases[i])

    def loss(self, x: Any, y: Any, who: int, total: int, recompute: bool = False) -> Any:
        h = tg.asarray(x)
        for i in (0, 1):
            f = tg.recompute_grad(lambda u, i=i: self.layer(u, i)) if recompute else lambda u, i=i: self.layer(u, i)
            h = f(h)
        out = F.softmax(h @ self.weights[2] + self.biases[2])
        scale = self.scale.value()  # read on every rank: where parameters are cut, reading is a collective
        if who == 1:
            out = out * scale
        return tg.sum((out - y) ** 2) / total


def batches(ranks: int, dtype: str = "float32") -> list[list[tuple[Any, Any]]]:
    """For each step, each rank's micro-batch; they are unequal."""
    rng = np.random.default_rng(7)
    sizes = [BATCH + r for r in range(ranks)]
    return [[(rng.normal(size=(n, 7)).astype(dtype), rng.normal(size=(n, 3)).astype(dtype)) for n in sizes]
            for _ in range(STEPS)]  # fmt: skip


def digest(variables: Any) -> str:
    h = hashlib.sha256()
    for v in variables:
        h.update(np.ascontiguousarray(v.numpy()).tobytes())
    return h.hexdigest()


def by_ranks(group: Group, optimizer: Any, recompute: bool = False, budget: int | None = None, **options: Any) -> str:
    model, opt = Model(seed=group.rank), optimizer()
    dist.broadcast_variables(model.variables)
    for parts in batches(group.size):
        x, y = parts[group.rank]

        def step(x: Any = x, y: Any = y) -> None:
            with dist.GradientTape(**options) as tape:
                share = model.loss(x, y, group.rank, 1, recompute)
                loss = share / sum(group.exchange_objects(len(x)))
            found = tape.gradient(loss, model.variables)
            assert found[-1] is None
            opt.apply_gradients([(g, v) for g, v in zip(found, model.variables, strict=True) if g is not None])

        if budget is None:
            step()
        else:
            with tg.memory_budget(budget):
                step()
    dist.check_replicas(model.variables)
    return digest(model.variables)


OPTIMIZERS = {"sgd": lambda: tg.optim.SGD(0.1), "adam": lambda: tg.optim.Adam(0.01)}


def case_bits_of_one_process(group: Group) -> None:
    for name, optimizer in OPTIMIZERS.items():
        plain = by_one(group.size, optimizer)
        for bucket in (1, 100, 777, 1 << 22):
            found = by_ranks(group, optimizer, bucket_bytes=bucket)
            assert found == plain, (name, bucket)
        assert by_ranks(group, optimizer, recompute=True) == plain, name
        assert by_ranks(group, optimizer, budget=200_000, bucket_bytes=300) == plain, name


def case_gradients_of_rows_are_summed_as_arrays(group: Group) -> None:
    """Ranks name other rows, and one names none; the optimizer's state stays the same on all."""
    table, plain = (tg.Variable(np.linspace(-1, 1, 40 * 16, dtype=np.float32).reshape(40, 16)) for _ in range(2))
    one, other = tg.optim.LazyAdam(0.1), tg.optim.LazyAdam(0.1)
    for step in range(3):
        found = []
        for v, sparse in ((table, True), (plain, False)):
            with dist.GradientTape() as tape:
                rows = tg.take(v, [step, group.rank, 5][: 3 * (group.rank != 1)], axis=0, sparse_grad=sparse)
                loss = tg.sum(rows**2)
            found.append(tape.gradient(loss, v))
        assert type(found[0]) is tg.Tensor and found[0].numpy().tobytes() == found[1].numpy().tobytes()
        one.apply([found[0]], [table])
        other.apply([found[1]], [plain])
    assert digest([table, *one.variables]) == digest([plain, *other.variables])
    dist.check_replicas([table])
    with dist.GradientTape() as tape, tape.no_sync():
        loss = tg.sum(tg.take(table, [1], axis=0, sparse_grad=True))
        assert tape.gradient(loss, table).shape == (40, 16)


def by_one(ranks: int, optimizer: Any) -> str:
    """One process, which adds the gradients of all micro-batches in their order."""
    model, opt = Model(), optimizer()
    for parts in batches(ranks):
        total = sum(len(x) for x, _ in parts)
        sums: list[Any] = [None] * len(model.variables)
        for who, (x, y) in enumerate(parts):
            with tg.GradientTape() as tape:
                loss = model.loss(x, y, who, 1) / total
            for i, g in enumerate(tape.gradient(loss, model.variables)):
                if g is not None:
                    sums[i] = g if sums[i] is None else sums[i] + g
        opt.apply_gradients([(g, v) for g, v in zip(sums, model.variables, strict=True) if g is not None])
    return digest(model.variables)


def case_captured_step(group: Group) -> None:
    """The whole step captured: the bits of the eager one; as many collectives."""

    def train(captured: bool) -> tuple[str, list[int]]:
        model, opt = Model(), tg.optim.Adam(0.01)
        used = model.variables[:-1]

        def step(x: Any, y: Any) -> Any:
            with dist.GradientTape(bucket_bytes=200) as tape:
                loss = model.loss(x, y, 1, 13)
            opt.apply_gradients(zip(tape.gradient(loss, used), used, strict=True))
            return loss

        f = tg.function(step) if captured else step
        counts = []
        for parts in batches(group.size):
            before = group.line.number
            x, y = parts[group.rank]
            f(tg.asarray(x), tg.asarray(y))
            counts.append(group.line.number - before)
        if captured:
            assert f.stats.replays >= STEPS - 2, f.stats
        return digest(model.variables), counts

    plain, _ = train(False)
    found, counts = train(True)
    assert found == plain
    if group.size > 1:
        assert len(set(counts[2:])) == 1, counts


def case_no_sync(group: Group) -> None:
    w = tg.Variable(np.ones(3))
    x = np.arange(3.0) + group.rank
    with dist.GradientTape(persistent=True) as tape:
        loss = tg.sum(w * x)
    with tape.no_sync():
        np.testing.assert_array_equal(np.asarray(tape.gradient(loss, w)), x)
    total = sum(np.arange(3.0) + r for r in range(group.size))
    np.testing.assert_array_equal(np.asarray(tape.gradient(loss, w)), total)
    with dist.GradientTape(average=True) as tape:
        loss = tg.sum(w * x)
    np.testing.assert_allclose(np.asarray(tape.gradient(loss, w)), total / group.size)


def case_targets_that_all_ranks_have(group: Group) -> None:
    """A reduced loss counts once; a regularizer is wrapped in once(); a variable may be the target."""
    w = tg.Variable(np.ones(3))
    x = np.arange(3.0) + group.rank
    total = sum(np.arange(3.0) + r for r in range(group.size))
    with dist.GradientTape() as tape:
        loss = dist.all_reduce(tg.sum(w * x))
    np.testing.assert_allclose(np.asarray(tape.gradient(loss, w)), total)
    with dist.GradientTape() as tape:
        loss = tg.sum(w * x) + dist.once(tg.sum(w**2))
    np.testing.assert_allclose(np.asarray(tape.gradient(loss, w)), total + 2)
    with dist.GradientTape() as tape:
        tape.watch(w)
    np.testing.assert_allclose(np.asarray(tape.gradient(w, w)), np.full(3, group.size))


def case_regularizers(group: Group) -> None:
    """One that is added on every rank counts once for each: the user is told, and ``once`` mends it."""
    w, b = (tg.Variable(np.ones(s), name=n) for s, n in ((3, "w"), ((), "b")))
    x = np.arange(3.0) + group.rank

    def warned(loss: Any, **how: Any) -> str:
        with warnings.catch_warnings(record=True) as seen, dist.GradientTape(**how) as tape:
            warnings.simplefilter("always")
            found = tape.gradient(loss(), [w, b])
        assert found[0] is not None and len(seen) < 2
        return str(seen[0].message) if seen else ""

    data = lambda: tg.sum((w * x + b) ** 2)
    own = lambda: 1e-4 * (tg.sum(w * w) + 2 * tg.sum(tg.abs(w.value())))
    for loss in (lambda: data() / 7 + own(), lambda: sum((own(), data()), tg.asarray(0.0)), lambda: own() - (-data())):
        text = warned(loss)
        assert ("variables alone ('w')" in text and f"counts {group.size} times" in text) or group.size == 1, text
        assert not warned(loss, average=True)
    for loss in (lambda: data() + dist.once(own()), lambda: data() + 0.1 * dist.once(tg.sum(w * w)), own, data,
                 lambda: tg.sum(w * x) + b, lambda: tg.sum(w * x) + 2 * b.value(), lambda: 1 / (data() + own()),
                 lambda: data() + tg.sum(w * x)):  # fmt: skip
        assert not warned(loss), warned(loss)


def case_mean_and_part(group: Group) -> None:
    whole = np.arange(11.0)
    mine = whole[dist.part(11)]
    assert len(np.concatenate(group.exchange_objects(mine))) == 11
    np.testing.assert_allclose(float(dist.all_reduce(dist.mean(mine))), whole.mean())
    rows = np.stack([mine, mine], axis=1)
    np.testing.assert_allclose(float(dist.all_reduce(dist.mean(rows, len(rows)))), 2 * whole.mean())


def case_second_order(group: Group) -> None:
    """The gradient of a summed gradient, which all ranks have: so what is made of it alone counts once."""
    w = tg.Variable(np.array(1.5))
    c = 1.0 + group.rank
    total = sum(1.0 + r for r in range(group.size))
    for share in (lambda x: x, dist.once):
        with dist.GradientTape() as outer:
            with dist.GradientTape() as inner:
                loss = c * w**3
            g = inner.gradient(loss, w)
            target = share(g * g)
        np.testing.assert_allclose(float(outer.gradient(target, w)), 2 * (3 * total * 1.5**2) * (6 * total * 1.5))


def case_different_variables(group: Group) -> None:
    """Every rank hears who has which; nothing is changed."""
    if group.size == 1:
        return
    w = tg.Variable(np.full(2 + group.rank, float(group.rank)), name="w")
    for f in (dist.broadcast_variables, dist.check_replicas):
        try:
            f([w])
        except tg.errors.DistributedError as e:
            assert "ranks 0 and 1 have different variables" in str(e), e
        else:
            raise AssertionError("no error")
    assert float(w[0]) == group.rank
    v = tg.Variable(np.full(2, float(group.rank)), name="v")
    try:
        dist.check_replicas([v])
    except tg.errors.DistributedError as e:
        assert "'v'" in str(e) and "rank 1" in str(e), e
    else:
        raise AssertionError("no error")


def case_sums_under_way_at_any_pace(group: Group) -> None:
    """Several sums under way, helped on at times that differ from rank to rank, with other collectives in between."""
    import time

    from tapegrad.distributed.collectives.under_way import finish, help_on, start

    pace = np.random.default_rng([5, group.rank])
    for trial in range(12):
        sizes = np.random.default_rng(trial).integers(1, 9000, size=5)
        xs = [np.random.default_rng([trial, k, group.rank]).normal(size=n) for k, n in enumerate(sizes)]
        under_way = []
        for x in xs:
            under_way.append(start(tg.asarray(x), group))
            if pace.random() < 0.5:
                time.sleep(0.001 * pace.random())
            for _ in range(pace.integers(0, 8)):
                help_on(group)
        if trial % 3 == 0:
            assert float(dist.all_reduce(np.float64(1.0))) == group.size
        order = np.random.default_rng(trial).permutation(5)
        for k in order:
            found = np.asarray(finish(under_way[k], group))
            parts = [np.random.default_rng([trial, k, r]).normal(size=sizes[k]) for r in range(group.size)]
            total = parts[0]
            for other in parts[1:]:
                total = total + other
            assert found.tobytes() == total.tobytes(), (trial, k)
