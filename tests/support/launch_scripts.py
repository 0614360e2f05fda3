"""Python programs of launch/, as modules."""

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

LAUNCH = Path(__file__).parents[2] / "launch"


@cache
def program(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, LAUNCH / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
