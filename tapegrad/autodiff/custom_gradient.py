"""custom_gradient: a function that brings its own derivative; stop_gradient; grad_pass_through.

As TensorFlow's, but: keyword tensors take part (in the order of the function's signature), variables are passed in the
order of their construction, gradients are checked against the arguments' shapes and dtypes, and a watched tensor that
is used without being an argument draws a warning instead of a silent None.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from tapegrad import nest
from tapegrad.autodiff.adjoint import transposed
from tapegrad.autodiff.captures import Captures
from tapegrad.autodiff.wrapping import Wrapper
from tapegrad.autodiff.zeros import zeros_of
from tapegrad.core.aval import ShapedArray
from tapegrad.core.buffer import Buffer
from tapegrad.core.cell import Seen, lookout
from tapegrad.core.node import Node
from tapegrad.core.state import during, thread
from tapegrad.device import dtypes
from tapegrad.errors import GradientError, GradientTypeError, NoGradientError, ShapeError, StructureError
from tapegrad.ops.create.creation import asarray
from tapegrad.ops.dispatch import SCALARS, cast
from tapegrad.ops.shape.join import stack
from tapegrad.tensor import Tensor, alias, convert
from tapegrad.variable import Variable, trainables

if TYPE_CHECKING:
    from tapegrad.tensor import TensorLike

P = ParamSpec("P")
R = TypeVar("R")


class CustomGradient(Wrapper):
    """What :func:`custom_gradient` makes of a function."""

    def __init__(self, f: Callable[..., object]) -> None:
        super().__init__(f)
        self._name = getattr(f, "__name__", type(f).__name__)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        f = self.__wrapped__
        args, kwargs = _in_order(f, args, kwargs)
        positional = nest.flatten(args)
        named = [x for x in nest.flatten(kwargs) if isinstance(x, (Tensor, Variable))]
        inputs = [*positional, *named]
        values = [convert(x)._buffer if isinstance(x, (Tensor, Variable)) else None for x in inputs]
        watcher = Captures(inputs)
        recorders, run = thread.recorders, functools.partial(f, *args, **kwargs)
        with lookout() as seen:
            result = during(run, recorders=(*recorders, watcher)) if recorders else run()
        y, grad_fn = self._checked(result)
        variables = [v for v in trainables(seen) if not any(v is x for x in inputs)]
        if variables and not _takes_variables(grad_fn):
            names = ", ".join(v.name for v in variables)
            raise GradientTypeError(
                f"custom_gradient: {self._name} reads the variables [{names}], so its gradient function must accept "
                "the keyword argument 'variables' and return (gradients, variable_gradients)"
            )
        watcher.warn(self._name)
        results = [_result(self._name, leaf) for leaf in nest.flatten(y)]
        outputs = [Tensor(alias(r._buffer)) for r in results]
        forms = [nest.map_leaves(lambda x: None, x) for x in (*args, *named)]
        call = _Call(self._name, grad_fn, inputs, forms, len(positional), values, variables, seen, outputs)
        call.again = functools.partial(self._again, args, kwargs)
        for recorder in recorders:
            recorder.record_call(call, call.taken(values, seen), tuple(o._buffer for o in outputs))
        call.again = None
        return nest.rebuild(y, iter(outputs))

    def _again(self, args: tuple[object, ...], kwargs: dict[str, object], taken: list[object]) -> list[object]:
        """The function called on other tensors (the arguments' in order, then contents of variables)."""
        given = iter(taken)
        args = nest.map_leaves(lambda x: next(given) if isinstance(x, (Tensor, Variable)) else x, args)
        kwargs = nest.map_leaves(lambda x: next(given) if isinstance(x, (Tensor, Variable)) else x, kwargs)
        return nest.flatten(self(*args, **kwargs))

    def _checked(self, result: object) -> tuple[Any, Callable[..., Any]]:
        if not isinstance(result, (tuple, list)) or len(result) != 2:
            raise GradientTypeError(
                f"custom_gradient: {self._name} must return (y, gradient_function), got {type(result).__name__}"
            )
        y, grad_fn = result
        if not callable(grad_fn):
            raise GradientTypeError(f"custom_gradient: {self._name} returned {grad_fn!r:.60} as its gradient function")
        return y, grad_fn


@overload
def custom_gradient(f: Callable[P, tuple[R, Any]]) -> Callable[P, R]: ...


@overload
def custom_gradient(f: None = None) -> Callable[[Callable[P, tuple[R, Any]]], Callable[P, R]]: ...


def custom_gradient(f: Callable[..., object] | None = None) -> Any:
    """Decorator for ``f(*args, **kwargs) -> (y, grad_fn)``: ``grad_fn`` replaces the derivative of ``f``.

    ``grad_fn(*dys)`` gets a cotangent for each leaf of ``y`` (zeros for one not used) and returns one gradient (or
    None) for each leaf of the positional arguments, then for each keyword argument that is a tensor: flat, or in the
    structure of the arguments.  If ``f`` reads trainable variables that are no arguments, ``grad_fn`` must accept
    ``variables=`` (a list) and return ``(gradients, list of their gradients)``.  The body is recorded, so second
    derivatives go through ``grad_fn`` and what it captured.  A captured tensor is a constant for the rule.

    Raises GradientTypeError (TypeError) at the call for a wrong kind of result, GradientError (ValueError) at gradient
    time for a wrong number or shape of gradients.
    """
    return CustomGradient if f is None else CustomGradient(f)


def stop_gradient(x: TensorLike, name: str | None = None) -> Tensor:
    """The value of ``x``, through which no derivative of any order passes; ``name`` is ignored, as in TensorFlow's
    eager mode.
    """
    return Tensor(alias(convert(x)._buffer))


def grad_pass_through(f: Callable[P, R]) -> Callable[P, R]:
    """``f`` with the identity's derivative: the cotangent of each result is that of the tensor argument in its place.

    ``f`` returns as many tensors as it gets tensors and variables (by position, then by keyword), of the same shapes
    (TensorFlow's function of that name; a straight-through estimator).  Trainable variables that it reads besides get
    None.  Raises GradientError (ValueError) at the call where results do not match the arguments.
    """

    @functools.wraps(f, updated=())
    def passing(*args: P.args, **kwargs: P.kwargs) -> Any:
        y = f(*args, **kwargs)
        inputs = [*nest.flatten(args), *(x for x in nest.flatten(kwargs) if isinstance(x, (Tensor, Variable)))]
        taking = [i for i, x in enumerate(inputs) if isinstance(x, (Tensor, Variable))]
        given, made = [inputs[i].shape for i in taking], [asarray(leaf).shape for leaf in nest.flatten(y)]
        if given != made:
            raise GradientError(
                f"grad_pass_through: {getattr(f, '__name__', type(f).__name__)} takes tensors of shapes {given} and "
                f"returns {made}; gradients pass only to arguments shaped as the results, one for each"
            )

        def back(*dys: Tensor, variables: Sequence[Variable] | None = None) -> Any:
            passed = dict(zip(taking, dys, strict=True))
            gradients = [passed.get(i) for i in range(len(inputs))]
            return gradients if variables is None else (gradients, [None] * len(variables))

        return y, back

    replaced: Any = CustomGradient(passing)
    return replaced


def _in_order(
    f: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Tensors passed by name to positional parameters become positional, if all before them are."""
    if not any(isinstance(x, (Tensor, Variable)) for x in nest.leaves(kwargs)):
        return args, kwargs
    try:
        parameters = list(inspect.signature(f).parameters.values())
    except (TypeError, ValueError):
        return args, kwargs
    values, rest = list(args), dict(kwargs)
    for p in parameters[len(args) :]:
        if p.kind is not p.POSITIONAL_OR_KEYWORD or p.name not in rest:
            break
        if not any(isinstance(x, (Tensor, Variable)) for x in nest.leaves(rest[p.name])):
            break
        values.append(rest.pop(p.name))
    names = [p.name for p in parameters if p.name in rest]
    return tuple(values), {k: rest[k] for k in [*names, *sorted(set(rest) - set(names))]}


def _takes_variables(grad_fn: Callable[..., object]) -> bool:
    try:
        parameters = inspect.signature(grad_fn).parameters.values()
    except (TypeError, ValueError):
        return True
    return any(
        p.kind is p.VAR_KEYWORD or (p.name == "variables" and p.kind is not p.POSITIONAL_ONLY) for p in parameters
    )


def _result(name: str, leaf: TensorLike | None) -> Tensor:
    if leaf is None:
        raise GradientError(f"custom_gradient: {name} returned None for an output")
    return asarray(leaf)


class _Call:
    """One call of a function with a custom gradient, as a tape's record sees it.

    ``inputs``: leaves of the positional arguments, then keyword tensors; ``forms``: those arguments, their
    leaves being None; ``places``: which of them are tensors.
    """

    again: Callable[[list[Any]], list[Any]] | None = None
    effects: Sequence[Node] = ()  # what the function does is recorded, too

    def __init__(
        self,
        name: str,
        grad_fn: Callable[..., object],
        inputs: list[object],
        forms: list[object],
        positional: int,
        values: list[Buffer | None],
        variables: list[Variable],
        seen: Seen,
        outputs: list[Tensor],
    ) -> None:
        self.name = name
        self._grad_fn = functools.partial(during, grad_fn, autocasts=thread.autocasts) if thread.autocasts else grad_fn
        self._forms = forms
        self._count, self._positional = len(inputs), positional
        self._optional = {i for i, x in enumerate(inputs) if not isinstance(x, (Tensor, Variable, *SCALARS, str))}
        self._places = [i for i, b in enumerate(values) if b is not None]
        self._variables = variables
        self._outputs = [o._buffer.node.aval for o in outputs]
        self._avals = [b.node.aval for b in self.taken(values, seen)]

    def taken(self, values: list[Buffer | None], seen: Seen) -> tuple[Buffer, ...]:
        """The buffers of the record's inputs: tensor arguments, then variables read."""
        return (*(b for b in values if b is not None), *(seen[v._cell][0] for v in self._variables))

    def pullback(
        self, cts: list[Tensor | None], needed: frozenset[int], lead: int | None, come: dict[int, Any]
    ) -> list[Tensor | None]:
        """Ask ``grad_fn``: once, or for every row."""
        if lead is None:
            return self._ask(cts)
        rows = [self._ask([None if ct is None else ct[row] for ct in cts]) for row in range(lead)]
        return [_column([row[i] for row in rows], aval) for i, aval in enumerate(self._avals)]

    def _ask(self, cts: list[Tensor | None]) -> list[Tensor | None]:
        dys = [zeros_of(aval) if ct is None else ct for ct, aval in zip(cts, self._outputs, strict=True)]
        if self._variables:
            answer = self._grad_fn(*dys, variables=list(self._variables))
            if not isinstance(answer, (tuple, list)) or len(answer) != 2:
                raise GradientTypeError(
                    f"{self.name}: the gradient function must return (gradients, list of variable gradients)"
                )
            grads, of_variables = answer
            if isinstance(of_variables, Tensor) or not isinstance(of_variables, (list, tuple)):
                raise GradientTypeError(
                    f"{self.name}: variable gradients must be a list, got {type(of_variables).__name__}"
                )
        else:
            grads, of_variables = self._grad_fn(*dys), []
        if len(of_variables) != len(self._variables):
            raise GradientError(
                f"{self.name}: {len(of_variables)} variable gradients for {len(self._variables)} variables; return one "
                "(or None) for each of 'variables'"
            )
        grads = nest.whole(grads)
        self._require_structure(grads)
        flat = nest.flatten(grads)
        if len(flat) == self._count - len(self._optional):  # objects that are no tensors need no gradient
            rest = iter(flat)
            flat = [None if i in self._optional else next(rest) for i in range(self._count)]
        if len(flat) != self._count:
            what = f"{self._positional} positional argument(s)"
            if self._count > self._positional:
                what += f" and {self._count - self._positional} keyword tensor(s)"
            raise GradientError(
                f"{self.name}: {len(flat)} gradients returned for {what}; return one (or None) for each"
            )
        taken = [flat[i] for i in self._places] + list(of_variables)
        return [self._fitted(i, g) for i, g in enumerate(taken)]

    def _require_structure(self, grads: object) -> None:
        """Gradients come flat, or nested as the arguments are (whose objects, if there are any, may be left out)."""
        entries = list(grads) if isinstance(grads, (list, tuple)) else [grads]
        if not any(isinstance(g, (list, tuple, dict)) for g in entries) or self._optional:
            return
        if not nest.alike(entries, self._forms) and not nest.alike([grads], self._forms):
            raise StructureError(
                f"{self.name}: the structure of the gradients is {nest.shown(grads)}, that of the arguments "
                f"{nest.shown(tuple(self._forms))}; return them in that structure, or in one flat list"
            )

    def _fitted(self, i: int, g: TensorLike | None) -> Tensor | None:
        """A returned gradient as a tensor of its argument's shape and dtype."""
        aval = self._avals[i]
        if g is None or not dtypes.is_inexact(aval.dtype):
            return None
        g = asarray(g)
        if g.shape != aval.shape:
            raise _MisshapenError(
                f"{self.name}: gradient {i} has shape {g.shape}, its argument {aval.shape}; sum or reshape it"
            )
        if g.dtype.kind == "c" and aval.dtype.kind != "c":
            raise GradientTypeError(f"{self.name}: gradient {i} is {g.dtype}, its argument {aval.dtype}")
        return cast(g, aval.dtype)

    def pushforward(self, tangents: list[Any]) -> list[Tensor | None]:
        """J t, from the transpose of ``grad_fn``; it must be linear in its cotangents and made of tensor operations."""
        given = [i for i, t in enumerate(tangents) if t is not None]
        outs = [i for i, a in enumerate(self._outputs) if dtypes.is_inexact(a.dtype)]

        def pull(*us: Tensor) -> list[Tensor | None]:
            by_output = dict(zip(outs, us, strict=True))
            grads = self._ask([by_output.get(i) for i in range(len(self._outputs))])
            return [grads[i] for i in given]

        try:
            pushed = transposed(pull, [self._outputs[i] for i in outs], [tangents[i] for i in given])
        except NoGradientError as e:
            raise NoGradientError(f"{self.name}: no forward mode follows from its gradient function: {e}") from e
        by_output = dict(zip(outs, pushed, strict=True))
        return [by_output.get(i) for i in range(len(self._outputs))]


class _MisshapenError(GradientError, ShapeError):
    """A gradient whose shape is not its argument's."""


def _column(grads: list[Tensor | None], aval: ShapedArray) -> Tensor | None:
    """The rows' gradients of one input, stacked; zeros for missing ones; None if all are missing."""
    if grads and all(g is None for g in grads):
        return None
    return stack([zeros_of(aval) if g is None else g for g in grads]) if grads else zeros_of(aval, 0)
