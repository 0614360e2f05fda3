"""Runtime patches of upstream packages, one per file, each with its exact versions and its reason.

Patches are applied in trainer ranks (by `apply_all`), in SGLang servers (by their launcher or megasync's plugin) and by
the code that starts Ray. A patch refuses versions that it was not written for. Every patch has a test that fails once
upstream no longer needs it. `megasync doctor` lists the active patches. The package itself imports no
upstream package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version


class PatchError(RuntimeError):
    """A patch cannot be applied: its package is missing, has an unsupported version, or lacks a requirement."""


@dataclass(frozen=True)
class Patch:
    """One patch. ``apply`` may be called once per process; ``kinds`` are the kinds of device that need it.

    ``versions`` need the patch; ``mended`` versions are supported without it. An ``optional`` package may be missing.
    """

    name: str
    package: str
    versions: tuple[str, ...]
    reason: str
    apply: Callable[[], None]
    kinds: tuple[str, ...] = ("cpu",)
    mended: tuple[str, ...] = ()
    optional: bool = False

    def installed(self) -> str | None:
        """The installed version of the package; None if it is missing."""
        try:
            return version(self.package)
        except PackageNotFoundError:
            return None

    def needed(self) -> bool:
        """Whether the installed package needs the patch. Raises PatchError for an unknown version."""
        found = self.installed()
        if found is None:
            if self.optional:
                return False
            raise PatchError(f"patch {self.name!r} needs {self.package}, which is not installed")
        # A local build tag ("2.13.0+cpu") identifies the build, not the version.
        release = found.split("+")[0]
        if release not in (*self.versions, *self.mended):
            raise PatchError(
                f"patch {self.name!r} was written for {self.package} {' or '.join(self.versions)}, but {found} is "
                f"installed. Install a supported version, or check that the patch is still correct and add the version."
            )
        return release in self.versions


# In order of application.
MODULES = (
    "torch_cuda_calls",
    "megatron_rng_state",
    "megatron_cuda_literals",
    "megatron_tensor_types",
    "megatron_router_gemm",
    "megatron_latent_te",
)

_active: list[str] = []


def registered() -> tuple[Patch, ...]:
    """All patches, in order of application."""
    return tuple(import_module(f"{__name__}.{module}").PATCH for module in MODULES)


def apply_all(kind: str) -> None:
    """Applies the patches that device ``kind`` ("cpu" or "cuda") needs and that are not active yet.

    Raises:
        PatchError: a version is unknown. All versions are checked before the first patch is applied.
    """
    due = [patch for patch in registered() if kind in patch.kinds and patch.name not in _active]
    for patch in [patch for patch in due if patch.needed()]:
        patch.apply()
        _active.append(patch.name)


def active() -> tuple[str, ...]:
    """Names of the patches applied in this process."""
    return tuple(_active)
