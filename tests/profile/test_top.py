"""`tapegrad top`: a stand-in for NVML that may refuse anything, and files of processes that may hold anything."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import time
import unicodedata
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from tapegrad.profile.cli import main
from tapegrad.profile.top import command, devices, processes, publish
from tapegrad.profile.top.publish import Publisher, RuntimeFolderError
from tapegrad.profile.top.text import view

GIB = 1 << 30
FIGURES = {
    "program": "train.py", "started": 1.0, "step": 118, "live_bytes": 5 * GIB, "peak_bytes": 6893338624,
    "categories": {"activation": 3618508800, "optimizer": 1417339207, "parameter": 708669603, "temporary": 0},
    "device": "cuda:0", "reserved_bytes": 6989976043,
}  # fmt: skip


class NVMLError(Exception):
    pass


class NotSupported(NVMLError):
    pass


def fake_nvml(monkeypatch: pytest.MonkeyPatch, **answers: Any) -> list[str]:
    """A module ``pynvml`` with one H200; ``answers`` replace its functions (an exception is raised).  Its calls."""
    calls: list[str] = []
    memory = SimpleNamespace(used=85147539865, total=150109880320)
    mine, other = SimpleNamespace(pid=os.getpid(), usedGpuMemory=7580518809), SimpleNamespace(pid=1, usedGpuMemory=None)
    found: dict[str, Any] = {
        "Init": None, "Shutdown": None, "DeviceGetCount": 1, "DeviceGetHandleByIndex": "handle",
        "DeviceGetName": "NVIDIA H200", "DeviceGetTemperature": 45, "DeviceGetPowerUsage": 512345,
        "DeviceGetEnforcedPowerLimit": 700000, "DeviceGetUtilizationRates": SimpleNamespace(gpu=97, memory=3),
        "DeviceGetMemoryInfo": memory, "DeviceGetMigMode": NotSupported("Not Supported"),
        "DeviceGetComputeRunningProcesses": [other, mine], "DeviceGetGraphicsRunningProcesses": [mine],
        "DeviceGetMaxMigDeviceCount": 2, "DeviceGetMigDeviceHandleByIndex": NotSupported("Not Found"),
    } | answers  # fmt: skip

    def member(name: str, answer: Any) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            calls.append(name)
            if isinstance(answer, Exception):
                raise answer
            return answer(*arguments) if callable(answer) else answer

        return call

    members = {f"nvml{name}": member(name, answer) for name, answer in found.items()}
    constants = {"NVML_TEMPERATURE_GPU": 0, "NVML_DEVICE_MIG_ENABLE": 1}
    errors = {"NVMLError": NVMLError, "NVMLError_NotSupported": NotSupported}
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(**errors, **constants, **members))
    return calls


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A runtime folder of this test's own, and a system without NVML; returns where our files lie."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    return tmp_path / "tapegrad"


def top(*arguments: str) -> str:
    result = CliRunner().invoke(main, ["top", *arguments])
    assert result.exit_code == 0 and result.stderr == "", result.output
    return result.stdout


def one_line(shown: str) -> str:
    return " ".join(shown.split())


def ended() -> int:
    """The number of a process that has ended."""
    running = subprocess.Popen([sys.executable, "-c", ""])
    running.wait()
    return running.pid


def planted(place: Path, name: str, content: str | bytes) -> Path:
    place.mkdir(mode=0o700, exist_ok=True)
    (place / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return place / name


# What a process publishes -------------------------------------------------------------------------------------------


def test_published_figures_are_read_back(runtime: Path) -> None:
    publisher = Publisher()
    publisher.update(FIGURES)
    [found] = processes.published()
    assert found == FIGURES | {"pid": os.getpid(), "updated": found["updated"], "rss_bytes": found["rss_bytes"]}
    assert abs(found["updated"] - time.time()) < 60 and found["rss_bytes"] > 1 << 20
    assert runtime.stat().st_mode & 0o777 == 0o700
    assert [p.name for p in runtime.iterdir()] == [f"{os.getpid()}.json"]
    publisher.close()
    assert processes.published() == [] and list(runtime.iterdir()) == []
    publisher.update(FIGURES)
    assert list(runtime.iterdir()) == []


def test_at_most_twice_a_second(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(publish.time, "monotonic", lambda: clock[0])
    publisher, seen = Publisher(), []
    for step in range(40):  # every eighth of a second
        publisher.update(FIGURES | {"step": step})
        seen.append(processes.published()[0]["step"])
        clock[0] += 0.125
    publisher.close()
    assert seen[:6] == [0, 0, 0, 0, 4, 4] and len(set(seen)) == 10


def test_it_ends_with_its_process(runtime: Path) -> None:
    code = (
        "from tapegrad.profile.top.publish import Publisher\n"
        f"Publisher().update({FIGURES})\nprint('written', flush=True)\ninput()"
    )
    running = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None and running.stdout.readline() == "written\n"
    assert [one["pid"] for one in processes.published()] == [running.pid]
    running.communicate("\n", timeout=30)
    assert list(runtime.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_leaves_the_file_of_its_parent_alone(runtime: Path) -> None:
    code = f"""
import os, time
from tapegrad.profile.top import publish, processes
publish.SECONDS = 0.0
publisher = publish.Publisher()
publisher.update({FIGURES})
child = os.fork()
if not child:
    publisher.update({FIGURES})
    assert [one["pid"] for one in processes.published()] == sorted([os.getppid(), os.getpid()])
    publisher.close()
    assert [one["pid"] for one in processes.published()] == [os.getppid()]
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert [one["pid"] for one in processes.published()] == [os.getpid()]"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert list(runtime.iterdir()) == []


@pytest.mark.skipif(os.name != "posix", reason="users and permissions of POSIX systems")
def test_a_folder_that_is_not_ours_is_refused(runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(why: str) -> None:
        publisher = Publisher()
        publisher.update(FIGURES)
        publisher.close()
        assert isinstance(publisher.error, RuntimeFolderError) and why in str(publisher.error)
        shown = one_line(top("--once"))
        assert "tapegrad's programs are not shown: " in shown and why in shown

    runtime.mkdir()
    runtime.chmod(0o755)
    refused("is open to others; chmod 700 it")
    runtime.chmod(0o700)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    refused("belongs to user ")
    monkeypatch.undo()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    runtime.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    runtime.symlink_to(tmp_path / "elsewhere")
    refused("is not a folder")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_where_nothing_can_be_written_the_program_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "tapegrad").write_text("a file")
    publisher = Publisher()
    for _ in range(2):
        publisher.update(FIGURES)
    publisher.close()
    assert isinstance(publisher.error, OSError)


@pytest.mark.skipif(os.name != "posix", reason="numbers of users")
def test_the_folder_without_a_runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish.tempfile, "gettempdir", lambda: str(tmp_path))
    for value in ("", "relative", str(tmp_path / "missing")):
        monkeypatch.setenv("XDG_RUNTIME_DIR", value)
        assert publish.folder() == tmp_path / f"tapegrad-{os.getuid()}"


# What is read --------------------------------------------------------------------------------------------------------


def test_files_of_dead_processes_are_removed(runtime: Path) -> None:
    dead = ended()
    said = json.dumps(FIGURES | {"pid": dead, "updated": time.time()})
    files = [planted(runtime, f"{dead}.json", said), planted(runtime, f".{dead}.part", "half")]
    kept = [
        planted(runtime, "notes.txt", "mine"),
        planted(runtime, f"0{dead}.json", said),
        planted(runtime, "0.json", said),
    ]
    assert processes.published() == []
    assert not any(file.exists() for file in files) and all(file.exists() for file in kept)


def test_another_process_with_the_number_of_a_dead_one(runtime: Path) -> None:
    file = planted(runtime, f"{os.getpid()}.json", json.dumps(FIGURES | {"pid": os.getpid(), "updated": 1000.0}))
    assert processes.published() == [] and not file.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 60_000, b'{"pid": true}', b'{"pid": 1e99}', b'{"pid": "x"}',
        b'{"pid": 1, "step": ' + b"9" * 5000 + b"}", b" " * 70_000 + b"{}", b'{"pid": -4}',
    ],
)  # fmt: skip
def test_other_files_are_passed_over(content: bytes, runtime: Path) -> None:
    planted(runtime, f"{os.getpid()}.json", content)
    assert processes.published() == []
    assert "no program runs under tapegrad profile" in top("-1")


@pytest.mark.skipif(os.name != "posix", reason="named pipes")
def test_links_pipes_and_folders_are_passed_over(runtime: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(json.dumps(FIGURES | {"pid": os.getpid(), "updated": time.time()}))
    runtime.mkdir(mode=0o700)
    file = runtime / f"{os.getpid()}.json"
    file.symlink_to(tmp_path / "secret")
    assert processes.published() == []
    file.unlink()
    os.mkfifo(file)
    assert processes.published() == []  # and does not wait for a writer
    file.unlink()
    file.mkdir()
    (runtime / f"{ended()}.json").mkdir()
    assert processes.published() == []


def test_hostile_values_are_left_out_or_escaped(runtime: Path) -> None:
    said = {
        "pid": os.getpid(), "program": "\x1b[2Jevil[red]\u202e.py" + "x" * 500, "step": "<b>", "live_bytes": -1,
        "peak_bytes": 1 << 70, "categories": {"act\x1b": 5, "big": 1 << 80, "no": None}, "device": 7,
        "reserved_bytes": True, "updated": time.time(), "more": [1],
    }  # fmt: skip
    planted(runtime, f"{os.getpid()}.json", json.dumps(said))
    [found] = processes.published()
    assert found["step"] is found["live_bytes"] is found["peak_bytes"] is found["reserved_bytes"] is None
    assert found["categories"] == {"act\x1b": 5} and found["device"] == "?" and "more" not in found
    shown = top("-1")
    assert "\x1b" not in shown and "\u202e" not in shown and "\\x1b[2Jevil[red]" in shown


# Devices -------------------------------------------------------------------------------------------------------------


def test_devices_and_processes(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_nvml(monkeypatch)
    publisher = Publisher()
    publisher.update(FIGURES)
    monkeypatch.setenv("COLUMNS", "200")
    shown = top("-1").splitlines()
    found = json.loads(top("--json"))
    publisher.close()
    assert calls[0] == "Init" and calls[-1] == "Shutdown" and calls.count("Shutdown") == 2
    pid = str(os.getpid())
    cells = [re.split("  +", line.strip()) for line in shown]
    assert cells[0] == ["Device", "name", "temp", "use", "power", "used", "of"]
    assert cells[1] == ["GPU 0", "NVIDIA H200", "45 C", "97 %", "512/700 W", "79.30 GiB", "139.80 GiB"]
    assert cells[2][0] == "CPU" and shown[3] == ""
    assert cells[4] == ["PID", "program", "on", "step", "holds", "live", "peak", "pool"]
    assert cells[5] == [pid, "train.py", "GPU 0", "118", "7.06 GiB", "5.00 GiB", "6.42 GiB", "6.51 GiB"]
    assert cells[6][:1] + cells[6][2:] == ["1", "GPU 0", "-", "-", "-", "-", "-"]
    assert shown[7:] == [f"{pid} activation 3.37 GiB, optimizer 1.32 GiB, parameter 675.84 MiB"]
    [gpu] = found["devices"]
    assert gpu["used_bytes"] == 85147539865 and gpu["power_mw"] == 512345 and gpu["temperature_c"] == 45
    assert [p["pid"] for p in gpu["processes"]] == [os.getpid(), 1] and gpu["processes"][1]["used_bytes"] is None
    assert found["notes"] == [] and found["processes"][0]["categories"] == FIGURES["categories"]
    assert found["cpu"]["total_bytes"] > found["cpu"]["available_bytes"] > 0


def test_80_columns_and_ascii(monkeypatch: pytest.MonkeyPatch, runtime: Path) -> None:
    fake_nvml(monkeypatch)
    publisher = Publisher()
    publisher.update(FIGURES | {"program": "zoë☃.py"})
    wide, narrow = (printed(command.gather(), 80, encoding) for encoding in ("utf-8", "ascii"))
    publisher.close()
    assert "zoë☃.py" in wide and "zo\\xeb\\u2603.py" in narrow and narrow.isascii()
    for shown in (wide, narrow):
        assert max(map(cell_len, shown.splitlines()[:7])) <= 80
        assert "activation 3.37 GiB" in shown and "6.42 GiB" in shown and "512/700 W" in shown


ASKED = [
    "DeviceGetName", "DeviceGetTemperature", "DeviceGetPowerUsage", "DeviceGetEnforcedPowerLimit", "DeviceGetMigMode",
    "DeviceGetUtilizationRates", "DeviceGetMemoryInfo", "DeviceGetComputeRunningProcesses",
    "DeviceGetGraphicsRunningProcesses",
]  # fmt: skip


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("how", ["refused", "not supported"])
def test_any_question_may_stay_unanswered(name: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = {"refused": NVMLError("Insufficient Permissions\nmore"), "not supported": NotSupported()}
    calls = fake_nvml(monkeypatch, **{name: answer[how]})
    shown = top("-1")
    assert (f"NVML refused {name}: Insufficient Permissions" in one_line(shown)) == (how == "refused")
    assert "GPU 0" in shown and "CPU " in shown and "more" not in shown and "None" not in shown
    assert calls[-1] == "Shutdown"
    assert json.loads(top("--json"))["devices"][0]["index"] == 0


@pytest.mark.parametrize("name", ["Init", "DeviceGetCount", "DeviceGetHandleByIndex"])
def test_without_devices_it_says_so_in_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml(monkeypatch, **{name: NVMLError("Driver Not Loaded")})
    shown = top("-1").splitlines()
    assert "Driver Not Loaded" in shown[0] and [line.split()[0] for line in shown[1:3]] == ["Device", "CPU"]


def test_without_nvml_own_processes_show_their_resident_bytes(runtime: Path) -> None:
    publisher = Publisher()
    publisher.update(FIGURES | {"device": "cpu", "reserved_bytes": None})
    shown = top("-1").splitlines()
    publisher.close()
    assert shown[0] == "GPUs are not shown: NVML's Python package is missing (pip install nvidia-ml-py)"
    [found] = [line.split() for line in shown if "train.py" in line]
    assert found[:4] == [str(os.getpid()), "train.py", "CPU", "118"] and found[4] != "-"


def test_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml(monkeypatch, DeviceGetCount=0)
    assert top("-1").startswith("NVML knows no GPU\nDevice")


def test_a_process_on_two_devices_has_its_figures_beside_both(monkeypatch: pytest.MonkeyPatch, runtime: Path) -> None:
    fake_nvml(monkeypatch, DeviceGetCount=2)
    publisher = Publisher()
    publisher.update(FIGURES)
    shown = one_line(top("-1"))
    publisher.close()
    for gpu in ("GPU 0", "GPU 1"):
        assert f"{os.getpid()} train.py {gpu} 118 7.06 GiB" in shown
    assert shown.count("activation 3.37 GiB") == 1


def test_mig(monkeypatch: pytest.MonkeyPatch) -> None:
    """A divided device refuses what its instances answer."""

    def memory(handle: str) -> Any:
        return SimpleNamespace(used=GIB, total=(10 if handle == "part" else 140) * GIB)

    def running(handle: str) -> Any:
        if handle == "handle":
            raise NVMLError("Insufficient Permissions")
        return [SimpleNamespace(pid=1, usedGpuMemory=GIB)]

    def part(handle: str, index: int) -> str:
        if index != 1:
            raise NVMLError("Not Found")
        return "part"

    fake_nvml(
        monkeypatch, DeviceGetMigMode=[1, 1], DeviceGetMemoryInfo=memory, DeviceGetComputeRunningProcesses=running,
        DeviceGetGraphicsRunningProcesses=NotSupported(), DeviceGetUtilizationRates=NotSupported(),
        DeviceGetMigDeviceHandleByIndex=part,
    )  # fmt: skip
    shown = top("-1")
    assert "NVML refused DeviceGetComputeRunningProcesses: Insufficient Permissions" in one_line(shown)
    assert "GPU 0 NVIDIA H200 45 C 512/700 W 1.00 GiB 140.00 GiB" in one_line(shown)
    assert " MIG 1 NVIDIA H200 45 C" not in one_line(shown)
    assert " MIG 1 NVIDIA H200 1.00 GiB 10.00 GiB" in one_line(shown) and " MIG 1 - 1.00 GiB" in one_line(shown)


def printed(state: dict[str, Any], width: int, encoding: str = "utf-8") -> str:
    stream = io.BytesIO()
    with io.TextIOWrapper(stream, encoding=encoding, newline="") as file:
        console = Console(file=file, width=width, highlight=False)
        console.print(view(state, console), soft_wrap=True)
        file.flush()
        return stream.getvalue().decode(encoding)


def test_old_figures_are_called_old(runtime: Path) -> None:
    began = psutil.Process().create_time()
    planted(runtime, f"{os.getpid()}.json", json.dumps(FIGURES | {"pid": os.getpid(), "updated": began}))
    assert json.loads(top("--json"))["processes"][0]["age"] >= 0
    found = command.gather()
    found["processes"][0]["age"] = 42.4
    assert "updated 42 s ago" in printed(found, 200)
    found["processes"][0]["age"] = 1.0
    assert "ago" not in printed(found, 200)


@given(
    width=st.integers(20, 300),
    name=st.text(max_size=60),
    encoding=st.sampled_from(["utf-8", "ascii"]),
    used=st.integers(0, 1 << 45),
)
def test_no_name_controls_the_terminal(width: int, name: str, encoding: str, used: int) -> None:
    process = {**FIGURES, "program": name, "pid": 7, "updated": 1.0, "age": 99.0, "rss_bytes": used}
    gpu = {
        "index": 0, "name": name, "temperature_c": 45, "utilization_percent": 9, "power_mw": 9, "power_limit_mw": None,
        "mig": True, "used_bytes": used, "total_bytes": 1 << 40, "instances": [],
        "processes": [{"pid": 9, "used_bytes": used, "name": name}],
    }  # fmt: skip
    found = {
        "notes": [name], "devices": [gpu], "cpu": {"total_bytes": used, "available_bytes": 0}, "processes": [process],
    }  # fmt: skip
    shown = printed(found, width, encoding)
    assert all(unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp") for c in shown if c != "\n")


# The command ---------------------------------------------------------------------------------------------------------


def test_off_a_terminal_it_prints_once_and_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.time, "sleep", lambda seconds: pytest.fail("a live view off a terminal"))
    assert top() == top("-1")
    assert "\x1b" not in top()


def test_the_live_view(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(command, "on_terminal", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(command.time, "sleep", wait)
    assert "no program runs under tapegrad profile" in top("--interval", "0.5")
    assert waits == [0.5, 0.5, 0.5]


def test_bad_options() -> None:
    for arguments in (["--interval", "0"], ["--interval", "x"], ["--nonsense"]):
        result = CliRunner().invoke(main, ["top", *arguments])
        assert result.exit_code == 2 and result.stdout == ""


def test_nvml_is_loaded_when_it_is_asked() -> None:
    code = "import sys; import tapegrad.profile.top.command; print('pynvml' in sys.modules, 'numpy' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout == "False False\n", result.stderr
    assert devices.gather()[0] == []
