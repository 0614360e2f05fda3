"""Versions of the packages that decide what a run computes, as the driver has them."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

PACKAGES = (
    *("megasync", "torch", "megatron-core", "transformer-engine", "sglang", "sglang-router", "ray"),
    *("transformers", "numpy"),
)


def package_versions() -> dict[str, str]:
    """Python's version and those of the packages that are installed."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions
