"""The flame graph: what is alive at the cursor, by call and line, with the bytes of the run."""

from __future__ import annotations

from collections import Counter
from typing import Any

import made_runs
import pytest
from report_page import RUNS, cursor, drawn, go, integer

from tapegrad.tracing.run import Run
from tapegrad.tracing.timeline import alive, events

READ = """found => found.map((e) => [e.dataset.key, Number(e.dataset.bytes), e.offsetLeft, e.offsetWidth])"""


def expected(run: Run, seq: int) -> Counter[str]:
    """Bytes by the key of a node: all names on the way to it, a line for each."""
    found: Counter[str] = Counter()
    a, c = run.allocs, run.calls
    for alloc in alive(run, seq):
        keys, call = [], a["call"][alloc]
        while call >= 0:
            keys.insert(0, f"{run.text(c['name'][call])}\t{run.text(c['file'][call])}\t{c['line'][call]}")
            call = c["parent"][call]
        file, line, _ = run.frame_of(a["stack"][alloc])
        if a["stack"][alloc] >= 0:
            keys.append(f"{run.text(a['op'][alloc]) or '(unnamed)'}\t{file}\t{line}")
        for n in range(len(keys) + 1):
            found["".join(f"\n{key}" for key in keys[:n])] += a["bytes"][alloc]
    return found


@pytest.mark.parametrize("name", [name for name in RUNS if name != "empty"])
def test_each_call_has_the_bytes_of_the_run(show: Any, name: str) -> None:
    run = RUNS[name]()
    page = show(run)
    listed = [e.seq for e in events(run)]
    for e in sorted({cursor(page), 5, len(listed) // 2} & set(range(len(listed)))):
        go(page, e)
        found = page.eval_on_selector_all("#flame .flame", READ)
        bytes_of = expected(run, listed[e])
        least = 0.002 * bytes_of[""]
        assert {key: n for key, n, *_ in found} == {key: n for key, n in bytes_of.items() if n and n >= least}
        total, width = found[0][1:4:2] if found else (0, 0)
        for _, n, _, drawn_width in found:
            assert abs(drawn_width - width * n / total) <= 2


def test_a_click_widens_a_call_and_a_button_shows_all_again(show: Any) -> None:
    page = show(made_runs.training(steps=1))
    total = integer(page, "#flame .flame >> nth=0")
    block = page.locator("#flame .flame", has_text="block").first
    nbytes = int(block.get_attribute("data-bytes"))
    assert 0 < nbytes < total and page.locator("button:text-is('all that is alive')").count() == 1
    block.click()
    drawn(page)
    assert integer(page, "#flame .flame >> nth=0") == nbytes
    page.click("section:has(#flame) button:text-is('all that is alive')")
    drawn(page)
    assert integer(page, "#flame .flame >> nth=0") == total


def test_nothing_alive_is_an_empty_graph(show: Any) -> None:
    page = show(made_runs.empty())
    assert page.locator("#flame .flame").count() == 0
