"""`Layer`: a callable that owns variables, and the walk that finds them."""

from __future__ import annotations

import inspect
import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from numbers import Integral
from operator import attrgetter
from types import FunctionType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import tapegrad.random as random
from tapegrad import ops
from tapegrad.core.state import unrecorded
from tapegrad.errors import DTypeError, TapegradError
from tapegrad.nn import initializers
from tapegrad.nn.layers import saving, state_dicts, summary
from tapegrad.nn.layers.state_dicts import Differences, State
from tapegrad.nn.layers.summary import Summary
from tapegrad.ops.casting import by_policy
from tapegrad.spellings import LAYERS, Named, missing
from tapegrad.tensor import DTypeLike, Tensor, TensorLike
from tapegrad.tracing.frames import LAYER, code_of, counts_as_call
from tapegrad.variable import Variable

if TYPE_CHECKING:
    from os import PathLike
    from types import CodeType, FrameType

    from tapegrad.optim import Optimizer

_number_of = attrgetter("_number")
_takes_training: WeakKeyDictionary[type, bool] = WeakKeyDictionary()
_serial: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)


class Layer(Named):
    """A function with variables.  Subclasses define ``call(inputs, ...)``, and ``build(input_shape)`` if they have any.

    ``build`` runs once, before the first call.  Variables and sublayers are found through attributes, lists, tuples
    and dicts, also behind a wrapper with ``__wrapped__`` such as ``recompute_grad``.  A layer with weights computes in
    its own ``dtype``: other numbers are converted, as in Keras.

    ``training=True`` reaches ``call`` if it takes an argument of that name.  There is no global mode, so a layer that
    calls others must pass it on, and a layer without that argument may hold no layer that has it (TapegradError).
    """

    def __getattr__(self, name: str) -> Any:
        raise missing(self, name, LAYERS)

    def __init__(self, *, name: str | None = None, dtype: DTypeLike | None = None, trainable: bool = True) -> None:
        self.name = _unique_name(type(self)) if name is None else name
        self.dtype = ops.get_default_dtype().name if dtype is None else dtype
        self.trainable = trainable
        self.built = False
        # Drawn here and not in build: the global stream must not depend on whether the weights are there already.
        self._seed = fresh_seed()

    def build(self, input_shape: Any) -> None:
        """Make the variables for inputs of that shape (a tuple, or a structure of them).  Does nothing by default."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """What the layer computes; every subclass defines it."""
        raise TapegradError(f"{self}: the class {type(self).__name__} defines no call(inputs)")

    def __call__(self, inputs: TensorLike, *args: Any, **kwargs: Any) -> Tensor:
        """Build if that has not happened, then ``call``.  Arrays and numbers become tensors.

        Raises what ``call`` raises, and TapegradError if ``training=True`` would be lost on the way to a sublayer.
        """
        if "built" not in self.__dict__:
            raise TapegradError(
                f"{type(self).__name__}: its __init__ must call super().__init__() before anything else uses it"
            )
        if not isinstance(inputs, Tensor) and not _is_structure(inputs):
            inputs = ops.asarray(inputs)
        if not self.built:
            self.build(_shape_of(inputs))
            self.built = True
        if "training" in kwargs and not takes_training(type(self)):
            if kwargs.pop("training"):
                self._refuse_lost_training()
        return self.call(inputs, *args, **kwargs)

    def __str__(self) -> str:
        return f'{type(self).__name__} "{self.__dict__.get("name", "?")}"'

    def __repr__(self) -> str:
        """The layer and those in it, a line each, with paths and shapes of variables."""
        lines = []
        for path, depth, layer in named_layers(self):
            shapes = ", ".join(f"{v.name.rpartition('/')[2]} {v.dtype} {v.shape}" for v in layer.own_variables())
            lines.append("  " * depth + (f"{path}: " if path else "") + str(layer) + (f": {shapes}" if shapes else ""))
        return "\n".join(lines)

    def add_weight(
        self,
        shape: tuple[int, ...],
        initializer: str | initializers.Initializer = "glorot_uniform",
        *,
        name: str | None = None,
        trainable: bool = True,
        dtype: DTypeLike | None = None,
    ) -> Variable:
        """A new variable; assign it to an attribute, which is how the layer finds it.

        Raises TapegradError for an unknown initializer.
        """
        dtype = self.dtype if dtype is None else dtype
        generator = random.Generator(self._seed)
        self._seed += 1 << 96  # the next weight has another stream
        value = initializers.get(initializer)(tuple(shape), dtype, generator)
        full_name = self.name if name is None else f"{self.name}/{name}"
        return Variable(value, trainable=trainable, name=full_name, dtype=dtype)

    @property
    def variables(self) -> list[Variable]:
        """Every variable of the layer and its sublayers, each once, in the order in which they were constructed."""
        return sorted([v for _, v in _variables_of(self, False)], key=_number_of)

    @property
    def trainable_variables(self) -> list[Variable]:
        """The variables to train: without those made with ``trainable=False`` and those of frozen layers."""
        return sorted([v for _, v in _variables_of(self, True)], key=_number_of)

    @property
    def layers(self) -> list[Layer]:
        """The sublayers held directly (in attributes, lists, tuples, dicts), in order of assignment."""
        sublayers: dict[int, Layer] = {}
        for _, held in _held(self, "", set()):
            if isinstance(held, Layer) and held is not self:
                sublayers.setdefault(id(held), held)
        return list(sublayers.values())

    def named_variables(self) -> Iterator[tuple[str, Variable]]:
        """Pairs of path and variable, such as ``("blocks.0.dense.kernel", v)``; a shared one under its first path."""
        return named_variables(self)

    def own_variables(self) -> list[Variable]:
        """The variables held directly, not those of sublayers, in order of assignment."""
        held = [x for _, x in _held(self, "", set()) if isinstance(x, Variable)]
        return list({id(v): v for v in held}.values())

    def count_params(self) -> int:
        """How many numbers the variables hold."""
        return sum(v.size for v in self.variables)

    def save(self, path: str | PathLike[str], optimizer: Optimizer | None = None) -> None:
        """Write all variables, and the optimizer's, to a safetensors file.  See :func:`.saving.save`."""
        saving.save(path, str(self), list(named_variables(self)), optimizer)

    def load(self, path: str | PathLike[str], optimizer: Optimizer | None = None) -> None:
        """Read what ``save`` wrote; nothing changes unless all fits.  See :func:`.saving.load`."""
        saving.load(path, str(self), list(named_variables(self)), optimizer)

    def state_dict(self) -> State:
        """The present values of all variables, as tensors by path, which later training does not change."""
        return state_dicts.taken(list(named_variables(self)))

    def load_state_dict(self, state: Mapping[str, TensorLike], strict: bool = True) -> Differences:
        """Set variables from values by path: tensors or arrays of their shapes and dtypes, of any device.

        Nothing changes unless all fits.  Without ``strict`` names that are on one side only do not matter; they are
        the ``missing`` and ``unexpected`` of the result.  Of a layer whose variables are cut over ranks see
        ``tg.distributed.load``.

        Raises SaveError, which lists what is missing, unexpected, of another shape or dtype; and for a layer that has
        no variables yet.
        """
        variables = list(named_variables(self))
        if not variables:
            raise saving.no_variables(self)
        return state_dicts.put(str(self), variables, state, strict)

    def summary(self, inputs: Any = None, dtype: DTypeLike | None = None) -> Summary:
        """A table of the layer and those in it: output shapes, parameters and their bytes; print it.

        inputs: a shape with the batch's size, such as ``(1, 3, 32, 32)``, for zeros of ``dtype`` (by default the
        layer's), or inputs themselves, or a list or dict of these; the layer is called on them once, and so built.
        Without ``inputs`` there are no output shapes, and a layer that was not called yet has no parameters.

        Raises what ``call`` raises.
        """
        run = None
        if inputs is not None:
            given = _inputs_of(inputs, self.dtype if dtype is None else dtype)
            run = lambda: unrecorded(self, given)
        return summary.summary(str(self), list(named_layers(self)), run)

    def _as_own_dtype(self, x: TensorLike) -> Tensor:
        """``x`` as a tensor of the layer's dtype.  Raises DTypeError for complex numbers in a real layer."""
        x = ops.asarray(x)
        if x.dtype == self.dtype:
            return x
        if "complex" in str(x.dtype) and "complex" not in str(self.dtype):
            raise DTypeError(f"{self}: wanted real input, got {x.dtype}; take the real part, or give dtype={x.dtype}")
        return ops.astype(x, self.dtype)

    def _operands(self, op: str, inputs: TensorLike, *weights: Variable | None) -> Any:
        """``inputs`` in the layer's dtype, and the weights; or all as an autocast in force gives them to ``op``."""
        x, *others = by_policy(op, (inputs, *weights))
        dtype = others[0].dtype
        return (x if isinstance(x, Tensor) and x.dtype == dtype else self._as_own_dtype(x), *others)

    def _refuse_lost_training(self) -> None:
        waiting = [self]
        seen = {id(self)}
        while waiting:
            for layer in waiting.pop().layers:
                if takes_training(type(layer)) and not isinstance(layer, Transparent):
                    raise TapegradError(
                        f"{self}: called with training=True, but {type(self).__name__}.call takes no argument "
                        f"`training`, so {layer} inside it would not hear of it; "
                        "let call take training=False and pass it on"
                    )
                if id(layer) not in seen:
                    seen.add(id(layer))
                    waiting.append(layer)


class Transparent:
    """Marks a layer that takes ``training`` only to hand it to its sublayers, and does nothing else with it."""


def named_variables(layer: Layer, *, only_trainable: bool = False) -> Iterator[tuple[str, Variable]]:
    """Pairs of path and variable, such as ``("blocks.0.dense.kernel", v)``; a shared variable under its first path."""
    return iter(_variables_of(layer, only_trainable))


def _variables_of(layer: Layer, only_trainable: bool) -> list[tuple[str, Variable]]:
    """The same pairs, in a list: each of a generator's costs a call."""
    found: list[tuple[str, Variable]] = []
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [("", layer)]
    while waiting:
        path, held = waiting.pop()
        if id(held) in seen:
            continue
        seen.add(id(held))
        if isinstance(held, Variable):
            if held._trainable or not only_trainable:
                found.append((path, held))
        elif held.trainable or not only_trainable:
            prefix = f"{path}." if path else ""
            waiting.extend(reversed(_held(held, prefix, seen)))
    return found


def named_layers(layer: Layer) -> Iterator[tuple[str, int, Layer]]:
    """The layer and those in it, each once: its path, how many layers it is within, itself."""
    seen: set[int] = set()
    waiting = [("", 0, layer)]
    while waiting:
        path, depth, held = waiting.pop()
        if id(held) in seen:
            continue
        seen.add(id(held))
        yield path, depth, held
        prefix = f"{path}." if path else ""
        inside = [(at, depth + 1, x) for at, x in _held(held, prefix, seen) if isinstance(x, Layer)]
        waiting.extend(reversed(inside))


def _inputs_of(inputs: Any, dtype: DTypeLike) -> Any:
    """Zeros in place of shapes."""
    if isinstance(inputs, tuple) and all(isinstance(n, (int, Integral)) for n in inputs):
        return ops.zeros(inputs, dtype)
    if isinstance(inputs, dict):
        return {key: _inputs_of(x, dtype) for key, x in inputs.items()}
    return [_inputs_of(x, dtype) for x in inputs] if isinstance(inputs, (list, tuple)) else inputs


def _held(layer: Layer, prefix: str, seen: set[int]) -> list[tuple[str, Any]]:
    """The variables and layers that the attributes of a layer hold, without those inside of its layers."""
    found: list[tuple[str, Any]] = []
    for key, value in vars(layer).items():
        if isinstance(value, Variable | Layer):
            found.append((prefix + key, value))
        elif type(value) not in _PLAIN and not (type(value) is FunctionType and not vars(value)):
            _add_held(found, value, prefix + key, seen)
    return found


_PLAIN = {str, bool, int, float, type(None)}
"""Of most attributes, which hold nothing; nor does a function that wraps none, such as an activation."""


def _add_held(found: list[tuple[str, Any]], value: Any, path: str, seen: set[int]) -> None:
    """Add what ``value`` is, or contains."""
    value = unwrapped(value) if callable(value) else value
    if isinstance(value, Variable | Layer):
        found.append((path, value))
        return
    holder = value  # lives on, as parts made for the asking do not
    if isinstance(getattr(value, "parts", None), tuple):  # a reversible block, a checkpointed sequence
        value = value.parts
    if isinstance(value, list | tuple | dict):
        if id(holder) in seen:
            return
        seen.add(id(holder))
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            if type(item) not in _PLAIN:
                _add_held(found, item, f"{path}.{key}", seen)


def _described(frame: FrameType) -> tuple[int, str, CodeType | None]:
    """A call of a layer, as profiles and plans name it."""
    layer = type(frame.f_locals["self"])
    return LAYER, layer.__qualname__, code_of(layer.call)


counts_as_call(Layer.__call__, _described)


def unwrapped(value: Any) -> Any:
    """The layer behind wrappers (``recompute_grad(layer)``) and bound methods of layers; anything else as it is."""
    inside = value
    while callable(inside) and not isinstance(inside, Layer | Variable | Tensor | type):
        inner = getattr(inside, "__wrapped__", None)
        if inner is None:
            inner = getattr(inside, "__self__", None)
            return inner if isinstance(inner, Layer) else value
        inside = inner
    return inside if isinstance(inside, Layer) else value


def takes_training(cls: type[Layer]) -> bool:
    """Whether ``cls.call`` has an argument ``training``, or takes any keyword."""
    known = _takes_training.get(cls)
    if known is None:
        parameters = inspect.signature(cls.call).parameters
        known = _takes_training[cls] = "training" in parameters or (
            cls.call is not Layer.call and any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        )
    return known


def _unique_name(cls: type) -> str:
    """``MaxPool2D`` -> ``max_pool2d``, then ``max_pool2d_1``, as Keras counts."""
    base = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower().strip("_")
    number = next(_serial[base])
    return f"{base}_{number}" if number else base


def fresh_seed() -> int:
    """A new seed from the global stream, so that ``random.seed`` determines all weights."""
    key, position = random.default_generator.take(1)
    return key + ((position + 1) << 64)  # no seed below 2**64 has this key


def _is_structure(inputs: TensorLike) -> bool:
    """Whether ``inputs`` is None or a container of tensors rather than numbers."""
    if isinstance(inputs, list | tuple):
        return not inputs or any(_is_structure(i) or hasattr(i, "shape") for i in inputs)
    return inputs is None or isinstance(inputs, dict)


def _shape_of(inputs: Any) -> Any:
    """The shape of a tensor, or the same structure with shapes instead of tensors."""
    if isinstance(inputs, dict):
        return {key: _shape_of(value) for key, value in inputs.items()}
    if isinstance(inputs, list | tuple):
        return [_shape_of(i) for i in inputs]
    return None if inputs is None else tuple(inputs.shape)
