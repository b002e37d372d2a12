"""Loops under JAX's names: results and derivatives are those of the loop written out."""

from __future__ import annotations

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.errors import ShapeError, StructureError
from tapegrad.testing import check_grads

X = np.linspace(0.1, 1.2, 12).reshape(4, 3)


def cell(state, x):
    h = tg.tanh(state["h"] + x)
    return {"h": h, "n": state["n"] + 1}, (h * 2, tg.sum(h))


def test_scan_is_the_loop():
    last, (hs, sums) = tg.scan(cell, {"h": np.zeros(3), "n": 0}, X)
    h, rows = np.zeros(3), []
    for x in X:
        h = np.tanh(h + x)
        rows.append(2 * h)
    np.testing.assert_allclose(hs.numpy(), np.stack(rows))
    np.testing.assert_allclose(last["h"].numpy(), h)
    assert last["n"] == 4 and sums.shape == (4,)


def test_scan_backwards_keeps_the_order():
    step = lambda s, x: (s + x, s)
    last, before = tg.scan(step, np.zeros(3), X, reverse=True)
    np.testing.assert_allclose(before.numpy(), np.cumsum(X[::-1], axis=0)[::-1] - X, atol=1e-15)
    np.testing.assert_allclose(last.numpy(), X.sum(axis=0))


def test_derivatives():
    check_grads(lambda x, h: tg.scan(cell, {"h": h, "n": 0}, x)[1], (X, np.ones(3)), order=2)
    check_grads(lambda x: tg.fori_loop(1, 4, lambda i, s: tg.sin(s) * i, x), (X,), order=2)
    check_grads(lambda x: tg.while_loop(lambda s: tg.max(s) < 20, lambda s: s * s + 1, x), (X,), order=2)


def test_a_step_gets_its_number_and_a_captured_one_a_tensor():
    """A number would be part of what is captured: each step would have a program of its own."""
    for wrap, kinds in ((lambda f: f, {(int, None)}), (tg.function, {(tg.Tensor, tg.int64)})):
        seen = []

        @wrap
        def body(i, s, seen=seen):
            seen.append((type(i), getattr(i, "dtype", None)))
            return s + i

        assert float(tg.fori_loop(2, 6, body, tg.asarray(np.ones(())))) == 15.0
        assert set(seen) == kinds
    assert body.stats.traces == 1 and body.stats.replays > 0


def test_without_rows():
    last, ys = tg.scan(lambda s, x: (s * 2, None), tg.asarray(1.0), length=5)
    assert float(last) == 32.0 and ys is None
    last, ys = tg.scan(cell, {"h": np.ones(3), "n": 0}, X[:0])
    assert ys is None and last["n"] == 0


def test_lengths_that_differ_are_refused():
    with pytest.raises(ShapeError, match="scan: lengths"):
        tg.scan(lambda s, x: (s, None), 0.0, (X, X[:2]))
    with pytest.raises(ShapeError, match="scan"):
        tg.scan(lambda s, x: (s, None), 0.0)


def test_a_state_keeps_its_structure():
    step = lambda s, x: ((s, s), None)
    with pytest.raises(StructureError, match=r"scan: step 0 changed the structure of the state from \* to \(\*, \*\)"):
        tg.scan(step, 0.0, X)
    with pytest.raises(
        StructureError, match=r"scan: step 2 changed the structure of y from \(\*, \*\) to \{'a': \*, 'b': \*\}"
    ):
        tg.scan(lambda s, x: (s + 1, (s, s) if s < 2 else {"a": s, "b": s}), 0, X)
    with pytest.raises(StructureError, match=r"scan: f must return \(state, y\), step 0 returned \*"):
        tg.scan(lambda s, x: s, 0.0, X)
    with pytest.raises(StructureError, match=r"fori_loop: step 4 .* from \{'a': \*\} to \{'b': \*\}"):
        tg.fori_loop(4, 9, lambda i, s: {"b": s["a"]}, {"a": 1.0})
    with pytest.raises(StructureError, match=r"while_loop: step 0 .* from \(\*, \*\) to \(\*,\)"):
        tg.while_loop(lambda s: True, lambda s: s[:1], (1.0, 2.0))
    assert tg.fori_loop(0, 2, lambda i, s: [s[1], s[0]], (1, 2)) == [1, 2]  # plain lists pass for tuples


def test_an_output_keeps_its_structure():
    step = lambda s, i: (s, (s, s) if i < 2 else {"a": s, "b": s})
    with pytest.raises(StructureError, match=r"step 2 changed the structure of the output from \(\*, \*\) to \{'a'"):
        tg.checkpointed_loop(step, tg.asarray(0.0), 3, outputs=True)


def test_rows_are_views_of_one_copy():
    xs = np.ones((100, 2000))
    with tg.measure() as m:
        tg.grad(lambda w: tg.scan(lambda s, x: (s + tg.sum(x * w), None), np.zeros(()), xs)[0])(np.ones(2000))
    assert m.peak_bytes < 3 * xs.nbytes


LOOPS = {
    "scan": lambda f, s: tg.scan(lambda s, x: (f(s), None), s, length=3),
    "fori_loop": lambda f, s: tg.fori_loop(0, 3, lambda i, s: f(s), s),
    "while_loop": lambda f, s: tg.while_loop(lambda s: True, f, s),
}


@pytest.mark.parametrize("loop", LOOPS)
def test_a_state_that_changes_its_form_is_refused(loop):
    run, x = LOOPS[loop], tg.asarray(np.ones(3))
    with pytest.raises(StructureError, match=rf"{loop}: step 0 changed the structure of the state from"):
        run(lambda s: (s,), x)
    with pytest.raises(StructureError, match=rf"{loop}: step 0 returned the state float64\[2\], but was given"):
        run(lambda s: s[:2], x)
    with pytest.raises(StructureError, match=rf"{loop}: step 1 returned the state \{{'a': float32\[\]\}}, but was"):
        run(lambda s: {"a": tg.sum(x)} if type(s["a"]) is int else {"a": tg.asarray(1.0)}, {"a": 0})
    with pytest.raises(TypeError, match="return the same structure"):
        run(lambda s: {"b": s["a"]}, {"a": x})


class Sized:
    """It has a shape, but no dtype."""

    shape = (2,)


@pytest.mark.parametrize("loop", LOOPS)
def test_an_object_with_a_shape_only_is_no_array(loop):
    run, x = LOOPS[loop], tg.asarray(np.ones(3))
    with pytest.raises(StructureError, match=rf"{loop}: step 0 returned the state Sized, but was given float64\[3\]"):
        run(lambda s: Sized(), x)


def test_one_step_gives_one_row():
    for loop in (
        tg.checkpointed_loop(lambda s: (s + 1.0, {"y": s * 2.0, "none": None}), tg.asarray(1.0), 1, outputs=True),
        tg.scan(lambda s, x: (s + x, {"y": s * 2.0, "none": None}), tg.asarray(1.0), tg.asarray([1.0])),
    ):
        state, rows = loop
        assert float(state) == 2.0 and rows["y"].numpy().tolist() == [2.0] and rows["none"] is None


class Shaped:
    """Something of the program's that has a shape and no dtype."""

    shape = (2,)


class Typed:
    """The same the other way round."""

    dtype = np.dtype("float32")


@pytest.mark.parametrize("kind", [Shaped, Typed])
def test_a_state_may_hold_what_looks_like_an_array_in_part(kind):
    """It is passed on as it is."""
    thing = kind()
    x, held = tg.fori_loop(0, 3, lambda i, s: (s[0] * 2.0, s[1]), (tg.asarray(np.ones(2)), thing))
    assert x.tolist() == [8.0, 8.0] and held is thing


@pytest.mark.parametrize(("new", "fits"), [("text", True), (None, True), (3.0, False), (np.ones(2), False)])
def test_what_is_no_array_stays_none_of_one_kind_or_another(new, fits):
    start = (tg.asarray(np.ones(2)), Shaped())
    body = lambda i, s: (s[0], new)
    if fits:
        assert tg.fori_loop(0, 2, body, start)[1] == new
    else:
        with pytest.raises(StructureError, match="Shaped"):
            tg.fori_loop(0, 2, body, start)
