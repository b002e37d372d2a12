"""What a type checker knows of users' programs, and signatures that run-time tools show."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import tapegrad as tg

USERS = Path(__file__).parent / "typing" / "users.py"
WRONG = """
import tapegrad as tg

@tg.recompute_grad
def block(x: tg.Tensor, scale: float = 1.0) -> tg.Tensor:
    return tg.tanh(x) * scale

w = tg.Variable([1.0])
block("text", 1.0, 2.0)
tg.vmap(block)(w * 2, scales=1.0)
w.summ()
tg.asarray(1.0).reshpe(3)
"""


def strict(*files: Path, cwd: Path) -> str:
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--config-file=", *map(str, files)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False).stdout


def test_users_programs_pass_strict_checks() -> None:
    out = strict(USERS, cwd=USERS.parents[2])
    assert "Success: no issues found" in out, out


def test_what_is_wrong_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    out = strict(tmp_path / "wrong.py", cwd=USERS.parents[2])
    for line, text in (
        (9, "Too many arguments"),
        (9, "incompatible type"),
        (10, "Unexpected keyword"),
        (11, "summ"),
        (12, "reshpe"),
    ):
        assert any(f":{line}: error" in row and text in row for row in out.splitlines()), out


@pytest.mark.parametrize(
    "cls", [tg.Variable, tg.training.DataLoader, tg.nn.Dense, tg.nn.Layer, tg.optim.Adam, tg.optim.Optimizer]
)
def test_constructors_show_their_arguments(cls: type) -> None:
    parameters = inspect.signature(cls).parameters
    assert parameters and "args" not in parameters
    with pytest.raises(TypeError, match="write "):
        tg.training.DataLoader([1.0], num_workers=2)
