"""The device of a run is resolved without initializing a GPU, and refused if its ranks cannot run."""

from importlib.util import find_spec

import pytest
import torch

from megasync import device
from megasync.device import Device, check_machine, resolve_device
from megasync.errors import ConfigError


@pytest.fixture
def machine(monkeypatch):
    """Makes this machine one with or without a GPU, a CUDA build of torch, Transformer Engine; a touched GPU fails."""
    for name in (
        "is_available",
        "device_count",
        "current_device",
        "set_device",
        "init",
        "_lazy_init",
        "get_device_name",
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: pytest.fail(f"torch.cuda.{name} was asked"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def make(gpu: bool = True, build: str | None = "13.0", engine: bool = True) -> None:
        monkeypatch.setattr(device, "glob", lambda pattern: ["/dev/nvidia0"] if gpu and "nvidia[" in pattern else [])
        monkeypatch.setattr(torch.version, "cuda", build)
        known = {"transformer_engine": object() if engine else None}
        monkeypatch.setattr(device, "find_spec", lambda name: known[name] if name in known else find_spec(name))

    make()
    return make


def test_a_device_is_resolved_without_initializing_it(machine):
    assert resolve_device("cuda") == resolve_device("auto") == Device("cuda")
    assert (Device("cuda").spec, Device("cuda").backend, Device("cuda").expert_dispatcher) == ("te", "nccl", "alltoall")
    check_machine("cuda", trains=True)
    check_machine("auto", trains=True)
    machine(gpu=False)
    assert resolve_device("auto") == Device("cpu")
    # Of another machine, as for a driver that has no GPU itself.
    assert resolve_device("cuda") == Device("cuda")
    assert Device("cuda").spec == "te"


@pytest.mark.parametrize(
    ("lacks", "named"),
    [({"gpu": False}, "this machine has no GPU"), ({"build": None}, r"torch .* is a build without CUDA")],
)
def test_a_run_on_this_machine_alone_needs_its_gpu(machine, lacks, named):
    machine(**lacks)
    with pytest.raises(ConfigError, match=rf"cluster\.device is 'cuda', but {named}.*cluster\.device=cpu or auto"):
        check_machine("cuda", trains=False)
    check_machine("auto", trains=True)
    check_machine("cpu", trains=True)


def test_hidden_gpus_do_not_count(machine, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert resolve_device("auto") == Device("cpu")
    with pytest.raises(ConfigError, match="hides every GPU"):
        check_machine("cuda", trains=False)


@pytest.mark.parametrize("kind", ["cuda", "auto"])
def test_training_on_a_gpu_without_transformer_engine_is_refused(machine, kind):
    machine(engine=False)
    with pytest.raises(ConfigError, match=r"need Transformer Engine.*megasync install gpu.*cluster\.device=cpu"):
        check_machine(kind, trains=True)
    check_machine(kind, trains=False)
    # A rank on another machine than the driver's looks for itself, before it asks for its GPU.
    with pytest.raises(ConfigError, match="Transformer Engine"):
        Device("cuda").prepare_process(local_rank=0)


def test_a_rank_without_its_gpu_raises_an_error(machine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    with pytest.raises(ConfigError, match="sees none in this process"):
        Device("cuda").prepare_process(local_rank=0)
