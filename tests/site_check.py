"""Tries the documentation's site in a browser: python tests/site_check.py FOLDER (what mkdocs has built).

Every page is opened on a narrow screen: nothing may stick out, the console must stay silent, every link within the site
must lead to a page and a heading, every picture must load.  The search must find names.
"""

from __future__ import annotations

import http.server
import shutil
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

NARROW = {"width": 390, "height": 800}
SEARCHED = {
    "checkpointed_loop": "checkpointed_loop",
    "memory_budget": "memory_budget",
    "which tool": "Which memory tool when",
}

LOOK = """() => {
  const root = document.documentElement;
  return {
    wide: root.scrollWidth - root.clientWidth,
    links: [...document.querySelectorAll('a[href]')].map(a => a.href),
    ids: [...document.querySelectorAll('[id]')].map(e => e.id),
    broken: [...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src),
  };
}"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files and logs nothing."""

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


def main(folder: Path) -> list[str]:
    """What is wrong with the site."""
    from playwright.sync_api import sync_playwright

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}/"
    pages = sorted(p.relative_to(folder).as_posix().removesuffix("index.html") for p in folder.rglob("index.html"))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport=NARROW)
        said: list[str] = []
        page.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
        seen = {}
        for name in pages:
            page.goto(address + name)  # until everything it names is loaded
            seen[address + name] = page.evaluate(LOOK)
        faults = [f"console: {text}" for text in said] + judged(seen, address, folder)
        faults += [
            f"search does not find {text!r}"
            for text, title in SEARCHED.items()
            if not found(page, address, text, title)
        ]
        browser.close()
    server.shutdown()
    print(f"{len(pages)} pages, {sum(len(s['links']) for s in seen.values())} links, {len(faults)} faults")
    return faults


def judged(seen: dict[str, Any], address: str, folder: Path) -> list[str]:
    """Faults of pages that have been looked at."""
    faults = []
    for url, what in seen.items():
        if what["wide"] > 0:
            faults.append(f"{url}: sticks out of a narrow screen by {what['wide']} pixels")
        faults += [f"{url}: picture {src} does not load" for src in what["broken"]]
        for link in set(what["links"]):
            to, heading = urldefrag(link)
            if not to.startswith(address):
                continue
            if to not in seen:
                if not (folder / unquote(to.removeprefix(address))).is_file():
                    faults.append(f"{url}: link to {link}")
            elif heading and unquote(heading) not in seen[to]["ids"]:
                faults.append(f"{url}: {link} has no such heading")
    return faults


def found(page: Any, address: str, text: str, title: str) -> bool:
    """Whether the search for ``text`` shows a result with ``title``."""
    page.set_viewport_size({"width": 1200, "height": 800})
    page.goto(address, wait_until="networkidle")
    page.locator("input[data-md-component='search-query']").click()
    page.keyboard.type(text)
    shown = "title => document.querySelector('.md-search-result__list').innerText.includes(title)"
    try:
        page.wait_for_function(shown, arg=title, timeout=10_000)  # results come while one types
    except Exception:
        return False
    return True


if __name__ == "__main__":
    wrong = main(Path(sys.argv[1]).resolve())
    print(*wrong, sep="\n")
    sys.exit(1 if wrong else 0)
