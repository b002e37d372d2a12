"""``tapegrad doctor``: every fault is named with its remedy, and none makes it fail."""

from __future__ import annotations

import importlib.util
import json
import sys
import tracemalloc
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from cuda_cases import FAULTS, broken, installed

import tapegrad as tg
from tapegrad.device import CPU, _default, cuda, onednn
from tapegrad.profile import doctor, doctor_check, doctor_mpi
from tapegrad.profile.cli import main


@pytest.fixture
def cupy():
    """The stand-in for CuPy."""
    with installed() as module:
        yield module


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    """Whoever runs the tests has asked for no device."""
    monkeypatch.delenv("TAPEGRAD_DEVICE", raising=False)


@pytest.fixture(autouse=True)
def quick(request, monkeypatch):
    """The self-test runs in its own tests alone."""
    if "ledger" not in request.node.name:
        monkeypatch.setattr(doctor_check, "_compared", lambda *step: [(1 << 20, 1 << 20)] * 3)
    monkeypatch.setattr(doctor_mpi, "_trial", lambda mpiexec: {"2 ranks": "works, 0.1 s"})


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
    before = list(_default)
    run()
    assert _default == before == [CPU] and tg.zeros(3).device is CPU


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
    seen = doctor_check._compared

    def forgetful(name, held, rows, width):
        lost = 512 if name.startswith(part) and part == "cuda" else (1 << 16) * name.startswith(part)
        return [(ledger - lost, held) for ledger, held in seen(name, held, rows, width)]

    monkeypatch.setattr(doctor_check, "_compared", forgetful)
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
    find, both = importlib.util.find_spec, ("cupy-cuda12x", "cupy-cuda13x")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in doctor.OPTIONAL else find(name))
    monkeypatch.setattr(doctor, "_installed", lambda name: "14.2.0" if name in both else None)
    monkeypatch.setattr(doctor, "_headers", lambda: "not found")
    found = as_json()
    for name, fix in doctor.OPTIONAL.items():
        assert found["optional packages"][name] == "not installed"
        assert f"{name} ({doctor.SERVES[name]}): {fix}" in found["to mend"]
    mended = "\n".join(found["to mend"])
    assert "cupy-cuda12x 14.2.0 and cupy-cuda13x 14.2.0 overwrite each other's files" in mended
    assert "CUDA's headers: pip install 'cupy-cuda12x[ctk]'" in mended


@pytest.mark.parametrize(
    "section", ["_versions", "_cuda", "_devices", "_kernels", "_memory", "_cpu", "_optional", "_several"]
)
def test_a_section_that_fails_says_so(section, monkeypatch):
    def fail():
        raise ValueError("something odd")

    monkeypatch.setattr(doctor, section, fail)
    shown = run()
    assert "error  ValueError: something odd" in shown and "to mend" in shown and "environment" in shown


def test_a_device_on_which_our_kernels_fail(cupy, monkeypatch):
    monkeypatch.setattr(doctor, "_TRIAL", "nonsense")
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
