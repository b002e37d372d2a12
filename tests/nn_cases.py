"""Calls of nn.functional's functions that PyTorch has, too: name, operands, options, and what has no gradient there."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

rng = np.random.default_rng(11)


class Case(NamedTuple):
    """A call; ``fixed``: positions and names of operands in which PyTorch does not differentiate."""

    name: str
    args: tuple[Any, ...]
    options: dict[str, Any]
    fixed: tuple[Any, ...] = ()

    @property
    def smooth(self) -> list[Any]:
        """Positions and names of the operands in which derivatives may be asked."""
        given = [*enumerate(self.args), *self.options.items()]
        return [k for k, a in given if isinstance(a, np.ndarray) and a.dtype.kind == "f" and k not in self.fixed]

    def operands(self) -> list[np.ndarray]:
        """Those operands."""
        return [self.args[k] if isinstance(k, int) else self.options[k] for k in self.smooth]

    def call(self, module: Any, operands: Any = (), convert: Any = lambda a: a) -> tuple[Any, ...]:
        """All results of the module's function, with other ``operands`` in the places of the smooth ones."""
        change = lambda a: convert(a) if isinstance(a, np.ndarray) else a
        args, options = [change(a) for a in self.args], {k: change(a) for k, a in self.options.items()}
        for k, x in zip(self.smooth, operands):
            if isinstance(k, int):
                args[k] = x
            else:
                options[k] = x
        found = getattr(module, self.name)(*args, **options)
        return tuple(y for y in found if y is not None) if isinstance(found, tuple) else (found,)

    def __str__(self) -> str:
        shown = [*self.args, *(f"{k}={_brief(a)}" for k, a in self.options.items())]
        return f"{self.name}({', '.join(map(_brief, shown))})"


def _brief(a: Any) -> str:
    return "x".join(map(str, a.shape)) if isinstance(a, np.ndarray) else str(a)


def n(*shape: int) -> np.ndarray:
    return rng.normal(size=shape)


def u(*shape: int) -> np.ndarray:
    return rng.random(shape)


def ints(high: int, *shape: int) -> np.ndarray:
    return rng.integers(0, high, size=shape)


def case(name: str, *args: Any, fixed: tuple[Any, ...] = (), **options: Any) -> Case:
    return Case(name, args, options, fixed)


def activations() -> list[Case]:
    names = (
        "celu elu gelu glu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu relu6 rrelu selu "
        "sigmoid silu softplus softshrink softsign tanh tanhshrink"
    )
    found = [case(name, n(3, 4) * 3) for name in names.split()]
    found += [case(name, n(2, 3), dim=dim) for name in ("softmax", "softmin", "log_softmax") for dim in (0, -1)]
    return [
        *found, case("celu", n(5), alpha=0.3), case("elu", n(5), alpha=0.7), case("hardtanh", n(5), -0.5, 1.5),
        case("hardshrink", n(6), 0.2), case("softshrink", n(6), 0.3), case("threshold", n(6), 0.1, 20.0),
        case("gelu", n(6), approximate="tanh"), case("softplus", n(6), beta=2.0, threshold=1.0),
        case("leaky_relu", n(6), 0.3), case("glu", n(4, 3), dim=0), case("prelu", n(2, 3, 2), u(3)),
        case("prelu", n(4), u(1)),
    ]  # fmt: skip


def convolutions() -> list[Case]:
    found = []
    for dims in (1, 2, 3):
        size, kernel = (7, 6, 5)[:dims], (3, 2, 2)[:dims]
        for options in (
            {}, {"padding": 1, "stride": 2}, {"padding": "same", "dilation": 2},
            {"stride": 3, "dilation": 2, "padding": 2, "groups": 2},
        ):  # fmt: skip
            groups = options.get("groups", 1)
            found.append(case(f"conv{dims}d", n(2, 4, *size), n(2, 4 // groups, *kernel), n(2), **options))
        found.append(case(f"conv{dims}d", n(2, *size), n(3, 2, *kernel)))
        small = tuple(m // 2 for m in size)
        for options in (
            {}, {"stride": 2, "padding": 1, "output_padding": 1}, {"stride": 2, "output_padding": 1},
            {"groups": 2, "stride": 3, "output_padding": 2, "dilation": 2}, {"dilation": 3, "output_padding": 2},
            {"dilation": 3, "output_padding": 2, "padding": 1},
        ):  # fmt: skip
            groups = options.get("groups", 1)
            found.append(case(f"conv_transpose{dims}d", n(1, 4, *small), n(4, 4 // groups, *kernel), n(4), **options))
        found.append(case(f"conv_transpose{dims}d", n(2, *small), n(2, 3, *kernel)))
    return found


def pools() -> list[Case]:
    found = []
    for dims in (1, 2, 3):
        size = (7, 6, 5)[:dims]
        for options in (
            {"kernel_size": 2}, {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True},
            {"kernel_size": 2, "stride": 3, "ceil_mode": True},
        ):  # fmt: skip
            found.append(case(f"max_pool{dims}d", n(2, 2, *size), **options))
            found.append(case(f"max_pool{dims}d", n(2, *size), return_indices=True, **options))
            found.append(case(f"avg_pool{dims}d", n(2, 2, *size), **options))
            found.append(case(f"avg_pool{dims}d", n(2, *size), count_include_pad=False, **options))
            if dims > 1:
                found.append(case(f"avg_pool{dims}d", n(2, 2, *size), divisor_override=3, **options))
            unpadded = {k: v for k, v in options.items() if k != "padding"}
            found.append(case(f"lp_pool{dims}d", u(2, 2, *size) + 0.1, 3.0, **unpadded))
        found.append(
            case(f"max_pool{dims}d", n(1, 2, *size), kernel_size=3, dilation=2, stride=2, padding=1, ceil_mode=True)
        )
        for out in (1, 2, 9, (3, 4, 2)[:dims]):
            found.append(case(f"adaptive_avg_pool{dims}d", n(2, 2, *size), out))
            found.append(case(f"adaptive_max_pool{dims}d", n(2, 2, *size), out, return_indices=True))
        found.append(case(f"adaptive_max_pool{dims}d", n(2, *size), 3))
        whole = int(np.prod([m // 2 * 2 for m in size]))
        at = np.stack([rng.permutation(whole)[: whole // 2**dims] for _ in range(2)])
        at = at.reshape(1, 2, *(m // 2 for m in size))
        found.append(case(f"max_unpool{dims}d", n(*at.shape), at, 2))
    samples = {"_random_samples": u(2, 2, 3)}
    return [
        *found, case("fractional_max_pool2d", n(2, 2, 7, 6), 2, output_size=(4, 3), _random_samples=u(2, 2, 2),
                     fixed=("_random_samples",)),
        case("fractional_max_pool3d", n(2, 2, 6, 5, 5), 2, output_ratio=(0.5, 0.7, 0.5), return_indices=True, **samples,
             fixed=("_random_samples",)),
        case("adaptive_avg_pool2d", n(1, 2, 5, 4), (2, None)),
    ]  # fmt: skip


def images() -> list[Case]:
    found = []
    for dims, smooth in ((1, ["linear"]), (2, ["bilinear", "bicubic"]), (3, ["trilinear"])):
        size = (5, 4, 3)[:dims]
        for options in (
            {"size": (3, 7, 4)[:dims]}, {"scale_factor": 1.7}, {"scale_factor": 0.6}, {"size": 1},
            {"scale_factor": 1.3, "recompute_scale_factor": True},
        ):  # fmt: skip
            found += [case("interpolate", n(1, 2, *size), mode=m, **options) for m in ("nearest", *smooth)]
            found += [case("interpolate", n(1, 2, *size), mode=m, align_corners=True, **options) for m in smooth]
        found += [case("interpolate", n(1, 2, *size), mode=m, scale_factor=1.7) for m in ("nearest-exact", "area")]
    for dims, size, places in ((2, (4, 5), (3, 2)), (3, (3, 4, 5), (2, 2, 3))):
        for mode in ("bilinear", "nearest", *(["bicubic"] if dims == 2 else [])):
            for k, padding in enumerate(("zeros", "border", "reflection")):
                grid = n(2, *places, dims) * 0.9
                found.append(
                    case("grid_sample", n(2, 2, *size), grid, mode=mode, padding_mode=padding, align_corners=k % 2 == 0)
                )
                found.append(
                    case("grid_sample", n(2, 2, *size), grid, mode=mode, padding_mode=padding, align_corners=k % 2 == 1)
                )
        found += [case("affine_grid", n(2, dims, dims + 1), (2, 3, *size), align_corners=a) for a in (True, False)]
    for options, columns in (
        ({"kernel_size": 2}, (12, 20)), ({"kernel_size": (2, 3), "padding": 1, "stride": 2}, (18, 12)),
        ({"kernel_size": 3, "dilation": 2, "padding": 2}, (27, 30)),
    ):  # fmt: skip
        found += [case("unfold", n(2, 2, 6, 5), **options), case("unfold", n(2, 6, 5), **options)]
        found += [case("fold", n(2, *columns), (6, 5), **options), case("fold", n(*columns), (6, 5), **options)]
    return [
        *found, case("pixel_shuffle", n(2, 8, 2, 3), 2), case("pixel_unshuffle", n(2, 3, 4, 6), 2),
        case("pixel_shuffle", n(9, 2, 1), 3), case("channel_shuffle", n(2, 6, 3), 3),
    ]  # fmt: skip


def norms() -> list[Case]:
    running = {"fixed": (1, 2)}
    found = []
    for size in ((4,), (3, 2)):
        found += [
            case("group_norm", n(2, 6, *size), 3, u(6), n(6)), case("group_norm", n(2, 6, *size), 2),
            case("instance_norm", n(2, 3, *size), weight=u(3), bias=n(3)),
            case("instance_norm", n(2, 3, *size), n(3), u(3), u(3), n(3), use_input_stats=False, **running),
            case("batch_norm", n(2, 3, *size), n(3), u(3), u(3), n(3), **running),
            case("batch_norm", n(2, 3, *size), None, None, u(3), n(3), training=True),
            case("local_response_norm", n(2, 6, *size), 3),
            case("local_response_norm", n(2, 6, *size), 4, alpha=0.1, beta=0.5, k=2.0),
        ]  # fmt: skip
    found += [case("normalize", n(3, 4), p=p, dim=d) for p in (1.0, 2.0, 3.0, float("inf")) for d in (0, 1)]
    return [
        *found, case("layer_norm", n(3, 4, 5), (5,), u(5), n(5)), case("layer_norm", n(3, 4, 5), (4, 5)),
        case("rms_norm", n(3, 4, 5), (4, 5), u(4, 5)), case("rms_norm", n(3, 4, 5), (5,), eps=0.1),
        case("batch_norm", n(5, 3), n(3), u(3), u(3), **running),
    ]  # fmt: skip


def maps() -> list[Case]:
    found = []
    for mode in ("sum", "mean", "max"):
        starts, ends = np.array([0, 2, 2, 5]), np.array([0, 2, 5, 9])
        found += [
            case("embedding_bag", ints(6, 3, 4), n(6, 2), mode=mode),
            case("embedding_bag", ints(6, 9), n(6, 2), starts, mode=mode),
            case("embedding_bag", ints(6, 3, 4), n(6, 2), mode=mode, padding_idx=1),
            case("embedding_bag", ints(6, 9), n(6, 2), ends, mode=mode, include_last_offset=True),
        ]
    for p in (0.0, 1.0, 2.0, 1.5, 3.0, float("inf")):
        found += [case("pdist", n(4, 3), p), case("pairwise_distance", n(1, 3), n(4, 3), p, keepdim=p == 1)]
    rows = {"embed_dim_to_check": 4, "num_heads": 2, "dropout_p": 0.0, "out_proj_weight": n(4, 4)}
    plain = {**rows, "in_proj_weight": n(12, 4), "in_proj_bias": n(12), "bias_k": None, "bias_v": None,
             "add_zero_attn": False, "out_proj_bias": n(4)}  # fmt: skip
    return [
        *found, case("linear", n(2, 3, 4), n(5, 4), n(5)), case("linear", n(4), n(4)),
        case("bilinear", n(2, 3, 4), n(2, 3, 2), n(5, 4, 2), n(5)), case("embedding", ints(6, 2, 3), n(6, 4)),
        case("embedding", ints(6, 2, 3), n(6, 4), padding_idx=-2),
        case("embedding", ints(3, 2, 5), n(3, 4), scale_grad_by_freq=True),
        case("embedding_bag", ints(6, 9), n(6, 2), np.array([0, 2, 5]), mode="sum", per_sample_weights=n(9)),
        case("cosine_similarity", n(3, 4), n(3, 4)), case("cosine_similarity", n(3, 4, 2), n(4, 1), dim=1),
        case("scaled_dot_product_attention", n(2, 4, 3, 2), n(2, 2, 3, 2), n(2, 2, 3, 2), enable_gqa=True),
        case("scaled_dot_product_attention", n(2, 4, 3), n(2, 4, 3), n(2, 4, 2), is_causal=True, scale=0.3),
        case("multi_head_attention_forward", n(3, 2, 4), n(2, 2, 4), n(2, 2, 4), **plain),
        case("multi_head_attention_forward", n(3, 4), n(2, 4), n(2, 4), **plain),
        case("multi_head_attention_forward", n(3, 2, 4), n(2, 2, 4), n(2, 2, 4), **{
            **plain, "add_zero_attn": True, "bias_k": n(1, 1, 4), "bias_v": n(1, 1, 4), "average_attn_weights": False,
            "key_padding_mask": np.array([[False, True], [False, False]]), "attn_mask": np.tri(3, 2) < 1}),
        case("multi_head_attention_forward", n(3, 2, 4), n(2, 2, 3), n(2, 2, 5), **{
            **plain, "in_proj_weight": None, "use_separate_proj_weight": True, "q_proj_weight": n(4, 4),
            "k_proj_weight": n(4, 3), "v_proj_weight": n(4, 5)}),
    ]  # fmt: skip


def losses() -> list[Case]:
    found = []
    for reduction in ("mean", "sum", "none"):
        signs = np.where(rng.random((3, 4)) < 0.5, -1.0, 1.0)
        odd = {"reduction": reduction}
        found += [
            case("poisson_nll_loss", n(3, 4), u(3, 4), **odd),
            case("poisson_nll_loss", u(3, 4) + 0.1, u(3, 4) * 5, log_input=False, full=True, **odd),
            case("kl_div", n(3, 4), u(3, 4), **odd), case("kl_div", n(3, 4), n(3, 4), log_target=True, **odd),
            case("mse_loss", n(3, 4), n(3, 4), weight=u(3, 4), **odd),
            case("l1_loss", n(3, 4), n(3, 4), weight=u(3, 4), **odd),
            case("huber_loss", n(3, 4), n(3, 4), weight=u(3, 4), delta=0.5, **odd),
            case("smooth_l1_loss", n(3, 4), n(3, 4), beta=0.2, **odd),
            case("soft_margin_loss", n(3, 4), signs, fixed=(1,), **odd),
            case("binary_cross_entropy", u(3, 4), u(3, 4), u(3, 4), fixed=(2,), **odd),
            case("gaussian_nll_loss", n(3, 4), n(3, 4), u(3, 4) + 0.1, **odd),
            case("gaussian_nll_loss", n(3, 4), n(3, 4), u(3, 1) + 0.1, full=True, **odd),
            case("gaussian_nll_loss", n(3, 4), n(3, 4), u(3) + 0.1, **odd),
            case("hinge_embedding_loss", n(3, 4), signs, margin=0.7, fixed=(1,), **odd),
            case("margin_ranking_loss", n(4), n(4), signs[0], margin=0.3, fixed=(2,), **odd),
            case("cosine_embedding_loss", n(3, 4), n(3, 4), np.array([1, -1, -1]), margin=-0.2, **odd),
            case("cosine_embedding_loss", n(4), n(4), np.array(-1), margin=-0.9, **odd),
            case("triplet_margin_loss", n(3, 4), n(3, 4), n(3, 4), margin=2.0, **odd),
            case("triplet_margin_loss", n(3, 4), n(3, 4), n(3, 4), p=1.0, swap=True, margin=3.0, **odd),
            case("triplet_margin_with_distance_loss", n(3, 4), n(3, 4), n(3, 4), swap=True, **odd),
            case("multi_margin_loss", n(4, 3), ints(3, 4), margin=0.8, **odd),
            case("multi_margin_loss", n(4, 3), ints(3, 4), p=2, weight=u(3), fixed=("weight",), **odd),
            case("multilabel_margin_loss", n(3, 4), np.array([[3, 0, -1, 1], [1, -1, 0, 0], [-1, 0, 1, 2]]), **odd),
            case("multilabel_margin_loss", n(4), np.array([3, 0, -1, 1]), **odd),
            case("multilabel_soft_margin_loss", n(3, 4), np.round(u(3, 4)), u(4), fixed=(1,), **odd),
            case("linear_cross_entropy", n(3, 4), n(5, 4), ints(5, 3), linear_bias=n(5), **odd),
            case("nll_loss", n(3, 5, 2, 2), ints(5, 3, 2, 2), weight=u(5), fixed=("weight",), **odd),
            case("multi_margin_loss", n(3), np.array(1), **odd),
        ]  # fmt: skip
    return [*found, case("kl_div", n(3, 4), u(3, 4), reduction="batchmean")]


CASES = [*activations(), *convolutions(), *pools(), *images(), *norms(), *maps(), *losses()]
