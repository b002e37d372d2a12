"""Cells: what a rerun sees of contents that another thread has exchanged meanwhile."""

from __future__ import annotations

import threading

from tapegrad.core.cell import Cell, contents, contents_now, exchange, lookout, overlay, shadowed


def elsewhere(cell: Cell, content: str) -> None:
    """Another thread exchanges the content."""
    other = threading.Thread(target=cell.set, args=(content,))
    other.start(), other.join()


def test_a_rerun_jumps_where_the_first_run_did() -> None:
    cell = Cell("a")

    def run() -> list[str]:
        first = cell.get()
        cell.set("b")
        return [first, cell.get()]

    with lookout() as seen:
        assert run() == ["a", "b"]
        elsewhere(cell, "z")
        assert cell.get() == "z"
    assert seen.jumps == {cell: {"b": "z"}} and dict(seen) == {cell: ("a", None)}
    with overlay({c: content for c, (content, _) in seen.items()}, seen.jumps):
        assert run() == ["a", "z"]
    assert cell.get() == "z"


def test_writes_that_are_kept_apart_are_read_and_jump_nowhere() -> None:
    cell, writes = Cell("a"), dict[Cell, str]()
    with shadowed(writes):
        cell.set("b")
        assert cell.get() == "b"
    assert writes == {cell: "b"} and cell.get() == "a"


def test_what_a_rerun_inside_sees_is_no_jump() -> None:
    cell = Cell("a")
    with lookout() as seen:
        cell.get()
        with overlay({cell: "older"}):
            assert cell.get() == "older"
            cell.set("other")
        cell.get()
    assert seen.jumps == {} and dict(seen) == {cell: ("a", None)}


def test_many_cells_are_read_and_exchanged_as_each_alone_would_be() -> None:
    cells = [Cell("a"), Cell("b")]
    with overlay({cells[0]: "older"}):
        assert contents_now(cells) is None
        assert contents(cells, (None, None)) == ["older", "b"]
        exchange(cells, ["c", "d"], (None, None))
        assert contents(cells, (None, None)) == ["c", "d"]
    assert contents_now(cells) == contents(cells, (None, None)) == ["a", "b"]
    with lookout() as seen:
        assert contents_now(cells) is None
        assert contents(cells, ("one", "other")) == ["a", "b"]
        exchange(cells, ["c", "d"], (None, None))
    assert dict(seen) == {cells[0]: ("a", "one"), cells[1]: ("b", "other")}
    assert contents_now(cells) == ["c", "d"]
