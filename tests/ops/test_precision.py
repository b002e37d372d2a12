"""autocast: the policy, its scope, and its results beside PyTorch's, in every way of running a function."""

from __future__ import annotations

import ast
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checks import bits_equal, no_garbage, values

import tapegrad as tg
from tapegrad import errors
from tapegrad.core.state import thread
from tapegrad.nn import functional as F
from tapegrad.ops import precision
from tapegrad.profile.demo_model import CharTransformer, loss_and_gradients

HALVES = ["bfloat16", "float16"]
PACKAGE = Path(tg.__file__).parent


def ones(*shape: int, dtype: str = "float32") -> tg.Tensor:
    return tg.ones(shape, dtype=dtype)


# The policy -------------------------------------------------------------------------------------------------------

PRODUCTS: dict[str, Callable[[Any], Any]] = {
    "attention": lambda x: F.scaled_dot_product_attention(x(2, 3, 4), x(2, 5, 4), x(2, 5, 6), x(3, 5)),
    "bilinear": lambda x: F.bilinear(x(2, 3), x(2, 4), x(5, 3, 4), x(5)),
    "conv": lambda x: F.conv2d(x(1, 2, 4, 4), x(3, 2, 2, 2), x(3)),
    "conv_in_x": lambda x: F.conv_transpose2d(x(1, 2, 4, 4), x(2, 3, 2, 2), x(3)),
    "einsum": lambda x: tg.einsum("ij,jk,k->i", x(2, 3), x(3, 4), x(4)),
    "inner": lambda x: tg.inner(x(2, 3), x(4, 3)),
    "linear": lambda x: F.linear(x(2, 3), x(4, 3), x(4)),
    "matmul": lambda x: x(2, 3) @ x(3),
    "matvec": lambda x: tg.matvec(x(2, 3), x(3)),
    "tensordot": lambda x: tg.tensordot(x(2, 3), x(3, 2), axes=1),
    "vecdot": lambda x: tg.vecdot(x(2, 3), x(2, 3)),
    "vecmat": lambda x: tg.vecmat(x(2), x(2, 3)),
}

FLOAT32: dict[str, Callable[[Any], Any]] = {
    **{name: getattr(tg, name) for name in precision.ELEMENTWISE if hasattr(tg, name)},
    **{name: getattr(tg, name) for name in precision.REDUCTIONS if hasattr(tg, name)},
    "acos": lambda x: tg.acos(x / 2),
    "asin": lambda x: tg.asin(x / 2),
    "cdist": lambda x: tg.cdist(x, x),
    "cumprod": lambda x: tg.cumprod(x, axis=0),
    "cumsum": lambda x: tg.cumsum(x, axis=0),
    "cumulative_prod": lambda x: tg.cumulative_prod(x, axis=0),
    "cumulative_sum": lambda x: tg.cumulative_sum(x, axis=0),
    "logaddexp": lambda x: tg.logaddexp(x, x),
    "logcumsumexp": lambda x: tg.logcumsumexp(x, dim=0),
    "norm": tg.linalg.norm,
    "power": lambda x: x**3.0,
    "vector_norm": tg.linalg.vector_norm,
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "group_norm": lambda x: F.group_norm(x, 2),
    "instance_norm": lambda x: F.instance_norm(x[None]),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "local_response_norm": lambda x: F.local_response_norm(x[None], 2),
    "log_softmax": tg.log_softmax,
    "normalize": F.normalize,
    "normalized": lambda x: F.batch_norm(x, tg.zeros(4), tg.ones(4)),
    "rms_norm": lambda x: F.rms_norm(x, (4,)),
    "softmax": tg.softmax,
    "standardize": F.standardize,
    "bernoulli_nll": lambda x: F.bernoulli_nll(x, x),
    "binary_cross_entropy": lambda x: F.binary_cross_entropy(x / 2, x / 2),
    "binary_cross_entropy_with_logits": lambda x: F.binary_cross_entropy_with_logits(x, x),
    "contrastive": lambda x: F.contrastive(x, 2 * x, x[:, 0]),
    "cosine_embedding_loss": lambda x: F.cosine_embedding_loss(x, x, x[:, 0]),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x),
    "cross_entropy": lambda x: F.cross_entropy(x, tg.asarray([0, 1, 2, 3])),
    "gaussian_kl_divergence": lambda x: F.gaussian_kl_divergence(x, x),
    "gaussian_nll_loss": lambda x: F.gaussian_nll_loss(x, x, x),
    "hinge": lambda x: F.hinge(x, tg.asarray([0, 1, 2, 3])),
    "hinge_embedding_loss": lambda x: F.hinge_embedding_loss(x, x),
    "huber_loss": lambda x: F.huber_loss(x, x / 2),
    "kl_div": lambda x: F.kl_div(x, x),
    "l1_loss": lambda x: F.l1_loss(x, x),
    "margin_ranking_loss": lambda x: F.margin_ranking_loss(x, x, x),
    "mse_loss": lambda x: F.mse_loss(x, x),
    "multi_margin_loss": lambda x: F.multi_margin_loss(x, tg.asarray([0, 1, 2, 3])),
    "multilabel_margin_loss": lambda x: F.multilabel_margin_loss(x, tg.asarray([[0, -1, 0, 0]] * 4)),
    "multilabel_soft_margin_loss": lambda x: F.multilabel_soft_margin_loss(x, x),
    "pairwise_distance": lambda x: F.pairwise_distance(x, x),
    "poisson_nll_loss": lambda x: F.poisson_nll_loss(x, x),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, x),
    "soft_margin_loss": lambda x: F.soft_margin_loss(x, x),
    "triplet_margin_loss": lambda x: F.triplet_margin_loss(x, 2 * x, 4 * x, margin=8.0),  # exact in half types
}


def test_each_name_of_the_policy_has_a_case() -> None:
    assert set(PRODUCTS) == precision.HALF
    assert set(FLOAT32) == precision.FLOAT32
    assert not precision.HALF & precision.FLOAT32


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_compute_in_half(name: str, half: str) -> None:
    run = PRODUCTS[name]
    assert run(ones).dtype == "float32"
    with tg.autocast(half):
        y = run(ones)
        mixed = run(lambda *shape: ones(*shape, dtype="float16"))
        assert run(lambda *shape: ones(*shape, dtype="float64")).dtype == "float64"
    assert y.dtype == mixed.dtype == half
    np.testing.assert_array_equal(y.numpy().astype("f4"), run(ones).numpy())  # of ones, so exact


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", FLOAT32)
def test_what_is_delicate_takes_and_gives_float32(name: str, half: str) -> None:
    run, x = FLOAT32[name], 0.25 + tg.random.uniform((4, 4), dtype="float32")
    x = tg.astype(x, half)
    before = run(x).dtype
    with tg.autocast(half):
        y = run(x)
        assert run(tg.astype(x, "float64")).dtype == "float64"
    assert y.dtype == "float32"
    assert before == half or name in ("cross_entropy", "average"), "the case says nothing"
    np.testing.assert_allclose(y.numpy(), run(tg.astype(x, "float32")).numpy(), rtol=1e-6)


def test_other_operations_keep_the_dtype_that_their_operands_promote_to() -> None:
    x, y = ones(3), ones(3, dtype="bfloat16")
    with tg.autocast():
        assert (x + x).dtype == tg.tanh(x).dtype == tg.max(x).dtype == "float32"
        assert (y + y).dtype == tg.gelu(y).dtype == tg.max(y).dtype == "bfloat16"
        assert (x * y).dtype == "float32"
        assert tg.astype(x, "float16").dtype == "float16"
        i = tg.arange(6)
        assert tg.sum(i).dtype == (i @ i).dtype == "int64"
        z = tg.ones(2, dtype="complex64")
        assert (z @ z).dtype == "complex64" and tg.exp(z).dtype == "complex64"
        assert (x @ tg.ones(3, dtype="float64")).dtype == "float64"
        assert (np.ones((2, 3), "f4") @ x).dtype == "bfloat16"


def test_beside_float64_nothing_is_rounded_to_half_first() -> None:
    x = tg.asarray([1.0 + 2.0**-20], dtype="float32")
    w = tg.Variable(x)
    with tg.autocast():
        assert (w @ tg.ones(1, dtype="float64")).item() == (x @ tg.ones(1, dtype="float64")).item() == 1.0 + 2.0**-20


def test_rules_of_forward_mode_and_einsums_parts_have_the_dtype_of_what_they_are_part_of() -> None:
    x = tg.asarray([[0.5, 0.25], [2.0, 1.0]], dtype="bfloat16")
    with tg.autocast():
        y, t = tg.jvp(tg.max, (x,), (tg.ones_like(x),))  # whose rule adds up
        assert y.dtype == t.dtype == "bfloat16" and t.item() == 1.0
        assert tg.einsum("ij->i", x).dtype == "bfloat16"


def test_sums_of_products_are_in_float32_and_rounded_once() -> None:
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=s).astype("f4") for s in ((5, 2000), (2000, 7)))
    with tg.autocast():
        got = (tg.asarray(x) @ tg.asarray(y)).numpy()
    a, b = (v.astype(tg.bfloat16).astype("f8") for v in (x, y))
    wide = (a @ b).astype("f4")
    steps = np.abs(got.view("u2").astype("i4") - wide.astype(tg.bfloat16).view("u2").astype("i4"))
    assert steps.max() <= 1 and np.mean(steps) < 0.01  # float32's own rounding decides a tie now and then


# Its scope --------------------------------------------------------------------------------------------------------


def now() -> str:
    return str((ones(2) @ ones(2)).dtype)


def test_blocks_nest_and_end() -> None:
    with tg.autocast() as outer:
        assert now() == "bfloat16"
        with tg.autocast("float16"):
            assert now() == "float16"
            with tg.autocast(enabled=False):
                assert now() == "float32"
                with outer:  # the same one again
                    assert now() == "bfloat16"
            assert now() == "float16"
        assert now() == "bfloat16"
    assert now() == "float32"


def test_an_error_ends_it() -> None:
    with pytest.raises(ZeroDivisionError), tg.autocast():
        raise ZeroDivisionError
    assert now() == "float32"

    @tg.autocast()
    def f() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        f()
    assert now() == "float32"


def test_it_decorates() -> None:
    @tg.autocast("float16")
    def f(depth: int = 0) -> list[str]:
        """What f does."""
        return [now(), *(f(depth - 1) if depth else [])]

    assert f(2) == ["float16"] * 3 and f.__doc__ == "What f does." and now() == "float32"
    with tg.autocast():
        assert f() == ["float16"] and tg.autocast(enabled=False)(now)() == "float32" and now() == "bfloat16"


def test_it_is_of_one_thread() -> None:
    seen: list[str] = []
    with tg.autocast():
        other = threading.Thread(target=lambda: seen.append(now()))
        other.start(), other.join()
    assert seen == ["float32"]


def test_other_dtypes_are_refused() -> None:
    for dtype in ("float32", "float64", "int8"):
        with pytest.raises(errors.DTypeError, match="wanted 'bfloat16' or 'float16'"):
            tg.autocast(dtype)
    assert repr(tg.autocast("float16", enabled=False)) == "autocast('float16', enabled=False)"


def test_only_dispatch_asks_for_the_autocast() -> None:
    """No operation, no layer reads it; others keep it for a rerun, or put it aside."""
    asking = set()
    for path in PACKAGE.rglob("*.py"):
        for n in ast.walk(ast.parse(path.read_text("utf-8"))):
            if (
                isinstance(n, ast.Attribute)
                and n.attr == "autocasts"
                and ast.unparse(n.value) in ("thread", "state.thread")
            ):
                asking.add(path.relative_to(PACKAGE).as_posix())
    assert asking == {
        "core/state.py", "ops/casting.py", "ops/dispatch.py", "ops/precision.py", "autodiff/custom_gradient.py",
        "remat/checkpoint/checkpoint.py", "capture/signatures.py",
    }  # fmt: skip


# Beside PyTorch ---------------------------------------------------------------------------------------------------


def ulps(got: np.ndarray, want: np.ndarray) -> float:
    """The largest difference, in steps of bfloat16 at the largest number."""
    step = 2.0 ** (np.floor(np.log2(np.abs(want).max())) - 7)
    return float(np.abs(got.astype("f8") - want.astype("f8")).max() / step)


def test_a_network_agrees_with_torch() -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    x, *weights = (rng.normal(size=s).astype("f4") for s in ((16, 32), (64, 32), (64,), (10, 64), (10,)))
    weights = [w / np.float32(w.shape[-1] ** 0.5) for w in weights]
    labels = rng.integers(0, 10, 16)
    variables = [tg.Variable(w) for w in weights]
    leaves = [torch.tensor(w, requires_grad=True) for w in weights]
    with tg.GradientTape() as tape, tg.autocast():
        h = F.linear(x, variables[0], variables[1])
        y = F.linear(tg.gelu(h), variables[2], variables[3])
        loss = F.cross_entropy(y, tg.asarray(labels))
    grads = tape.gradient(loss, variables)
    f = torch.nn.functional
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h_ = f.linear(torch.tensor(x), leaves[0], leaves[1])
        y_ = f.linear(f.gelu(h_), leaves[2], leaves[3])
        loss_ = f.cross_entropy(y_, torch.tensor(labels))
    loss_.backward()
    for ours, theirs in ((h, h_), (y, y_), (loss, loss_)):
        assert str(ours.dtype) == str(theirs.dtype).removeprefix("torch.")
        assert ulps(ours.numpy(), theirs.detach().float().numpy()) <= 2  # a product and its sum with the bias round
    for ours, theirs in zip(grads, leaves):
        assert ours.dtype == "float32"
        assert ulps(ours.numpy(), theirs.grad.numpy()) <= 2


# All ways of running a function -----------------------------------------------------------------------------------


class Net:
    """A small network; ``loss(x)`` runs under an autocast."""

    def __init__(self, half: str = "bfloat16") -> None:
        rng = np.random.default_rng(1)
        self.w = tg.Variable(rng.normal(size=(24, 24)).astype("f4") / 5)
        self.v = tg.Variable(rng.normal(size=(24, 24)).astype("f4") / 5)
        self.x = tg.asarray(rng.normal(size=(40, 24)).astype("f4"))
        self.half = half
        self.variables = [self.w, self.v]

    def block(self, x: tg.Tensor) -> tg.Tensor:
        return tg.softmax(tg.gelu(x @ self.w) @ self.v) + x

    def run(self, wrap: Callable[[Any], Any], outside: bool = False) -> Any:
        """The loss and the gradients, asked for in the autocast or behind it; ``wrap``: of a block."""
        with tg.GradientTape() as tape:
            with tg.autocast(self.half):
                f = wrap(self.block)
                loss = tg.mean(tg.square(f(f(self.x))))
                if not outside:
                    return values((loss, tape.gradient(loss, self.variables)))
        return values((loss, tape.gradient(loss, self.variables)))


def same(f: Any) -> Any:
    return f


@pytest.mark.parametrize("half", HALVES)
def test_gradients_do_not_depend_on_where_they_are_asked_for(half: str) -> None:
    net = Net(half)
    inside = net.run(same)
    assert bits_equal(inside, net.run(same, outside=True))
    assert not bits_equal(inside, Net("float16" if half == "bfloat16" else "bfloat16").run(same))
    with tg.GradientTape() as tape:
        with tg.autocast(half):
            loss = tg.mean(tg.square(net.block(net.block(net.x))))
        with tg.autocast("float16" if half == "bfloat16" else "bfloat16"):  # of no concern to what was recorded
            grads = tape.gradient(loss, net.variables)
    assert bits_equal(values((loss, grads)), inside)


WRAPS: dict[str, Callable[[Any], Any]] = {
    "recompute_grad": tg.recompute_grad,
    "recompute_grad, checked": lambda f: tg.recompute_grad(f, check="values"),
    "recompute_grad with a policy": lambda f: tg.recompute_grad(f, policy=tg.policies.save_matmuls),
    "function": tg.function,
}


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("wrap", WRAPS)
def test_a_wrapped_block_has_the_same_bits(wrap: str, outside: bool) -> None:
    net = Net()
    plain = net.run(same)
    wrapped = WRAPS[wrap](net.block)
    for _ in range(3):
        assert bits_equal(net.run(lambda f: wrapped, outside), plain)


def test_loops_and_sequences_rerun_under_the_autocast_of_the_first_run() -> None:
    net = Net()

    def grads(f: Callable[[tg.Tensor], tg.Tensor]) -> Any:
        with tg.GradientTape() as tape:
            with tg.autocast():
                loss = tg.sum(f(net.x))
        return values((loss, tape.gradient(loss, net.variables)))

    def plain(x: tg.Tensor) -> tg.Tensor:
        for _ in range(4):
            x = net.block(x)
        return x

    wanted = grads(plain)
    assert bits_equal(grads(lambda x: tg.checkpointed_loop(net.block, x, 4, snapshots=1)), wanted)
    assert bits_equal(grads(lambda x: tg.checkpoint_sequential([net.block] * 4, x)), wanted)


def test_a_reversible_block_reruns_under_the_autocast_of_the_first_run() -> None:
    net = Net()
    f = lambda x: tg.astype(x @ net.w, "float32")
    g = lambda x: tg.astype(x @ net.v, "float32")

    def grads(apply: Callable[[tg.Tensor, tg.Tensor], Any]) -> Any:
        with tg.GradientTape() as tape:
            with tg.autocast():
                a, b = apply(net.x, net.x)
                loss = tg.sum(a) + tg.sum(b)
        return values(tape.gradient(loss, net.variables))

    def plain(a: tg.Tensor, b: tg.Tensor) -> Any:
        a = a + f(b)
        return a, b + g(a)

    wanted, got = grads(plain), grads(tg.reversible(f, g))
    for a, b in zip(got, wanted):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_a_budget_makes_the_same_bits_again() -> None:
    net = Net()
    net.x = tg.asarray(np.random.default_rng(2).normal(size=(4000, 24)).astype("f4"))
    with tg.measure() as m:
        plain = net.run(same)
    with tg.memory_budget(int(m.peak_bytes * 0.75)), tg.measure() as less:
        assert bits_equal(net.run(same), plain)
    assert less.peak_bytes < m.peak_bytes


def test_a_captured_step_has_a_program_for_each_autocast() -> None:
    net = Net()

    @tg.function
    def step(x: tg.Tensor) -> Any:
        with tg.GradientTape() as tape:
            loss = tg.mean(net.block(x))
        return loss, tape.gradient(loss, net.variables)

    def eager(x: tg.Tensor) -> Any:
        return step.__wrapped__(x)

    wanted = {}
    for half in (*HALVES, None):
        with tg.autocast(half or "float16", enabled=half is not None):
            wanted[half] = values(eager(net.x))
    for _ in range(4):
        for half in (*HALVES, None):
            with tg.autocast(half or "float16", enabled=half is not None):
                assert bits_equal(values(step(net.x)), wanted[half])
    assert step.stats.traces == 3 and step.stats.replays == 6 and not step.stats.fallbacks
    with tg.autocast():
        assert step.explain(net.x).startswith("hit")
    step.release()
    step(net.x)
    with tg.autocast():
        assert step.explain(net.x) == "miss: the nearest signature differs in the autocast in force"


def test_an_autocast_inside_a_captured_step() -> None:
    net = Net()

    @tg.function
    def step() -> Any:
        with tg.GradientTape() as tape, tg.autocast():
            loss = tg.mean(net.block(net.x))
        return loss, tape.gradient(loss, net.variables)

    eager = values(step.__wrapped__())
    for _ in range(4):
        assert bits_equal(values(step()), eager)
    assert step.stats.replays == 2


def test_forward_mode_and_higher_orders() -> None:
    net = Net()

    @tg.autocast()
    def f(w: tg.Tensor) -> tg.Tensor:
        return tg.sum(tg.tanh(net.x @ w))

    w, t = tg.asarray(net.w), tg.asarray(net.v)
    y, ydot = tg.jvp(f, (w,), (t,))
    g = tg.grad(f)(w)
    assert y.dtype == ydot.dtype == g.dtype == "float32"
    assert abs(ydot.item() - tg.sum(g * t).item()) < 0.05 * abs(ydot.item())
    inside = tg.autocast()(lambda: (tg.grad(f)(w), tg.hvp(f, w, t)))()
    assert bits_equal(values(inside), values((g, tg.hvp(f, w, t))))
    exact = tg.hvp(f.__wrapped__, w, t)
    assert 0 < np.abs(inside[1].numpy() - exact.numpy()).max() < 0.05 * np.abs(exact.numpy()).max()


def test_vmap_under_an_autocast_is_a_loop_of_examples() -> None:
    net = Net()

    @tg.autocast()
    def f(row: tg.Tensor) -> tg.Tensor:
        return tg.softmax(row @ net.w)

    stacked = tg.stack([f(row) for row in net.x])
    assert tg.vmap(f)(net.x).dtype == "float32"
    np.testing.assert_allclose(tg.vmap(f)(net.x).numpy(), stacked.numpy(), rtol=1e-2)
    with tg.autocast():
        assert bits_equal(values(tg.vmap(f.__wrapped__)(net.x)), values(tg.vmap(f)(net.x)))
        rows = tg.jacobian(lambda r: tg.sum(tg.square(r @ net.w)))(net.x[0])
    np.testing.assert_allclose(
        rows.numpy(), tg.grad(lambda r: tg.sum(tg.square(f_product(r, net.w))))(net.x[0]).numpy()
    )


@tg.autocast()
def f_product(x: Any, w: Any) -> Any:
    return x @ w


def test_a_custom_gradient_runs_under_the_autocast_of_the_call() -> None:
    seen: list[str] = []

    @tg.custom_gradient
    def f(x: tg.Tensor) -> Any:
        seen.append(now())

        def back(ct: tg.Tensor) -> tg.Tensor:
            seen.append(now())
            return ct

        return x * 1.0, back

    with tg.GradientTape() as tape:
        x = tg.Variable([1.0])
        with tg.autocast("float16"):
            y = f(x)
    with tg.autocast("bfloat16"):
        tape.gradient(y, x)
        assert seen == ["float16"] * 2
        seen.clear()
        tg.jvp(tg.autocast(enabled=False)(f), (tg.ones(2),), (tg.ones(2),))
        assert len(seen) > 1 and set(seen) == {"float32"}
        seen.clear()
        tg.vmap(tg.grad(f))(tg.ones(3))
        assert len(seen) > 1 and set(seen) == {"bfloat16"}
    assert thread.autocasts == ()


def test_gradients_of_variables_are_float32_and_casts_are_recorded() -> None:
    w = tg.Variable([[1.0, 2.0], [3.0, 4.0]])
    with tg.GradientTape() as tape, tg.autocast():
        y = (w @ w) @ w  # each use casts
    g = tape.gradient(y, w)
    assert g.dtype == "float32"
    exact = tg.grad(lambda w: tg.sum((w @ w) @ w))(tg.asarray(w))
    np.testing.assert_allclose(g.numpy(), exact.numpy(), rtol=2.0**-7)


def test_nothing_is_left_behind() -> None:
    net = Net()

    def work() -> None:
        net.run(same)

    work()
    with no_garbage():
        work()


# Convergence ------------------------------------------------------------------------------------------------------


def trained(half: str | None, steps: int = 40) -> list[float]:
    """The losses of the demo's model, small, on text that repeats."""
    tg.random.seed(0)
    text = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 40, "u1") % 32
    model = CharTransformer(32, 16, width=32, heads=2, blocks=2)
    optimizer = tg.optim.AdamW(3e-3)

    @tg.function
    def step(tokens: tg.Tensor, labels: tg.Tensor) -> tg.Tensor:
        with tg.autocast(half or "bfloat16", enabled=half is not None):
            loss, grads, variables = loss_and_gradients(model, tokens, labels)
        optimizer.apply(grads, variables)
        return loss

    rng, found = np.random.default_rng(0), []
    for _ in range(steps):
        starts = rng.integers(0, len(text) - 17, 8)
        rows = np.stack([text[i : i + 17] for i in starts]).astype("i8")
        found.append(step(tg.asarray(rows[:, :-1]), tg.asarray(rows[:, 1:])).item())
    return found


def test_the_demos_model_converges_in_bfloat16_as_in_float32() -> None:
    wide, half = trained(None), trained("bfloat16")
    assert wide != half
    assert np.mean(wide[-5:]) < 0.6 * wide[0]
    assert abs(np.mean(half[-5:]) - np.mean(wide[-5:])) < 0.01 * np.mean(wide[-5:])
