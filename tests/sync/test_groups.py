"""What a link does over NCCL that it does not over gloo; a fake stands in for NCCL, which needs GPUs."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megasync.base.store import join_store, open_store
from megasync.sync import groups
from megasync.sync.groups import BLOCKING_WAIT, LINK_BLOCKS, PeerGroup, Transfer

DEVICE = torch.device("cuda", 1)


class FakeWork:
    def __init__(self) -> None:
        self.limit: timedelta | None = None

    def wait(self, limit: timedelta) -> bool:
        self.limit = limit
        return True


class FakeNCCL:
    """Notes how it was made, and whether it was aborted; as NCCL's groups do, it waits for nobody."""

    class Options:
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            self.config = SimpleNamespace(max_ctas=None)
            self._timeout = None

    def __init__(self, store: dist.Store, rank: int, size: int, options: Options) -> None:
        self.options = options
        self.connected: torch.device | None = None
        self.blocking_wait = os.environ.get(BLOCKING_WAIT)
        self.aborted = False

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> FakeWork:
        return FakeWork()

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.connected = device

    def abort(self) -> None:
        self.aborted = True


@pytest.fixture
def nccl(monkeypatch):
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNCCL, raising=False)


def link(store: dist.Store, rank: int, timeout: float) -> PeerGroup:
    return PeerGroup(store, "links", rank, 2, "nccl", "127.0.0.1", timeout, DEVICE)


def test_nccl_links_are_made_once_everybody_is_there(nccl):
    store = open_store("127.0.0.1", 10)
    with pytest.raises(RuntimeError):
        link(store, 0, 0.2)
    with ThreadPoolExecutor(2) as pool:
        stores = store, join_store("127.0.0.1", store.port, 10)
        made = list(pool.map(link, stores, (0, 1), (10.0, 10.0)))
    # One communicator for all members, before the first message.
    assert [each._group.connected for each in made] == [DEVICE, DEVICE]


def test_an_nccl_communicator_that_is_never_made_ends_at_the_deadline(nccl, monkeypatch):
    hang = threading.Event()
    monkeypatch.setattr(FakeNCCL, "eager_connect_single_device", lambda group, device: hang.wait())
    with pytest.raises(RuntimeError, match="making the communicator took more than"):
        PeerGroup(open_store("127.0.0.1", 10), "links", 0, 1, "nccl", "127.0.0.1", 0.2, DEVICE)
    hang.set()


@pytest.mark.parametrize("before", [None, "0"])
def test_nccl_links_are_not_watched_and_other_groups_are_as_before(nccl, monkeypatch, before):
    monkeypatch.delenv(BLOCKING_WAIT, raising=False)
    if before is not None:
        monkeypatch.setenv(BLOCKING_WAIT, before)
    group = PeerGroup(open_store("127.0.0.1", 10), "links", 0, 1, "nccl", "127.0.0.1", 10, DEVICE)._group
    assert group.blocking_wait == "1"
    assert os.environ.get(BLOCKING_WAIT) == before
    assert group.options.is_high_priority_stream
    assert group.options.config.max_ctas == LINK_BLOCKS
    assert group.options._timeout == timedelta(seconds=10)


def test_nccl_links_that_are_left_are_aborted(nccl):
    links = PeerGroup(open_store("127.0.0.1", 10), "links", 0, 1, "nccl", "127.0.0.1", 10, DEVICE)
    group = links._group
    links.close()
    assert group.aborted


@pytest.mark.parametrize(("backend", "passed_on"), [("gloo", 5.0), ("nccl", 12.0)])
def test_the_limit_of_a_wait_counts_from_the_wait(monkeypatch, backend, passed_on):
    """NCCL counts it from when the message was started, so a message that is seven seconds old gets seven more."""
    clock = iter([100.0, 107.0])
    monkeypatch.setattr(groups.time, "monotonic", lambda: next(clock))
    work = FakeWork()
    transfer = Transfer(work, backend)
    transfer.wait(timedelta(seconds=5))
    assert work.limit == timedelta(seconds=passed_on)
