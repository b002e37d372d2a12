"""What pages of the reference list, made when the site is built.

* ``<!-- public: tapegrad.linalg -->``: all that the module offers; ``<!-- public: tapegrad from ops.index, nn -->``:
  what the package offers and these folders define (operations made by declarations count as ``ops.elementwise``).
  Each name is followed by its example (``docs/reference/examples``).
* ``<!-- about: tapegrad.linalg -->``: what the module says of itself.
* ``<!-- help: tapegrad -->``: the ``--help`` of the command and its subcommands.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from pathlib import Path
from typing import Any

MARK = re.compile(r"^<!-- public: (?P<module>[\w.]+)(?: from (?P<rooms>[\w., ]+))? -->$", re.MULTILINE)
ABOUT = re.compile(r"^<!-- about: ([\w.]+) -->$", re.MULTILINE)
ROLE = re.compile(r":\w+:`~?([^`]+)`")
HELP = re.compile(r"^<!-- help: tapegrad -->$", re.MULTILINE)
DOCS = Path(__file__).resolve().parents[1]


def examples() -> dict[str, str]:
    """By public path: the example that ``tests/test_reference_examples.py`` runs."""
    spec = importlib.util.spec_from_file_location("reference_examples", DOCS / "reference_examples.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.examples()


def room(thing: Any) -> str:
    """Where in the package something is defined."""
    name = _module(inspect.unwrap(thing))
    return "ops.elementwise" if name == "tapegrad" else name.removeprefix("tapegrad.")


def public(module: str) -> list[str]:
    """The functions, classes and distributions that a module offers, by name."""
    found = importlib.import_module(module)
    names = getattr(found, "__all__", None) or [n for n, t in vars(found).items() if _module(t) == module]
    things = {name: getattr(found, name) for name in names if not name.startswith("_") and not name.isupper()}
    return sorted((n for n, t in things.items() if inspect.isroutine(t) or _is_ours(t)), key=str.lower)


def _is_ours(thing: object) -> bool:
    """Whether it is a class of the package, or an object of one; no module, dtype, number or alias of a type."""
    return _module(thing if isinstance(thing, type) else type(thing)).startswith("tapegrad")


def _module(thing: object) -> str:
    return getattr(thing, "__module__", None) or ""


def listed(module: str, rooms: str | None = None) -> list[str]:
    """Public paths of what one mark lists."""
    names = public(module)
    if rooms is not None:
        wanted = tuple(f"{part.strip()}." for part in rooms.split(","))
        owner = importlib.import_module(module)
        names = [n for n in names if f"{room(getattr(owner, n))}.".startswith(wanted)]
    return [f"{module}.{name}" for name in names]


def entry(path: str, shown: dict[str, str]) -> str:
    """The directive for one name, and its example."""
    session = shown.get(path.replace("tapegrad.memory.policies.", "tapegrad.policies."))
    example = "" if session is None else f"\n\n```pycon\n{session.strip()}\n```"
    return f"::: {path}{example}"


def helped() -> str:
    """What ``tapegrad --help`` says, and that of each command."""
    import click

    from tapegrad.profile.cli import main

    def told(command: click.Command, names: tuple[str, ...], level: str) -> str:
        context = click.Context(command, info_name=" ".join(names), max_content_width=100)
        return f"{level} {' '.join(names)}\n\n```text\n{command.get_help(context)}\n```"

    with click.Context(main) as context:
        commands = [(name, main.get_command(context, name)) for name in main.list_commands(context)]
    parts = [told(c, ("tapegrad", name), "##") for name, c in commands if c is not None]
    return "\n\n".join([told(main, ("tapegrad",), "##"), *parts])


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Called by mkdocs for each page."""
    shown = examples() if MARK.search(markdown) else {}
    markdown = ABOUT.sub(lambda m: ROLE.sub(r"`\1`", inspect.getdoc(importlib.import_module(m[1])) or ""), markdown)
    markdown = HELP.sub(lambda m: helped(), markdown)
    return MARK.sub(lambda m: "\n\n".join(entry(p, shown) for p in listed(m["module"], m["rooms"])), markdown)
