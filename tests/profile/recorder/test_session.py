"""Recording: the run against other books (the ledger's, tracemalloc's), steps, calls, lineage, and what it costs."""

from __future__ import annotations

import threading
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.core import tracking
from tapegrad.profile.recorder import Session
from tapegrad.tracing.ledger import LEDGER
from tapegrad.tracing.names import CATEGORIES, KINDS, PHASES
from tapegrad.tracing.phase import HERE
from tapegrad.tracing.run import Run
from tapegrad.tracing.timeline import alive, at, totals
from tests.tracing.reading import reread


def f32(value: Any) -> tg.Tensor:
    return tg.asarray(np.asarray(value, "f4"))


META: dict[str, Any] = {
    "tapegrad": "0", "program": "test", "argv": [], "device": {"name": "cpu"},
    "outcome": {"kind": "finished", "code": 0},
}  # fmt: skip


@pytest.fixture(autouse=True)
def sound(no_collection: None) -> Iterator[None]:
    yield
    assert tracking.current is tracking.NO_TRACKER
    assert LEDGER.journal is None
    assert HERE.reruns == HERE.restoring == HERE.walking == HERE.shift == 0 and not HERE.optimizing


def weights(n: int = 4, size: int = 64) -> list[tg.Variable]:
    chance = np.random.default_rng(0)
    return [tg.Variable(chance.normal(size=(size, size)).astype("f4") / 8, name=f"w{i}") for i in range(n)]


def block(x: tg.Tensor, w: tg.Variable) -> tg.Tensor:
    h = tg.tanh(x @ w)
    return x + h * tg.sigmoid(h)


def step(ws: list[tg.Variable], x: tg.Tensor, wrap: Any = lambda f: f) -> list[tg.Tensor]:
    with tg.GradientTape() as tape:
        y = x
        for w in ws:
            y = wrap(block)(y, w)
        loss = tg.mean(y * y)
    return tape.gradient(loss, ws)


def recorded(program: Any, **options: Any) -> tuple[Run, Session]:
    session = Session(**options)
    session.start()
    try:
        program()
    finally:
        session.stop()
    run = session.run(META)
    assert reread(run) == run
    return run, session


def short(run: Run, call: int) -> str:
    return run.text(run.calls["name"][call]).rpartition(".")[2]


def recomputed(run: Run) -> int:
    """How many values were recomputed; each must name one of the forward pass of its step that is like it."""
    a = run.allocs
    again = [i for i, p in enumerate(a["phase"]) if PHASES[p] == "recompute"]
    for i in again:
        old = a["remat_of"][i]
        assert old >= 0
        assert all(a[column][old] == a[column][i] for column in ("op", "shape", "stack", "step"))
        assert PHASES[a["phase"][old]] == "forward"
    return len(again)


def at_peak(run: Run) -> Counter[str]:
    found: Counter[str] = Counter()
    for i, category in alive(run, run.peak["seq"]).items():
        found[CATEGORIES[category]] += run.allocs["bytes"][i]
    return found


# Against other books


@pytest.mark.parametrize("wrap", [lambda f: f, tg.recompute_grad], ids=["plain", "checkpointed"])
def test_the_peak_is_that_of_measure_in_bytes_and_parts(wrap: Any) -> None:
    ws, x = weights(), f32(np.ones((32, 64)))
    with tg.measure() as m:
        run, session = recorded(lambda: [step(ws, x, wrap) for _ in range(3)])
    assert run.peak["bytes"] == session.measure.peak_bytes == m.peak_bytes
    assert +at_peak(run) == +Counter(m.peak_by_category)
    assert run.peak["bytes"] == max(total for _, _, total, _ in totals(run))


def test_after_every_event_the_run_holds_what_the_ledger_held() -> None:
    ws, x, seen = weights(), f32(np.ones((32, 64))), {}
    session = Session()
    session.start()
    session.journal.before_op = lambda: seen.update({session.journal.now(): (LEDGER.live_bytes, LEDGER.by("category"))})
    step(ws, x, tg.recompute_grad)
    session.stop()
    run = session.run(META)
    told = list(totals(run))
    assert len(seen) > 50
    for seq, (live, by) in seen.items():
        _, _, total, parts = max((t for t in told if t[0] < seq), default=(0, 0, 0, (0,) * 9))
        assert total == live == sum(parts)
        assert {name: n for name, n in zip(CATEGORIES, parts) if n} == {name: n for name, n in by.items() if n}


def test_the_ledger_is_tracemallocs_numpy_domain_before_every_operation() -> None:
    """To the byte: of small arrays, which do not come from the pool, whose blocks are larger than what is asked for."""
    domain = tracemalloc.DomainFilter(inclusive=True, domain=np.lib.tracemalloc_domain)
    no_tensors = tracemalloc.Filter(inclusive=False, filename_pattern="*bits.py")  # the state of NumPy's own generator

    def traced() -> int:
        snapshot = tracemalloc.take_snapshot().filter_traces([domain, no_tensors])
        return sum(trace.size for trace in snapshot.traces)

    ws, x = weights(3, 16), f32(np.ones((8, 16)))
    step(ws, x, tg.recompute_grad)  # makes constants
    session, differences = Session(), []
    session.start()
    with LEDGER.held() as entries:
        before = list(entries)  # held, so that no other entry gets its address
    known = {id(e) for e in before}
    tracemalloc.start()

    def compare() -> None:
        with LEDGER.held() as entries:
            mine = sum(max(1, e().node.aval.nbytes) for e in entries if id(e) not in known)
        differences.append(traced() - mine)

    session.journal.before_op = compare
    try:
        for _ in range(2):
            step(ws, x, tg.recompute_grad)
        compare()
    finally:
        tracemalloc.stop()
        session.stop()
    # A reduction's result of one element is a scalar to NumPy until it is an array: 4 bytes, for the moment of a check.
    assert len(differences) > 60 and max(map(abs, differences)) <= 8, differences


def test_recording_takes_no_tensor_memory_and_changes_no_gradient() -> None:
    ws, x = weights(4, 300), f32(np.ones((64, 300)))
    step(ws, x)  # makes constants
    with tg.measure() as plain:
        bare = [g.numpy(copy=True) for g in step(ws, x)]
    with tg.measure() as watched:
        session = Session(stacks="full", check=False)
        session.start()
        found = [g.numpy(copy=True) for g in step(ws, x)]
        session.stop()
    assert watched.peak_bytes == plain.peak_bytes and watched.allocated_bytes == plain.allocated_bytes
    assert watched.kernel_runs == plain.kernel_runs
    for a, b in zip(bare, found):
        assert a.tobytes() == b.tobytes()


def test_check_compares_and_finds_a_planted_difference() -> None:
    ws, x, own = weights(4, 300), f32(np.ones((64, 300))), []

    def program(lost: int = 0) -> None:
        for _ in range(3):
            step(ws, x)
            own.append(np.ones(1 << 17))  # the program's own array
            own.append(tg.asarray(np.frombuffer(bytearray(lost), "f4"), copy=False))  # NumPy has allocated none of it

    run, _ = recorded(program, check=True)
    assert run.checks["checked"] >= 3 and run.checks["drift_bytes"] == 0
    session = Session(check=True)
    session.start()
    program(1 << 22)
    session.stop()
    assert 0 < 3 * (1 << 22) - session.run(META).checks["drift_bytes"] < 1 << 22


# What a run tells


def test_categories_holders_and_names() -> None:
    ws, x = weights(), f32(np.ones((32, 64)))
    optimizer = tg.optim.Adam(1e-3)
    optimizer.apply(step(ws, x), ws)

    def program() -> None:
        for _ in range(2):
            optimizer.apply(step(ws, x), ws)

    run, _ = recorded(program)
    a = run.allocs
    held = {(CATEGORIES[c], run.text(a["holder"][i])) for i, c in alive(run, run.peak["seq"]).items()}
    assert {("parameter", "w0"), ("optimizer", "Adam/m/w0"), ("gradient", "gradient of w0")} <= held | {
        (CATEGORIES[category], run.text(a["holder"][i]))
        for i, category in zip(run.changes["alloc"], run.changes["category"])
    }
    assert any(c == "activation" and h.startswith("vjp of ") for c, h in held)
    phases = {PHASES[p] for p in a["phase"]}
    assert {"forward", "backward", "optimizer"} <= phases
    in_forward = [i for i, p in enumerate(a["phase"]) if PHASES[p] == "forward"]
    assert all(run.frame_of(a["stack"][i])[0] == __file__ for i in in_forward)


def test_backward_work_carries_the_line_and_call_of_what_it_differentiates() -> None:
    ws, x = weights(), f32(np.ones((32, 64)))
    run, _ = recorded(lambda: step(ws, x))
    lines = {run.frame_of(s)[2] for s, p in zip(run.ops["stack"], run.ops["phase"]) if PHASES[p] == "backward"}
    assert "block" in lines
    calls = {run.text(run.calls["name"][c]) for c, p in zip(run.ops["call"], run.ops["phase"])
             if PHASES[p] == "backward" and c >= 0}  # fmt: skip
    assert "block" in calls


def test_readings_tell_when_a_value_is_idle() -> None:
    ws, x = weights(), f32(np.ones((32, 64)))
    run, _ = recorded(lambda: step(ws, x))
    a = run.allocs
    kept = [i for i, c in alive(run, run.peak["seq"]).items() if CATEGORIES[c] == "activation" and a["op"][i] >= 0]
    idle = [(a["last_forward_seq"][i], a["next_backward_seq"][i]) for i in kept if a["begin_seq"][i] > 20]
    assert idle and all(0 <= last < then for last, then in idle if then >= 0) and any(then >= 0 for _, then in idle)
    assert min(a["last_forward_seq"]) == min(a["next_backward_seq"]) == -1, "never read"


def test_a_value_that_waits_belongs_to_the_phase_in_which_it_was_asked_for() -> None:
    x = f32(np.ones((200, 200)))

    def program() -> None:
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = tg.exp(x)
        y.numpy()

    run, _ = recorded(program)
    phases = [PHASES[p] for p, op in zip(run.allocs["phase"], run.allocs["op"]) if op >= 0 and run.text(op) == "exp"]
    assert phases == ["forward"]


def test_calls_are_numbered_and_nested() -> None:
    ws, x = weights(), f32(np.ones((32, 64)))
    run, _ = recorded(lambda: [step(ws, x) for _ in range(2)])
    c = run.calls
    blocks = [i for i in range(run.count("calls")) if run.text(c["name"][i]) == "block"]
    assert [c["ordinal"][i] for i in blocks] == [0, 1, 2, 3] * 2
    assert [c["step"][i] for i in blocks] == [0] * 4 + [1] * 4
    assert {run.text(c["name"][c["parent"][i]]) for i in blocks} == {"step"}
    assert all(KINDS[c["kind"][i]] == "function" and PHASES[c["phase"][i]] == "forward" for i in blocks)
    assert all(c["begin_seq"][i] < c["end_seq"][i] < c["begin_seq"][j] for i, j in zip(blocks, blocks[1:]))
    assert all(c["line"][i] == block.__code__.co_firstlineno for i in blocks)


def test_layers_are_calls_also_where_no_operation_is_recorded() -> None:
    class Twice(tg.nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.inner = tg.nn.Dense(8)

        def call(self, x: tg.Tensor) -> tg.Tensor:
            return self.inner(x) + self.inner(x)

    model = tg.nn.Sequential([tg.nn.Embedding(5, 8), Twice(), tg.nn.LayerNormalization()])
    tokens = tg.asarray(np.arange(4))

    def program() -> None:
        with tg.GradientTape() as tape:
            y = tg.mean(model(tokens) ** 2)
        tape.gradient(y, model.trainable_variables)

    program()
    run, _ = recorded(program)
    c = run.calls
    found = [
        (
            run.text(c["name"][i]).rpartition(".")[2],
            run.text(c["name"][c["parent"][i]]).rpartition(".")[2],
            c["ordinal"][i],
        )
        for i in range(run.count("calls"))
        if KINDS[c["kind"][i]] == "layer"
    ]
    # The embedding's first operations check its indices, hidden from tapes; it is of the forward pass all the same.
    assert found == [
        ("Sequential", "program", 0), ("Embedding", "Sequential", 0), ("Twice", "Sequential", 0),
        ("Dense", "Twice", 0), ("Dense", "Twice", 1), ("LayerNormalization", "Sequential", 0),
    ]  # fmt: skip
    assert {PHASES[p] for p, k in zip(c["phase"], c["kind"]) if KINDS[k] == "layer"} == {"forward"}


def test_reruns_name_what_they_repeat_value_by_value_and_call_by_call() -> None:
    ws, x = weights(), f32(np.ones((32, 64)))
    run, _ = recorded(lambda: [step(ws, x, tg.recompute_grad) for _ in range(2)])
    c = run.calls
    assert recomputed(run) > 10
    reruns = [i for i, p in enumerate(c["phase"]) if PHASES[p] == "recompute"]
    names = Counter(run.text(c["name"][i]) for i in reruns)
    assert names == {"recompute_grad(block)": 8, "block": 8}
    for i in reruns:
        first = c["first"][i]
        assert c["name"][first] == c["name"][i] and c["step"][first] == c["step"][i]
    mine = [i for i in reruns if run.text(c["name"][i]) == "block" and c["step"][i] == 0]
    assert [c["ordinal"][c["first"][i]] for i in mine] == [3, 2, 1, 0]
    assert run.steps["reruns"] == [4, 4]


@pytest.mark.parametrize("more", [False, True])
def test_a_rerun_after_the_end_of_a_step_names_what_it_repeats_though_it_makes_other_nodes(more: bool) -> None:
    x, functions, runs = f32(np.ones(1000)), (tg.sin, tg.tanh, tg.exp, tg.cos, tg.sigmoid, tg.sinh, tg.arctan), [0]

    def f(y: tg.Tensor) -> tg.Tensor:
        runs[0] += 1
        if more is (runs[0] == 2):
            tg.ones(3) + tg.ones(3)
        for function in functions:
            y = function(y)
        return y

    def program() -> None:
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = tg.sum(tg.recompute_grad(f)(x))
        tg.memory.step()
        tape.gradient(y, x)

    run, _ = recorded(program)
    a = run.allocs
    old = [o for o, p, size in zip(a["remat_of"], a["phase"], a["bytes"]) if PHASES[p] == "recompute" and size == 4096]
    assert min(old) >= 0 and [PHASES[a["phase"][o]] for o in old] == ["forward"] * len(functions)
    assert [run.text(a["op"][o]) for o in old] == ["sin", "tanh", "exp", "cos", "sigmoid", "sinh", "atan"]


def test_steps_of_a_loop_that_go_in_a_row_are_calls_like_those_made_one_by_one() -> None:
    x = f32(np.ones((32, 64)))

    def looped(step: Any) -> None:
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = tg.sum(tg.checkpointed_loop(step, x, 9, snapshots=2))
        tape.gradient(y, x)

    found = []
    for one_by_one in (False, True):
        step = tg.function(lambda h: tg.sin(h) * 1.5)
        if one_by_one:
            step.in_a_row = lambda state, *_: (0, state)  # type: ignore[method-assign]
            step.gradients = lambda *_: None  # type: ignore[method-assign]
        looped(step)
        run, _ = recorded(lambda step=step: looped(step))
        c, ops = run.calls, run.ops
        names = [run.text(name) for name in c["name"]]
        calls = Counter((names[i], PHASES[c["phase"][i]], c["step"][i]) for i in range(len(names)))
        worked = Counter((names[call] if call >= 0 else "", PHASES[p]) for call, p in zip(ops["call"], ops["phase"]))
        found.append((calls, worked, run.steps["reruns"]))
    assert found[0] == found[1]
    assert sum(found[0][0].values()) > 20


def test_values_restored_under_a_budget_name_what_was_dropped() -> None:
    ws, x = weights(6, 128), f32(np.ones((512, 128)))
    with tg.measure() as m:
        step(ws, x)
    room = m.peak_bytes - (m.peak_bytes - sum(w.nbytes for w in ws)) // 4

    def program() -> None:
        with tg.memory_budget(room):
            step(ws, x)

    run, _ = recorded(program)
    a = run.allocs
    again = [i for i, p in enumerate(a["phase"]) if PHASES[p] == "recompute" and a["remat_of"][i] >= 0]
    assert again and sum(run.steps["evictions"]) > 0
    assert len(again) == sum(PHASES[p] == "recompute" for p in a["phase"])
    assert all(a["shape"][a["remat_of"][i]] == a["shape"][i] for i in again)
    assert all(a["end_seq"][a["remat_of"][i]] < a["begin_seq"][i] for i in again)


# Steps


def test_steps_end_with_gradients_optimizers_or_the_programs_own_marks() -> None:
    ws, x = weights(), f32(np.ones((32, 64)))
    optimizer = tg.optim.SGD(0.1)

    def with_optimizer() -> None:
        for _ in range(3):
            parts = [step(ws, x) for _ in range(2)]  # two gradients for one step
            optimizer.apply([a + b for a, b in zip(*parts)], ws)

    def with_marks() -> None:
        for _ in range(2):
            for _ in range(2):
                optimizer.apply(step(ws, x), ws)
            tg.memory.step()

    by_gradients, _ = recorded(lambda: [step(ws, x) and None for _ in range(3)])
    assert by_gradients.count("steps") == 3
    run, session = recorded(with_optimizer)
    assert run.count("steps") == 3 and run.count("boundaries") > 3
    assert run.marks["kind"].count(0) == 3
    assert recorded(with_marks)[0].count("steps") == 2
    s = by_gradients.steps
    assert all(b < e for b, e in zip(s["begin_seq"], s["end_seq"]))
    assert s["begin_seq"][1:] == [e + 1 for e in s["end_seq"][:-1]]
    assert s["peak_bytes"][2] == s["peak_bytes"][1] == by_gradients.peak["bytes"]


def test_warmup_and_steps_bound_what_is_recorded() -> None:
    ws, x = weights(), f32(np.ones((32, 64)))
    optimizer = tg.optim.SGD(0.1)

    def program() -> None:
        for _ in range(6):
            optimizer.apply(step(ws, x), ws)

    whole, _ = recorded(program)
    part, session = recorded(program, warmup=2, steps=3)
    tg.memory.step()  # the session has ended
    assert (whole.count("steps"), part.count("steps"), session.step) == (6, 3, 6)
    assert part.peak["bytes"] == whole.peak["bytes"]
    assert {CATEGORIES[c] for c in alive(part, 0).values()} <= set(CATEGORIES)


def test_long_programs_keep_the_steps_that_matter_and_everything_that_lives() -> None:
    ws, x, kept = weights(), f32(np.ones((32, 64))), []
    optimizer = tg.optim.SGD(0.1)

    def program() -> None:
        for i in range(30):
            grads = step(ws, x if i != 17 else tg.concat([x, x]))
            if i == 9:
                kept.append(x + 1.0)  # outlives its step
            optimizer.apply(grads, ws)

    whole, _ = recorded(program)
    tables = [whole.count(name) for name in ("allocs", "changes", "ops")]
    assert whole.checks["events"] == sum(tables) + sum(seq >= 0 for seq in whole.allocs["end_seq"]) and all(tables)
    kept.clear()
    part, session = recorded(program, keep=2000)
    assert part.checks["dropped"] > 0 and part.checks["events"] >= whole.checks["events"] * 0.9
    assert part.count("allocs") < whole.count("allocs") / 2
    assert part.peak["bytes"] == whole.peak["bytes"] == session.measure.peak_bytes and part.peak["step"] == 17
    # at the last allocation of each: what other tests have left is numbered, too, and may have gone in between
    left = [sum(r.allocs["bytes"][i] for i in alive(r, max(r.allocs["begin_seq"]))) for r in (part, whole)]
    assert left[0] == left[1]
    assert part.count("calls") < whole.count("calls")


def test_a_value_is_read_last_by_the_kernel_that_was_left_to_wait() -> None:
    x, small = f32(np.ones(40_000)), f32(np.ones(2))

    def program() -> None:
        with tg.GradientTape():
            y = x * 2.0  # waits
            tg.tanh(small)
            y.numpy()

    run, _ = recorded(program)
    names = [run.text(n) for n in run.ops["name"]]
    read = run.allocs["last_forward_seq"][run.allocs["bytes"].index(160_256)]
    assert names == ["multiply", "tanh"] and read > run.ops["seq"][1]


# The rest


def test_scopes_name_parts_of_a_program() -> None:
    ws, x = weights(), f32(np.ones((32, 64)))

    def program() -> None:
        with tg.GradientTape() as tape:
            with tg.memory.scope("encoder"):
                y = block(x, ws[0])
            z = tg.mean(block(y, ws[1]))
        tape.gradient(z, ws[:2])

    program()  # without a profile it does nothing
    run, _ = recorded(program)
    c = run.calls
    paths = []
    for i in range(run.count("calls")):
        n, path = i, []
        while n >= 0:
            path.append(run.text(c["name"][n]).rpartition(".")[2])
            n = c["parent"][n]
        if path[0] == "block":
            paths.append(path[:3])
    assert paths[0][:2] == ["block", "encoder"] and "encoder" not in paths[1]


def test_full_stacks_and_none() -> None:
    ws, x = weights(1), f32(np.ones((32, 64)))
    full, _ = recorded(lambda: step(ws, x), stacks="full")
    depth = 0
    for i in range(full.count("stacks")):
        j, n = i, 0
        while j >= 0:
            j, n = full.stacks["parent"][j], n + 1
        depth = max(depth, n)
    assert depth >= 4  # block, step, the lambda, recorded, this test
    none, _ = recorded(lambda: step(ws, x), stacks="none")
    assert none.count("stacks") == 0 and set(none.allocs["stack"]) == {-1} and none.count("calls")


@pytest.mark.parametrize("stacks", ["line", "full"])
def test_stacks_begin_with_the_module_that_runs_and_all_their_calls_are_known(stacks: str) -> None:
    """Those of the second operation of a function, too, whose call is known by then."""
    scope = {"tg": tg, "x": f32(np.ones(100))}
    text = "def inner(x):\n    y = tg.exp(x)\n    return tg.exp(y)\ndef outer(x):\n    return inner(x)\nouter(x)\n"
    run, _ = recorded(lambda: exec(compile(text, "<a script>", "exec"), scope), stacks=stacks)
    paths = []
    for stack in run.allocs["stack"]:
        names = []
        while stack >= 0:
            _, line, function = run.frame_of(stack)
            names.append((line, function.rpartition(".")[2]))
            stack = run.stacks["parent"][stack]
        paths.append(tuple(names))
    outside = ((5, "outer"), (6, "<module>")) if stacks == "full" else ()
    assert set(paths) - {()} == {((2, "inner"), *outside), ((3, "inner"), *outside)}
    assert [short(run, i) for i in range(run.count("calls"))] == ["outer", "inner"]


def test_the_first_call_of_a_script_may_be_a_layer() -> None:
    """What its ``call`` does is what the layer does."""
    scope = {"tg": tg, "x": f32(np.ones(100))}
    text = "class Block(tg.nn.Layer):\n    def call(self, x):\n        return tg.exp(x)\nBlock()(x)\n"
    run, _ = recorded(lambda: exec(compile(text, "<a script>", "exec"), scope))
    assert [short(run, i) or run.text(run.calls["name"][i]) for i in range(run.count("calls"))] == ["Block"]


def test_the_first_call_of_a_script_may_be_one_that_runs_again() -> None:
    scope = {"tg": tg, "x": f32(np.ones(100))}
    text = """def f(x):
    return tg.exp(tg.exp(x))
with tg.GradientTape() as tape:
    tape.watch(x)
    y = tg.recompute_grad(f)(x)
tape.gradient(y, x)
"""
    run, _ = recorded(lambda: exec(compile(text, "<a script>", "exec"), scope))
    c = run.calls
    told = [(PHASES[c["phase"][i]], short(run, i), c["parent"][i], c["first"][i]) for i in range(run.count("calls"))]
    assert told == [
        ("forward", "recompute_grad(f)", -1, -1), ("forward", "f", 0, -1),
        ("recompute", "recompute_grad(f)", -1, 0), ("recompute", "f", 2, 1),
    ]  # fmt: skip
    assert recomputed(run) == 2


def test_gradients_are_digested_if_asked() -> None:
    ws, x = weights(2), f32(np.ones((32, 64)))
    first, _ = recorded(lambda: [step(ws, x) for _ in range(2)], gradients=True)
    again, _ = recorded(lambda: [step(ws, x, tg.recompute_grad) for _ in range(2)], gradients=True)
    other, _ = recorded(lambda: [step(ws, x + 1) for _ in range(2)], gradients=True)
    told = [[(r.gradients["step"][i], r.text(r.gradients["name"][i]), r.text(r.gradients["digest"][i]))
             for i in range(r.count("gradients"))] for r in (first, again, other)]  # fmt: skip
    assert [t[:2] for t in told[0]] == [
        (0, "gradient of w0"),
        (0, "gradient of w1"),
        (1, "gradient of w0"),
        (1, "gradient of w1"),
    ]
    assert told[0] == told[1] != told[2]


def test_other_threads_are_recorded_too() -> None:
    ws, x = weights(2), f32(np.ones((32, 64)))

    def program() -> None:
        workers = [threading.Thread(target=step, args=(ws, x)) for _ in range(3)]
        for t in workers:
            t.start()
        for t in workers:
            t.join()

    run, session = recorded(program)
    assert run.peak["bytes"] == session.measure.peak_bytes
    assert all(sum(by) == total for _, _, total, by in totals(run))


def test_running_out_of_memory_is_marked_with_what_was_alive() -> None:
    ws, x = weights(), f32(np.ones((512, 64)))

    def program() -> None:
        with pytest.raises(MemoryError), tg.memory_budget(ws[0].nbytes * 4 + x.nbytes + 1024):
            step(ws, x)

    run, session = recorded(program)
    assert 1 in run.marks["kind"]
    seq = run.marks["seq"][run.marks["kind"].index(1)]
    assert x.nbytes < sum(run.allocs["bytes"][i] for i in alive(run, seq)) <= session.measure.peak_bytes


def test_nothing_holds_the_arrays_of_the_program() -> None:
    ws, x = weights(), f32(np.ones((512, 64)))
    step(ws, x)  # makes constants
    with tg.measure() as m:
        before = m.live_bytes
        session = Session(stacks="full")
        session.start()
        step(ws, x)
        assert m.live_bytes == before
        session.stop()


def test_a_run_can_be_asked_for_while_the_program_goes_on() -> None:
    ws, x, runs = weights(), f32(np.ones((32, 64))), []
    session = Session()
    session.start()
    for _ in range(2):
        step(ws, x)
        runs.append(session.run(META))
    session.stop()
    assert runs[0].count("allocs") < runs[1].count("allocs") <= session.run(META).count("allocs")
    assert runs[1].peak["bytes"] == session.measure.peak_bytes


def test_a_dry_run_leaves_no_trace() -> None:
    ws, x, held = weights(), f32(np.ones((32, 64))), [f32(np.ones((40, 40)))]

    def f(y: tg.Tensor) -> None:
        held.clear()  # which frees real bytes while nothing is told
        step(ws, y)

    run, session = recorded(lambda: [step(ws, x), tg.memory.predict_peak(f, x, least=False), step(ws, x)][1] and None)
    assert run.peak["bytes"] == session.measure.peak_bytes
    last = max(run.allocs["begin_seq"] + run.allocs["end_seq"])
    assert "(40, 40)" not in {run.text(run.allocs["shape"][i]) for i in alive(run, last)}
    assert run.count("steps") == 2


def test_long_programs_cost_the_same_step_after_step() -> None:
    ws, x = weights(2), f32(np.ones((8, 64)))
    optimizer = tg.optim.SGD(0.1, 0.9)

    def program() -> None:
        for _ in range(150):
            optimizer.apply(step(ws, x), ws)

    whole, _ = recorded(program)
    run, session = recorded(program, keep=600)
    kept = sum(run.count(table) for table in ("ops", "allocs", "changes"))
    assert kept < 1200 and run.checks["dropped"] > 5000
    assert run.count("calls") < whole.count("calls") / 3
    assert run.steps["peak_bytes"] == whole.steps["peak_bytes"]  # also of steps whose events are gone
    assert at(whole, "step:70") == whole.steps["peak_seq"][70]
    with pytest.raises(ValueError, match="step 70 were not kept"):
        at(run, "step:70")


def test_dropped_steps_become_one_also_around_one_that_was_the_highest() -> None:
    ws, x = weights(2), f32(np.ones((8, 64)))
    optimizer = tg.optim.SGD(0.1, 0.9)

    def program() -> None:
        for i in range(60):
            optimizer.apply(step(ws, tg.concat([x] * {20: 50, 40: 60}.get(i, 1))), ws)

    run, _ = recorded(program, keep=600)
    rows = sum(run.count(table) for table in ("ops", "allocs", "changes")) + sum(e >= 0 for e in run.allocs["end_seq"])
    assert run.peak["step"] == 40 and run.checks["dropped"] > 1000
    assert run.checks["events"] - run.checks["dropped"] == rows


def test_a_run_asked_for_while_other_threads_work_can_be_read() -> None:
    ws, x, over = weights(), f32(np.ones((32, 64))), threading.Event()

    def work() -> None:
        while not over.is_set():
            step(ws, x)

    session = Session()
    session.start()
    workers = [threading.Thread(target=work) for _ in range(2)]
    for t in workers:
        t.start()
    try:
        for _ in range(8):
            reread(session.run(META))
    finally:
        over.set()
        for t in workers:
            t.join()
        session.stop()


def test_what_an_optimizer_makes_is_no_input_of_the_programs() -> None:
    ws, x = weights(), f32(np.ones((4, 64)))
    optimizer = tg.optim.Adam(1e-3)

    def program() -> None:
        for _ in range(2):
            optimizer.apply(step(ws, x), ws)

    run, _ = recorded(program)
    made = [CATEGORIES[c] for c, p in zip(run.allocs["category"], run.allocs["phase"]) if PHASES[p] == "optimizer"]
    assert made and "input" not in made


def test_reruns_of_layers_have_the_lines_and_lineage_of_the_first_run() -> None:
    tg.random.seed(0)
    layers, x = [tg.nn.Dense(64, activation="gelu") for _ in range(3)], f32(np.ones((32, 64)))

    def program() -> None:
        with tg.GradientTape() as tape:
            y = x
            for layer in layers:
                y = tg.recompute_grad(layer)(y)
            loss = tg.mean(y * y)
        tape.gradient(loss, [v for layer in layers for v in layer.trainable_variables])

    program()
    run, _ = recorded(lambda: [program() for _ in range(2)] and None)
    assert recomputed(run) >= 6


@pytest.mark.parametrize("transform", [
    lambda f, x: tg.jvp(f, (x,), (x,)), lambda f, x: tg.vmap(f)(x), lambda f, x: tg.hvp(f, (x,), (x,))
], ids=["jvp", "vmap", "hvp"])  # fmt: skip
def test_functions_that_a_transformation_calls_are_calls(transform: Any) -> None:
    """A recorder of tangents or of a batch hides no tape: to ask it for those that it hides once failed."""

    def squares(x: tg.Tensor) -> tg.Tensor:
        return tg.sum(x * x)

    run, _ = recorded(lambda: transform(squares, f32(np.ones((3, 4)))))
    assert "squares" in [short(run, call) for call in range(run.count("calls"))]
