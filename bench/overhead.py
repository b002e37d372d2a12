"""What does one recorded operation cost beside its arithmetic?

    python bench/overhead.py [--length 100] [--elements 4] [--rounds 30] [--json]
    python bench/overhead.py --threshold [--json]

A chain ``x = tanh(x) * w`` on 4 float32 elements, so small that only the libraries' own work counts: microseconds per
operation (a tanh or a multiply), for the forward run alone and for forward run and gradient together, recorded anew
each time as eager code is.  Two rows tell what it costs to be counted: the same chains inside ``measure()``, and inside
a budget that never binds, with all sums added up.  HIPS autograd, PyTorch and TensorFlow are measured where they are
installed; NumPy alone, which records nothing, is the floor.  The gradients must agree to 1e-5 of the largest value.

``--threshold`` answers another question: from how many elements on is it better to defer elementwise operations and run
them fused than to run them at once?  It measures forward run and gradient of one short chain both ways, by setting
``tapegrad.engine.region.SMALL``, whose value is chosen from this table: ratios above 1 say that fusing is faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import common

TOLERANCE = 1e-5
MEASURED, BUDGETED = "tapegrad, inside measure()", "tapegrad, inside an idle budget"
Calls = tuple[Callable[[], Any], Callable[[], Any]]


def with_numpy(x: Any, w: Any, length: int) -> Calls:
    import numpy as np

    def forward() -> Any:
        y = x
        for _ in range(length // 2):
            y = np.tanh(y) * w
        return y

    def by_hand() -> Any:
        y, saved = x, []
        for _ in range(length // 2):
            t = np.tanh(y)
            saved.append(t)
            y = t * w
        g = np.ones_like(x)
        for t in reversed(saved):
            g = g * w * (1 - t * t)
        return g

    return forward, by_hand


def with_tapegrad(tg: Any, x: Any, w: Any, length: int) -> Calls:
    x, w = tg.asarray(x), tg.asarray(w)

    def chain() -> Any:
        y = x
        for _ in range(length // 2):
            y = tg.tanh(y) * w
        return y

    def forward() -> Any:
        with tg.GradientTape() as tape:
            tape.watch(x)
            return chain()

    def both() -> Any:
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = chain()
        return tape.gradient(y, x)

    return forward, both


def with_torch(torch: Any, x: Any, w: Any, length: int) -> Calls:
    x, w = torch.tensor(x, requires_grad=True), torch.tensor(w)
    ones = torch.ones_like(w)

    def forward() -> Any:
        y = x
        for _ in range(length // 2):
            y = torch.tanh(y) * w
        return y

    return forward, lambda: torch.autograd.grad(forward(), x, ones)[0]


def with_autograd(autograd: Any, x: Any, w: Any, length: int) -> Calls:
    import autograd.numpy as anp

    def chain(y: Any) -> Any:
        for _ in range(length // 2):
            y = anp.tanh(y) * w
        return y

    vjp, ones = autograd.make_vjp(chain), (w * 0 + 1)
    return lambda: vjp(x), lambda: vjp(x)[0](ones)


def with_tensorflow(tf: Any, x: Any, w: Any, length: int) -> Calls:
    x, w = tf.constant(x), tf.constant(w)

    def chain() -> Any:
        y = x
        for _ in range(length // 2):
            y = tf.tanh(y) * w
        return y

    def forward() -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            return chain()

    def both() -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = chain()
        return tape.gradient(y, x)

    return forward, both


PEERS = {"torch": with_torch, "autograd": with_autograd, "tensorflow": with_tensorflow}


def compare(options: Any) -> None:
    import numpy as np

    tg = common.load("tapegrad", options.threads)
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, options.elements).astype(np.float32)
    w = rng.uniform(0.9, 1.1, options.elements).astype(np.float32)
    chains = {"tapegrad": with_tapegrad(tg, x, w, options.length), "numpy": with_numpy(x, w, options.length)}
    missing = []
    for name, make in PEERS.items():
        module = common.load(name, options.threads)
        if module is None:
            missing.append(name)
        else:
            chains[name] = make(module, x, w, options.length)

    want_y, want = chains["numpy"][0](), chains["numpy"][1]()
    for who, (forward, both) in chains.items():
        common.must_agree(who, "the gradient", both(), want, TOLERANCE)
        if who != "autograd":  # its forward run alone yields no array
            y = forward()
            common.must_agree(who, "the result", y.detach() if who == "torch" else y, want_y, TOLERANCE)
    blocks, measures, inside = ExitStack(), [], {MEASURED: tg.measure, BUDGETED: lambda: tg.memory_budget("4GiB")}

    def prepare(who: str) -> None:
        blocks.close()
        measures[:] = [blocks.enter_context(inside[who]())] if who in inside else []

    def counted(call: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: (call(), measures[0].peak_bytes)

    for who in inside:
        chains[who] = counted(chains["tapegrad"][0]), counted(chains["tapegrad"][1])
    clock = time.thread_time if options.threads == 1 else time.perf_counter  # of one thread a busy machine takes none
    turns = {"number": options.number, "prepare": prepare, "clock": clock}
    forward = common.by_turns({who: calls[0] for who, calls in chains.items()}, options.rounds, **turns)
    both = common.by_turns({who: calls[1] for who, calls in chains.items()}, options.rounds, **turns)
    blocks.close()

    rows = [
        {
            "library": who,
            "forward_us_per_op": common.median(forward[who]) / options.length * 1e6,
            "both_us_per_op": common.median(both[who]) / options.length * 1e6,
            "best_both_us_per_op": min(both[who]) / options.length * 1e6,
            "speedup_of_tapegrad": common.ratio(both["tapegrad"], both[who]),
            "middle_half": common.quartiles(both["tapegrad"], both[who]),
        }
        for who in chains
    ]
    names = {"numpy": "numpy, gradient by hand"}
    cells = [
        (names.get(r["library"], r["library"]), f"{r['forward_us_per_op']:.2f}", f"{r['both_us_per_op']:.2f}",
         f"{r['best_both_us_per_op']:.2f}", f"{r['speedup_of_tapegrad']:.2f}",
         "{:.2f}-{:.2f}".format(*r["middle_half"]))
        for r in rows
    ]  # fmt: skip
    cells += [(name, "not installed") for name in missing]
    facts = common.about(options.threads)
    title = f"Chain of {options.length} tanh and multiply on {options.elements} float32: microseconds per operation"
    columns = ["", "forward", "forward + gradient", "best round", "tapegrad is x faster", "middle half"]
    common.show(title, columns, cells, facts)
    if options.json:
        common.write("overhead", facts, rows, length=options.length, elements=options.elements)


def threshold(options: Any) -> None:
    """At once against fused, by number of elements."""
    import numpy as np

    tg = common.load("tapegrad", options.threads)
    from tapegrad.engine import region

    def chain(size: int) -> Callable[[], Any]:
        rng = np.random.default_rng(0)
        x, w, b = (tg.asarray(rng.standard_normal(size, np.float32)) for _ in range(3))

        def call() -> Any:
            with tg.GradientTape() as tape:
                tape.watch([x, w, b])
                y = tg.tanh(x * w + b) * tg.sigmoid(x)
                np.asarray(y)
            return [np.asarray(g) for g in tape.gradient(y, [x, w, b])]

        return call

    before, rows = region.SMALL, []
    for log2 in range(10, 21):
        size, call = 1 << log2, chain(1 << log2)
        small = {"at once": size + 1, "fused": 1}

        def prepare(way: str, call: Callable = call, small: dict[str, int] = small) -> Any:
            region.set_small(small[way])  # forgets what it remembers of each operation, so one call to warm up
            return call()

        for at_once, fused in zip(prepare("at once"), prepare("fused"), strict=True):
            common.must_agree("fused", f"a gradient of {size} elements", fused, at_once, TOLERANCE)
        number = max(1, min(20, (1 << 18) >> log2))
        times = common.by_turns(dict.fromkeys(small, call), options.rounds, number=number, prepare=prepare)
        rows.append(
            {
                "elements": size,
                "at_once_us": common.median(times["at once"]) * 1e6,
                "fused_us": common.median(times["fused"]) * 1e6,
                "speedup_by_fusing": common.ratio(times["fused"], times["at once"]),
                "speedup_of_best": common.best_ratio(times["fused"], times["at once"]),
                "middle_half": common.quartiles(times["fused"], times["at once"]),
            }
        )
    region.set_small(before)
    cells = [
        (f"{r['elements']:,}", f"{r['at_once_us']:.0f}", f"{r['fused_us']:.0f}", f"{r['speedup_by_fusing']:.2f}",
         "{:.2f}-{:.2f}".format(*r["middle_half"]), f"{r['speedup_of_best']:.2f}")
        for r in rows
    ]  # fmt: skip
    facts = common.about(options.threads)
    title = f"tanh(x*w+b)*sigmoid(x), forward and gradients: at once or fused? SMALL: {2 * before:,} of float32"
    columns = ["elements", "at once, us", "fused, us", "fusing is x faster", "middle half", "by best rounds"]
    common.show(title, columns, cells, facts)
    if options.json:
        common.write("overhead-threshold", facts, rows, small=before)


def main() -> None:
    parser = common.parser(__doc__, threads=1, rounds=30)
    parser.add_argument("--length", type=int, default=100, help="operations in the chain (default: %(default)s)")
    parser.add_argument("--elements", type=int, default=4, help="of each array (default: %(default)s)")
    parser.add_argument("--number", type=int, default=5, help="chains per turn (default: %(default)s)")
    parser.add_argument("--threshold", action="store_true", help="measure from how many elements on fusing pays")
    options = parser.parse_args()
    common.begin(options.threads)
    (threshold if options.threshold else compare)(options)


if __name__ == "__main__":
    main()
