"""What is shipped: the wheel's listing, its metadata and version, and the README's promises about installation."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import code_blocks
import pytest

ROOT = Path(__file__).parent.parent
SHIPPED = re.compile(
    r"tapegrad/[\w/]+\.py|tapegrad/py\.typed|tapegrad/_kernels/\w+\.cuh?|tapegrad/profile/\w+/schema\.json|tapegrad/tracing/schema\.sql"
    r"|tapegrad/profile/viewer/assets/[\w./-]+|tapegrad-[\w.]+\.dist-info/[\w/]+(\.txt)?"
)


def build_wheel(source: Path, out: Path, version: str = "1.2.3") -> zipfile.ZipFile:
    """Builds without the network: the build backend is part of the test extra.  ``version``: as if that was the tag."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)],
        cwd=source,
        env={**os.environ, "SETUPTOOLS_SCM_PRETEND_VERSION": version} if version else None,
        check=True,
        capture_output=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )
    [wheel] = out.glob("*.whl")
    return zipfile.ZipFile(wheel)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of the checkout without its hidden folders, to plant files in."""
    return Path(
        shutil.copytree(ROOT, tmp_path / "source", ignore=shutil.ignore_patterns(".*", "__pycache__", "dist", "build"))
    )


def metadata(wheel: zipfile.ZipFile) -> email.message.Message:
    [name] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return email.message_from_bytes(wheel.read(name))


@pytest.mark.slow
def test_wheel_holds_the_package_and_the_kernels_and_nothing_else(source: Path, tmp_path: Path) -> None:
    # Whatever lies about on the builder's disk stays there.
    kernels = source / "kernels"
    kernels.mkdir(exist_ok=True)
    (kernels / "planted.cuh").write_text("// a kernel\n")
    for stray in (
        "kernels/planted.cubin",
        "kernels/notes.txt",
        "tapegrad/stray.dat",
        "tapegrad/profile/stray.html",
        "stray.py",
        "tests/stray.py",
        "bench/stray.py",
    ):
        (source / stray).parent.mkdir(exist_ok=True)
        (source / stray).write_text("")
    with build_wheel(source, tmp_path / "out") as wheel:
        names = set(wheel.namelist())
    assert [name for name in sorted(names) if not SHIPPED.fullmatch(name)] == []
    modules = {path.relative_to(source).as_posix() for path in (source / "tapegrad").rglob("*.py")}
    sources = [*kernels.glob("*.cu"), *kernels.glob("*.cuh")]
    headers = {f"tapegrad/_kernels/{path.name}" for path in sources}
    profile = source / "tapegrad" / "profile"
    data = [*profile.glob("*/schema.json"), source / "tapegrad" / "tracing" / "schema.sql"]
    data += [p for p in (profile / "viewer" / "assets").rglob("*") if p.is_file()]
    others = {path.relative_to(source).as_posix() for path in data} | {"tapegrad/py.typed"}
    assert len(data) > 10
    assert {name for name in names if ".dist-info/" not in name} == modules | headers | others
    assert "tapegrad/_kernels/planted.cuh" in headers


@pytest.mark.slow
def test_wheel_builds_while_there_is_no_kernel(source: Path, tmp_path: Path) -> None:
    shutil.rmtree(source / "kernels", ignore_errors=True)
    with build_wheel(source, tmp_path / "out") as wheel:
        assert "tapegrad/__init__.py" in wheel.namelist()
        assert not any(name.startswith("tapegrad/_kernels") for name in wheel.namelist())


@pytest.mark.slow
def test_wheel_metadata(source: Path, tmp_path: Path) -> None:
    with build_wheel(source, tmp_path / "out") as wheel:
        about = metadata(wheel)
        entry_points = [wheel.read(name).decode() for name in wheel.namelist() if name.endswith("entry_points.txt")]
    assert about["Version"] == "1.2.3"
    assert about["Requires-Python"] == ">=3.11"
    core = {re.match(r"[\w-]+", line)[0] for line in about.get_all("Requires-Dist") if "extra ==" not in line}
    assert core == {"numpy", "scipy", "ml-dtypes", "threadpoolctl", "click", "rich", "psutil"}
    extras = "cuda12 cuda13 cudnn cudnn12 cudnn13 onednn native kernels mpi nccl12 nccl13 test docs dev"
    assert set(about.get_all("Provides-Extra")) == set(extras.split())
    assert ["tapegrad = tapegrad.profile.cli:main" in text for text in entry_points] == [True]


def git(folder: Path, *arguments: str) -> None:
    settings = ("user.name=x", "user.email=x@example.org", "commit.gpgsign=false", "tag.gpgsign=false")
    options = [option for setting in settings for option in ("-c", setting)]
    subprocess.run(["git", *options, *arguments], cwd=folder, check=True, capture_output=True, timeout=60)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_versions_come_from_tags(source: Path, tmp_path: Path) -> None:
    """Without a history from a fallback, so that an archive builds; without a tag they count from there."""

    def version(name: str) -> str:
        with build_wheel(source, tmp_path / name, version="") as wheel:
            return metadata(wheel)["Version"]

    assert version("archive") == fallback()
    git(source, "init", "-q"), git(source, "add", "pyproject.toml"), git(source, "commit", "-qm", "one")
    assert re.fullmatch(rf"{re.escape(fallback())[:-1]}\d+\+g\w+(\.d\d+)?", version("untagged"))
    git(source, "add", "."), git(source, "commit", "-qm", "two"), git(source, "tag", "v7.8.9")
    assert version("tagged") == "7.8.9"


def fallback() -> str:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return settings["tool"]["hatch"]["version"]["fallback-version"]


def test_one_version_is_next() -> None:
    """The changelog's newest, the one to cite, and the one that untagged files are of."""
    newest = re.search(r"^## \[(\d[^]]*)\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    cited = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert newest is not None and fallback() == f"{newest[1]}.dev0"
    assert f"\nversion: {newest[1]}\n" in cited and f"\ndate-released: {newest[2]}\n" in cited


@pytest.mark.slow
def test_the_package_works_from_the_wheel_alone(source: Path, tmp_path: Path) -> None:
    with build_wheel(source, tmp_path / "out") as wheel:
        wheel.extractall(tmp_path / "site")
    code = (
        "import tapegrad; assert tapegrad.__version__ == '1.2.3' and '__version__' in dir(tapegrad)\n"
        "print(tapegrad.__file__, tapegrad.sin(1.0)); from tapegrad.profile.viewer.html import page\n"
        "from tapegrad.tracing.run import Run; from tapegrad.profile.cli import main\n"
        "about = {'device': {'name': 'cpu'}, 'outcome': {'kind': 'finished', 'code': 0}}\n"
        "assert '<html' in page(Run(about | {'tapegrad': '0', 'program': 'x', 'argv': []})); main(['--help'])"
    )
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(str(tmp_path / "site"))
    assert "demo" in result.stdout


@pytest.mark.parametrize(("lock", "wanted"), [("False", 1), ("True", 0)])
def test_a_python_without_the_lock_is_refused(lock: str, wanted: int) -> None:
    code = f"import sys; sys._is_gil_enabled = lambda: {lock}; import tapegrad; print(tapegrad.sin(0.0))"
    where = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", code], env=where, capture_output=True, text=True, timeout=60)
    assert result.returncode == wanted and ("PYTHON_GIL=1" in result.stderr) == bool(wanted), result.stderr


def test_readme_states_both_ways_to_install() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "python3 -m venv .venv && .venv/bin/pip install -e . && .venv/bin/tapegrad demo --quick\n" in text
    assert "python3 -m venv .venv && .venv/bin/pip install -e '.[test]' && .venv/bin/pytest\n" in text


def test_code_blocks_run_in_one_session_and_point_at_their_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    blocks = ["python\nx = 2", "bash\nexit 1", "python\n>>> x + 1\n3\n>>> y = 5", "python\nassert y == 5"]
    page.write_text("# Page\n" + "".join(f"\n```{block}\n```\n" for block in blocks))
    assert code_blocks.run(page) == 0
    assert [line.split(" (")[0] for line in capsys.readouterr().out.splitlines()] == [
        f"{page}:{n}: ok" for n in (4, 12, 18)
    ]


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("x = 1\nraise ValueError(x)", 'page.md", line 5'),
        (">>> 1 + 1\n3", "Expected:\n    3\nGot:\n    2"),
        ("import warnings\nwarnings.warn('old')", "UserWarning: old"),
    ],
)
def test_a_failing_readme_block_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], block: str, message: str
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n```python\n{block}\n```\n")
    assert code_blocks.run(page) == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert f"{page}:4: FAILED" in captured.out


def test_a_readme_without_code_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n```bash\nls\n```\n")
    assert code_blocks.run(page) == 1
