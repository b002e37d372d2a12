"""Moving averages against their formula, eagerly and in captured steps."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad import optim
from tapegrad.errors import DTypeError, NotATensorError, TapegradError


def values(dtype: Any = np.float32) -> list[Any]:
    return [np.random.default_rng(i).normal(size=(3, 4)).astype(dtype) for i in range(6)]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("debias", [False, True])
def test_the_formula(debias: bool, dtype: str) -> None:
    first, *others = values(dtype)
    v = tg.Variable(first)
    ema = optim.EMA([v], 0.9, debias=debias)
    assert ema.average(v).numpy().tolist() == first.tolist()  # no update so far
    wanted = np.zeros((3, 4)) if debias else first.astype(np.float64)
    for n, x in enumerate(others, 1):
        v.assign(x)
        ema.update()
        wanted = 0.9 * wanted + 0.1 * x
        mean = wanted / (1 - 0.9**n) if debias else wanted
        tolerance = {"float16": 3e-2, "float32": 1e-5, "float64": 1e-12}[dtype]
        np.testing.assert_allclose(ema.average(v).numpy(), mean, rtol=tolerance, atol=tolerance / 10)
        assert ema.average(v).dtype == dtype
    assert int(ema.updates) == 5
    np.testing.assert_array_equal(v.numpy(), others[-1])


def test_a_model_and_a_block_with_its_averages() -> None:
    model = tg.nn.Dense(2)
    with pytest.raises(TapegradError, match="there are no variables; call a model once"):
        optim.EMA(model)
    model(np.ones((1, 3), np.float32))
    ema = optim.EMA(model, 0.5)
    assert [v.name for v in ema.variables] == ["ema/updates", *(f"ema/{v.name}" for v in model.trainable_variables)]
    assert all(v.category == "optimizer" and not v.trainable for v in ema.variables)
    before = model.kernel.numpy(copy=True)
    model.kernel.assign(before + 2)
    ema.update()
    for ends_well in (True, False):
        try:
            with ema.applied():
                np.testing.assert_allclose(model.kernel.numpy(), before + 1, rtol=1e-6, atol=1e-6)
                assert ends_well or 1 / 0
        except ZeroDivisionError:
            pass
        np.testing.assert_array_equal(model.kernel.numpy(), before + 2)
    ema.assign()
    np.testing.assert_allclose(model.kernel.numpy(), before + 1, rtol=1e-6, atol=1e-6)
    model.kernel.assign(before)  # an average is a value of its own
    np.testing.assert_allclose(ema.average(model.kernel).numpy(), before + 1, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("debias", [False, True])
def test_a_captured_step_averages_too(debias: bool) -> None:
    def run(captured: bool) -> list[bytes]:
        vs = [tg.Variable(np.ones(5)), tg.Variable(np.ones((300, 300), np.float32))]
        optimizer, ema = optim.Adam(0.1), optim.EMA(vs, 0.9, debias=debias)

        def step(x: Any) -> Any:
            optimizer.apply([v * tg.astype(x, v.dtype) for v in vs], vs)
            ema.update()
            return ema.average(vs[0])

        f = tg.function(step) if captured else step
        found = []
        for i in range(8):
            found.append(f(tg.asarray(0.1 * i)).numpy().tobytes())
            if i == 5:  # between calls the variables hold the averages' own values
                with ema.applied():
                    found.append(vs[1].numpy().tobytes())
            found += [v.numpy().tobytes() for v in (*vs, *ema.variables)]
        if captured:
            assert f.stats.traces == 1 and f.stats.replays == 6 and not f.stats.fallbacks
        return found

    assert run(False) == run(True)


def test_a_tape_does_not_record_an_update() -> None:
    v = tg.Variable([1.0])
    ema = optim.EMA([v], 0.5)
    with tg.GradientTape() as tape:
        y = v * v
        ema.update()
        z = y * ema.average(v)
    assert tape.gradient(z, v).tolist() == [2.0]


def test_copies_and_pickles_keep_a_model_and_its_averages_together() -> None:
    v = tg.Variable([1.0, 2.0])
    ema = optim.EMA([v], 0.5)
    for way in (copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))):
        w, other = way((v, ema))
        w.assign([3.0, 4.0])
        other.update()
        assert other.average(w).tolist() == [2.0, 3.0] and ema.average(v).tolist() == [1.0, 2.0]


def test_wrong_use() -> None:
    v = tg.Variable([1.0])
    with pytest.raises(TapegradError, match=r"wanted decay in \[0, 1\), got 1.0"):
        optim.EMA([v], 1.0)
    with pytest.raises(NotATensorError, match="wanted Variables, got float"):
        optim.EMA([1.0])
    with pytest.raises(DTypeError, match="variable 'n' is int64; wanted a real float"):
        optim.EMA([tg.Variable(1, name="n")])
    with pytest.raises(TapegradError, match="variable 'w' is not averaged"):
        optim.EMA(v).average(tg.Variable([1.0], name="w"))
