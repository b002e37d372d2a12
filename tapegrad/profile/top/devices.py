"""NVIDIA devices and who uses them, through NVML; every question is asked apart, since any may be refused."""

from __future__ import annotations

from typing import Any

from tapegrad.profile.report.units import first_line
from tapegrad.profile.top.processes import name_of


class _Nvml:
    """NVML's answers; None for what it does not answer, with the reason noted once."""

    def __init__(self, pynvml: Any) -> None:
        self.pynvml = pynvml
        self.notes: list[str] = []

    def ask(self, question: str, *arguments: Any) -> Any:
        """The answer of ``nvml<question>``.  What a device does not support is not noted: nothing can be done."""
        try:
            return getattr(self.pynvml, f"nvml{question}")(*arguments)
        except self.pynvml.NVMLError_NotSupported:
            return None
        except self.pynvml.NVMLError as error:
            note = f"NVML refused {question}: {first_line(error)}"
            self.notes += [note] if note not in self.notes else []
            return None


def gather() -> tuple[list[dict[str, Any]], list[str]]:
    """Every device that NVML knows, and one line for each thing that it would not say.  Never raises."""
    try:
        import pynvml
    except ImportError:
        return [], ["GPUs are not shown: NVML's Python package is missing (pip install nvidia-ml-py)"]
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return [], [f"GPUs are not shown: NVML does not start: {first_line(error)}"]
    nvml = _Nvml(pynvml)
    try:
        handles = [(i, nvml.ask("DeviceGetHandleByIndex", i)) for i in range(nvml.ask("DeviceGetCount") or 0)]
        gpus = [_device(nvml, i, handle) for i, handle in handles if handle is not None]
    finally:
        nvml.ask("Shutdown")
    if not gpus and not nvml.notes:
        nvml.notes.append("NVML knows no GPU")
    return gpus, nvml.notes


def _device(nvml: _Nvml, index: int, handle: Any) -> dict[str, Any]:
    usage, mig = nvml.ask("DeviceGetUtilizationRates", handle), nvml.ask("DeviceGetMigMode", handle)
    split = bool(mig) and mig[0] == nvml.pynvml.NVML_DEVICE_MIG_ENABLE
    return {
        "index": index,
        "temperature_c": nvml.ask("DeviceGetTemperature", handle, nvml.pynvml.NVML_TEMPERATURE_GPU),
        "utilization_percent": getattr(usage, "gpu", None),
        "power_mw": nvml.ask("DeviceGetPowerUsage", handle),
        "power_limit_mw": nvml.ask("DeviceGetEnforcedPowerLimit", handle),
        "mig": split,
        **_memory(nvml, handle),
        "instances": _instances(nvml, handle) if split else [],
    }


def _memory(nvml: _Nvml, handle: Any) -> dict[str, Any]:
    """What a device and an instance of one both have."""
    name, memory = nvml.ask("DeviceGetName", handle), nvml.ask("DeviceGetMemoryInfo", handle)
    return {
        "name": name or "?",
        "used_bytes": getattr(memory, "used", None),
        "total_bytes": getattr(memory, "total", None),
        "processes": _processes(nvml, handle),
    }


def _instances(nvml: _Nvml, handle: Any) -> list[dict[str, Any]]:
    """The parts into which MIG divides a device; an empty number is skipped."""
    instances = []
    for i in range(nvml.ask("DeviceGetMaxMigDeviceCount", handle) or 0):
        try:
            part = nvml.pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, i)
        except nvml.pynvml.NVMLError:  # NVML has no other way to say that there is none
            continue
        instances.append({"index": i, **_memory(nvml, part)})
    return instances


def _processes(nvml: _Nvml, handle: Any) -> list[dict[str, Any]]:
    """Who computes on a device, by bytes; NVML does not always say how many."""
    seen: dict[int, int | None] = {}
    for kind in ("Compute", "Graphics"):
        for process in nvml.ask(f"DeviceGet{kind}RunningProcesses", handle) or ():
            seen.setdefault(process.pid, process.usedGpuMemory)
    by_bytes = sorted(seen.items(), key=lambda item: (-(item[1] or 0), item[0]))
    return [{"pid": pid, "used_bytes": used, "name": name_of(pid)} for pid, used in by_bytes]
