"""The text of a report: right numbers, 80 columns, no colour off a terminal, nothing that a terminal obeys."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from tapegrad.profile.plan.advice import Advice, Card
from tapegrad.profile.plan.edits import Edit
from tapegrad.profile.report import rows, text
from tapegrad.profile.report.table import clip_source
from tapegrad.profile.report.units import ms, percent
from tapegrad.tracing.run import Run
from tests.profile.made_runs import MIB, Builder, empty, hostile, many, out_of_memory, training


def printed(run: Run, show: str = "summary", width: int = 80, encoding: str = "utf-8", **options) -> str:
    stream = io.BytesIO()
    file = io.TextIOWrapper(stream, encoding=encoding, newline="")
    console = Console(file=file, width=width, highlight=False, force_terminal=options.pop("terminal", None))
    limit = options.pop("limit", 0)
    if show == "summary":
        text.print_summary(run, console, **({"path": "run.sqlite"} | options))
    elif show == "oom":
        text.print_oom(run, console, **options)
    else:
        found = rows.rows(run, run.peak["seq"], show)
        text.print_table(run, console, found, show, run.peak["seq"], limit)
    file.flush()
    return stream.getvalue().decode(encoding)


def test_the_peak_is_exact_and_the_categories_add_up() -> None:
    run = training(checkpointed=2)
    out = printed(run)
    assert f"({run.peak['bytes']} bytes) on cpu" in out.splitlines()[0]
    assert "at model.py:44 block() (matmul), step 0, backward" in out
    assert re.search(r"^activation +8\.00 MiB +61\.5 % +8  █", out, re.M)
    assert re.search(r"^total +13\.00 MiB +19$", out, re.M)
    assert "model.py:44 block()" in out and "5 × 1.00 MiB  5.00 MiB" in out
    assert re.search(r"^model\.py:40 block\(\) +2 × +4\.00 MiB +0\.01 ms +4\.00 MiB$", out, re.M)
    assert "2 more: tapegrad report run.sqlite --by line" in out.replace("…", "")
    assert out.endswith("tapegrad report run.sqlite --html\n")


@pytest.mark.parametrize("width", [80, 60])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "cp1252"])
def test_it_fits(width: int, encoding: str) -> None:
    for run in (training(checkpointed=2, blocks=12), many(2000)):
        lines = printed(run, width=width, encoding=encoding, path=None).splitlines()
        assert max(map(len, lines[2:])) <= width
        if encoding != "utf-8":
            assert all(line.isascii() for line in lines)


def test_no_colour_off_a_terminal_nor_against_the_users_will(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    run = out_of_memory()
    assert "\x1b" not in printed(run)
    assert "\x1b[31m" in printed(run, terminal=True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[[0-9;]*\b[39][0-7]m", printed(run, terminal=True))


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("show", ["summary", *rows.BY])
def test_names_are_harmless(encoding: str, show: str) -> None:
    run = hostile()
    run.meta["device"]["name"] = "\x1b[2Jcpu"
    out = printed(run, show, encoding=encoding, width=200, limit=0, path="a b\x1b.json")
    assert "\x1b" not in out and "\u202e" not in out
    if show in ("summary", "line"):
        assert r"f</script>\x1b[31m\u202e()" in out


def test_markup_in_names_is_text() -> None:
    b = Builder()
    b.alloc(MIB, "user", "[red]x[/red]", ("[bold]f.py", 1, "[/]"))
    out = printed(b.finish())
    assert "[red]x[/red]" in out and "[bold]f.py:1 [/]()" in out


def test_the_ledger_says_what_it_was_compared_with() -> None:
    run = training()
    assert "ledger not compared (profile --check), " in printed(run)
    run.checks |= {"checked": 2, "dropped": 1000}
    assert "ledger = NumPy's allocations: drift 0 B in 2 comparisons" in printed(run)
    run.meta["device"]["name"] = "cuda:0"
    assert "ledger = pool: drift 0 B in 2 comparisons" in printed(run)
    assert "; 1,000 events of steps that were not kept" in printed(run)
    run.checks["drift_bytes"] = 512
    assert "ledger differs from pool: drift 512 B" in printed(run)


def test_what_is_known_of_the_device() -> None:
    run = training()
    assert "% of the device" in printed(run) and "reserved" not in printed(run)
    run.meta["device"]["total_bytes"] = 1 << 45
    assert "of the device" not in printed(run)
    run.meta["device"]["total_bytes"] = None
    run.peak["reserved_bytes"] = 20 * MIB
    first = printed(run).splitlines()[0]
    assert "device" not in first and first.endswith("reserved 20.00 MiB")


def test_advice_and_its_absence() -> None:
    edits = (Edit("a/model.py", 43, "x = block(x)", "x = f(block)(x)\x1b[2J"), Edit("b/other.py", 9, "", "@f"))
    card = Card("recompute block()", 5 << 30, 4 << 30, 0.079, edits, "about")
    out = printed(training(), advice=Advice((card,), (("other mixes", "tapegrad plan RUN"),)))
    assert "What would help\n5.00 GiB → about 4.00 GiB, work +8 %\n  recompute block()\n" in out
    assert "\n  a/model.py:43\n    x = f(block)(x)\\x1b[2J\n  above b/other.py:9\n    @f\n" in out
    assert "\nother mixes: tapegrad plan RUN\n" in out
    assert "What would help" not in printed(training()) + printed(training(), advice=Advice())


def test_why_memory_ran_out() -> None:
    run = out_of_memory()
    out = printed(run, "oom", path="run.sqlite")
    for part in (
        "Out of memory on cpu, step 1, forward",
        "asked for 1073741824 bytes",
        "used 4.00 MiB (4194304 bytes), limit 6.00 MiB (6291456 bytes)",
        "alive: activation 4.00 MiB",
        "first to go: model.py:",
        "\nall that was alive: tapegrad report run.sqlite --at oom --by line -n 0",
    ):
        assert part in out
    assert max(map(len, out.splitlines()[:-1])) <= 80
    assert printed(run).startswith(out)  # the summary begins with it
    assert printed(run, "oom", encoding="ascii").isascii()
    assert "Out of memory" not in printed(run, seq=run.peak["seq"])
    run.meta["outcome"]["message"] = message = "1048576 (1.00 MiB) are held and cannot be evicted"
    out = printed(run, "oom", width=120)
    assert message in out
    assert "largest idle: model.py:" in out and "first to go" not in out


def test_the_line_is_told_in_80_columns() -> None:
    b = Builder()
    for line in range(40, 46):
        place = ("model_of_a_paper.py", line, "Transformer.attention_with_mask")
        b.alloc(MIB, "activation", "broadcast_in_dim", place, holder="vjp of softmax_cross_entropy")
        b.alloc(MIB, "activation", "broadcast_in_dim", place, holder="vjp of softmax_cross_entropy")
    for show in ("summary", "line"):
        out = printed(b.finish(), show)
        for line in range(40, 45):
            assert re.search(rf"^model_of_a_paper\.py:{line} Transf…  broadca…  vjp of …  2", out, re.M), out
    wide = printed(b.finish(), "line", width=120)
    assert "\nmodel_of_a_paper.py:40 Transformer.attention_with_mask()  " in wide


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (22, "model.py:44 attention…"),
        (18, "model.py:44 atten…"),
        (14, "model.py:44 a…"),
        (13, "model.py:44"),
        (11, "model.py:44"),
        (8, "…l.py:44"),
    ],
)
def test_a_place_gives_up_its_function_first(width: int, shown: str) -> None:
    assert clip_source("model.py:44 attention()", width) == shown


def test_names_of_ops_and_calls() -> None:
    b = Builder()
    for line, function in enumerate(("<listcomp>", "recompute_grad(Dense)", "f", "")):
        b.alloc(MIB, "user", "leaf", ("m.py", line, function))
    out = printed(b.finish())
    for name in ("m.py:0 <listcomp> ", "m.py:1 recompute_grad(Dense) ", "m.py:2 f() ", "m.py:3 "):
        assert re.search(rf"^{re.escape(name)} *input array", out, re.M), out
    assert "leaf" not in out and "\ninput array " in printed(b.finish(), "op")


def test_small_shares_and_times_are_not_nothing() -> None:
    b = Builder()
    b.alloc(1 << 30, "parameter", "exp", ("m.py", 1, "f"))
    b.alloc(512, "input", "exp", ("m.py", 1, "f"))
    assert re.search(r"^input +512 B +< 0\.1 % ", printed(b.finish()), re.M)
    assert percent(0, 5) == "0.0 %" and percent(1, 1999) == "0.1 %" and percent(1, 0) == "-"
    told = [ms(ns, plain=False) for ns in (0, 7, 400, 4999, 5000, 310_000)]
    assert told == ["0 ms", "7 ns", "0.4 µs", "5.0 µs", "0.01 ms", "0.31 ms"] and ms(400) == "0.4 us"


def test_another_moment() -> None:
    run = training()
    out = printed(run, seq=5)
    live = sum(row.bytes for row in rows.rows(run, 5))
    assert out.startswith(f"Alive {live / MIB:.2f} MiB ({live} bytes)" if live >= MIB else f"Alive {live >> 10}.00 KiB")


def test_nothing() -> None:
    assert "nothing was allocated" in printed(empty())


def test_tables_say_what_they_leave_out() -> None:
    run = many(500)
    out = printed(run, "line", limit=3)
    total = sum(row.count for row in rows.rows(run, run.peak["seq"]))
    assert re.search(r"^… \d+ more, .* \(--rows 0 shows all\)$", out, re.M)
    assert out.splitlines()[-1].endswith(f"({run.peak['bytes']} bytes), {total} allocations")
    assert " more, " not in printed(run, "line", limit=0)


def test_files_are_named_as_shortly_as_tells_them_apart() -> None:
    b = Builder()
    for file in ("/a/x.py", "/b/x.py", "/b/y.py"):
        b.alloc(512, "user", "exp", (file, 3, "f"))
    run = b.finish()
    assert rows.short_names(run) == {"/a/x.py": "/a/x.py", "/b/x.py": "/b/x.py", "/b/y.py": "y.py"}
    out = printed(run)
    assert "/a/x.py:3 f()" in out and "\ny.py:3 f()" in out


def test_bytes_of_other_code_in_the_pool_are_named_and_not_in_the_total() -> None:
    run = training()
    assert "unattributed" not in printed(run)
    for seq, outside in ((0, 0), (50, 3 * MIB), (run.peak["seq"] + 1, 5 * MIB)):
        for column, value in zip(run.samples, (seq, 0, 0, outside)):
            run.samples[column].append(value)
    out = printed(run)
    assert "beside it, unattributed 3.00 MiB: taken from the pool by other code" in out
    assert str(run.peak["bytes"]) in out
