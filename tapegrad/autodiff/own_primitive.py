"""One's own operations: a function of raw arrays becomes a primitive, with derivative rules in tensors.

The function runs NumPy or CuPy code, a CuPy kernel, another library; the engine sees one operation, which it records,
counts, evicts and runs again like any other.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tapegrad import nest
from tapegrad.autodiff.adjoint import transposed
from tapegrad.autodiff.packing import Layout
from tapegrad.autodiff.wrapping import Wrapper
from tapegrad.autodiff.zeros import zeros_of
from tapegrad.core.aval import ShapedArray
from tapegrad.core.node import Node
from tapegrad.core.primitive import Opaque, Primitive
from tapegrad.core.rule import Rule, with_parameters
from tapegrad.core.state import thread
from tapegrad.device import current_device, dtypes
from tapegrad.engine.realize import array_of
from tapegrad.errors import DryRunError, DTypeError, GradientError, GradientTypeError, NotATensorError
from tapegrad.ops.create.creation import asarray
from tapegrad.ops.dispatch import SCALARS, on_one_device, tensor
from tapegrad.tensor import Tensor
from tapegrad.variable import Variable

if TYPE_CHECKING:
    from tapegrad.device import Device
    from tapegrad.device.types import Array, Namespace
    from tapegrad.tensor import TensorLike

_RESERVED = ("ct", "t", "out", "i", "xs_aval", "layout")


_MOST_LAYOUTS = 256


class OwnPrimitive(Wrapper):
    """What :func:`primitive` makes of a function of arrays."""

    def __init__(self, f: Callable[..., object], infer: Callable[..., object] | None, batched: bool) -> None:
        super().__init__(f)
        self._name = getattr(f, "__name__", type(f).__name__)
        self._signature = inspect.signature(f)
        self._names = tuple(_parameters(self._name, self._signature))
        self._infer = infer
        self._batched = batched
        self._pull: dict[str, Callable[..., Any]] = {}
        self._push: dict[str, Callable[..., Any]] = {}
        self._forms: dict[tuple[str, ...], Primitive] = {}
        self._layouts: dict[object, Layout] = {}
        self._body = Body(f, self._name, self._signature, self._names)

    def __getstate__(self) -> dict[str, Any]:
        # Forms and layouts are made anew at the first call.
        return {**self.__dict__, "_forms": {}, "_layouts": {}}

    def defvjp(self, *rules: Callable[..., Any] | None, **named: Callable[..., Any] | None) -> OwnPrimitive:
        """Give a VJP rule for each argument, in order or by name (None: no derivative).

        A rule is a function in tensors.  It asks by name for ``ct`` (the cotangent of the result), ``out`` (the result)
        and the function's own arguments, and returns the cotangent of its argument, in that argument's shape; of
        complex numbers it is that of a real loss (TensorFlow's convention).  What no rule asks for is not kept.  If the
        function returns several arrays, ``ct`` and ``out`` are tuples.  Forward mode follows by transposition.

        Raises GradientTypeError for rules that ask for something else.
        """
        self._define(self._pull, "ct", rules, named)
        return self

    def defjvp(self, *rules: Callable[..., Any] | None, **named: Callable[..., Any] | None) -> OwnPrimitive:
        """Give a JVP rule for each argument: as :meth:`defvjp`, from ``t``, the argument's tangent, to the result's.

        Reverse mode follows by transposition where :meth:`defvjp` gives no rule.
        """
        self._define(self._push, "t", rules, named)
        return self

    def _define(
        self, into: dict[str, Callable[..., Any]], seed: str, rules: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        if len(rules) > len(self._names) or named.keys() - set(self._names):
            raise GradientTypeError(f"{self._name}: rules for the arguments {', '.join(self._names)} only")
        for name, rule in {**dict(zip(self._names, rules, strict=False)), **named}.items():
            if rule is None:
                continue
            asked = list(inspect.signature(rule).parameters)
            strange = [p for p in asked if p not in (seed, "out", *self._names)]
            if strange or seed not in asked:
                raise GradientTypeError(
                    f"{self._name}: the rule of {name} must name {seed!r}, and may name out, {', '.join(self._names)}; "
                    f"it names {', '.join(asked)}"
                )
            into[name] = rule
        self._forms.clear()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        operands = tuple(n for n, x in bound.arguments.items() if _is_array(self._name, n, x))
        static = {n: x for n, x in bound.arguments.items() if n not in operands}
        first = next((x for n in operands if isinstance(x := bound.arguments[n], (Tensor, Variable))), None)
        beside = None if first is None else tensor(self._name, first)
        tensors = [tensor(self._name, bound.arguments[n], beside) for n in operands]
        buffers = tuple(t._buffer for t in tensors)
        if buffers:
            on_one_device(self._name, buffers)
        device = buffers[0].node.aval.device if buffers else current_device()
        prim = self._form(operands)
        layout = self._layout(operands, tensors, static, device)
        try:
            packed = Tensor(thread.executor.apply(Node(prim, {**static, "layout": layout}, layout.aval), buffers))
        finally:
            self._body.ready.clear()
        return layout.unpacked(packed)

    def _layout(
        self, operands: tuple[str, ...], tensors: list[Tensor], static: dict[str, object], device: Device
    ) -> Layout:
        """The layout of the results: from ``infer``, or from running the function, whose result is then used."""
        avals = [t._buffer.node.aval for t in tensors]
        if self._infer is not None:
            told = self._infer(**dict(zip(operands, avals, strict=True)), **static)
            return Layout.told(self._name, told, device)
        key = (operands, *avals, *map(repr, static.values()))
        layout = thread.executor.in_earnest(lambda: self._by_running(key, tensors, static, device), None)
        if layout is None and key not in self._layouts:
            raise DryRunError(
                f"{self._name}: a dry run does not know what this returns for {avals}; give @tg.primitive(infer=f), "
                "where f returns (shape, dtype), or run it once before"
            )
        return layout or self._layouts[key]

    def _by_running(
        self, key: tuple[Any, ...], tensors: list[Tensor], static: dict[str, Any], device: Device
    ) -> Layout:
        if len(self._layouts) >= _MOST_LAYOUTS:
            self._layouts.clear()
        result = self._body.run(device, [array_of(t._buffer) for t in tensors], key[0], static)
        layout = self._layouts[key] = Layout.of(self._name, result, device)
        self._body.ready.append(layout.packed(result))
        return layout

    def _form(self, operands: tuple[str, ...]) -> Primitive:
        """The primitive for calls in which just these arguments are arrays."""
        form = self._forms.get(operands)
        if form is None:
            body = self._body

            def impl(xp: Namespace, *arrays: Any, layout: Layout, **static: Any) -> Any:
                if body.ready:
                    return body.ready.pop()
                return layout.packed(body.run(layout.aval.device, list(arrays), operands, static))

            rules = [self._rule(n, operands) for n in operands]
            form = self._forms[operands] = Opaque(
                name=self._name, operands=operands, impl=impl, infer=_not_inferred, vjp=tuple(p for p, _ in rules),
                jvp=tuple(push for _, push in rules), holomorphic=False, calls_user=True,
                lift=(lambda params, n: {**params, "layout": params["layout"].lifted(n)}) if self._batched else None,
            )  # fmt: skip
            if all(pull is None for pull, _ in rules):
                form.vjp = ()
        return form

    def _rule(self, name: str, operands: tuple[str, ...]) -> tuple[Rule | None, Rule | None]:
        pull, push = self._pull.get(name), self._push.get(name)
        return (
            _made(self._name, pull, push, name, "ct", operands),
            _made(self._name, push, pull, name, "t", operands),
        )


def primitive(
    f: Callable[..., object] | None = None, *, infer: Callable[..., object] | None = None, batched: bool = False
) -> Any:
    """Decorator that makes a function of raw arrays an operation with derivatives of its own.

    ``f`` gets the device's arrays (NumPy's, read-only; CuPy's, on the device's stream) in place of tensors, variables
    and arrays, everything else as it is; it returns an array, or several in a tuple, and must be pure.  Rules are
    given by :meth:`OwnPrimitive.defvjp` or :meth:`OwnPrimitive.defjvp`; without any the operation has no derivative,
    and asking for one raises NoGradientError.

    infer: ``infer(**arguments) -> (shape, dtype)`` (or a list of such pairs), with avals (``.shape``, ``.dtype``) for
    arrays: so a budget makes room before ``f`` runs, and dry runs know what comes.  batched: ``f`` and its rules take
    arrays with one more leading axis, so ``vmap`` and ``jacobian`` call them once; else row by row.

    Raises TypeError for functions with ``*args`` or ``**kwargs``.
    """
    if f is None:
        return lambda g: OwnPrimitive(g, infer, batched)
    return OwnPrimitive(f, infer, batched)


def _parameters(name: str, signature: inspect.Signature) -> list[str]:
    operands = []
    for p in signature.parameters.values():
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            raise TypeError(f"primitive: {name} takes {p}; its arguments must have names, for rules to ask for them")
        if p.name in _RESERVED or p.name.endswith("_aval"):
            raise TypeError(
                f"primitive: rename the argument {p.name!r} of {name}: in rules that name means something else"
            )
        operands.append(p.name)
    return operands


def _is_array(op: str, name: str, x: object) -> bool:
    if isinstance(x, (Tensor, Variable)) or (hasattr(x, "dtype") and hasattr(x, "shape")):
        return True
    if any(isinstance(leaf, (Tensor, Variable)) for leaf in nest.leaves(x)):
        raise NotATensorError(f"{op}: {name} holds tensors in a structure; give each an argument of its own")
    return False


def _not_inferred(*avals: ShapedArray, layout: Layout, **static: object) -> ShapedArray:
    return layout.aval


def _made(
    op: str,
    rule: Callable[..., Any] | None,
    other: Callable[..., Any] | None,
    name: str,
    seed: str,
    operands: tuple[str, ...],
) -> Rule | None:
    """The engine's rule from the user's, or from the one for the ``other`` direction, whose transpose it is."""
    source = rule or other
    if source is None:
        return None
    asked = [p for p in inspect.signature(source).parameters if p not in ("ct", "t")]
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD
    values = [p for p in asked if p in operands or p == "out"]
    extra = [f"{name}_aval", "layout"]
    order = [seed, *values, extra[0]]

    def run(*given: Any, layout: Layout, **static: Any) -> Tensor:
        named = dict(zip(order, given, strict=True))
        aval = named.pop(extra[0])
        told = {p: static[p] for p in asked if p in static}
        ct = named.pop(seed)
        if "out" in named:
            named["out"] = layout.unpacked(named["out"])
        if rule is None:
            return _transposed(source, seed, ct, aval, layout, {**named, **told})
        if seed == "ct":
            return _fitting(op, name, rule(ct=layout.unpacked(ct), **named, **told), aval)
        return layout.repacked(op, rule(t=ct, **named, **told))

    parameters = [inspect.Parameter(p, kinds) for p in (*order, *extra[1:], *(p for p in asked if p not in values))]
    return Rule(with_parameters(run, parameters), operands)


def _fitting(op: str, name: str, given: TensorLike, aval: ShapedArray) -> Tensor:
    if given is None or isinstance(given, (tuple, list, dict)):
        raise GradientTypeError(
            f"{op}: the rule of {name} returned {'None' if given is None else nest.shown(given)}; it returns one "
            "cotangent, that of its argument"
        )
    grad = asarray(given)
    if grad.shape != aval.shape:
        raise GradientError(
            f"{op}: the rule of {name} returned shape {grad.shape}, the argument has {aval.shape}; sum or reshape it"
        )
    if grad.dtype.kind == "c" and aval.dtype.kind != "c":
        raise DTypeError(f"{op}: the rule of {name} returned {grad.dtype}, the argument is {aval.dtype}; take tg.real")
    return grad


def _transposed(
    source: Callable[..., Any], seed: str, ct: Tensor, aval: ShapedArray, layout: Layout, named: dict[str, Any]
) -> Tensor:
    if seed == "t":  # the user gave the VJP rule
        (ct_in,) = transposed(
            lambda u: [_fitting("defvjp", "an argument", source(ct=layout.unpacked(u), **named), aval)],
            [layout.aval],
            [ct],
        )
        return zeros_of(layout.aval) if ct_in is None else ct_in
    (ct_in,) = transposed(lambda u: [layout.repacked("defjvp", source(t=u, **named))], [aval], [ct])
    return zeros_of(aval) if ct_in is None else ct_in


# The function that a user's primitive runs: arrays in, arrays out.


class _Ready(threading.local):
    """Results that were computed to learn their layout and wait to be used; each thread has its own."""

    def __init__(self) -> None:
        self.values: list[Any] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return _Ready, ()


class Body:
    """The user's function of arrays, without a reference to the primitive, so that the two make no cycle."""

    def __init__(
        self, f: Callable[..., object], name: str, signature: inspect.Signature, names: tuple[str, ...]
    ) -> None:
        self.f, self.name, self.signature, self.names = f, name, signature, names
        self._ready = _Ready()

    @property
    def ready(self) -> list[Any]:
        """The waiting result; its one use."""
        return self._ready.values

    def run(self, device: Device, arrays: list[Array], operands: tuple[str, ...], static: dict[str, Any]) -> Any:
        """The function's result as an array, or a list of several, in the memory of ``device``."""
        given = dict(zip(operands, (_guarded(a) for a in arrays), strict=True))
        bound = self.signature.bind_partial()
        bound.arguments.update({n: given[n] if n in given else static[n] for n in self.names})
        with device.active():
            result = self.f(*bound.args, **bound.kwargs)
            if isinstance(result, (tuple, list)):
                return [self.result(x, arrays, device) for x in result]
            return self.result(result, arrays, device)

    def result(self, x: object, arrays: list[Array], device: Device) -> Any:
        if isinstance(x, (Tensor, Variable)) or x is None:
            raise NotATensorError(
                f"{self.name}: returned {type(x).__name__}; a primitive computes with raw arrays and returns them"
            )
        dtype = None
        if isinstance(x, SCALARS) and not hasattr(x, "dtype") and arrays:
            dtype = dtypes.result_type(*(a.dtype for a in arrays), x)
        array = device.array(x, dtype, copy=False)
        if any(device.is_view(array, a) for a in arrays):
            array = array.copy()
        return array


def _guarded(array: Array) -> Array:
    """A read-only view where the library has one (NumPy); else the array."""
    if hasattr(array, "setflags"):
        array = array.view()
        array.setflags(write=False)
    return array
