"""What does it cost to be profiled?

    python bench/profiling.py [--scale quick|full] [--stacks line|full] [--rounds 15] [--threads 1] [--json]

The demo's training step (forward, backward, AdamW), plain and recorded in turns, as ``tapegrad profile`` records it,
to a run file: a session is started before each recorded step and stopped after it, outside the time taken.
The cost is the median of the ratios within rounds, by the clock and by the process's CPU time (which leaves out what
other processes do).  Counts, which do not depend on the machine, are given beside: events, and bytes of tensors that
recording takes (none: the exit code is 1 otherwise, or where a gradient changes by a bit).
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from typing import Any

import common

_OPERATIONS = 200
COLUMNS = ("step", "wall", "cpu", "events", "tensor bytes", "bits equal")


def timed(step: Any) -> tuple[float, float]:
    """Seconds by the clock and of the process's CPU time."""
    wall, cpu = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - wall, time.process_time() - cpu


def warm(step: Any) -> tuple[float, float]:
    """The second of two steps: in the first one a session learns the program's places, once for a whole program."""
    step()
    return timed(step)


def main() -> int:
    """Measure and print; the exit code."""
    parser = common.parser(__doc__, threads=2, rounds=15)
    parser.add_argument("--scale", choices=("quick", "full"), default="full")
    parser.add_argument("--stacks", choices=("line", "full", "none"), default="line")
    args = parser.parse_args()
    common.begin(args.threads)
    import tapegrad as tg
    from tapegrad.profile import demo_text, demo_train
    from tapegrad.profile.demo_model import loss_and_gradients
    from tapegrad.profile.recorder import Session
    from tapegrad.tracing.log import Log

    settings = demo_train.FULL if args.scale == "full" else demo_train.QUICK
    text = demo_text.load()
    training = demo_train.Training("plain", text, settings)
    batch = demo_train.windows(text.train, "0", settings)

    path = os.path.join(tempfile.mkdtemp(prefix="tapegrad-"), "run.sqlite")

    def step() -> None:
        float(training.step(*batch))

    def recorded(what: Any) -> tuple[Any, Session]:
        session = Session(stacks=args.stacks, log=Log(path))
        session.start()
        try:
            return what(), session
        finally:
            session.stop()
            os.unlink(path)

    def gradients() -> list[bytes]:
        return [g.numpy().tobytes() for g in loss_and_gradients(training.model, *batch)[1]]

    for _ in range(3):
        step()
    off, on = [], []
    for _ in range(args.rounds):
        off.append(warm(step))
        on.append(recorded(lambda: warm(step))[0])
    x = tg.asarray([1.0] * 4, dtype="float32")
    v = tg.Variable(x)

    def forward() -> object:
        y = x
        for _ in range(_OPERATIONS):
            y = tg.tanh(y)
        return y

    def with_gradient() -> object:
        with tg.GradientTape() as tape:
            y = v
            for _ in range(_OPERATIONS // 2):
                y = tg.tanh(y) * x
        return tape.gradient(y, v)

    small = []
    for name, f in (("forward", forward), ("with gradient", with_gradient)):
        times = [(warm(f)[0], recorded(lambda f=f: warm(f))[0][0]) for _ in range(args.rounds)]
        plain, profiled = (statistics.median(t[i] for t in times) / _OPERATIONS * 1e6 for i in (0, 1))
        small.append((name, f"{plain:.1f} us", f"{profiled:.1f} us"))
    with tg.measure() as bare:
        before = gradients()
    with tg.measure() as watched:
        after, session = recorded(gradients)
    extra, same = watched.peak_bytes - bare.peak_bytes, before == after
    events = session.journal.parts.events
    wall, cpu = (statistics.median(b[i] / a[i] for a, b in zip(off, on)) for i in (0, 1))
    milliseconds = statistics.median(a[0] for a in off) * 1e3
    row = (f"{milliseconds:.0f} ms", f"{wall:.3f}x", f"{cpu:.3f}x", f"{events:,}", str(extra), "yes" if same else "NO")
    facts = common.about(args.threads)
    common.show(f"a recorded step of the demo ({args.scale}, stacks: {args.stacks})", COLUMNS, [row], facts)
    common.show("an operation on 4 numbers", ("tanh, multiply", "plain", "recorded"), small, facts)
    if args.json:
        common.write("profiling", facts, [dict(zip(COLUMNS, row))], scale=args.scale, stacks=args.stacks)
    return 0 if same and not extra else 1


if __name__ == "__main__":
    sys.exit(main())
