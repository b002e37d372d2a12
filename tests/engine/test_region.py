"""THE cost rule, case by case: what runs at once, what pends, what is stored, and how many bytes that pins."""

from __future__ import annotations

import gc
import itertools
import weakref

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.device import threads
from tapegrad.engine import region
from tapegrad.engine.evaluate import fill
from tapegrad.tensor import from_array, materialize

BIG = (200, 100)
BYTES = 200 * 100 * 8


@pytest.fixture
def x(rng):
    return from_array(rng.uniform(0.5, 1.5, BIG))


def pending(*tensors):
    return [t._buffer.array is None for t in tensors]


def test_small_arrays_run_at_once():
    a = from_array(np.ones(region.SMALL - 1))
    b = from_array(np.ones(region.SMALL))
    assert pending(a + 1, b + 1) == [False, True]


def test_a_region_is_not_stored_inside(x):
    a = x + 1
    b = a * x
    c = tg.tanh(b)
    c._array  # noqa: B018
    assert pending(a, b, c) == [True, True, False]
    assert not c._buffer.keeps, "a finished value has forgotten its inputs"


def test_a_barrier_stores_what_it_reads_only(x):
    a = x + 1
    b = a * 2
    tg.matmul(b, tg.ones((100, 3), dtype="float64"))
    assert pending(a, b) == [True, False]


def test_a_value_read_by_broadcasting_is_stored(rng):
    row = from_array(rng.uniform(size=region.SMALL))
    a = tg.exp(row)
    y = a + from_array(np.ones((2, region.SMALL)))
    assert pending(a, y) == [False, True]


def test_a_pending_reduction_is_not_read_inside_a_region(x):
    total = tg.sum(x * x, axis=0)
    assert pending(total) == [False]
    np.testing.assert_allclose((x / total).numpy(), x.numpy() / (x.numpy() ** 2).sum(0))


@pytest.mark.parametrize("link", [lambda t: t * 1.001, lambda t: t + t], ids=["once", "twice"])
def test_a_chain_is_cut_at_the_limit_of_nodes(link, x):
    """Where each value is read twice, too: it counts once, however many ways lead to it."""
    chain = [x]
    for _ in range(3 * region.MAX_NODES):
        chain.append(link(chain[-1]))
    stored = [i for i, t in enumerate(chain[1:], 1) if t._buffer.array is not None]
    assert stored == [region.MAX_NODES, 2 * region.MAX_NODES, 3 * region.MAX_NODES][: len(stored)]
    assert len(stored) >= 2
    np.testing.assert_allclose(chain[-1].numpy(), x.numpy() * link(1.0) ** (3 * region.MAX_NODES))


def test_a_region_reads_a_limited_number_of_arrays(rng):
    held = [from_array(rng.uniform(size=BIG)) for _ in range(3 * region.MAX_LEAVES)]
    total = held[0]
    for t in held[1:]:
        total = total + t
        work = region.collect([total._buffer])
        assert len(work.leaves) <= region.MAX_LEAVES + 1
    np.testing.assert_allclose(total.numpy(), sum(t.numpy() for t in held))


def test_arrays_that_somebody_holds_anyway_may_be_many(rng):
    held = [from_array(rng.uniform(size=BIG)) for _ in range(region.MAX_LEAVES)]
    sums = list(itertools.accumulate(held, lambda a, b: a + b))
    assert all(pending(*sums[1:]))


def test_a_running_sum_of_big_arrays_pins_only_a_few(rng):
    alive: list[weakref.ref] = []
    total = from_array(np.zeros(BIG))
    most = 0
    for _ in range(40):
        term = from_array(rng.uniform(size=BIG))
        alive.append(weakref.ref(term._buffer))
        total = total + term
        del term
        most = max(most, sum(r() is not None for r in alive))
    assert most <= region.MAX_EXCLUSIVE + 2
    total._array  # noqa: B018
    assert sum(r() is not None for r in alive) == 0


def test_a_long_chain_of_big_arrays(x):
    """5000 operations, forward and backward, without recursion and with few arrays alive."""
    with tg.GradientTape() as tape:
        tape.watch(x)
        y = x
        for i in range(2500):
            y = y * 1.0001 if i % 2 else y + 0.0001
            y = tg.sin(y) if i % 100 == 0 else y - 0.0001
        total = tg.sum(y)
    (g,) = tape.gradient(total, [x])
    assert g.shape == BIG and np.isfinite(g.numpy()).all()


def test_a_long_chain_does_not_store_every_value(x):
    seen = []
    y = x
    for _ in range(5000):
        y = y + 1.0
        seen.append(weakref.ref(y._buffer))
    y._array  # noqa: B018
    assert sum(r() is not None for r in seen) == 1
    np.testing.assert_allclose(y.numpy(), x.numpy() + 5000)


def test_freeing_needs_no_collector(x):
    gc.disable()
    try:
        a = tg.exp(x * 2)
        held = weakref.ref(a._buffer)
        b = a + 1
        b._array  # noqa: B018
        del a
        assert held() is None
    finally:
        gc.enable()


def test_the_interior_is_not_kept_for_a_rule(x):
    """The tape wants the region's input; the backward kernel makes the interior again."""
    with tg.GradientTape() as tape:
        tape.watch(x)
        a = x * 2
        b = tg.tanh(a)
        held = [weakref.ref(a._buffer), weakref.ref(b._buffer)]
        y = tg.sum(b * b)
    assert all(r() is None or r().array is None for r in held)
    (g,) = tape.gradient(y, [x])
    t = np.tanh(2 * x.numpy())
    np.testing.assert_allclose(g.numpy(), 4 * t * (1 - t * t), rtol=1e-12)


def test_targets_of_one_shape_that_share_work_share_a_kernel(x):
    shared = tg.exp(x)
    a, b = shared + 1, shared * 2
    assert region.kernels([a._buffer, b._buffer]) == [[a._buffer, b._buffer]]
    lonely = from_array(np.ones(BIG)) + 1
    assert len(region.kernels([a._buffer, lonely._buffer])) == 2
    other = from_array(np.ones(40000)) + 1
    assert len(region.kernels([a._buffer, other._buffer])) == 2


@pytest.mark.parametrize(("most", "kernels"), [(4, 1), (3, 2)])
def test_a_kernel_of_several_targets_touches_no_more_than_so_many_values(most, kernels, x, monkeypatch):
    """Here the array that both read, and what each is made of."""
    monkeypatch.setattr(region, "MAX_TOGETHER", most)
    a, b = tg.sin(x) + 1, x * 2
    with tg.measure() as m:
        fill([a._buffer, b._buffer])
    assert m.kernel_runs == kernels


def test_targets_of_several_shapes_that_read_one_array_have_kernels_of_their_own(rng):
    row, m = from_array(rng.uniform(size=region.SMALL)), from_array(rng.uniform(size=(2, region.SMALL)))
    with tg.measure() as measured:
        one, two = row + 1.0, row * m
        fill([one._buffer, two._buffer])
    assert measured.kernel_runs == 2
    np.testing.assert_array_equal(one.numpy(), row.numpy() + 1)
    np.testing.assert_array_equal(two.numpy(), row.numpy() * m.numpy())


def test_a_costly_value_is_stored_for_a_rule_and_only_then():
    x = tg.asarray(np.linspace(-2, 2, 40960).reshape(256, 160))
    with tg.measure() as alone:
        materialize(tg.erfc(x) * 2.0)
    assert alone.allocated_bytes < 2 * x.nbytes  # nobody wants erfc itself
    with tg.measure() as recorded, tg.GradientTape() as tape:
        tape.watch(x)
        y = tg.square(tg.erfc(x) * 2.0)  # its rule reads the operand, which is made from erfc
        total = tg.sum(y)
    with tg.measure() as back:
        g = tape.gradient(total, x)
    assert recorded.allocated_bytes > x.nbytes and recorded.nodes_run["erfc"] == 1 and back.nodes_run["erfc"] == 0
    with tg.GradientTape() as tape:
        tape.watch(x)
        cheap = tg.sum(tg.square(tg.tanh(x) * 2.0))
    with tg.measure() as back:
        tape.gradient(cheap, x)
    assert back.nodes_run["tanh"] == 1  # recomputed
    e = tg.erfc(x)
    np.testing.assert_allclose(g.numpy(), (8 * e * -2 / np.sqrt(np.pi) * tg.exp(-(x**2))).numpy(), rtol=1e-12)


def test_a_costly_value_that_one_reader_and_one_name_hold_is_stored():
    """The name asks for it sooner or later; without it nothing but the reader does, and it is not stored."""
    x = tg.asarray(np.linspace(-2, 2, 40960))
    for named in (True, False):
        y = tg.erfc(x)
        kept = weakref.ref(y._buffer)
        z = y * 2.0
        if not named:
            del y
        materialize(z)
        assert (kept() is not None and kept().array is not None) == named


def test_a_span_counts_the_nodes_of_a_kernel_and_the_arrays_that_it_reads(x):
    """What is read twice is counted twice, unless there seems to be too much; numbers are no arrays."""
    a = x + 1
    b = a * x
    assert [t._buffer.span[:2] for t in (a, b, b * x, b - b)] == [(1, 1), (2, 2), (3, 3), (3, 1)]


LINKS = {
    "array": lambda h, w: h * w,
    "itself": lambda h, w: h * tg.tanh(h),
    "branch": lambda h, w: h * 0.5 - tg.sin(w * 0.1) * w,
}


@pytest.mark.parametrize("link", LINKS.values(), ids=LINKS)
@pytest.mark.parametrize("arrays", [1, 6, 20])
def test_a_long_chain_is_walked_a_constant_number_of_times(arrays, link, rng, monkeypatch):
    """However many arrays it reads: each node is met about once by the rule, and once by the kernel."""
    met, collect = [0], region.collect

    def noting(targets):
        found = collect(targets)
        met[0] += len(found.order) + len(found.leaves)
        return found

    monkeypatch.setattr(region, "collect", noting)
    held = [from_array(1 + 1e-6 * rng.uniform(size=BIG)) for _ in range(arrays)]
    h, length = held[0], 300
    first = h._buffer.node.index
    for i in range(length):
        h = link(h, held[i % arrays])
    assert met[0] <= 3 * (h._buffer.node.index - first)


def test_what_is_evaluated_within_a_chain_is_known_to_the_rule(rng):
    """The same cuts as by walking each time: a value within a chain that gets its bytes is an array from then on."""
    held = [from_array(rng.uniform(size=BIG)) for _ in range(5)]
    h = held[0]
    for w in held[1:]:
        h = h + w
    middle = h
    h = h * held[1] - held[2]
    assert h._buffer.span[:2] == (6, 6)
    middle._array  # noqa: B018
    h = h + held[3]
    assert h._buffer.span[:2] == (3, 4)


def test_branches_of_a_chain_are_counted_with_it(rng):
    """Their nodes, and the arrays that they alone read, as many as a walk from its end meets."""
    held = [from_array(rng.uniform(size=BIG)) for _ in range(8)]
    h = held[0]
    for w in held[1:5]:
        h = h + w
    for branch, counts in ((tg.sin(held[5] * 2), (7, 6)), ((held[6] * 2) * held[7], (10, 8))):
        h = h + branch
        assert h._buffer.span[:2] == counts
    met = region.collect([h._buffer])
    assert (len(met.order), len(met.leaves) - 1) == (10, 8)  # a leaf more: the number 2


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", [100, 16383, 65537, 140001, 300007])
def test_bits_depend_neither_on_the_threshold_nor_on_threads(size, dtype, rng):
    """Values and gradients of whole, broadcast and reversed operands."""
    count, before = threads.get_num_threads(), region.SMALL
    a, b = (rng.uniform(0.5, 1.5, (2, size)).astype(dtype) for _ in range(2))
    results = set()
    try:
        for small, workers in itertools.product((1, 16384, 131072, 2**62), (1, 2)):
            region.set_small(small), threads.set_num_threads(workers)
            x, y = tg.asarray(a), tg.asarray(b)
            with tg.GradientTape() as tape:
                tape.watch([x, y])
                z = (x * y[:, ::-1] + x[0]) * y / (x + 2.0) - tg.sqrt(x)
            results.add(tuple(t.numpy().tobytes() for t in (z, *tape.gradient(z, [x, y]))))
    finally:
        region.set_small(before), threads.set_num_threads(count)
    assert len(results) == 1


@pytest.mark.parametrize("small", [16384, 131072])
def test_what_is_lazy_gets_no_memory_inside(small):
    """A chain on an array of the threshold's size takes the bytes of its result; on a smaller one, of each value."""
    before = region.SMALL
    try:
        region.set_small(small)
        peaks = []
        for size in (small, small - 1):
            x = tg.ones(size, dtype="float64")
            with tg.measure() as m:
                y = x
                values = [y := y * 1.5 for _ in range(4)]
                values[-1].numpy()
            peaks.append((m.peak_bytes - x.nbytes) / x.nbytes)
    finally:
        region.set_small(before)
    assert peaks[0] < 1.5 and peaks[1] > 3.5
