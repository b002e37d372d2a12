"""The text of the demo: source of the standard library, which every Python has, as numbers."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import tapegrad as tg
from tapegrad.errors import TapegradError

# Modules of prose and code that all supported Pythons have, so that the text is the same on machines with one version.
MODULES = """
argparse ast bdb calendar cmd code codecs configparser contextlib copy csv dataclasses difflib dis doctest enum
fractions functools getopt gettext heapq inspect ipaddress logging/__init__ mailbox optparse os pdb pickle pprint random
shutil smtplib socket statistics string subprocess tarfile tempfile textwrap threading tokenize traceback typing
unittest/case unittest/mock urllib/parse uuid weakref
""".split()

LIMIT = 1_000_000
LEAST = 100_000
HELD_OUT = 0.05


class NoTextError(TapegradError, FileNotFoundError):
    """This Python comes without the source of its standard library."""


@dataclass(frozen=True)
class Text:
    """Characters as numbers: ``train`` and ``held_out`` are (n,) integer tensors, indices into ``vocabulary``."""

    vocabulary: str
    train: tg.Tensor
    held_out: tg.Tensor
    source: str


def load(folder: Path | None = None) -> Text:
    """The first million ASCII characters of MODULES in the standard library (or in ``folder``).

    Raises NoTextError if there is too little source to train on.
    """
    folder = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    parts: list[bytes] = []
    for module in MODULES:
        try:
            parts.append((folder / f"{module}.py").read_bytes())
        except OSError:
            continue  # a trimmed installation may lack some
    text = b"\n".join(parts).replace(b"\r\n", b"\n").translate(None, delete=bytes(range(128, 256)))[:LIMIT]
    if len(text) < LEAST:
        raise NoTextError(
            f"found {len(text):,} characters of standard library source in {folder}, wanted at least {LEAST:,}: this "
            "Python seems to come without it (a zipped or compiled installation?); use one with .py files"
        )
    vocabulary = bytes(sorted(set(text)))
    table = bytes(max(0, vocabulary.find(c)) for c in range(256))
    numbers = tg.asarray(memoryview(text.translate(table)), dtype="uint8")
    cut = int(len(text) * (1 - HELD_OUT))
    return Text(vocabulary.decode("ascii"), numbers[:cut], numbers[cut:], f"{len(parts)} modules in {folder}")
