"""Sharded optimizer state, gradients and parameters: the bits of plain training, the bytes of the formulas."""

from __future__ import annotations

import gc
import tempfile
from typing import Any

import numpy as np
from data_parallel_cases import Model, batches, by_one, digest

import tapegrad as tg
from tapegrad import distributed as dist
from tapegrad.distributed import Group

OPTIMIZERS = {
    "sgd": lambda: tg.optim.SGD(0.1),
    "momentum": lambda: tg.optim.SGD(0.1, momentum=0.9),
    "adamw": lambda: tg.optim.AdamW(0.01, weight_decay=0.01),
    "rmsprop": lambda: tg.optim.RMSprop(0.01, momentum=0.5, centered=True, gradient_accumulation_steps=2),
    "adagrad": lambda: tg.optim.Adagrad(0.1),
}


def whole(v: tg.Variable) -> np.ndarray:
    """A variable's value, gathered if it holds a piece."""
    return np.asarray(v.value())


def train(group: Group, optimizer: Any, stage: int, recompute: bool = False, captured: bool = False) -> list[Any]:
    model, opt = Model(), optimizer()
    dist.shard(model.variables, opt, stage=stage)

    def step(x: Any, y: Any, total: Any) -> None:
        with dist.GradientTape(bucket_bytes=300) as tape:
            loss = model.loss(x, y, group.rank, 1, recompute) / total
        found = tape.gradient(loss, model.variables)
        opt.apply_gradients(zip(found, model.variables, strict=True), skip_none=True)

    f = tg.function(step) if captured else step
    for parts in batches(group.size):
        x, y = parts[group.rank]
        f(tg.asarray(x), tg.asarray(y), tg.asarray(np.float32(sum(len(a) for a, _ in parts))))
    if captured:
        assert f.stats.replays >= 4, f.stats
    return [tg.asarray(whole(v)) for v in model.variables]


def case_bits_of_one_process(group: Group) -> None:
    for name, optimizer in OPTIMIZERS.items():
        plain = by_one(group.size, optimizer)
        for stage in (1, 2, 3):
            assert digest(train(group, optimizer, stage)) == plain, (name, stage)
    optimizer = OPTIMIZERS["adamw"]
    plain = by_one(group.size, optimizer)
    assert digest(train(group, optimizer, 3, recompute=True)) == plain
    for stage in (1, 2, 3):
        assert digest(train(group, optimizer, stage, captured=True)) == plain, stage


def case_bytes_are_those_of_the_formulas(group: Group) -> None:
    """Between steps: parameters, state; during one: gradients; float32 with Adam.  The step count takes a block."""
    n, size = group.size, 256 * 3
    for k, stage in enumerate((1, 2, 3, 1, 2, 3)):  # the first time constants are made, too
        gc.collect()
        with tg.measure() as m:
            before = m.live_bytes
            variables = [tg.Variable(np.ones((size, 4), np.float32)) for _ in range(2)]
            opt = dist.shard(variables, tg.optim.Adam(0.01), stage=stage)
            count = 2 * size * 4
            with dist.GradientTape() as tape:
                loss = sum(tg.sum(v.value() ** 2) for v in variables)
            found = tape.gradient(loss, variables)
            del tape, loss
            gc.collect()
            gradients = {1: 4 * count, 2: 4 * count // n, 3: 4 * count // n}[stage]
            parameters = 4 * count // (n if stage == 3 else 1)
            assert k < 3 or m.live_bytes - before == parameters + gradients + 512, (stage, m.live_bytes - before)
            opt.apply_gradients(zip(found, variables, strict=True))
            del found
            gc.collect()
            assert k < 3 or m.live_bytes - before == parameters + 8 * count // n + 512, (stage, m.live_bytes - before)
            del variables, opt


def case_gathered_blocks_go(group: Group) -> None:
    """Stage 3 with recompute_grad: at no time more than one block's parameters are gathered."""
    layers, width = 6, 128
    each = width * width * 4
    variables = [tg.Variable(np.eye(width, dtype=np.float32)) for _ in range(layers)]
    dist.shard(variables, tg.optim.SGD(0.1), stage=3)
    x = tg.asarray(np.ones((2, width), np.float32))
    with tg.measure() as m, dist.GradientTape() as tape:
        before = m.live_bytes
        h = x
        for w in variables:
            h = tg.recompute_grad(lambda u, w=w: tg.tanh(u @ w))(h)
        loss = tg.sum(h)
        del h
        tape.gradient(loss, variables)
    extra = m.peak_bytes - before
    assert extra < (layers / group.size + 3.5) * each, (extra, each)  # gradients are pieces


def case_clipping(group: Group) -> None:
    """The norm is that over all ranks' pieces."""
    for stage in (1, 2, 3):
        v = tg.Variable(np.zeros(10, np.float32))
        opt = dist.shard([v], tg.optim.SGD(1.0, global_clipnorm=1.0), stage=stage)
        x = np.arange(1.0, 11.0, dtype=np.float32)
        with dist.GradientTape(average=stage < 3) as tape:
            loss = tg.sum(v.value() * x) / (group.size if stage == 3 else 1)
        opt.apply_gradients([(tape.gradient(loss, v), v)])
        np.testing.assert_allclose(whole(v), -x / np.linalg.norm(x), rtol=1e-5)


def case_norms_of_single_variables(group: Group) -> None:
    """LAMB's and those of ``clipnorm`` are of whole variables, though a rank has parts; its sums have another order."""
    x = {s: np.random.default_rng(0).normal(size=s).astype(np.float64) for s in ((5, 3), (7,), (1,))}
    for make in (lambda: tg.optim.LAMB(0.1, weight_decay=0.1), lambda: tg.optim.Lion(0.1, clipnorm=0.5),
                 lambda: tg.optim.SGD(0.1, clipnorm=0.5)):  # fmt: skip
        found = []
        for stage in (0, 1, 2, 3):
            variables, opt = [tg.Variable(start) for start in x.values()], make()
            if stage:
                dist.shard(variables, opt, stage=stage)
            for _ in range(3):
                with dist.GradientTape(average=0 < stage < 3) as tape:
                    loss = sum(tg.sum(v.value() ** 3) for v in variables) / (group.size if stage in (0, 3) else 1)
                opt.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            found.append([whole(v) for v in variables])
        for one, other in ((a, b) for row in found[1:] for a, b in zip(found[0], row, strict=True)):
            np.testing.assert_allclose(other, one, rtol=1e-12)


def case_averages_and_states(group: Group) -> None:
    """Averages of pieces are pieces of averages; a dictionary of values has whole variables, and takes them."""
    found = []
    for stage in (0, 1, 2, 3):
        variables, opt = [tg.Variable(np.arange(n, dtype=np.float64)) for n in (7, 1)], tg.optim.Adam(0.1)
        if stage:
            dist.shard(variables, opt, stage=stage)
        average = tg.optim.EMA(variables, 0.5, debias=True)
        for _ in range(3):
            with dist.GradientTape(average=0 < stage < 3) as tape:
                loss = sum(tg.sum(v.value() ** 2) for v in variables) / (group.size if stage in (0, 3) else 1)
            opt.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            average.update()
        before = [whole(v) for v in variables]
        with average.applied():
            found.append([whole(v) for v in variables])
        assert all((whole(v) == x).all() for v, x in zip(variables, before, strict=True)), stage
        layer = tg.nn.Lambda(abs)
        layer.held = variables
        state = layer.state_dict()
        assert [x.shape for x in state.values()] == [(7,), (1,)]
        for v in variables:
            v.assign(tg.zeros(v.shape, "float64"))
        layer.load_state_dict(state)
        assert all((whole(v) == x).all() for v, x in zip(variables, before, strict=True)), stage
    for one, other in ((a, b) for row in found[1:] for a, b in zip(found[0], row, strict=True)):
        np.testing.assert_allclose(other, one, rtol=1e-12)


def case_saved_and_loaded(group: Group) -> None:
    """Pieces are saved as the values that they are pieces of, and loaded at another stage."""
    folder = group.exchange_objects(tempfile.mkdtemp())[0] + "/saved"

    def made(stage: int) -> tuple[list[tg.Variable], Any]:
        variables = [tg.Variable(np.full(s, 1.0, np.float32)) for s in ((5, 3), (7,))]
        return variables, dist.shard(variables, tg.optim.Adam(0.1), stage=stage)

    def step(variables: list[tg.Variable], opt: Any) -> None:
        with dist.GradientTape() as tape:
            loss = sum(tg.sum(v.value() ** 3) for v in variables)
        opt.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    variables, opt = made(2)
    step(variables, opt)
    dist.save(folder, {"v": variables, "opt": opt})
    step(variables, opt)
    wanted = [whole(v) for v in variables]
    for stage in (1, 2, 3):
        others, other = made(stage)
        dist.load(folder, {"v": others, "opt": other})
        step(others, other)
        for v, w in zip(others, wanted, strict=True):
            assert whole(v).tobytes() == w.tobytes(), stage


def case_wrong_use(group: Group) -> None:
    v, opt = tg.Variable(np.ones(4, np.float32)), tg.optim.Adam()
    opt.build([v])
    for f, text in (
        (lambda: dist.shard([v], opt), "state already"),
        (lambda: dist.shard([v], tg.optim.SGD(), stage=4), "stage is 1"),
        (lambda: dist.shard([3], tg.optim.SGD()), "takes variables"),
    ):
        try:
            f()
        except tg.errors.DistributedError as e:
            assert text in str(e), e
        else:
            raise AssertionError(text)


def case_layers(group: Group) -> None:
    """Layers that were called, then cut: they ask for shapes, which are the whole's."""

    def trained(stage: int) -> list[np.ndarray]:
        tg.random.seed(3)
        model = tg.nn.Sequential([
            tg.nn.Embedding(7, 6), tg.nn.Dense(5, activation="tanh"), tg.nn.LayerNormalization(),
            tg.nn.MultiHeadAttention(5, 1), tg.nn.Dense(2),
        ])  # fmt: skip
        x = tg.asarray(np.random.default_rng(group.rank).integers(0, 7, (3, 4)))
        model(x)
        variables, optimizer = model.trainable_variables, tg.optim.Adam(0.01)
        if stage:
            dist.shard(model, optimizer, stage=stage)
        for _ in range(3):
            with dist.GradientTape() as tape:
                loss = tg.sum(model(x) ** 2)
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return [whole(v) for v in variables]

    plain = trained(0)
    for stage in (1, 2, 3):
        assert digest([tg.asarray(x) for x in trained(stage)]) == digest([tg.asarray(x) for x in plain]), stage


def case_what_a_piece_tells(group: Group) -> None:
    model, n = tg.nn.Dense(5), group.size
    model.build((None, 4))
    v, value = model.kernel, np.arange(20.0, dtype=np.float32).reshape(4, 5)
    dist.shard(model, tg.optim.SGD(0.1), stage=3)
    assert (v.shape, v.ndim, v.size, len(v)) == ((4, 5), 2, 20, 4)
    assert v.nbytes == v.numpy().nbytes == 4 * len(np.array_split(np.arange(20), n)[group.rank])
    v.assign(value)
    np.testing.assert_array_equal(whole(v), value)
    v.assign(v.numpy() + 1)
    np.testing.assert_array_equal(whole(v), value + 1)
    try:
        v.assign(np.zeros((5, 4), np.float32))
    except tg.errors.ShapeError:
        pass
    else:
        raise AssertionError("a value of another shape was assigned")
    with tempfile.TemporaryDirectory() as folder:
        try:
            model.save(f"{folder}/model.safetensors")
        except tg.errors.SaveError as e:
            assert "tg.distributed.save" in str(e)
        else:
            raise AssertionError("a file of pieces was written")


def case_steps_that_overflow_on_one_rank(group: Group) -> None:
    """All ranks leave a step out where one alone has a gradient that is not finite, and go on with the same values."""
    for half in (False, True):
        found = []
        for cut in (False, True):
            v = tg.Variable(tg.astype(np.arange(1.0, 8.0, dtype="f4"), "bfloat16" if half else "float32"))
            opt = tg.optim.Adam(0.1)
            if cut:
                dist.shard([v], opt, stage=1)
            scaler = tg.optim.LossScaler(opt, 16.0)
            step = tg.function(lambda g, scaler=scaler, v=v: scaler.apply_gradients([(g * scaler.current_scale, v)]))
            for k in range(5):
                g = np.ones(7, "f4")
                if k in (0, 3):
                    g[-1 if k else 0] = np.inf  # in the piece of one rank
                step(tg.asarray(g))
            assert scaler.skipped.item() == 2 and scaler.current_scale.item() == 4.0, (cut, half)
            found.append(whole(v).astype("f4"))
        np.testing.assert_array_equal(*found)
        assert (found[0] < np.arange(1.0, 8.0)).all()


def case_gradients_under_autocast(group: Group) -> None:
    """They are float32, near those without it, the same on all ranks, and those of a rerun."""
    x, y = batches(group.size)[0][group.rank]
    total = np.float32(sum(len(a) for a, _ in batches(group.size)[0]))

    def grads(enabled: bool, recompute: bool) -> list[Any]:
        model = Model()
        with dist.GradientTape(bucket_bytes=300) as tape:
            with tg.autocast(enabled=enabled):
                loss = model.loss(tg.asarray(x, dtype="float32"), tg.asarray(y), group.rank, 1, recompute) / total
        found = tape.gradient(loss, model.variables)
        return [None if g is None else g.numpy() for g in found]

    plain, half, again = grads(False, False), grads(True, False), grads(True, True)
    for p, h, a in zip(plain, half, again, strict=True):
        if p is None:
            continue
        assert h.dtype == p.dtype
        np.testing.assert_array_equal(h, a)
        np.testing.assert_allclose(h, p, atol=0.05 * np.abs(p).max())
        first = dist.broadcast(tg.asarray(h), 0, group=group).numpy()
        np.testing.assert_array_equal(h, first)
    assert any(np.any(p != h) for p, h in zip(plain, half, strict=True) if p is not None)
