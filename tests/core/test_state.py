"""The state of a thread: one module changes it, and an interrupt leaves it as it was."""

from __future__ import annotations

import ast
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from core.test_locks import Interrupts, in_finalizer, instruction

import tapegrad as tg
from tapegrad.core import state
from tapegrad.core.state import during, thread, unrecorded

PACKAGE = Path(tg.__file__).parent


def changed_elsewhere(folder: Path) -> list[str]:
    """Where another module than ``state`` changes what ``thread`` holds."""
    found = []
    for path in folder.rglob("*.py"):
        name = path.relative_to(folder).as_posix()
        tree = ast.parse(path.read_text("utf-8"))
        for n in ast.walk(tree):
            if isinstance(n, ast.Attribute):
                changes = not isinstance(n.ctx, ast.Load) or n.attr in ("__dict__", "__setattr__", "__delattr__")
                wrong = changes and is_thread(n.value)
            elif isinstance(n, ast.Call):
                wrong = ast.unparse(n.func) in ("setattr", "delattr", "vars") and is_thread(n.args[0])
            else:
                names = n.names if isinstance(n, ast.ImportFrom) and n.module == "tapegrad.core.state" else []
                wrong = any(name.name == "thread" and name.asname is not None for name in names)
            if wrong:
                found.append(f"{name}:{n.lineno}")  # type: ignore[attr-defined]
    return [where for where in found if not where.startswith("core/state.py:")]


def is_thread(n: ast.expr) -> bool:
    return ast.unparse(n) in ("thread", "state.thread", "_state.thread")


def test_one_module_changes_the_state_of_a_thread() -> None:
    assert changed_elsewhere(PACKAGE) == []


@pytest.mark.parametrize(
    "code",
    [
        "thread.recorders = ()",
        "thread.walks += 1",
        "a, thread.batches = 1, ()",
        "del thread.executor",
        "state.thread.hidden = ()",
        "setattr(thread, 'deferring', None)",
        "thread.__dict__.update(recorders=())",
        "vars(thread)['walks'] = 1",
        "from tapegrad.core.state import thread as mine",
    ],
)
def test_a_change_elsewhere_is_found(tmp_path: Path, code: str) -> None:
    (tmp_path / "a.py").write_text(code + "\n")
    assert changed_elsewhere(tmp_path) == ["a.py:1"]


def now() -> dict[str, Any]:
    return {name: getattr(thread, name) for name in state.Changes.__annotations__}


def test_the_state_is_changed_for_the_length_of_a_call() -> None:
    before = now()
    batch = object()
    assert during(now, walks=3, batches=(batch,)) == {**before, "walks": 3, "batches": (batch,)}
    assert now() == before
    inner = during(unrecorded, now, recorders=(1, batch), batches=(batch,))
    assert (inner["recorders"], inner["hidden"]) == ((batch,), (1, batch)) and now() == before
    with pytest.raises(ZeroDivisionError):
        during(lambda: 1 // 0, deferring=[])
    assert now() == before


def test_the_precision_of_products_is_the_chosen_one_unless_a_rerun_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(state, "chosen", ["highest"])
    for chosen in ("high", "highest"):
        tg.set_float32_matmul_precision(chosen)
        assert state.precision() == chosen
        assert [during(state.precision, precision=p) for p in state.PRECISIONS] == ["highest", "high"]


# Interrupts -------------------------------------------------------------------------------------------------------


# CPython looks for signals where a Python function begins, where a call has returned, and where it jumps back.


class Calls(Interrupts):
    """Raises KeyboardInterrupt where a function begins, and where a call has returned."""

    install, installed = staticmethod(sys.setprofile), staticmethod(sys.getprofile)

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if frame.f_code.co_filename not in self.files or frame.f_code.co_flags & inspect.CO_GENERATOR:
            return
        of_call = frame.f_back is not None and instruction(frame.f_back).startswith("CALL")
        # From Python 3.14 on `with` calls by CALL, too; no look for signals follows where the callee is Python's.
        of_call = of_call and instruction(frame.f_back, before=2) != "LOAD_SPECIAL"
        if event in ("call", "c_return") or event == "return" and of_call:
            if not self.hit and not in_finalizer(frame):
                self.pass_by(frame, (event, frame.f_lasti))


class Jumps(Interrupts):
    """Raises KeyboardInterrupt at backward jumps."""

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename not in self.files or self.hit or in_finalizer(frame):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode" and instruction(frame) == "JUMP_BACKWARD":
            self.pass_by(frame, frame.f_lasti)
        return self


MODULES = """core.state autodiff.tape engine.evaluate variable autodiff.companions autodiff.forward autodiff.batching
autodiff.vmap autodiff.functional autodiff.recording autodiff.backward autodiff.custom_gradient
autodiff.adjoint memory.checkpoint.checkpoint memory.checkpoint.rerun memory.checkpoint.saving
memory.checkpoint.recompute memory.checkpoint.loop
memory.checkpoint.loop_forward memory.checkpoint.loop_call memory.checkpoint.coupling""".split()


def files() -> list[str]:
    return [str(sys.modules[f"tapegrad.{m}"].__file__) for m in MODULES]


def f(x: Any) -> Any:
    return tg.sum(tg.tanh(x) * x)


def own(x: Any) -> Any:
    return tg.custom_gradient(lambda q: (tg.tanh(q), lambda ct: ct * (1 - tg.tanh(q) ** 2)))(x)


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "walk": lambda x: tg.grad(f)(x),
    "jvp": lambda x: tg.jvp(f, (x,), (x,)),
    "vmap": lambda x: tg.vmap(lambda row: tg.sum(row * tg.stop_gradient(row)))(x),
    "vmap of a gradient": lambda x: tg.vmap(tg.grad(f))(x),
    "jacobian": lambda x: tg.jacobian(lambda q: tg.cumulative_sum(q * q))(x[0]),
    "hvp": lambda x: tg.hvp(f, x, x),
    "recompute_grad": lambda x: tg.grad(tg.recompute_grad(f))(x),
    "recompute_grad with a policy": lambda x: tg.grad(tg.recompute_grad(f, policy=tg.policies.save_matmuls))(x),
    "checkpointed_loop": lambda x: tg.grad(lambda q: tg.sum(tg.checkpointed_loop(tg.tanh, q, 3, snapshots=1)))(x),
    "reversible": lambda x: tg.grad(lambda q: tg.sum(tg.reversible(tg.tanh, tg.tanh)(q, q)[0]))(x),
    "custom_gradient": lambda x: tg.grad(lambda q: tg.sum(own(q)))(x),
    "custom_gradient forward": lambda x: tg.jvp(own, (x,), (x,)),
    "logsumexp": lambda x: tg.grad(tg.logsumexp)(x),
    "variable": lambda x: tg.Variable(x).assign_add(x),
}


def in_thread(work: Callable[[], None]) -> None:
    """Whatever else an interrupt leaves in a thread goes with it."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as e:
            failed.append(e)

    other = threading.Thread(target=run)
    other.start(), other.join()
    if failed:
        raise failed[0]


def interrupted(work: Callable[[], Any], found: list[str]) -> int:
    """How many interrupts there were; ``found``: those that have left the state changed."""
    count = 0

    def search() -> None:
        nonlocal count
        work()
        before = now()
        for signals in (Calls, Jumps):
            for where in signals(files()).everywhere(work, turns=1):
                count += 1
                if now() != before:
                    found.append(where)
                    thread.__dict__.update(before)

    in_thread(search)
    return count


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_interrupt_anywhere_leaves_the_state_as_it_was(name: str) -> None:
    x, found = tg.asarray([[0.5, 0.25], [1.0, 2.0]]), list[str]()
    assert interrupted(lambda: PROGRAMS[name](x), found) > 30
    assert found == []


def test_a_tape_is_left_wherever_an_interrupt_comes_but_at_the_first_instruction_of_its_exit() -> None:
    x, found = tg.asarray([0.5, 2.0]), list[str]()

    def work() -> None:
        with tg.GradientTape() as tape:
            tape.watch(x)
            with tape.stop_recording():
                tg.exp(x)
            y = x * x
        tape.gradient(y, x)

    assert interrupted(work, found) > 30
    assert all(where.startswith("tape.py:GradientTape.__exit__:('call', ") for where in found), found


def test_a_context_manager_written_in_python_would_not_do() -> None:
    """The twin: the search finds a block that an interrupt leaves without putting the state back."""

    class Block:
        def __enter__(self) -> None:
            self.before, thread.walks = thread.walks, thread.walks + 1

        def __exit__(self, *exc: object) -> None:
            thread.walks = self.before

    def work() -> None:
        with Block():
            pass

    left: list[int] = []
    in_thread(lambda: left.extend(walks_after(work)))
    assert any(left)


def walks_after(work: Callable[[], None]) -> Iterator[int]:
    for _ in Calls([__file__]).everywhere(work):
        yield thread.walks
        thread.walks = 0


def test_the_precision_that_was_chosen_last_is_in_force_but_where_a_rerun_says_otherwise() -> None:
    before = state.chosen_precision()
    try:
        for precision in ("high", "highest"):
            state.choose_precision(precision)
            assert state.chosen_precision() == state.precision() == precision
            assert during(state.precision, precision="as before") == "as before"
            assert during(state.chosen_precision, precision="as before") == precision
    finally:
        state.choose_precision(before)


def test_autocasts_end_from_the_innermost_on() -> None:
    before = thread.autocasts
    for dtype in ("bfloat16", None, "float16"):
        state.cast_from_now(dtype)
    left = []
    for _ in range(3):
        left.append(thread.autocasts[len(before) :])
        state.cast_no_more()
    assert left == [("bfloat16", None, "float16"), ("bfloat16", None), ("bfloat16",)] and thread.autocasts == before
