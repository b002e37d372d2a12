"""What is compiled is kept, until something it was made of changes."""

from __future__ import annotations

import subprocess

import numpy as np
import pytest

from shim import build
from shim.host import CompileError, HostModule
from shim.trial import floats, launch, needs_compiler

pytestmark = needs_compiler


def test_compile_error_shows_the_numbered_source():
    with pytest.raises(CompileError) as caught:
        HostModule('extern "C" __global__ void k(int *y) {\n    y[0] = missing;\n}')
    text = str(caught.value)
    assert "   2 |     y[0] = missing;" in text and "kernel.cu:2" in text and "'missing' was not declared" in text


def test_get_function_names_what_is_missing():
    with pytest.raises(CompileError, match="other"):
        HostModule('extern "C" __global__ void k(int *y) {}').get_function("other")


def test_kernels_in_comments_are_none_and_those_of_macros_are_found():
    code = r"""
    // extern "C" __global__ void gone(int n) {}
    /* extern "C" __global__ void gone_too(int n) {} */
    #define KERNEL(T) extern "C" __global__ void fill_##T(T *y) { y[threadIdx.x] = 3; }
    KERNEL(float)
    """
    y = floats(64)
    launch(code, (y,), name="fill_float")
    assert (y == 3).all()


def test_a_kernel_that_the_preprocessor_takes_away_does_no_harm():
    code = r"""
    #ifdef T
    extern "C" __global__ void typed(T *y) { y[threadIdx.x] = VALUE("}", '"'); }
    #endif
    extern "C" __global__ void plain(int *y) { y[threadIdx.x] = 4; }
    """
    y = floats(64)
    typed = HostModule(code, ("-DT=float", "-DVALUE(a,b)=sizeof(a)", "-D", "N"))
    typed.get_function("typed")((1,), (64,), (y,))
    assert (y == 2).all()
    with pytest.raises(CompileError, match="typed"):
        HostModule(code).get_function("typed")


@pytest.mark.parametrize("check", [False, True])
def test_the_precompiled_header_is_taken(check):
    """A refused one costs a third of a second a kernel and says nothing."""
    header = build._precompiled_header(check)
    flags = [*build.FLAGS, *(build.CHECK_FLAGS if check else ())]
    command = [*build._compiler(), *flags, "-H", "-include", str(header), "-x", "c++", "-fsyntax-only", "-"]
    said = subprocess.run(command, input="int x;", capture_output=True, text=True, check=True).stderr
    assert said.split() == ["!", f"{header}.gch"]


@pytest.fixture
def fresh_cache(tmp_path, monkeypatch):
    """An empty folder for compiled kernels, but for the runtime and the headers."""
    HostModule("")
    for path in build.cache_folder().iterdir():
        if path.name.startswith(("runtime-", "header-")):
            (tmp_path / path.name).symlink_to(path)
    monkeypatch.setenv("TAPEGRAD_SHIM_CACHE", str(tmp_path))
    return tmp_path


def test_what_is_compiled_is_kept(fresh_cache):
    code = """extern "C" __global__ void k(int *y) { y[threadIdx.x] = VALUE; }"""
    before = build.compilations
    for value in (1, 1, 2, 2, 1):
        y = np.zeros(4, np.int32)
        module = HostModule(code, (f"-DVALUE={value}", "--fmad=false", "-std=c++17", "-arch=sm_90"))
        module.get_function("k")((1,), (4,), (y,))
        assert (y == value).all()
    assert build.compilations == before + 2
    kept = sorted(path.name for path in fresh_cache.glob("kernel-*"))
    assert len(kept) == 2 and all(name.endswith(".so") for name in kept)


def test_a_changed_header_compiles_again(fresh_cache, tmp_path):
    folder = tmp_path / "headers"
    folder.mkdir()
    (folder / "outer.cuh").write_text('#pragma once\n#include "inner.cuh"\n')
    code = '#include "outer.cuh"\nextern "C" __global__ void k(int *y) { *y = VALUE; }'
    y = np.zeros(1, np.int32)
    for value in (1, 2, 2, 30):
        (folder / "inner.cuh").write_text(f"#define VALUE {value}\n")
        HostModule(code, (f"-I{folder}",)).get_function("k")((1,), (1,), (y,))
        assert y[0] == value
    assert len(list(fresh_cache.glob("kernel-*"))) == 3
