"""A pytest plugin (``-p ptx.plugin``, ``tests`` being on the path): what tests launch on the stand-in runs as PTX, too.

``--ptx-arch 80 --ptx-arch 90``: for which architectures.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from .twin import Bound, Record, Watch, watching

record = Record()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--ptx-arch", action="append", type=int, help="an architecture whose PTX is run, such as 80")
    parser.addoption("--ptx-ulps", type=float, default=8, help="how far apart results may be that are not exact")


@pytest.fixture(autouse=True)
def twice(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every launch of the test is compared."""
    arches = tuple(request.config.getoption("--ptx-arch") or (80,))
    bound = Bound(request.config.getoption("--ptx-ulps"), None)
    with watching(Watch(arches, lambda name: bound, record)):
        yield


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for name in sorted(record.names | set(record.left_out)):
        runs = sum(count for (one, _, _), count in record.runs.items() if one == name)
        worst = f", {record.worst[name]:.1f} units apart at most" if name in record.worst else ""
        terminalreporter.write_line(f"{name}: {runs} launches as PTX, {record.left_out[name]} too large{worst}")
