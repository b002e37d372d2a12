"""Kernel text as a host compiler can take it; every line keeps its number."""

from __future__ import annotations

import re

_KERNEL = re.compile(
    r'extern\s*"C"\s*__global__\s+void\b(?:\s*__launch_bounds__\s*\(([^()]*(?:\([^()]*\)[^()]*)*)\))?\s*(\w+)\s*(?=\()'
)
_UNREAD = re.compile(r'("(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\')|//(?:\\\n|[^\n])*|/\*.*?\*/', re.DOTALL)
_DYNAMIC = re.compile(r"extern\s+__shared__\s+(?:__align__\s*\(\s*\d+\s*\)\s*)?([\w:\s]+?)\s*\b(\w+)\s*\[\s*\]\s*;")
_PAIRS = {"(": ")", "{": "}"}


def prepare(code: str) -> tuple[str, dict[str, str]]:
    """The text with a trampoline behind each kernel, and what __launch_bounds__ says of each."""
    code = _DYNAMIC.sub(r"TG_DYNAMIC_SHARED(\1, \2);", code)
    # A definition in a comment is none, and a brace in a string closes nothing. Positions stay what they are.
    bare = _UNREAD.sub(_blank, code)
    bounds, pieces, done = {}, [], 0
    for found in _KERNEL.finditer(bare):
        end = _after(bare, _after(bare, found.end()))
        if end is None:
            continue
        bounds[found[2]] = found[1] or ""
        # Behind the body and not at the end of the text: there the kernel may be one that an #if took away.
        pieces += [code[done:end], f" TGH_KERNEL({found[2]})"]
        done = end
    return "".join([*pieces, code[done:]]), bounds


def split_options(options: tuple[str, ...]) -> tuple[str, list[str]]:
    """NVRTC's options as lines of source and folders of headers; what else they say means nothing to a host."""
    lines, folders = [], []
    given = iter(options)
    for option in given:
        flag, value = option[:2], option[2:]
        if flag not in ("-D", "-U", "-I"):
            continue
        value = value or next(given, "")
        if flag == "-I":
            folders.append(value)
        elif flag == "-U":
            lines.append(f"#undef {value}\n")
        else:
            # Not on the command line, where a macro T or N would reach into our own headers.
            name, equals, text = value.partition("=")
            lines.append(f"#define {name} {text if equals else 1}\n")
    return "".join(lines), folders


def _blank(match: re.Match[str]) -> str:
    if match[1] and match[0] == '"C"':
        return match[0]
    return re.sub(r"[^\n]", " ", match[0])


def _after(text: str, start: int | None) -> int | None:
    """The place behind the bracket that closes the one standing here, or None where none stands here."""
    opening = re.compile(r"\s*([({])").match(text, start) if start is not None else None
    if not opening:
        return None
    depth, closing = 0, _PAIRS[opening[1]]
    for match in re.compile(f"[{opening[1]}{closing}]").finditer(text, opening.start(1)):
        depth += 1 if match[0] == opening[1] else -1
        if depth == 0:
            return match.end()
    return None
