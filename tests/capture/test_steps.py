"""Steps and models, captured: variables that share values, layers with state, generators and variables as arguments."""

from __future__ import annotations

import numpy as np
import pytest
from captured import alike

import tapegrad as tg


def data(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def assign_slice(function):
    v = tg.Variable(data(2, 50))
    w = tg.Variable(data(100, 100))

    @function
    def f(x):
        v.assign(x[1:3, :50])
        w.assign(x[:, ::2][:100])
        return tg.sum(v)

    out = []
    for i in range(5):
        x = tg.asarray(data(200, 200, seed=i))
        out.append((f(x), v.numpy(copy=True), w.numpy(copy=True)))
    return out


def assign_broadcast(function):
    v = tg.Variable(data(100, 100))

    @function
    def f(x):
        v.assign(tg.broadcast_to(x[0], (100, 100)))
        return tg.sum(v), tg.sum(v, axis=0)

    return [(f(tg.asarray(data(3, 100, seed=i))), v.numpy(copy=True), tg.sum(v)) for i in range(6)]


def two_trainers(function):
    v = tg.Variable(data(150, 150))
    w = tg.Variable(data(150, 150, seed=1))

    @function
    def f(x):
        v.assign_add(x)
        w.assign(v * 0.5)
        return tg.sum(w)

    @function
    def g(x):
        w.assign_sub(x)
        v.assign(w * 1.5)
        return tg.sum(v)

    x = tg.asarray(data(150, 150, seed=3))
    out = []
    for _i in range(8):
        out += [f(x), v.numpy(copy=True), g(x), w.numpy(copy=True)]
    return out


def alias_variables(function):
    v = tg.Variable(data(150, 150))
    w = tg.Variable(data(150, 150, seed=1))

    @function
    def f(x):
        v.assign_add(x)
        return tg.sum(v)

    out = []
    x = tg.asarray(data(150, 150, seed=3))
    for i in range(8):
        if i == 3:
            w.assign(v)
        if i == 5:
            v.assign(w)
        out += [f(x), w.numpy(copy=True), v.numpy(copy=True)]
    return out


def v_read_passed(function):
    v = tg.Variable(data(150, 150))

    @function
    def f(x):
        v.assign(v * 0.5 + x)
        return x, tg.sum(x)

    out = []
    for _i in range(6):
        out.append((f(v.read()), v.numpy(copy=True)))
    return out


def closure_constant_of_variable(function):
    v = tg.Variable(data(150, 150))
    t = v.read()
    f = function(lambda: (v.assign(v * 0.5 + 1.0).read()[:1], tg.sum(t)))
    out = [f() for i in range(6)]
    return out, t


def returns_variable_read_large(function):
    v = tg.Variable(data(150, 150))

    @function
    def f(x):
        old = v.read()
        v.assign_add(x)
        return old, v.read(), v * 1.0

    out = [f(tg.asarray(data(150, 150, seed=i))) for i in range(6)]
    return out


def same_result_twice(function):
    f = function(lambda x: (lambda y: (y, y, [y]))(tg.sin(x)))
    return [f(tg.asarray(data(3, seed=i))) for i in range(4)]


def generator_argument(function):
    f = function(lambda g, x: g.normal((3,)) + x)
    a, b = tg.random.Generator(1), tg.random.Generator(2)
    x = tg.asarray(data(3))
    return [f(g, x) for i in range(5) for g in (a, b)]


def variable_argument(function):
    f = function(lambda v, x: v.assign_add(x) * 2.0)
    a, b = tg.Variable(data(3)), tg.Variable(data(3, seed=1))
    x = tg.asarray(data(3))
    return [f(v, x) for i in range(5) for v in (a, b)], a, b


def batchnorm(function):
    m = tg.nn.Sequential([tg.nn.Dense(4), tg.nn.BatchNormalization(), tg.nn.Dense(1)])
    o = tg.optim.Adam(0.01)

    @function
    def step(x, training):
        if not training:
            return tg.sum(m(x, training=False))
        with tg.GradientTape() as t:
            loss = tg.mean(m(x, training=True) ** 2)
        vs = m.trainable_variables
        o.apply_gradients(zip(t.gradient(loss, vs), vs))
        return loss

    out = []
    for i in range(6):
        out += [step(tg.asarray(data(8, 3, seed=i)), True), step(tg.asarray(data(8, 3, seed=i)), False)]
    return out, m.trainable_variables


def conv_model(function):
    m = tg.nn.Sequential(
        [
            tg.nn.Conv2D(4, 3, activation="relu"),
            tg.nn.Lambda(lambda x: tg.mean(x, axis=(1, 2))),
            tg.nn.Dropout(0.2),
            tg.nn.Dense(2),
        ]
    )
    o = tg.optim.SGD(0.01, momentum=0.9)

    @function
    def step(x):
        with tg.GradientTape() as t:
            loss = tg.mean(m(x, training=True) ** 2)
        vs = m.trainable_variables
        o.apply_gradients(zip(t.gradient(loss, vs), vs))
        return loss

    return [step(tg.asarray(data(2, 8, 8, 3, seed=i))) for i in range(5)], m.trainable_variables


def checkpoints_in_a_step(function):
    v = tg.Variable(data(64, 64))

    @function
    def f(x):
        with tg.GradientTape() as t:
            y = x
            for _i in range(4):
                y = tg.recompute_grad(lambda y: tg.softmax(tg.tanh(y @ v)))(y)
            loss = tg.sum(y * y)
        return loss, t.gradient(loss, v)

    return [f(tg.asarray(data(64, 64, seed=i))) for i in range(5)]


MORE = {
    assign_slice: ((1, 3),),
    assign_broadcast: ((1, 4),),
    two_trainers: ((1, 6), (1, 6)),
    alias_variables: ((1, 6),),
    v_read_passed: ((1, 4),),
    closure_constant_of_variable: ((1, 4),),
    returns_variable_read_large: ((1, 4),),
    same_result_twice: ((1, 2),),
    generator_argument: ((2, 6),),
    variable_argument: ((2, 6),),
    batchnorm: ((2, 8),),
    conv_model: ((1, 3),),
    checkpoints_in_a_step: ((1, 3),),
}


@pytest.mark.parametrize("program", MORE, ids=lambda p: p.__name__)
def test_programs(program):
    alike(program, *MORE[program])
