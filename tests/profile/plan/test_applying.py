"""Plans at work: which calls they meet, and that nothing else changes."""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from inside import is_lazy

import tapegrad as tg
from tapegrad import nn
from tapegrad.core import tracking
from tapegrad.memory import plan
from tapegrad.profile.recorder import Session
from tapegrad.remat.budget.budget import MANAGER
from tapegrad.remat.plan import Action, PlanError, apply_plan, use_plan
from tapegrad.remat.program_files import own_name, relative_name
from tapegrad.tracing.frames import Call
from tests.profile.plan import programs
from tests.profile.plan.programs import layer_key


def dense(*ordinals: int, do: str = "checkpoint") -> Action:
    return Action(do, *layer_key(nn.Dense), ordinals)


def second_of(f: Any) -> Action:
    code = f.__code__
    return Action("checkpoint", "function", code.co_qualname, code.co_filename, code.co_firstlineno, (1,))


def trained(model: nn.Sequential, x: tg.Tensor, steps: int = 2) -> tuple[list[int], list[bytes]]:
    """How many values each step recomputes, and the bits of all gradients."""
    again, bits, optimizer = [], [], tg.optim.SGD(0.1)
    for _ in range(steps):
        with tg.measure() as m:
            with tg.GradientTape() as tape:
                loss = tg.sum(model(x) ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        assert m.reruns == 0
        again.append(m.restored)
        bits += [g.numpy().tobytes() for g in gradients]
    return again, bits


def model() -> nn.Sequential:
    tg.random.seed(5)
    return nn.Sequential([nn.Dense(8, activation="gelu") for _ in range(4)])


X = tg.random.normal((3, 8))


DENSE = 2
"""What a call of a small ``Dense`` keeps for its gradient: before and after its bias is added."""


def test_off_nothing_is_made_again() -> None:
    assert plan.plan is None
    assert trained(model(), X)[0] == [0, 0]
    with apply_plan([]):
        assert tracking.current is tracking.NO_TRACKER


def test_values_of_chosen_calls_of_every_step_are_made_again_and_no_others() -> None:
    _, plain = trained(model(), X)
    with apply_plan([dense(1, 3)]) as applied:
        again, bits = trained(model(), X, 2)
    assert again == [2 * DENSE, 2 * DENSE] and bits == plain and applied.unmet() == []
    assert plan.plan is None and tracking.current is tracking.NO_TRACKER


def test_a_plan_meets_its_calls_while_a_profile_looks_at_the_same_frames() -> None:
    session = Session()
    session.start()
    try:
        with apply_plan([dense(1, 3)]) as applied:
            again, _ = trained(model(), X, 2)
    finally:
        session.stop()
    assert again == [2 * DENSE, 2 * DENSE] and applied.unmet() == []


def test_a_checkpointed_function_is_a_call_that_no_plan_chooses() -> None:
    net, squared = model(), tg.recompute_grad(lambda x: tg.tanh(x) * x)
    net(X)
    with apply_plan([dense(0)]) as applied, tg.measure() as m:
        with tg.GradientTape() as tape:
            loss = tg.sum(net(squared(X)))
        tape.gradient(loss, net.trainable_variables)
    assert m.restored == DENSE and applied.unmet() == []


def test_layers_built_in_a_checkpointed_call_get_the_same_weights() -> None:
    whole = Action("checkpoint", *layer_key(nn.Sequential), (0,))
    _, plain = trained(model(), X)
    with apply_plan([whole]):
        again, bits = trained(model(), X)
    assert again == [11, 11] and bits == plain  # with the results of all calls but the last


def test_calls_within_a_checkpointed_one_are_counted_but_left_alone() -> None:
    class Two(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.parts = [nn.Dense(8), nn.Dense(8)]

        def call(self, x: tg.Tensor) -> tg.Tensor:
            return self.parts[1](self.parts[0](x))

    tg.random.seed(5)
    net = nn.Sequential([Two(), Two()])
    net(X)
    # the first Two is calls 0 and 1 of Dense, what is recomputed counts nothing, the second one has 2 and 3
    with apply_plan([Action("checkpoint", *layer_key(Two), (0,)), dense(0, 3)]) as applied:
        with tg.measure() as m:
            with tg.GradientTape() as tape:
                loss = tg.sum(net(X))
            tape.gradient(loss, net.trainable_variables)
    assert m.restored == 2
    assert applied.unmet() == [(layer_key(nn.Dense), 0)]


def test_only_calls_under_a_tape_count() -> None:
    net = model()
    net(X)
    with apply_plan([dense(0)]) as applied:
        net(X)
        assert applied.unmet() != []
        assert trained(net, X, 1)[0] == [DENSE]
    assert applied.unmet() == []


def test_a_call_that_is_hidden_from_the_tape_is_not_met() -> None:
    def first() -> tg.Tensor:
        return tg.exp(X)

    code = first.__code__
    action = Action("checkpoint", "function", code.co_qualname, code.co_filename, code.co_firstlineno, (0,))
    with apply_plan([action]) as applied, tg.GradientTape():
        tg.Variable(first)
        assert applied.unmet() == [(action.key, 0)]


def test_every_tape_and_every_step_count_anew() -> None:
    net = model()
    net(X)
    with apply_plan([dense(0)]):
        for _ in range(2):
            with tg.measure() as m, tg.GradientTape(persistent=True) as tape:
                loss = tg.sum(net(X))
                tg.memory.step()
                loss = loss + tg.sum(net(X))
            assert m.restored == 0
            for again in (2 * DENSE, 0):  # what has been recomputed stays
                with tg.measure() as m:
                    tape.gradient(loss, net.trainable_variables)
                assert m.restored == again


def test_reruns_count_nothing() -> None:
    net = model()
    net(X)
    whole = Action("checkpoint", *layer_key(nn.Sequential), (0,))
    with apply_plan([whole, dense(4)]) as applied, tg.GradientTape() as outer:
        with tg.GradientTape() as inner:
            loss = tg.sum(net(X))
        first = tg.sum(inner.gradient(loss, net.trainable_variables)[0])  # reruns, under the outer tape
        loss = first + tg.sum(net(X))
        assert applied.unmet() == []
    assert outer.gradient(loss, net.trainable_variables)[0] is not None


def test_layers_built_in_an_offloaded_call() -> None:
    whole = Action("offload", *layer_key(nn.Sequential), (0,))
    _, plain = trained(model(), X, 3)
    with apply_plan([whole]), tg.measure() as m:
        again, bits = trained(model(), X, 3)
    assert again == [0, 0, 0] and bits == plain and m.offloads > 0


def test_threads_count_for_themselves() -> None:
    net, found = model(), []
    net(X)

    def work() -> None:
        for _ in range(3):
            with tg.GradientTape() as tape:
                loss = tg.sum(net(X))
            found.append([g.numpy().tobytes() for g in tape.gradient(loss, net.trainable_variables)])

    with apply_plan([dense(0, 2)]) as applied:
        threads = [threading.Thread(target=work) for _ in range(2)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(30)
    assert applied.unmet() == [] and len(found) == 6 and all(f == found[0] for f in found)


def test_a_wrapped_call_method_is_known_by_the_code_behind_it() -> None:
    class Doubled(nn.Layer):
        @tg.recompute_grad
        def call(self, x: tg.Tensor) -> tg.Tensor:
            return x * 2

    key = layer_key(Doubled)
    assert key[0] == "layer" and key[1].endswith("Doubled") and key[2] == __file__
    with apply_plan([Action("checkpoint", *key, (0,))]) as applied:
        with tg.GradientTape():
            Doubled()(X)
        assert applied.unmet() == []
        Doubled.call = len  # type: ignore[assignment, method-assign]
        with tg.GradientTape():
            assert Doubled()(X) == 3


def test_functions_are_known_by_their_frames_and_run_once() -> None:
    calls: list[float] = []

    def f(x: tg.Tensor, *, by: float = 1.0) -> tg.Tensor:
        calls.append(by)
        return tg.exp(x) * by

    x = tg.Variable([1.0, 2.0])
    with apply_plan([second_of(f)]) as applied, tg.measure() as m:
        with tg.GradientTape() as tape:
            loss = tg.sum(f(x, by=2.0)) + tg.sum(f(x, by=3.0))
        (g,) = tape.gradient(loss, [x])
    assert calls == [2.0, 3.0] and m.restored == 1 and applied.unmet() == []
    assert g.tolist() == pytest.approx([5 * 2.718281828, 5 * 7.389056099], rel=1e-6)


def test_two_plans_at_once_are_refused() -> None:
    with apply_plan([]):
        with pytest.raises(PlanError, match="in force already"):
            with apply_plan([]):
                pass
        assert plan.plan is not None
    assert plan.plan is None


def test_a_budget_for_the_whole_program() -> None:
    with tg.measure() as m, apply_plan([], budget_bytes=1 << 30):
        with pytest.raises(tg.errors.BudgetError):
            tg.zeros((1 << 29,)) + 1.0  # 2 GiB
    assert m.peak_bytes < 1 << 30


def plan_file(path: Path, actions: list[Action], **more: Any) -> Path:
    rows = [vars(a) | {"ordinals": list(a.ordinals)} for a in actions]
    path.write_text(json.dumps({"format": "tapegrad.plan", "version": 1, "actions": rows} | more))
    return path


def test_use_plan_reads_a_file(tmp_path: Path) -> None:
    _, plain = trained(model(), X)
    with use_plan(plan_file(tmp_path / "plan.json", [dense(0)])) as applied:
        again, bits = trained(model(), X)
    assert again == [DENSE, DENSE] and bits == plain and applied.unmet() == []


def test_use_plan_takes_functions_too(tmp_path: Path) -> None:
    f = lambda x: tg.exp(x) * 2.0
    code = f.__code__
    action = Action("checkpoint", "function", code.co_qualname, code.co_filename, code.co_firstlineno, (0,))
    x = tg.Variable([1.0, 2.0])
    with use_plan(plan_file(tmp_path / "plan.json", [action])), tg.measure() as m:
        with tg.GradientTape() as tape:
            loss = tg.sum(f(x))
        tape.gradient(loss, x)
    assert m.restored == 1
    with pytest.raises(PlanError, match="No such file"):
        with use_plan(tmp_path / "none.json"):
            pass


def test_use_plan_says_which_calls_were_not_met(tmp_path: Path) -> None:
    path = plan_file(tmp_path / "plan.json", [dense(0, 2, 7, 9)])
    with pytest.warns(UserWarning, match="2 of the plan's calls were not met, such as call 7 of layer Dense") as caught:
        with use_plan(path):
            trained(model(), X)
    assert caught[0].filename == __file__
    with pytest.raises(ValueError, match="mine"):  # without a warning, which would be an error here
        with use_plan(path):
            raise ValueError("mine")


def test_a_copy_of_tapegrad_is_met() -> None:
    action = Action(
        "checkpoint", "layer", "Dense", "/elsewhere/tapegrad/nn/layers/core.py", layer_key(nn.Dense)[3], (0,)
    )
    assert own_name(action.file) == "tapegrad/nn/layers/core.py" == relative_name(layer_key(nn.Dense)[2])
    for other in ("nn/layers/core.py", "/here/tapegrad/nn/none.py", "/here/nn/layers/core.py", ""):
        assert own_name(other) == "", other
    assert own_name("C:\\here\\tapegrad\\nn\\layers\\core.py") == "tapegrad/nn/layers/core.py"
    for relative, again in ((own_name(action.file), [DENSE, DENSE]), ("", [0, 0]), ("nn/layers/core.py", [0, 0])):
        with apply_plan([dataclasses.replace(action, relative=relative)]) as applied:
            assert trained(model(), X)[0] == again
        assert (applied.unmet() == []) == (again != [0, 0])


def test_a_program_in_a_linked_folder_names_its_files_by_either_path(tmp_path: Path, monkeypatch: Any) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.symlink_to(real)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(link / "main.py"), raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None, raising=False)
    assert [relative_name(str(folder / "model.py")) for folder in (real, link, tmp_path)] == [
        "model.py",
        "model.py",
        "",
    ]


def test_state_and_random_numbers_are_those_of_one_run() -> None:
    keys = [layer_key(programs.Convolved), layer_key(nn.Dropout), layer_key(nn.BatchNormalization)]
    plain = programs.convolutions(3)
    for key in keys:
        with apply_plan([Action("checkpoint", *key, (0, 1, 2))]):
            assert programs.convolutions(3) == plain


def after(x: tg.Tensor, count: int) -> tg.Tensor:
    """A value that is made from ``count`` others, which its gradient reads."""
    for _ in range(count):
        x = tg.tanh(x)
    return tg.exp(x)


def test_calls_that_compute_nothing_have_no_number_as_in_profiles() -> None:
    def f(x: tg.Tensor, number: int) -> tg.Tensor:
        return x if number % 2 == 0 else after(x, number)

    x = tg.Variable([1.0, 2.0])
    with apply_plan([second_of(f)]) as applied, tg.GradientTape() as tape:
        y = x * 1.0
        for number in range(7):
            y = f(y, number)
        loss = tg.sum(y)
    with tg.measure() as m:
        tape.gradient(loss, [x])
    assert m.restored == 3 and applied.unmet() == []  # of the second call with an operation


def test_calls_in_a_walk_back_are_not_counted() -> None:
    def f(x: tg.Tensor, count: int) -> tg.Tensor:
        return after(x, count)

    @tg.custom_gradient
    def g(x: tg.Tensor) -> Any:
        return x * 2.0, lambda ct: f(ct, 5)

    x = tg.Variable([1.0, 2.0])
    with apply_plan([second_of(f)]), tg.GradientTape() as outer:
        with tg.GradientTape() as inner:
            y = tg.sum(f(g(x), 1))
        inner.gradient(y, [x])
        loss = tg.sum(f(x * 1.0, 2))
    with tg.measure() as m:
        outer.gradient(loss, [x])
    assert m.restored == 2


def test_a_call_that_first_asks_for_a_gradient_is_one_of_the_forward_pass() -> None:
    def f(tape: tg.GradientTape, loss: tg.Tensor, x: tg.Variable) -> tg.Tensor:
        return tape.gradient(loss, x) * tg.exp(x)

    x = tg.Variable([1.0, 2.0])
    code = f.__code__
    action = Action("checkpoint", "function", code.co_qualname, code.co_filename, code.co_firstlineno, (0,))
    with apply_plan([action]) as applied, tg.GradientTape():
        with tg.GradientTape() as inner:
            loss = tg.sum(tg.tanh(x))
        f(inner, loss, x)
        assert applied.unmet() == []


def test_predict_peak_and_captured_functions_know_the_plan_in_force() -> None:
    tg.random.seed(3)
    blocks = [programs.Attending(64) for _ in range(3)]
    x = tg.random.normal((16, 40, 64))

    def loss() -> tg.Tensor:
        h = x
        for block in blocks:
            h = block(h)
        return tg.mean(h * h)

    loss()
    variables = [v for block in blocks for v in block.trainable_variables]
    optimizer = tg.optim.SGD(1e-2)

    def step() -> None:
        with tg.GradientTape() as tape:
            value = loss()
        optimizer.apply(tape.gradient(value, variables), variables)

    def measured() -> int:
        gc.collect()
        with tg.measure() as m:
            step()
        return m.peak_bytes

    step()
    plain = measured()
    action = Action("checkpoint", *layer_key(programs.Attending), (0, 1, 2))
    with apply_plan([action]) as applied:
        predicted = tg.memory.predict_peak(step, budgets=[], least=False).peak_bytes
        assert predicted == measured() < 0.7 * plain and applied.unmet() == []
        captured = tg.function(step)
        captured()
        assert captured.plan().peak_bytes < 0.7 * plain
    captured()
    captured()
    assert captured.verify() is None


def test_what_a_call_reads_stays_until_its_values_are_made_again() -> None:
    w, x = tg.Variable(tg.ones((64, 64)) * 0.1), tg.random.normal((64, 64))

    def f(u: tg.Tensor) -> tg.Tensor:
        return u + w * (tg.roll(u, 1, 0) + tg.roll(u, -1, 0) - 2.0 * u)  # no gradient reads u

    def trained(*ordinals: int) -> tuple[int, int, bytes]:
        code = f.__code__
        key = "function", code.co_qualname, code.co_filename, code.co_firstlineno
        with apply_plan([Action("checkpoint", *key, ordinals)] if ordinals else []), tg.measure() as m:
            with tg.GradientTape() as tape:
                u = x
                for _ in range(20):
                    u = f(u)
                loss = tg.sum(u * u)
            bits = tape.gradient(loss, w).numpy().tobytes()
        return m.peak_bytes, m.restored, bits

    peak, none, bits = trained()
    _, one, same = trained(3)
    most, every, also = trained(*range(20))
    assert none == 0 < one and every == 20 * one  # each call's own works, and none before it
    assert most <= peak and bits == same == also


def test_a_result_that_waits_is_computed_so_that_what_it_is_made_from_can_go() -> None:
    """The program holds it, and it would hold the rest of the call."""
    x = tg.asarray(tg.random.normal((200, 200)).numpy())

    def f(u: tg.Tensor) -> tg.Tensor:
        return tg.softmax(u) * 2.0 + 1.0

    def kept(*actions: Action) -> tuple[int, int, bytes]:
        """Values that are alive when the result has been read, values recomputed, and the bits of the gradient."""
        gc.collect()
        with apply_plan(actions), tg.measure() as m:
            with tg.GradientTape() as tape:
                tape.watch(x)
                before = m.live_bytes
                y = f(x)
                assert is_lazy(y)
                tg.softmax(tg.ones(3))  # the program has left the call
                y.numpy()
                there = (m.live_bytes - before) // x.nbytes
                loss = tg.sum(y * y)
            return there, m.restored, tape.gradient(loss, x).numpy().tobytes()

    *plain, wanted = kept()
    *planned, found = kept(dataclasses.replace(second_of(f), ordinals=(0,)))
    assert plain == [2, 0] and planned[0] == 1 and found == wanted


def test_calls_that_are_over_are_forgotten_now_and_then_and_all_are_met_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan, "MOST_CALLS", 20)
    steps, (_, plain) = 60, trained(model(), X, 60)
    known = lambda: sum(type(thing) is Call for thing in gc.get_objects())
    before = known()
    with apply_plan([dense(1, 3)]):
        again, bits = trained(model(), X, steps)
        assert known() - before < 2 * steps  # each step makes 5 of layers alone
    assert again == [2 * DENSE] * steps and bits == plain


def test_a_call_that_makes_many_is_one_though_those_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """What only tapes want of it goes when it is over, and not before."""
    monkeypatch.setattr(plan, "MOST_CALLS", 20)
    released: list[int] = []
    monkeypatch.setattr(type(MANAGER), "release", lambda manager, nodes, read, answer: released.append(len(nodes)))

    def g(u: tg.Tensor) -> tg.Tensor:
        return tg.softmax(u)

    def f(u: tg.Tensor) -> tg.Tensor:
        for _ in range(50):
            u = g(u)
        return u

    with apply_plan([dataclasses.replace(second_of(f), ordinals=(0, 1))]), tg.GradientTape() as tape:
        tape.watch(X)
        for _ in range(2):
            y = f(X)
            tg.softmax(X)  # the program has left the call
    assert released == [50, 50] and y is not None
