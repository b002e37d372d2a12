"""Recurrent layers over sequences (n, t, features): SimpleRNN, LSTM, GRU, and Bidirectional around one of them.

Names, arguments and the order of weights are Keras'.  The loop over steps is a plain loop on the tape, so it may stand
in ``recompute_grad`` or under a budget; what a step multiplies with its inputs is one product for all steps.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, TypedDict, Unpack

from tapegrad import ops
from tapegrad.errors import NotATensorError, ShapeError, TapegradError
from tapegrad.nn import checks, functional, initializers
from tapegrad.nn.layers.core import Activation, Start
from tapegrad.nn.layers.layer import Layer, fresh_seed
from tapegrad.tensor import DTypeLike, Tensor, TensorLike
from tapegrad.variable import Variable

State = tuple[Tensor, ...]


class Options(TypedDict, total=False):
    """Arguments by name that every recurrent layer takes; see :class:`Recurrent`."""

    use_bias: bool
    return_sequences: bool
    return_state: bool
    go_backwards: bool
    kernel_initializer: Start
    recurrent_initializer: Start
    bias_initializer: Start
    name: str | None
    dtype: DTypeLike


class Recurrent(Layer):
    """The base of recurrent layers: the loop over the steps of (n, t, features).

    The result is the last output (n, units), with ``return_sequences`` all outputs (n, t, units); with
    ``return_state`` a tuple of it and the last states, each (n, units).  ``go_backwards`` begins at the last step, and
    gives outputs in that order, as in Keras.  A call takes ``initial_state`` (by default zeros) and ``mask`` (n, t):
    where it is false state and output stay as they were.

    Raises ShapeError for inputs, states or masks of other shapes.
    """

    gates: int
    states = 1

    def __init__(
        self,
        units: int,
        activation: Activation = "tanh",
        *,
        use_bias: bool = True,
        return_sequences: bool = False,
        return_state: bool = False,
        go_backwards: bool = False,
        kernel_initializer: Start = "glorot_uniform",
        recurrent_initializer: Start = "orthogonal",
        bias_initializer: Start = "zeros",
        name: str | None = None,
        dtype: DTypeLike | None = None,
    ) -> None:
        super().__init__(name=name, dtype=dtype)
        self.units = checks.positive(self, "units", units)
        self.activation = functional.activation(activation)
        self.use_bias = use_bias
        self.return_sequences, self.return_state, self.go_backwards = return_sequences, return_state, go_backwards
        self.kernel_initializer = initializers.get(kernel_initializer)
        self.recurrent_initializer = initializers.get(recurrent_initializer)
        self.bias_initializer = initializers.get(bias_initializer)

    def build(self, input_shape: tuple[int, ...]) -> None:
        if len(input_shape) != 3:
            raise ShapeError(f"{self}: wanted inputs (n, steps, features), got {tuple(input_shape)}")
        width = self.gates * self.units
        self.kernel = self.add_weight((input_shape[2], width), self.kernel_initializer, name="kernel")
        self.recurrent_kernel = self.add_weight(
            (self.units, width), self.recurrent_initializer, name="recurrent_kernel"
        )
        self.bias = self._bias(width) if self.use_bias else None

    def _bias(self, width: int) -> Variable:
        return self.add_weight((width,), self.bias_initializer, name="bias")

    def step(self, x: Tensor, state: State) -> State:
        """The next states, the output first, after ``x``: inputs times kernel plus bias, (n, gates * units)."""
        raise TapegradError(f"{self}: the class {type(self).__name__} defines no step")

    def call(
        self, inputs: TensorLike, initial_state: TensorLike | Sequence[TensorLike] | None = None, mask: Any = None
    ) -> Any:
        x = self._as_own_dtype(inputs)
        if x.ndim != 3 or x.shape[2] != self.kernel.shape[0]:
            raise ShapeError(f"{self}: wanted inputs (n, steps, {self.kernel.shape[0]}), got {x.shape}")
        state = self._first(x, initial_state)
        if mask is not None:
            mask = ops.asarray(mask, device=x.device)
            if mask.shape != x.shape[:2]:
                raise ShapeError(f"{self}: wanted a mask {x.shape[:2]}, got {mask.shape}")
        way = -1 if self.go_backwards else 1
        projected = ops.matmul(x, self.kernel)
        bias = self._input_bias()
        steps = ops.unstack(projected if bias is None else projected + bias, axis=1)[::way]
        kept = [None] * len(steps) if mask is None else ops.unstack(ops.expand_dims(mask, axis=2), axis=1)[::way]
        outputs = []
        for step, keep in zip(steps, kept):
            new = self.step(step, state)
            state = new if keep is None else tuple(ops.where(keep, a, b) for a, b in zip(new, state))
            outputs.append(state[0])
        result = state[0]
        if self.return_sequences:
            result = ops.stack(outputs, axis=1) if outputs else projected[:, :, : self.units]
        return (result, *state) if self.return_state else result

    def _input_bias(self) -> Any:
        return self.bias

    def _first(self, x: Tensor, given: TensorLike | Sequence[TensorLike] | None) -> State:
        shape = (x.shape[0], self.units)
        if given is None:
            return (ops.zeros(shape, x.dtype, device=x.device),) * self.states
        several = isinstance(given, (list, tuple)) and not isinstance(given[0], (int, float))
        every: Any = given if several else [given]
        state = tuple(self._as_own_dtype(s) for s in every)
        if [s.shape for s in state] != [shape] * self.states:
            wanted = f"{self.states} initial states {shape}" if self.states > 1 else f"an initial state {shape}"
            raise ShapeError(f"{self}: wanted {wanted}, got {[s.shape for s in state]}")
        return state


class SimpleRNN(Recurrent):
    """``h = activation(x kernel + h recurrent_kernel + bias)`` (Elman, 1990).

    kernel: (features, units), recurrent_kernel: (units, units), bias: (units,).  ``options``: see :class:`Recurrent`.
    """

    gates = 1

    def step(self, x: Tensor, state: State) -> State:
        return (self.activation(x + ops.matmul(state[0], self.recurrent_kernel)),)


class LSTM(Recurrent):
    """Long short-term memory (Hochreiter and Schmidhuber, 1997, with a forget gate: Gers et al., 2000).

    ``i, f, o = recurrent_activation(x W + h U + b)``, ``c = f c + i activation(x W_c + h U_c + b_c)``,
    ``h = o activation(c)``; states: h, c.  kernel: (features, 4 units), recurrent_kernel: (units, 4 units), bias: (4
    units,), in the order i, f, c, o (PyTorch's is i, f, c, o too, transposed, with two biases to be added).  The bias
    of the forget gate begins with 1 under ``unit_forget_bias`` (Jozefowicz et al., 2015).  ``options``: see
    :class:`Recurrent`.
    """

    gates, states = 4, 2

    def __init__(
        self,
        units: int,
        activation: Activation = "tanh",
        recurrent_activation: Activation = "sigmoid",
        unit_forget_bias: bool = True,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(units, activation, **options)
        self.recurrent_activation = functional.activation(recurrent_activation)
        self.unit_forget_bias = unit_forget_bias

    def _bias(self, width: int) -> Variable:
        bias = super()._bias(width)
        if self.unit_forget_bias:
            bias.assign(bias.value().at[self.units : 2 * self.units].set(1.0))
        return bias

    def step(self, x: Tensor, state: State) -> State:
        h, c = state
        i, f, a, o = ops.split(x + ops.matmul(h, self.recurrent_kernel), 4, axis=1)
        gate = self.recurrent_activation
        c = gate(f) * c + gate(i) * self.activation(a)
        return gate(o) * self.activation(c), c


class GRU(Recurrent):
    """Gated recurrent units (Cho et al., arXiv 1406.1078), with the reset after the product, as in Keras and PyTorch.

    ``z, r = recurrent_activation(x W + h U + b)``, ``h' = activation(x W_h + b_h + r (h U_h + d_h))``,
    ``h = z h + (1 - z) h'``.  kernel: (features, 3 units), recurrent_kernel: (units, 3 units), bias: (2, 3 units), of
    inputs and of the state, in the order z, r, h (PyTorch's is r, z, h).  ``options``: see :class:`Recurrent`.
    """

    gates = 3

    def __init__(
        self,
        units: int,
        activation: Activation = "tanh",
        recurrent_activation: Activation = "sigmoid",
        **options: Unpack[Options],
    ) -> None:
        super().__init__(units, activation, **options)
        self.recurrent_activation = functional.activation(recurrent_activation)

    def _bias(self, width: int) -> Variable:
        return self.add_weight((2, width), self.bias_initializer, name="bias")

    def _input_bias(self) -> Any:
        return None if self.bias is None else ops.asarray(self.bias)[0]

    def step(self, x: Tensor, state: State) -> State:
        (h,) = state
        y = ops.matmul(h, self.recurrent_kernel)
        if self.bias is not None:
            y = y + ops.asarray(self.bias)[1]
        (xz, xr, xh), (hz, hr, hh) = (ops.split(t, 3, axis=1) for t in (x, y))
        z, r = self.recurrent_activation(xz + hz), self.recurrent_activation(xr + hr)
        return (z * h + (1 - z) * self.activation(xh + r * hh),)


class Bidirectional(Layer):
    """A recurrent layer and a second one of its kind that runs backwards, over the same inputs.

    ``merge_mode``: how the outputs come together: "concat" on the last axis, "sum", "mul", "ave", or None: a tuple of
    both.  With ``return_state`` the states of both follow.  ``initial_state``: those of both, one after the other.
    ``forward_layer`` is the layer given, ``backward_layer`` its copy with weights of its own.

    Raises NotATensorError for what is no recurrent layer, TapegradError for one that is built already or another mode.
    """

    def __init__(self, layer: Recurrent, merge_mode: str | None = "concat", *, name: str | None = None) -> None:
        if not isinstance(layer, Recurrent):
            raise NotATensorError(f"Bidirectional: wanted a recurrent layer, got {type(layer).__name__}")
        super().__init__(name=name, dtype=layer.dtype)
        if layer.built:
            raise TapegradError(f"{self}: {layer} has weights already; wrap it before it is called")
        if merge_mode not in ("concat", "sum", "mul", "ave", None):
            raise TapegradError(f'{self}: wanted merge_mode "concat", "sum", "mul", "ave" or None, got {merge_mode!r}')
        self.merge_mode = merge_mode
        self.forward_layer, self.backward_layer = layer, copy.deepcopy(layer)
        self.backward_layer.name, self.backward_layer._seed = f"backward_{layer.name}", fresh_seed()
        self.backward_layer.go_backwards = not layer.go_backwards

    def call(self, inputs: TensorLike, initial_state: Sequence[TensorLike] | None = None, mask: Any = None) -> Any:
        both = (self.forward_layer, self.backward_layer)
        count = self.forward_layer.states
        first: list[Any] = [None, None] if initial_state is None else [initial_state[:count], initial_state[count:]]
        results = [layer(inputs, initial_state=s, mask=mask) for layer, s in zip(both, first)]
        states: tuple[Tensor, ...] = ()
        if self.forward_layer.return_state:
            states = tuple(s for result in results for s in result[1:])
            results = [result[0] for result in results]
        forward, backward = results
        if self.forward_layer.return_sequences:
            backward = ops.flip(backward, axis=1)
        merged = self._merged(forward, backward)
        if not self.forward_layer.return_state:
            return merged
        return (*merged, *states) if self.merge_mode is None else (merged, *states)

    def _merged(self, forward: Tensor, backward: Tensor) -> Any:
        if self.merge_mode == "concat":
            return ops.concat([forward, backward], axis=-1)
        if self.merge_mode == "mul":
            return forward * backward
        if self.merge_mode is None:
            return forward, backward
        return (forward + backward) * (0.5 if self.merge_mode == "ave" else 1.0)
