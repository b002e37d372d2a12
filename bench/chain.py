"""How fast is a chain of elementwise operations on big arrays, against op by op and against compiled code?

    python bench/chain.py [--log2-size 24] [--broadcast row|scalar] [--threads 2] [--rounds 15] [--json]

``y = tanh(x * w + b) * sigmoid(x)`` in float32 and the gradients of its sum in x, w and b; w and b have x's shape, that
of one row, or one element.  Each library makes all four arrays.  Memory, not arithmetic, is what such code waits for:

* numpy        op by op, each intermediate an array of full size, in fresh memory each time;
* numpy tiles  the same by hand in tiles that fit a core's cache, spread over threads (what fusing should reach);
* torch        eager with autograd;   * jax  one jitted function, forward and backward together.

Ratios above 1 mean that tapegrad is faster; they are medians of ratios within a round.  The script fails where results
differ by more than 1e-5 of the largest value.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import common

TOLERANCE = 1e-5
TILE = 1 << 16
COLUMNS = 1 << 12
NAMES = ("y", "dx", "dw", "db")


def inputs(size: int, broadcast: str | None) -> tuple[Any, Any, Any]:
    import numpy as np

    rng = np.random.default_rng(0)
    columns = min(COLUMNS, size)
    shape = (size // columns, columns)
    of_weights = {None: shape, "row": (1, columns), "scalar": (1, 1)}[broadcast]
    return tuple(rng.standard_normal(s, np.float32) for s in (shape, of_weights, of_weights))


def with_tapegrad(tg: Any, arrays: tuple[Any, ...]) -> Callable[[], list[Any]]:
    import numpy as np

    x, w, b = map(tg.asarray, arrays)

    def call() -> list[Any]:
        with tg.GradientTape() as tape:
            tape.watch([x, w, b])
            y = tg.tanh(x * w + b) * tg.sigmoid(x)
        gradients = tape.gradient(y, [x, w, b])
        return [np.asarray(y), *gradients]

    return call


def with_numpy(arrays: tuple[Any, ...]) -> Callable[[], list[Any]]:
    import numpy as np

    x, w, b = arrays

    def sum_to(g: Any, shape: tuple[int, ...]) -> Any:
        axes = tuple(i for i, n in enumerate(shape) if n != g.shape[i])
        return g.sum(axis=axes, keepdims=True) if axes else g

    def call() -> list[Any]:
        t = np.tanh(x * w + b)
        s = 1 / (1 + np.exp(-x))
        y = t * s
        dz = s * (1 - t * t)
        dx = dz * w + t * s * (1 - s)
        return [y, dx, sum_to(dz * x, w.shape), sum_to(dz, b.shape)]

    return call


def with_tiles(arrays: tuple[Any, ...], threads: int) -> Callable[[], list[Any]]:
    """Two passes as a tape must make them: y first, then the gradients; results in memory that is used again."""
    import numpy as np

    x, w, b = (a.reshape(-1) for a in arrays)
    results = [np.empty_like(x) for _ in NAMES]
    starts = range(0, x.size, TILE)
    crew = ThreadPoolExecutor(threads)
    scratch = [[np.empty(TILE, np.float32) for _ in range(3)] for _ in range(threads)]

    def forward(t: Any, s: Any, at: slice) -> None:
        np.multiply(x[at], w[at], out=t)
        np.add(t, b[at], out=t)
        np.tanh(t, out=t)
        np.negative(x[at], out=s)
        np.exp(s, out=s)
        np.add(s, 1, out=s)
        np.reciprocal(s, out=s)

    def first(worker: int) -> None:
        for start in starts[worker::threads]:
            at = slice(start, min(start + TILE, x.size))
            t, s, _ = (a[: at.stop - at.start] for a in scratch[worker])
            forward(t, s, at)
            np.multiply(t, s, out=results[0][at])

    def second(worker: int) -> None:
        for start in starts[worker::threads]:
            at = slice(start, min(start + TILE, x.size))
            t, s, u = (a[: at.stop - at.start] for a in scratch[worker])
            forward(t, s, at)
            _, dx, dw, db = (r[at] for r in results)
            np.multiply(t, t, out=u)
            np.subtract(1, u, out=u)
            np.multiply(u, s, out=db)
            np.multiply(db, x[at], out=dw)
            np.subtract(1, s, out=u)
            np.multiply(u, s, out=u)
            np.multiply(u, t, out=u)
            np.multiply(db, w[at], out=dx)
            np.add(dx, u, out=dx)

    def call() -> list[Any]:
        list(crew.map(first, range(threads)))
        list(crew.map(second, range(threads)))
        return [r.reshape(arrays[0].shape) for r in results]

    return call


def with_torch(torch: Any, arrays: tuple[Any, ...]) -> Callable[[], list[Any]]:
    leaves = [torch.from_numpy(a).requires_grad_() for a in arrays]
    x, w, b = leaves

    def call() -> list[Any]:
        y = torch.tanh(x * w + b) * torch.sigmoid(x)
        return [y.detach(), *torch.autograd.grad(y, leaves, torch.ones_like(y))]

    return call


def with_jax(jax: Any, arrays: tuple[Any, ...]) -> Callable[[], list[Any]]:
    import jax.numpy as jnp

    def f(x: Any, w: Any, b: Any) -> Any:
        return jnp.tanh(x * w + b) * jax.nn.sigmoid(x)

    @jax.jit
    def both(x: Any, w: Any, b: Any) -> Any:
        y, pullback = jax.vjp(f, x, w, b)
        return [y, *pullback(jnp.ones_like(y))]

    x, w, b = map(jnp.asarray, arrays)
    return lambda: jax.block_until_ready(both(x, w, b))


def main() -> None:
    parser = common.parser(__doc__, threads=2, rounds=15)
    parser.add_argument(
        "--log2-size", type=int, default=24, help="elements of x: 2 to this power (default: %(default)s)"
    )
    parser.add_argument("--broadcast", choices=("row", "scalar"), help="shape of w and b (default: x's)")
    options = parser.parse_args()
    common.begin(options.threads)
    arrays = inputs(1 << options.log2_size, options.broadcast)
    tg, torch, jax = (common.load(name, options.threads) for name in ("tapegrad", "torch", "jax"))
    calls = {"tapegrad": with_tapegrad(tg, arrays), "numpy": with_numpy(arrays)}
    if options.broadcast is None:
        calls["numpy tiles"] = with_tiles(arrays, options.threads)
    if torch:
        calls["torch"] = with_torch(torch, arrays)
    if jax:
        calls["jax"] = with_jax(jax, arrays)

    want = [r.copy() for r in calls["numpy"]()]
    worst = {}
    for who, call in calls.items():
        got = call()
        worst[who] = max(common.must_agree(who, n, g, v, TOLERANCE) for n, g, v in zip(NAMES, got, want, strict=True))
        del got
    times = common.by_turns(calls, options.rounds, pause=0.01)

    ours = times["tapegrad"]
    rows = [
        {
            "library": who,
            "seconds": common.median(times[who]),
            "speedup_of_tapegrad": common.ratio(ours, times[who]),
            "speedup_of_best": common.best_ratio(ours, times[who]),
            "middle_half": common.quartiles(ours, times[who]),
            "worst_difference": worst[who],
        }
        for who in calls
    ]
    facts = common.about(options.threads)
    cells = [
        (r["library"], f"{r['seconds'] * 1e3:.0f}", f"{r['speedup_of_tapegrad']:.2f}",
         "{:.2f}-{:.2f}".format(*r["middle_half"]), f"{r['speedup_of_best']:.2f}", f"{r['worst_difference']:.0e}")
        for r in rows
    ]  # fmt: skip
    cells += [(who, "not installed") for who, module in (("torch", torch), ("jax", jax)) if module is None]
    shape = {None: "of full size", "row": "of one row", "scalar": "of one element"}[options.broadcast]
    title = f"tanh(x*w+b)*sigmoid(x), 2**{options.log2_size} float32, w and b {shape}: forward and gradients"
    common.show(
        title, ["", "ms", "tapegrad is x faster", "middle half", "by best rounds", "worst difference"], cells, facts
    )
    if options.json:
        common.write("chain", facts, rows, log2_size=options.log2_size, broadcast=options.broadcast)


if __name__ == "__main__":
    main()
