"""Tiers of the suite: what ``pytest`` runs, what ``pytest -m slow`` adds, and how a run of all shows its progress.

The default tier takes a sample of each large product (``@pytest.mark.sampled(share)``); its other cases are slow.
The commit chooses the sample, so that every commit looks at other cases, and two runs of one commit at the same.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# A timing limit fails on a busy machine, and a failure that another run does not show helps nobody.
hypothesis.settings.register_profile("tapegrad", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("everything", deadline=None, max_examples=2000, print_blob=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tapegrad")
    group.addoption("--everything", action="store_true", help="run all tiers, and the searches for new failures")
    group.addoption(
        "--sample-seed", metavar="TEXT", help="choose the sample of large products by TEXT (default: the commit)"
    )


def pytest_configure(config: pytest.Config) -> None:
    everything = config.getoption("everything")
    hypothesis.settings.load_profile("everything" if everything else "tapegrad")
    if everything:
        config.option.markexpr = ""
    # The default tier runs without machine code, but for the tests of it (fixture kernels_at_once).
    os.environ.setdefault("TAPEGRAD_NATIVE", "0" if config.option.markexpr == "not slow" else "2")
    if not os.environ.get("TAPEGRAD_NATIVE_CACHE"):
        # What one process compiles serves the others, and the next session begins anew.
        kept = tempfile.TemporaryDirectory(prefix="tapegrad-native-")
        os.environ["TAPEGRAD_NATIVE_CACHE"] = kept.name
        config.add_cleanup(kept.cleanup)
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
        # Hundreds of tests start interpreters, which would all compile the package anew.
        folder = tempfile.TemporaryDirectory(prefix="tapegrad-bytecode-")
        os.environ["PYTHONPYCACHEPREFIX"] = folder.name
        config.add_cleanup(folder.cleanup)


def pytest_sessionstart(session: pytest.Session) -> None:
    plugins = session.config.pluginmanager
    if plugins.hasplugin("dsession") and session.config.get_verbosity() == 0:
        plugins.register(Progress(plugins.getplugin("terminalreporter")))


def pytest_report_header(config: pytest.Config) -> str:
    if config.getoption("everything"):
        return "tier: everything, with searches"
    tier = {"not slow": "default (pytest -m slow runs the rest)", "slow": "slow"}.get(
        config.option.markexpr, "chosen by -m"
    )
    return f"tier: {tier}; samples of large products: --sample-seed={sample_seed(config)}"


def sample_seed(config: pytest.Config) -> str:
    """Return the text by which samples are chosen: the option's, or the commit's abbreviated name."""
    if seed := config.getoption("sample_seed"):
        return str(seed)
    git = ["git", "rev-parse", "--short=12", "HEAD"]
    try:
        return subprocess.run(git, cwd=config.rootpath, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # an unpacked archive has no history
        return "0"


@pytest.hookimpl(tryfirst=True)  # before the selection by -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed = sample_seed(config)
    for item in items:
        marker = item.get_closest_marker("sampled")
        if marker and zlib.crc32(f"{seed} {item.nodeid}".encode()) >= marker.args[0] * 2**32:
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("search") and not config.getoption("everything"):
            item.add_marker(pytest.mark.skip(reason="a search for new failures: pytest --everything"))


class Progress:
    """Name the folder whose tests end, on a terminal as they do, elsewhere every half a minute."""

    def __init__(self, terminal: Any) -> None:
        self.terminal = terminal
        self.total = self.done = self.failed = 0
        self.start = self.shown = time.monotonic()

    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self.total, self.start = len(ids), time.monotonic()

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Show no letter for each test."""
        if hasattr(report, "wasxfail") or (report.passed and report.when != "call"):
            return None
        outcome = "error" if report.failed and report.when != "call" else report.outcome
        return outcome, "", outcome.upper()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed += 1
            self.terminal.ensure_newline()
            self.terminal.write_line(f"FAILED {report.nodeid}", red=True)
        if report.when != "teardown":
            return
        self.done += 1
        now = time.monotonic()
        if self.terminal.isatty:
            self.terminal.rewrite(self.line(report.nodeid), erase=True)
        elif now > self.shown + 30 or self.done == self.total:
            self.terminal.write_line(self.line(report.nodeid))
            self.shown = now

    def line(self, nodeid: str) -> str:
        """Return the line of the moment in which a test ends."""
        seconds = time.monotonic() - self.start
        left = seconds / self.done * (self.total - self.done)
        failed = f", {self.failed} failed" if self.failed else ""
        folder = Path(nodeid.split("::")[0])
        subject = folder.parent if folder.parent.name != "tests" else folder.with_suffix("")
        return f"{self.done:6,} of {self.total:,} tests{failed}, {_time(seconds)}, about {_time(left)} left: {subject}"


def _time(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02} min"


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say why tests were skipped, once for each reason, and how to run those that were left out."""
    skipped = Counter(
        str(report.longrepr[2]).removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", [])
    )
    if skipped:
        terminalreporter.section("skipped, with the reason", sep="-")
        for reason, count in skipped.most_common():
            terminalreporter.write_line(f"{count:6,}  {reason}")
    if config.option.markexpr == "not slow" and config.pluginmanager.hasplugin("dsession"):
        terminalreporter.write_line(
            "This was the default tier. `pytest -m slow` runs the others, among them the rest of the samples."
        )
