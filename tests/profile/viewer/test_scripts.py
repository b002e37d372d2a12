"""The page's scripts: their rules, their joining into one, and their unit tests, which node runs."""

from __future__ import annotations

import json
import random
import re
import subprocess
from collections import Counter
from importlib import resources
from pathlib import Path

import pytest

from tapegrad.profile.viewer import html
from tapegrad.sizes import format_bytes

ASSETS = Path(str(resources.files("tapegrad.profile.viewer").joinpath("assets")))
TESTS = Path(__file__).parent / "js"
# Ways for text of a run to become markup or code, and ways to the network.
FORBIDDEN = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|setTimeout\(['\"]|\bfetch\(|"
    r"XMLHttpRequest|WebSocket|EventSource|sendBeacon|import\(|https?://|</script|<!--"
)


def test_every_module_is_joined_after_those_it_imports_from() -> None:
    assert sorted(html.MODULES) == sorted(path.stem for path in ASSETS.glob("*.mjs"))
    for place, name in enumerate(html.MODULES):
        for names, module in re.findall(
            r'^import \{([^}]*)\} from "\./(\w+)\.mjs";', html.asset(f"{name}.mjs"), re.MULTILINE
        ):
            assert module in html.MODULES[:place], (name, module)
            exported = set(
                re.findall(
                    r"^export (?:async )?(?:function|const|class) (\w+)", html.asset(f"{module}.mjs"), re.MULTILINE
                )
            )
            assert {n.strip() for n in names.split(",") if n.strip()} <= exported, (name, module)


def test_no_two_modules_use_one_name() -> None:
    # They share one scope in the page; a second function of a name would silently replace the first.
    names = re.findall(r"^(?:async )?(?:function|const|let|class) (\w+)", html.script(), re.MULTILINE)
    assert [name for name, times in Counter(names).items() if times > 1] == []
    assert not re.search(r"^(import|export)\b", html.script(), re.MULTILINE)


def test_no_script_makes_markup_of_text_or_asks_the_network() -> None:
    for path in ASSETS.iterdir():
        if path.suffix == ".mjs":
            assert FORBIDDEN.findall(path.read_text(encoding="utf-8")) == [], path.name
    assert FORBIDDEN.findall("x.innerHTML = eval(y)") == ["innerHTML", "eval("]


def test_no_file_is_long() -> None:
    assert [path.name for path in ASSETS.iterdir() if path.read_text(encoding="utf-8").count("\n") > 300] == []


def test_the_joined_script_is_well_formed(node: str, tmp_path: Path) -> None:
    (tmp_path / "page.js").write_text(html.script(), encoding="utf-8")
    subprocess.run([node, "--check", str(tmp_path / "page.js")], check=True, timeout=60, capture_output=True)


@pytest.mark.parametrize("file", sorted(TESTS.glob("*.test.mjs")), ids=lambda path: path.name)
def test_unit_tests_of_the_scripts(node: str, file: Path) -> None:
    result = subprocess.run([node, "--test", str(file)], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    assert int(re.search(r"^# pass (\d+)", result.stdout, re.MULTILINE)[1]) > 0


def test_sizes_read_as_on_the_command_line(node: str) -> None:
    chance = random.Random(0)
    sizes = [
        0,
        1,
        511,
        512,
        1023,
        1024,
        1152,
        1310720,
        1792,
        1023 << 10,
        (1 << 20) - 1,
        (1 << 20) - 6,
        5 << 40,
        3 << 50,
    ]
    sizes += [chance.randrange(1 << chance.randrange(1, 51)) for _ in range(2000)]
    sizes += [
        (2 * chance.randrange(20000) + 1) << chance.choice((5, 7, 15, 17, 27)) for _ in range(2000)
    ]  # many halfway
    module = (ASSETS / "format.mjs").as_uri()
    code = (
        f"import {{ formatBytes }} from '{module}'; console.log(JSON.stringify({json.dumps(sizes)}.map(formatBytes)))"
    )
    result = subprocess.run([node, "--input-type=module", "-"], input=code, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == [format_bytes(n) for n in sizes]
