"""Wrapped functions: they are pickled by their names, and told from others of the same name."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from checks import c64, same

import tapegrad as tg


@tg.custom_gradient
def doubled(x: Any) -> Any:
    return x * 2.0, lambda ct: ct * 2.0


class Holder:
    """A place with a dotted name."""

    again = tg.recompute_grad(tg.sin)


def plain(x: Any) -> Any:
    return x * 3.0


hidden = tg.recompute_grad(plain)


def test_what_stands_under_its_name_is_pickled_by_it() -> None:
    assert pickle.loads(pickle.dumps(doubled)) is doubled
    assert b"doubled" in pickle.dumps(doubled) and len(pickle.dumps(doubled)) < 100


@pytest.mark.parametrize("wrapped", [hidden, tg.recompute_grad(plain)])
def test_what_stands_under_another_name_is_pickled_by_its_parts(wrapped: Any) -> None:
    """The name that it has from the function is the function's."""
    found = pickle.loads(pickle.dumps(wrapped))
    assert found is not wrapped and found is not plain and found.__wrapped__ is plain
    same(found(c64([1.0, 2.0])), [3.0, 6.0])
    assert repr(found) == f"Recompute({plain!r})" and found.__name__ == "plain"


def test_what_has_no_name_in_its_module_is_not_found_by_it() -> None:
    inner = tg.recompute_grad(plain)
    for name in ("nowhere", "Holder.nowhere", "", 3):
        inner.__qualname__ = name  # type: ignore[attr-defined]
        assert pickle.loads(pickle.dumps(inner)).__wrapped__ is plain
    with pytest.raises(AttributeError, match="nowhere"):
        inner.nowhere  # noqa: B018
