"""Another batch: predicted from one run, from two, and measured."""

from __future__ import annotations

import functools
import gc

import pytest

import tapegrad as tg
from tapegrad import nn
from tapegrad.profile.plan.batch import BatchError, batch_of, of_one, of_two
from tapegrad.profile.plan.step import Step
from tapegrad.profile.recorder import Session
from tapegrad.tracing.names import CATEGORIES
from tapegrad.tracing.run import Run
from tests.profile.made_runs import MIB, empty, many
from tests.profile.plan.made import training
from tests.profile.plan.programs import META


@functools.cache
def trained(batch: int, width: int = 96) -> Run:
    tg.random.seed(0)
    model = nn.Sequential([nn.Dense(width, activation="gelu"), nn.LayerNormalization(), nn.Dense(10)])
    optimizer = tg.optim.Adam(1e-3)
    gc.collect()
    session = Session()
    session.start()
    for _ in range(3):
        x, y = tg.random.normal((batch, 20, 64)), tg.zeros((batch, 20, 10))
        with tg.GradientTape() as tape:
            loss = tg.mean((model(x) - y) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    session.stop()
    return session.run(META, source=False)


def peak_of(run: Run) -> int:
    return max(run.steps["peak_bytes"][1:])


def test_predictions_are_what_is_measured() -> None:
    one, two = of_one(trained(64), 64), of_two(trained(64), trained(80), 64)
    for batch in (64, 80, 100, 150):
        measured = peak_of(trained(batch))
        assert one.bytes_at(batch) == pytest.approx(measured, rel=0.005), batch
        assert two.bytes_at(batch) == pytest.approx(measured, rel=0.005), batch
    assert one.bytes_at(64) == peak_of(trained(64))


def test_two_runs_need_no_assumption() -> None:
    # here 96, the width, is a multiple of the batch
    two = of_two(trained(96), trained(80), 96)
    # what other tests left alive differs a little from run to run
    assert two.bytes_at(128) == pytest.approx(peak_of(trained(128)), abs=4096)
    assert "a + b * batch" in two.assumed


def test_the_largest_batch_fits_and_the_next_does_not() -> None:
    found = of_one(trained(48), 48)
    limit = 3 * peak_of(trained(48))
    largest = found.largest(limit)
    assert found.bytes_at(largest) <= limit < found.bytes_at(largest + 1)
    assert peak_of(trained(largest)) == pytest.approx(limit, rel=0.02)
    assert found.largest(1) == 0


def test_the_batch_is_found_in_the_inputs() -> None:
    run = training(steps=2, batch=16)
    assert batch_of(run, Step(run, 1)) == 16
    found = of_one(run)
    assert found.now == 16 and found.bytes_at(16) == run.peak["bytes"]
    # all but the weights and their gradients doubles
    fixed = [i for i in Step(run, 1).lives if run.text(run.allocs["shape"][i]) == "(256, 256)"]
    assert len(fixed) == 12
    assert found.bytes_at(32) == 2 * run.peak["bytes"] - 4 * MIB // 4
    assert found.ns_at(32) > found.ns_at(16)


def test_a_batch_that_is_not_clear_is_asked_for() -> None:
    run = training(steps=2)
    other = run.strings.index("(16, 8192)")
    for shape in ("()", "(8192, 8192)"):  # a grid, say
        run.strings[other] = shape
        with pytest.raises(BatchError, match="clearly the batch; say it with --batch-now"):
            batch_of(run, Step(run, 1))
    run = training(steps=2)
    second = [i for i, c in enumerate(run.allocs["category"]) if c == CATEGORIES.index("input")][1]
    run.allocs["shape"][second] = run.allocs["shape"][0]
    step = Step(run, 0)
    with pytest.raises(BatchError, match="clearly the batch; say it with --batch-now"):
        batch_of(run, step)  # of one input alone
    with pytest.raises(BatchError, match="no value of the step has a first dimension of 5"):
        of_one(training(steps=2), 5)


def test_a_width_is_no_batch() -> None:
    with pytest.raises(BatchError, match="--batch-now"):  # weights of (256, 256)
        of_one(training(steps=2, batch=256))
    with pytest.raises(BatchError, match="--batch-now"):
        run = training(steps=2)
        run.strings[run.strings.index("(16, 16384)")] = run.strings[run.strings.index("(16, 8192)")] = "(16, 16)"
        of_one(run)
    assert of_one(training(steps=2, batch=256), 256).now == 256


def test_two_dimensions_that_could_be_the_batch() -> None:
    tg.random.seed(0)
    w = tg.Variable(tg.random.normal((40, 40)))
    session = Session()
    session.start()
    for _ in range(2):
        (x, xt), (z, zt) = ([tg.asarray([[1.0] * 40] * n) for _ in range(2)] for n in (30, 32))
        with tg.GradientTape() as tape:
            loss = tg.sum(tg.tanh(x @ w) - xt) + tg.sum(tg.tanh(z @ w) - zt)
        tape.gradient(loss, w)
    session.stop()
    with pytest.raises(BatchError, match="could be 3[02] or 3[02]; say which with --batch-now"):
        of_one(session.run(META, source=False))


def test_times_from_one_run_are_bounds() -> None:
    one, two = of_one(training(steps=2)), of_two(training(steps=2), training(steps=2, batch=32))
    assert [one.bound(n) for n in (8, 16, 32)] == ["least", "", "most"]
    assert [two.bound(n) for n in (8, 16, 32)] == ["", "", ""]


def test_runs_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(BatchError, match="both runs have a batch of 16"):
        of_two(training(steps=2), training(steps=2))
    with pytest.raises(BatchError, match="did not do the same"):
        of_two(training(steps=2), training(steps=2, blocks=3, batch=32))
    for run in (empty(), many(100)):
        with pytest.raises(BatchError, match="no training step"):
            of_one(run)
