"""tapegrad: a tape autodiff engine on arrays, inside a memory you choose.

A node is a recipe; a buffer is a cache of what the recipe yields.  ``docs/`` tells the rest.

The public names are those of ``_api.py``.  All of them are loaded when the first is used, so that what needs none of
them (``tapegrad --help``) does not wait for NumPy.
"""

import _thread
import importlib as _importlib
import importlib.util as _util
import sys as _sys
import types as _types
import typing as _typing

if not getattr(_sys, "_is_gil_enabled", lambda: True)():
    raise ImportError(
        "tapegrad is not tested in a Python without the global interpreter lock, and might be silently wrong there: "
        "start Python with PYTHON_GIL=1 or -X gil=1, or use one that has the lock"
    )

# Submodules whose names mean something else to users, and those that are public themselves.
_SHADOWED = {"device", "explain", "remat", "tensor"}
_MODULES = {
    "distributed", "fft", "integrate", "linalg", "memory", "nn", "optim", "random", "signal", "sparse", "special",
    "stats", "testing", "training", "tree",
}  # fmt: skip
# Names of the array API standard that say what a namespace is; in no ``__all__``.
_PROTOCOL = {"__array_api_version__", "__array_namespace_info__"}
# Where modules and packages were whose names programs and pickles hold, and where they are.
_MOVED = {
    "memory.budget": "remat.budget", "memory.checkpoint": "remat.checkpoint", "memory.ledger": "tracing",
    "memory.ledger.contents": "tracing.program_summary", "memory.ledger.figures": "tracing.metrics",
    "memory.offload": "remat.offload", "memory.plan": "remat.plan", "memory.policies": "remat.policies",
    "memory.predict": "remat.predict", "memory.recompute": "remat.checkpoint.recompute",
    "memory.report": "remat.report", "memory.schedules": "remat.schedules",
    "memory.sequential": "remat.checkpoint.sequential", "memory.tiers": "remat.offload.tiers",
    "nn.activations": "nn.functional.activations",
    "nn.attention": "nn.layers.attention", "nn.convolution": "nn.layers.convolution", "nn.core": "nn.layers.core",
    "nn.layer": "nn.layers.layer", "nn.saving": "nn.layers.saving",
    "ops.activation": "ops.elementwise.activation", "ops.dtype_functions": "ops.interop.dtype_functions",
    "program": "capture", "tape": "autodiff.tape",
}  # fmt: skip
# Threads in which the public names are being loaded.
_loading: set[int] = set()


class _Moved:
    """Finds and loads a module by a name that it had."""

    @staticmethod
    def find_spec(name: str, path: _typing.Any = None, target: _typing.Any = None) -> _typing.Any:
        if _moved(name) != name:
            return _util.spec_from_loader(name, _typing.cast(_typing.Any, _Moved))
        return None

    @staticmethod
    def create_module(spec: _typing.Any) -> None:
        """The usual one, which gives way to the one that is there."""

    @staticmethod
    def exec_module(module: _types.ModuleType) -> None:
        _sys.modules[module.__name__] = _importlib.import_module(_moved(module.__name__))


def _moved(name: str) -> str:
    """The name that the module ``name`` has now: the longest part of it that has moved decides."""
    parts = name.removeprefix(f"{__name__}.").split(".") if name.startswith(f"{__name__}.") else []
    for count in range(len(parts), 0, -1):
        if place := _MOVED.get(".".join(parts[:count])):
            return ".".join([__name__, place, *parts[count:]])
    return name


_sys.meta_path.insert(0, _typing.cast(_typing.Any, _Moved))  # or a package would be searched under its old name


class _Unloaded(_types.ModuleType):
    """This package until its names are loaded."""

    def __setattr__(self, name: str, value: _typing.Any) -> None:
        if name in _SHADOWED and isinstance(value, _types.ModuleType):
            return  # a submodule was imported; the function of its name will have that name
        _types.ModuleType.__setattr__(self, name, value)  # not super(): a thread may just have changed the class


def _version() -> str:
    """The version that is installed; looked up when somebody asks."""
    metadata = _importlib.import_module("importlib.metadata")
    try:
        return metadata.version(__name__)
    except metadata.PackageNotFoundError:
        return "0+unknown"  # the bare files


def _load() -> list[str]:
    """Bind every public name here; their list.  Threads that come at once wait for each other at the import."""
    me = _thread.get_ident()
    _loading.add(me)
    try:
        api = _importlib.import_module("tapegrad._api")
    finally:
        _loading.discard(me)
    here = globals()
    for name in (*api.__all__, *_PROTOCOL):
        here.setdefault(name, getattr(api, name))
    here.setdefault("__all__", api.__all__)
    _sys.modules[__name__].__class__ = _types.ModuleType  # from now on a name costs what it costs in any module
    return api.__all__


def load_ipython_extension(shell: _typing.Any) -> None:
    """``%load_ext tapegrad`` in a notebook: a cell that begins with ``%%tapegrad`` is profiled."""
    _importlib.import_module("tapegrad.profile.notebook").load(shell)


if _typing.TYPE_CHECKING:
    __version__: str
    from tapegrad._api import *  # noqa: F403
    from tapegrad._api import __all__ as __all__
    from tapegrad.ops import *  # noqa: F403  # mypy does not see into a sum of lists
else:

    def __getattr__(name):
        if name == "__version__":
            return globals().setdefault(name, _version())
        if name.isidentifier() and (name in {"__all__", *_PROTOCOL} or not name.startswith("__")):
            # Imports inside the package ask for submodules, also while the public names are loading.
            if name not in _SHADOWED and (name not in _MODULES or _thread.get_ident() in _loading):
                if _util.find_spec(f"{__name__}.{name}"):
                    return _importlib.import_module(f"{__name__}.{name}")
            if name in {*_load(), "__all__", *_PROTOCOL}:
                return globals()[name]
        spellings = _importlib.import_module(f"{__name__}.spellings")
        message = f"module {__name__!r} has no attribute {name!r}{spellings.missing_from_package(name)}"
        raise AttributeError(message, name=name, obj=_sys.modules[__name__])

    def __dir__():
        return sorted({*_load(), *_PROTOCOL, "__version__", *(name for name in globals() if name.startswith("__"))})

    _sys.modules[__name__].__class__ = _Unloaded
