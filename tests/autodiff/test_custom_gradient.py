"""custom_gradient: arguments, results, variables, captures, errors, methods, higher order, forward mode, memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from checks import bits_equal, c64, gradients, no_garbage, same, values, var64
from inside import weak

import tapegrad as tg
from tapegrad import errors, nest
from tapegrad.errors import StructureError


def given(*grads: Any) -> Callable:
    """A gradient function that gives multiples of the first cotangent (None: none)."""
    return lambda ct, *_: tuple(None if g is None else ct * g for g in grads)


# Arguments


def test_gradients_are_nested_as_the_arguments_or_flat() -> None:
    x, y = c64(2.0), c64(3.0)

    def of(rule: Any) -> Any:
        @tg.custom_gradient
        def f(p: Any, q: Any) -> Any:
            return p["a"] * p["b"] * q, rule

        return gradients(lambda *s: f({"a": x, "b": y}, x), [x, y], x)

    for right in ((10.0, 1.0, 100.0), ({"a": 10.0, "b": 1.0}, 100.0), [{"b": 1.0, "a": 10.0}, 100.0]):
        same(of(lambda d, right=right: right), [110.0, 1.0])
    for wrong in ({"a": 1.0, "b": 2.0, "q": 3.0}, (1.0, {"a": 1.0, "b": 2.0}), ((1.0, 2.0), 3.0), ([1.0], [2.0, 3.0])):
        with pytest.raises(StructureError) as e:
            of(lambda d, wrong=wrong: wrong)
        assert f"gradients is {nest.shown(wrong)}, that of the arguments ({{'a': *, 'b': *}}, *)" in str(e.value)

    @tg.custom_gradient
    def alone(p: Any) -> Any:
        return p["a"] * p["b"][0], lambda d: {"a": 10.0, "b": [1.0]}

    same(gradients(lambda *s: alone({"a": x, "b": [y]}), [x, y], x), [10.0, 1.0])


def test_tensors_by_keyword_take_part() -> None:
    @tg.custom_gradient
    def f(x: Any, k: Any = None, *, w: Any = None, note: Any = None) -> Any:
        return x * k * w, given(10.0, 20.0, 30.0)

    x, k, w = c64(2.0), c64(3.0), c64(4.0)
    for call in (
        lambda *s: f(x, k, w=w, note="n"),
        lambda *s: f(x, k=k, w=w),
        lambda *s: f(w=w, k=k, x=x, note=object()),
    ):
        same(gradients(call, [x, k, w], x), [10.0, 20.0, 30.0])

    @tg.custom_gradient
    def short(x: Any, *, k: Any) -> Any:
        return x * k, given(10.0)

    with pytest.raises(ValueError, match=r"1 gradients returned for 1 positional argument\(s\) and 1 keyword tensor"):
        gradients(lambda *s: short(x, k=k), [x, k], x)
    with pytest.raises(ValueError, match=r"0 gradients returned for 1 positional argument\(s\); return one"):
        gradients(lambda *s: tg.custom_gradient(lambda x: (x * 2.0, given()))(x), [x], x)

    @tg.custom_gradient
    def options(x: Any, **kw: Any) -> Any:
        return x * kw["b"] * kw["a"], given(1.0, 2.0, 3.0)

    same(gradients(lambda *s: options(x, b=w, a=k), [x, k, w], x), [1.0, 2.0, 3.0])


def test_objects_numbers_and_structures_among_the_arguments() -> None:
    marker = object()

    @tg.custom_gradient
    def f(none: Any, x: Any, k: Any, thing: Any, text: Any, tree: dict) -> Any:
        assert none is None and k == 5.0 and type(k) is float and thing is marker and text == "s"
        return x * k * tree["b"] * tree["a"][0], grads[0]

    x, a, b = c64(2.0), c64(3.0), c64(4.0)
    flat = given(None, 10.0, None, None, None, 20.0, 30.0)  # a number and a string count, as in TensorFlow
    short = given(10.0, None, None, 20.0, 30.0)  # None and objects need not
    shaped = lambda ct: (None, ct * 10.0, None, None, None, {"b": ct * 30.0, "a": [ct * 20.0]})
    for grad in (flat, short, shaped):
        grads = [grad]
        found = gradients(lambda *s: f(None, x, 5.0, marker, "s", {"b": b, "a": [a]}), [x, a, b], x)
        same(found, [10.0, 20.0, 30.0])
    for count in (4, 6, 8):
        grads = [lambda ct, n=count: (ct,) * n]
        with pytest.raises(ValueError, match=f"f: {count} gradients returned for 7 positional"):
            gradients(lambda *s: f(None, x, 5.0, marker, "s", {"b": b, "a": [a]}), [x, a, b], x)


def test_none_and_integers() -> None:
    @tg.custom_gradient
    def f(x: Any, y: Any, k: Any) -> Any:
        return x * y * k, given(10.0, None, 7.0)

    x, y, k = c64(2.0), c64(3.0), tg.asarray(3)
    same(gradients(lambda *s: f(x, y, k), [x, y], x), [10.0, None])
    same(gradients(lambda *s: f(x, y, k), [x, y], x, unconnected_gradients="zero"), [10.0, 0.0])
    alone = tg.custom_gradient(lambda x: (x * x, lambda ct: None))
    assert gradients(alone, [x]) == [None]


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        (lambda ct: tg.sum(ct), ValueError, r"gradient 0 has shape \(\), its argument \(2,\)"),
        (lambda ct: tg.stack([ct, ct]), errors.ShapeError, r"gradient 0 has shape \(2, 2\)"),
        (lambda ct: 7.0, ValueError, r"gradient 0 has shape \(\)"),
        (lambda ct: ct * 1j, TypeError, "gradient 0 is complex128, its argument float64"),
        (lambda ct: "s", TypeError, "str"),
        (lambda ct: object(), TypeError, "object"),
    ],
)
def test_gradients_that_do_not_fit(wrong: Callable, error: type, says: str) -> None:
    f = tg.custom_gradient(lambda x: (x * 1.0, wrong))
    with pytest.raises(error, match=says) as e:
        gradients(f, [c64([1.0, 2.0])])
    assert isinstance(e.value, errors.TapegradError)


def test_gradients_become_tensors_of_the_arguments_dtype() -> None:
    for grad in (lambda ct: np.float64(3.0), lambda ct: 3, lambda ct: tg.asarray(np.float16(3.0)), lambda ct: [3.0]):
        x = tg.constant(2.0)
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = tg.custom_gradient(lambda x, g=grad: (x * 1.0, g))(x)
        g = tape.gradient(y, x)
        assert isinstance(g, tg.Tensor) and g.dtype == np.float32 and float(g) == 3.0


# Results


def test_results_keep_their_structure_and_leaves_arrive_one_by_one() -> None:
    seen: list[Any] = []

    @tg.custom_gradient
    def f(x: tg.Tensor) -> Any:
        def grad(*cts: tg.Tensor) -> tg.Tensor:
            seen.append(values(list(cts)))
            return cts[0] + 10.0 * cts[1] + 100.0 * tg.sum(cts[2])

        return (x * x, [x * 3.0, {"k": tg.stack([x, x]), "i": tg.asarray([1, 2])}]), grad

    with tg.GradientTape(persistent=True) as tape:
        x = c64(2.0)
        tape.watch(x)
        y = f(x)
    assert type(y) is tuple and type(y[1]) is list and list(y[1][1]) == ["k", "i"]
    tape.gradient(y[0], x)
    cts = seen[-1]
    assert [c.dtype for c in cts] == [np.float64, np.float64, np.int64, np.float64]  # sorted keys: i, then k
    same(cts, [1.0, 0.0, [0, 0], [0.0, 0.0]])


def test_a_result_that_is_the_argument_is_another_value() -> None:
    f = tg.custom_gradient(lambda x: (x, lambda ct: ct * 5.0))
    x = c64(2.0)
    with tg.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = f(x)
        z = x * x
    assert y is not x
    same([tape.gradient(y, x), tape.gradient(z, x), tape.gradient([y, z], x)], [5.0, 4.0, 9.0])


@pytest.mark.parametrize(
    ("result", "error"),
    [
        (c64(1.0), TypeError), ((c64(1.0),), TypeError), ((c64(1.0), None), TypeError), ((c64(1.0), 3), TypeError),
        ((c64(1.0), len, len), TypeError), (None, TypeError), ((None, lambda ct: ct), ValueError),
    ],
)  # fmt: skip
def test_a_function_must_return_a_value_and_a_gradient_function(result: Any, error: type) -> None:
    def forgetful(x: Any) -> Any:
        return result

    with pytest.raises(error, match="forgetful") as e:
        tg.custom_gradient(forgetful)(c64(1.0))
    assert isinstance(e.value, errors.TapegradError)


# Variables


@pytest.mark.parametrize(
    "use",
    [
        lambda v: v * 1.0,
        lambda v: (v.numpy(), v * 1.0)[1],
        lambda v: tg.stop_gradient(v),
        lambda v: v.assign(1.0).numpy() * c64(1.0),
        lambda v: v.assign_add(1.0).numpy() * c64(1.0),
    ],
)
@pytest.mark.parametrize("watched", [True, False])
def test_variables_used_inside_must_be_accounted_for_at_the_call(use: Callable, watched: bool) -> None:
    v, x = var64(2.0, name="weight"), c64(3.0)

    def f(x: Any) -> Any:
        return x * use(v), lambda ct: ct

    with pytest.raises(TypeError, match="f reads the variables .weight.*'variables'"):
        if watched:
            gradients(tg.custom_gradient(f), [x])
        tg.custom_gradient(f)(x)


@pytest.mark.parametrize("kind", [list, tuple])
def test_variables_come_in_order_of_construction_and_get_their_gradients(kind: type) -> None:
    a, b, frozen, unread = var64(2.0), var64(3.0), var64(4.0, trainable=False), var64(5.0)

    @tg.custom_gradient
    def f(x: Any) -> Any:
        def grad(ct: Any, variables: Any = None) -> Any:
            assert [v is w for v, w in zip(variables, [a, b], strict=True)] == [True, True]
            return ct * 10.0, kind([ct * 20.0, None])

        return x * b * a * frozen, grad

    x = c64(1.0)
    with tg.GradientTape() as tape:
        tape.watch(x)
        y = f(x)
    assert [v is w for v, w in zip(tape.watched_variables(), [a, b], strict=True)] == [True, True]
    same(tape.gradient(y, [x, a, b, frozen, unread]), [10.0, 20.0, None, None, None])


def test_a_variable_as_argument_is_no_extra() -> None:
    v, w = var64(2.0), var64(3.0)

    @tg.custom_gradient
    def f(x: Any, v: Any, unread: Any) -> Any:
        return x * v, given(10.0, 20.0, 30.0)

    x = c64(3.0)
    with tg.GradientTape() as tape:
        tape.watch(x)
        y = f(x, v, w)
    same(tape.gradient(y, [x, v, w]), [10.0, 20.0, 30.0])

    @tg.custom_gradient
    def assigns(x: Any, v: Any) -> Any:
        v.assign(7.0)
        return x * v, given(10.0, 20.0)

    with tg.GradientTape() as tape:
        tape.watch(x)
        y = assigns(x, v)
    same([y, tape.gradient(y, v)], [21.0, 20.0])


@pytest.mark.parametrize(
    ("answer", "error", "says"),
    [
        (lambda ct: ct, TypeError, "must return"),
        (lambda ct: (ct, ct), TypeError, "must be a list, got Tensor"),
        (lambda ct: (ct, [ct, ct]), ValueError, "2 variable gradients for 1 variables"),
        (lambda ct: (ct, []), ValueError, "0 variable gradients for 1 variables"),
        (lambda ct: (ct, [tg.stack([ct, ct])]), ValueError, "gradient 1 has shape"),
    ],
)
def test_wrong_variable_gradients(answer: Callable, error: type, says: str) -> None:
    v = var64(2.0)
    f = tg.custom_gradient(lambda x: (x * v, lambda ct, variables: answer(ct)))
    with pytest.raises(error, match=says):
        gradients(f, [c64(3.0)])


def test_the_keyword_is_left_out_when_there_is_nothing_to_say() -> None:
    def grad(ct: Any, variables: Any = "unset") -> Any:
        assert variables == "unset"
        return ct * 10.0

    same(gradients(tg.custom_gradient(lambda x: (x * x, grad)), [c64(3.0)]), [10.0])


# Captures


def test_a_captured_watched_tensor_is_a_constant_with_a_warning() -> None:
    x, c = c64(2.0), c64(3.0)
    f = tg.custom_gradient(lambda q: (q * c, lambda ct: ct * 10.0))
    for watched in ([x, c], [c]):
        with tg.GradientTape() as tape:
            tape.watch(watched)
            with pytest.warns(errors.CapturedTensorWarning, match="1 watched tensor"):
                y = f(x)
        same(tape.gradient(y, [x, c]), [10.0 if len(watched) == 2 else None, None])
    double = tg.custom_gradient(lambda q: (q * 2.0, lambda ct: ct * 2.0))
    inside = tg.custom_gradient(lambda q: (q * double(c), lambda ct: ct * 10.0))
    with tg.GradientTape() as tape, pytest.warns(errors.CapturedTensorWarning, match="1 watched tensor"):
        tape.watch(c)
        inside(x)
    quiet = tg.custom_gradient(lambda q: (q * tg.stop_gradient(c), lambda ct: ct * 10.0))
    with tg.GradientTape() as tape:
        tape.watch([x])
        y = quiet(x)
    same(tape.gradient(y, x), 10.0)


# Robustness


def test_exceptions_leave_the_tape_usable() -> None:
    fail = [True]

    @tg.custom_gradient
    def f(x: Any) -> Any:
        if fail[0]:
            raise ZeroDivisionError

        def grad(ct: Any) -> Any:
            raise LookupError("mine")

        return x * 1.0, grad

    x = c64(3.0)
    with tg.GradientTape(persistent=True) as tape:
        tape.watch(x)
        with pytest.raises(ZeroDivisionError):
            f(x)
        fail[0] = False
        y, z = f(x), x * x
    with pytest.raises(LookupError, match="mine"):
        tape.gradient(y, x)
    same(tape.gradient(z, x), 6.0)


def test_decorating() -> None:
    class Scale:
        k = 3.0

        @tg.custom_gradient
        def __call__(self, x: Any) -> Any:
            """Scales."""
            return x * 1.0, lambda ct: ct * self.k

        @tg.custom_gradient()
        def again(self, x: Any, *, w: Any = None) -> Any:
            return x * 1.0, lambda ct, *_: (ct * self.k * 2.0, *([] if w is None else [ct]))

    s, x = Scale(), c64(2.0)
    same([gradients(f, [x]) for f in (s, s.again, lambda q: s.again(q, w=q))], [[3.0], [6.0], [7.0]])
    assert s.__call__.__doc__ == "Scales." and Scale.again.__name__ == "again" and callable(Scale.again.__wrapped__)


# Higher order and forward mode


def test_second_order_goes_through_the_rule_and_what_it_captured() -> None:
    @tg.custom_gradient
    def log1pexp(x: Any) -> Any:
        e = tg.exp(x)
        return tg.log(1 + e), lambda ct: ct * (1 - 1 / (1 + e))

    a = 0.3
    s = 1 / (1 + np.exp(-a))
    x = c64(a)
    with tg.GradientTape() as t3:
        t3.watch(x)
        with tg.GradientTape() as t2:
            t2.watch(x)
            with tg.GradientTape() as t1:
                t1.watch(x)
                y = log1pexp(x)
            first = t1.gradient(y, x)
        second = t2.gradient(first, x)
    third = s * (1 - s) * (1 - 2 * s)
    same([first, second, t3.gradient(second, x)], [s, s * (1 - s), third])
    with np.errstate(over="ignore"):
        same(gradients(log1pexp, [tg.constant(100.0)]), [1.0])


def test_outer_rules_win_and_nested_rules_serve_second_order() -> None:
    inner = tg.custom_gradient(lambda x: (x * 1.0, lambda ct: ct * np.nan))
    outer = tg.custom_gradient(lambda x: (inner(x), lambda ct: ct * 11.0))
    same(gradients(outer, [c64(1.0)]), [11.0])

    @tg.custom_gradient
    def op(x: Any) -> Any:
        def first(ct: Any) -> Any:
            slope = tg.custom_gradient(lambda q: (3.0 * q * q, lambda ct2: ct2 * 1000.0))
            return ct * slope(x)

        return x * x * x, first

    x = c64(2.0)
    with tg.GradientTape() as t2:
        t2.watch(x)
        with tg.GradientTape() as t1:
            t1.watch(x)
            y = op(x)
        d = t1.gradient(y, x)
    same([d, t2.gradient(d, x)], [12.0, 1000.0])


def test_forward_mode_uses_the_rule_where_it_is_linear() -> None:
    @tg.custom_gradient
    def f(x: Any, y: Any) -> Any:
        return (x * y, tg.sum(x)), lambda a, b: (a * 9.0 * y + b, a * x)

    x, y, t = c64([1.0, 2.0]), c64([3.0, 4.0]), c64([1.0, 10.0])
    out, pushed = tg.jvp(f, (x, y), (t, None))
    same([out, pushed], [([3.0, 8.0], 3.0), ([27.0, 360.0], 11.0)])
    same(tg.jvp(f, (x, y), (None, t))[1], ([1.0, 20.0], 0.0))
    both = tg.custom_gradient(lambda x, y: (x - y, lambda ct: (ct, ct)))  # one tensor is the gradient of two arguments
    same(tg.jvp(both, (x, y), (t, 2.0 * t))[1], [3.0, 30.0])
    clip = tg.custom_gradient(lambda x: (x * 1.0, lambda ct: tg.clip(ct, -1.0, 1.0)))
    square = tg.custom_gradient(lambda x: (x * 1.0, lambda ct: ct * abs(ct)))  # of slope 0 at zero
    for f, tangent in ((clip, t), (clip, t * 0.01), (square, t)):
        with pytest.raises(errors.NoGradientError, match="not linear"):
            tg.jvp(f, (x,), (tangent,))


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
@pytest.mark.parametrize(
    "rule",
    [
        lambda ct, m: m.clip(ct, -1.0, 1.0),
        lambda ct, m: ct / (1.0 + m.sqrt(m.sum(ct * ct))),
        lambda ct, m: m.tanh(ct),
        lambda ct, m: ct * m.abs(ct),
        lambda ct, m: 2.0 * ct,
    ],
    ids=["clip", "norm", "tanh", "square", "linear"],
)
def test_second_derivatives_through_any_rule_are_those_of_double_backward(rule: Any, scale: float) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    x, v, w = rng.normal(size=4), rng.normal(size=4) * scale, rng.normal(size=4) * 2.0

    class Theirs(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            return torch.sin(x)

        @staticmethod
        def backward(ctx: Any, ct: Any) -> Any:
            return rule(ct, torch) * ctx.saved_tensors[0]

    ours = tg.custom_gradient(lambda x: (tg.sin(x), lambda ct: rule(ct, tg) * x))
    at = torch.tensor(x, requires_grad=True)
    loss = (torch.tensor(w) * Theirs.apply(at) ** 3 + at**2).sum()
    (gradient,) = torch.autograd.grad(loss, at, create_graph=True)
    back = lambda u: torch.autograd.grad(gradient, at, torch.tensor(u), retain_graph=True)[0].numpy()
    f = lambda x: tg.sum(w * ours(x) ** 3 + x**2)
    same(tg.hvp(f, x, v), back(v), rtol=1e-12)
    same(tg.hvp(lambda x: (f(x["a"]), 7.0), {"a": x}, {"a": v}, has_aux=True), ({"a": back(v)}, 7.0), rtol=1e-12)
    same(tg.hvp(lambda a, b: f(a) + b * b, (x, 3.0), (v, None)), (back(v), 0.0), rtol=1e-12)
    same(tg.hessian(f)(x), np.stack([back(row) for row in np.eye(4)]), rtol=1e-12)


# Memory


def test_a_call_keeps_what_its_rule_captures_until_its_gradient() -> None:
    refs: dict[str, weakref.ref] = {}

    @tg.custom_gradient
    def f(x: Any) -> Any:
        used, unused = tg.exp(x), x + 1.0
        refs.update(used=weak(used), unused=weak(unused))
        return used + tg.sum(unused), lambda ct: ct * used

    x = c64(np.ones(5))
    with no_garbage():
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = f(x)
        assert refs["unused"]() is None and refs["used"]() is not None
        tape.gradient(y, x)
        assert refs["used"]() is None
        del y, tape


def test_gradients_pass_through() -> None:
    straight = tg.grad_pass_through(tg.round)
    x, v = c64([0.4, 1.6]), var64(3.0)
    with tg.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = straight(x)
        z = tg.grad_pass_through(lambda q, k, flag: {"a": tg.sign(q) * v, "b": k * 2.0})(x, flag=True, k=x * x)
        g = tape.gradient(tg.sum(y * y), x)
    same([y, g, tape.gradient(y, x, x)], [[0.0, 2.0], [0.0, 4.0], [0.4, 1.6]])
    same(tape.gradient([z["a"], z["b"]], [x, v], [x, x]), [values(x + 2.0 * x * x), None])
    same(tape.gradient(g, x), [2.0, 2.0])
    same(tg.jvp(straight, (x,), (np.array([5.0, 7.0]),)), ([0.0, 2.0], [5.0, 7.0]))
    same(tg.jacobian(straight)(x), np.eye(2))
    assert straight.__name__ == "round" and bits_equal(tg.recompute_grad(straight)(x), y)
    captured = tg.function(lambda q: tg.grad(lambda r: tg.sum(straight(r) * r))(q))
    same([captured(x) for _ in range(3)], [[0.4, 3.6]] * 3)
    assert captured.stats.replays


@pytest.mark.parametrize(
    ("f", "says"),
    [
        (lambda q: tg.sum(q), r"grad_pass_through: <lambda> takes tensors of shapes \[\(2,\)\] and returns \[\(\)\]"),
        (lambda q: (q, q), r"shapes \[\(2,\)\] and returns \[\(2,\), \(2,\)\]; gradients pass only"),
        (lambda q: (), r"returns \[\]"),
    ],
)
def test_gradients_pass_only_where_results_match(f: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        tg.grad_pass_through(f)(c64([1.0, 2.0]))
