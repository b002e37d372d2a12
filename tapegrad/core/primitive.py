"""Primitives: kinds of operation, each with all its rules in one declaration.

How a primitive is declared, and what is derived from the declaration:

* ``elementwise``: the partial derivatives (or diagonal rules) give VJP, JVP and the fused kernel;
* ``linear``: its transpose is the VJP, the operation itself is the JVP;
* ``bilinear``: its transposes in each operand give the VJP, the operation itself (twice) the JVP;
* ``general``: explicit VJP and JVP rules.

Its class says how it runs: :class:`Elementwise`, :class:`View`, or a :class:`Barrier`.

Rules are written in tensors, so higher order is free.  **A rule's parameter names declare what it reads**: ``ct`` or
``t`` (cotangent, tangent), ``out`` (the result), an operand's name (its value), ``NAME_aval`` or ``out_aval`` (an aval,
which retains nothing), ``xs_aval``/``i`` (avals of all operands, then of the result, and the operand's position, for
variadic operations),
``*rest`` (the values of all operands after the first), or a parameter of the operation.  A rule that names ``wanted``,
positions, serves all operands: it yields a list.  What no rule names cannot be retained.  Inside a ``linear`` transpose
an operand's own name is its aval: a linear rule *cannot* retain its input.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Literal, TypedDict, TypeVar, Unpack

from tapegrad.core.aval import ShapedArray
from tapegrad.core.protocols import Effect
from tapegrad.core.rule import Function, Params, Plan, Rule
from tapegrad.device.dtypes import accumulator

T = TypeVar("T")
REGISTRY: dict[str, Primitive] = {}


@dataclass(frozen=True)
class Sample:
    """A good test input: shapes (or arrays, or nested lists) of the operands, and parameters."""

    operands: tuple[Any, ...]
    params: Params
    domain: tuple[float, float] | None = None

    def __init__(self, *operands: object, domain: tuple[float, float] | None = None, **params: object) -> None:
        vars(self).update(operands=operands, params=params, domain=domain)  # it is frozen


class Bad(Sample):
    """A test input that must raise ``error``."""

    def __init__(self, *operands: object, error: type[Exception], **params: Any) -> None:
        super().__init__(*operands, **params)
        vars(self)["error"] = error


class Linearity(Enum):
    """The operands in which a primitive is linear."""

    NONE = "general"
    FIRST = "linear"  # in its first operand
    ALL = "variadic linear"  # in all operands together, however many
    EACH = "bilinear"  # in each of its two operands


@dataclass(eq=False, repr=False, kw_only=True)
class Primitive:
    """A kind of operation: what all of them have."""

    name: str
    operands: tuple[str, ...]
    infer: Callable[..., ShapedArray]
    """``infer(*avals, **params) -> aval``; raises errors that name the operation, the shapes and the fix."""
    vjp: tuple[Rule | None, ...] | Rule = ()
    jvp: tuple[Rule | None, ...] | None = None
    linearity: Linearity = Linearity.NONE
    holomorphic: bool = True
    """Of complex results: whether VJP rules are those of a holomorphic function, written for the plain transpose (the
    walk conjugates around them); False: they take and give cotangents of a real loss, as TensorFlow defines them."""
    lift: Callable[[Params, int], Params] | None = None
    """Parameters of the same operation on operands with one more leading axis of length ``n``; None: run row by row."""
    batch: Function | Literal["all"] | None = None
    """How ``vmap`` applies it to operands some of which have one more leading axis: ``"all"``: by ``lift``, once all of
    them have it; or ``batch(operands, companions, n, params) -> tensor``: a companion is the operand with that axis, or
    None (the result None: example by example).  With one operand, or the first alone batched of a linear one, ``lift``
    is enough."""
    samples: tuple[Sample, ...] = ()
    doc: str = ""
    domain: tuple[float, float] = (-2.0, 2.0)
    plans: dict[tuple[int, int], Plan] = field(default_factory=dict)
    given: tuple[bool, bool] = field(default=(False, False), init=False)
    """Whether an array to write is made before it is computed: on an eager device, on a lazy one."""
    view: ClassVar[bool] = False
    """Whether the result is the operand's memory, and owns no bytes."""
    draws: bool = False  # random numbers: of the stream ``key``, from ``counter`` on
    beside: Primitive | None = None
    """Its by-product: a primitive of some of the same operands, without rules, whose value ``impl`` and ``cuda`` have
    at hand, and write into ``beside=`` where they are given it (``ops/apply.py``, ``by_product``)."""
    effect: Effect | None = None
    """What an application does besides yielding a value: other processes take part (see ``Effect``)."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__.lower()} primitive {self.name}>"

    @property
    def differentiable(self) -> bool:
        """Whether some operand has a rule."""
        return bool(self.vjp)

    @property
    def is_linear(self) -> bool:
        """Whether the primitive itself pushes tangents forward: linear in its first operand, or in all together."""
        return self.linearity in (Linearity.FIRST, Linearity.ALL)

    def apart(self, inputs: tuple[T, ...]) -> tuple[tuple[T, ...], T | None]:
        """The operands, and its by-product if that is given as one more."""
        count = len(self.operands)
        return (inputs, None) if self.beside is None or len(inputs) == count else (inputs[:count], inputs[count])

    def rule(self, position: int) -> Rule | None:
        """The VJP rule of an operand (for elementwise: its partial or diagonal rule)."""
        if isinstance(self.vjp, Rule):
            return self.vjp
        return self.vjp[position] if position < len(self.vjp) else None

    def plan(self, mask: int, count: int) -> Plan:
        """The plan for tracked operands ``mask`` (bits) of ``count``; made once."""
        found = self.plans.get((mask, count))
        if found is None:
            tracked = [i for i in range(count) if mask >> i & 1]
            pulls = [(i, rule) for i in tracked if (rule := self.rule(i)) is not None]
            slots = dict.fromkeys(slot for _, rule in pulls for slot in rule.slots_of(count))
            lacking = tuple(i for i in tracked if self.rule(i) is None)
            found = self.plans[mask, count] = Plan(tuple(slots), tuple(pulls), lacking)
        return found

    def compute(self, xp: Any, arrays: Sequence[object], params: Params, aval: ShapedArray, out: object) -> Any:
        """The value, of ``aval``, by functions of ``xp``: in ``out`` if that is :attr:`given`, else where they say."""
        raise NotImplementedError


@dataclass(eq=False, repr=False, kw_only=True)
class Elementwise(Primitive):
    """A function of each element: lazy, so a kernel takes it in."""

    impl: Function
    """``impl(xp, out, *arrays)`` writes into ``out``."""
    ufunc: str | None = None
    """The ufunc of the namespace that does it all (so it may write over an operand)."""
    formula: Function | None = None
    """``formula(xp, *arrays)``: the value by operators and ufuncs of the namespace alone, whatever the elements are, so
    that a region can take in its steps; these report no floating-point errors."""
    exact: bool = True
    """Whether the result's bits are independent of how operands lie in memory (false for transcendental functions)."""
    converts: bool = False
    """Whether the result is the operand itself, rounded once to the result's dtype."""
    costly: bool = False
    """Whether computing it on a CPU takes ten times as long as writing it and reading it back (see
    ``engine/region.py``)."""
    widens: bool = True
    """Whether rules for half types run in float32 and round their result once
    (not needed where a rule rounds at most once anyway)."""
    cxx: str | None = None
    """The expression in CUDA C++ of ``{x}``, ... (operands' names), ``{type}`` (the first operand's compute type) and
    ``{out_type}``; see ``kernels/scalar.cuh``."""
    memo: dict[Any, Site] = field(default_factory=dict)
    """Sites, by the operands' avals."""

    def __post_init__(self) -> None:
        self.given = (True, True)

    def compute(self, xp: Any, arrays: Sequence[object], params: Params, aval: ShapedArray, out: object) -> Any:
        """By ``impl``."""
        self.impl(xp, out, *arrays)
        return out


class Identity(Elementwise):
    """Its result is the operand."""

    view = True


@dataclass(eq=False, repr=False, kw_only=True)
class View(Primitive):
    """Another look at the operand's memory."""

    impl: Function
    """``impl(xp, array, **params) -> array``."""
    copies: bool = False
    """Whether it has to copy where the operand's memory does not allow a view."""
    view = True


@dataclass(eq=False, repr=False, kw_only=True)
class Barrier(Primitive):
    """What runs when it is recorded, and makes an array."""

    flops: Callable[..., int] | None = None
    """``flops(*avals, **params)``: arithmetic beyond moving operands and result (see ``tracing/costs.py``)."""


@dataclass(eq=False, repr=False, kw_only=True)
class Reduction(Barrier):
    """A ufunc's ``reduce`` over the axes ``axis``: it may take a region as its prologue."""

    ufunc: str

    def compute(self, xp: Any, arrays: Sequence[object], params: Params, aval: ShapedArray, out: object) -> Any:
        """By the library, in a wide enough dtype."""
        reduce, dtype = getattr(xp, self.ufunc).reduce, accumulator(aval.dtype)
        return reduce(arrays[0], axis=params["axis"], dtype=dtype, keepdims=params.get("keepdims", False))


@dataclass(eq=False, repr=False, kw_only=True)
class Drawn(Barrier):
    """Random numbers, without operands: on CUDA every kernel that needs them draws them again."""

    impl: Function  # ``impl(xp, **params) -> array``
    template: str
    """The template of ``kernels/drawn.cuh`` that draws packs."""
    draws: bool = True

    def compute(self, xp: Any, arrays: Sequence[object], params: Params, aval: ShapedArray, out: object) -> Any:
        """By ``impl``."""
        return self.impl(xp, **params)


@dataclass(eq=False, repr=False, kw_only=True)
class Opaque(Barrier):
    """Arrays computed from arrays by code that the engine does not see into."""

    impl: Function
    """``impl(xp, *arrays, **params) -> array``."""
    into: bool = False
    """Whether ``impl`` takes ``out=``, an array from the device's pool."""
    cuda: Function | None = None
    """``cuda(device, *arrays, out=, **params)`` runs whole kernels; None: ``impl`` serves with CuPy, too."""
    bound: Function | None = None
    """``bound(*arrays, out=, **params)``: the call (``engine.work.Call``) that ``impl`` comes to for these very arrays,
    of NumPy's, in a replay, in which NumPy's library has one thread; None: there is none."""
    calls: Function | None = None
    """``calls(xp, *arrays, out=, **params)``: the calls of functions of ``xp`` that ``impl`` consists of."""
    temporaries: Function | None = None
    """``temporaries(aval, *arrays, **params)``: shapes and dtypes of the arrays that ``cuda`` is lent, as
    ``temporaries=``, for a result of ``aval``; ``impl`` of a primitive with an effect is lent them, too."""
    parts: bool = False  # whether the kernel that writes the result writes and reads the temporaries, and no other
    scratch: Function | None = None
    """``scratch(aval, *arrays, **params)``: bytes that ``impl`` takes for itself at most, and gives back."""
    dry: Function | None = None
    """``dry(*arrays, out=, **params) -> array``: what a dry run on a lazy device calls in place of ``impl``: it reports
    the passes of ``impl`` and returns the abstract array ``out``, or what ``impl`` would return."""
    calls_user: bool = False  # whether impl calls a function of the user's, which may have effects
    gathers: bool = False  # whether it reads of its first operand no more than it writes
    planned: bool = False
    """Whether CuPy makes a plan for ``impl`` whose memory it may free later: a CUDA graph would still use it."""

    @property
    def at_once(self) -> bool:
        """Whether it must be done where the program says, and once: it is neither postponed nor repeated."""
        return self.calls_user or self.effect is not None

    def __post_init__(self) -> None:
        self.given = (self.into, self.into or self.cuda is not None)

    def compute(self, xp: Any, arrays: Sequence[object], params: Params, aval: ShapedArray, out: object) -> Any:
        """By ``impl``."""
        if self.into:
            self.impl(xp, *arrays, out=out, **params)
            return out
        return self.impl(xp, *arrays, **params)

    def follow(self, device: object, arrays: Sequence[object], params: Params, out: object) -> Any:
        """What a dry run on a lazy device has: ``out``, or what ``dry`` says; kernels tell of their passes."""
        if self.dry is not None:
            return self.dry(*arrays, out=out, **params)
        if self.cuda is not None:
            self.cuda(device, *arrays, out=out, **params)
        return out


class Site:
    """An elementwise primitive with operands of certain avals.

    ``aval``: the result's; ``ufunc``: what to call at once (None: the primitive has no ufunc of its own, or the result
    is big enough to be deferred); ``pooled``: whether it is worth a block of the device's pool;
    ``plans``: by mask of tracked operands (None: nothing to differentiate); ``read_bytes``: of its operands, if none is
    broadcast or comes twice.
    """

    __slots__ = ("aval", "avals", "plans", "pooled", "prim", "read_bytes", "small", "ufunc")

    def __init__(self, prim: Elementwise, avals: tuple[ShapedArray, ...], aval: ShapedArray, small: bool) -> None:
        self.prim = prim
        self.avals = avals
        self.aval = aval
        self.read_bytes = sum([a.nbytes for a in avals])
        self.small = small and not prim.view
        self.pooled = aval.nbytes >= aval.device.least_pooled
        self.ufunc = getattr(aval.device.xp, prim.ufunc) if small and prim.ufunc is not None else None
        self.plans: list[Plan] | None = None
        if aval.smooth:  # without rules, too: then asking for the derivative is an error, not a silent None
            self.plans = [self._plan(mask) for mask in range(1 << len(avals))]

    def _plan(self, mask: int) -> Plan:
        shared = self.prim.plan(mask, len(self.avals))
        plan = Plan(shared.slots, shared.pulls, shared.lacking)
        plan.quick = self.small and not plan.lacking
        return plan


P = TypeVar("P", bound=Primitive)


def _register(prim: P) -> P:
    if prim.name in REGISTRY:
        raise ValueError(f"primitive {prim.name!r} is declared twice")
    REGISTRY[prim.name] = prim
    return prim


def _operands_of(impl: Function | None) -> tuple[str, ...]:
    """Names of the array arguments of ``impl``: its positional parameters after ``xp``; a reduction's."""
    if impl is None:
        return ("x",)
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)
    return tuple(p.name for p in inspect.signature(impl).parameters.values() if p.kind in kinds)[1:]


def _rules(
    fns: Sequence[Function | float | None], operands: Sequence[str], retaining: bool = True
) -> tuple[Rule | None, ...]:
    return tuple(None if fn is None else Rule(fn, operands, retaining) for fn in fns)


def elementwise(
    name: str,
    *,
    infer: Callable[..., ShapedArray],
    partials: Sequence[Function | float | None] = (),
    jvp: Sequence[Function | None] | None = None,
    operands: Sequence[str] = (),
    impl: Function | None = None,
    formula: Function | None = None,
    ufunc: str | None = None,
    exact: bool = True,
    converts: bool = False,
    costly: bool = False,
    widens: bool = True,
    cxx: str | None = None,
    domain: tuple[float, float] = (-2.0, 2.0),
    samples: Sequence[Sample] = (),
    holomorphic: bool = True,
    view: bool = False,
    doc: str = "",
) -> Elementwise:
    """Declare a function of each element.

    ``partials``: for each operand a function of what its names say, giving the partial derivative, or with a parameter
    ``ct`` the cotangent itself (its Jacobian is diagonal, so the same rule pushes tangents forward); a number is a
    constant partial; None: no derivative.  ``jvp``: rules with ``t``, only where pushing forward differs (a cast).
    ``impl(xp, out, *arrays)`` writes into ``out``; default: ``formula``, or the ufunc called ``ufunc`` or else
    ``name``.  Half types are computed in float32 and rounded once: in one ufunc, by an inexact ``impl`` or ``formula``
    that is given copies, and in rules.
    ``view``: the result is the operand.
    """
    operands = tuple(operands) or ("x", "y", "z")[: max(1, len(partials))]
    rules = _rules(partials, operands)
    run = impl or (lambda xp, out, *arrays: getattr(xp, ufunc or name)(*arrays, out=out))
    if formula is not None:
        run = functools.partial(_by_formula, formula)
    if (impl is not None or formula is not None) and not exact:
        run = _in_float32(run)
    return _register(
        (Identity if view else Elementwise)(
            name=name,
            operands=operands,
            impl=run,
            infer=infer,
            vjp=rules,
            jvp=None if jvp is None else _rules(jvp, operands),
            holomorphic=holomorphic,
            exact=exact,
            converts=converts,
            costly=costly,
            widens=widens,
            ufunc=None if impl or formula else ufunc or name,
            formula=formula,
            cxx=cxx,
            domain=domain,
            samples=tuple(samples),
            doc=doc,
        )  # fmt: skip
    )


def _by_formula(formula: Function, xp: Any, out: Any, *arrays: Any) -> None:
    with xp.errstate(all="ignore"):
        xp.copyto(out, formula(xp, *arrays))


def _in_float32(impl: Function) -> Function:
    """``impl``, called for half types with copies in float32, its result rounded once."""

    @functools.wraps(impl)
    def run(xp: Any, out: Any, *arrays: Any) -> None:
        wide = accumulator(out.dtype)
        if wide == out.dtype:
            impl(xp, out, *arrays)
            return
        found = xp.empty(out.shape, wide)
        impl(xp, found, *(x.astype(wide) if x.dtype == out.dtype else x for x in arrays))
        with xp.errstate(all="ignore"):
            xp.copyto(out, found, casting="same_kind")

    return run


class Fields(TypedDict, total=False):
    """The optional fields of a declaration that is not elementwise (see the classes)."""

    view: bool
    copies: bool
    reduce: str  # the ufunc of a reduction, which needs no impl
    gathers: bool
    planned: bool
    cxx_drawn: str  # the template of what is drawn
    into: bool
    cuda: Function | None
    bound: Function
    calls: Function
    temporaries: Function
    parts: bool
    scratch: Function
    dry: Function | None
    flops: Callable[..., int]
    draws: bool
    beside: Primitive
    effect: Effect
    holomorphic: bool
    lift: Callable[[Params, int], Params] | None
    batch: Function | Literal["all"] | None
    samples: Sequence[Sample]
    domain: tuple[float, float]
    doc: str


def _declared(fields: Fields, **common: Any) -> Primitive:
    """The primitive, of the class that its fields ask for."""
    common.update(fields)
    common["samples"] = tuple(common.get("samples", ()))
    if common["impl"] is None:
        del common["impl"]
        return _register(Reduction(ufunc=common.pop("reduce"), **common))
    if "cxx_drawn" in common:
        return _register(Drawn(template=common.pop("cxx_drawn"), **common))
    return _register((View if common.pop("view", False) else Opaque)(**common))


def linear(
    name: str,
    *,
    infer: Callable[..., ShapedArray],
    transpose: Function,
    impl: Function | None = None,
    variadic: bool = False,
    **fields: Unpack[Fields],
) -> Primitive:
    """Declare a function linear in its first operand (or, variadic, in all of them together).

    ``transpose(ct, x, ...)``: the cotangent of the operand; ``x`` is its aval, not its value; operands after the first
    (indices, say) have no derivative and may be read.
    """
    operands = ("xs",) if variadic else _operands_of(impl)
    rule = Rule(transpose, operands, retaining=False)
    given = [("value", w) if kind == "aval" and w > 0 and not variadic else (kind, w) for kind, w in rule.arguments]
    rule.arguments = given
    rule.slots = tuple(where for kind, where in rule.arguments if kind == "value")
    vjp = rule if variadic else (rule,)
    linearity = Linearity.ALL if variadic else Linearity.FIRST
    return _declared(fields, impl=impl, name=name, linearity=linearity, operands=operands, infer=infer, vjp=vjp)


def bilinear(
    name: str,
    *,
    impl: Function,
    infer: Callable[..., ShapedArray],
    transposes: Sequence[Function],
    **fields: Unpack[Fields],
) -> Primitive:
    """Declare a function linear in each of two operands; ``transposes``: the cotangent of each, reading the other."""
    operands = _operands_of(impl)
    vjp = _rules(transposes, operands)
    return _declared(fields, impl=impl, name=name, linearity=Linearity.EACH, operands=operands, infer=infer, vjp=vjp)


def general(
    name: str,
    *,
    infer: Callable[..., ShapedArray],
    impl: Function | None = None,
    vjp: Sequence[Function | None] | Function = (),
    jvp: Sequence[Function | None] | None = None,
    **fields: Unpack[Fields],
) -> Primitive:
    """Declare any other function: a VJP rule with ``ct`` and a JVP rule with ``t`` for each operand (or None)."""
    operands = _operands_of(impl)
    push = None if jvp is None else _rules(jvp, operands)
    pull = Rule(vjp, operands) if callable(vjp) else _rules(vjp, operands)
    return _declared(fields, impl=impl, name=name, operands=operands, infer=infer, vjp=pull, jvp=push)
