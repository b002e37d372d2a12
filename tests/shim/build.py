"""Compiles kernels for the CPU, and keeps what it compiled in a folder that processes share."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

from .source import split_options

HERE = Path(__file__).parent
HEADERS = ("cuda_host.h", "cuda_math.h", "cuda_vector.h", "runtime.h")
RUNTIME = ("launch.cpp", "scheduler.cpp", "mma.cpp", "signals.cpp", "extents.cpp", "checks.cpp", "sanitizer.cpp")

# -fno-gnu-unique: a static of an inline function must not be shared between the libraries of different kernels.
FLAGS = (
    *("-std=c++17", "-O1", "-fPIC", "-w", "-pipe", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden"),
    *("-fno-gnu-unique", "-fno-exceptions", "-fno-rtti", "-fno-asynchronous-unwind-tables", "-fno-strict-aliasing"),
    "-fstack-clash-protection",  # a large frame must meet the guard page, not step over it
)
# The runtime answers the sanitizers' calls itself, so none of their libraries is linked.
CHECK_FLAGS = ("-g1", "-gdwarf-4", "-fsanitize=thread", "-fsanitize=alignment", "-DTG_CHECK=1")

LIBRARIES = ("-lm", "-lgcc", "-lc")

compilations = 0
"""How many kernels this process has compiled, as opposed to found."""


class CompileError(RuntimeError):
    """The compiler refused a kernel: the message holds the numbered source and what the compiler said."""


def why_no_compiler() -> str | None:
    """The reason why no kernel can be compiled here, or None where one can."""
    command = _compiler()[0]
    if os.name != "posix" or platform.system() != "Linux":
        return "the host shim needs Linux"
    return None if shutil.which(command) else f"no C++ compiler: {command} not found (set CXX)"


def compile_kernels(code: str, options: tuple[str, ...], check: bool, extra: str, shown: str) -> Path:
    """The library made of this text, compiled unless an earlier compilation of the same is still there.

    `extra` follows the text, and a message shows the text as `shown`, which is what its author wrote.
    """
    if why := why_no_compiler():
        raise CompileError(why)
    defines, folders = split_options(options)
    text = f'# 1 "options"\n{defines}# 1 "kernel.cu"\n{code}\n# 1 "launch"\n{extra}\n'
    key = digest(_base_key(), text, repr(folders), repr(check), *included(code, [Path(name) for name in folders]))
    library = cache_folder() / f"kernel-{key}.so"
    if not library.exists():
        flags = (*FLAGS, *(CHECK_FLAGS if check else ()), *_linker(), *(f"-I{name}" for name in folders))
        header = _precompiled_header(check)
        # -nostdlib: else the sanitizers' own libraries come with their flags.
        command = [*_compiler(), *flags, "-shared", "-nostdlib", "-Wl,-z,now", "-include", str(header)]
        _compile([*command, "-x", "c++", "-", "-x", "none", str(runtime_library()), *LIBRARIES], library, text, shown)
        global compilations
        compilations += 1
    return library


def runtime_library() -> Path:
    """The scheduler and the checks, which all kernels of all processes share."""
    library = cache_folder() / f"runtime-{_base_key()}.so"
    if not library.exists():
        sources = [str(HERE / name) for name in RUNTIME]
        # The name inside the library lets the loader find this very file again for each kernel that needs it.
        command = [*_compiler(), "-std=c++17", "-O2", "-fPIC", "-w", "-g1", "-fno-exceptions", "-fno-rtti", "-shared"]
        _compile([*command, "-Wl,-z,now", f"-Wl,-soname,{library.name}", *sources, "-lm", "-lrt"], library, "", "")
    return library


def compiled_c(name: str) -> Path:
    """The library made of one C file beside this one, which needs nothing else."""
    text = (HERE / name).read_text()
    library = cache_folder() / f"{Path(name).stem}-{digest(_base_key(), text)}.so"
    if not library.exists():
        command = [*_compiler(), "-x", "c", "-O1", "-fPIC", "-shared", str(HERE / name)]
        _compile(command, library, "", text)
    return library


@functools.cache
def load_runtime() -> ctypes.CDLL:
    """The shared runtime, loaded once."""
    return ctypes.CDLL(str(runtime_library()))


def cache_folder() -> Path:
    """Where compiled kernels are kept: $TAPEGRAD_SHIM_CACHE, else a folder of one's own for temporary files."""
    return _made_folder(os.environ.get("TAPEGRAD_SHIM_CACHE") or f"{tempfile.gettempdir()}/tapegrad-shim-{os.getuid()}")


@functools.cache
def _made_folder(name: str) -> Path:
    folder = Path(name)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Code from this folder is loaded and run, so it must not be another user's.
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user: set TAPEGRAD_SHIM_CACHE")
    return folder


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "")) or ["g++"]


@functools.cache
def _linker() -> tuple[str, ...]:
    return ("-fuse-ld=gold",) if shutil.which("ld.gold") else ()


@functools.cache
def _base_key() -> str:
    compiler = Path(shutil.which(_compiler()[0]) or "").resolve()
    stamp = compiler.stat()
    parts = [
        repr((_compiler(), str(compiler), stamp.st_size, stamp.st_mtime_ns, platform.machine(), FLAGS, CHECK_FLAGS))
    ]
    parts += [path.read_text() for path in sorted(HERE.glob("*.h")) + [HERE / name for name in RUNTIME]]
    return digest(*parts, Path(__file__).read_text())


def digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _precompiled_header(check: bool) -> Path:
    folder = cache_folder() / f"header-{_base_key()}-{int(check)}"
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=cache_folder()) as made:
            for name in HEADERS:
                shutil.copy(HERE / name, made)
            flags = (*FLAGS, *(CHECK_FLAGS if check else ()))
            target = Path(made) / "cuda_host.h.gch"
            # The short name is the one that messages show.
            _compile([*_compiler(), *flags, "-x", "c++-header", "cuda_host.h"], target, "", "", made)
            # A folder that is complete appears at once, or another process was first.
            new = Path(made) / "new"
            new.mkdir()
            for file in [*HEADERS, "cuda_host.h.gch"]:
                os.rename(Path(made) / file, new / file)
            try:
                os.rename(new, folder)
            except OSError:
                if not folder.exists():
                    raise
    return folder / "cuda_host.h"


def _compile(command: list[str], target: Path, text: str, shown: str, folder: str | None = None) -> None:
    partial = target.with_name(f"{target.name}.{os.getpid()}.{threading.get_ident()}.part")
    environment = {**os.environ, "LC_ALL": "C"}  # messages in plain English, whoever runs this
    command = [*command, "-o", str(partial)]
    done = subprocess.run(command, input=text, capture_output=True, text=True, env=environment, cwd=folder)
    if done.returncode:
        partial.unlink(missing_ok=True)
        lines = shown.splitlines()
        numbered = "\n".join(f"{number:4d} | {line}" for number, line in enumerate(lines, 1))
        raise CompileError(f"{numbered}\n\n{done.stderr.strip()}\n({shlex.join(command)})")
    os.replace(partial, target)


def included(code: str, folders: list[Path]) -> list[str]:
    """The texts of all headers that the code includes from these folders, directly or not."""
    found: dict[str, str] = {}
    waiting = [code]
    while waiting:
        for name in _included_names(waiting.pop()):
            for folder in folders:
                path = folder / name
                try:
                    stamp = path.stat()
                except OSError:
                    continue
                if str(path) not in found:
                    found[str(path)] = text = _header_text(path, stamp.st_mtime_ns, stamp.st_size)
                    waiting.append(text)
                break
    return [part for item in found.items() for part in item]


@functools.lru_cache(maxsize=256)
def _included_names(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r'^[ \t]*#[ \t]*include[ \t]*["<]([^">]+)[">]', text, re.MULTILINE))


@functools.lru_cache(maxsize=256)
def _header_text(path: Path, modified: int, size: int) -> str:
    return path.read_text()
