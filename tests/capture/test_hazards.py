"""What goes wrong around captured functions: looks at values, exceptions, interrupts, threads, budgets, leaks."""

from __future__ import annotations

import gc
import sys
import threading
import warnings
import weakref
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from captured import alike, bits
from inside import content_of

import tapegrad as tg
from tapegrad.core import tracking
from tapegrad.core.state import thread
from tapegrad.errors import BudgetError, DryRunError, FunctionError

CALLS = 5


def data(*shape: int, seed: int = 0, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def check_nothing_is_left() -> None:
    assert thread.recorders == ()
    assert thread.batches == ()
    assert tg.asarray(2.0) * 3.0 == 6.0


# Looks at values --------------------------------------------------------------------------------------------------


def iterated(x):
    for _ in x[0]:
        pass


LOOKS = {
    "float": lambda x: float(tg.sum(x)),
    "int": lambda x: int(tg.sum(x)),
    "complex": lambda x: complex(tg.sum(x)),
    "bool": lambda x: bool(tg.sum(x) > 0),
    "if": lambda x: 1 if tg.sum(x) > 0 else 2,
    "and": lambda x: tg.sum(x) > 0 and tg.sum(x) < 1,
    "item": lambda x: tg.sum(x).item(),
    "numpy": lambda x: x.numpy(),
    "tolist": lambda x: x.tolist(),
    "asarray": lambda x: np.asarray(x),
    "index": lambda x: [1, 2, 3][tg.argmax(x[0])],
    "range": lambda x: range(tg.argmax(x[0])),
    "in": lambda x: tg.sum(x) in [1.0, 2.0],
    "min": lambda x: min(x[0]),
    "variable": lambda x: float(VARIABLE),
    "variable, numpy": lambda x: VARIABLE.numpy(),
    "variable, if": lambda x: 1 if VARIABLE else 2,
    "in a tape": lambda x: tg.grad(lambda x: tg.sum(x) * tg.sum(x).item())(x),
    "in a vmap": lambda x: tg.vmap(lambda r: r * float(VARIABLE))(x),
    "in a checkpoint": lambda x: tg.recompute_grad(lambda r: r * tg.sum(x).item())(x),
    "dlpack": lambda x: np.from_dlpack(x),
    "a method of NumPy's": lambda x: np.float32(1.0) * float(x[0, 0]),
}
VARIABLE = tg.Variable(1.5)


@pytest.mark.parametrize("name", LOOKS)
def test_a_look_at_a_value_is_an_error_that_names_the_line(name):
    v = tg.Variable(data(2))

    @tg.function
    def f(x):
        v.assign_add(tg.ones((2,)))
        return LOOKS[name](x)

    x = tg.asarray(data(3, 4))
    line = LOOKS[name].__code__.co_firstlineno
    for _ in range(3):
        before = v.numpy(copy=True)
        with pytest.raises(FunctionError, match="tg.where") as told:
            f(x)
        assert f"{__file__}:{line}:" in str(told.value)
        assert (v.numpy() == before).all()
        check_nothing_is_left()
    assert (f.stats.traces, f.stats.replays) == (0, 0)


def test_iterating_over_a_scalar_is_an_error():
    f = tg.function(lambda x: list(tg.sum(x)))
    with pytest.raises(TypeError):
        f(tg.asarray(data(3)))


def test_iterating_over_rows_is_none():
    def program(function):
        @function
        def f(x):
            total = x[0] * 0.0
            for row in x:
                total = tg.sin(total + row)
            a, b = x[:2]
            return total, a - b, len(x), x.shape

        return [f(tg.asarray(data(3, 4, seed=i))) for i in range(CALLS)]

    alike(program, (1, CALLS - 2))


def test_shapes_and_dtypes_are_no_values():
    def program(function):
        @function
        def f(x):
            return x * x.shape[0] if x.ndim == 2 and x.dtype == "float32" else x, x.size / 2, str(x.dtype)

        return [f(tg.asarray(data(3, 4, seed=i))) for i in range(CALLS)]

    alike(program, (1, CALLS - 2))


def test_data_dependent_shapes_run_eagerly_and_say_why():
    def program(function):
        f = function(lambda x: x[x > 0] * 2.0)
        return [f(tg.asarray(data(9, seed=i))) for i in range(CALLS)]

    (f,) = alike(program, (0, 0, CALLS - 1))
    assert "test_hazards.py:" in next(iter(f.stats.fallbacks))


def test_a_learning_rate_made_a_number_is_an_error_that_changes_nothing():
    class Own(tg.optim.Optimizer):
        def update(self, x, g, slots, rate, step):
            return (x - g * float(rate),)

    v, optimizer = tg.Variable(data(3)), Own(0.1)

    @tg.function
    def step(x):
        optimizer.apply([v * x], [v])

    before = v.numpy(copy=True)
    for _ in range(2):
        with pytest.raises(FunctionError):
            step(tg.asarray(data(3)))
        assert (v.numpy() == before).all()
        assert int(optimizer.iterations) == 0


def test_a_leaked_tensor_is_an_error_that_names_the_cause():
    kept = []
    f = tg.function(lambda x: kept.append(x * 2.0))
    f(tg.asarray(data(3)))
    assert kept[0].numpy().shape == (3,)
    with pytest.raises(DryRunError, match="captured function"):
        kept[-1].numpy()


def test_a_state_kept_outside_of_variables_is_never_silently_stale():
    class Recurrent:
        h = tg.asarray(np.zeros(3, "float32"))

        @tg.function
        def step(self, x):
            self.h = tg.tanh(self.h + x)
            return self.h

    m = Recurrent()
    m.step(tg.asarray(data(3)))
    with pytest.raises(DryRunError, match="captured function"):
        m.step(tg.asarray(data(3)))


# Exceptions -------------------------------------------------------------------------------------------------------


def test_an_exception_in_the_first_call():
    v, fail = tg.Variable(data(3)), [True]

    @tg.function
    def f(x):
        v.assign_add(x)
        if fail[0]:
            raise KeyError("once")
        return v * 2.0

    before, x = v.numpy(copy=True), tg.asarray(data(3, seed=1))
    with pytest.raises(KeyError, match="once"):
        f(x)
    assert (v.numpy() == before).all()
    check_nothing_is_left()
    fail[0] = False
    for _ in range(4):
        before = before + x.numpy()
        assert bits(f(x)) == bits(before * np.float32(2.0))
    assert (f.stats.traces, f.stats.replays, f.stats.fallbacks) == (1, 2, {})


def test_a_float_error_in_a_replay_leaves_variables_and_streams():
    v, generator = tg.Variable(np.ones(3, "float32")), tg.random.Generator(1)
    big = tg.Variable(data(120, 120))

    @tg.function
    def f(x):
        v.assign(v + tg.ones((3,)))
        big.assign(big * 0.5)
        noise = generator.normal((3,), dtype="float32")
        y = noise / x
        v.assign_add(y)
        return tg.sum(y)

    good, bad = tg.asarray(np.ones(3, "float32")), tg.asarray(np.zeros(3, "float32"))
    with np.errstate(all="raise"):
        for k in range(6):
            before = bits([v, big]), generator.state
            with pytest.raises(FloatingPointError):
                f(bad)
            assert (bits([v, big]), generator.state) == before, k
            check_nothing_is_left()
            f(good)
            assert generator.state != before[1]
    assert (f.stats.traces, f.stats.replays, f.stats.fallbacks) == (1, 4, {})


def test_float_errors_are_treated_as_the_function_says():
    def program(function):
        @function
        def f(x):
            with np.errstate(all="ignore"):
                y = 1.0 / x
            return tg.where(x == 0, 0.0, y)

        return [f(tg.asarray(np.array([0.0, float(i)], "float32"))) for i in range(1, CALLS)]

    alike(program, (1, CALLS - 3))  # warnings are errors in these tests


def test_float_errors_that_the_function_asks_for():
    v = tg.Variable(np.zeros(2, "float32"))

    @tg.function
    def f(x):
        v.assign_add(x)
        with np.errstate(divide="raise"):
            y = 1.0 / x
            return tg.sum(y)

    good, bad = tg.asarray(np.ones(2, "float32")), tg.asarray(np.zeros(2, "float32"))
    for i in range(4):
        f(good)
        before = bits(v)
        with pytest.raises(FloatingPointError), np.errstate(all="ignore"):
            f(bad)
        assert bits(v) == before, i


def test_an_index_out_of_range_in_a_replay():
    v = tg.Variable(np.zeros(3, "float32"))

    @tg.function
    def f(x, i):
        v.assign_add(tg.ones((3,)))
        return tg.take(x, i, axis=0)

    x = tg.asarray(data(5, 3))
    for k in range(5):
        i = tg.asarray(np.array([0, k]))
        assert bits(f(x, i)) == bits(tg.take(x, i, axis=0))
        with pytest.raises(IndexError):
            f(x, tg.asarray(np.array([0, 5])))
        assert (v.numpy() == k + 1).all()
    assert (f.stats.traces, f.stats.replays, f.stats.fallbacks) == (1, 3, {})


def test_a_singular_matrix_in_a_replay():
    f = tg.function(lambda a, b: tg.linalg.solve(a, b))
    good, bad, b = tg.asarray(np.eye(3)), tg.asarray(np.zeros((3, 3))), tg.asarray(np.ones(3))
    for _ in range(4):
        assert bits(f(good, b)) == bits(b)
        with pytest.raises(tg.errors.LinAlgError):
            f(bad, b)
    assert f.stats.replays == 2


class Interrupts:
    """Raises KeyboardInterrupt at the n-th line of the package's captured calls."""

    def __init__(self, at: int, files: tuple[str, ...]) -> None:
        self.at, self.files, self.count = at, files, 0

    def __call__(self, frame, event, arg):
        return self.line if frame.f_code.co_filename.endswith(self.files) else None

    def line(self, frame, event, arg):
        if event == "line":
            self.count += 1
            if self.count == self.at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self.line


def test_an_interrupt_anywhere_in_a_replay_leaves_all_or_nothing():
    here = str(Path("program"))
    files = tuple(str(Path(here) / f) for f in ("function.py", "replay.py", "memory.py", "code.py"))
    files = (*files, "core/cell.py", "<captured function>")
    small, large, generator = tg.Variable(np.zeros(3)), tg.Variable(np.zeros((80, 80))), tg.random.Generator(2)
    other = tg.Variable(np.zeros((80, 80)))

    @tg.function
    def f(x):
        noise = generator.uniform((3,))
        for v in (small, large, other):
            v.assign_add(tg.ones(v.shape, dtype="float64"))
        return x + noise * 0.0 + tg.sum(large * other)

    def state():
        first = small.numpy()[0]
        for v in (small, large, other):
            assert (v.numpy() == first).all()
        return first, generator.state[1]

    x = tg.asarray(np.zeros(3))
    for _ in range(3):
        f(x)
    first, position = state()
    assert position == first * (position / first)
    each, at, done = position / first, 0, 0
    while True:
        at += 1
        tracer = Interrupts(at, files)
        before = state()
        if at % 7 == 0:
            held = large.read(), other.read()  # then they cannot be written in place
        sys.settrace(tracer)
        try:
            f(x)
        except KeyboardInterrupt:
            pass
        else:
            done += 1
        finally:
            sys.settrace(None)
        held = None
        after = state()
        assert after in (before, (before[0] + 1, before[1] + each)), at
        check_nothing_is_left()
        value = f(x).numpy()
        assert (value == 6400 * (after[0] + 1) ** 2).all(), (at, value, after)
        if done == 2:
            break
    assert at > 40
    assert f.stats.fallbacks == {}
    assert held is None


def test_an_interrupt_in_the_first_calls_leaves_all_or_nothing():
    files = tuple(str(Path("program") / f) for f in ("function.py", "eager.py", "capture.py", "replay.py", "arena.py"))
    for at in range(1, 900, 13):
        v, w = tg.Variable(np.zeros(3)), tg.Variable(np.zeros((80, 80)))

        @tg.function
        def f(x, v=v, w=w):
            v.assign_add(x)
            w.assign_add(tg.ones((80, 80), dtype="float64"))
            return tg.sum(w) + v

        done = 0
        sys.settrace(Interrupts(at, files))
        try:
            for _ in range(3):
                f(tg.asarray(np.ones(3)))
                done += 1
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        check_nothing_is_left()
        found = v.numpy()[0]
        assert found in (done, done + 1), at
        assert (v.numpy() == found).all()
        assert (w.numpy() == found).all()
        for k in range(4):
            y = f(tg.asarray(np.ones(3))).numpy()
            assert (y == 6401 * (found + k + 1)).all(), at


# Threads, garbage, memory -----------------------------------------------------------------------------------------


def test_two_threads_call_one_function():
    v = tg.Variable(np.zeros(3))

    @tg.function
    def f(x):
        v.assign_add(tg.ones((3,), dtype="float64"))
        return tg.sin(x) * 2.0 + tg.sum(x)

    wrong, count = [], 60

    def work(k):
        for i in range(count):
            x = tg.asarray(data(7, seed=1000 * k + i))
            if bits(f(x)) != bits(tg.sin(x) * 2.0 + tg.sum(x)):
                wrong.append((k, i))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not wrong
    assert (v.numpy() == 4 * count).all()
    assert (f.stats.traces, f.stats.replays, f.stats.fallbacks) == (1, 4 * count - 2, {})


def test_other_threads_work_while_one_captures():
    wrong, stop = [], threading.Event()
    v = tg.Variable(data(5))

    def work():
        x = tg.asarray(data(5))
        wanted = bits(tg.tanh(x) * v + 1.0)
        while not stop.is_set():
            if bits(tg.tanh(x) * v + 1.0) != wanted:
                wrong.append("bits")

    threads = [threading.Thread(target=work) for _ in range(2)]
    for t in threads:
        t.start()
    for i in range(30):
        f = tg.function(lambda x, i=i: tg.sin(x) * float(i) + v)
        for _ in range(3):
            x = tg.asarray(data(5, seed=i))
            assert bits(f(x)) == bits(tg.sin(x) * float(i) + v)
    stop.set()
    for t in threads:
        t.join(60)
    assert not wrong


def test_another_thread_never_sees_a_value_half_written():
    v, ones = tg.Variable(np.zeros((500, 500))), tg.asarray(np.ones((500, 500)))
    f = tg.function(lambda x: v.assign(v + x, read_value=False))
    torn, seen, stop = [], [], threading.Event()

    def work():
        while not stop.is_set():
            found = v.numpy(copy=True)
            seen.append(found[0, 0])
            if found.min() != found.max():
                torn.append(found)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    other = threading.Thread(target=work)
    other.start()
    try:
        for _ in range(60):
            f(ones)
    finally:
        sys.setswitchinterval(before)
        stop.set()
        other.join(60)
    assert not torn
    assert len(set(seen)) > 1
    assert f.stats.replays == 58


def counting(shape=(300, 300), count=3):
    """A captured function that adds 1 to some variables, these, and where each lies."""
    variables = [tg.Variable(np.zeros(shape)) for _ in range(count)]

    def step(x):
        for v in variables:
            v.assign(v + x, read_value=False)

    f, ones = tg.function(step), tg.asarray(np.ones(shape))
    return lambda: f(ones), variables, lambda: [content_of(v).ctypes.data for v in variables]


def test_a_thread_that_uses_no_tensors_lets_variables_be_overwritten():
    step, variables, where = counting()
    stop = threading.Event()

    def beat():
        while not stop.wait(0.001):
            pass

    other = threading.Thread(target=beat)
    other.start()
    try:
        for _ in range(3):
            step()
        before = where()
        for _ in range(20):
            step()
            assert where() == before
        held = variables[0].read()
        step()
        assert where()[0] != before[0]
        assert where()[1:] == before[1:]
    finally:
        stop.set()
        other.join(60)
    assert (held.numpy() == 23).all()
    assert all((v.numpy() == 24).all() for v in variables)


def test_threads_that_come_and_go_see_all_of_a_commit_or_nothing():
    step, variables, where = counting()
    torn, seen, kept, stop = [], set(), 0, threading.Event()

    def read():
        found = [v.numpy(copy=True) for v in reversed(variables)]  # the last is written first
        values = [x[0, 0] for x in found]
        seen.update(values)
        if any(x.min() != x.max() for x in found):
            torn.append(values)

    def send():
        while not stop.is_set():
            t = threading.Thread(target=read)
            t.start()
            t.join(60)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    other = threading.Thread(target=send)
    other.start()
    try:
        for i in range(300):
            last = where()
            step()
            kept += last == where()
            assert variables[0].numpy()[0, 0] == i + 1
    finally:
        sys.setswitchinterval(before)
        stop.set()
        other.join(60)
    assert not torn
    assert len(seen) > 1
    assert kept > 0


def test_an_interrupt_while_variables_are_overwritten_ends_the_commit():
    from tapegrad.capture.replay import do_all

    done, todo = [], []

    def interrupted():
        done.append("once more" if done else "begun")
        if len(done) == 1:
            raise KeyboardInterrupt

    todo = [lambda: done.append("last"), interrupted]
    with pytest.raises(KeyboardInterrupt):
        do_all(todo)
    assert done == ["begun", "once more", "last"]


def test_no_old_values_stay_alive_between_calls():
    step, variables, _ = counting()
    stop, used = threading.Event(), threading.Event()

    def work():
        tg.ones(3)
        used.set()
        stop.wait(60)

    other = threading.Thread(target=work)
    with tg.measure() as m:
        step()
        step()
        live = [m.live_bytes]
        step()
        live.append(m.live_bytes)
        other.start()
        used.wait(60)
        for _ in range(3):  # another thread might read: new values get memory of their own
            step()
            live.append(m.live_bytes)
    stop.set()
    other.join(60)
    assert live == [live[0]] * 5


def test_programs_go_with_their_function_without_the_collector():
    big = tg.Variable(data(100, 100))
    marks = []

    def make():
        f = tg.function(lambda x: tg.sin(x) @ big)
        for _ in range(4):
            f(tg.asarray(data(100, 100)))
        assert f.stats.replays
        marks.append(weakref.ref(f))

    gc.collect()
    gc.disable()
    try:
        make()
        assert [m() for m in marks] == [None]
    finally:
        gc.enable()


def test_the_ledger_counts_the_arena_and_forgets_it():
    tg.sum(tg.sin(data(64, 64)) @ data(64, 64))
    gc.collect()
    with tg.measure() as m:
        f = tg.function(lambda x: tg.sum(tg.sin(x) @ x))
        before = m.live_bytes
        x = tg.asarray(data(64, 64))
        for _ in range(4):
            f(x)
        assert m.live_bytes > before + x.nbytes
        f.release()
        assert m.live_bytes == before + x.nbytes
        f(x)
        del f, x
        gc.collect()
        assert m.live_bytes == before


def test_inside_a_budget_and_a_measure():
    def program(function):
        v = tg.Variable(data(64, 64))

        @function
        def f(x):
            with tg.GradientTape() as tape:
                y = v
                for _ in range(4):
                    y = tg.tanh(y @ x)
                loss = tg.sum(y)
            g = tape.gradient(loss, v)
            v.assign_sub(g * 0.01)
            return loss, g

        x, out = tg.asarray(data(64, 64, seed=1) * 0.1), []
        with tg.measure() as m, tg.memory_budget(m.live_bytes + 2**20) as budget:
            for _ in range(CALLS):
                out.append((f(x), v.numpy(copy=True)))
            assert budget.peak_bytes <= m.live_bytes + 2**20
        for _ in range(3):
            out.append((f(x), v.numpy(copy=True)))
        with tg.memory_budget("1GiB"):
            out.append((f(x), v.numpy(copy=True)))
        return out

    alike(program, (1, CALLS + 2))


def test_a_budget_with_room_for_the_eager_run_alone():
    """The program does not fit: the function runs eagerly, and says why."""

    def f(x):
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = x
            for _ in range(12):
                y = tg.softmax(y) * 2.0
            loss = tg.sum(y)
        return tape.gradient(loss, x)

    x = tg.asarray(data(64, 64))
    wanted = bits(f(x))
    with tg.measure() as m:
        live = m.live_bytes
    for limit in range(60_000, 400_000, 20_000):
        captured = tg.function(f)
        with tg.memory_budget(live + limit):
            try:
                f(x)
            except BudgetError:
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert all(bits(captured(x)) == wanted for _ in range(4)), limit
        assert captured.stats.replays == 2 or sum(captured.stats.fallbacks.values()) > 0


def test_the_arena_goes_before_the_eager_run_that_it_is_compared_with():
    """Within an enclosing budget they take their bytes one after the other."""
    ws = [tg.Variable(data(64, 64, seed=i) * 0.1) for i in range(12)]

    def f(x):
        with tg.GradientTape() as tape:
            h = x
            for w in ws:
                h = tg.tanh(h @ w)
            loss = tg.sum(h)
        return tape.gradient(loss, ws)

    x = tg.asarray(data(512, 64))
    wanted = bits(f(x))
    plain = tg.function(f)
    plain(x)
    takes = plain.plan(x).arena_bytes
    plain.release()
    with tg.measure() as m:
        live = m.live_bytes
    captured = tg.function(f)
    with tg.memory_budget(live + takes) as budget:
        for _ in range(4):
            assert bits(captured(x)) == wanted
    assert captured.stats.replays == 2 and not captured.stats.fallbacks
    assert budget.peak_bytes <= live + takes


def test_a_call_whose_variables_are_large_and_small_with_everything_held():
    held = []

    def program(function):
        vs = [tg.Variable(data(*s)) for s in ((3,), (90, 90), (200, 200), (0, 4))]

        @function
        def f(x):
            for v in vs:
                v.assign(v * 0.5 + x)
            return [v.read() for v in vs], [tg.sum(v) for v in vs]

        out = []
        for i in range(8):
            before = [(v.read(), v.numpy(), v.numpy(copy=True)) for v in vs]
            out.append(f(tg.asarray(np.float32(i))))
            assert all(bits(a) == bits(c) == bits(b) for a, b, c in before)
            held.append(before if i % 2 else None)
        return out, [v.read() for v in vs]

    alike(program, (1, 6))


def test_numbers_of_threads():
    def program(function):
        f = function(lambda x: tg.sum(tg.tanh(x) * x, axis=0))
        out = []
        before = tg.get_num_threads()
        try:
            for n in (1, 2, 1, 2, 2, 1):
                tg.set_num_threads(n)
                out.append(f(tg.asarray(data(700, 700, seed=3))))
        finally:
            tg.set_num_threads(before)
        return out

    alike(program)


def test_switched_off_by_the_environment(monkeypatch):
    monkeypatch.setenv("TAPEGRAD_FUNCTION", "0")
    v = tg.Variable(data(3))
    f = tg.function(lambda x: (v.assign_add(x), v * 2.0)[1])
    for _ in range(4):
        want = (v + data(3)) * 2.0
        assert bits(f(data(3))) == bits(want)
    assert (f.stats.traces, f.stats.replays, f.stats.fallbacks) == (0, 0, {})
    g = tg.function(lambda x: float(x))
    with pytest.raises(FunctionError):
        g(tg.asarray(1.0))


def test_release_and_again():
    f = tg.function(lambda x: tg.sin(x))
    for _ in range(2):
        for i in range(3):
            assert bits(f(data(3, seed=i))) == bits(tg.sin(data(3, seed=i)))
        f.release()
    assert (f.stats.traces, f.stats.replays) == (2, 2)


def test_warnings_of_the_function_come_while_it_runs_eagerly():
    f = tg.function(lambda x: (warnings.warn("told", stacklevel=1), x * 2.0)[1])
    with pytest.warns(UserWarning, match="told"):
        f(tg.asarray(1.0))


def test_the_account_in_force_is_the_same_afterwards():
    before = tracking.current
    f = tg.function(lambda x: x * 2.0)
    for _ in range(3):
        f(tg.asarray(1.0))
    assert tracking.current is before


@pytest.mark.parametrize("counts", [(1, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("limit", ["none", "1GB"])
@pytest.mark.parametrize("native", [True, False])
def test_the_number_of_threads_may_change_between_a_call_and_its_gradient(counts, limit, native, monkeypatch):
    if not native:
        monkeypatch.setenv("TAPEGRAD_NATIVE", "0")
    x = tg.asarray(np.full(2**21, 0.5, np.float32))
    functions = (lambda x: x * 3, lambda x: tg.sqrt(x) * tg.exp(x) + x, tg.gelu)
    before = tg.get_num_threads()
    try:
        for f in functions:
            gradients = []
            for g in (f, tg.function(f)):
                tg.set_num_threads(counts[0])
                for _ in range(3):
                    with tg.GradientTape() as tape:
                        tape.watch(x)
                        y = g(x)
                tg.set_num_threads(counts[1])
                with nullcontext() if limit == "none" else tg.memory_budget(limit):
                    gradients.append(tape.gradient(y, x, output_gradients=x).numpy(copy=True))
            assert gradients[0].tobytes() == gradients[1].tobytes()
    finally:
        tg.set_num_threads(before)
