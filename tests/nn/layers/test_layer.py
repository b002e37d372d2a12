"""Layers as such: building, finding variables, names, `training`, random streams."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad import nn
from tapegrad.errors import DTypeError, TapegradError
from tapegrad.nn.layers.layer import named_variables


class Scale(nn.Layer):
    """x * w, with w made at the first call."""

    def build(self, input_shape: Any) -> None:
        self.w = self.add_weight((input_shape[-1],), "ones", name="w")

    def call(self, x: tg.Tensor) -> tg.Tensor:
        return x * self.w


class Holder(nn.Layer):
    """Sublayers in every kind of place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Dense(2)
        self.listed = [Scale(), (Scale(), Scale())]
        self.named = {"a": Scale()}
        self.wrapped = tg.recompute_grad(Scale())
        self.again = self.first
        self.myself = self
        self.own = tg.Variable([1.0, 1.0], name="own", trainable=False)

    def call(self, x: tg.Tensor) -> tg.Tensor:
        x = self.first(x)
        for layer in (self.listed[0], *self.listed[1], self.named["a"], self.wrapped):
            x = layer(x)
        return x * self.own


PATHS = ["first.kernel", "first.bias", "listed.0.w", "listed.1.0.w", "listed.1.1.w", "named.a.w", "wrapped.w", "own"]


def test_variables_are_found_everywhere_and_once() -> None:
    model = Holder()
    assert [path for path, _ in named_variables(model)] == ["own"]
    model(tg.ones((3, 4)))
    assert [path for path, _ in named_variables(model)] == PATHS


def test_variables_come_in_construction_order() -> None:
    model = Holder()
    model(tg.ones((3, 4)))
    assert [v.name.rpartition("/")[2] for v in model.variables] == ["own", "kernel", "bias", "w", "w", "w", "w", "w"]
    assert [v.shape for v in model.trainable_variables][:2] == [(4, 2), (2,)]
    assert len(model.trainable_variables) == len(model.variables) - 1
    assert model.count_params() == 8 + 2 + 6 * 2


def test_frozen_layers_have_no_trainable_variables() -> None:
    model = Holder()
    model(tg.ones((3, 4)))
    model.first.trainable = False
    assert len(model.trainable_variables) == 5
    model.trainable = False
    assert model.trainable_variables == []
    assert len(model.variables) == 8


def test_sublayers_are_listed_in_order_of_assignment() -> None:
    model = Holder()
    expected = [model.first, model.listed[0], *model.listed[1], model.named["a"]]
    assert model.layers[:5] == expected
    assert len(model.layers) == 6


def test_a_method_of_a_layer_leads_to_its_variables() -> None:
    inner = Scale()
    model = nn.Lambda(tg.recompute_grad(inner.call))
    inner.build((2,))
    assert [path for path, _ in named_variables(model)] == ["function.w"]


def test_the_first_call_builds_and_the_second_does_not() -> None:
    layer = Scale()
    assert not layer.built and layer.variables == []
    layer(tg.ones((2, 3)))
    w = layer.w
    layer(tg.ones((5, 3)))
    assert layer.built and layer.w is w


def test_a_copy_has_weights_of_its_own() -> None:
    layer = nn.Sequential([nn.Dense(2)])
    y = layer(tg.ones((1, 3)))
    twin = copy.deepcopy(layer)
    assert np.array_equal(twin(tg.ones((1, 3))).numpy(), y.numpy())
    twin[0].kernel.assign(tg.zeros((3, 2)))
    assert np.array_equal(layer(tg.ones((1, 3))).numpy(), y.numpy())


def test_a_failed_build_can_be_repeated() -> None:
    layer = nn.Dense(2)
    with pytest.raises(tg.errors.ShapeError, match="scalar"):
        layer(1.0)
    assert not layer.built
    assert layer(tg.ones((1, 3))).shape == (1, 2)


def test_names_are_unique_and_may_be_given() -> None:
    class OddLayerName(nn.Layer):
        pass

    assert [OddLayerName().name for _ in range(3)] == ["odd_layer_name", "odd_layer_name_1", "odd_layer_name_2"]
    layer = nn.Dense(1, name="head")
    layer(tg.ones((1, 1)))
    assert [v.name for v in layer.variables] == ["head/kernel", "head/bias"]
    assert str(layer) == 'Dense "head"'


@pytest.mark.parametrize(
    "inputs", [[[1, 2]], np.array([[1, 2]]), np.array([[1.0, 2.0]]), [[True, False]], tg.constant([[1, 2]])]
)
def test_other_numbers_are_converted_to_the_layer_s_dtype(inputs: Any) -> None:
    assert nn.Dense(2)(inputs).dtype == np.float32
    assert nn.Dense(2, dtype="float64")(inputs).dtype == np.float64


def test_complex_input_is_refused() -> None:
    with pytest.raises(DTypeError, match=r'Dense "c": wanted real input, got complex64'):
        nn.Dense(2, name="c")(tg.asarray(np.ones((1, 2), np.complex64)))


def test_containers_of_tensors_reach_call_as_they_are() -> None:
    class Total(nn.Layer):
        shapes: Any = None

        def build(self, input_shape: Any) -> None:
            self.shapes = input_shape

        def call(self, inputs: Any) -> Any:
            return inputs["a"] + inputs["b"][0]

    layer = Total()
    assert layer({"a": tg.ones((2,)), "b": [tg.ones((1,))]}).tolist() == [2.0, 2.0]
    assert layer.shapes == {"a": (2,), "b": [(1,)]}


def test_a_forgotten_super_init_is_explained() -> None:
    class Forgetful(nn.Layer):
        def __init__(self) -> None:
            self.x = 1

    with pytest.raises(TapegradError, match=r"Forgetful: its __init__ must call super\(\).__init__\(\)"):
        Forgetful()(tg.ones((1,)))


def test_a_layer_without_call_is_explained() -> None:
    class Empty(nn.Layer):
        pass

    with pytest.raises(TapegradError, match="Empty defines no call"):
        Empty()(tg.ones((1,)))


class PassesOn(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def call(self, x: tg.Tensor, training: bool = False) -> tg.Tensor:
        return self.dropout(x, training=training)


class Loses(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential([nn.Dense(3), PassesOn()])

    def call(self, x: tg.Tensor) -> tg.Tensor:
        return self.inner(x)


def test_training_is_passed_on_or_refused() -> None:
    tg.random.seed(0)
    x = tg.ones((20, 20))
    assert 0 < int(tg.sum(PassesOn()(x, training=True) == 0)) < 400
    assert int(tg.sum(nn.Sequential([PassesOn()])(x, training=True) == 0)) > 0
    assert PassesOn()(x, training=False).numpy().min() == 1
    assert nn.Dense(2)(x, training=True).shape == (20, 2)
    with pytest.raises(TapegradError, match=r"Loses.call takes no argument `training`, so PassesOn .* would not hear"):
        Loses()(x, training=True)
    assert Loses()(x, training=False).shape == (20, 3)


def test_the_seed_decides_the_weights() -> None:
    def weights(seed: int) -> Any:
        tg.random.seed(seed)
        model = nn.Sequential([nn.Dense(3), nn.Dense(3)])
        model(tg.ones((1, 3)))
        return [v.numpy() for v in model.variables]

    first, same, other = weights(1), weights(1), weights(2)
    assert all(np.array_equal(a, b) for a, b in zip(first, same, strict=True))
    assert not np.array_equal(first[0], other[0])
    assert not np.array_equal(first[0], first[2])


def test_building_inside_a_checkpoint_does_not_shift_the_dropout_mask() -> None:
    """The first run makes the weights and the rerun does not: both must still draw the same mask."""
    tg.random.seed(3)
    model = nn.Sequential([nn.Dense(50), nn.Dropout(0.5)])
    x = tg.ones((4, 5))
    with tg.GradientTape() as tape:
        y = tg.recompute_grad(model)(x, training=True)
    bias = model[0].bias
    gradient = tape.gradient(y, bias).numpy()
    assert np.array_equal(gradient, 2 * (y.numpy() != 0).sum(axis=0))


def test_initializers_come_by_name_or_as_functions() -> None:
    tg.random.seed(0)
    layer = nn.Layer()
    for name, limit in (("glorot_uniform", (6 / 700) ** 0.5), ("he_uniform", (6 / 300) ** 0.5), ("uniform", 0.05)):
        w = layer.add_weight((300, 400), name).numpy()
        assert abs(w).max() <= limit and abs(w.std() / (limit / 3**0.5) - 1) < 0.01 and abs(w.mean()) < limit / 50
    w = layer.add_weight((300, 400), nn.initializers.normal(0.02)).numpy()
    assert abs(w.std() / 0.02 - 1) < 0.01
    assert abs(layer.add_weight((300, 400), "lecun_uniform").numpy()).max() <= 0.1
    assert layer.add_weight((2, 2), "ones").numpy().tolist() == [[1, 1], [1, 1]]
    assert layer.add_weight((2,), lambda shape, dtype, generator: tg.full(shape, 7.0)).numpy().tolist() == [7, 7]
    with pytest.raises(TapegradError, match="wanted a function or one of .*zeros.* got 'zeroes'"):
        layer.add_weight((2,), "zeroes")


def test_fans_count_the_receptive_field() -> None:
    assert nn.initializers.fans((3, 4)) == (3, 4)
    assert nn.initializers.fans((5, 5, 3, 4)) == (75, 100)
    assert nn.initializers.fans((7,)) == (7, 7)
    assert nn.initializers.fans(()) == (1, 1)


def test_variables_inside_blocks_made_of_several_layers_are_found() -> None:
    class Model(tg.nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = [tg.reversible(tg.nn.Dense(2), tg.nn.Dense(2)) for _ in range(2)]
            self.chain = tg.checkpoint_sequential([tg.nn.Dense(4), tg.nn.Dense(4)], segments=2)

        def call(self, x: tg.Tensor) -> tg.Tensor:
            for block in self.blocks:
                x = block(x)
            return self.chain(x)

    model = Model()
    model(tg.ones((3, 4)))
    assert len(model.trainable_variables) == 2 * 6


def test_parts_that_take_the_place_of_others_are_other_parts() -> None:
    class Block:
        """Its parts are a new tuple each time, which may lie where those of the block before lay."""

        def __init__(self, names: str) -> None:
            self.layers = [tg.nn.Dense(1, name=name) for name in names]

        @property
        def parts(self) -> tuple[tg.nn.Layer, ...]:
            return tuple(self.layers)

    class Model(tg.nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = [Block("ab"), Block("cd"), Block("ef"), Block("gh")]
            self.again = self.blocks

    assert [layer.name for layer in Model().layers] == list("abcdefgh")
