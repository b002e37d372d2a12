"""Sizes in bytes, as people write and read them."""

from __future__ import annotations

import re
from operator import index

from tapegrad.errors import TapegradError

_UNITS = {"": 1, "b": 1, **{f"{p}b": 1000 ** (i + 1) for i, p in enumerate("kmgtp")},
          **{f"{p}ib": 1024 ** (i + 1) for i, p in enumerate("kmgtp")}}  # fmt: skip


class SizeError(TapegradError, ValueError):
    """Something that is no size in bytes."""


def parse_bytes(size: object) -> int:
    """A size in bytes: an integer, or text such as ``"2GiB"`` (1024), ``"512 MB"`` (1000), ``"1.5 GiB"``.

    Raises SizeError (ValueError).
    """
    if hasattr(size, "__index__") and not isinstance(size, bool) and index(size) > 0:  # NumPy's integers, too
        return index(size)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", size) if isinstance(size, str) else None
    if match is not None and match[2].lower() in _UNITS:
        nbytes = int(float(match[1]) * _UNITS[match[2].lower()])
        if nbytes > 0:
            return nbytes
    raise SizeError(f"a size is a positive whole number of bytes or text such as '512MiB' or '2 GB', not {size!r}")


def format_bytes(nbytes: int) -> str:
    """``nbytes`` in IEC units with two decimals: 6893338624 is ``6.42 GiB``."""
    value, unit = float(nbytes), "B"
    for following in ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB"):
        if abs(value) < (1024 if unit == "B" else 1023.995):  # what rounds to 1024.00 is 1.00 of the next unit
            break
        value, unit = value / 1024, following
    return f"{nbytes} B" if unit == "B" else f"{value:.2f} {unit}"
