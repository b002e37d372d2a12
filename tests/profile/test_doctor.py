"""``tapegrad doctor``: every fault is named with its remedy, and none makes it fail."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import json
import os
import platform
import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from cuda_cases import FAULTS, broken, installed

import tapegrad as tg
from tapegrad.device import CPU, cuda, kernel, onednn
from tapegrad.engine.cpu.native import machine
from tapegrad.profile import doctor, doctor_check, doctor_mpi
from tapegrad.profile.cli import main
from tapegrad.profile.recorder import checking


@pytest.fixture
def cupy():
    """The stand-in for CuPy."""
    with installed() as module:
        yield module


@pytest.fixture(autouse=True)
def quick(request):
    """No device has been asked for, the self-test runs in its own tests alone, and no ranks are started.

    The fixture ``monkeypatch`` would come before ``cupy``, and at the end put a stand-in back that a test has hidden.
    """
    with pytest.MonkeyPatch.context() as changed:
        changed.delenv("TAPEGRAD_DEVICE", raising=False)
        if not {"ledger", "pools"} & set(request.node.originalname.split("_")):
            changed.setattr(doctor_check, "cpu", lambda: {"ok": True})
            changed.setattr(doctor_check, "cuda", lambda index: {"ok": True})
        changed.setattr(doctor_mpi, "launcher", lambda: None)
        yield


def run(*arguments, code=0, **options):
    result = CliRunner().invoke(main, ["doctor", *arguments], **options)
    assert result.exit_code == code, result.output
    assert result.stderr == ""
    return result.stdout


def as_json(code=0):
    return json.loads(run("--json", code=code))


def test_a_sound_installation(cupy):
    found = as_json()
    assert found["ok"]
    assert found["default device"] == {"name": "cuda:0", "why": "a kernel was compiled and launched on it"}
    versions = found["versions"]
    assert versions["tapegrad"] == tg.__version__ and versions["CUDA runtime"] == "12.9"
    assert versions["CUDA driver"] == "12.8" and versions["NVRTC"] == "12.9"
    assert found["CUDA"]["usable"] is found["CUDA"]["a kernel was launched"] is True
    assert list(found["devices"]) == ["cuda:0", "cuda:1"]
    for device in found["devices"].values():
        assert device["tapegrad's kernels run"] is True and device["name"] == "Stand-in"
        assert device["cuDNN"] == "none; TAPEGRAD_CUDNN=0"  # the stand-in's
        assert device["compute capability"] == "9.0" and device["total bytes"] == 8 << 30
    assert found["kernels"]["files"] > 5 and "used bytes" in found["memory"]["pool of cuda:1"]
    assert found["CPU"]["threads"] == tg.get_num_threads() and "blas" in found["CPU"]["BLAS"].lower()
    assert ("none; pip install 'tapegrad[onednn]'" in found["CPU"]["oneDNN"]) == (onednn.library() is None)
    assert found["CPU"]["machine code"].startswith("none (" if machine.why_not() else "by LLVM ")
    assert found["CPU"]["compiled kernels"] == os.environ["TAPEGRAD_NATIVE_CACHE"]
    shown = run()
    of_device = "free 8.00 GiB, total 8.00 GiB, tapegrad's kernels run yes"
    for part in ("default device\n", "  name  cuda:0\n", of_device, "host pool"):
        assert part in shown, shown


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_named_with_its_remedy(fault, cupy, monkeypatch):
    broken(monkeypatch, fault)
    why, fix = FAULTS[fault]
    found = as_json()
    assert found["ok"] and found["default device"]["name"] == "cpu"
    assert found["CUDA"]["why"].startswith(why) and found["CUDA"]["fix"].startswith(fix)
    assert found["default device"]["why"] == found["CUDA"]["why"]
    assert found["CUDA"]["usable"] is found["CUDA"]["a kernel was launched"] is False and found["devices"] == {}
    (line,) = [line for line in found["to mend"] if line.startswith("CUDA (")]
    assert fix in line and line.endswith("; the CPU serves meanwhile")
    assert line in run()
    monkeypatch.setenv("TAPEGRAD_DEVICE", "cuda")
    found = as_json(code=1)
    assert not found["ok"] and f"TAPEGRAD_DEVICE=cuda: device 'cuda:0' is not available: {why}" in found["to mend"][0]
    assert fix in found["to mend"][0] and "(or unset TAPEGRAD_DEVICE)" in run(code=1)


def test_what_was_asked_for(cupy, monkeypatch):
    for name in ("cpu", "cuda:1"):
        monkeypatch.setenv("TAPEGRAD_DEVICE", name)
        found = as_json()
        assert found["default device"] == {"name": name, "why": f"TAPEGRAD_DEVICE={name}"}
        assert found["environment"]["TAPEGRAD_DEVICE"] == name
    for name in ("cuda:7", "gpu"):
        monkeypatch.setenv("TAPEGRAD_DEVICE", name)
        assert f"device '{name}' is not available" in as_json(code=1)["to mend"][0]


def test_it_changes_nothing(cupy):
    assert tg.zeros(3).device is CPU  # though a device without a default would be the GPU
    run()
    assert tg.zeros(3).device is CPU


def test_the_ledger_agrees_with_the_allocators(cupy):
    found = as_json()["ledger = allocator"]
    assert list(found) == ["cpu", "cuda:0", "cuda:1"]
    for name, one in found.items():
        assert one["ok"] is True and one["comparisons"] == 3 and one["most bytes"] > 100_000
        assert one["drift bytes"] <= one["tolerance bytes"] < one["most bytes"] / 100
        assert one["tolerance bytes"] == 0 or name == "cpu"
    assert not tracemalloc.is_tracing()


@pytest.mark.parametrize("part", ["cpu", "cuda"])
def test_a_ledger_that_forgets_is_found(part, cupy, monkeypatch):
    """What an allocator has at each look is more than the ledger counts."""
    lost = itertools.count(0, 1 << 16 if part == "cpu" else 512)
    owner, name = (checking, "traced") if part == "cpu" else (type(cupy.get_default_memory_pool()), "used_bytes")
    allocated = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *pool: allocated(*pool) + next(lost))
    found = as_json(code=1)
    assert not found["ok"]
    mended = [line for line in found["to mend"] if line.startswith("the ledger does not agree with the allocator of ")]
    assert len(mended) == (1 if part == "cpu" else 2) and all("they differ by " in line for line in mended)
    assert mended[0].partition(" (")[0] in run(code=1)


def test_a_check_that_cannot_run_is_said(monkeypatch):
    def full():
        raise MemoryError("no room")

    monkeypatch.setattr(doctor_check, "cpu", full)
    found = as_json()
    assert found["ok"] and found["ledger = allocator"]["cpu"] == {"error": "MemoryError: no room"}
    assert any("(MemoryError: no room)" in line for line in found["to mend"])


def test_pools(cupy):
    memory = as_json()["memory"]
    assert memory["host pool"]["type"] == "HostPool" and memory["host pool"]["limit bytes"] is None
    assert memory["pool of cuda:0"]["type"] == "MemoryPool" and memory["pool of cuda:0"]["limit bytes"] is None
    pool = cupy.get_default_memory_pool()
    pool.set_limit(size=1 << 30)
    allocator = cupy.cuda.get_allocator()
    try:
        assert as_json()["memory"]["pool of cuda:0"]["limit bytes"] == 1 << 30
        assert "type MemoryPool, limit 1.00 GiB, used " in run() and "type HostPool, limit none, used " in run()
        cupy.cuda.set_allocator(lambda size: allocator(size))
        report = as_json()
        assert "<lambda>" in report["memory"]["pool of cuda:0"]["type"]
        assert "not compared: memory comes from the allocator " in report["ledger = allocator"]["cuda:0"]
    finally:
        cupy.cuda.set_allocator(allocator)
        pool.set_limit(size=0)


def test_cupy_without_nccl(cupy, monkeypatch):
    nccl = sys.modules["cupy.cuda.nccl"]
    monkeypatch.setattr(nccl, "available", False)
    monkeypatch.delattr(nccl, "get_version")
    assert "none (CuPy finds no NCCL)" in run()


def nvml(monkeypatch, **members):
    calls = []
    fake = SimpleNamespace(nvmlInit=lambda: calls.append("init"), nvmlShutdown=lambda: calls.append("shutdown"),
                           nvmlSystemGetDriverVersion=lambda: b"550.54.15", nvmlDeviceGetCount=lambda: 4)  # fmt: skip
    vars(fake).update(members)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return calls


def test_nvml(monkeypatch):
    calls = nvml(monkeypatch)
    assert as_json()["versions"]["NVML"] == "driver 550.54.15, 4 GPUs" and calls == ["init", "shutdown"]

    def absent():
        raise RuntimeError("NVML Shared Library Not Found")

    nvml(monkeypatch, nvmlInit=absent)
    found = as_json()
    assert found["versions"]["NVML"] == "missing (NVML Shared Library Not Found)"
    assert any(line.startswith("NVML: it comes with the NVIDIA driver") for line in found["to mend"])
    calls = nvml(monkeypatch, nvmlDeviceGetCount=absent)
    assert as_json()["versions"]["NVML"].startswith("missing") and calls == ["init", "shutdown"]
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert as_json()["versions"]["NVML"] == "not installed"


def test_missing_packages_and_two_cupys(monkeypatch):
    find, version, is_file = importlib.util.find_spec, importlib.metadata.version, Path.is_file
    both, absent = ("cupy-cuda12x", "cupy-cuda13x"), (*doctor.OPTIONAL, "nvidia")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in absent else find(name))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "14.2.0" if name in both else version(name))
    monkeypatch.setattr(Path, "is_file", lambda path: path.name != "cuda_runtime.h" and is_file(path))
    found = as_json()
    for name, fix in doctor.OPTIONAL.items():
        assert found["optional packages"][name] == "not installed"
        assert f"{name} ({doctor.SERVES[name]}): {fix}" in found["to mend"]
    mended = "\n".join(found["to mend"])
    assert "cupy-cuda12x 14.2.0 and cupy-cuda13x 14.2.0 overwrite each other's files" in mended
    assert "CUDA's headers: pip install 'cupy-cuda12x[ctk]'" in mended


@pytest.mark.parametrize(
    ("sections", "home", "name"),
    [
        (["versions"], platform, "python_version"), (["CUDA", "devices", "memory"], cuda, "probe"),
        (["kernels"], kernel, "folder"), (["CPU"], os, "cpu_count"), (["several processes"], doctor_mpi, "report"),
    ],
)  # fmt: skip
def test_a_section_that_fails_says_so(sections, home, name, monkeypatch):
    def fail():
        raise ValueError("something odd")

    monkeypatch.setattr(home, name, fail)
    found = as_json()
    assert {section: found[section] for section in sections} == dict.fromkeys(
        sections, {"error": "ValueError: something odd"}
    )
    shown = run()
    assert "error  ValueError: something odd" in shown and "to mend" in shown and "environment" in shown


def test_a_device_on_which_our_kernels_fail(cupy, monkeypatch):
    build = cuda.CudaDevice.compile
    monkeypatch.setattr(
        cuda.CudaDevice, "compile", lambda device, text, *options: build(device, f"nonsense {text}", *options)
    )
    found = as_json()
    assert "KernelError: tg_doctor does not compile" in found["devices"]["cuda:1"]["error"]
    assert any(line.startswith("cuda:1: KernelError") for line in found["to mend"])


def test_colour_only_on_a_terminal(cupy):
    assert "\x1b" not in run()
    assert "\x1b[1mversions" in run(color=True)


def test_help_has_an_example():
    result = CliRunner().invoke(main, ["doctor", "--help"])
    assert "Example:\n    tapegrad doctor\n    TAPEGRAD_DEVICE=cuda tapegrad doctor --json\n" in result.output


def test_where_no_gpu_is(monkeypatch):
    cuda.forget()
    found = as_json()
    assert found["ok"] and found["default device"]["name"] in ("cpu", "cuda:0")
