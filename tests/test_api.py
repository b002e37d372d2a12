"""The package's names: loaded at their first use, the same whatever was imported before, and nothing without need."""

from __future__ import annotations

import copy
import inspect
import operator
import pickle
import pkgutil
import subprocess
import sys
from types import ModuleType

import pytest

import tapegrad as tg

MODULES = {name for name in tg.__all__ if isinstance(getattr(tg, name), ModuleType)}
LIGHT = ("numpy", "cupy", "rich", "matplotlib", "tapegrad.ops")


def fresh(code: str) -> str:
    """What ``code`` prints in an interpreter of its own, in which warnings are errors."""
    result = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def loaded(code: str) -> list[str]:
    return fresh(f"import sys\n{code}\nprint(*[name for name in {LIGHT} if name in sys.modules])").split()


def test_importing_the_package_loads_nothing() -> None:
    assert loaded("import tapegrad\nassert tapegrad.__version__\nassert not hasattr(tapegrad, '__wrapped__')") == []
    assert loaded("from tapegrad.errors import TapegradError") == []
    assert loaded("from tapegrad import errors\nimport tapegrad.errors") == []


@pytest.mark.slow
@pytest.mark.parametrize("use", ["tapegrad.sin", "tapegrad.e", "dir(tapegrad)", "tapegrad.__all__", "tapegrad.device"])
def test_the_first_use_loads_every_name(use: str) -> None:
    code = f"""
import types, tapegrad
{use}
assert type(tapegrad) is types.ModuleType
missing = [name for name in tapegrad.__all__ if name not in vars(tapegrad)]
assert not missing, missing
import sys"""
    assert {"numpy", "tapegrad.ops"} == set(loaded(code))


@pytest.mark.parametrize("option", ["--help", "-h", "--version"])
def test_the_command_line_loads_neither_numpy_nor_rich(option: str) -> None:
    code = f"""
import sys
sys.argv = ["tapegrad", {option!r}]
from tapegrad.profile.cli import main
try:
    main()
except SystemExit as end:
    assert not end.code"""
    assert fresh(code + f"\nprint('loaded', *[name for name in {LIGHT} if name in sys.modules])").endswith("loaded")


def test_every_public_name_is_there() -> None:
    assert len(tg.__all__) > 200
    for name in tg.__all__:
        assert getattr(tg, name) is vars(tg)[name]
        assert name in dir(tg)
    space: dict[str, object] = {}
    exec("from tapegrad import *", space)
    assert {name for name in space if not name.startswith("__")} == set(tg.__all__)


def test_dir_lists_public_names_alone() -> None:
    assert {name for name in dir(tg) if not name.startswith("_")} == set(tg.__all__)
    assert not {name for name in dir(tg) if name.startswith("_") and not name.startswith("__")}
    assert tg.__all__.count("tensor") == 1 and len(tg.__all__) == len(set(tg.__all__))
    shown = fresh("import tapegrad\nprint('sin' in dir(tapegrad), 'buffer' in dir(tapegrad), 'cell' in dir(tapegrad))")
    assert shown == "True False False"


@pytest.mark.parametrize(
    "name", sorted(MODULES | {"errors", "policies", "nn.functional", "nn.initializers", "optim.schedules"})
)
def test_dir_of_a_module_lists_public_names_alone(name: str) -> None:
    module = operator.attrgetter(name)(tg)
    shown = {name for name in dir(module) if not name.startswith("_")}
    if name != "errors":
        assert shown == set(module.__all__)
    assert shown and all(hasattr(module, name) for name in dir(module))
    assert not shown & {"Any", "Callable", "annotations", "explain", "open_to_users", "layer", "ledger", "loader"}


def test_tensor_is_a_function_and_a_module() -> None:
    code = """
from tapegrad.tensor import Tensor
import tapegrad as tg
import tapegrad.tensor
t = tg.tensor([1, 2])
assert type(t) is Tensor is tg.Tensor and t.dtype == "int64"
assert tg.tensor([1.0], "float64", device="cpu").dtype == "float64"
x = tg.asarray([2.0])
assert tg.tensor(x) is not x
with tg.GradientTape() as tape:
    tape.watch(x)
    y = tg.tensor(x) * 3.0
print(tape.gradient(y, x))"""
    assert fresh(code) == "[3.]"


def test_functions_that_share_their_names_with_submodules() -> None:
    submodules = {found.name for found in pkgutil.iter_modules(tg.__path__)}
    functions = {"device", "explain", "tensor"}
    assert {n for n in submodules & set(tg.__all__) if not isinstance(getattr(tg, n), ModuleType)} == functions
    for name in submodules & set(tg.__all__) - functions:
        assert getattr(tg, name) is sys.modules[f"tapegrad.{name}"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_names_are_the_same_whatever_is_imported_first() -> None:
    """Every module and room at the top is imported first, each in a process of its own."""
    engine = [found.name for found in pkgutil.iter_modules(tg.__path__, "tapegrad.")]
    engine = [name for name in engine if name.rpartition(".")[2] not in ("profile", "__main__")]
    assert len(engine) > 20
    code = f"""
import importlib, os, sys, types
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # a process of many threads had better not fork
import numpy  # once for all

def check(first):
    importlib.import_module(first)
    import tapegrad as tg
    for name in ("device", "explain", "primitive", "tensor"):
        assert type(getattr(tg, name)) is types.FunctionType, (name, getattr(tg, name))
    for name in ("random", "memory", "nn", "optim", "testing", "errors", "linalg", "fft", "special", "sparse"):
        assert getattr(tg, name) is sys.modules["tapegrad." + name], name
    assert all(getattr(tg, name) is vars(tg)[name] for name in tg.__all__)
    assert (tg.Variable(3.0) * 2).item() == 6 and type(tg) is types.ModuleType

running = 0
for first in {engine}:
    if running == (os.cpu_count() or 1):
        running -= bool(os.wait())
    if not os.fork():
        try:
            check(first)
        except BaseException as error:
            print(first, type(error).__name__, error, flush=True)
        finally:
            os._exit(0)
    running += 1
while running:
    running -= bool(os.wait())
"""
    assert fresh(code) == ""


@pytest.mark.slow
def test_imports_inside_the_package_work_while_it_is_loading() -> None:
    assert fresh(
        "from tapegrad import ops, nest; from tapegrad.core import buffer\nprint(ops.__name__, nest.__name__)"
    ) == ("tapegrad.ops tapegrad.nest")
    for direct in ("nn", "memory.policies"):
        assert fresh(f"import tapegrad.{direct}\nprint(tapegrad.device.__name__)") == "device"


@pytest.mark.parametrize("first", ["tape", "nn.core", "memory.tiers", "memory.policies", "program"])
def test_a_module_is_found_by_the_name_that_it_had(first: str) -> None:
    """Programs and pickles hold such names; what each gives is the module of today, whatever is imported first."""
    code = f"""
import importlib, pickle, sys
found = importlib.import_module("tapegrad.{first}")
import tapegrad as tg
for old, now in tg._MOVED.items():
    assert importlib.import_module("tapegrad." + old) is sys.modules["tapegrad." + now] is not None
assert found is sys.modules["tapegrad." + tg._MOVED["{first}"]] and type(found.__spec__.loader).__name__ != "type"
assert type(pickle.loads(b"ctapegrad.nn.core\\nDense\\n.")(2)) is tg.nn.Dense
from tapegrad.tape import GradientTape
assert GradientTape is tg.GradientTape
before, now = map(importlib.import_module, ("tapegrad.memory.budget.manager", "tapegrad.remat.budget.manager"))
assert before is now and tg.memory.policies is importlib.import_module("tapegrad.memory.policies")
try:
    import program
except ImportError as e:
    print(e)
try:
    import tapegrad.no_module_of_before
except ImportError as e:
    print(e)"""
    assert fresh(code) == "No module named 'program'\nNo module named 'tapegrad.no_module_of_before'"


def test_two_threads_at_once() -> None:
    code = """
import sys, threading
sys.setswitchinterval(1e-6)
import tapegrad
start, seen = threading.Barrier(8), []
uses = ["sin", "device", "random", "explain", "nn", "Variable", "__all__", "memory"]
def use(name):
    start.wait()
    try:
        seen.append((name, getattr(tapegrad, name)))
    except BaseException as error:
        seen.append((name, error))
threads = [threading.Thread(target=use, args=(name,)) for name in uses]
for t in threads: t.start()
for t in threads: t.join()
assert len(seen) == 8
for name, found in seen:
    assert found is getattr(tapegrad, name), (name, found)
print("same")"""
    assert fresh(code) == "same"


@pytest.mark.parametrize("name", ["nonsense", "__wrapped__", "a.b", "errors.x", "", "ä b"])
def test_a_name_that_is_not_there(name: str) -> None:
    assert not hasattr(tg, name)
    with pytest.raises(AttributeError, match="^module 'tapegrad' has no attribute") as caught:
        getattr(tg, name)
    assert str(caught.value) == f"module 'tapegrad' has no attribute {name!r}"
    assert caught.value.name == name and caught.value.obj is tg


def test_a_name_that_is_not_there_in_a_fresh_package() -> None:
    code = "import tapegrad\nprint(hasattr(tapegrad, 'nonsense'), hasattr(tapegrad, 'a.b'), hasattr(tapegrad, ''))"
    assert fresh(code) == "False False False"
    with pytest.raises(ImportError, match="cannot import name 'nonsense' from 'tapegrad'"):
        exec("from tapegrad import nonsense")


def test_what_the_user_has_set_stays() -> None:
    assert fresh("import tapegrad\ntapegrad.sin = 1\ntapegrad.cos\nprint(tapegrad.sin)") == "1"


def test_names_are_pickled_copied_and_documented() -> None:
    for name in ("softmax", "explain", "device", "GradientTape", "Variable", "float32"):
        value = getattr(tg, name)
        assert pickle.loads(pickle.dumps(value)) == value and copy.deepcopy(value) == value
    assert pickle.loads(pickle.dumps(tg.Variable([1.0, 2.0]))).numpy().tolist() == [1.0, 2.0]
    shown = fresh("import tapegrad as tg\nhelp(tg.sin)\nhelp('tapegrad.explain')")
    assert inspect.getdoc(tg.sin).splitlines()[0] in shown and "explain" in shown


def test_doctest_finds_the_package() -> None:
    code = "import doctest, tapegrad\nprint(doctest.testmod(tapegrad).failed)"
    assert fresh(code) == "0"
