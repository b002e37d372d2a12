"""Compare one sample of PyTorch's ``op_db`` with tapegrad: values, both gradients, forward mode."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from op_db.calls import CALLS, INVARIANT

import tapegrad as tg

RTOL, ATOL = 1e-6, 1e-7


def function_of(name: str) -> Callable[..., Any] | None:
    """Return tapegrad's function for an entry of ``op_db``; None where it has none."""
    if name in CALLS:
        return CALLS[name]
    function: Any = tg
    for part in name.split("."):
        function = getattr(function, part, None)
    return function if callable(function) else None


def is_float(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and (x.dtype.is_floating_point or x.dtype.is_complex)


def replaced(x: Any, of: Callable[[torch.Tensor], Any]) -> Any:
    """Return a structure of a sample's arguments with ``of`` its tensors, and dtypes by their names."""
    if isinstance(x, torch.Tensor):
        return of(x)
    if isinstance(x, torch.dtype):
        return str(x).removeprefix("torch.")
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return tuple(replaced(e, of) for e in x)
    if isinstance(x, torch.Size):
        return tuple(x)
    if isinstance(x, list | tuple):
        return type(x)(replaced(e, of) for e in x)
    if isinstance(x, dict):
        return {k: replaced(v, of) for k, v in x.items()}
    return x


def tensors_of(x: Any, kind: type) -> Iterator[Any]:
    """Yield the tensors of a result, in order."""
    if isinstance(x, kind):
        yield x
    elif isinstance(x, list | tuple):
        for element in x:
            yield from tensors_of(element, kind)


def numpy_of(x: torch.Tensor) -> np.ndarray:
    x = (x.detach() if not x._is_zerotensor() else torch.zeros(x.shape, dtype=x.dtype)).resolve_conj().resolve_neg()
    return x.to_dense().numpy() if x.is_sparse else x.numpy()


class Difference(Exception):
    """A sample in which the two libraries differ; the first argument is the kind."""


class NotComparable(Exception):
    """PyTorch itself raises for a sample, or has no derivative in an operand that we differentiate."""


def same(kind: str, ours: Any, theirs: Any, low: float = 0.0) -> None:
    """Raises Difference unless both are the same numbers, up to rounding; ``low``: that of other operands."""
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    if ours.shape != theirs.shape:
        raise Difference(kind, f"shape {ours.shape}, PyTorch {theirs.shape}")
    known = {np.dtype("float32"): 2e-4, np.dtype("complex64"): 2e-4, np.dtype("float16"): 1e-2}
    rtol = max(known.get(ours.dtype, 0), known.get(theirs.dtype, 0), RTOL, low)
    if not np.allclose(
        ours.astype(complex), theirs.astype(complex), rtol=rtol, atol=max(ATOL, rtol / 10), equal_nan=True
    ):
        with np.errstate(all="ignore"):
            off = ~np.isclose(ours.astype(complex), theirs.astype(complex), rtol=rtol, atol=ATOL, equal_nan=True)
        raise Difference(
            kind, f"{ours[off].ravel()[:4]}, PyTorch {theirs[off].ravel()[:4]} ({off.sum()} of {off.size})"
        )


def compare(name: str, function: Callable[..., Any], op: Any, sample: Any) -> None:
    """Compare one sample.  Raises Difference."""
    whole = (sample.input, list(sample.args), dict(sample.kwargs))
    leaves: list[torch.Tensor] = []

    def leaf(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().clone()
        if is_float(x):
            x.requires_grad_(True)
            leaves.append(x)
        return x

    theirs = replaced_torch(whole, leaf)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        try:
            expected = op(theirs[0], *theirs[1], **theirs[2])
        except Exception as error:
            raise NotComparable(str(error)) from error
    expected = list(tensors_of(expected, torch.Tensor))
    kept = INVARIANT.get(name, range(len(expected)))
    expected = [expected[i] for i in kept]
    arrays = [numpy_of(x).copy() for x in leaves]
    low = 2e-4 if any(x.dtype in (torch.float32, torch.complex64) for x in leaves) else 0.0

    def run(*values: Any) -> Any:
        waiting = iter(values)
        ours = replaced(whole, lambda x: next(waiting) if is_float(x) else numpy_of(x).copy())
        result = function(ours[0], *ours[1], **ours[2])
        results = list(tensors_of(result, tg.Tensor))
        return [results[i] for i in kept if i < len(results)]

    try:
        results = run(*map(tg.asarray, arrays))
    except Exception as error:
        raise Difference("error", f"{type(error).__name__}: {error}") from error
    if len(results) > len(expected) or (results and not expected):
        raise Difference("value", f"{len(results)} results, PyTorch {len(expected)}")
    for ours_, theirs_ in zip(results, expected, strict=False):
        same("value", ours_.numpy(), numpy_of(theirs_), low)
    rng = np.random.default_rng(0)
    live = [i for i, t in enumerate(expected[: len(results)]) if t.requires_grad]
    if not live or not op.supports_autograd:
        return
    if not all(f.dtype.kind in "fcV" for f in (results[i] for i in live)):
        raise Difference("gradient", "an integer result, PyTorch differentiates it")

    def draw(x: np.ndarray) -> np.ndarray:
        w = rng.normal(size=x.shape)
        return (w + 1j * rng.normal(size=x.shape) if x.dtype.kind == "c" else w).astype(x.dtype)

    weights = [draw(numpy_of(expected[i])) for i in live]
    directions = [draw(x) for x in arrays]
    # PyTorch's gradients.
    try:
        first = torch.autograd.grad(
            [expected[i] for i in live],
            leaves,
            [torch.as_tensor(w) for w in weights],
            create_graph=op.supports_gradgrad,
            allow_unused=True,
        )
    except Exception as error:
        raise NotComparable(str(error)) from error
    zeros = lambda results, like: [
        np.zeros_like(a) if g is None else numpy_of(g) for g, a in zip(results, like, strict=True)
    ]
    second = None
    if op.supports_gradgrad and any(g is not None and g.requires_grad for g in first):
        scored = [
            (g, torch.as_tensor(d)) for g, d in zip(first, directions, strict=True) if g is not None and g.requires_grad
        ]
        try:
            second = zeros(
                torch.autograd.grad([g for g, _ in scored], leaves, [d for _, d in scored], allow_unused=True), arrays
            )
        except Exception:
            second = None
    used = [g is not None and g.requires_grad for g in first]
    # Ours.
    try:
        xs = [tg.asarray(a) for a in arrays]
        with tg.GradientTape() as outer:
            outer.watch(xs)
            with tg.GradientTape() as inner:
                inner.watch(xs)
                out = run(*xs)
            got = inner.gradient(
                [out[i] for i in live],
                xs,
                output_gradients=[tg.asarray(w) for w in weights],
                unconnected_gradients="zero",
            )
        if second is not None:
            targets = [(g, tg.asarray(d)) for g, d, u in zip(got, directions, used, strict=True) if u]
            again = outer.gradient(
                [g for g, _ in targets], xs, output_gradients=[d for _, d in targets], unconnected_gradients="zero"
            )
    except Exception as error:
        raise Difference("gradient error", f"{type(error).__name__}: {error}") from error
    for g, h in zip(got, zeros(first, arrays), strict=True):
        same("gradient", g, h, low)
    if second is not None:
        for g, h in zip(again, second, strict=True):
            same("second gradient", g, h, low)
    try:
        _, tangents = tg.jvp(lambda *v: run(*v), tuple(map(tg.asarray, arrays)), tuple(map(tg.asarray, directions)))
    except Exception as error:
        raise Difference("forward error", f"{type(error).__name__}: {error}") from error
    # The adjoint identity: <w, J d> = <J^T w, d>, in real numbers.
    left = sum(np.vdot(w, np.asarray(tangents[i])).real for w, i in zip(weights, live, strict=True))
    right = sum(np.vdot(h, d).real for h, d in zip(zeros(first, arrays), directions, strict=True))
    same("forward mode", np.float64(left) if abs(left) < 1e100 else left, right, low)


def replaced_torch(x: Any, of: Callable[[torch.Tensor], Any]) -> Any:
    """Return the arguments with ``of`` their tensors, and all else as it is."""
    if isinstance(x, torch.Tensor):
        return of(x)
    if isinstance(x, torch.Size):
        return x
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*(replaced_torch(e, of) for e in x))
    if isinstance(x, list | tuple):
        return type(x)(replaced_torch(e, of) for e in x)
    if isinstance(x, dict):
        return {k: replaced_torch(v, of) for k, v in x.items()}
    return x
