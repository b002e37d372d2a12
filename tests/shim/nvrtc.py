"""NVRTC and the disassembler without a GPU: what ptxas says of a kernel, and its SASS."""

from __future__ import annotations

import ctypes
import os
import pickle
import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NoReturn

import pytest

from shim import build


@dataclass(frozen=True)
class Compiled:
    """A cubin, its PTX, and by kernel name registers, bytes of spill stores and loads, and bytes of stack."""

    cubin: bytes
    ptx: str
    usage: dict[str, tuple[int, int, int]]


def _installed(pattern: str) -> list[Path]:
    """Files of NVIDIA's wheels."""
    import importlib.util

    spec = importlib.util.find_spec("nvidia")
    places = [Path(p) for p in spec.submodule_search_locations or ()] if spec else []
    return sorted(found for place in places for found in place.glob(pattern))


def _missing(what: str) -> NoReturn:
    why = f"{what} is not installed: pip install 'tapegrad[kernels]'"
    pytest.fail(why) if os.environ.get("TAPEGRAD_REQUIRE_NVRTC") else pytest.skip(why)


@cache
def library() -> ctypes.CDLL:
    """libnvrtc of NVIDIA's wheels, the newest, or the one whose path ``TAPEGRAD_NVRTC`` gives.

    Skips the test if it is not installed (fails if TAPEGRAD_REQUIRE_NVRTC is set).
    """
    named = os.environ.get("TAPEGRAD_NVRTC")
    found = [Path(named)] if named else sorted(_installed("*/lib/libnvrtc.so.*"), key=lambda file: file.name)
    if not found:
        _missing("NVRTC")
    return ctypes.CDLL(str(found[-1]))


def version() -> tuple[int, int]:
    """The version of the library, such as (12, 9)."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    assert not library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def compile(text: str, options: tuple[str, ...], arch: int) -> Compiled:
    """Compile CUDA C++ for ``sm_arch``, unless an earlier compilation of the same is still there.

    Raises AssertionError with the compiler's log.
    """
    file = _file(text, options, arch)
    if file.exists():
        return pickle.loads(file.read_bytes())
    nvrtc = library()
    program = ctypes.c_void_p()
    assert not nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None)
    flags = [*options, f"-arch=sm_{arch}", "--ptxas-options=-v", "--device-as-default-execution-space", "-ftz=true"]
    array = (ctypes.c_char_p * len(flags))(*[flag.encode() for flag in flags])
    failed = nvrtc.nvrtcCompileProgram(program, len(flags), array)
    log = _text(nvrtc, program, "ProgramLog")
    numbered = "\n".join(f"{i:4} {line}" for i, line in enumerate(text.splitlines(), 1))
    assert not failed, f"{log}\n{numbered}"
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    cubin = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, cubin)
    compiled = Compiled(cubin.raw, _text(nvrtc, program, "PTX"), _usage(log))
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    partial = file.with_name(f"{file.name}.{os.getpid()}.part")
    partial.write_bytes(pickle.dumps(compiled))
    os.replace(partial, file)
    return compiled


def _file(text: str, options: tuple[str, ...], arch: int) -> Path:
    """Where the compilation of a text is kept, in the folder of those for the CPU."""
    folders = [Path(name) for name in build.split_options(options)[1]]
    parts = (repr(version()), text, repr(options), str(arch), *build.included(text, folders))
    return build.cache_folder() / f"nvrtc-{build.digest(*parts)}"


def ptx(text: str, options: tuple[str, ...], arch: int) -> str:
    """The PTX of CUDA C++ for ``compute_arch``, by the options that CuPy adds.  Raises AssertionError with the log.

    It is that of ``sm_arch``, if that has been compiled.
    """
    file = _file(text, options, arch)
    if file.exists():
        return compile(text, options, arch).ptx
    nvrtc = library()
    program = ctypes.c_void_p()
    assert not nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None)
    flags = [*options, f"-arch=compute_{arch}", "--device-as-default-execution-space", "-ftz=true"]
    array = (ctypes.c_char_p * len(flags))(*[flag.encode() for flag in flags])
    failed = nvrtc.nvrtcCompileProgram(program, len(flags), array)
    assert not failed, _text(nvrtc, program, "ProgramLog")
    found = _text(nvrtc, program, "PTX")
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return found


def _text(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> str:
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
    return buffer.value.decode()


def _usage(log: str) -> dict[str, tuple[int, int, int]]:
    found = {}
    for entry in log.split("Compiling entry function")[1:]:
        name = re.search(r"'(\w+)'", entry)
        spill = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", entry)
        registers = re.search(r"Used (\d+) registers", entry)
        assert name and spill and registers, log
        found[name[1]] = (int(registers[1]), int(spill[2]) + int(spill[3]), int(spill[1]))
    return found


def sass(compiled: Compiled) -> str:
    """The disassembled machine code.  Skips the test if nvdisasm is not installed."""
    tools = _installed("*/bin/nvdisasm")
    if not tools:
        _missing("nvdisasm")
    tool = tools[-1]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(compiled.cubin)
        return subprocess.run([tool, str(file)], check=True, capture_output=True, text=True).stdout
