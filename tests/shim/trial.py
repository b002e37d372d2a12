"""What the shim's own tests share: a launch in one line."""

from __future__ import annotations

import os
import re

import numpy as np
import pytest

from .host import HostModule, KernelFault, why_no_compiler

ORDERS = ["forward", "reverse", "shuffle:7"]

_why = why_no_compiler()
# Where the shim must not be missing, its absence is a failure and not a reason to skip.
needs_compiler = pytest.mark.skipif(bool(_why) and os.environ.get("TAPEGRAD_REQUIRE_SHIM") != "1", reason=_why or "")


def launch(code, args, *, grid=(1,), block=(64,), check=True, name="k", **more):
    """Runs one kernel of this text."""
    HostModule(code, check=check).get_function(name)(grid, block, args, **more)


def faulty(code, args, match, **more):
    """Runs a kernel that must fault with a message that matches, and returns the message."""
    with pytest.raises(KernelFault) as caught:
        launch(code, args, **more)
    text = str(caught.value)
    assert re.search(match, text), text
    return text


def floats(n):
    """The first n whole numbers as float32."""
    return np.arange(n, dtype=np.float32)
