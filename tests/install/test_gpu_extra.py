"""launch/gpu.lock solves the extras for GPU nodes on each supported Python. Only metadata is fetched."""

import os
import subprocess
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
LOCK = ROOT / "launch" / "gpu.lock"
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


def pins(python: str) -> dict[str, str]:
    """The versions that launch/gpu.lock installs, by package, on x86-64 Linux."""
    place = {"python_version": python, "python_full_version": f"{python}.1", "sys_platform": "linux"}
    place |= {"platform_machine": "x86_64", "platform_system": "Linux", "os_name": "posix"}
    lines = [line.split("\\")[0] for line in LOCK.read_text().splitlines() if "==" in line]
    found = [Requirement(line) for line in lines if not line.startswith("#")]
    kept = [pin for pin in found if pin.marker is None or pin.marker.evaluate(place)]
    assert len(kept) == len({pin.name for pin in kept})
    return {pin.name: str(pin.specifier).removeprefix("==") for pin in kept}


@pytest.mark.parametrize("python", MEGATRON)
def test_the_lock_is_what_the_project_requires(python):
    found = pins(python)
    assert found["megatron-core"] == MEGATRON[python]
    extras = ("", "train", "gpu", "datasets", "math", "tasks")
    wanted = [Requirement(text) for text in requires("megasync")]
    for requirement in wanted:
        if requirement.name == "megasync" or not any(
            requirement.marker is None or requirement.marker.evaluate({"extra": extra}) for extra in extras
        ):
            continue
        assert requirement.specifier.contains(found[requirement.name.lower().replace("_", "-")]), requirement
    for patch in PATCHES:
        release = found.get(patch.package)
        assert release is None or release in (*patch.versions, *patch.mended), (patch.name, release)


@pytest.mark.parametrize("python", MEGATRON)
def test_cuda_is_one_version_for_libraries_headers_and_compiler(python):
    """SGLang compiles kernels at run time, and CUDA's headers refuse a compiler of another version."""
    found = pins(python)
    release = found["cuda-toolkit"].rsplit(".", 2)[0]
    for name in ("runtime", "nvcc", "crt", "cccl", "nvrtc"):
        assert found[f"nvidia-cuda-{name}"].startswith(f"{release}."), name
    assert found["nvidia-nvvm"].startswith(f"{release}.")
    cuda = f"cu{release.split('.')[0]}"
    assert {f"nvidia-nccl-{cuda}", f"transformer-engine-{cuda}", "transformer-engine-torch"} <= set(found)


def test_the_lock_has_hashes_and_names_no_registry():
    text = LOCK.read_text()
    assert "://" not in text and "index-url" not in text
    entries = [entry for entry in text.split("\n") if "==" in entry and not entry.startswith("#")]
    assert all(entry.endswith("\\") for entry in entries)


@pytest.mark.matrix
@pytest.mark.processes
def test_the_extras_still_resolve_to_the_lock(tmp_path):
    copy = tmp_path / "gpu.lock"
    copy.write_text(LOCK.read_text())
    env = {**os.environ, "UV_HTTP_TIMEOUT": "30", "UV_HTTP_RETRIES": "2"}
    command = ["bash", "launch/gpu_lock.sh", str(copy)]
    try:
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"the package registry did not answer within {SECONDS} s")
    if done.returncode == UNREACHABLE and "Failed to fetch" in done.stderr:
        pytest.skip(f"the package registry cannot be reached: {done.stderr.splitlines()[0]}")
    assert done.returncode == 0, done.stderr
    assert copy.read_text() == LOCK.read_text(), "run `bash launch/gpu_lock.sh`"
