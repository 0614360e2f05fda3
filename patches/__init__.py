"""Deviations from upstream packages, one file each: what is bent, for which exact versions, and why.

A patch is applied inside trainer ranks, by `apply_all`, inside SGLang servers, by their launcher or megasync's plugin, or by
what starts Ray, and refuses versions that it was not written for. Every file here has a test that fails once upstream no longer needs the
patch; `megasync doctor` lists which are active. Importing this package imports nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version


class PatchError(RuntimeError):
    """A patch met a package, or a version of it, that it was not written for."""


@dataclass(frozen=True)
class Patch:
    """One deviation. ``apply`` may be called once per process; ``kinds`` are the devices that need it.

    ``versions`` need it, ``mended`` are supported and do without. An ``optional`` package need not be there at all.
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
        """The version of the package that is there."""
        try:
            return version(self.package)
        except PackageNotFoundError:
            return None

    def needed(self) -> bool:
        """Whether the installed package needs it. Raises PatchError for a version that this patch does not know."""
        found = self.installed()
        if found is None:
            if self.optional:
                return False
            raise PatchError(f"patch {self.name!r} needs {self.package}, which is not installed")
        # A local build tag ("2.13.0+cpu") says how a version was built, not which version it is.
        release = found.split("+")[0]
        if release not in (*self.versions, *self.mended):
            raise PatchError(
                f"patch {self.name!r} was written for {self.package} {' or '.join(self.versions)}, and {found} is "
                f"installed. Install a supported version, or check that the patch is still right and add the version."
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
    """Applies the patches that device ``kind`` ("cpu" or "cuda") needs; those already applied are left alone.

    Raises:
        PatchError: an unknown version. All versions are checked before the first patch is applied.
    """
    due = [patch for patch in registered() if kind in patch.kinds and patch.name not in _active]
    for patch in [patch for patch in due if patch.needed()]:
        patch.apply()
        _active.append(patch.name)


def active() -> tuple[str, ...]:
    """Names of the patches applied in this process."""
    return tuple(_active)
