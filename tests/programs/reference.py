"""A second, independent automatic differentiation: the slow and simple one that tapegrad is compared with.

It has tapegrad's names, so the source of a program runs on either.  An operation is applied at once, in NumPy; its
result is a new object; every recorder of the stack is told of it with two functions: cotangents of the inputs from
that of the result, and the tangent of the result from those of the inputs.  Both are written in these operations, so
that any nesting of tapes and tangents follows.  Nothing is lazy, shared, dropped, batched or recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np

import tapegrad

_recorders: list[Any] = []


@contextmanager
def _told(recorders: list[Any]) -> Iterator[None]:
    global _recorders
    before, _recorders = _recorders, recorders
    try:
        yield
    finally:
        _recorders = before


def asarray(x: Any) -> T:
    if isinstance(x, Variable):
        return x.read()
    return x if isinstance(x, T) else T(np.array(x))


def _apply(array: Any, inputs: list[T], pull: Callable, push: Callable) -> T:
    """A result, told to all recorders.  ``pull(ct)``: a list (None: not connected); ``push(ts)``, None for zero."""
    out = T(np.asarray(array))
    for place, recorder in enumerate(list(_recorders)):
        recorder.record(inputs, [out], lambda cts: pull(cts[0]), lambda ts: [push(ts)], _recorders[:place])
    return out


class T:
    """A tensor: a value of its own."""

    __array_priority__ = 1000

    def __init__(self, a: np.ndarray) -> None:
        self.a = a

    shape = property(lambda self: self.a.shape)
    dtype = property(lambda self: self.a.dtype)
    ndim = property(lambda self: self.a.ndim)
    T = property(lambda self: permute_dims(self, tuple(range(self.ndim))[::-1]))

    def numpy(self) -> np.ndarray:
        return self.a.copy()

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self.a.copy()

    def __dlpack__(self, **options: Any) -> Any:
        return self.a.copy().__dlpack__()

    def __dlpack_device__(self) -> Any:
        return self.a.__dlpack_device__()

    def item(self) -> Any:
        return self.a.item()

    def __getitem__(self, index: Any) -> T:
        return getitem(self, index)

    def __pos__(self) -> T:
        return identity(self)

    def __add__(self, o: Any) -> T:
        return add(self, o)

    def __radd__(self, o: Any) -> T:
        return add(o, self)

    def __sub__(self, o: Any) -> T:
        return add(self, negative(o))

    def __rsub__(self, o: Any) -> T:
        return add(o, negative(self))

    def __mul__(self, o: Any) -> T:
        return multiply(self, o)

    def __rmul__(self, o: Any) -> T:
        return multiply(o, self)

    def __truediv__(self, o: Any) -> T:
        return divide(self, o)

    def __rtruediv__(self, o: Any) -> T:
        return divide(o, self)

    def __neg__(self) -> T:
        return negative(self)

    def __matmul__(self, o: Any) -> T:
        return matmul(self, o)

    def __rmatmul__(self, o: Any) -> T:
        return matmul(o, self)

    def __gt__(self, o: Any) -> np.ndarray:
        return self.a > asarray(o).a


class Variable:
    """A cell; every read is a value of its own."""

    __array_priority__ = 1000

    def __init__(self, x: Any, trainable: bool = True) -> None:
        self._content, self.trainable = T(asarray(x).a.copy()), trainable

    shape = property(lambda self: self._content.shape)
    dtype = property(lambda self: self._content.dtype)

    def read(self) -> T:
        for recorder in _recorders:
            recorder.read(self)
        return _linear(self._content, lambda a: a, lambda ct: ct)

    value = read_value = read

    def assign(self, x: Any) -> Variable:
        with _told([]):
            self._content = T(np.array(asarray(x).a, dtype=self.dtype))
        return self

    def assign_add(self, x: Any) -> Variable:
        with _told([]):
            return self.assign(asarray(self) + x)

    def assign_sub(self, x: Any) -> Variable:
        with _told([]):
            return self.assign(asarray(self) - x)

    def numpy(self) -> np.ndarray:
        return self._content.numpy()

    T = property(lambda self: self.read().T)

    def __getitem__(self, index: Any) -> T:
        return self.read()[index]

    def __neg__(self) -> T:
        return negative(self)


def _reading(name: str) -> Callable:
    return lambda self, other: getattr(T, name)(self.read(), other)


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "matmul", "rmatmul"):
    setattr(Variable, f"__{_name}__", _reading(f"__{_name}__"))


# Operations --------------------------------------------------------------------------------------------------------


def _fit(ct: T, like: T) -> T:
    """A cotangent summed and cast to the shape and kind of the input that was broadcast."""
    extra = ct.ndim - like.ndim
    if extra:
        ct = sum(ct, axis=tuple(range(extra)))
    axes = tuple(i for i, n in enumerate(like.shape) if n == 1 and ct.shape[i] != 1)
    if axes:
        ct = sum(ct, axis=axes, keepdims=True)
    if ct.dtype.kind == "c" and like.dtype.kind != "c":
        ct = real(ct)
    return ct if ct.dtype == like.dtype else astype(ct, like.dtype)


def _widened(t: T, shape: tuple[int, ...]) -> T:
    return t if t.shape == shape else broadcast_to(t, shape)


def _elementwise(array: Any, inputs: list[Any], partials: Callable[[], list[Any]]) -> T:
    """``partials()``: the derivative in each input, or None, in these operations."""
    inputs = [asarray(x) for x in inputs]

    def pull(ct: T) -> list[Any]:
        return [None if p is None else _fit(ct * conj(p), x) for p, x in zip(partials(), inputs, strict=True)]

    def push(ts: list[Any]) -> Any:
        found: Any = None
        for t, p in zip(ts, partials(), strict=True):
            if t is not None and p is not None:
                found = t * p if found is None else found + t * p
        return None if found is None else astype(_widened(found, np.shape(array)), np.asarray(array).dtype)

    return _apply(array, inputs, pull, push)


def _linear(x: Any, f: Callable, transpose: Callable) -> T:
    x = asarray(x)
    return _apply(f(x.a), [x], lambda ct: [transpose(ct)], lambda ts: _linear(ts[0], f, transpose))


def _scalar_like(x: Any, other: Any) -> Any:
    """Python numbers are weak, as in NumPy 2."""
    if isinstance(x, (int, float, complex)):
        kind = np.result_type(asarray(other).dtype, x)
        return T(np.asarray(x, dtype=kind))
    return x


def add(a: Any, b: Any) -> T:
    a, b = asarray(_scalar_like(a, b)), asarray(_scalar_like(b, a))
    return _elementwise(a.a + b.a, [a, b], lambda: [T(np.ones((), a.dtype)), T(np.ones((), b.dtype))])


def negative(a: Any) -> Any:
    if isinstance(a, (int, float)):
        return -a
    return _linear(a, np.negative, negative)


def multiply(a: Any, b: Any) -> T:
    a, b = asarray(_scalar_like(a, b)), asarray(_scalar_like(b, a))
    return _elementwise(a.a * b.a, [a, b], lambda: [b, a])


def divide(a: Any, b: Any) -> T:
    a, b = asarray(_scalar_like(a, b)), asarray(_scalar_like(b, a))
    return _elementwise(a.a / b.a, [a, b], lambda: [T(np.ones((), b.dtype)) / b, -(a / (b * b))])


def tanh(a: Any) -> T:
    a = asarray(a)

    def partials() -> list[Any]:
        y = tanh(a)
        return [1.0 - y * y]

    return _elementwise(np.tanh(a.a), [a], partials)


def exp(a: Any) -> T:
    a = asarray(a)
    return _elementwise(np.exp(a.a), [a], lambda: [exp(a)])


def sin(a: Any) -> T:
    a = asarray(a)
    return _elementwise(np.sin(a.a), [a], lambda: [cos(a)])


def cos(a: Any) -> T:
    a = asarray(a)
    return _elementwise(np.cos(a.a), [a], lambda: [-sin(a)])


def sqrt(a: Any) -> T:
    a = asarray(a)
    return _elementwise(np.sqrt(a.a), [a], lambda: [0.5 / sqrt(a)])


def log(a: Any) -> T:
    a = asarray(a)
    return _elementwise(np.log(a.a), [a], lambda: [1.0 / a])


def sigmoid(a: Any) -> T:
    return 0.5 * tanh(0.5 * asarray(a)) + 0.5


def conj(a: Any) -> Any:
    a = asarray(a)
    return a if a.dtype.kind != "c" else _linear(a, np.conj, conj)


def real(a: Any) -> T:
    a = asarray(a)
    kind = a.dtype
    return _linear(a, lambda v: np.real(v).copy(), lambda ct: astype(ct, kind)) if kind.kind == "c" else identity(a)


def astype(a: Any, dtype: Any) -> T:
    a = asarray(a)
    kind = a.dtype
    if a.dtype.kind == "c" and np.dtype(dtype).kind != "c":
        return real(a)
    return _linear(a, lambda v: v.astype(dtype), lambda ct: astype(ct, kind))


def where(mask: Any, a: Any, b: Any) -> T:
    mask = mask.a if isinstance(mask, T) else np.asarray(mask)
    a, b = asarray(_scalar_like(a, b)), asarray(_scalar_like(b, a))
    on, off = (T(m.astype(a.dtype)) for m in (mask, ~mask))
    return _elementwise(np.where(mask, a.a, b.a), [a, b], lambda: [on, off])


def maximum(a: Any, b: Any) -> T:
    a, b = asarray(_scalar_like(a, b)), asarray(_scalar_like(b, a))
    return where(a.a >= b.a, a, b)


def identity(a: Any) -> T:
    return _linear(a, lambda v: v, lambda ct: ct)


def reshape(a: Any, shape: tuple[int, ...]) -> T:
    a = asarray(a)
    return _linear(a, lambda v: v.reshape(shape), lambda ct: reshape(ct, a.shape))


def permute_dims(a: Any, axes: tuple[int, ...]) -> T:
    back = tuple(np.argsort(axes))
    return _linear(a, lambda v: v.transpose(axes), lambda ct: permute_dims(ct, back))


def broadcast_to(a: Any, shape: tuple[int, ...]) -> T:
    a = asarray(a)
    return _linear(a, lambda v: np.broadcast_to(v, shape), lambda ct: _fit(ct, a))


def sum(a: Any, axis: Any = None, keepdims: bool = False) -> T:
    a = asarray(a)
    axes = tuple(range(a.ndim)) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    kept = tuple(1 if i in [k % max(a.ndim, 1) for k in axes] else n for i, n in enumerate(a.shape))
    return _linear(
        a, lambda v: v.sum(axis=axes, keepdims=keepdims), lambda ct: broadcast_to(reshape(ct, kept), a.shape)
    )


def mean(a: Any, axis: Any = None, keepdims: bool = False) -> T:
    a = asarray(a)
    count = a.a.size if axis is None else a.shape[axis]
    with np.errstate(all="ignore"):
        return sum(a, axis, keepdims) * float(np.float64(1.0) / count)


def getitem(a: Any, index: Any) -> T:
    a = asarray(a)
    return _linear(a, lambda v: v[index], lambda ct: _placed(ct, index, a.shape))


def _placed(a: T, index: Any, shape: tuple[int, ...]) -> T:
    def put(v: np.ndarray) -> np.ndarray:
        found = np.zeros(shape, v.dtype)
        np.add.at(found, index, v)
        return found

    return _linear(a, put, lambda ct: getitem(ct, index))


def concat(parts: list[Any], axis: int = 0) -> T:
    parts = [asarray(p) for p in parts]
    ends = np.cumsum([p.shape[axis] for p in parts])
    cuts = [
        (slice(None),) * (axis % parts[0].ndim) + (slice(e - p.shape[axis], e),)
        for p, e in zip(parts, ends, strict=True)
    ]

    def push(ts: list[Any]) -> T:
        filled = [T(np.zeros(p.shape, p.dtype)) if t is None else t for t, p in zip(ts, parts, strict=True)]
        return concat(filled, axis)

    return _apply(np.concatenate([p.a for p in parts], axis), parts, lambda ct: [getitem(ct, c) for c in cuts], push)


def stack(parts: list[Any], axis: int = 0) -> T:
    return concat([reshape(p, (*p.shape[:axis], 1, *p.shape[axis:])) for p in map(asarray, parts)], axis)


def matmul(a: Any, b: Any) -> T:
    a, b = asarray(a), asarray(b)
    if a.ndim != 2 or b.ndim != 2:
        raise ValueError("only matrices are multiplied here")

    def push(ts: list[Any]) -> Any:
        terms = ([] if ts[0] is None else [matmul(ts[0], b)]) + ([] if ts[1] is None else [matmul(a, ts[1])])
        return terms[0] if len(terms) == 1 else terms[0] + terms[1]

    return _apply(a.a @ b.a, [a, b], lambda ct: [matmul(ct, b.T), matmul(a.T, ct)], push)


def cumulative_sum(a: Any, axis: int = 0) -> T:
    if not asarray(a).ndim:
        raise ValueError("there is no axis")
    return _linear(a, lambda v: np.cumsum(v, axis), lambda ct: flip(cumulative_sum(flip(ct, axis), axis), axis))


def flip(a: Any, axis: int = 0) -> T:
    return _linear(a, lambda v: np.flip(v, axis), lambda ct: flip(ct, axis))


def roll(a: Any, shift: int, axis: int = 0) -> T:
    return _linear(a, lambda v: np.roll(v, shift, axis), lambda ct: roll(ct, -shift, axis))


def pad(a: Any, width: Any) -> T:
    a = asarray(a)
    inner = tuple(slice(lo, lo + n) for (lo, _), n in zip(width, a.shape, strict=True))
    return _linear(a, lambda v: np.pad(v, width), lambda ct: getitem(ct, inner))


def squeeze(a: Any, axis: Any) -> T:
    a = asarray(a)
    return _linear(a, lambda v: np.squeeze(v, axis), lambda ct: reshape(ct, a.shape))


def argsort(a: Any, axis: int = -1) -> np.ndarray:
    return np.argsort(asarray(a).a, axis=axis, kind="stable")


def take_along_axis(a: Any, index: np.ndarray, axis: int) -> T:
    a = asarray(a)
    where_: list[Any] = list(np.indices(index.shape, sparse=True))
    where_[axis] = index
    return getitem(a, tuple(where_))


def sort(a: Any, axis: int = -1) -> T:
    return take_along_axis(a, argsort(a, axis), axis)


def softmax(a: Any, axis: int = -1) -> T:
    a = asarray(a)
    top = T(a.a.max(axis=axis, keepdims=True, initial=-np.inf) if a.a.size else np.zeros((1,) * a.ndim, a.dtype))
    e = exp(a - top)
    return e / sum(e, axis=axis, keepdims=True)


def layer_norm(a: Any, weight: Any, bias: Any, eps: float = 1e-5) -> T:
    a = asarray(a)
    if asarray(weight).shape != a.shape[-1:]:
        raise ValueError("the weight is that of the last axis")
    centred = a - mean(a, -1, True)
    return centred / sqrt(mean(centred * centred, -1, True) + eps) * weight + bias


def stop_gradient(a: Any) -> T:
    return T(asarray(a).a)


def name(a: Any, text: str) -> T:
    return asarray(a)  # no operation: the value itself, with a name


positive = identity


def moveaxis(a: Any, source: int, target: int) -> T:
    a = asarray(a)
    order = [i for i in range(a.ndim) if i != source]
    order.insert(target, source)
    return permute_dims(a, tuple(order))


# Recorders ---------------------------------------------------------------------------------------------------------


class GradientTape:
    """Keeps the pulls of what depends on something watched."""

    def __init__(self, persistent: bool = False, watch_accessed_variables: bool = True) -> None:
        self.persistent, self.accessed = persistent, watch_accessed_variables
        self.records: list[tuple[list[T], list[T], Callable]] = []
        self.followed: dict[int, T] = {}
        self.contents: list[tuple[Variable, T]] = []

    def __enter__(self) -> GradientTape:
        global _recorders
        _recorders = [*_recorders, self]
        return self

    def __exit__(self, *exc: object) -> None:
        global _recorders
        _recorders = [r for r in _recorders if r is not self]

    @contextmanager
    def stop_recording(self) -> Iterator[None]:
        with _told([r for r in _recorders if r is not self]):
            yield

    def watch(self, x: Any) -> None:
        if isinstance(x, (list, tuple)):
            for leaf in x:
                self.watch(leaf)
            return
        if isinstance(x, Variable):
            self.contents.append((x, x._content))
            x = x._content
        self.followed[id(x)] = x

    def read(self, variable: Variable) -> None:
        if (self.accessed and variable.trainable) or any(v is variable for v, _ in self.contents):
            self.watch(variable)

    def record(self, inputs: list[T], outs: list[T], pull: Callable, push: Callable, outer: list[Any]) -> None:
        if any(id(x) in self.followed for x in inputs):
            self.records.append((inputs, outs, pull))
            self.followed.update({id(o): o for o in outs if o.dtype.kind in "fc"})

    def gradient(
        self, target: Any, sources: Any, output_gradients: Any = None, unconnected_gradients: str = "none"
    ) -> Any:
        targets = list(target) if isinstance(target, (list, tuple)) else [target]
        sought = list(sources) if isinstance(sources, (list, tuple)) else [sources]
        if not self.persistent:
            self.__exit__()
        weights = output_gradients if isinstance(output_gradients, (list, tuple)) else [output_gradients]
        weights = [*weights, *[None] * len(targets)]
        cts: dict[int, T] = {}
        for t, weight in zip(targets, weights, strict=False):
            seed = T(np.ones(t.shape, t.dtype)) if weight is None else asarray(weight)
            self._add(cts, t._content if isinstance(t, Variable) else t, seed)
        for inputs, outs, pull in reversed(list(self.records)):
            come = [cts.get(id(o)) for o in outs]
            if any(c is not None for c in come):
                for x, ct in zip(inputs, pull(come), strict=True):
                    if ct is not None and id(x) in self.followed:
                        self._add(cts, x, ct)
        found = [self._found(cts, s, unconnected_gradients == "zero") for s in sought]
        return found if isinstance(sources, (list, tuple)) else found[0]

    def _add(self, cts: dict[int, T], x: T, ct: T) -> None:
        cts[id(x)] = cts[id(x)] + ct if id(x) in cts else ct

    def _found(self, cts: dict[int, T], source: Any, zero: bool) -> Any:
        if isinstance(source, Variable):
            values = {id(c): c for v, c in self.contents if v is source} | {id(source._content): source._content}
        else:
            values = {id(source): source}
        total = None
        for key in values:
            if key in cts:
                total = cts[key] if total is None else total + cts[key]
        return T(np.zeros(source.shape, source.dtype)) if total is None and zero else total

    def jacobian(self, target: Any, source: Any, unconnected_gradients: str = "none") -> Any:
        rows, self.persistent = [], True
        for i in range(target.a.size):
            seed = np.zeros(target.a.size, target.dtype)
            seed[i] = 1.0
            ct = T(seed.reshape(target.shape))
            rows.append(self.gradient(target, source, [ct], unconnected_gradients="zero"))
        return (
            reshape(stack(rows), (*target.shape, *source.shape))
            if rows
            else T(np.zeros((*target.shape, *source.shape), target.dtype))
        )


class _Tangents:
    """Pushes tangents; its own work is told to the recorders outside it alone."""

    def __init__(self) -> None:
        self.of: dict[int, tuple[T, T]] = {}

    def read(self, variable: Variable) -> None:
        pass

    def record(self, inputs: list[T], outs: list[T], pull: Callable, push: Callable, outer: list[Any]) -> None:
        ts = [self.of[id(x)][1] if id(x) in self.of else None for x in inputs]
        if all(t is None for t in ts):
            return
        with _told(outer):
            found = push(ts)
        for o, t in zip(outs, found, strict=True):
            if t is not None:
                self.of[id(o)] = o, t


def jvp(f: Callable, xs: tuple, tangents: tuple) -> tuple[Any, Any]:
    global _recorders
    xs = tuple(identity(x) for x in xs)
    pusher = _Tangents()
    pusher.of = {id(x): (x, asarray(t)) for x, t in zip(xs, tangents, strict=True)}
    with _told([*_recorders, pusher]):
        y = f(*xs)

    def of(leaf: Any) -> Any:
        if isinstance(leaf, (list, tuple)):
            return type(leaf)(of(x) for x in leaf)
        return pusher.of[id(leaf)][1] if id(leaf) in pusher.of else T(np.zeros(leaf.shape, leaf.dtype))

    return y, of(y)


def value_and_grad(f: Callable) -> Callable:
    def wrapped(x: Any) -> tuple[T, T]:
        x = identity(x)
        with GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(x)
            y = f(x)
        return y, tape.gradient(y, x, unconnected_gradients="zero")

    return wrapped


def grad(f: Callable) -> Callable:
    return lambda x: value_and_grad(f)(x)[1]


def vjp(f: Callable, x: Any) -> tuple[Any, Callable]:
    x = identity(x)
    with GradientTape(persistent=True, watch_accessed_variables=False) as tape:
        tape.watch(x)
        y = f(x)
    return y, lambda ct: (tape.gradient(y, x, [ct], unconnected_gradients="zero"),)


def hvp(f: Callable, x: Any, v: Any) -> T:
    return jvp(grad(f), (x,), (v,))[1]


def jacobian(f: Callable) -> Callable:
    def wrapped(x: Any) -> T:
        x = identity(x)
        with GradientTape(persistent=True, watch_accessed_variables=False) as tape:
            tape.watch(x)
            y = f(x)
        return tape.jacobian(y, x)

    return wrapped


def vmap(f: Callable) -> Callable:
    def wrapped(*batches: Any) -> Any:
        rows = [
            f(*row) for row in zip(*[[b[i] for i in range(b.shape[0])] for b in map(asarray, batches)], strict=True)
        ]
        if isinstance(rows[0], (list, tuple)):
            return type(rows[0])(stack(column) for column in zip(*rows, strict=True))
        return stack(rows)

    return wrapped


def _transposed(pull: Callable, cts: list[T], tangents: list[Any]) -> list[T]:
    """Tangents of the outputs: the derivative of sum(pull(u) * t) in u, at any u, for ``pull`` is linear."""
    us = [T(np.zeros(c.shape, c.dtype)) for c in cts]
    with GradientTape(watch_accessed_variables=False) as tape:
        for u in us:
            tape.watch(u)
        total: Any = T(np.zeros(()))
        for g, t in zip(pull(us), tangents, strict=True):
            if g is not None and t is not None:
                total = total + sum(g * t)
    return tape.gradient(total, us, unconnected_gradients="zero")


def custom_gradient(f: Callable) -> Callable:
    def wrapped(*args: Any) -> Any:
        seen = _Seen()
        with _told([*_recorders, seen]):
            y, rule = f(*args)
        outs = [T(asarray(o).a) for o in (y if isinstance(y, tuple) else (y,))]
        variables = [v for v in seen.variables if v.trainable and not any(v is a for a in args)]
        places = [i for i, a in enumerate(args) if isinstance(a, (T, Variable))]
        inputs = [args[i] if isinstance(args[i], T) else args[i]._content for i in places]
        inputs += [v._content if v._content is c else c for v, c in zip(variables, seen.first, strict=False)]
        for a in args:
            if isinstance(a, Variable):
                for r in _recorders:
                    r.read(a)

        def pull(cts: list[Any]) -> list[Any]:
            cts = [T(np.zeros(o.shape, o.dtype)) if c is None else c for c, o in zip(cts, outs, strict=True)]
            found, more = rule(*cts, variables=variables) if variables else (rule(*cts), [])
            found = list(found) if isinstance(found, (tuple, list)) else [found]
            return [None if g is None else asarray(g) for g in [found[i] for i in places] + list(more)]

        for place, recorder in enumerate(list(_recorders)):
            recorder.record(inputs, outs, pull, lambda ts: _transposed(pull, outs, ts), _recorders[:place])
        return tuple(outs) if isinstance(y, tuple) else outs[0]

    return wrapped


class _Seen:
    """The variables that a function reads, with their contents then."""

    def __init__(self) -> None:
        self.variables: list[Variable] = []
        self.first: list[T] = []

    def read(self, variable: Variable) -> None:
        if not any(v is variable for v in self.variables):
            self.variables.append(variable)
            self.first.append(variable._content)

    def record(self, *told: Any) -> None:
        pass


class primitive:
    """One's own operation: raw arrays in and out; its rules by name."""

    def __init__(self, f: Callable) -> None:
        self.f, self.pulls, self.pushes = f, (), ()
        self.names = f.__code__.co_varnames[: f.__code__.co_argcount]

    def defvjp(self, *rules: Any) -> primitive:
        self.pulls = rules
        return self

    def defjvp(self, *rules: Any) -> primitive:
        self.pushes = rules
        return self

    def __call__(self, *args: Any) -> T:
        inputs = [asarray(a) for a in args]
        out = T(np.asarray(self.f(*[x.a for x in inputs])))
        known = dict(zip(self.names, inputs, strict=True)) | {"out": out}

        def asked(rule: Callable, **seed: Any) -> T:
            names = rule.__code__.co_varnames[: rule.__code__.co_argcount]
            return rule(**{n: {**known, **seed}[n] for n in names})

        def pull(cts: list[T]) -> list[Any]:
            if self.pulls:
                return [None if r is None else asked(r, ct=cts[0]) for r in self.pulls]
            return [
                _transposed(lambda us, r=r: [asked(r, t=us[0])], [x], [cts[0]])[0]
                for r, x in zip(self.pushes, inputs, strict=True)
            ]

        def push(ts: list[Any]) -> list[T]:
            if not self.pushes:
                return _transposed(lambda us: pull(us), [out], ts)
            found = [asked(r, t=t) for r, t in zip(self.pushes, ts, strict=True) if t is not None]
            total = found[0]
            for more in found[1:]:
                total = total + more
            return [total]

        for place, recorder in enumerate(list(_recorders)):
            recorder.record(inputs, [out], pull, push, _recorders[:place])
        return out


def scan(f: Callable, init: Any, xs: Any) -> tuple[Any, Any]:
    state, found = init, []
    for i in range(xs.shape[0]):
        state, y = f(state, asarray(xs)[i])
        found.append(y)
    return state, stack(found)


def reversible(f: Callable, g: Callable) -> Callable:
    def block(x1: Any, x2: Any) -> tuple[T, T]:
        y1 = asarray(x1) + f(x2)
        return y1, asarray(x2) + g(y1)

    return block


class _Generator:
    """tapegrad's numbers: what is drawn is not what is asked here."""

    def __init__(self, seed: int) -> None:
        self._generator = tapegrad.random.Generator(seed)

    def __getattr__(self, what: str) -> Callable:
        return lambda *args, **named: T(getattr(self._generator, what)(*args, **named).numpy())


def _dropout(x: Any, p: float) -> T:
    x = asarray(x)
    if not p:
        return identity(x)
    return x * T(tapegrad.nn.functional.dropout(tapegrad.asarray(np.ones(x.shape, x.dtype)), p).numpy())


random = SimpleNamespace(Generator=_Generator, seed=lambda n: tapegrad.random.seed(n))
nn = SimpleNamespace(functional=SimpleNamespace(dropout=_dropout))
