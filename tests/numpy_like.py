"""A function of ours beside NumPy's of the same name."""

from __future__ import annotations

from typing import Any

import numpy as np

import tapegrad as tg


def leaves(found: Any) -> list[np.ndarray]:
    """The arrays of a result, which may be nested."""
    if isinstance(found, (tuple, list)):
        return [leaf for part in found for leaf in leaves(part)]
    return [found.numpy() if isinstance(found, tg.Tensor) else np.asarray(found)]


def same(name: str, *args: Any, rtol: float = 0.0, check_dtype: bool = True, **kwargs: Any) -> None:
    """Shapes, dtypes and values are NumPy's: equal, or with ``rtol`` near."""
    with np.errstate(all="ignore"):
        wanted = leaves(getattr(np, name)(*args, **kwargs))
        got = leaves(getattr(tg, name)(*args, **kwargs))
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted, strict=True):
        assert a.shape == b.shape
        assert not check_dtype or a.dtype == b.dtype
        if rtol:
            np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol)
        else:
            np.testing.assert_array_equal(a, b)


def same_in_place(name: str, x: np.ndarray, *args: Any, **kwargs: Any) -> None:
    """What NumPy makes of ``x`` in place, ours gives back."""
    wanted = x.copy()
    getattr(np, name)(wanted, *args, **kwargs)
    np.testing.assert_array_equal(getattr(tg, name)(x, *args, **kwargs).numpy(), wanted)
