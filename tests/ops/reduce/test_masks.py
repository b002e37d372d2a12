"""``where=`` and ``initial=`` of reductions: NumPy's values, and gradients that what is left out does not touch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from checks import bits_equal, c64, same, values

import tapegrad as tg
from tapegrad.errors import DTypeError, ShapeError
from tapegrad.testing import check_grads

AXES = [None, 0, 1, (0, 2), (), -1, (0, 1, 2)]
ADDING = {"sum": 2.5, "prod": 2.5, "max": 0.3, "min": 0.3}
AVERAGING = {"mean": {}, "var": {"ddof": 1}, "std": {}}


def mask_for(shape: tuple, rng: np.random.Generator) -> np.ndarray:
    mask = rng.random(shape) > 0.4
    mask[..., 0] = True  # something is left along each axis
    return mask


@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("axis", AXES, ids=str)
@pytest.mark.parametrize("name", ADDING)
def test_like_numpy(name: str, axis: Any, keepdims: bool, rng: np.random.Generator) -> None:
    x, start = rng.normal(size=(2, 3, 4)), ADDING[name]
    ours, theirs = getattr(tg, name), getattr(np, name)
    for mask in (mask_for(x.shape, rng), mask_for((4,), rng), mask_for((3, 1), rng), np.array(True), np.zeros(1, bool)):
        options = {"axis": axis, "keepdims": keepdims, "initial": start, "where": mask}
        same(ours(x, **options), theirs(x, **options))
        same(getattr(c64(x), name)(**{**options, "where": tg.asarray(mask)}), theirs(x, **options))
        check_grads(lambda x, options=options: ours(x, **options), [x], order=2)
    same(ours(x, axis=axis, keepdims=keepdims, initial=start), theirs(x, axis=axis, keepdims=keepdims, initial=start))
    same(theirs(c64(x), axis=axis, initial=start), theirs(x, axis=axis, initial=start))


@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("axis", [None, 2, -1, (0, 2), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("name", AVERAGING)
def test_averages_like_numpy(name: str, axis: Any, keepdims: bool, rng: np.random.Generator) -> None:
    x, mask = rng.normal(size=(2, 3, 4)), np.ones((3, 4), bool)
    mask[0, 1], mask[2, 3] = False, False
    options = {"axis": axis, "keepdims": keepdims, "where": mask, **AVERAGING[name]}
    same(getattr(tg, name)(x, **options), getattr(np, name)(x, **options), rtol=1e-10)
    check_grads(lambda x: getattr(tg, name)(x, **options), [x], order=2)


@pytest.mark.parametrize("name", ["any", "all"])
def test_truth_like_numpy(name: str, rng: np.random.Generator) -> None:
    x, mask = rng.random((3, 4)) > 0.5, rng.random((3, 4)) > 0.5
    for axis in (None, 0, 1, ()):
        for where in (mask, mask[0], False):
            wanted = getattr(np, name)(x, axis=axis, where=where)
            np.testing.assert_array_equal(getattr(tg, name)(x, axis=axis, where=where).numpy(), wanted)


def test_what_is_left_out_touches_nothing() -> None:
    x, mask = c64([1.0, np.nan, 3.0, np.inf]), [True, False, True, False]
    found = {
        "sum": [1.0, 0.0, 1.0, 0.0], "prod": [3.0, 0.0, 1.0, 0.0], "mean": [0.5, 0.0, 0.5, 0.0],
        "var": [-1.0, 0.0, 1.0, 0.0], "std": [-0.5, 0.0, 0.5, 0.0],
    }  # fmt: skip
    with np.errstate(invalid="ignore"):
        for name, wanted in found.items():
            same(tg.grad(lambda q, name=name: getattr(tg, name)(q, where=mask))(x), wanted)
    same(tg.grad(lambda q: tg.max(q, initial=-9.0, where=mask))(x), [0.0, 0.0, 1.0, 0.0])
    same(tg.grad(lambda q: tg.min(q, initial=1.0, where=mask))(x), [1.0, 0.0, 0.0, 0.0])
    same(tg.grad(lambda q: tg.max(q, initial=9.0, where=mask))(x), [0.0, 0.0, 0.0, 0.0])


@pytest.mark.filterwarnings("ignore:All-NaN slice", "ignore:Mean of empty", "ignore:Degrees of freedom")
@pytest.mark.parametrize("axis", [None, 0, -1], ids=str)
@pytest.mark.parametrize("name", [*ADDING, *AVERAGING])
def test_what_ignores_nan_takes_them_too(name: str, axis: Any, rng: np.random.Generator) -> None:
    x, mask = rng.normal(size=(3, 4)), np.ones((3, 4), bool)
    x[0, 1], x[2], mask[1, 3], mask[0, 0] = np.nan, np.nan, False, False
    options: dict[str, Any] = {"axis": axis, "where": mask}
    if name in ADDING:
        options["initial"] = ADDING[name]
    ours, theirs = getattr(tg, f"nan{name}"), getattr(np, f"nan{name}")
    for given in (x, np.arange(12).reshape(3, 4), x[:0]):
        chosen = {**options, "where": mask[: len(given)]}
        if given.dtype.kind == "i" and name in ADDING:
            chosen["initial"] = 2
        same(ours(given, **chosen), theirs(given, **chosen), rtol=1e-10)
    some = {**options, "axis": -1} if name in AVERAGING else options
    check_grads(
        lambda v: ours(tg.where(np.isnan(x), np.nan, v)[:2], **{**some, "where": mask[:2]}),
        [np.ones((3, 4)) * rng.normal(size=(3, 4))],
        order=2,
    )
    if name in ("max", "min"):
        with pytest.raises(ShapeError, match="give initial="):
            ours(x, where=mask)


def test_nothing_and_the_start() -> None:
    empty, none = np.zeros((0, 3)), np.zeros(3, bool)
    for name, start in ADDING.items():
        for options in ({"axis": 0}, {"axis": 0, "keepdims": True}, {}):
            wanted = getattr(np, name)(empty, initial=start, **options)
            same(getattr(tg, name)(empty, initial=start, **options), wanted)
        same(getattr(tg, name)(np.ones(3), initial=start, where=none), start)
    for name in AVERAGING:
        assert np.isnan(getattr(tg, name)(np.ones(3), where=none).item())
    assert np.isnan(tg.var(np.ones(3), where=[True, False, False], correction=1).item())
    same(tg.grad(lambda s: tg.sum(np.ones(3), initial=s) + tg.max(np.zeros(3), initial=s))(2.0), 2.0)


def test_dtypes(rng: np.random.Generator) -> None:
    k = np.array([1, 2, 3], np.int8)
    for name, start in (("sum", 4), ("prod", 4), ("max", 7), ("min", -3)):
        got, wanted = getattr(tg, name)(k, initial=start), getattr(np, name)(k, initial=start)
        assert got.dtype == wanted.dtype and got.item() == wanted
    assert tg.max([True, False], initial=False, where=[False, True]).item() is False
    half = tg.asarray(rng.normal(size=(3000,)), dtype="float16")
    mask = np.arange(3000) % 3 > 0
    for name in ("sum", "mean", "var", "std"):
        got = getattr(tg, name)(half, where=mask)
        assert got.dtype == np.float16
        same(got, getattr(np, name)(half.numpy().astype(np.float64), where=mask), rtol=2e-3)
    z = rng.normal(size=4) + 1j
    same([tg.sum(z, initial=1j), tg.var(z, where=mask[:4])], [np.sum(z, initial=1j), np.var(z, where=mask[:4])])


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda x: tg.max(x, where=[True, False]), ShapeError, "max: where= may select nothing; give initial="),
        (lambda x: tg.sum(x, where=[1, 0]), DTypeError, "sum: where= takes bools, got int64; use where=mask != 0"),
        (lambda x: tg.mean(x, where=np.ones(3, bool)), ShapeError, r"mean: shapes \(3,\) and \(2,\)"),
        (lambda x: tg.any(x, where=np.ones((2, 2), bool)), ShapeError, r"any: where= of shape \(2, 2\) does not bro"),
        (lambda x: tg.sum(x, initial=[1.0]), ShapeError, r"sum: initial= is one number, got shape \(1,\)"),
        (lambda x: tg.sum([1, 2], initial=0.5), DTypeError, "sum: int64 cannot hold initial=0.5"),
        (lambda x: tg.min(x, initial=1j), TypeError, "min: float64 cannot hold initial=1j"),
    ],
)
def test_misuse(call: Any, error: type, says: str) -> None:
    with pytest.raises(error, match=says):
        call(np.ones(2))


@pytest.mark.parametrize("name", [*ADDING, *AVERAGING])
def test_captured_checkpointed_and_batched(name: str, rng: np.random.Generator) -> None:
    x, mask = c64(rng.normal(size=(3, 4))), mask_for((3, 4), rng)
    start = {"initial": ADDING[name]} if name in ADDING else {}
    f = lambda q, m: getattr(tg, name)(q * q, axis=1, where=m, **start)
    captured = tg.function(lambda q, m: (f(q, m), tg.grad(lambda r: tg.sum(f(r, m)))(q)))
    wanted = values((f(x, mask), tg.grad(lambda r: tg.sum(f(r, mask)))(x)))
    assert bits_equal([captured(x, tg.asarray(mask)) for _ in range(3)], [wanted] * 3) and captured.stats.replays
    same(tg.grad(lambda r: tg.sum(tg.recompute_grad(f)(r, tg.asarray(mask))))(x), wanted[1])
    many = tg.vmap(f)(tg.stack([x, 2 * x]), np.stack([mask, mask[::-1]]))
    same(many, [wanted[0], values(f(2 * x, mask[::-1]))])
