"""A browser, and reports opened in it from ``file://``: any request, error or complaint of the page fails the test."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]  # report_page, made_runs

REQUIRED = bool(os.environ.get("TAPEGRAD_REQUIRE_BROWSER"))
"""Where this is set, a missing browser or node fails instead of skipping."""
OPTIONS = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--force-color-profile=srgb"]


def missing(what: str) -> None:
    if REQUIRED:
        pytest.fail(f"{what}, and TAPEGRAD_REQUIRE_BROWSER is set", pytrace=False)
    pytest.skip(what)


@pytest.fixture(scope="session")
def node() -> str:
    found = shutil.which("node")
    if found is None:
        missing("node is not installed")
    return found


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("playwright is not installed")
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        missing("no chromium is installed")
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=OPTIONS)
        yield found
        found.close()


@pytest.fixture(scope="session")
def contexts(browser: Any) -> Iterator[dict[str, Any]]:
    """A context, which is what takes time to start, for those who prefer light and for those who prefer dark."""
    found = {scheme: browser.new_context(color_scheme=scheme) for scheme in ("light", "dark")}
    yield found
    for context in found.values():
        context.close()


@pytest.fixture
def show(contexts: dict[str, Any], tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """``show(run, ...)`` writes the report, opens it and waits until it is drawn."""
    from tapegrad.profile.viewer import html

    complaints: list[str] = []
    pages: list[Any] = []

    def opened(run: Any, width: int = 1200, height: int = 1400, scheme: str = "light", **arguments: Any) -> Any:
        path = tmp_path / f"report-{len(pages)}.html"
        html.write(run, path, **arguments)
        page = contexts[scheme].new_page()
        pages.append(page)
        page.set_viewport_size({"width": width, "height": height})
        page.set_default_timeout(15_000)
        page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        page.on("console", lambda said: complaints.append(f"{said.type}: {said.text}"))
        page.on("dialog", lambda dialog: (complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda asked: complaints.extend(_network(asked.url)))
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready=true]")
        return page

    yield opened
    for page in pages:
        page.close()
    assert complaints == []


def _network(url: str) -> list[str]:
    return [] if url.startswith(("file:", "data:", "blob:")) else [f"request: {url}"]
