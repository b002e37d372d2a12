"""nn.functional against torch.nn.functional: values, gradients, options."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from nn_cases import CASES, Case

import tapegrad as tg
from tapegrad.nn import functional as F

torch = pytest.importorskip("torch")

rng = np.random.default_rng(5)
POINTWISE = [
    "elu", "gelu", "hardsigmoid", "hardtanh", "leaky_relu", "logsigmoid", "mish", "relu", "relu6", "selu", "sigmoid",
    "silu", "softplus", "softsign", "tanh",
]  # fmt: skip


@pytest.mark.parametrize("name", POINTWISE)
def test_pointwise(name: str) -> None:
    large = np.concatenate([rng.normal(size=12) * 3, [-100.0, -20.0, 20.0, 100.0]])
    x = torch.tensor(large, requires_grad=True)
    y = getattr(torch.nn.functional, name)(x)
    y.sum().backward()
    ours = tg.asarray(large)
    with tg.GradientTape() as tape:
        tape.watch(ours)
        z = getattr(F, name)(ours)
    np.testing.assert_allclose(z.numpy(), y.detach().numpy(), rtol=1e-8, atol=1e-12)
    # torch has 1/6 in float32 for hardsigmoid
    np.testing.assert_allclose(tape.gradient(z, ours).numpy(), x.grad.numpy(), rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["none", "bool", "float"])
def test_attention(causal: bool, kind: str) -> None:
    q, k, v = rng.normal(size=(2, 3, 4, 5)), rng.normal(size=(2, 3, 4, 5)), rng.normal(size=(2, 3, 4, 6))
    mask = {"none": None, "bool": rng.random((4, 4)) < 0.5, "float": rng.normal(size=(3, 4, 4))}[kind]
    if kind == "bool":
        np.fill_diagonal(mask, True)  # torch gives NaN or 0 to a query that may look nowhere
    if causal and mask is not None:
        pytest.skip("torch takes one or the other")
    theirs = torch.nn.functional.scaled_dot_product_attention(
        *map(torch.tensor, (q, k, v)), attn_mask=None if mask is None else torch.tensor(mask), is_causal=causal
    )
    ours = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
    np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-10, atol=1e-12)


def compare(name: str, x: Any, target: Any, **options: Any) -> None:
    """Value and gradient of one of our losses and torch's."""
    theirs_x = torch.tensor(x, requires_grad=True)
    theirs = getattr(torch.nn.functional, name)(
        theirs_x,
        torch.tensor(target),
        **{k: torch.tensor(v) if isinstance(v, np.ndarray) else v for k, v in options.items()},
    )
    theirs.sum().backward()
    ours_x = tg.asarray(x)
    with tg.GradientTape() as tape:
        tape.watch(ours_x)
        ours = getattr(F, name)(ours_x, target, **options)
    np.testing.assert_allclose(ours.numpy(), theirs.detach().numpy(), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(tape.gradient(ours, ours_x).numpy(), theirs_x.grad.numpy(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(6, 5), (2, 5, 3), (5,)])
def test_cross_entropy(reduction: str, smoothing: float, weighted: bool, shape: tuple[int, ...]) -> None:
    x = rng.normal(size=shape) * 4
    weight = rng.random(5) if weighted else None
    labels = np.asarray(rng.integers(0, 5, size=shape[:1] + shape[2:] if len(shape) > 1 else ()))
    if labels.size > 1:
        labels.flat[0] = -100
    compare("cross_entropy", x, labels, reduction=reduction, label_smoothing=smoothing, weight=weight)
    shares = rng.random(shape)
    compare("cross_entropy", x, shares, reduction=reduction, label_smoothing=smoothing, weight=weight)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_nll_loss(reduction: str, weighted: bool) -> None:
    x = np.log(rng.random((6, 5)))
    weight = rng.random(5) if weighted else None
    compare("nll_loss", x, np.array([0, 1, 2, 3, -100, 4]), reduction=reduction, weight=weight)
    compare("nll_loss", x, np.array([0, 1, 2, 3, 7, 4]), reduction=reduction, weight=weight, ignore_index=7)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mse_loss", {}),
        ("l1_loss", {}),
        ("smooth_l1_loss", {}),
        ("smooth_l1_loss", {"beta": 0.3}),
        ("smooth_l1_loss", {"beta": 0.0}),
        ("huber_loss", {}),
        ("huber_loss", {"delta": 0.3}),
        ("binary_cross_entropy_with_logits", {}),
        ("binary_cross_entropy_with_logits", {"weight": rng.random(4), "pos_weight": rng.random(4)}),
    ],
)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_regression(name: str, options: dict[str, Any], reduction: str) -> None:
    compare(name, rng.normal(size=(3, 4)) * 2, rng.random((3, 4)), reduction=reduction, **options)


def vector(results: Any) -> list[Any]:
    """The results that are numbers with a derivative."""
    return [y for y in results if y.dtype in (torch.float64, np.dtype("float64"))]


@pytest.mark.sampled(1 / 3)
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases(case: Case) -> None:
    """Value, gradient, and the gradient of a directional derivative, which PyTorch lacks for some."""
    theirs = [torch.tensor(x, requires_grad=True) for x in case.operands()]
    ours = [tg.asarray(x) for x in case.operands()]
    their_y, our_y = case.call(torch.nn.functional, theirs, torch.tensor), case.call(F, ours)
    for a, b in zip(our_y, their_y, strict=True):
        np.testing.assert_allclose(a.numpy(), b.detach().numpy(), rtol=2e-7, atol=1e-11)  # hardswish has float32's 1/6
    cts = [rng.normal(size=y.shape) for y in vector(their_y)]
    turns = [rng.normal(size=x.shape) for x in theirs]
    loss = sum((y * torch.tensor(ct)).sum() for y, ct in zip(vector(their_y), cts, strict=True))
    their_g = torch.autograd.grad(loss, theirs, create_graph=True, allow_unused=True)

    def gradient(*xs: Any) -> Any:
        with tg.GradientTape() as tape:
            tape.watch(xs)
            y = sum(tg.sum(y * ct) for y, ct in zip(vector(case.call(F, xs)), cts, strict=True))
        return tape.gradient(y, list(xs))

    for a, b in zip(gradient(*ours), their_g, strict=True):
        near(a, b)
    slope = sum((g * torch.tensor(d)).sum() for g, d in zip(their_g, turns, strict=True) if g is not None)
    if not getattr(slope, "requires_grad", False):  # a derivative that is constant
        return
    try:
        their_h = torch.autograd.grad(slope, theirs, allow_unused=True)
    except (NotImplementedError, RuntimeError):
        return
    with tg.GradientTape() as tape:
        tape.watch(ours)
        inner = sum(tg.sum(g * d) for g, d in zip(gradient(*ours), turns, strict=True) if g is not None)
    for a, b in zip(tape.gradient(inner, ours), their_h, strict=True):
        near(a, b)


def near(ours: Any, theirs: Any) -> None:
    """Equal, where None is as good as zero."""
    if theirs is None:
        assert ours is None or not np.any(ours.numpy())
    elif ours is None:
        assert not np.any(theirs.detach().numpy(force=True))
    else:
        np.testing.assert_allclose(ours.numpy(), theirs.detach().numpy(force=True), rtol=1e-6, atol=1e-8)
