"""Steps of a loop: what they may use of earlier ones, and how a captured one that is replayed is told of its state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from checks import bits_equal, c64, values, var64

import tapegrad as tg
from tapegrad.errors import RecomputeError, StructureError
from tapegrad.remat.checkpoint.loop import checkpointed_loop

LATE = 3
"""The step that uses what step 1 was given, which has not been the state since."""
USES: dict[str, Callable[[Any, Any, Any], tuple[Any, Any]]] = {
    "an operand": lambda new, old, i: (new * old if i == LATE else new, new),
    "the state": lambda new, old, i: (old if i == LATE else new, new),
    "the output": lambda new, old, i: (new, old if i == LATE else new),
}


def gradients(uses: Callable[[Any, Any, Any], tuple[Any, Any]], loop: Callable[..., Any], sliced: bool) -> Any:
    """Of a loop whose steps have each state of before at hand, in what it begins with and in a variable."""
    x, w, states = c64([1.0, 2.0]), var64([0.5, 0.75]), dict[int, Any]()

    def step(s: Any, i: int) -> tuple[Any, Any]:
        states[i] = s
        new = s * w * 2.0
        return uses(tg.concat([new, s])[:2] if sliced else new, states[min(i, 1)], i)

    with tg.GradientTape() as tape:
        tape.watch(x)
        y, ys = loop(step, x)
        loss = tg.sum(y) + tg.sum(ys * ys)
    return values(tape.gradient(loss, [x, w]))


def plain(step: Callable[..., Any], s: Any) -> tuple[Any, Any]:
    outputs = []
    for i in range(5):
        s, y = step(s, i)
        outputs.append(y)
    return s, tg.stack(outputs)


def checkpointed(step: Callable[..., Any], s: Any) -> tuple[Any, Any]:
    return checkpointed_loop(step, s, 5, snapshots=2, outputs=True)


@pytest.mark.parametrize("sliced", [False, True])
@pytest.mark.parametrize("use", USES)
def test_a_state_that_a_later_step_uses_unseen_is_an_error(use: str, sliced: bool) -> None:
    """It would lose its part of the gradient.  A slice that is the state is copied: then the copy is meant."""
    with pytest.raises(RecomputeError, match="which an earlier step made, but which is not part of the state"):
        gradients(USES[use], checkpointed, sliced)


@pytest.mark.parametrize("sliced", [False, True])
def test_the_last_state_is_no_later_one(sliced: bool) -> None:
    """What the step was given may be returned, as the state and as an output; what the loop began with always."""
    kept = lambda new, old, i: (new, new * old if i < 2 else new)
    assert bits_equal(gradients(kept, checkpointed, sliced), gradients(kept, plain, sliced))
    first: list[Any] = []

    def begun(new: Any, old: Any, i: int) -> tuple[Any, Any]:
        if i == 0:
            first[:] = [old]
        return new * first[0], first[0]

    assert bits_equal(gradients(begun, checkpointed, sliced), gradients(begun, plain, sliced))


def test_the_state_that_a_step_is_given_keeps_none_before_it_alive() -> None:
    x, taken = c64(np.linspace(0.0, 1.0, 20_000)), list[int]()

    def step(s: Any) -> Any:
        taken.append(m.live_bytes)
        return tg.sin(s) * 2.0

    with tg.measure() as m, tg.GradientTape() as tape:
        tape.watch(x)
        y = checkpointed_loop(step, x, 12, snapshots=2)
        assert max(taken) - taken[0] <= 4 * 160_256
        taken.clear()
        assert tape.gradient(y, x) is not None and max(taken) - min(taken) <= 4 * 160_256


def test_a_replayed_step_that_changes_the_form_of_the_state_is_named() -> None:
    """By its number; the program of each step is another one, for a number in the state is."""
    step, x = tg.function(lambda s: (s[0][:2] if s[1] == 3 else s[0] * 2.0, s[1] + 1)), c64([1.0, 2.0, 3.0, 4.0])
    for i in (0, 1, 2, 3) * 2:
        with tg.GradientTape() as tape:
            tape.watch(x)
            step((x, i))
    replays = step.stats.replays
    with tg.GradientTape() as tape:
        tape.watch(x)
        with pytest.raises(StructureError, match=r"step 3 returned the state \(float64\[2\], int\), but was given"):
            checkpointed_loop(step, (x, 0), 8, snapshots=2)
    assert step.stats.replays == replays + 4


@pytest.mark.parametrize("kind", ["plain", "changes a variable", "a Jacobian"])
def test_a_captured_step_is_reversed_without_a_record_but_for_the_first_and_the_last(kind: str) -> None:
    """None is where there are rows of cotangents, or where steps read what others have written."""
    x, v, pulled = c64([0.5, 1.0]), var64([0.25, 0.5]), list[bool]()

    def f(s: Any) -> Any:
        if kind == "changes a variable":
            v.assign(v * 1.5)
            return tg.sin(s * v)
        return tg.sin(s) * 0.5

    step = tg.function(f)
    gradients = step.gradients

    def noted(*args: Any) -> Any:
        found = gradients(*args)
        pulled.append(found is not None)
        return found

    def run(how: Any) -> Any:
        step.gradients = how  # type: ignore[method-assign]
        v.assign(np.array([0.25, 0.5]))
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = checkpointed_loop(step, x, 6, snapshots=2)
        return values([tape.jacobian(y, x) if kind == "a Jacobian" else tape.gradient(y, x)])

    wanted = run(lambda *args: None)
    run(noted)  # its program is known then
    pulled.clear()
    assert bits_equal(run(noted), wanted)
    assert pulled == [True] * 4 if kind == "plain" else not any(pulled)


def test_steps_that_are_replayed_in_a_row_have_their_numbers() -> None:
    """Twice: the second gradient begins with the first step, and comes up to the last one in a row."""
    x, f = c64([0.5, 1.0]), lambda s, i: tg.sin(s) * (i + 1.0)
    step = tg.function(f)
    found = []
    for each in (f, step, step, step):
        with tg.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = checkpointed_loop(each, x, 9, snapshots=2)
        found.append([values(y), *(values(tape.gradient(y, x)) for _ in range(2))])
    assert step.stats.replays > 40 and all(bits_equal(one, found[0]) for one in found)


@pytest.mark.parametrize("options", [{}, {"schedule": "sqrt"}, {"schedule": "mixed"}, {"outputs": True}], ids=str)
@pytest.mark.parametrize("at", [0, 2, 4])
def test_a_step_may_return_a_value_from_outside_that_nothing_reads(at: int, options: Any) -> None:
    """As the state, or as an output; a variable's value, or a tensor's."""
    x, c, v = c64([1.0, 2.0]), c64([0.5, 0.25]), var64([0.75, 0.125])
    outputs = options.get("outputs")

    def step(s: Any, i: int) -> Any:
        new = c if i == at and not outputs else tg.sin(s)
        beside = c if i == at else v.value() if i == at - 1 else s
        return (new, beside) if outputs else new

    def plainly(state: Any) -> Any:
        beside = []
        for i in range(5):
            state = step(state, i)
            if outputs:
                beside.append(state[1])
                state = state[0]
        return (state, tg.stack(beside)) if outputs else state

    def run(loop: Callable[[Any], Any]) -> Any:
        with tg.GradientTape() as tape:
            tape.watch([x, c])
            y = loop(x)
            loss = sum(tg.sum(leaf * leaf) for leaf in tg.nest.flatten(y))
        return values(tape.gradient(loss, [x, c, v], unconnected_gradients="zero"))

    assert bits_equal(run(lambda s: checkpointed_loop(step, s, 5, snapshots=2, **options)), run(plainly))
