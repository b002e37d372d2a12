"""Plans at work: which calls they meet, and that nothing else changes."""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import tapegrad as tg
from tapegrad import nn
from tapegrad.memory import plan
from tapegrad.memory.plan import Action, PlanError, apply_plan, layer_key, planned, use_plan
from tapegrad.memory.program_files import own_name, relative_name
from tests.profile.plan import programs


def dense(*ordinals: int, do: str = "checkpoint") -> Action:
    return Action(do, *layer_key(nn.Dense), ordinals)  # type: ignore[misc]


def second_of(f: Any) -> Action:
    code = f.__wrapped__.__code__
    return Action("checkpoint", "function", code.co_qualname, code.co_filename, code.co_firstlineno, (1,))


def trained(model: nn.Sequential, x: tg.Tensor, steps: int = 2) -> tuple[list[int], list[bytes]]:
    """Reruns of each step, and the bits of all gradients."""
    reruns, bits, optimizer = [], [], tg.optim.SGD(0.1)
    for _ in range(steps):
        with tg.measure() as m:
            with tg.GradientTape() as tape:
                loss = tg.sum(model(x) ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        reruns.append(m.reruns)
        bits += [g.numpy().tobytes() for g in gradients]
    return reruns, bits


def model() -> nn.Sequential:
    tg.random.seed(5)
    return nn.Sequential([nn.Dense(8, activation="gelu") for _ in range(4)])


X = tg.random.normal((3, 8))


def test_off_it_costs_one_test() -> None:
    assert plan.plan is None
    assert trained(model(), X)[0] == [0, 0]


def test_chosen_calls_of_every_step_run_again_and_no_others() -> None:
    _, plain = trained(model(), X)
    with apply_plan([dense(1, 3)]) as applied:
        reruns, bits = trained(model(), X, 2)
    assert reruns == [2, 2] and bits == plain and applied.unmet() == []
    assert plan.plan is None


def test_layers_built_in_a_checkpointed_call_get_the_same_weights() -> None:
    whole = Action("checkpoint", *layer_key(nn.Sequential), (0,))  # type: ignore[misc]
    _, plain = trained(model(), X)
    with apply_plan([whole]):
        reruns, bits = trained(model(), X)
    assert reruns == [1, 1] and bits == plain


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
    # the first Two is calls 0 and 1 of Dense, its own rerun counts nothing, the second one has 2 and 3
    with apply_plan([Action("checkpoint", *layer_key(Two), (0,)), dense(0, 3)]) as applied:  # type: ignore[misc]
        with tg.measure() as m:
            with tg.GradientTape() as tape:
                loss = tg.sum(net(X))
            tape.gradient(loss, net.trainable_variables)
    assert m.reruns == 2
    assert applied.unmet() == [(layer_key(nn.Dense), 0)]


def test_only_calls_under_a_tape_count() -> None:
    net = model()
    net(X)
    with apply_plan([dense(0)]) as applied:
        net(X)
        assert applied.unmet() != []
        assert trained(net, X, 1)[0] == [1]
    assert applied.unmet() == []


def test_every_tape_and_every_step_count_anew() -> None:
    net = model()
    net(X)
    with apply_plan([dense(0)]):
        for _ in range(2):
            with tg.measure() as m, tg.GradientTape(persistent=True) as tape:
                loss = tg.sum(net(X))
                tg.memory.step()
                loss = loss + tg.sum(net(X))
            tape.gradient(loss, net.trainable_variables)
            assert m.reruns == 0
            with tg.measure() as m:
                tape.gradient(loss, net.trainable_variables)
            assert m.reruns == 2


def test_reruns_count_nothing() -> None:
    net = model()
    net(X)
    whole = Action("checkpoint", *layer_key(nn.Sequential), (0,))  # type: ignore[misc]
    with apply_plan([whole, dense(4)]) as applied, tg.GradientTape() as outer:
        with tg.GradientTape() as inner:
            loss = tg.sum(net(X))
        first = tg.sum(inner.gradient(loss, net.trainable_variables)[0])  # reruns, under the outer tape
        loss = first + tg.sum(net(X))
        assert applied.unmet() == []
    assert outer.gradient(loss, net.trainable_variables)[0] is not None


def test_layers_built_in_an_offloaded_call() -> None:
    whole = Action("offload", *layer_key(nn.Sequential), (0,))  # type: ignore[misc]
    _, plain = trained(model(), X, 3)
    with apply_plan([whole]), tg.measure() as m:
        reruns, bits = trained(model(), X, 3)
    assert reruns == [1, 1, 1] and bits == plain and m.offloads > 0


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
    assert key is not None and key[0] == "layer" and key[1].endswith("Doubled") and key[2] == __file__
    Doubled.call = len  # type: ignore[assignment, method-assign]
    assert layer_key(Doubled) is None
    with apply_plan([dense(0)]), tg.GradientTape():
        assert Doubled()(X) == 3


def test_planned_functions_ask_the_plan() -> None:
    calls: list[float] = []

    @planned
    def f(x: tg.Tensor, *, by: float = 1.0) -> tg.Tensor:
        """Doc."""
        calls.append(by)
        return tg.exp(x) * by

    assert f.__name__ == "f" and f.__doc__ == "Doc."
    x = tg.Variable([1.0, 2.0])
    with apply_plan([second_of(f)]), tg.GradientTape() as tape:
        loss = tg.sum(f(x, by=2.0)) + tg.sum(f(x, by=3.0))
    (g,) = tape.gradient(loss, [x])
    assert calls == [2.0, 3.0, 3.0]
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
        reruns, bits = trained(model(), X)
    assert reruns == [1, 1] and bits == plain and applied.unmet() == []


def test_use_plan_says_what_it_leaves_alone(tmp_path: Path) -> None:
    path = plan_file(tmp_path / "plan.json", [Action("checkpoint", "function", "f", "a.py", 3, (0, 1))])
    with pytest.warns(UserWarning, match="2 calls of plain functions") as caught:
        with use_plan(path):
            pass
    assert caught[0].filename == __file__
    with pytest.raises(PlanError, match="No such file"):
        with use_plan(tmp_path / "none.json"):
            pass


def test_use_plan_says_which_calls_were_not_met(tmp_path: Path) -> None:
    path = plan_file(tmp_path / "plan.json", [dense(0, 2, 7, 9)])
    with pytest.warns(
        UserWarning, match="2 of the plan's calls of layers were not met, such as call 7 of Dense"
    ) as caught:
        with use_plan(path):
            trained(model(), X)
    assert caught[0].filename == __file__
    with pytest.raises(ValueError, match="mine"):  # without a warning, which would be an error here
        with use_plan(path):
            raise ValueError("mine")


def test_a_copy_of_tapegrad_is_met() -> None:
    action = Action(
        "checkpoint", "layer", "Dense", "/elsewhere/tapegrad/nn/layers/core.py", layer_key(nn.Dense)[3], (0,)
    )  # type: ignore[index]
    assert own_name(action.file) == "tapegrad/nn/layers/core.py" == relative_name(layer_key(nn.Dense)[2])  # type: ignore[index]
    for relative, reruns in ((own_name(action.file), [1, 1]), ("", [0, 0]), ("nn/layers/core.py", [0, 0])):
        with apply_plan([dataclasses.replace(action, relative=relative)]) as applied:
            assert trained(model(), X)[0] == reruns
        assert (applied.unmet() == []) == (reruns == [1, 1])


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
        with apply_plan([Action("checkpoint", *key, (0, 1, 2))]):  # type: ignore[misc]
            assert programs.convolutions(3) == plain


def test_calls_that_compute_nothing_have_no_number_as_in_profiles() -> None:
    ran: list[int] = []

    @planned
    def f(x: tg.Tensor, number: int) -> tg.Tensor:
        ran.append(number)
        return x if number % 2 == 0 else tg.exp(x)

    x = tg.Variable([1.0, 2.0])
    with apply_plan([second_of(f)]) as applied, tg.GradientTape() as tape:
        y = x * 1.0
        for number in range(5):
            y = f(y, number)
        loss = tg.sum(y)
    tape.gradient(loss, [x])
    assert ran[:5] == [0, 1, 2, 3, 4] and applied.unmet() == []
    assert 3 in ran[5:] and 1 not in ran[5:]  # the second call with an operation


def test_calls_in_a_walk_back_are_not_counted() -> None:
    ran: list[str] = []

    @planned
    def f(x: tg.Tensor, where: str) -> tg.Tensor:
        ran.append(where)
        return tg.exp(x)

    @tg.custom_gradient
    def g(x: tg.Tensor) -> Any:
        return x * 2.0, lambda ct: f(ct, "walk")

    x = tg.Variable([1.0, 2.0])
    with apply_plan([second_of(f)]), tg.GradientTape() as outer:
        with tg.GradientTape() as inner:
            y = tg.sum(f(g(x), "first"))
        inner.gradient(y, [x])
        loss = tg.sum(f(x * 1.0, "second"))
    outer.gradient(loss, [x])
    assert ran == ["first", "walk", "second", "second"]
