"""Each kind of thing that a captured function reads from its surroundings, changed, however it is called."""

import dataclasses
import enum
import functools
import gc
import types
import weakref
from collections import ChainMap, UserDict, deque, namedtuple

import numpy as np
import pytest

import tapegrad as tg

X = np.array([1.0, 2.0])
CALLS = 3
scale = 1.0
state: dict[str, int] = {}


def plain(f):
    return f(tg.asarray(X)).numpy()


def on_a_tape(f):
    x = tg.asarray(X)
    with tg.GradientTape() as tape:
        tape.watch(x)
        y = f(x)
    return tape.gradient(y, x).numpy() * X


def by_grad(f):
    return tg.grad(lambda x: tg.sum(f(x)))(tg.asarray(X)).numpy() * X


def in_a_checkpoint(f):
    return on_a_tape(tg.recompute_grad(f))


def in_a_loop(f):
    return on_a_tape(lambda x: tg.checkpointed_loop(f, x, 1, snapshots=1))


ways = pytest.mark.parametrize("way", [plain, on_a_tape, by_grad, in_a_checkpoint, in_a_loop])


class Model:
    rate = 1.0

    def __init__(self):
        self.factor, self.negative, self.w = 1.0, False, tg.Variable(np.ones(2))

    @property
    def product(self):
        return self.factor * self.rate

    def __call__(self, x):
        y = x * self.w * self.product
        return -y if self.negative else y

    method = __call__

    @classmethod
    def of_class(cls, x):
        return x * cls.rate


class Slots:
    __slots__ = ("factor",)


class Mode(enum.Enum):
    ONE = 1
    THREE = 3


@dataclasses.dataclass
class Settings:
    factor: float = 1.0


Pair = namedtuple("Pair", "factor other")


def helper(x):
    return x * scale


def cell():
    k = 1.0

    def change():
        nonlocal k
        k = 3.0

    return (lambda x: x * k), change


def value_of_a_global():
    def change():
        global scale
        scale = 3.0

    return (lambda x: helper(x)), change


def attribute():
    m = Model()
    return (lambda x: m(x)), lambda: setattr(m, "factor", 3.0)


def switch():
    m = Model()
    m.factor = 3.0
    m.negative = True
    return (lambda x: m(x)), lambda: setattr(m, "negative", False)


def variable_of_an_object():
    m = Model()
    return m.method, lambda: setattr(m, "w", tg.Variable(np.full(2, 3.0)))


def attribute_of_a_class():
    class Own(Model):
        rate = 1.0

    return Own.of_class, lambda: setattr(Own, "rate", 3.0)


def method_replaced():
    class Own(Model):
        def factor_of(self):
            return 1.0

        def __call__(self, x):
            return x * self.factor_of()

    m = Own()
    return m, lambda: setattr(Own, "factor_of", lambda self: 3.0)


def slots():
    s = Slots()
    s.factor = 1.0
    return (lambda x: x * s.factor), lambda: setattr(s, "factor", 3.0)


def namespace():
    cfg = types.SimpleNamespace(inner=types.SimpleNamespace(factor=1.0))
    return (lambda x: x * cfg.inner.factor), lambda: setattr(cfg.inner, "factor", 3.0)


def module():
    config = types.ModuleType("config_of_a_test")
    config.RATE = 1.0
    return (lambda x: x * config.RATE), lambda: setattr(config, "RATE", 3.0)


def dataclass():
    s = Settings()
    return (lambda x: x * s.factor), lambda: setattr(s, "factor", 3.0)


def named_tuple():
    p = Pair(1.0, 0)

    def change():
        nonlocal p
        p = p._replace(factor=3.0)

    return (lambda x: x * p.factor), change


def element_of_a_list():
    ws = [tg.Variable(1.0), tg.Variable(7.0)]
    return (lambda x: x * ws[0]), lambda: ws.__setitem__(0, tg.Variable(3.0))


def length_of_a_list():
    terms = [1.0]
    return (lambda x: sum(x * t for t in terms)), lambda: terms.append(2.0)


def value_of_a_dict():
    d = {"a": {"b": 1.0}}
    return (lambda x: x * d["a"]["b"]), lambda: d["a"].update(b=3.0)


def members_of_a_set():
    s = {1}
    return (lambda x: x * float(sum(s))), lambda: s.add(2)


def tensor():
    t = tg.asarray(np.array(1.0))

    def change():
        nonlocal t
        t = tg.asarray(np.array(3.0))

    return (lambda x: x * t), change


def to_none():
    m = Model()

    def change():
        nonlocal m
        m = None

    return (lambda x: x * (3.0 if m is None else 1.0)), change


def array(shape=(2,)):
    a = np.ones(shape)
    return (lambda x: x * tg.asarray(a).ravel()[:2]), lambda: np.multiply(a, 3.0, out=a)


def one_element_of_a_small_array():
    a = np.array([[1.0, 3.0, 9.0]]).T
    return (lambda x: x * tg.asarray(a)[0]), lambda: a.__setitem__((0, 0), 3.0)


def enumeration():
    mode = Mode.ONE

    def change():
        nonlocal mode
        mode = Mode.THREE

    return (lambda x: x * float(mode.value)), change


def defaults():
    def f(x, k=1.0):
        return x * k

    return f, lambda: setattr(f, "__defaults__", (3.0,))


def keyword_default():
    def f(x, *, k=1.0):
        return x * k

    return f, lambda: f.__kwdefaults__.update(k=3.0)


def element_of_a_default():
    ks = [1.0]

    def f(x, *, ks=ks):
        return x * ks[0]

    return f, lambda: ks.__setitem__(0, 3.0)


def partial():
    f = functools.partial(lambda x, k: x * k, k=1.0)
    return f, lambda: f.keywords.update(k=3.0)


def decorated():
    k = 1.0

    def decorator(f):
        @functools.wraps(f)
        def wrapper(*args):
            return f(*args)

        return wrapper

    @decorator
    @decorator
    def f(x):
        return x * k

    def change():
        nonlocal k
        k = 3.0

    return f, change


def callable_object():
    m = Model()
    return m, lambda: setattr(m, "factor", 3.0)


def objects_in_a_list():
    ms = [Model(), Model()]

    def f(x):
        for m in ms:
            x = m(x)
        return x

    return f, lambda: setattr(ms[1], "factor", 3.0)


def attribute_by_text():
    s = Settings()
    return (lambda x: x * getattr(s, "factor")), lambda: setattr(s, "factor", 3.0)  # noqa: B009


def function():
    act = tg.abs

    def change():
        nonlocal act
        act = lambda x: 3.0 * x

    return (lambda x: act(x)), change


def of_an_inner(wrap):
    k = 1.0
    inner = wrap(lambda x: x * k)

    def change():
        nonlocal k
        k = 3.0

    return (lambda x: inner(x)), change


def of_an_inner_captured_function():
    return of_an_inner(tg.function)


def of_an_inner_checkpoint():
    return of_an_inner(tg.recompute_grad)


def of_a_container(container, key):
    def change():
        container[key] = 3

    return (lambda x: x * float(container[key])), change


CONTAINERS = {
    "tuple_key": lambda: of_a_container({(0, None): 1}, (0, None)),
    "float_key": lambda: of_a_container({0.5: 1}, 0.5),
    "deque": lambda: of_a_container(deque([1, 2]), 0),
    "user_dict": lambda: of_a_container(UserDict(k=1), "k"),
    "chain_map": lambda: of_a_container(ChainMap({}, {"k": 1}), "k"),
    "bytearray": lambda: of_a_container(bytearray([1, 2]), 0),
}
CASES = [
    cell, value_of_a_global, attribute, switch, variable_of_an_object, attribute_of_a_class, method_replaced, slots,
    namespace, module, dataclass, named_tuple, element_of_a_list, length_of_a_list, value_of_a_dict, members_of_a_set,
    tensor, to_none, array, functools.partial(array, (200, 300)), one_element_of_a_small_array, enumeration, defaults,
    keyword_default, element_of_a_default, partial, decorated, callable_object, objects_in_a_list, attribute_by_text,
    function, of_an_inner_captured_function, of_an_inner_checkpoint,
    *(pytest.param(case, id=name) for name, case in CONTAINERS.items()),
]  # fmt: skip


@ways
@pytest.mark.parametrize("case", CASES, ids=lambda c: getattr(c, "__name__", "large_array"))
def test_a_change_captures_anew(case, way):
    global scale
    scale = 1.0
    f, change = case()
    captured = tg.function(f)
    for _ in range(CALLS):
        np.testing.assert_array_equal(way(captured), way(f))
    traces, replays = captured.stats.traces, captured.stats.replays
    assert traces >= 1
    assert replays >= 1
    change()
    if way is plain:
        assert "have changed: " in captured.explain(tg.asarray(X))
    for _ in range(CALLS):
        np.testing.assert_array_equal(way(captured), X * 3.0)
    assert captured.stats.traces > traces
    assert captured.stats.replays > replays
    scale = 1.0


def test_a_program_for_each_value_of_a_closure_variable():
    ws = [tg.Variable(np.ones(2) * k) for k in (1.0, 2.0, 3.0)]
    k = 0
    layer = tg.function(lambda h: h * ws[k])
    for _ in range(4):
        with tg.GradientTape() as tape:
            h = tg.asarray(np.ones(2))
            for k in range(3):  # noqa: B007
                h = layer(h)
            y = tg.sum(h)
        assert float(y) == 12.0
        assert [g.numpy()[0] for g in tape.gradient(y, ws)] == [6.0, 3.0, 2.0]
    assert (layer.stats.traces, layer.stats.replays, layer.stats.fallbacks) == (3, 9, {})


def test_a_method_of_an_object_that_counts():
    class Counting:
        def __init__(self):
            self.calls, self.log, self.seen, self.factor = 0, [], {}, 1.0

        @tg.function
        def step(self, x):
            self.calls += 1
            self.log.append(self.calls)
            self.seen[self.calls] = True
            return x * self.factor

    m = Counting()
    for _ in range(9):
        m.step(tg.asarray(X))
    assert (m.step.stats.traces, m.step.stats.replays, m.step.stats.fallbacks) == (1, 7, {})
    m.calls = 100  # its own
    m.step(tg.asarray(X))
    assert m.step.stats.traces == 1
    m.factor = 3.0
    assert m.step(tg.asarray(X)).numpy().tolist() == [3.0, 6.0]
    gone = weakref.ref(m)
    del m
    gc.collect()
    assert gone() is None


def test_assigning_to_a_variable_is_no_change():
    v = tg.Variable(1.0)
    f = tg.function(lambda x: x * v)
    for k in range(6):
        v.assign(float(k))
        assert f(tg.asarray(X)).numpy().tolist() == (X * k).tolist()
    assert f.stats.traces == 1


def test_equal_values_are_no_change_and_others_are():
    k = 1000.5
    f = tg.function(lambda x: x * k)
    for _ in range(CALLS):
        f(tg.asarray(X))
    k = float("1000.5")
    assert f.explain(tg.asarray(X)).startswith("hit")
    k = float("nan")
    for _ in range(2):
        f(tg.asarray(X))
    k = float("nan")
    assert f.explain(tg.asarray(X)).startswith("hit")
    k = 0.0
    f(tg.asarray(X))
    k = -0.0
    assert np.signbit(f(tg.asarray(X)).numpy()).all()


def test_a_function_goes_with_its_closure_without_the_collector():
    def make():
        a = np.ones(3)
        f = tg.function(lambda x: x * tg.asarray(a)[:2])
        for _ in range(CALLS):
            f(tg.asarray(X))
        return weakref.ref(a)

    gc.collect()
    gc.disable()
    try:
        assert make()() is None
    finally:
        gc.enable()
