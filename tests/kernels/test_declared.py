"""Whole kernels: what Python declares is what the files define."""

import re

import tapegrad  # noqa: F401  (declares)
from tapegrad.device.kernel import DECLARED, folder

DEFINED = re.compile(r'extern "C" __global__ void(?: __launch_bounds__\([^()]*\))?\s+(\w+)\s*\(')


def _defined():
    return [(file.name, name) for file in folder().glob("*.cu") for name in DEFINED.findall(file.read_text())]


def test_every_kernel_is_extern_c():
    for file in folder().glob("*.cu"):
        text = file.read_text()
        assert len(DEFINED.findall(text)) == text.count("__global__"), file.name


def test_every_kernel_is_declared_once_and_every_declaration_defined():
    declared, defined = [(kernel.file, kernel.name) for kernel in DECLARED], _defined()
    assert len(set(defined)) == len(defined)
    assert len(set(declared)) == len(declared)
    assert set(declared) == set(defined)
