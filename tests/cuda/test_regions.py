"""Generated kernels: every way an operand may lie, every form of a loop, and what is compiled, launched and moved."""

from __future__ import annotations

import io

import numpy as np
import pytest
from cuda_cases import DTYPES, VIEWS, arithmetic, numbers, same_bits
from inside import buffer_of, is_lazy
from shim import standin
from shim.host import KernelFault

import tapegrad as tg
from tapegrad.core.primitive import REGISTRY, elementwise
from tapegrad.device import CPU
from tapegrad.engine.cuda import launch, layout
from tapegrad.engine.realize import realize
from tapegrad.errors import KernelError
from tapegrad.ops import dispatch
from tapegrad.tensor import materialize

pytestmark = pytest.mark.sampled(1 / 2)

TELLING = ("contiguous", "misaligned", "step", "transposed", "five dimensions", "repeated rows", "empty")
SPREAD = [
    [(12, 16), (16,)], [(12, 16), (12, 1)], [(12, 1), (1, 16)], [(12, 16), ()], [(12, 16), (1, 1)], [(3, 5), (5,)],
    [(5, 6, 8), (6, 1), (5, 1, 1)], [(4, 1, 6), (1, 8, 6), (8, 1)], [(2, 1, 3, 1, 4), (5, 1, 4, 1)], [(0, 3), (3,)],
]  # fmt: skip


@pytest.mark.parametrize(("name", "dtype"), [(name, dtype) for dtype in DTYPES for name in VIEWS
                                             if dtype in DTYPES[:2] or name in TELLING])  # fmt: skip
def test_any_layout(name, dtype, cuda, on):
    found = [arithmetic(on(d, numbers((12, 16), dtype), VIEWS[name])) for d in (cuda, CPU)]
    assert is_lazy(found[0]) and found[0].device is cuda
    same_bits(*found)
    assert len(standin.launches) == (name != "empty")


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_tails_and_misaligned_bases_share_kernels(dtype, offset, cuda, on):
    before = standin.compiles
    for n in (*range(1, 10), 1023, 1024, 1025):
        base = numbers(n + offset, dtype, n)
        view = lambda x: x[offset:]
        found = [arithmetic(on(d, base, view)) * on(d, base[::-1], view) for d in (cuda, CPU)]
        same_bits(*found)
    assert standin.compiles - before <= 4  # packs or not, one element (a place) or more, in either operand


@pytest.mark.parametrize("shapes", SPREAD, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_broadcasting(shapes, dtype, cuda, on):
    found = []
    for d in (cuda, CPU):
        xs = [on(d, numbers(s, dtype, i)) for i, s in enumerate(shapes)]
        y = xs[0]
        for x in xs[1:]:
            y = y * 2 + x
        found.append(y * xs[-1])
    same_bits(*found)
    assert len(standin.launches) <= max(2, len(shapes) - 1)  # a value that is repeated is stored first


def test_several_outputs_are_one_launch(cuda, on):
    base = numbers((9, 7), "float32")
    for d in (cuda, CPU):
        x = on(d, base)
        shared = x * 3
        ys = shared + 1, shared * x, shared > x, tg.sum(x, axis=0), shared
        realize([buffer_of(y) for y in ys])
        if d is cuda:
            assert len(standin.launches) == 2  # the sum ran when it was recorded
            got = ys
    for one, other in zip(got, ys):
        same_bits(one, other)


def test_numbers_that_are_drawn_count_as_one_node_that_reads_nothing(cuda):
    with tg.device(cuda):
        h = tg.random.uniform((40,))
        assert [buffer_of(t).span[:2] for t in (h, tg.tanh(h))] == [(1, 0), (2, 0)]


@pytest.mark.parametrize("n", [40, 4099])
def test_numbers_that_are_drawn_in_packs_of_any_size_are_those_of_the_cpu(n, cuda):
    """Packs of narrow results have more elements than a block has numbers; those of sixteen-bit numbers share none."""
    found = []
    for d in (cuda, CPU):
        with tg.device(d):
            g = tg.random.Generator(5)
            wide, single = (tg.random.uniform((n,), dtype=dtype, generator=g) for dtype in ("float64", "float32"))
            short = tg.random.bernoulli((n,), 0.3, generator=g, bits=16)
            found.append([wide.astype("float32"), wide > 0.5, single.astype("float16"), single > 0.5, short])
    for got, wanted in zip(*found):
        same_bits(got, wanted)


@pytest.mark.parametrize("shape", [(10, 8)])
def test_index_of_64_bits(shape, cuda, on, monkeypatch):
    base, narrow = numbers(shape, "float32"), standin.compiles
    views = [VIEWS[name] for name in ("contiguous", "transposed", "step", "reversed")]
    functions = arithmetic, lambda x: tg.sum(x * x, axis=0), lambda x: tg.sum(x * x, axis=1)
    make = lambda d: [f(on(d, base, view)) for view in views for f in functions]
    wanted, first = make(CPU), make(cuda)
    materialize(*first)
    narrow = standin.compiles
    monkeypatch.setattr(layout, "WIDE_INDEX", 1)
    monkeypatch.setattr(launch, "prepared", {})  # what has been prepared keeps its index
    for got, one in zip(make(cuda), wanted):
        same_bits(got, one)
    assert standin.compiles > narrow
    out = io.StringIO()
    tg.explain(arithmetic(on(cuda, base)), file=out)
    assert "typedef long long tg_index;" in out.getvalue()


def test_the_wide_index_starts_where_an_int_ends():
    assert layout.WIDE_INDEX + 16384 * 256 * 16 < 2**31
    x = np.broadcast_to(np.float32(1), (2**15, 2**15))
    assert layout.loop_of(x.shape, None, [x], [])[0].wide
    far = np.lib.stride_tricks.as_strided(np.zeros(1, "f4"), (2, 2), (4 * 2**30, 4), writeable=False)
    assert layout.loop_of((2, 2), None, [far], [])[0].wide
    assert not layout.loop_of((2, 2), None, [np.zeros((2, 2), "f4")], [])[0].wide


def test_packs_are_of_16_bytes_of_the_widest_array():
    """Numbers, and arrays of one element, are read once: they do not count."""
    vec = lambda leaves, out: layout.loop_of((64,), None, leaves, [np.zeros(64, out)])[0].vec
    narrow, wide = np.zeros(64, "f4"), np.zeros(64, "f8")
    assert [vec([narrow], "f4"), vec([wide], "f4"), vec([narrow], "f8"), vec([narrow, wide], "i1")] == [4, 2, 2, 2]
    assert vec([narrow, np.zeros(1, "c16")], "f4") == 4 and vec([np.zeros(1, "f8")], "f2") == 8


def test_a_kernel_is_compiled_once_for_all_numbers_and_shapes(cuda, on):
    f = lambda x, a, b: tg.tanh(x * a + b)
    f(on(cuda, numbers(37, "float32")), 2.0, 1.0).numpy()
    before = standin.compiles
    for shape, a, b in (((37,), 3.5, -1.0), ((5, 8), 2.0, 1e30), ((2, 3, 4), float("inf"), 0.0), ((1000,), -0.0, 7)):
        got = f(on(cuda, numbers(shape, "float32")), a, b).numpy()
        with np.errstate(invalid="ignore"):
            wanted = np.tanh(numbers(shape, "float32") * np.float32(a) + np.float32(b))
        np.testing.assert_allclose(got, wanted, rtol=1e-6)
    assert standin.compiles == before
    x = on(cuda, numbers(37, "float32"))
    for g in (lambda: tg.tanh(x * 2.0) + 1.0, lambda: tg.sinh(x * 2.0 + 1.0), lambda: f(x.astype("float64"), 2.0, 1.0),
              lambda: f(x, 2.0, 1.0)[:, None] * x, lambda: tg.tanh(x * x + x)):  # fmt: skip
        before = standin.compiles
        g().numpy()
        assert standin.compiles > before


def test_constants_are_arguments(cuda, on):
    x = on(cuda, numbers(8, "float32"))
    standin.events.clear()
    y = (x * 0.1 + tg.asarray(3.0, device=cuda)) * tg.asarray(2.0, device=cuda)
    y.numpy()
    kinds = [e.kind for e in standin.events]
    assert kinds.count("malloc") == 1 and kinds.count("h2d") == 0 and kinds.count("launch") == 1
    same_bits(y, (numbers(8, "float32") * np.float32(0.1) + np.float32(3)) * np.float32(2))


def test_explanation(cuda, on):
    texts = {}
    for d in (cuda, CPU):
        x, out = on(d, numbers((300, 200), "float32")), io.StringIO()
        tg.explain(tg.tanh(x * 2.5 + 1), x, device="cuda", file=out)
        texts[d] = out.getvalue()
    assert texts[cuda] == texts[CPU]
    for part in ("kernel 1: 3 nodes over (300, 200), 3 inputs, 1 outputs; reads 240008 bytes, writes 240000",
                 "has its value already (240000 bytes); no kernel", "void tg_element(", "<- output",
                 "__launch_bounds__(256) tg_fused(", "tg_load_pack<N>(x1 + i)", "const float x0", "= tanh(",
                 "typedef int tg_index;"):  # fmt: skip
        assert part in texts[cuda], texts[cuda]
    assert not standin.launches


@pytest.fixture
def planted():
    """Makes elementwise primitives with a CUDA expression of one's own; they are gone afterwards."""
    before = dict(REGISTRY)
    rules = {"ufunc": "negative", "infer": REGISTRY["negative"].infer, "partials": [-1.0]}
    yield lambda cxx: elementwise("planted", cxx=cxx, **rules)
    REGISTRY.clear()
    REGISTRY.update(before)


def test_a_kernel_that_does_not_compile_is_shown(planted, cuda, on):
    prim = planted("tg_missing({x})")
    with pytest.raises(KernelError, match="tg_fused does not compile for cuda:0") as caught:
        dispatch.bind(prim, on(cuda, numbers(5, "float32"))).numpy()
    assert '   1 #include "scalar.cuh"\n' in str(caught.value) and "tg_missing(l0)" in str(caught.value)


def test_a_primitive_without_an_expression_says_so(planted, cuda, on):
    prim = planted(None)
    same_bits(dispatch.bind(prim, on(CPU, numbers(5, "float32"))), -numbers(5, "float32"))
    with pytest.raises(KernelError, match=r"planted: this elementwise primitive declares no CUDA expression \(cxx=\)"):
        dispatch.bind(prim, on(cuda, numbers(5, "float32"))).numpy()


@pytest.mark.parametrize("name", VIEWS)
def test_nothing_is_touched_out_of_bounds(name, cuda, on):
    standin.configure(check=True)
    x = on(cuda, numbers((12, 16), "float32"), VIEWS[name])
    same_bits(arithmetic(x), arithmetic(x.to_device("cpu")))
    axes = tuple(range(max(0, x.ndim - 1), x.ndim))
    same_bits(tg.sum(x * 1, axis=axes), tg.sum(x.to_device("cpu"), axis=axes))


def test_an_access_out_of_bounds_is_found(planted, cuda, on):
    standin.configure(check=True)
    with pytest.raises(KernelFault):
        dispatch.bind(planted("tg_load(x0[i + j + 100000])"), on(cuda, numbers(5, "float32"))).numpy()


def test_kernels_made_ready_are_forgotten_when_there_are_too_many(cuda, on, monkeypatch):
    monkeypatch.setattr(launch, "MOST", 3)
    monkeypatch.setattr(launch, "prepared", {})
    for n in range(40, 50):
        same_bits(arithmetic(on(cuda, numbers((n,), "float32"))), arithmetic(on(CPU, numbers((n,), "float32"))))
        assert 1 <= len(launch.prepared) <= 3


def test_a_kernel_that_is_kept_reads_where_its_draws_are_from_memory(cuda, on):
    """A captured function draws on from where it is at each call, several times in one kernel."""
    draw = lambda: tg.random.uniform((40,), device=cuda)
    f = lambda x: (tg.tanh(x) * draw() + draw(), tg.sum(draw() * draw()))

    def drawn(f):
        tg.random.seed(3)
        return [y for i in range(4) for y in f(on(cuda, numbers((40,), "float32", i)))]

    captured = tg.function(f)
    for one, other in zip(drawn(captured), drawn(f)):
        same_bits(one, other)
    assert captured.stats.replays == 2 and not captured.stats.fallbacks
