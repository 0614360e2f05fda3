"""Modules that can be imported and looked into, and that say what is missing when something in them is called.

SGLang imports triton, torchvision and sgl_kernel on every start, also where it then calls none of them. Attributes
with a capital are empty classes (base classes, annotations); every other attribute is a module of the same kind, which
works as a plain decorator too, because decorators run at import.
"""

import sys
import types
from importlib.machinery import ModuleSpec

_installed = set()


class AbsentModule(types.ModuleType):
    def __init__(self, name):
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(f"{self.__name__}.{name}")
        path = f"{self.__name__}.{name}"
        if name[0].isupper():
            value = type(name, (), {"__module__": self.__name__, "__init__": _accept_anything})
        else:
            value = sys.modules.setdefault(path, AbsentModule(path))
        setattr(self, name, value)
        return value

    def __call__(self, *args, **kwargs):
        if len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]
        raise RuntimeError(
            f"{self.__name__} was called, but on this machine it is a stand-in that can only be imported"
        )

    # Annotations such as `tl.dtype | None`.
    def __or__(self, other):
        return object

    __ror__ = __or__

    def __bool__(self):
        return False


def _accept_anything(self, *args, **kwargs):
    pass


class _SubmoduleFinder:
    """Answers `import package.anything` for the packages that were installed."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        package, _, rest = name.partition(".")
        return ModuleSpec(name, cls, is_package=True) if rest and package in _installed else None

    @staticmethod
    def create_module(spec):
        return AbsentModule(spec.name)

    @staticmethod
    def exec_module(module):
        pass


def install(package):
    """Makes every submodule of `package` importable; returns the `__getattr__` for the package itself."""
    _installed.add(package)
    if _SubmoduleFinder not in sys.meta_path:
        sys.meta_path.append(_SubmoduleFinder)
    root = AbsentModule(package)
    return root.__getattr__
