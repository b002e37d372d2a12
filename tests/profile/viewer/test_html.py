"""The report file: what is in it and what is not, how it is written, and that its payload says what the run says."""

from __future__ import annotations

import base64
import gzip
import json
import re
from pathlib import Path

import made_runs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapegrad.profile.viewer import html
from tapegrad.profile.viewer.payload import LARGEST, encode
from tapegrad.tracing.database import RunFileError
from tapegrad.tracing.timeline import events

RUNS = {
    "training": lambda: made_runs.training(checkpointed=2),
    "empty": made_runs.empty,
    "hostile": made_runs.hostile,
    "oom": made_runs.out_of_memory,
}


def unpack(payload: bytes) -> tuple[dict, dict[str, list[int]]]:
    """Reads a payload by its description in payload.py."""
    data = gzip.decompress(payload)
    start = 4 + int.from_bytes(data[:4], "little")
    header, columns = json.loads(data[4:start]), {}
    for name, count, width, delta in header["columns"]:
        planes = [data[start + i * count : start + (i + 1) * count] for i in range(width)]
        numbers = [int.from_bytes(bytes(number), "little", signed=True) for number in zip(*planes)]
        for i in range(1, count if delta else 0):
            numbers[i] += numbers[i - 1]
        columns[name] = numbers
        start += count * width
    assert start == len(data)
    return header, columns


def payload_of(page: str) -> bytes:
    return base64.b64decode(
        re.search(r'<script type="application/gzip\+base64" id="payload">([^<]*)</script>', page)[1]
    )


@pytest.mark.parametrize("name", RUNS)
def test_the_payload_holds_the_run(name: str) -> None:
    run = RUNS[name]()
    header, columns = unpack(payload_of(html.page(run)))
    assert header["peak"] == run.peak and header["checks"] == run.checks and header["strings"] == run.strings
    assert header["sources"] == run.sources and header["folded"] == {"count": 0, "bytes": 0}
    for column in ("bytes", "requested", "op", "stack", "call", "remat_of", "holder", "next_backward_seq"):
        assert columns[f"allocs.{column}"] == run.allocs[column]
    found = events(run)
    assert columns["events.seq"] == [e.seq for e in found] and columns["events.ns"] == [e.ns for e in found]
    changes = [((c >> 4) - 1, (c & 15) - 1) for c in columns["events.change"]]
    assert changes == [(e.before, e.after) for e in found]
    assert columns["events.alloc"] == [e.alloc for e in found]
    for table in ("frames", "stacks", "calls", "steps", "marks", "samples"):
        for column, values in run.tables[table].items():
            assert columns[f"{table}.{column}"] == values


@given(st.lists(st.integers(-LARGEST, LARGEST), max_size=20))
def test_numbers_of_all_sizes_survive(numbers: list[int]) -> None:
    run = made_runs.empty()
    run.samples["seq"] = numbers
    run.samples["used_bytes"] = [n % 70_000 - 35_000 for n in numbers]
    _, columns = unpack(encode(run, source=True, advice=None, max_drawn=10))
    assert columns["samples.seq"] == numbers
    assert columns["samples.used_bytes"] == run.samples["used_bytes"]


def test_the_smallest_allocations_are_folded_and_still_counted() -> None:
    run = made_runs.training(checkpointed=2)
    header, columns = unpack(encode(run, source=True, advice=None, max_drawn=20))
    sizes, kept = run.allocs["bytes"], columns["allocs.number"]
    assert len(kept) == 20 and header["folded"] == {"count": len(sizes) - 20, "bytes": sum(sizes) - 20 * made_runs.MIB}
    assert {sizes[i] for i in kept} == {made_runs.MIB} and kept == sorted(kept)
    bytes_ = [
        columns["allocs.bytes"][a] if a >= 0 else n for a, n in zip(columns["events.alloc"], columns["events.folded"])
    ]
    assert bytes_ == [sizes[e.alloc] for e in events(run)]


def test_what_a_folded_allocation_repeats_is_left_out() -> None:
    run = made_runs.training(checkpointed=2)
    assert run.allocs["remat_of"][42] == 15
    run.allocs["bytes"][15] = 512  # too small to be kept
    _, columns = unpack(encode(run, source=True, advice=None, max_drawn=60))
    kept = columns["allocs.number"]
    expected = [kept.index(old) if (old := run.allocs["remat_of"][i]) in kept else -1 for i in kept]
    assert columns["allocs.remat_of"] == expected
    assert expected[kept.index(42)] == -1 and max(expected) > 0


def test_numbers_that_a_browser_rounds_are_refused() -> None:
    run = made_runs.training(steps=1)
    html.page(run)
    run.ops["ns"][-1] = LARGEST + 1
    with pytest.raises(RunFileError, match=f"the run holds {LARGEST + 1}, .* use --json or --csv instead of --html"):
        html.page(run)
    sums = made_runs.training(steps=1)
    sums.allocs["bytes"] = [LARGEST] * len(sums.allocs["bytes"])
    with pytest.raises(RunFileError, match="counts exactly"):
        html.page(sums)


def test_names_cannot_end_the_script_or_become_markup() -> None:
    page = html.page(
        made_runs.hostile(), advice={"cards": [], "commands": [["</script><script>alert(3)</script>", ""]]}
    )
    assert page.count("<script") == page.count("</script>") == 2
    assert "<title>&lt;/script&gt;&lt;b&gt;x&lt;/b&gt; ☃ [red]markup[/red] · memory · tapegrad</title>" in page
    assert "alert(" not in page


def test_source_text_is_left_out_on_demand() -> None:
    run = made_runs.training(steps=1)
    assert unpack(payload_of(html.page(run)))[0]["sources"]["model.py"]["42"] == "y = block(x)  # line 42"
    page = html.page(run, source=False)
    assert unpack(payload_of(page))[0]["sources"] is None
    assert b"y = block(x)" not in gzip.decompress(payload_of(page))


def test_the_same_run_gives_the_same_file(tmp_path: Path) -> None:
    for name in ("a.html", "b.html"):
        html.write(made_runs.training(), tmp_path / name)
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    target = tmp_path / "folder"
    target.mkdir()
    with pytest.raises(OSError):
        html.write(made_runs.empty(), target)
    assert list(tmp_path.iterdir()) == [target]


def test_halves_of_characters_and_control_characters_can_be_written(tmp_path: Path) -> None:
    run = made_runs.Builder(program="a\ud800b\x1b[2J\u202ec").finish()
    html.write(run, tmp_path / "r.html")
    assert "<title>a\\ud800b\\u001b[2J\\u202ec · memory" in (tmp_path / "r.html").read_text(encoding="utf-8")


def test_the_policy_allows_nothing_from_outside() -> None:
    page = html.page(made_runs.empty())
    policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
    assert f'<meta http-equiv="Content-Security-Policy" content="{policy}">' in page
