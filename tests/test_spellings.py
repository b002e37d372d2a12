"""Names of other libraries: errors say ours; tables name only what is there; nothing of them is an attribute."""

from __future__ import annotations

import functools
import inspect
import operator
import pickle
import re
import sys
from typing import Any

import numpy as np
import pytest
from checks import c64

import tapegrad as tg
from tapegrad import spellings

OWNERS: dict[str, tuple[dict[str, str], Any]] = {
    "package": (spellings.NAMES, tg),
    "tensor": (spellings.TENSORS, tg.ones((2, 2))),
    "variable": (spellings.TENSORS, tg.Variable([1.0, 2.0])),
    "layer": (spellings.LAYERS, tg.nn.Dense(2)),
    "optimizer": (spellings.OPTIMIZERS, tg.optim.SGD()),
    **{home: (table, operator.attrgetter(home)(tg)) for home, table in spellings.MODULES.items()},
}
OF_PARTS = {"assign", "assign_add", "assign_sub"}
"""Variables have them, and of tensors the parts of variables (``v[index]``)."""
STAND_INS = {"x": tg.ones((2, 2)), "v": tg.Variable(1.0), "model": tg.nn.Dense(2), "opt": tg.optim.SGD()}


@pytest.mark.parametrize("owner", OWNERS)
def test_every_name_of_a_table_draws_its_advice(owner: str) -> None:
    table, thing = OWNERS[owner]
    for name, advice in table.items():
        if owner == "variable" and name in OF_PARTS:
            continue
        assert not hasattr(thing, name), f"{owner}.{name} is there: take it out of tapegrad/spellings.py"
        assert name not in dir(thing) or name in OF_PARTS
        with pytest.raises(AttributeError) as e:
            getattr(thing, name)
        assert str(e.value).endswith(f"has no attribute {name!r}; write {advice}")
        assert e.value.name == name and e.value.obj is thing


@pytest.mark.parametrize("table", ["NAMES", "TENSORS", "LAYERS", "OPTIMIZERS", "MODULES", "OTHER_KEYWORDS"])
def test_advice_names_only_what_is_there(table: str) -> None:
    named = 0
    tables = spellings.MODULES.values() if table == "MODULES" else [getattr(spellings, table)]
    for name, advice in (entry for t in tables for entry in t.items()):
        for path in re.findall(r"\b(?:tg|x|v|model|opt|tape)\.[\w.]*\w", advice):
            first, *rest = path.split(".")
            owner = {"tg": tg, "tape": tg.GradientTape, **STAND_INS}[first]
            for part in rest:
                assert hasattr(owner, part), f"{table}[{name!r}]: {path}"
                owner = getattr(owner, part)
            named += 1
    assert named > 2


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda x: tg.jit, "module 'tapegrad' has no attribute 'jit'; write tg.function"),
        (lambda x: tg.reduce_sum(x), "module 'tapegrad' has no attribute 'reduce_sum'; write tg.sum"),
        (lambda x: tg.svd(x), "module 'tapegrad' has no attribute 'svd'; write tg.linalg.svd"),
        (lambda x: tg.Adam(), "module 'tapegrad' has no attribute 'Adam'; write tg.optim.Adam"),
        (lambda x: tg.nn.Linear(3), "module 'tapegrad.nn' has no attribute 'Linear'; write tg.nn.Dense"),
        (lambda x: tg.nn.dropout(x), "module 'tapegrad.nn' has no attribute 'dropout'; write tg.nn.functional.dropout"),
        (lambda x: tg.random.tanh(x), "module 'tapegrad.random' has no attribute 'tanh'; write tg.tanh"),
        (lambda x: tg.linalg.reduce_sum(x), "has no attribute 'reduce_sum'; write tg.sum"),
        (lambda x: tg.fft.stack([x]), "has no attribute 'stack'; write tg.stack"),
        (lambda x: tg.nn.functional.nonsense, "module 'tapegrad.nn.functional' has no attribute 'nonsense'"),
        (lambda x: tg.optim.__wrapped__, "module 'tapegrad.optim' has no attribute '__wrapped__'"),
        (lambda x: tg.nn.Conv2d, "module 'tapegrad.nn' has no attribute 'Conv2d'; write tg.nn.Conv2D"),
        (lambda x: tg.nn.PixelShuffle, "write tg.nn.functional.pixel_shuffle"),
        (lambda x: tg.nn.NLLLoss, "write tg.nn.functional.nll_loss"),
        (lambda x: tg.nn.InstanceNorm3d, "write tg.nn.functional.instance_norm"),
        (lambda x: tg.nn.Dropout2d, "write tg.nn.functional.dropout2d"),
        (lambda x: tg.nn.SELU, "write tg.nn.functional.selu"),
        (lambda x: tg.nn.Nonsense2d, "module 'tapegrad.nn' has no attribute 'Nonsense2d'"),
        (lambda x: tg.optim.RMSProp, "write tg.optim.RMSprop"),
        (lambda x: tg.optim.rmsprop, "write tg.optim.RMSprop"),
        (lambda x: tg.optim.warmup_cosine_decay_schedule, "CosineDecay, with warmup_target= and warmup_steps="),
        (lambda x: tg.training.Adam, "module 'tapegrad.training' has no attribute 'Adam'; write tg.optim.Adam"),
        (lambda x: tg.sparse.tanh, "module 'tapegrad.sparse' has no attribute 'tanh'; write tg.tanh"),
        (lambda x: tg.memory.nonsense, "module 'tapegrad.memory' has no attribute 'nonsense'"),
        (lambda x: tg.nonsense, "module 'tapegrad' has no attribute 'nonsense'"),
        (lambda x: sys.modules["tapegrad._api"].nonsense, "has no attribute 'nonsense'"),
        (lambda x: x.exp(), "'Tensor' object has no attribute 'exp'; write tg.exp(x)"),
        (lambda x: tg.Variable(x).tanh(), "'Variable' object has no attribute 'tanh'; write tg.tanh(x)"),
        (
            lambda x: x.mul_(2),
            "tensors do not change in place; a tg.Variable changes by assign",
        ),
        (lambda x: x.softmax, "write tg.softmax(x)"),
        (lambda x: x.svd, "write tg.linalg.svd"),
        (lambda x: x.jit, "write tg.function"),
        (lambda x: x.shap, "'Tensor' object has no attribute 'shap'"),
        (lambda x: x.Tensor, "'Tensor' object has no attribute 'Tensor'"),
        (lambda x: x.__wrapped__, "'Tensor' object has no attribute '__wrapped__'"),
    ],
)
def test_attributes(call: Any, says: str) -> None:
    with pytest.raises(AttributeError) as e:
        call(c64([1.0, 2.0]))
    assert str(e.value).endswith(says)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda x: tg.sum(x, dim=0), "sum() got an unexpected keyword argument 'dim'; write axis="),
        (
            lambda x: tg.amax(x, axis=0, keepdim=True),
            "max() got an unexpected keyword argument 'keepdim'; write keep",
        ),
        (
            lambda x: x.mean(reduction_indices=0),
            "keyword argument 'reduction_indices'; write axis=",
        ),
        (lambda x: x.cumsum(dim=0), "'dim'; write axis="),
        (lambda x: tg.Variable(x).sum(dim=0), "'dim'; write axis="),
        (lambda x: tg.concat([x, x], dim=0), "'dim'; write axis="),
        (lambda x: tg.softmax(x, dim=0), "'dim'; write axis="),
        (
            lambda x: tg.tensor([1.0], requires_grad=True),
            "'requires_grad'; watch the tensor on a tape, tape.watch(x)",
        ),
        (lambda x: tg.zeros(3, requires_grad=True), "'requires_grad'; watch"),
        (lambda x: tg.zeros(size=3), "'size'; write shape="),
        (lambda x: tg.var(x, unbiased=True), "'unbiased'; write correction=1 for True, correction=0 for False"),
        (lambda x: tg.optim.SGD(lr=0.1), "SGD() got an unexpected keyword argument 'lr'; write learning_rate="),
        (lambda x: tg.optim.Adam(betas=(0.9, 0.99)), "'betas'; write beta_1= and beta_2="),
        (
            lambda x: tg.nn.Conv2D(3, 3, stride=2),
            "Conv2D() got an unexpected keyword argument 'stride'; write",
        ),
        (lambda x: tg.nn.Conv2D(3, 3, data_format="channels_last"), "'data_format'; leave it out: channels come first"),
        (lambda x: tg.nn.Dense(3, bias=False), "'bias'; write use_bias="),
        (lambda x: tg.nn.Dense(in_features=3, units=2), "'in_features'; leave it out: the first input tells"),
        (lambda x: tg.nn.LayerNormalization(eps=1e-5), "'eps'; write epsilon="),
        (lambda x: tg.random.normal(size=3), "normal() got an unexpected keyword argument 'size'; write shape="),
        (lambda x: tg.random.normal((3,), loc=1.0), "'loc'; write mean="),
        (lambda x: tg.linalg.norm(x, dim=0), "'dim'; write axis="),
        (lambda x: tg.fft.fft(x, dim=0), "'dim'; write axis="),
        (lambda x: tg.nn.functional.softmax(x, axis=0), "'axis'; write dim="),
        (lambda x: tg.nn.functional.conv1d(x, x, strides=2), "'strides'; write stride="),
        (
            lambda x: tg.Variable(x, requires_grad=True),
            "Variable() got an unexpected keyword argument 'requires_grad'",
        ),
        (lambda x: tg.Variable(x, validate_shape=False), "'validate_shape'; leave it out"),
        (lambda x: tg.vmap(tg.sin, in_dims=0)(x), "vmap() got an unexpected keyword argument 'in_dims'; write in_"),
        (lambda x: tg.Variable(x, foo=1), "got an unexpected keyword argument 'foo'"),
        (lambda x: tg.sum(x, foo=1), "sum() got an unexpected keyword argument 'foo'"),
        (lambda x: x.sum(foo=1), "sum() got an unexpected keyword argument 'foo'"),
        (lambda x: tg.nn.Dense(3, foo=1), "got an unexpected keyword argument 'foo'"),
        (lambda x: tg.training.DataLoader(x, num_workers=2), "'num_workers'; write workers="),
        (lambda x: tg.training.DataLoader(x, pin_memory=True), "'pin_memory'; leave it out: batches are sent ahead"),
        (lambda x: tg.training.DataLoader(x, foo=1), "got an unexpected keyword argument 'foo'"),
        (lambda x: tg.sum(object(), axis=0), "object"),
    ],
)
def test_keyword_arguments(call: Any, says: str) -> None:
    with pytest.raises(TypeError) as e:
        call(c64([1.0, 2.0]))
    assert says in str(e.value) and ("; write" in str(e.value)) == ("; write" in says)


def test_groups_of_keywords_are_apart() -> None:
    names = [name for group in spellings.KEYWORDS for name in group]
    assert len(names) == len(set(names)) and not set(names) & spellings.OTHER_KEYWORDS.keys()


def test_a_function_of_the_users_takes_what_it_likes() -> None:
    class Mine(tg.nn.Layer):
        def __init__(self, stride: int, **options: Any) -> None:
            super().__init__()
            self.options = {"stride": stride, **options}

    assert Mine(stride=2, bias=False).options == {"stride": 2, "bias": False}


def test_what_goes_wrong_in_a_property_is_told() -> None:
    class Mine(tg.nn.Layer):
        @property
        def width(self) -> int:
            return self.kernel.shape[1]

        @functools.cached_property
        def depth(self) -> int:
            return [].depth  # type: ignore[attr-defined]

    with pytest.raises(AttributeError, match="'Mine' object has no attribute 'kernel'"):
        _ = Mine().width
    with pytest.raises(AttributeError, match="'list' object has no attribute 'depth'"):
        _ = Mine().depth


def test_public_functions_are_what_they_were() -> None:
    assert tg.amax is tg.max and tg.max.__name__ == "max" and pickle.loads(pickle.dumps(tg.max)) is tg.max
    assert list(inspect.signature(tg.sum).parameters)[:3] == ["a", "axis", "dtype"]
    assert tg.tensor.__name__ == "tensor" and np.sum(c64([1.0, 2.0]), axis=0).item() == 3.0
    assert not spellings.has_other_names(tg.tanh) and not spellings.has_other_names(tg.add)


def test_what_runs_most_often_is_the_function_itself() -> None:
    for f in (tg.tanh, tg.add, tg.maximum, tg.matmul, tg.Tensor.__mul__, tg.Tensor.__getitem__):
        assert not hasattr(f, "__wrapped__")
