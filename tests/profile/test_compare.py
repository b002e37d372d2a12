"""``tapegrad compare``: figures of two runs side by side, thresholds, gradients."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tapegrad.profile.cli import COMMANDS, main
from tapegrad.profile.compare import Change, Threshold, compare, parse_threshold, steady_steps
from tapegrad.tracing.file import save
from tapegrad.tracing.run import Run
from tests.profile.made_runs import MIB, empty, hostile, many, out_of_memory, training


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save(training(), "plain.sqlite")
    save(training(checkpointed=3), "less.sqlite")


def run(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(main, ["compare", *arguments])
    assert result.exit_code == code, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


def with_gradients(*digests: str, names: tuple[str, ...] = ("w", "b")) -> Run:
    found = training(steps=2)
    for i, digest in enumerate(digests):
        for column, value in (("name", names[i % len(names)]), ("digest", digest)):
            found.strings.append(value)
            found.gradients[column].append(len(found.strings) - 1)
        found.gradients["step"].append(i // len(names))
        found.gradients["seq"].append(0)
    return found


def test_figures() -> None:
    found = compare(training(), training(checkpointed=3))
    used = found.figure("peak used")
    assert (used.before, used.after, used.difference) == (17 * MIB, 11 * MIB, -6 * MIB)
    assert not found.figure("peak reserved").known
    assert found.figure("reruns per step").after == 3 and found.figure("rerun time per step").after > 0
    assert sum(c.before for c in found.parts) == 17 * MIB and sum(c.after for c in found.parts) == 11 * MIB
    by_line = compare(training(), training(checkpointed=3), "line").parts
    assert sum(c.difference for c in by_line) == -6 * MIB
    assert [abs(c.difference) for c in by_line] == sorted((abs(c.difference) for c in by_line), reverse=True)


def test_step_time_is_the_median_of_whole_steps_after_the_first() -> None:
    run = training(steps=4)
    steps = run.steps
    for i, (begin, end, cpu) in enumerate([(0, 900, 50), (1000, 1010, 5), (2000, 2030, 7), (3000, 3020, 9)]):
        steps["begin_ns"][i], steps["end_ns"][i], steps["cpu_ns"][i] = begin, end, cpu
    found = compare(run, run)
    assert found.figure("step time").before == 20 and found.figure("step CPU time").before == 7
    assert steady_steps(training(steps=1)) == [0] and steady_steps(empty()) == []
    assert steady_steps(out_of_memory()) == [0]  # the second never ended
    assert compare(empty(), run).figure("step time").before == -1


@pytest.mark.parametrize(
    ("text", "unit", "before", "after", "exceeded"),
    [
        ("5%", "bytes", 100, 105, False),
        ("5%", "bytes", 100, 106, True),
        ("2.5 %", "bytes", 1000, 1026, True),
        ("5%", "bytes", 0, 1, True),
        ("5%", "bytes", 100, 1, False),
        ("0", "bytes", 100, 100, False),
        ("0", "bytes", 100, 101, True),
        ("1KiB", "bytes", 100, 1124, False),
        ("1KiB", "bytes", 100, 1125, True),
        ("20ms", "ns", 0, 20_000_000, False),
        ("1.5us", "ns", 0, 1501, True),
    ],
)
def test_thresholds(text: str, unit: str, before: int, after: int, exceeded: bool) -> None:
    assert parse_threshold(text, unit).exceeded(Change("x", unit, before, after)) is exceeded


@pytest.mark.parametrize(
    ("text", "unit"), [("", "bytes"), ("-5%", "bytes"), ("5", "ns"), ("5ms", "bytes"), ("x%", "ns")]
)
def test_what_is_no_threshold(text: str, unit: str) -> None:
    with pytest.raises(ValueError, match="neither a share such as 5% nor"):
        parse_threshold(text, unit)


def test_a_threshold_of_nothing() -> None:
    assert Threshold().exceeded(Change("x", "bytes", 1, 2))


def test_text(files) -> None:
    out = run("plain.sqlite", "less.sqlite").stdout
    assert "peak used            17.00 MiB  11.00 MiB  -6.00 MiB  -35.3 %\n" in out
    assert "activation                 12.00 MiB  6.00 MiB  -6.00 MiB  -50.0 %\n" in out
    assert "gradients: not recorded (tapegrad profile --gradients)" in out
    assert max(map(len, out.splitlines())) <= 80
    assert "\n5 more" in run("plain.sqlite", "less.sqlite", "--by", "line", "-n", "2").stdout


def test_exit_codes(files) -> None:
    run("plain.sqlite", "less.sqlite", "--fail-above", "0")
    assert "worse than allowed: peak used" in run("less.sqlite", "plain.sqlite", "--fail-above", "50%", code=3).stdout
    run("less.sqlite", "plain.sqlite", "--fail-above", "60%")
    run("less.sqlite", "plain.sqlite", "--fail-above", "6MiB")
    run("less.sqlite", "plain.sqlite", "--fail-above", "6291455B", code=3)
    assert "step time" in run("plain.sqlite", "less.sqlite", "--time-above", "1%", code=3).stdout
    run("plain.sqlite", "less.sqlite", "--time-above", "1s")
    assert "neither a share" in run("plain.sqlite", "less.sqlite", "--fail-above", "x", code=2).stderr
    assert "none: No such file" in run("plain.sqlite", "none", code=2).stderr
    save(empty(), "empty.sqlite")
    assert "needs a step" in run("plain.sqlite", "empty.sqlite", "--time-above", "1%", code=1).stderr


def test_a_bare_number_is_no_threshold(files) -> None:
    for option, hint in (("--fail-above", "write 5% or 5MiB"), ("--time-above", "write 5% or 5ms")):
        assert hint in run("plain.sqlite", "less.sqlite", option, "5", code=2).stderr


def test_a_run_that_did_not_finish_passes_no_threshold(files) -> None:
    save(out_of_memory(), "oom.sqlite")
    said = "A: plain.sqlite\nB: oom.sqlite\n   did not finish: out of memory (code 1): matmul: no room for 1.00 GiB\n"
    assert run("plain.sqlite", "oom.sqlite").stdout.startswith(said)
    for option in ("--fail-above", "--time-above"):
        out = run("plain.sqlite", "oom.sqlite", option, "1000%", code=3).stdout
        assert out.endswith("\nworse than allowed: B did not finish\n")
    assert "did not finish: out of" in run("oom.sqlite", "plain.sqlite", "--fail-above", "1000%").stdout
    found = json.loads(run("plain.sqlite", "oom.sqlite", "--fail-above", "1000%", "--json", code=3).stdout)
    assert found["exceeded"] == ["B did not finish"] and found["outcomes"][0] == "finished"
    asked_to_stop = training()
    asked_to_stop.meta["outcome"] = {"kind": "exit", "code": 0, "message": ""}
    save(asked_to_stop, "exit.sqlite")
    assert "finish" not in run("plain.sqlite", "exit.sqlite", "--fail-above", "0").stdout


def test_what_a_budget_did_is_shown_where_it_did_anything() -> None:
    assert not [f for f in compare(training(), training()).figures if "restored" in f.name or "offloads" in f.name]
    after = training()
    after.steps["restored"][:], after.steps["offloads"][:] = [9, 2, 4], [0, 1, 1]
    found = compare(training(), after)
    assert found.figure("values restored per step").after == 3 and found.figure("offloads per step").after == 1


def test_lines_have_short_paths() -> None:
    found = compare(training(file="/a/model.py"), training(file="/b/model.py"), "line").parts
    assert {c.difference for c in found} == {0} and all(c.name.startswith("model.py:") for c in found)


def test_json(files) -> None:
    found = json.loads(run("less.sqlite", "plain.sqlite", "--json", "--by", "op", "--fail-above", "1%", code=3).stdout)
    assert found["figures"][0] == {"name": "peak used", "unit": "bytes", "before": 11 * MIB, "after": 17 * MIB}
    assert found["exceeded"] == ["peak used"] and found["gradients"]["state"] == "not recorded"
    assert {row["name"] for row in found["at_peak"]} == {"matmul", "leaf", "ones"}


@pytest.mark.parametrize(
    ("other", "says", "code"),
    [
        (with_gradients("1", "2", "3", "4"), "bit-identical, 4 compared\n", 0),
        (with_gradients("1", "2"), "bit-identical, 2 compared, 2 in one run only\n", 0),
        (with_gradients("1", "2", "3", "5"), "different, 4 compared; the first: b in step 1\n", 3),
        (with_gradients("1", names=("other",)), "none in common, 0 compared, 5 in one run only\n", 3),
        (training(), "not recorded (tapegrad profile --gradients)\n", 0),
    ],
)
def test_gradients(other: Run, says: str, code: int, tmp_path: Path) -> None:
    save(with_gradients("1", "2", "3", "4"), tmp_path / "a.sqlite")
    save(other, tmp_path / "b.sqlite")
    result = run(str(tmp_path / "a.sqlite"), str(tmp_path / "b.sqlite"), code=code)
    assert f"gradients: {says}" in result.stdout


def test_other_runs_and_names(tmp_path: Path) -> None:
    for i, found in enumerate((hostile(), many(300), empty(), out_of_memory())):
        save(found, tmp_path / f"{i}.sqlite")
    for i in range(4):
        for j in range(4):
            out = run(str(tmp_path / f"{i}.sqlite"), str(tmp_path / f"{j}.sqlite"), "--by", "line").stdout
            assert "\x1b" not in out and "\u202e" not in out


def test_help_and_summary_agree() -> None:
    out = CliRunner().invoke(main, ["compare", "--help"]).output
    assert COMMANDS["compare"][0] in out and "--fail-above 2%" in out and "exit code is 3" in out
