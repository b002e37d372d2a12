"""What a random program may do: its steps, its own rules, and the ways in which it is differentiated.

A step is a line of Python on values of the program.  There are no shape rules here: whoever draws a program runs each
line on the reference, and takes another one where that fails.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

RULES: dict[str, str] = {
    "scaled": """@tg.custom_gradient
def scaled(a):
    return tg.tanh(a), lambda ct: ct * 3.0""",
    "own_rule": """@tg.custom_gradient
def own_rule(a):
    y = tg.tanh(a)
    return y, lambda ct: ct * (1.0 - y * y)""",
    "same_value": """@tg.custom_gradient
def same_value(a):
    return a, lambda ct: ct * a""",
    "two_results": """@tg.custom_gradient
def two_results(a, b):
    y = tg.sin(a)
    return (y * b, a + b), lambda ct, du: (ct * b * 0.5 + du, du * y - ct)""",
    "one_sided": """@tg.custom_gradient
def one_sided(a, b):
    return tg.sin(a) * b, lambda ct: (ct * b, None)""",
    "with_variable": """@tg.custom_gradient
def with_variable(a):
    return tg.tanh(a) * v2, lambda ct, variables=None: (ct * 2.0, [tg.sum(ct * a)])""",
    "clipped": """@tg.custom_gradient
def clipped(a):
    return a * 2.0, lambda ct: tg.tanh(ct)""",
    "cubed": """@tg.primitive
def cubed(p): return p * p * p
cubed.defvjp(lambda ct, p: ct * 3.0 * p * p)""",
    "rising": """@tg.primitive
def rising(p): return np.exp(-p * p)
rising.defjvp(lambda t, out, p: t * out * p * -2.0)""",
    "crooked": """@tg.primitive
def crooked(p, q): return np.tanh(p) * q
crooked.defvjp(lambda ct, q: ct * q * 0.5, lambda ct, out: ct * out)""",
    "slope": """def slope(f, q):
    with tg.GradientTape() as inner:
        inner.watch(q)
        y = f(q)
    return inner.gradient(y, q, unconnected_gradients="zero")""",
}
"""Functions that a program may bring along; a rule need not be the derivative."""


@dataclass(frozen=True)
class Op:
    """A step: its text with ``{0}``, ``{1}`` for values; ``sort`` of each of them; what it is not fit for.

    ``sorts``: ``t`` any tensor, ``s`` a tensor of the shape of the first, ``v`` a variable.  ``tags``: "draw" (another
    run draws other numbers), "escape" (a value leaves the function), "state" (a variable changes), "crooked" (a rule is
    not the derivative), "tape" (names the tape), "round" (equal to rounding only), "nonlinear" (of cotangents: no
    forward mode), "look" (at values), "host" (Python draws a number), "array" (given away), "complex", "costly".
    """

    kind: str
    text: str
    sorts: str = "t"
    tags: tuple[str, ...] = ()
    results: int = 1
    weight: float = 1.0


def _family(kind: str, sorts: str, *texts: str, tags: tuple[str, ...] = (), weight: float = 1.0) -> list[Op]:
    return [Op(kind, text, sorts, tags, weight=weight / len(texts)) for text in texts]


_DTYPE = "dtype=str({0}.dtype)"
OPS: list[Op] = [
    *_family(
        "elementwise",
        "t",
        "tg.tanh({0})",
        "tg.sin({0}) * 0.9",
        "tg.exp(-({0} * {0}))",
        "tg.sqrt({0} * {0} + 0.5)",
        "tg.sigmoid({0}) + {0}",
        "tg.cos({0})",
        "{0} * 0.5 + 0.25",
        "tg.tanh({0}) * {0}",
        "1.0 / (1.0 + {0} * {0})",
        "tg.log({0} * {0} + 1.0)",
        "tg.maximum({0}, 0.1)",
        weight=4,
    ),
    *_family(
        "broadcast",
        "tt",
        "{0} + {1}",
        "{0} - {1} * 0.5",
        "tg.tanh({0}) * {1}",
        "{0} / (1.0 + {1} * {1})",
        "tg.where({0} > {1}, {0}, tg.cos({1}))",
        "tg.maximum({0}, {1})",
        weight=4,
    ),
    *_family("variable", "tv", "{0} * {1}", "tg.tanh({0} + {1})", "{1} - {0}", weight=2),
    *_family(
        "barrier",
        "t",
        "tg.softmax({0})",
        "tg.softmax(tg.softmax({0}) * 3.0) + {0}",
        "tg.sort({0}, axis=-1)",
        "tg.cumulative_sum({0}, axis=0) * 0.3",
        "tg.layer_norm({0}, v0, v4)",
        weight=3,
    ),
    *_family("product", "t", "{0} @ v1", "tg.matmul(tg.softmax({0}), v1)", "tg.tanh({0} @ v1) @ v1.T", weight=2),
    Op("product", "tg.tanh(({0} @ {1}) * 0.2)", "tt"),
    *_family(
        "reduction",
        "t",
        "tg.sum({0}, axis=0)",
        "tg.sum({0}, axis=-1, keepdims=True) * 0.2",
        "tg.mean({0}, axis=0)",
        "tg.tanh(tg.sum({0}))",
        "tg.mean({0}, axis=-1)",
        "tg.sum({0} * {0}, axis=0, keepdims=True)",
        weight=2,
    ),
    *_family(
        "view",
        "t",
        "{0}[1:]",
        "{0}[::2]",
        "{0}[..., ::-1]",
        "{0}[..., 1:]",
        "{0}[-1]",
        "{0}[:, :1]",
        "{0}.T",
        "tg.permute_dims({0}, (1, 0))",
        "tg.reshape({0}, (-1,))",
        "tg.flip({0}, axis=0)",
        "{0}[:1, :1]",
        "tg.reshape(tg.permute_dims({0}, (1, 0)), (-1,))",
        "{0}[None, 0]",
        weight=2.5,
    ),
    *_family(
        "joined",
        "ts",
        "tg.concat([{0}[1:], {1}[:1]], axis=0)",
        "tg.concat([tg.tanh({0})[..., 1:], {1}[..., :1]], axis=-1)",
        "tg.sum(tg.stack([{0}, {1}, {0}]), axis=0) * 0.4",
        "tg.roll({0}, 1, axis=0) * {1}",
        "tg.take_along_axis({0}, tg.argsort({1}, axis=0), axis=0)",
    ),
    *_family("broadcast to", "tt", "tg.broadcast_to({0}, {1}.shape)", "tg.broadcast_to({0}, {1}.shape) * tg.sin({1})"),
    *_family(
        "no-op",
        "t",
        "tg.reshape({0}, {0}.shape)",
        "{0}[...]",
        "{0}[:]",
        "tg.permute_dims({0}, tuple(range({0}.ndim)))",
        "tg.broadcast_to({0}, {0}.shape)",
        "tg.squeeze({0}, axis=())",
        "tg.pad({0}, ((0, 0),) * {0}.ndim)",
        "tg.roll({0}, 0, axis=0)",
        "tg.sum({0}, axis=())",
        "tg.nn.functional.dropout({0}, 0.0)",
        "+{0}",
        "tg.concat([{0}], axis=0)",
        "tg.moveaxis({0}, 0, 0)",
        "{0}.T.T",
        weight=2,
    ),
    *_family("name", "t", "tg.name(tg.tanh({0}), 'n')", "tg.name(tg.softmax({0}), 'n')"),
    *_family(
        "stop_gradient",
        "tt",
        "tg.stop_gradient({0})",
        "{1} * tg.stop_gradient({0})",
        "tg.stop_gradient(tg.softmax({0})) * {1}",
        "tg.stop_gradient(tg.tanh({0})) + {1}",
        tags=("crooked",),
        weight=1.5,
    ),
    *_family("custom_gradient", "t", "scaled({0})", "same_value({0})", "scaled(tg.softmax({0}))", tags=("crooked",)),
    *_family("custom_gradient", "t", "own_rule({0})", "own_rule(tg.softmax({0})) * {0}", weight=0.5),
    Op("custom_gradient", "two_results({0}, {1})", "ts", ("crooked",), results=2, weight=0.5),
    Op("custom_gradient", "one_sided({0}, {1})", "ts", ("crooked",), weight=0.4),
    Op("custom_gradient", "with_variable({0})", "t", ("crooked",), weight=0.5),
    Op("custom_gradient", "clipped({0})", "t", ("crooked", "nonlinear"), weight=0.4),
    *_family("primitive", "t", "cubed(tg.tanh({0}))", "rising({0})", weight=0.8),
    Op("primitive", "crooked({0}, {1})", "ts", ("crooked",), weight=0.4),
    *_family("read", "v", "{0}.read_value()", "{0}.value()", "tg.asarray({0})", weight=1.5),
    *_family("read before", "t", "{0} * before", "tg.tanh(before) + {0}", weight=0.5),
    Op("stop of a variable", "tg.stop_gradient({0}) * {1}", "vt", ("crooked",), weight=0.4),
    *_family(
        "assign",
        "w",
        "{0}.assign(tg.tanh({1}))",
        "{0}.assign({1})",
        "{0}.assign_add({1} * 0.1)",
        "{0}.assign_sub(tg.softmax({1}))",
        "{0}.assign(tg.softmax({1}))",
        tags=("state", "crooked"),
        weight=1.5,
    ),
    Op("hold", "held.append({0})", "t", ("escape",), results=0, weight=0.5),
    *_family(
        "export",
        "t",
        "exported.append(np.asarray(tg.stop_gradient({0})))",
        "exported.append({0}.numpy())",
        tags=("escape", "array"),
        weight=0.6,
    ),
    Op(
        "export",
        "exported.append(np.from_dlpack(tg.stop_gradient({0})))",
        "t",
        ("escape", "array"),
        results=0,
        weight=0.3,
    ),
    Op("release", "held.clear()", "", ("escape",), results=0, weight=0.2),
    Op("dead", "tg.exp(tg.tanh({0}) @ v1)", "t", weight=0.3),
    *_family(
        "inner tape",
        "ts",
        "slope(lambda q: tg.sum(tg.sin(q) * tg.softmax(q) * {1}), {0})",
        tags=("costly",),
        weight=0.7,
    ),
    *_family(
        "inner jvp",
        "ts",
        "tg.jvp(lambda q: tg.softmax(q) * tg.sin(q), ({0},), ({1},))[1]",
        tags=("costly",),
        weight=0.5,
    ),
    Op("inner vjp", "tg.vjp(lambda q: tg.tanh(q) * q, {0})[1]({1})[0]", "ts", ("costly",), weight=0.5),
    Op(
        "inner hvp",
        "tg.hvp(lambda q: tg.sum(tg.sin(q) * q * tg.stop_gradient(q)), {0}, {1})",
        "ts",
        ("costly", "crooked"),
        weight=0.4,
    ),
    *_family(
        "inner vmap",
        "t",
        "tg.vmap(lambda q: tg.tanh(q) * tg.sum(q))({0})",
        "tg.vmap(tg.grad(lambda q: tg.sum(tg.sin(q) * q)))({0})",
        tags=("costly",),
        weight=0.6,
    ),
    *_family(
        "scan",
        "t",
        "tg.scan(lambda s, q: (tg.tanh(s + q), s * q), tg.tanh({0}[0]), {0})[0]",
        "tg.scan(lambda s, q: (tg.tanh(s + q), s * q), {0}[-1], {0})[1]",
        tags=("costly",),
        weight=0.6,
    ),
    *_family(
        "loop",
        "ts",
        "run.loop(lambda s: tg.tanh(s @ v1) + {1} * 0.1, {0}, 3)",
        "run.loop(lambda s: tg.tanh(s) * 0.9 + {1}, {0}, 4)",
        "run.loop(lambda s: tg.sin(s * v2) * tg.softmax(s), {0}, 5)",
        tags=("costly",),
        weight=0.6,
    ),
    Op(
        "reversible",
        "tg.reversible(lambda q: tg.tanh(q) * 0.5, lambda q: tg.sin(q) * 0.5)({0}, {1})",
        "ts",
        ("round", "costly"),
        results=2,
        weight=0.2,
    ),
    *_family(
        "draw",
        "t",
        "{0} * gen.bernoulli({0}.shape, 0.7, " + _DTYPE + ")",
        "{0} + gen.normal({0}.shape, " + _DTYPE + ") * 0.2",
        tags=("draw",),
        weight=0.8,
    ),
    Op("dropout", "tg.nn.functional.dropout({0}, 0.4)", "t", ("draw", "global"), weight=0.6),
    Op("host draw", "{0} * float(np.random.uniform(0.5, 1.5))", "t", ("draw", "global", "host"), weight=0.3),
    Op("complex", "tg.real(tg.exp({0} * 1j) * ({1} + 0.5j))", "ts", ("complex",), weight=0.4),
    Op("control flow", "{0} * (1.5 if tg.sum({0}) > 0.1 else 0.5)", "t", ("look",), weight=0.4),
    Op("watch", "tape.watch({0})", "t", ("tape",), results=0, weight=0.5),
]


@dataclass(frozen=True)
class Way:
    """How a program is differentiated: its text, the tags of steps that do not fit, and how often it is taken.

    A rule that is not linear in the cotangent fits no second derivative: that would depend on what is added up first.
    """

    text: Callable[[dict[str, Any]], str]
    without: tuple[str, ...] = ()
    weight: float = 1.0
    order: int = 1


_END = """
run.reach(3)
return [found, held, exported]"""
_LOSS = "lambda x: tg.sum(forward(x)[0][0])"
_VARIABLES = "v0, v1, v2, v3, v4"


def _tape(o: dict[str, Any]) -> str:
    watch = "tape.watch([x, v3, v4])" if o.get("watch all") else "tape.watch(x)"
    lines = [
        f"with tg.GradientTape(persistent={o.get('persistent', False)}, "
        f"watch_accessed_variables={not o.get('only watched', False)}) as tape:",
        f"    {watch}",
        "    targets, handles = forward(x)",
    ]
    if o.get("persistent") and o.get("inside"):
        lines.append(f"    first = tape.gradient(targets, [x, {_VARIABLES}, *handles], unconnected_gradients='zero')")
        lines.append("    targets = [*targets, tg.sum(first[0] * first[0])]")
        lines.append("    handles = []  # a rule may read what it likes: second derivatives in them say nothing")
    weights = ", output_gradients=[tg.tanh(t) for t in targets]" if o.get("weights") else ""
    asked = f"targets, [x, {_VARIABLES}, *handles]{weights}, unconnected_gradients='zero'"
    lines += ["run.reach(2)", f"found = [targets, tape.gradient({asked})]"]
    if o.get("persistent"):
        lines.append(
            f"found.append(tape.gradient(targets[0], [v0, x, *handles], unconnected_gradients={o['unconnected']!r}))"
        )
        lines.append("del targets")
    return "\n".join(lines) + "\ndel tape" + _END


def _second(o: dict[str, Any]) -> str:
    return f"""with tg.GradientTape() as outer:
    outer.watch(x)
    with tg.GradientTape() as tape:
        tape.watch(x)
        targets, handles = forward(x)
    slopes = tape.gradient(targets, [x, v0, *handles], unconnected_gradients='zero')
    penalty = tg.sum(slopes[0] * slopes[0]) + tg.sum(slopes[1] * slopes[1])
run.reach(2)
found = [slopes, outer.gradient(penalty, [x, {_VARIABLES}], unconnected_gradients='zero')]{_END}"""


def _third(o: dict[str, Any]) -> str:
    return f"""with tg.GradientTape() as third:
    third.watch(x)
    with tg.GradientTape() as second:
        second.watch(x)
        with tg.GradientTape() as tape:
            tape.watch(x)
            targets, handles = forward(x)
        one = tape.gradient(targets, x, unconnected_gradients='zero')
    two = second.gradient(tg.sum(one * one), x, unconnected_gradients='zero')
    total = tg.sum(two * two)
run.reach(2)
found = [one, two, third.gradient(total, [x, v0, v1], unconnected_gradients='zero')]{_END}"""


def _two_tapes(o: dict[str, Any]) -> str:
    return f"""with tg.GradientTape() as tape:
    tape.watch(x)
    with tg.GradientTape(persistent=True, watch_accessed_variables=False) as two:
        two.watch([v0, v1])
        targets, handles = forward(x)
    found = [two.gradient(targets[0], [v0, v1, *handles], unconnected_gradients='zero')]
    targets.append(tg.sum(found[0][0] * found[0][0]))
run.reach(2)
found.append(two.gradient(targets[0], v0, unconnected_gradients='zero'))
del two
found.append(tape.gradient(targets, [x, v0, v2], unconnected_gradients='zero')){_END}"""


def _jacobian(o: dict[str, Any]) -> str:
    return f"""with tg.GradientTape() as tape:
    tape.watch(x)
    targets, handles = forward(x)
    target = tg.reshape(targets[0], (-1,))[:4]
run.reach(2)
found = [tape.jacobian(target, {o.get("source", "x")}, unconnected_gradients='zero')]{_END}"""


def _function(text: str) -> Callable[[dict[str, Any]], str]:
    return lambda o: "run.reach(2)\n" + text + _END


WAYS: dict[str, Way] = {
    "tape": Way(_tape, weight=6),
    "second order": Way(_second, ("nonlinear",), weight=2, order=2),
    "third order": Way(_third, ("nonlinear", "costly"), weight=0.3, order=3),
    "two tapes": Way(_two_tapes, weight=1.5, order=2),
    "jacobian": Way(_jacobian, ("nonlinear",)),
    "grad": Way(_function(f"found = [tg.value_and_grad({_LOSS})(x)]"), ("tape", "array")),
    "vjp": Way(
        _function("y, pull = tg.vjp(lambda x: forward(x)[0][0], x)\nfound = [y, pull(y), pull(tg.tanh(y))]"),
        ("tape", "array"), weight=0.7,
    ),
    "jvp": Way(_function("found = [tg.jvp(lambda x: forward(x)[0], (x,), (d,))]"), ("tape", "nonlinear", "array")),
    "hvp": Way(_function(f"found = [tg.hvp({_LOSS}, x, d)]"), ("tape", "nonlinear", "array"), weight=3, order=2),
    "reverse over forward": Way(
        _function(f"found = [tg.grad(lambda x: tg.sum(tg.jvp({_LOSS}, (x,), (d,))[1]))(x)]"),
        ("tape", "nonlinear", "array"), order=2,
    ),
    "forward over forward": Way(
        _function(f"found = [tg.jvp(lambda x: tg.jvp({_LOSS}, (x,), (d,))[1], (x,), (d,))]"),
        ("tape", "nonlinear", "array"), weight=0.7, order=2,
    ),
    "forward over reverse over forward": Way(
        _function(f"found = [tg.jvp(tg.grad(lambda x: tg.jvp({_LOSS}, (x,), (d,))[1]), (x,), (d,))]"),
        ("tape", "nonlinear", "array", "costly"), weight=1, order=3,
    ),
    "hvp with a tape": Way(
        lambda o: f"""def gradient(x):
    with tg.GradientTape() as tape:
        tape.watch(x)
        loss = tg.sum(forward(x)[0][0])
        run.reach(2)
    return tape.gradient(loss, [x, v0], unconnected_gradients='zero')
found = [tg.jvp(gradient, (x,), (d,))]{_END}""",
        ("tape", "nonlinear", "array"), weight=1.5, order=2,
    ),
    "vmap of grad": Way(
        _function(f"found = [tg.vmap(tg.grad({_LOSS}))(tg.stack([x, d, x * 0.5]))]"),
        ("tape", "state", "escape", "draw", "look", "round"), weight=1.5,
    ),
    "vmap of hvp": Way(
        _function(f"found = [tg.vmap(lambda x: tg.hvp({_LOSS}, x, d))(tg.stack([x, d]))]"),
        ("tape", "state", "escape", "draw", "look", "nonlinear", "array", "round", "costly"), weight=0.7, order=2,
    ),
    "jacobian of a function": Way(
        _function("found = [tg.jacobian(lambda x: tg.reshape(forward(x)[0][0], (-1,))[:3])(x)]"),
        ("tape", "nonlinear", "array"), weight=0.7,
    ),
}  # fmt: skip
