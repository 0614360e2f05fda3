"""Device functions on a GPU, with a fake torch.cuda."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megasync import device


class FakeCuda:
    """Makes streams that note what they were made with, and whether they were waited for."""

    def __init__(self) -> None:
        self.entered: list[SimpleNamespace] = []
        self.current = SimpleNamespace(synchronize=lambda: self.waited.append("current"))
        self.waited: list[str] = []

    def Stream(self, where: torch.device, priority: int) -> SimpleNamespace:
        return SimpleNamespace(where=where, priority=priority)

    def stream(self, stream: SimpleNamespace) -> SimpleNamespace:
        self.entered.append(stream)
        return stream

    def current_stream(self, where: torch.device) -> SimpleNamespace:
        return self.current


@pytest.fixture
def fake_cuda(monkeypatch):
    device._side_stream.cache_clear()
    fake = FakeCuda()
    for name in ("Stream", "stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    yield fake
    device._side_stream.cache_clear()


def test_a_side_stream_is_reused_and_has_high_priority(fake_cuda):
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    for where in (first, first, second):
        device.side_stream(where)
    one, again, other = fake_cuda.entered
    assert one is again
    assert (one.where, one.priority) == (first, -1)
    assert other.where == second


def test_only_a_gpu_is_waited_for(fake_cuda):
    device.synchronize(torch.device("cpu"))
    with device.side_stream(torch.device("cpu")):
        pass
    assert (fake_cuda.waited, fake_cuda.entered) == ([], [])
    device.synchronize(torch.device("cuda", 0))
    assert fake_cuda.waited == ["current"]


def test_ranks_find_ninja_beside_their_python_whatever_the_path_was(monkeypatch):
    monkeypatch.setattr(os, "environ", environment := {"PATH": "/usr/bin:/bin"})
    device.set_cuda_environment()
    device.set_cuda_environment()
    assert environment["PATH"].split(":") == [str(Path(sys.executable).parent), "/usr/bin", "/bin"]


def test_existing_environment_variables_are_kept(monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    # Set first, so that it is as before after the test.
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")
    monkeypatch.delenv("NCCL_CUMEM_ENABLE")
    device.set_cuda_environment()
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"
    assert os.environ["NCCL_CUMEM_ENABLE"] == "0"
