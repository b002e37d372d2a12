"""Kernels for other processors than this one: exact instructions only, and no calls of a library."""

import re

import pytest

from tapegrad.engine.cpu.native.emit import Structure, function
from tapegrad.engine.cpu.native.kernels import text_of

pytestmark = pytest.mark.usefixtures("machine_code")

TARGETS = [
    ("x86_64-unknown-linux-gnu", "x86-64", ""), ("x86_64-unknown-linux-gnu", "znver3", ""),
    ("x86_64-unknown-linux-gnu", "skylake-avx512", ""), ("x86_64-pc-windows-msvc", "x86-64-v3", ""),
    ("aarch64-unknown-linux-gnu", "neoverse-n1", ""), ("arm64-apple-macosx", "apple-m1", ""),
    ("riscv64-unknown-linux-gnu", "generic-rv64", "+m,+a,+f,+d"),
]  # fmt: skip
FUSED = re.compile(r"\b(vf?n?m(add|sub)\w*[sp][sd]|f?n?ml[as]|fn?m(add|sub)\w*|vf\w*mac\w*)\b")
CALLED = re.compile(r"^\s+(call|callq|bl|jal)\s", re.MULTILINE)


def everything(char: str) -> Structure:
    """Products that are added and subtracted, which a compiler would like to fuse, and all other exact operations."""
    x, y, z = 0, 1, 2
    ops = [("multiply", char, (x, y), char), ("add", char, (3, z), char), ("subtract", char, (3, z), char)]
    ops += [("subtract", char, (z, 3), char), ("square", char, (x,), char), ("add", char, (7, y), char)]
    ops += [("negative", char, (3,), char), ("add", char, (9, z), char)]
    ops += [(name, char, (x, y), char) for name in ("divide", "maximum", "minimum")]
    ops += [(name, char, (x,), char) for name in ("absolute", "sqrt", "reciprocal", "positive")]
    ops += [
        (name, char, (x, y), "?") for name in ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")
    ]
    ops += [("isnan", char, (x,), "?"), ("where", char, (18, x, y), char)]
    ops += [("copysign", char, (x, y), char), ("sign", char, (x,), char)]
    leaves = tuple((char, "same") for _ in range(3))
    return Structure(leaves, tuple(ops), tuple((3 + i, "same") for i in range(len(ops))))


@pytest.mark.parametrize("char", "fd")
@pytest.mark.parametrize(("triple", "cpu", "features"), TARGETS)
def test_no_operations_are_fused_and_no_library_is_called(triple: str, cpu: str, features: str, char: str) -> None:
    import llvmlite.binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple(triple)
    for level in (1, 2, 3):
        module = llvm.parse_assembly(f'target triple = "{triple}"\n' + text_of({"kernel": everything(char)}))
        assembly = target.create_target_machine(cpu=cpu, features=features, opt=level).emit_assembly(module)
        assert not FUSED.findall(assembly) and not CALLED.findall(assembly)


def test_a_fused_operation_and_a_call_would_be_seen() -> None:
    assert FUSED.search(" vfmadd213ps %ymm0") and FUSED.search(" fmla v0.4s") and FUSED.search(" fmadd.s fa0")
    assert CALLED.search("\tcallq\tfma@PLT\n") and CALLED.search("\tbl\tfma\n")
    assert function("k", everything("f")).startswith("define i32 @k(")
