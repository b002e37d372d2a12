"""The table: every primitive of the registry, at each of its samples, against the laws that every primitive obeys.

A new primitive is tested by being declared.  Elementwise ones without samples get standard ones from their domain and
number of operands; any other one must bring its own.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from distributed.ranks import TRIED
from inside import array_of, is_lazy, weak

import tapegrad as tg
from tapegrad.core.primitive import REGISTRY, Bad, Elementwise, Linearity, Opaque, Primitive, Sample, View, general
from tapegrad.core.rule import OUT
from tapegrad.device import dtypes, threads
from tapegrad.engine import region
from tapegrad.engine.cpu import tiles
from tapegrad.ops import dispatch
from tapegrad.tensor import Tensor, from_array
from tapegrad.testing import check_grads

FLOATS = ("float64", "float32")
STANDARD = {
    1: [((3, 4),), ((),), ((0, 3),)],
    2: [((3, 4), (4,)), ((3, 1), (1, 4)), ((), ()), ((0, 3), (3,))],
    3: [((3, 4), (4,), (3, 1)), ((), (), ()), ((0, 3), (3,), ())],
}


def good_samples(prim: Primitive) -> list[Sample]:
    given = [s for s in prim.samples if not isinstance(s, Bad)]
    if given or not isinstance(prim, Elementwise):
        return given
    return [Sample(*shapes) for shapes in STANDARD[len(prim.operands)]]


def operand(prim: Primitive, name: str, spec: Any, dtype: str, rng: np.random.Generator, sample: Sample) -> np.ndarray:
    """A shape becomes random numbers of the domain; anything else is the operand itself."""
    if not (isinstance(spec, tuple) and all(isinstance(n, int) for n in spec)):
        found = np.asarray(spec)
        return found.astype(dtype) if found.dtype.kind == "f" else found
    if name == "condition" or dtype == "bool":
        return np.asarray(rng.uniform(size=spec) > 0.5)
    if dtypes.is_integer(np.dtype(dtype)):
        return rng.integers(1, 5, spec).astype(dtype)
    low, high = sample.domain or prim.domain
    return rng.uniform(low, high, spec).astype(dtype)


def operands(prim: Primitive, sample: Sample, dtype: str) -> list[np.ndarray]:
    rng = np.random.default_rng(zlib.crc32(f"{prim.name} {sample}".encode()))
    names = prim.operands if prim.linearity is not Linearity.ALL else prim.operands * len(sample.operands)
    return [operand(prim, n, s, dtype, rng, sample) for n, s in zip(names, sample.operands, strict=True)]


def call(prim: Primitive, xs: Any, params: dict[str, Any]) -> Tensor:
    if prim is dispatch.cast_p:
        return dispatch.cast(xs[0], np.dtype("float32" if xs[0].dtype == "float64" else "float64"))
    if isinstance(prim, Elementwise):
        return dispatch.bind(prim, *xs)
    return dispatch.barrier(prim, *xs, **params)


def smooth_operands(prim: Primitive, xs: list[np.ndarray]) -> list[int]:
    """The positions in which derivatives may be asked."""
    return [i for i, x in enumerate(xs) if x.dtype.kind == "f" and prim.rule(i) is not None]


def takes(prim: Primitive, dtype: str) -> bool:
    """Whether ``prim`` computes in ``dtype``: the front ends cast everything else first."""
    kind = np.dtype(dtype).kind
    if not isinstance(prim, Elementwise) or prim.ufunc is None:
        return kind == "f" or prim.name in ("where", "cast") or prim.linearity is not Linearity.NONE
    try:
        xs = [np.ones((), dtype)] * len(prim.operands)
        with np.errstate(all="ignore"):
            found = getattr(np, prim.ufunc)(*xs)
            return found.dtype == call(prim, [from_array(x) for x in xs], {}).dtype
    except TypeError:
        return False


def differentiable(prim: Primitive, sample: Sample) -> bool:
    return bool(smooth_operands(prim, operands(prim, sample, "float64")))


def rows(*wanted: str, only: Callable[[Primitive, Sample], bool] = lambda prim, sample: True) -> list[Any]:
    """Parameters ``prim, sample, dtype`` for the dtypes among ``wanted`` that each primitive takes."""
    found = []
    for prim in REGISTRY.values():
        for (number, sample), dtype in itertools.product(enumerate(good_samples(prim)), wanted):
            if takes(prim, dtype) and only(prim, sample):
                found.append(pytest.param(prim, sample, dtype, id=f"{prim.name}-{number}-{dtype}"))
    return found


def same_bits(a: Any, b: Any) -> bool:
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    count = threads.get_num_threads()
    yield
    threads.set_num_threads(count)
    tiles.set_tile_size(tiles.TILE)


@pytest.mark.parametrize("prim", REGISTRY.values(), ids=lambda p: p.name)
def test_a_primitive_has_samples(prim):
    if prim.effect is not None:  # other processes take part: the cases on ranks see that each of these is tried
        assert prim.name in {name for names in TRIED.values() for name in names}
        return
    samples = good_samples(prim)
    assert samples, f"{prim.name} declares no sample and is not elementwise: nothing would test it"
    assert any(takes(prim, d) for d in ("float64", "int64", "bool")), f"no dtype is known that {prim.name} takes"
    pushed = prim.jvp is not None or isinstance(prim, Elementwise) or prim.linearity is not Linearity.NONE
    assert pushed or not prim.differentiable, f"{prim.name} has no JVP rules"


def test_a_primitive_without_samples_is_found():
    lonely = Opaque(name="lonely", operands=("x",), impl=lambda xp, x: x, infer=lambda x: x)
    assert not good_samples(lonely)


@pytest.mark.sampled(1 / 4)
@pytest.mark.parametrize(("prim", "sample", "dtype"), rows("float64", "float32", "float16", "int64", "int32", "bool"))
def test_inferred_aval_is_what_comes_out(prim, sample, dtype):
    xs = operands(prim, sample, dtype)
    before = [x.copy() for x in xs]
    y = call(prim, [from_array(x) for x in xs], sample.params)
    result = y.numpy()
    assert (result.shape, result.dtype) == (y.shape, y.dtype)
    for x, old in zip(xs, before, strict=True):
        assert same_bits(x, old), f"{prim.name} wrote to its operand"


VIEWS = rows("float64", "bfloat16", "complex64", "int8", "bool", only=lambda prim, sample: isinstance(prim, View))


@pytest.mark.parametrize(("prim", "sample", "dtype"), VIEWS)
def test_a_view_lies_in_the_memory_of_its_operand(prim, sample, dtype):
    """Of one without elements nothing needs to stay alive."""
    (array,) = operands(prim, sample, dtype)
    x = from_array(array)
    y = call(prim, [x], sample.params)
    assert np.may_share_memory(y.numpy(), array) == bool(y.size)
    base = weak(x)
    del x
    assert (base() is not None) == bool(y.size)


@pytest.mark.sampled(1 / 3)
@pytest.mark.parametrize(("prim", "sample", "dtype"), rows("float32", only=lambda prim, sample: prim.operands))
def test_single_precision_agrees_with_double(prim, sample, dtype):
    narrow = operands(prim, sample, dtype)
    wide = [x.astype("float64") if x.dtype.kind == "f" else x for x in narrow]
    got = call(prim, [from_array(x) for x in narrow], sample.params).numpy()
    wanted = call(prim, [from_array(x) for x in wide], sample.params).numpy()
    np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("prim", "sample", "dtype"), rows("float64", only=differentiable))
def test_derivatives_to_second_order(prim, sample, dtype):
    xs = operands(prim, sample, dtype)
    where = smooth_operands(prim, xs)

    def f(*smooth):
        full = [from_array(x) for x in xs]
        for i, x in zip(where, smooth, strict=True):
            full[i] = x
        y = call(prim, full, sample.params)
        y = tg.real(y) + 2 * tg.imag(y) if y.dtype.kind == "c" else y  # both parts count
        return dispatch.cast(y, np.dtype("float64"))

    tolerance = {"rtol": 1e-2, "atol": 1e-2, "eps": 1e-3} if prim is dispatch.cast_p else {}
    check_grads(f, [xs[i] for i in where], order=2, **tolerance)


@pytest.mark.sampled(1 / 4)
@pytest.mark.parametrize(("prim", "sample", "dtype"), rows("float32", "float16", only=differentiable))
def test_cotangents_have_the_operands_dtype(prim, sample, dtype):
    xs = operands(prim, sample, dtype)
    where = smooth_operands(prim, xs)
    tensors = [from_array(x) for x in xs]
    with tg.GradientTape() as tape:
        for i in where:
            tape.watch(tensors[i])
        y = call(prim, tensors, sample.params)
    gradients = tape.gradient(y, [tensors[i] for i in where])
    for i, g in zip(where, gradients, strict=True):
        if g is not None:
            assert (g.shape, g.dtype) == (tensors[i].shape, tensors[i].dtype)


@pytest.mark.sampled(1 / 3)
@pytest.mark.parametrize(("prim", "sample", "dtype"), rows("float64", only=differentiable))
def test_a_rule_reads_only_what_it_declares(prim, sample, dtype):
    """Poison: what the plan does not keep is overwritten with NaN between forward and backward."""
    where = smooth_operands(prim, operands(prim, sample, dtype))
    for mask in range(1, 1 << len(where)):
        tracked = [i for k, i in enumerate(where) if mask >> k & 1]
        clean, poisoned = (_gradients(prim, sample, dtype, tracked, poison) for poison in (False, True))
        for a, b in zip(clean, poisoned, strict=True):
            assert (a is None) == (b is None)
            assert a is None or same_bits(a.numpy(), b.numpy())


def _gradients(prim: Primitive, sample: Sample, dtype: str, tracked: list[int], poison: bool) -> list[Any]:
    xs = [from_array(x) for x in operands(prim, sample, dtype)]
    with tg.GradientTape() as tape:
        for i in tracked:
            tape.watch(xs[i])
        y = call(prim, xs, sample.params)
    kept = prim.plan(sum(1 << i for i in tracked), len(xs)).slots
    ct = from_array(np.random.default_rng(1).uniform(0.5, 1.0, y.shape).astype(y.dtype))
    if poison:
        declared = [array_of(y) if slot == OUT else array_of(xs[slot]) for slot in kept]
        for array in [array_of(y), *(array_of(x) for x in xs)]:
            if (
                array.dtype.kind == "f"
                and array.flags.writeable
                and not any(np.may_share_memory(array, d) for d in declared)
            ):
                array[...] = np.nan
    return tape.gradient(y, [xs[i] for i in tracked], output_gradients=ct)


def test_a_rule_that_reads_more_is_found():
    seen = []
    smuggler = general(
        "smuggler",
        impl=lambda xp, x: (seen.append(x), x * x)[1],
        infer=lambda x: x,
        vjp=[lambda ct: ct * 2 * from_array(seen.pop())],
    )
    del REGISTRY["smuggler"]
    clean, poisoned = (_gradients(smuggler, Sample((3,)), "float64", [0], poison) for poison in (False, True))
    assert not same_bits(clean[0].numpy(), poisoned[0].numpy())


@pytest.mark.parametrize(
    ("prim", "sample"),
    [
        pytest.param(p, s, id=f"{p.name}-{k}")
        for p in REGISTRY.values()
        for k, s in enumerate(p.samples)
        if isinstance(s, Bad)
    ],
)
def test_bad_samples_raise_what_they_declare(prim, sample):
    xs = [from_array(x) for x in operands(prim, sample, "float64")]
    with pytest.raises(sample.error) as caught:
        call(prim, xs, sample.params)
    assert prim.name.removeprefix("reduce_").removesuffix("_p").split("_vjp")[0] in str(caught.value)


def layouts(prim: Primitive, dtype: str) -> Iterator[list[np.ndarray]]:
    """Operands of a big elementwise primitive: contiguous, strided, broadcast, of one element."""
    shape = (129, 259)
    low, high = prim.domain

    def make(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
        return operand(prim, name, shape, dtype, np.random.default_rng(seed), Sample(domain=(low, high)))

    forms = [
        lambda n, s: make(n, shape, s),
        lambda n, s: make(n, shape[::-1], s).T,
        lambda n, s: make(n, (shape[0], 2 * shape[1] + 1), s)[:, 1::2],
        lambda n, s: make(n, shape, s)[::-1, ::-1],
        lambda n, s: make(n, shape[1:], s),
        lambda n, s: make(n, (shape[0], 1), s),
        lambda n, s: make(n, (), s),
    ]
    for k, form in enumerate(forms[:4]):
        yield [form(n, 10 * k + i) for i, n in enumerate(prim.operands)]
    if len(prim.operands) > 1:
        for k, form in enumerate(forms[1:], 5):
            for whole in range(len(prim.operands)):
                yield [
                    forms[0](n, 10 * k + i) if i == whole else form(n, 10 * k + i) for i, n in enumerate(prim.operands)
                ]


def at_once(prim: Primitive, arrays: list[np.ndarray]) -> np.ndarray:
    """Op by op, without tiles."""
    before = region.SMALL
    region.set_small(2**62)
    try:
        return call(prim, [from_array(x) for x in arrays], {}).numpy()
    finally:
        region.set_small(before)


ELEMENTWISE = [
    pytest.param(prim, dtype, id=f"{prim.name}-{dtype}")
    for prim in REGISTRY.values()
    for dtype in ("float64", "float32", "int64", "bool")
    if isinstance(prim, Elementwise) and takes(prim, dtype)
]


@pytest.mark.sampled(1 / 4)
@pytest.mark.parametrize(("prim", "dtype"), ELEMENTWISE)
def test_fused_equals_op_by_op(prim, dtype):
    """Bit for bit, for any layout of the leaves, tile size, number of threads, and wherever an operand comes from."""
    for arrays in layouts(prim, dtype):
        wanted = at_once(prim, [np.ascontiguousarray(x) for x in arrays])
        if prim.exact:  # else NumPy may round differently for another stride, and a kernel must pack its strided leaves
            assert same_bits(at_once(prim, arrays), wanted)
        for tile, count in ((65536, 2), (1000, 3), (4099, 1), (300, 2)):
            tiles.set_tile_size(tile)
            threads.set_num_threads(count)
            tensors = [from_array(x) for x in arrays]
            y = call(prim, tensors, {})
            assert is_lazy(y) != prim.view, "expected a lazy value, or of a view none"
            assert same_bits(y.numpy(), wanted), (tile, count)
            made = [dispatch.bind(REGISTRY["where"], from_array(np.ones((), bool)), t, t) for t in tensors]
            z = call(prim, made, {})
            assert same_bits(z.numpy(), wanted), ("operands made in the same kernel", tile, count)
        tiles.set_tile_size(tiles.TILE)


BIG = {
    "softmax": [(300, 700)], "softmax_vjp": [(300, 700), (300, 700)], "log_softmax": [(300, 700)],
    "log_softmax_vjp": [(300, 700), (300, 700)], "layer_norm": [(300, 700), (700,), (700,)],
    "layer_norm_vjp_x": [(300, 700), (700,), (300, 700)], "layer_norm_vjp_gamma": [(300, 700), (300, 700)],
    "matmul": [(40, 100, 60), (40, 60, 80)], "sum": [(300, 700)], "reduce_max": [(300, 700)],
}  # fmt: skip


@pytest.mark.parametrize("name", BIG)
@pytest.mark.parametrize("dtype", FLOATS)
def test_barriers_do_not_depend_on_threads(name, dtype, rng):
    prim = REGISTRY[name]
    xs = [rng.uniform(-1, 1, shape).astype(dtype) for shape in BIG[name]]
    params = {k: v for k, v in {"eps": 1e-5, "axis": (1,)}.items() if k in _parameters(prim)}
    found = []
    for count in (1, 2, 5):
        threads.set_num_threads(count)
        found.append(call(prim, [from_array(x) for x in xs], params).numpy())
    strided = [np.repeat(x, 2, axis=-1)[..., ::2] for x in xs]
    found.append(call(prim, [from_array(x) for x in strided], params).numpy())
    assert all(same_bits(found[0], other) for other in found[1:])


def _parameters(prim: Primitive) -> set[str]:
    return {k for s in prim.samples for k in s.params}
