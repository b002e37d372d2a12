"""Uniform numbers and bits, from which all distributions are drawn, and the form that their functions share."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, TypeGuard

from tapegrad.core.aval import Shape, ShapedArray, broadcast_shapes, shaped
from tapegrad.core.primitive import Sample, general
from tapegrad.core.state import unrecorded
from tapegrad.device import CPU, Device, asdevice, current_device, dtypes
from tapegrad.device.numerics import bits
from tapegrad.device.types import DType
from tapegrad.errors import DomainError, DTypeError, ShapeError
from tapegrad.ops import any as any_of
from tapegrad.ops import broadcast_to, cos, floor, log1p, maximum, sqrt
from tapegrad.ops.dispatch import SCALARS, barrier, cast, constant, tensor
from tapegrad.ops.index.bounds import every, require
from tapegrad.random.stream import Generator, default_generator
from tapegrad.tensor import DTypeLike, Tensor, TensorLike
from tapegrad.variable import Variable

_BY_ANY = inspect.Parameter.POSITIONAL_OR_KEYWORD

uniform_p = general(
    "random_uniform",
    impl=lambda xp, *, key, counter, shape, dtype, device: bits.uniform(key, counter, shape, dtype),
    infer=lambda *, key, counter, shape, dtype, device: shaped(shape, dtype, device),
    cxx_drawn="tg_uniform",
    samples=[Sample(key=1, counter=0, shape=(2, 3), dtype=dtypes.float32, device=CPU)],
)
bits16_p = general(
    "random_bits16",
    impl=lambda xp, *, key, counter, shape, device: bits.bits16(key, counter, shape),
    infer=lambda *, key, counter, shape, device: shaped(shape, dtypes.uint16, device),
    cxx_drawn="tg_bits16",
    samples=[Sample(key=1, counter=0, shape=(2, 3), device=CPU)],
)


def infer_drawn(*parameters: ShapedArray, key: int, counter: int, dtype: DType) -> ShapedArray:
    """A number for each element of the parameters, which have one shape."""
    return parameters[0].with_dtype(dtype)


_FIRST = "the shape comes first, and parameters follow: tg.random.uniform((3,), low, high), or shape=(3,)"


def lengths_of(shape: int | Sequence[int], *parameters: object) -> Shape:
    """A shape as users give it, beside the ``parameters`` of the distribution.

    Raises DTypeError, and ShapeError, which also recognizes NumPy's order of arguments with the size at the end.
    """
    try:
        lengths = tuple(map(operator.index, shape if isinstance(shape, (tuple, list)) else (shape,)))
    except TypeError:
        raise DTypeError(f"random: a shape is made of integers, got {shape!r:.60}; {_FIRST}") from None
    if any(n < 0 for n in lengths):
        raise ShapeError(f"random: shape {shape} has a negative length; {_FIRST}")
    size = next((p for p in parameters if isinstance(p, tuple) and all(type(n) is int for n in p)), None)
    if size is not None and not isinstance(shape, (tuple, list)):
        raise ShapeError(f"random: shape is {shape!r} and a parameter is {size!r}; {_FIRST} (parameters may be lists)")
    return lengths


def unit(
    shape: Shape, dtype: DTypeLike | None, generator: Generator | None, device: Device | str | None = None
) -> Tensor:
    """Uniform in [0, 1) on a grid: multiples of 2**-53 (float64), 2**-24 (float32), or the coarser of a short float."""
    drawn, wanted = drawn_dtype(dtype), dtypes.asdtype(dtype)
    numbers = 4 if drawn == dtypes.float64 else 8  # of a block
    key, counter = (generator or default_generator).draw(prod(shape), lambda size: -(-size // numbers))
    u = barrier(uniform_p, key=key, counter=counter, shape=shape, dtype=drawn, device=home(device))
    if wanted == drawn:
        return u
    steps = 2.0 ** (11 if wanted == dtypes.float16 else 8 if wanted.itemsize == 2 else 3)  # no rounding up to 1
    return cast(floor(u * steps) / steps, wanted)


def near(device: Device | str | None, *parameters: TensorLike) -> Device | str | None:
    """``device``; where none is named that of the first parameter which is a tensor or variable."""
    return next((p.device for p in parameters if isinstance(p, Tensor | Variable)), None) if device is None else device


def home(device: Device | str | None) -> Device:
    """The device on which to draw."""
    return current_device() if device is None else asdevice(device)


def drawn_dtype(dtype: DTypeLike | None) -> DType:
    """The dtype in which numbers for ``dtype`` are made.  Raises DTypeError."""
    wanted = dtypes.asdtype(dtype)
    if not dtypes.is_inexact(wanted) or wanted.kind == "c":
        raise DTypeError(f"random: dtype must be a float, got {wanted}")
    return dtypes.float64 if wanted == dtypes.float64 else dtypes.float32


def is_number(x: TensorLike, value: float) -> bool:
    """Whether ``x`` is the Python number ``value``."""
    return isinstance(x, SCALARS) and x == value


Domain = Mapping[str, Callable[..., Any]]
"""Conditions on parameters, as messages state them; for each a function of these, true where they do not meet it."""
NONNEGATIVE_SCALE: Domain = {"scale >= 0": lambda scale: scale < 0}


def within(op: str, domain: Domain, parameters: Mapping[str, Any]) -> None:
    """Raise DomainError unless ``parameters``, tensors or Python numbers, are within ``domain``.

    Of tensors on a GPU it is raised when the host next waits for it.
    """
    for condition, violated in domain.items():
        names: tuple[str, ...] = violated.__code__.co_varnames
        numbers = {name: parameters[name] for name in names}
        if not any(isinstance(p, Tensor) for p in numbers.values()):
            if violated(**numbers):
                got = ", ".join(f"{name}={p!r}" for name, p in numbers.items())
                raise DomainError(f"random.{op}: {condition} is required, got {got}")
        else:
            message = f"random.{op}: {condition} is required, which the given {', '.join(names)} do not meet"
            unrecorded(_require, message, violated, numbers)


def _require(message: str, violated: Callable[..., Tensor], parameters: Mapping[str, Any]) -> None:
    wrong = cast(any_of(violated(**parameters)), dtypes.int32)
    require(every(wrong), 0, 0, message, lambda *_: DomainError(message))


def _is_python(p: object) -> TypeGuard[float]:
    """Whether ``p`` is a real number of Python's."""
    return isinstance(p, (int, float)) and not hasattr(p, "dtype")


def box_muller(u: Tensor, v: Tensor) -> Tensor:
    """Normal numbers of mean 0 and deviation 1 from pairs of uniform ones (Box and Muller 1958)."""
    return sqrt(-2.0 * log1p(-u)) * cos(6.283185307179586 * v)


class Draw:
    """One call of a distribution: its parameters as tensors of the dtype to compute in, and the shape they make.

    A parameter's dtype does not widen the result, which has ``dtype``: what is drawn is float32 unless that is float64.
    """

    def __init__(
        self,
        op: str,
        shape: int | Sequence[int],
        parameters: Sequence[TensorLike],
        dtype: DTypeLike | None,
        generator: Generator | None,
        device: Device | str | None,
    ) -> None:
        self.wide = drawn_dtype(dtype)
        self.generator = generator or default_generator
        lengths = lengths_of(shape, *parameters)
        tensors = [p for p in parameters if isinstance(p, Tensor)]
        self.device = tensors[0].device if device is None and tensors else home(device)
        beside = tensors[0] if tensors else None
        self.parameters = [self._parameter(op, p, beside) for p in parameters]
        self.checkable = [p if _is_python(p) else t for p, t in zip(parameters, self.parameters, strict=True)]
        self.shape = broadcast_shapes(f"random.{op}", lengths, *(p.shape for p in self.parameters))

    def _parameter(self, op: str, p: TensorLike, beside: Tensor | None) -> Tensor:
        if _is_python(p):
            return Tensor(constant(float(p), self.wide, self.device))
        parameter = tensor(f"random.{op}", p, beside)
        if parameter.dtype.kind == "c":
            raise DTypeError(f"random.{op}: a parameter is {parameter.dtype}; parameters are real")
        return cast(parameter, self.wide)

    def unit(self) -> Tensor:
        """Uniform in [0, 1)."""
        return unit(self.shape, self.wide, self.generator, self.device)

    def open(self) -> Tensor:
        """Uniform in (0, 1): what would be 0 is half a step."""
        return maximum(self.unit(), 2.0**-54 if self.wide == dtypes.float64 else 2.0**-25)

    def exponential(self) -> Tensor:
        """Positive numbers of the exponential distribution of mean 1."""
        return -log1p(-self.open())

    def full(self, p: Tensor) -> Tensor:
        """A parameter in the whole shape."""
        return p if p.shape == self.shape else broadcast_to(p, self.shape)

    def normal(self) -> Tensor:
        """Normal numbers of mean 0 and deviation 1."""
        return box_muller(self.unit(), self.unit())


def distribution(
    domain: Domain, *, counts: bool = False, **defaults: float
) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Make ``sample(d, *parameters)`` the public function of a distribution, whose parameters have these defaults.

    That takes ``shape``, the parameters, ``dtype``, ``generator`` and ``device``, and raises DomainError for parameters
    that are not within ``domain``.  ``counts``: the numbers are whole: computed in float64, of dtype int64 unless
    another one is asked for.
    """

    def public(sample: Callable[..., Tensor]) -> Callable[..., Tensor]:
        name = sample.__name__
        takes = {"shape": (), **defaults, "dtype": "int64" if counts else None, "generator": None, "device": None}
        kinds = {"shape": "int | Sequence[int]", "dtype": "DTypeLike", "generator": "Generator | None",
                 "device": "Device | str | None"}  # fmt: skip
        signature = inspect.Signature(
            [
                inspect.Parameter(p, _BY_ANY, default=default, annotation=kinds.get(p, "TensorLike"))
                for p, default in takes.items()
            ],
            return_annotation="Tensor",
        )

        @functools.wraps(sample, assigned=("__module__", "__name__", "__qualname__", "__doc__"))
        def op(*args: object, **named: object) -> Tensor:
            try:
                given = {**takes, **signature.bind(*args, **named).arguments}
            except TypeError as e:
                raise TypeError(f"random.{name}: {e}") from None
            dtype = "float64" if counts else given["dtype"]
            parameters = [given[p] for p in defaults]
            d = Draw(name, given["shape"], parameters, dtype, given["generator"], given["device"])
            within(name, domain, dict(zip(defaults, d.checkable, strict=True)))
            return cast(d.full(sample(d, *d.parameters)), dtypes.asdtype(given["dtype"]))

        vars(op)["__signature__"] = signature
        return op

    return public
