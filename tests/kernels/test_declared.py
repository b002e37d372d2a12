"""Whole kernels: what Python declares is what the files define."""

import re

import tapegrad  # noqa: F401  (declares)
from tapegrad.device.kernel import DECLARED, folder

DEFINED = re.compile(r'extern "C" __global__ void(?: __launch_bounds__\([^()]*\))?\s+(\w+)\s*\(')
MACRO = re.compile(r"#define (\w+)\(NAME\b(?:[^\n]*\\\n)*[^\n]*\n")
"""A macro that defines kernels, the first argument being the name."""


def _written_out(text):
    """The text of a file, each use of such a macro being a kernel."""
    for found in MACRO.finditer(text):
        if "__global__" in found[0]:
            use = re.compile(rf"^{found[1]}\((\w+),[^\n]*$", re.MULTILINE)
            text = use.sub(r'extern "C" __global__ void \1(', text.replace(found[0], ""))
    return text


def _texts():
    return {file.name: _written_out(file.read_text()) for file in folder().glob("*.cu")}


def _defined():
    return [(file, name) for file, text in _texts().items() for name in DEFINED.findall(text)]


def test_every_kernel_is_extern_c():
    for file, text in _texts().items():
        assert len(DEFINED.findall(text)) == text.count("__global__"), file


def test_every_kernel_is_declared_once_and_every_declaration_defined():
    declared, defined = [(kernel.file, kernel.name) for kernel in DECLARED], _defined()
    assert len(set(defined)) == len(defined)
    assert len(set(declared)) == len(declared)
    assert set(declared) == set(defined)
