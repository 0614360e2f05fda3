"""`pip install megasync[gpu]` has a solution on Linux for each Python that is supported. Only metadata is fetched."""

import os
import subprocess
import sys
from importlib import import_module
from importlib.metadata import requires
from pathlib import Path
from pkgutil import iter_modules

import megasync_patches
import pytest
from packaging.requirements import Requirement

# Every patch there is, also those that servers, Ray and verl apply by themselves.
PATCHES = [
    module.PATCH
    for info in iter_modules(megasync_patches.__path__)
    if hasattr(module := import_module(f"megasync_patches.{info.name}"), "PATCH")
]
ROOT = Path(__file__).parents[2]
# SGLang's wheels want a glibc of 2.34: Ubuntu 22.04, RHEL 9, Debian 12, or newer.
PLATFORM = "x86_64-manylinux_2_34"
# Megatron that the trainer knows, newest for each Python.
MEGATRON = {"3.11": "0.16.1", "3.12": "0.19.2"}
UNREACHABLE = 2
SECONDS = 240


def test_patches_accept_the_versions_that_sglang_pins():
    """Needs no registry: SGLang's own metadata name the exact torch that the gpu extra installs."""
    pins = {pin.name: pin.specifier for pin in map(Requirement, requires("sglang")) if str(pin.specifier)[:2] == "=="}
    assert "torch" in pins
    for patch in PATCHES:
        if patch.package in pins:
            assert any(release in pins[patch.package] for release in (*patch.versions, *patch.mended)), patch.name


@pytest.mark.processes
@pytest.mark.parametrize("python", MEGATRON)
def test_the_gpu_extra_resolves(python):
    options = ["--extra", "gpu", "--python-version", python, "--python-platform", PLATFORM, "--no-header", "--quiet"]
    command = [sys.executable, "-m", "uv", "pip", "compile", "pyproject.toml", *options, "--no-annotate"]
    env = {**os.environ, "UV_HTTP_TIMEOUT": "30", "UV_HTTP_RETRIES": "2"}
    try:
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"the package registry did not answer within {SECONDS} s")
    if done.returncode == UNREACHABLE and "Failed to fetch" in done.stderr:
        pytest.skip(f"the package registry cannot be reached: {done.stderr.splitlines()[0]}")
    assert done.returncode == 0, done.stderr
    pins = [Requirement(line) for line in done.stdout.splitlines()]
    found = {pin.name: str(pin.specifier).removeprefix("==") for pin in pins}
    assert found["megatron-core"] == MEGATRON[python]
    for patch in PATCHES:
        release = found.get(patch.package)
        assert release is None or release in (*patch.versions, *patch.mended), (patch.name, release)
    assert {"sglang-router", "transformer-engine-torch", "ray"} <= set(found)
    # Transformer Engine is built against the torch that is installed first; another one must not follow.
    for page in ("Dockerfile", "docs/install.md"):
        assert f"pybind11 torch=={found['torch']}" in (ROOT / page).read_text()
    # One CUDA for torch and for Transformer Engine: the one of the Dockerfile's base image.
    cuda = f"cu{(ROOT / 'Dockerfile').read_text().split('ARG CUDA=')[1].split('.')[0]}"
    assert {f"nvidia-nccl-{cuda}", f"transformer-engine-{cuda}"} <= set(found)
