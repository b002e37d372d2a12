"""Tables of models, and what layers and optimizers look like."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad import nn, optim
from tapegrad.errors import ShapeError


class Twice(nn.Layer):
    """One layer called twice, a variable of its own, and two results."""

    def __init__(self) -> None:
        super().__init__(name="twice")
        self.inner = nn.Dense(4, name="inner")
        self.again = self.inner
        self.own = tg.Variable([1, 2], trainable=False, name="twice/own")

    def call(self, x: Any) -> Any:
        y = self.again(self.inner(x))
        return y, {"sum": tg.sum(y)}


TABLE = """\
Sequential "model"
------------------------------------------------------------------------------
layer                            output shape    parameters     bytes  dtype
------------------------------------------------------------------------------
Sequential                       (2, 1000)
  _stack.0 (Conv2D)              (2, 8, 10, 10)         224     896 B  float32
  _stack.1 (MaxPool2D)           (2, 8, 5, 5)
  _stack.2 (BatchNormalization)  (2, 8, 5, 5)            32     128 B  float32
  _stack.4 (Dense)               (2, 1000)          201,000  1.53 MiB  float64
------------------------------------------------------------------------------
201,256 parameters (1.53 MiB): 201,240 are trained, 16 are not"""


def test_a_table() -> None:
    model = nn.Sequential(
        [nn.Conv2D(8, 3, name="conv"), nn.MaxPool2D(name="pool"), tg.recompute_grad(nn.BatchNormalization(name="norm")),
         lambda x: tg.reshape(x, (x.shape[0], -1)), nn.Dense(1000, name="dense", dtype="float64")], name="model"
    )  # fmt: skip
    table = model.summary((2, 3, 12, 12))
    assert str(table) == repr(table) == TABLE
    rows = {row.path: row for row in table.rows}
    assert [row.kind for row in table.rows] == [
        "Sequential", "Conv2D", "MaxPool2D", "BatchNormalization", "Dense",
    ]  # fmt: skip
    assert [row.output for row in table.rows] == [(2, 1000), (2, 8, 10, 10), (2, 8, 5, 5), (2, 8, 5, 5), (2, 1000)]
    assert [row.parameters for row in table.rows] == [0, 3 * 8 * 9 + 8, 0, 32, 201000]
    assert table.parameters == model.count_params() == 201256 and table.trainable == 201256 - 16
    assert table.nbytes == 4 * 256 + 8 * 201000 == sum(v.nbytes for v in model.variables)
    assert rows["_stack.4"].dtypes == ("float64",)
    assert "<td" in table._repr_html_() and "201,256 parameters" in table._repr_html_()


def test_shared_layers_are_counted_once_and_calls_are_put_back() -> None:
    model = Twice()
    table = model.summary(np.ones((3, 4), np.float32))
    assert [(row.path, row.parameters, row.trainable) for row in table.rows] == [("", 2, 0), ("inner", 20, 20)]
    assert table.rows[0].output == ((3, 4), {"sum": ()}) and table.rows[0].dtypes == ("int64",)
    assert "call" not in vars(model) and "call" not in vars(model.inner)
    model.inner.trainable = False
    assert model.summary().trainable == 0
    with pytest.raises(ShapeError):
        model.summary((3, 5))
    assert "call" not in vars(model) and "call" not in vars(model.inner)


def test_without_inputs_and_with_other_inputs() -> None:
    model = nn.Sequential([nn.Embedding(10, 4), nn.Dense(2)])
    assert model.summary().parameters == 0 and "output shape" not in str(model.summary())
    assert model.summary((5, 7), dtype="int64").rows[0].output == (5, 7, 2)
    assert [row.parameters for row in model.summary().rows] == [0, 40, 10]

    class Pair(nn.Layer):
        def call(self, inputs: Any) -> Any:
            a, b = inputs
            return a @ b

    assert Pair().summary([(2, 3), (3, 4)]).rows[0].output == (2, 4)


def test_a_summary_changes_nothing() -> None:
    model = nn.Sequential([nn.Dense(3), nn.Dropout(0.5), nn.BatchNormalization()])
    model(np.ones((2, 3), np.float32))
    before = [v.numpy(copy=True) for v in model.variables]
    after_other = tg.random.Generator(0)
    with tg.GradientTape() as tape:
        model.summary((2, 3))
        y = tg.sum(model.variables[0])
    assert tape.gradient(y, model.variables[0]) is not None
    assert all((v.numpy() == x).all() for v, x in zip(model.variables, before, strict=True))
    assert after_other.take(1) == tg.random.Generator(0).take(1)


def test_what_layers_look_like() -> None:
    model = nn.Sequential([nn.Dense(2, name="a"), nn.Dropout(0.5, name="b")], name="m")
    assert repr(model) == 'Sequential "m"\n  _stack.0: Dense "a"\n  _stack.1: Dropout "b"'
    model(np.ones((1, 3), np.float32))
    assert repr(model).splitlines()[1] == '  _stack.0: Dense "a": kernel float32 (3, 2), bias float32 (2,)'
    assert str(model) == 'Sequential "m"'


def test_what_optimizers_look_like() -> None:
    assert repr(optim.SGD()) == "SGD(learning_rate=0.01)"
    assert repr(optim.AdamW(0.1, beta_2=0.99, clipnorm=1.0)) == "AdamW(learning_rate=0.1, beta_2=0.99, clipnorm=1.0)"
    rate = optim.schedules.Constant(0.5)
    assert repr(optim.RMSprop(rate, name="r")) == "RMSprop(learning_rate=Constant(value=0.5), name='r')"
    assert repr(optim.LBFGS(max_iter=7)) == "LBFGS(learning_rate=1.0, max_iter=7, max_eval=8)"
    assert str(optim.SGD(name="mine")) == 'optimizer "mine"'

    class Own(optim.Optimizer):
        pass

    assert repr(Own(0.5)) == "Own(learning_rate=0.5)"
