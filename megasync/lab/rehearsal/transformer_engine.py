"""Imports Transformer Engine's real Python over a stand-in for its compiled extension."""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from typing import Any

import torch

from megasync.errors import ConfigError
from megasync.lab.rehearsal import cuda, graphs, te_extension
from megasync.lab.rehearsal.packages import add_to_path

# The version whose compiled extension `te_extension` stands in for.
VERSION = "2.20.2"

# Modules that define Triton kernels or ONNX operators at import. No layer of megasync's configurations calls them.
_UNUSED = (
    "megatron.core.transformer.moe.ops.paged_stash",
    "transformer_engine.pytorch.onnx_extensions",
    *(
        f"transformer_engine.pytorch.triton.{name}"
        for name in ("cross_entropy", "grouped_dbias_dscales", "mhc", "pad", "permutation")
    ),
)


class _UnusedModule(types.ModuleType):
    """A module whose functions can be imported and raise when called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"{self.__name__} has no attribute {name!r}")

        def refuse(*_: Any, **__: Any) -> Any:
            raise NotImplementedError(f"{self.__name__}.{name} was called, but a rehearsal has no stand-in for it")

        return refuse


class _UnusedFinder(Loader, MetaPathFinder):
    """Finds the modules of `_UNUSED` instead of their files."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in _UNUSED else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _UnusedModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install(device: torch.device) -> None:
    """Makes `import transformer_engine.pytorch` work in this process, with layers on ``device`` (cpu or meta).

    Takes the Python of an installed Transformer Engine, or else that of launch/rehearsal.lock. Call it before anything
    imports Transformer Engine, or Megatron's layers of it. Later calls only change the device.

    Raises ConfigError if it is called too late, or Transformer Engine is missing or has another version than `VERSION`.
    """
    cuda.install(device)
    graphs.install()
    if sys.modules.get("transformer_engine_torch") is te_extension:
        return
    late = "megatron.core.extensions.transformer_engine"
    for module in ("transformer_engine", late):
        if module in sys.modules:
            raise ConfigError(f"{module} was imported before the rehearsal began; call install() first")
    if importlib.util.find_spec("transformer_engine") is None:
        add_to_path("transformer-engine", VERSION)
    if (installed := version("transformer-engine")) != VERSION:
        raise ConfigError(
            f"transformer-engine {installed} is installed, but the stand-in for its extension is written for "
            f"{VERSION}; install that version to rehearse"
        )
    sys.modules["transformer_engine_torch"] = te_extension
    sys.meta_path.insert(0, _UnusedFinder())
    _import_package()


def _import_package() -> None:
    """Imports the package without its compiled libraries.

    Its `__init__` imports everything. So the part that loads the libraries is imported first, and changed.
    """
    spec = importlib.util.find_spec("transformer_engine")
    assert spec is not None and spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["transformer_engine"] = package
    # Read at import: without the first, the libraries are loaded; without the second, torch's compiler is used.
    flags = {"NVTE_PROJECT_BUILDING": "1", "NVTE_TORCH_COMPILE": "0"}
    before = {name: os.environ.get(name) for name in flags}
    os.environ.update(flags)
    try:
        vars(import_module("transformer_engine.common"))["load_framework_extension"] = _loaded
        spec.loader.exec_module(package)
    except BaseException:
        del sys.modules["transformer_engine"]
        raise
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    # The package ignores an ImportError of this part.
    import_module("transformer_engine.pytorch")
    cuda.redirect("transformer_engine")
    # Layers that are recomputed in FP8 read the state of the GPU's random numbers.
    vars(import_module("transformer_engine.pytorch.distributed")).update(
        _get_cuda_rng_state=lambda *_, **__: torch.get_rng_state(),
        _set_cuda_rng_state=lambda state, *_, **__: torch.set_rng_state(state),
    )


def _loaded(framework: str) -> None:
    if framework != "torch":
        raise ImportError(f"a rehearsal has no extension for {framework}")
