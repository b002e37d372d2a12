"""The table on CUDA: every primitive of the registry at each of its samples, against the CPU engine.

What shares a leaf shares a kernel, so all primitives of a dtype are recorded first and then evaluated together: a few
kernels are compiled instead of a thousand.  Where such a kernel fails, each value is tried alone, to name the culprit.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cuda_cases import same_bits
from inside import buffer_of
from shim.streams import changing
from test_primitives import call, good_samples, operand

import tapegrad as tg
from tapegrad.core.primitive import REGISTRY, Bad, Elementwise, Linearity, Primitive, Reduction, Sample
from tapegrad.core.state import during
from tapegrad.device import CPU, dtypes
from tapegrad.engine.realize import realize
from tapegrad.errors import IndexingError, TapegradError
from tapegrad.ops import dispatch
from tapegrad.tensor import Tensor, from_array, materialize

BFLOAT = np.dtype(ml_dtypes.bfloat16)
EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "complex64": 2.0**-23}
SMOOTH = ("float32", "float64", "float16", "bfloat16", "complex64", "complex128")
ALL = (*SMOOTH, "bool", "int8", "uint8", "int32", "int64")


def operands(prim: Primitive, sample: Sample, dtype: str) -> list[np.ndarray]:
    """The same numbers for every primitive of one domain, so that they are one leaf."""
    names = prim.operands if prim.linearity is not Linearity.ALL else prim.operands * len(sample.operands)
    found = []
    for place, (name, spec) in enumerate(zip(names, sample.operands, strict=True)):
        rng = np.random.default_rng(zlib.crc32(f"{place} {spec}".encode()))
        x = operand(prim, name, spec, {"bfloat16": "float32"}.get(dtype, dtype), rng, sample)
        if x.dtype.kind == "c":
            x = x + 1j * rng.uniform(0.25, 0.75, x.shape).astype(x.real.dtype)
        found.append(x.astype(BFLOAT) if dtype == "bfloat16" and x.dtype == np.float32 else x)
    return found


PUBLIC = {f.primitive.name: f for f in vars(tg).values() if isinstance(getattr(f, "primitive", None), Primitive)} | {
    name: getattr(tg, name) for name in ("conj", "real", "imag", "where") if name in REGISTRY
}
"""What users call: it casts operands to a dtype that the primitive computes in, or refuses them."""


def apply(prim: Primitive, xs: list[Tensor], params: dict[str, Any]) -> Tensor:
    """As a user calls it, where there is a function for just that; a barrier itself."""
    if isinstance(prim, Elementwise) and prim.name in PUBLIC:
        return PUBLIC[prim.name](*xs)
    return call(prim, xs, params)


def takes(prim: Primitive, dtype: str) -> bool:
    """Whether users can have it computed in ``dtype``, as far as no front end says."""
    if np.dtype(dtype).kind in "fV" or prim.name == "cast":
        return True
    if isinstance(prim, Elementwise):
        return prim.name in PUBLIC
    if np.dtype(dtype).kind == "c":
        return prim.linearity is not Linearity.NONE or prim.name == "prod"
    return prim.linearity is not Linearity.NONE or isinstance(prim, Reduction) or not prim.differentiable


def cases(
    only: Callable[[Primitive], bool], first: Callable[[Primitive], bool]
) -> Iterator[tuple[str, Primitive, Sample]]:
    """Good samples that do not name a device themselves; ``first``: one a primitive, where the rest adds only time."""
    for prim in REGISTRY.values():
        samples = [s for s in good_samples(prim) if "device" not in s.params]
        for number, sample in enumerate(samples[: 1 if first(prim) else None]):
            if only(prim):
                yield f"{prim.name}-{number}", prim, sample


@pytest.fixture(autouse=True)
def on_changing_streams(cupy: Any) -> Iterator[None]:
    """No bit depends on which stream an operation is asked for, and no operation overtakes another."""
    with changing(cupy):
        yield


class Uploaded:
    """Tensors on a device, one for equal arrays."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self.found: dict[Any, Tensor] = {}

    def __call__(self, x: np.ndarray) -> Tensor:
        key = x.tobytes(), x.shape, x.dtype
        if key not in self.found:
            self.found[key] = from_array(self.device.array(x), self.device)
        return self.found[key]


def on_cpu(prim: Primitive, sample: Sample, xs: list[np.ndarray], failures: list[str]) -> Tensor | None:
    """The CPU engine's value, or None where it refuses the dtype."""
    if isinstance(prim, Elementwise):
        prim.memo.clear()  # what was bound without the front end must not be found by it
    try:
        with np.errstate(all="ignore"):
            y = apply(prim, [from_array(x) for x in xs], sample.params)
            materialize(y)
            # With ml_dtypes 0.7 NumPy's FFT takes bfloat16, which no front end lets through, and gives float64.
            is_widened = y.numpy().dtype == np.float64 and any(x.dtype == BFLOAT for x in xs)
            return None if is_widened else y
    except (TypeError, TapegradError):
        return None
    except Exception as e:
        failures.append(f"{prim.name} of {xs[0].dtype} on the CPU: {type(e).__name__}: {e}")
        return None


def evaluated(named: dict[str, Tensor], failures: list[str]) -> dict[str, np.ndarray]:
    """Arrays of values, evaluated together or, if that fails, one by one."""
    try:
        materialize(*named.values())
    except Exception:
        pass
    found = {}
    for name, t in named.items():
        try:
            found[name] = t.numpy()
        except Exception as e:
            failures.append(f"{name}: {type(e).__name__}: {str(e)[-200:]}")
    return found


def differs(got: np.ndarray, wanted: np.ndarray, inner: str) -> str:
    """What is wrong with a value; ``inner``: the dtype in which it was computed."""
    if (got.shape, got.dtype) != (wanted.shape, wanted.dtype):
        return f"{got.dtype}{got.shape} instead of {wanted.dtype}{wanted.shape}"
    if wanted.dtype.kind in "biu":
        return "" if np.array_equal(got, wanted) else f"{got} instead of {wanted}"
    eps = max(EPS.get(inner, 2.0**-52), EPS.get(wanted.dtype.name, 2.0**-52))
    wide = "complex128" if wanted.dtype.kind == "c" else "float64"
    a, b = got.astype(wide), wanted.astype(wide)
    with np.errstate(all="ignore"):
        bound = 4 * eps * (np.abs(b) + (8 if eps < 1e-4 else 0.25))
        close = (np.abs(a - b) <= bound) | (a == b) | (np.isnan(a) & np.isnan(b))
    return "" if close.all() else f"{got[~close][:4]} instead of {wanted[~close][:4]}, {(~close).sum()} in all"


@pytest.mark.sampled(1 / 8)
@pytest.mark.parametrize("dtype", ALL)
def test_values(dtype, cuda):
    first = lambda prim: isinstance(prim, Elementwise) and dtype != "float32"
    there, wanted, pending, failures = Uploaded(cuda), {}, {}, []
    for name, prim, sample in cases(lambda prim: takes(prim, dtype), first):
        xs = operands(prim, sample, dtype)
        y = on_cpu(prim, sample, xs, failures)
        if y is None:
            continue
        wanted[name] = y.numpy()
        try:
            with tg.device(cuda):
                pending[name] = apply(prim, [there(x) for x in xs], sample.params)
        except Exception as e:
            failures.append(f"{name}: {type(e).__name__}: {str(e)[-200:]}")
    for name, got in evaluated(pending, failures).items():
        if wrong := differs(got, wanted[name], dtype):
            failures.append(f"{name}: {wrong}")
    assert not failures, "\n".join(failures)
    assert len(wanted) > 40


def pulled(prim: Primitive, sample: Sample, xs: list[Tensor], ct: np.ndarray, device: Any) -> list[Tensor | None]:
    """Cotangents of the operands that have a rule."""
    where = [i for i, x in enumerate(xs) if dtypes.is_inexact(x.dtype) and prim.rule(i) is not None]
    with tg.device(device), tg.GradientTape() as tape:
        sources = list(xs)
        for i in where:
            sources[i] = xs[i] if device is CPU else Tensor(buffer_of(xs[i]))
        tape.watch([sources[i] for i in where])
        y = apply(prim, sources, sample.params)
    assert y.shape == ct.shape
    return tape.gradient(y, [sources[i] for i in where], output_gradients=from_array(device.array(ct), device))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", SMOOTH)
def test_gradients(dtype, cuda):
    # Rules of what CuPy's functions compute are many small kernels, nearly the same in every dtype: two are enough.
    # Of the 16-bit dtypes, which share their kernels but for rounding, each primitive takes one, its values both.
    by_cupy = lambda prim: (
        prim.linearity is Linearity.NONE and not isinstance(prim, Elementwise) and getattr(prim, "cuda", None) is None
    )
    short = dict(zip(sorted(REGISTRY), itertools.cycle(["float16", "bfloat16"]), strict=False))
    wanted_of = lambda prim: (
        prim.differentiable
        and takes(prim, dtype)
        and (dtype in ("float32", "complex128") or not by_cupy(prim))
        and (dtype not in short.values() or dtype == short[prim.name])
    )
    there, wanted, pending, failures = Uploaded(cuda), {}, {}, []
    for name, prim, sample in cases(wanted_of, lambda prim: dtype != "float64"):
        xs = operands(prim, sample, dtype)
        y = on_cpu(prim, sample, xs, failures)
        if y is None or not dtypes.is_inexact(y.dtype) or not any(dtypes.is_inexact(x.dtype) for x in xs):
            continue
        ct = np.random.default_rng(1).uniform(0.5, 1.0, y.shape)
        ct = (np.round(ct * 256) / 256).astype(y.dtype)  # of few bits, which products that round operands keep
        try:
            with np.errstate(all="ignore"):
                own = pulled(prim, sample, [from_array(x) for x in xs], ct, CPU)
                own = [None if g is None else g.numpy() for g in own]
        except (TypeError, TapegradError):
            continue
        try:
            got = pulled(prim, sample, [there(x) for x in xs], ct, cuda)
        except Exception as e:
            failures.append(f"{name}: {type(e).__name__}: {str(e)[-200:]}")
            continue
        for i, (g, w) in enumerate(zip(got, own, strict=True)):
            assert (g is None) == (w is None), name
            if g is not None:
                pending[f"{name} operand {i}"], wanted[f"{name} operand {i}"] = g, w
    for name, got in evaluated(pending, failures).items():
        if wrong := differs(got, wanted[name], dtype):
            failures.append(f"{name}: {wrong}")
    assert not failures, "\n".join(failures)
    assert len(wanted) > 40


def _real(y: Tensor, dtype: str) -> Tensor:
    """``y`` in a float dtype; of complex numbers both parts count."""
    return dispatch.cast(tg.real(y) + 2 * tg.imag(y) if y.dtype.kind == "c" else y, np.dtype(dtype))


@pytest.mark.sampled(1 / 6)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_fused_equals_op_by_op(dtype, cuda):
    """Bit for bit: a value in a register and the same value read back from memory, also with a sum behind it."""
    there = Uploaded(cuda)
    shapes = {1: ((7, 12),), 2: ((7, 12), (12,)), 3: ((7, 12), (7, 1), (7, 12))}
    recorded = {}
    for prim in REGISTRY.values():
        if isinstance(prim, Elementwise) and prim.name != "cast":
            sample = Sample(*shapes[len(prim.operands)])
            xs = operands(prim, sample, dtype)
            if on_cpu(prim, sample, xs, []) is not None:
                recorded[prim.name] = lambda prim=prim, xs=xs: _real(apply(prim, [there(x) for x in xs], {}), dtype)
    after = lambda y: y * 0.3 - tg.square(y)
    stored = {name: make() for name, make in recorded.items()}
    materialize(*stored.values())
    behind = {name: after(y) for name, y in stored.items()}
    materialize(*behind.values())
    fused = {name: after(make()) for name, make in recorded.items()}
    materialize(*fused.values())
    apart, together = sums(behind.values()), sums(after(make()) for make in recorded.values())
    assert len(recorded) > 60
    wrong = []
    for name, one, other in zip(recorded, apart, together, strict=True):
        same = [same_value(behind[name], fused[name]), *(same_value(a, b) for a, b in zip(one, other))]
        if not all(same):
            wrong.append(f"{name}: {same}")
    assert not wrong, "\n".join(wrong)


def sums(values: Any) -> list[list[Tensor]]:
    """Sums along rows and columns, those of one axis in as few kernels as may be."""
    found: list[list[Tensor]] = [[] for _ in range(2)]
    values = list(values)
    for axis in (0, 1):

        def along(axis: int = axis) -> list[Tensor]:
            sums = [tg.sum(y, axis=axis) for y in values]
            realize(buffer_of(t) for t in sums)
            return sums

        found[axis] = during(along, deferring=[])
    return [list(pair) for pair in zip(*found)]


def same_value(a: Tensor, b: Tensor) -> bool:
    try:
        same_bits(a, b)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize(
    ("prim", "sample"),
    [pytest.param(p, s, id=f"{p.name}-{k}")
     for p in REGISTRY.values() for k, s in enumerate(p.samples) if isinstance(s, Bad)],
)  # fmt: skip
def test_bad_samples_raise_what_they_raise_on_the_cpu(prim, sample, cuda):
    found = []
    for device in (CPU, cuda):
        xs = [from_array(device.array(x), device) for x in operands(prim, sample, "float64")]
        with tg.device(device), pytest.raises(sample.error) as caught:
            call(prim, xs, sample.params).numpy()
        found.append((caught.type, str(caught.value)))
    if sample.error is IndexingError:  # a device that found a bad number has said where it is, not which it is
        found = [(kind, text.partition(":")[0]) for kind, text in found]
    assert found[0] == found[1]
