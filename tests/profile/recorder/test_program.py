"""Programs are run as the interpreter runs them."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import zipfile
from pathlib import Path

import pytest

from tapegrad.profile.recorder.program import Outcome, ProgramError, find, run

ABOUT = """
import os, pickle, sys
print(__name__, sys.argv, os.path.basename(__file__), repr(__package__), sys.path[0])
class Thing: pass
print(pickle.loads(pickle.dumps(Thing())).__class__.__module__, sys.modules["__main__"].Thing is Thing)
"""


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


def ended(folder: Path, text: str, *args: str) -> Outcome:
    return run(find(str(write(folder, "prog.py", text)), args, False))


def as_python_runs(*command: str, cwd: Path) -> str:
    return subprocess.run([sys.executable, *command], cwd=cwd, capture_output=True, text=True, check=True).stdout


def test_a_script_sees_what_python_shows_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "sub/script.py", ABOUT)
    before = sys.argv, list(sys.path), sys.modules["__main__"]
    assert run(find("sub/script.py", ("--lr", "3", "-o"), False)) == Outcome()
    assert (sys.argv, sys.path, sys.modules["__main__"]) == before
    assert capsys.readouterr().out == as_python_runs("sub/script.py", "--lr", "3", "-o", cwd=tmp_path)


@pytest.mark.parametrize("name", ["package.tool", "package"])
def test_a_module_sees_what_python_shows_it(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "package/__init__.py", "")
    write(tmp_path, "package/other.py", "value = 7")
    for file in ("tool", "__main__"):
        write(tmp_path, f"package/{file}.py", ABOUT.replace(", sys.path[0]", "") + "from .other import value\n")
    assert run(find(name, ("a",), True)) == Outcome()
    for module in [m for m in sys.modules if m.partition(".")[0] == "package"]:
        del sys.modules[module]
    assert capsys.readouterr().out == as_python_runs("-m", name, "a", cwd=tmp_path)


def test_a_folder_and_a_zip_file_run_their_main(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = write(tmp_path, "app/__main__.py", "print(__name__, 'runs')")
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.write(main, "__main__.py")
    for name in ("app", "app.zip"):
        assert run(find(str(tmp_path / name), (), False)) == Outcome()
    assert capsys.readouterr().out == "__main__ runs\n" * 2


@pytest.mark.parametrize(
    ("text", "kind", "code", "message"),
    [
        ("import sys; sys.exit()", "finished", 0, ""),
        ("import sys; sys.exit(0)", "exit", 0, ""),
        ("import sys; sys.exit(7)", "exit", 7, ""),
        ("import sys; sys.exit('no')", "exit", 1, "no"),
        ("raise KeyboardInterrupt", "interrupted", 130, "interrupted"),
        ("raise MemoryError('too much\\nmore')", "oom", 1, "too much"),
        ("raise ValueError('wrong')", "exception", 1, "ValueError: wrong"),
        ("def f(:", "exception", 1, "SyntaxError: invalid syntax (prog.py, line 1)"),
        ("raise GeneratorExit", "exception", 1, "GeneratorExit: "),
    ],
)
def test_every_end_has_its_kind_and_code(text: str, kind: str, code: int, message: str, tmp_path: Path) -> None:
    found = ended(tmp_path, text)
    assert (found.kind, found.code, found.message) == (kind, code, message)


def test_threads_of_the_program_are_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended(
        tmp_path,
        """
        import threading, time
        def late():
            time.sleep(0.1)
            print("late")
        threading.Thread(target=late).start()
        """,
    )
    assert capsys.readouterr().out == "late\n"


def test_what_is_not_there_is_told_in_one_line(tmp_path: Path) -> None:
    for name, is_module, said in (
        (str(tmp_path / "none.py"), False, "there is no such file"),
        ("no.such.module", True, "there is no such module"),
        ("nosuchmodule", True, "there is no such module"),
    ):
        with pytest.raises(ProgramError, match="(?i)" + said) as found:
            find(name, (), is_module)
        assert "\n" not in str(found.value)


def test_titles() -> None:
    here = str(Path(__file__))
    assert find(here, (), False).title == "test_program"
    assert find("json.tool", (), True).title == "tool"


def test_threads_of_pools_and_of_others_are_not_waited_for(tmp_path: Path) -> None:
    free = threading.Event()
    other = threading.Thread(target=free.wait)
    other.start()
    try:
        text = "from concurrent.futures import ThreadPoolExecutor as Pool\npool = Pool()\npool.submit(int).result()"
        assert ended(tmp_path, text) == Outcome()
    finally:
        free.set()
        other.join()
