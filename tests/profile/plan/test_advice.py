"""Cards: the advised code is written into the program, the program runs, and the peak is the promised one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tapegrad.profile.cli import main
from tapegrad.profile.plan.advice import Advice, Card, advice
from tapegrad.profile.plan.edits import Edit
from tapegrad.tracing.file import load
from tapegrad.tracing.run import Run
from tests.profile.plan.made import training

LAYERS = """\
import tapegrad as tg
from tapegrad import nn

class Block(nn.Layer):
    def __init__(self):
        super().__init__()
        self.norm, self.wide, self.back = nn.LayerNormalization(), nn.Dense(256, activation="gelu"), nn.Dense(64)

    def call(self, x):
        return x + self.back(self.wide(self.norm(x)))

tg.random.seed(0)
blocks, x = [Block() for _ in range(4)], tg.random.normal((512, 64))

def loss_of(x):
    for block in blocks:
        x = block(x)
    return tg.mean(x * x)

loss_of(x[:1])
variables = [v for block in blocks for v in block.trainable_variables]
optimizer = tg.optim.Adam(1e-3)
for _ in range(3):
    with tg.GradientTape() as tape:
        loss = loss_of(x)
    optimizer.apply(tape.gradient(loss, variables), variables)
"""

SEQUENTIAL = LAYERS.replace("    for block in blocks:\n        x = block(x)\n", "    x = model(x)\n").replace(
    "def loss_of", "model = nn.Sequential(blocks)\n\ndef loss_of"
)
"""The program calls no block: the library does."""

WIDE = """\
import tapegrad as tg
tg.random.seed(0)
ws = [tg.Variable(tg.random.normal((512, 512)) * 0.04) for _ in range(6)]
x0 = tg.random.normal((512, 512))

def wide(x, w):
    h = x @ w
    for _ in range(3):
        h = tg.softmax(h) * 9.0 + h
    return h

for _ in range(3):
    with tg.GradientTape() as tape:
        x = x0
        for w in ws:
            x = wide(x, w)
        loss = tg.mean(x * x)
    for w, g in zip(ws, tape.gradient(loss, ws)):
        w.assign_sub(1e-3 * g)
"""

WAVE = """\
import numpy as np
import tapegrad as tg

speed = tg.Variable(np.full((140, 140), 0.2, "f4"))
start = tg.asarray(np.eye(140, dtype="f4"))

def step(u, before):
    around = tg.roll(u, 1, 0) + tg.roll(u, -1, 0) + tg.roll(u, 1, 1) + tg.roll(u, -1, 1) - 4 * u
    return 2 * u - before + speed * around, u

for _ in range(2):
    with tg.GradientTape() as tape:
        u, before = start, start
        for _ in range(100):
            u, before = step(u, before)
        loss = tg.sum(u * u)
    speed.assign_sub(1e-6 * tape.gradient(loss, speed))
"""

RELAX = """\
import tapegrad as tg
w = tg.Variable(tg.eye(64))
start = tg.ones((256, 64))

def step(x):
    h = tg.tanh(x @ w)
    return x + 0.1 * tg.softmax(h @ w)

for _ in range(3):
    with tg.GradientTape() as tape:
        x = start
        for _ in range(60):
            x = step(x)
        loss = tg.mean(x * x)
    w.assign_sub(1e-3 * tape.gradient(loss, w))
"""

CAPTURED = """\
import tapegrad as tg
ws = [tg.Variable(tg.random.normal((64, 64)) * 0.1) for _ in range(6)]

@tg.function
def train(x):
    with tg.GradientTape() as tape:
        for w in ws:
            x = tg.tanh(x @ w) * x
        loss = tg.mean(x * x)
    return tape.gradient(loss, ws)

x = tg.ones((512, 64))
for _ in range(4):
    gradients = train(x)
    tg.memory.step()
"""

MADE = CAPTURED.replace("@tg.function\n", "").replace("x = tg.ones", "train = tg.function(train)\nx = tg.ones")


def profiled(folder: Path, text: str, name: str = "run.json") -> Run:
    (folder / "train.py").write_text(text)
    command = [sys.executable, "-m", "tapegrad", "profile", "-q", "-f", "-o", name, "train.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return load(folder / name)


def at_a_steady_pace(run: Run) -> Run:
    """The run, of which every event took a microsecond: what is advised of measured times depends on the machine."""
    for table, seq, ns in (
        (run.ops, "seq", "ns"),
        (run.calls, "begin_seq", "begin_ns"),
        (run.steps, "begin_seq", "begin_ns"),
        (run.steps, "end_seq", "end_ns"),
    ):
        table[ns][:] = [1000 * at for at in table[seq]]
    return run


def rewritten(text: str, card: Card) -> str:
    """The program with what a card says written at its lines; a loop takes the place of the one around it."""
    lines = text.split("\n")
    for edit in sorted(card.edits, key=lambda e: -e.line):
        now = lines[edit.line - 1]
        indent = now[: len(now) - len(now.lstrip())]
        if not edit.old:
            lines.insert(edit.line - 1, indent + edit.new)
            continue
        assert now.strip() == edit.old
        lines[edit.line - 1] = indent + edit.new
        if "checkpointed_loop" in edit.new:
            assert lines[edit.line - 2].strip().startswith("for ")
            lines[edit.line - 2] = indent[:-4] + "if True:"
    return "\n".join(lines)


@pytest.mark.sampled(1 / 10)
@pytest.mark.parametrize(
    ("text", "wanted", "within"),
    [
        (LAYERS, ["x = tg.recompute_grad(block)(x)", "self.back(tg.recompute_grad(self.wide)(self.norm(x)))"], 0.001),
        (SEQUENTIAL, ["@tg.recompute_grad"], 0.001),
        (WIDE, ["x = tg.recompute_grad(wide)(x, w)", "policy=tg.policies.save_matmuls)(x, w)"], 0.05),
        (WAVE, ["u, before = tg.checkpointed_loop(lambda state: step(*state), (u, before), 100)"], 0.03),
        (RELAX, ["x = tg.checkpointed_loop(step, x, 60)", "x = tg.recompute_grad(step)(x)"], 0.03),
        (CAPTURED, ["@tg.function(budget="], 0.2),
        (MADE, ["train = tg.function(train, budget="], 0.2),
    ],
    ids=["layers", "sequential", "wide", "wave", "relax", "captured", "made"],
)
def test_the_advised_code_takes_what_its_card_promises(
    text: str, wanted: list[str], within: float, tmp_path: Path
) -> None:
    run = at_a_steady_pace(profiled(tmp_path, text))
    found = advice(run, "run.json")
    told = [edit.new for card in found.cards for edit in card.edits]
    assert all(any(part in new for new in told) for part in wanted), told
    for n, card in enumerate(found.cards):
        assert all(edit.file == str(tmp_path / "train.py") for edit in card.edits)
        what = card.edits[0].new
        # the first call of a captured step is that of the Python code
        assert card.before_bytes == (run.steps["peak_bytes"][-1] if "function(" in what else run.peak["bytes"])
        assert card.after_bytes <= 0.9 * card.before_bytes
        measured = profiled(tmp_path, rewritten(text, card), f"card{n}.json").steps["peak_bytes"][-1]
        assert (1 - within) * card.after_bytes <= measured <= 1.001 * card.after_bytes, (card, measured)


def test_a_plan_of_the_card_is_kept_to_the_byte(tmp_path: Path) -> None:
    run = profiled(tmp_path, LAYERS)
    card = advice(run).cards[0]
    plan = ["plan", str(tmp_path / "run.json"), "--budget", str(card.after_bytes), "-o", str(tmp_path / "plan.json")]
    assert CliRunner().invoke(main, plan).exit_code == 0
    command = [
        sys.executable,
        "-m",
        "tapegrad",
        "profile",
        "-q",
        "--plan",
        "plan.json",
        "-o",
        "planned.json",
        "train.py",
    ]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    planned = load(tmp_path / "planned.json")
    assert planned.steps["peak_bytes"][-1] <= card.after_bytes


def test_what_gains_less_than_a_tenth_is_no_card(tmp_path: Path) -> None:
    small = LAYERS.replace("tg.random.normal((512, 64))", "tg.random.normal((16, 64))")
    found = advice(profiled(tmp_path, small))
    assert found.cards == ()


def test_lines_of_the_library_are_not_named() -> None:
    import tapegrad.nn.layers.core as core

    assert advice(training(file=core.__file__, name="Dense")).cards == ()
    (edit,) = advice(training()).cards[0].edits  # a layer of the program's, called by the library
    assert edit == Edit("model.py", 40, "", "@tg.recompute_grad")


def test_without_source_a_card_keeps_its_lines_and_bytes(tmp_path: Path) -> None:
    run = profiled(tmp_path, LAYERS)
    hidden = advice(run).without_source()
    assert [e.line for c in hidden.cards for e in c.edits] == [e.line for c in advice(run).cards for e in c.edits]
    assert "block" not in json.dumps([[e.old, e.new] for c in hidden.cards for e in c.edits])
    page = CliRunner().invoke(main, ["report", str(tmp_path / "run.json"), "--json", "--no-source"])
    assert "recompute_grad" not in page.output and json.loads(page.output)["advice"]["cards"]


def test_advice_as_json_has_the_figures() -> None:
    card = Card("run f() again", 4096, 1024, 10, 12, (Edit("a.py", 3, "f(x)", "g(f)(x)"),), "about")
    told = Advice((card,), (("other mixes", "tapegrad plan"),)).to_json()
    assert json.loads(json.dumps(told)) == {
        "cards": [{
            "what": "run f() again", "before_bytes": 4096, "after_bytes": 1024, "before_ns": 10, "after_ns": 12,
            "edits": [{"file": "a.py", "line": 3, "old": "f(x)", "new": "g(f)(x)"}], "bound": "about",
            "effect": "4.00 KiB -> about 1.00 KiB, step +20.0 %",
        }], "commands": [["other mixes", "tapegrad plan"]],
    }  # fmt: skip


HOSTILE = ["(" * 5000 + ")" * 5000, "x = f(\0)", "", "x = f(" + "-" * 50_000 + "1)", "é" * 20, "x = f(x"]


@pytest.mark.sampled(1 / 10)
@pytest.mark.parametrize("text", HOSTILE)
def test_text_that_is_no_python_gives_no_code(text: str, tmp_path: Path) -> None:
    run = profiled(tmp_path, RELAX)
    frames = run.frames
    for name, lines in run.sources.items():
        run.sources[name] = dict.fromkeys(lines, text)
    frames["column"][:] = [0] * run.count("frames")
    frames["end_column"][:] = [max(1, len(text.encode()))] * run.count("frames")
    assert (cards := advice(run).cards)
    for card in cards:
        assert [edit.new for edit in card.edits] == ["@tg.recompute_grad"]
