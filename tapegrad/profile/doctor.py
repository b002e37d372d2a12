"""``tapegrad doctor``: what is installed, which devices work, and how to mend what does not.

Every section is gathered apart: one that fails shows its error instead, and the others still appear.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
from collections.abc import Callable
from functools import partial
from importlib import metadata
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tapegrad.profile.report.units import first_line
from tapegrad.sizes import format_bytes

if TYPE_CHECKING:
    from tapegrad.device import Device

OPTIONAL = {
    "pynvml": "pip install nvidia-ml-py", "scipy": "pip install scipy",
}  # fmt: skip
"""Optional packages by the name they import under, and how to get them."""

SERVES = {
    "pynvml": "GPUs in tapegrad top",
    "scipy": "special functions, linear algebra, sparse matrices, exact plans", "mpi4py": "several processes",
}  # fmt: skip
VARIABLES = (
    "TAPEGRAD_DEVICE", "TAPEGRAD_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CUDA_PATH", "CUPY_CACHE_DIR",
    "CUPY_GPU_MEMORY_LIMIT", "CUPY_TF32", "TAPEGRAD_TIMEOUT", "TAPEGRAD_ONEDNN",
    "TAPEGRAD_CUDNN", "TAPEGRAD_NATIVE", "TAPEGRAD_NATIVE_CACHE",
)  # fmt: skip
_TRIAL = '#include "scalar.cuh"\nextern "C" __global__ void tg_doctor(int* x) { *x = 7; }'


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, for bug reports and scripts.")
def doctor(as_json: bool) -> None:
    """Say what is installed, which devices work, and how to mend what does not.

    A small training step runs on each device to see whether the ledger counts what the allocator gives.

    The exit code is 0 where tapegrad can compute, be it on the CPU alone; it is 1 if TAPEGRAD_DEVICE asks for a device
    that is missing, or if the ledger is wrong.

    \b
    Example:
      tapegrad doctor
      TAPEGRAD_DEVICE=cuda tapegrad doctor --json
    """
    sections = report()
    click.echo(json.dumps(sections, indent=2) if as_json else _text(sections), nl=True)
    if not sections["ok"]:
        raise click.exceptions.Exit(1)


def report() -> dict[str, Any]:
    """All that is known, in the order in which it is printed; never raises."""
    sections: dict[str, Callable[[], object]] = {
        "default device": _default_device, "versions": _versions, "CUDA": _cuda, "devices": _devices,
        "kernels": _kernels, "memory": _memory, "ledger = allocator": _ledger, "CPU": _cpu,
        "several processes": _several, "optional packages": _optional, "environment": _environment,
    }  # fmt: skip
    said: dict[str, Any] = {name: _tried(gather) for name, gather in sections.items()}
    said["to mend"] = _tried(lambda: _to_mend(said))
    wanted = os.environ.get("TAPEGRAD_DEVICE") and "error" in said["default device"]
    said["ok"] = not wanted and all(one.get("ok", True) for one in _checks(said).values())
    return said


def _tried(gather: Callable[[], object]) -> Any:
    """What ``gather`` returns, or its error as a value."""
    try:
        return gather()
    except Exception as e:
        return {"error": f"{type(e).__name__}: {e}"}


def _default_device() -> dict[str, str]:
    from tapegrad.device import cuda, default_device
    from tapegrad.errors import DeviceError

    asked = os.environ.get("TAPEGRAD_DEVICE")
    try:
        name = str(default_device())
    except DeviceError as e:
        return {"error": f"TAPEGRAD_DEVICE={asked}: {e}"}
    if asked:
        return {"name": name, "why": f"TAPEGRAD_DEVICE={asked}"}
    if name == "cpu":
        return {"name": name, "why": cuda.probe().why}
    return {"name": name, "why": "a kernel was compiled and launched on it"}


def _versions() -> dict[str, str]:
    import tapegrad
    from tapegrad.device import CPU, cuda

    cupy = cuda.probe().cupy
    ask = lambda get: "not installed" if cupy is None else _line(get)
    return {
        "tapegrad": tapegrad.__version__,
        "Python": f"{platform.python_version()} ({platform.system()} {platform.machine()})",
        "NumPy": CPU.xp.__version__,
        "ml_dtypes": _line(lambda: metadata.version("ml_dtypes")),
        "CuPy": ", ".join(_cupy_packages()) or ask(lambda: cupy.__version__),
        "CUDA runtime": ask(lambda: _version(cupy.cuda.runtime.runtimeGetVersion())),
        "CUDA driver": ask(lambda: _version(cupy.cuda.runtime.driverGetVersion())),
        "NVRTC": ask(lambda: ".".join(map(str, cupy.cuda.nvrtc.getVersion()))),
        "NVML": _line(_nvml),
    }


def _line(get: Callable[[], object]) -> str:
    """A value as text; an error as its first line."""
    try:
        return str(get())
    except Exception as e:
        return f"missing ({first_line(e)})"


def _version(number: int) -> str:
    """CUDA's number of a version as text: 12090 is 12.9; a missing driver says 0."""
    return f"{number // 1000}.{number % 1000 // 10}" if number else "missing"


def _cupy_packages() -> list[str]:
    """The installed distributions that are CuPy; more than one of them break each other."""
    names = ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x", "cupy-rocm-5-0")
    return [f"{name} {version}" for name in names if (version := _installed(name))]


def _installed(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _nvml() -> str:
    try:
        pynvml = importlib.import_module("pynvml")
    except ImportError:
        return "not installed"
    pynvml.nvmlInit()
    try:
        driver = pynvml.nvmlSystemGetDriverVersion()
        driver = driver.decode() if isinstance(driver, bytes) else driver
        return f"driver {driver}, {pynvml.nvmlDeviceGetCount()} GPUs"
    finally:
        pynvml.nvmlShutdown()


def _cuda() -> dict[str, object]:
    from tapegrad.device import cuda

    probe = cuda.probe()
    said = {"usable": bool(probe.count), "a kernel was launched": bool(probe.count), "headers": _headers()}
    return said if probe.count else {**said, "why": probe.why, "fix": probe.fix}


def _headers() -> str:
    """Where CUDA's headers lie: NVIDIA's wheels, or the toolkit."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(p) for p in spec.submodule_search_locations or ()] if spec else []
    files = [file for folder in folders for file in sorted(folder.glob("*/include/cuda_runtime.h"))]
    toolkits = [os.environ[name] for name in ("CUDA_PATH", "CUDA_HOME") if os.environ.get(name)]
    files += [Path(p) / "include" / "cuda_runtime.h" for p in (*toolkits, "/usr/local/cuda")]
    return next((str(file.parent) for file in files if file.is_file()), "not found")


def _devices() -> dict[str, object]:
    from tapegrad.device import cuda

    return {f"cuda:{i}": _tried(partial(_one_device, i)) for i in range(cuda.probe().count)}


def _one_device(index: int) -> dict[str, object]:
    from tapegrad.device import cuda, cudnn
    from tapegrad.device.dtypes import int32
    from tapegrad.device.kernel import options

    device = cuda.get(index)
    with device.active():
        free, total = device.xp.cuda.runtime.memGetInfo()
        properties = device.xp.cuda.runtime.getDeviceProperties(index)
    name = properties["name"]
    said = {
        "name": name.decode() if isinstance(name, bytes) else name,
        "compute capability": f"{properties['major']}.{properties['minor']}",
        "free bytes": free,
        "total bytes": total,
    }
    x = device.empty((1,), int32)
    device.launch(device.compile(_TRIAL, "tg_doctor", options()), (1,), (1,), (x,))
    return {**said, "tapegrad's kernels run": int(device.numpy(x)[0]) == 7, "cuDNN": cudnn.said(device)}


def _kernels() -> dict[str, object]:
    from tapegrad.device.kernel import folder

    return {"folder": str(folder()), "files": len([*folder().glob("*.cu"), *folder().glob("*.cuh")])}


def _memory() -> dict[str, object]:
    from tapegrad.core.storage import METER
    from tapegrad.device import cuda
    from tapegrad.device.pool import POOL

    host = {"type": type(POOL).__name__, "limit bytes": None if METER.limit == inf else METER.limit}
    said: dict[str, object] = {"host pool": {**host, "used bytes": POOL.lent_bytes, "kept bytes": POOL.idle_bytes}}
    for i in range(cuda.probe().count):
        said[f"pool of cuda:{i}"] = _tried(partial(_pool_of, i))
    return said


def _pool_of(index: int) -> object:
    from tapegrad.device import cuda

    return _pool(cuda.get(index))


def _pool(device: Device) -> dict[str, object]:
    """What CuPy allocates from on a device; only of its own pool are the bytes known."""
    with device.active():
        allocator = device.xp.cuda.get_allocator()
        pool = getattr(allocator, "__self__", None)
        if pool is None or not hasattr(pool, "used_bytes"):
            return {"type": getattr(allocator, "__qualname__", type(allocator).__name__)}
        figures = {"limit bytes": pool.get_limit() or None, "used bytes": pool.used_bytes()}
        return {"type": type(pool).__name__, **figures, "kept bytes": pool.free_bytes()}


def _ledger() -> dict[str, object]:
    from tapegrad.device import cuda
    from tapegrad.profile import doctor_check

    verdicts = {"cpu": _tried(doctor_check.cpu)}
    for i in range(cuda.probe().count):
        verdicts[f"cuda:{i}"] = _tried(partial(doctor_check.cuda, i))
    return verdicts


def _checks(said: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The verdicts of the self-test by device."""
    return {name: one for name, one in said["ledger = allocator"].items() if isinstance(one, dict)}


def _cpu() -> dict[str, object]:
    from tapegrad.device import CPU, onednn
    from tapegrad.device.threads import get_num_threads
    from tapegrad.engine.cpu.native import machine, objects

    blas = CPU.xp.show_config(mode="dicts")["Build Dependencies"]["blas"]
    library, why_not = onednn.library(), machine.why_not()
    path, reason = objects.folder()
    return {
        "cores": os.cpu_count(),
        "threads": get_num_threads(),
        "BLAS": f"{blas['name']} {blas['version']}",
        "oneDNN": f"none; {onednn.HOW}" if library is None else f"{library.version} for convolutions and layer norms",
        "machine code": f"none ({why_not})" if why_not else f"by LLVM {machine.version()}",
        "compiled kernels": "kept nowhere: " + reason if path is None else str(path),
    }


def _several() -> dict[str, str]:
    from tapegrad.profile import doctor_mpi

    return doctor_mpi.report()


def _optional() -> dict[str, str]:
    return {name: _line(partial(_package, name)) for name in OPTIONAL}


def _package(name: str) -> str:
    if importlib.util.find_spec(name) is None:
        return "not installed"
    return _installed({"pynvml": "nvidia-ml-py"}.get(name, name)) or "installed"


def _environment() -> dict[str, str]:
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


def _to_mend(said: dict[str, Any]) -> list[str]:
    """One line for each thing that is missing: what, and what to do."""
    lines = []
    if "error" in said["default device"]:
        lines.append(f"{said['default device']['error']} (or unset TAPEGRAD_DEVICE)")
    elif "fix" in said["CUDA"]:
        lines.append(f"CUDA ({said['CUDA']['why']}): {said['CUDA']['fix']}; the CPU serves meanwhile")
    packages = _cupy_packages()
    if len(packages) > 1:
        lines.append(f"{' and '.join(packages)} overwrite each other's files: uninstall them all, install one again")
    if packages:
        beside = f"pip install '{packages[0].split()[0]}[ctk]'"
        if said["versions"].get("NVRTC", "").startswith("missing"):
            lines.append(f"NVRTC, the compiler of kernels: {beside}")
        if said["CUDA"].get("headers") == "not found":
            lines.append(f"CUDA's headers: {beside}")
    if said["versions"].get("NVML", "").startswith("missing"):
        lines.append("NVML: it comes with the NVIDIA driver; tapegrad top shows GPUs through it")
    lines += [f"{name} ({SERVES[name]}): {fix}" for name, fix in OPTIONAL.items()
              if said["optional packages"].get(name) == "not installed"]  # fmt: skip
    lines += [f"{name}: {part['error']}" for name, part in said.items()
              if name != "default device" and isinstance(part, dict) and "error" in part]  # fmt: skip
    for name, one in _checks(said).items():
        if not one.get("ok", False):
            why = one.get("error") or f"they differ by {one['drift bytes']} bytes"
            lines.append(f"the ledger does not agree with the allocator of {name} ({why}): please report it")
    if "error" not in said["several processes"]:
        from tapegrad.profile import doctor_mpi

        lines += doctor_mpi.to_mend(said["several processes"])
    failed = {name: one["error"] for name, one in said["devices"].items() if isinstance(one, dict) and "error" in one}
    return lines + [f"{name}: {error}" for name, error in failed.items()]


def _text(sections: dict[str, Any]) -> str:
    """The report for people: a heading and indented lines for each section."""
    lines = []
    for heading, part in sections.items():
        if heading == "ok":
            continue
        lines.append(click.style(heading, bold=True))
        if isinstance(part, dict):
            width = max(map(len, part), default=0)
            lines += [f"  {name:{width}}  {_plain(value)}" for name, value in part.items()]
        else:
            lines += [f"  {line}" for line in part]
        if not part:
            lines.append("  none" if heading != "to mend" else "  nothing")
    return "\n".join(lines)


def _sized(name: str, value: object) -> object:
    return format_bytes(value) if name.endswith(" bytes") and isinstance(value, int) else value


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "none"
    if isinstance(value, dict):
        return ", ".join(f"{name.removesuffix(' bytes')} {_plain(_sized(name, one))}" for name, one in value.items())
    return str(value)
