"""Links whose messages are handles of memory: what arrives, what is used again, and what is refused."""

import os
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import msgspec
import pytest
import torch

from megasync.base.store import join_store, open_store
from megasync.device import Device
from megasync.sync import shared_memory
from megasync.sync.groups import Transfer
from megasync.sync.shared_memory import (
    HANDLE_BYTES,
    HANDLES,
    CudaHandle,
    Handle,
    HostHandle,
    copy_from,
    link_backend,
    make_links,
)

LIMIT = timedelta(seconds=10)
CPU = torch.device("cpu")


@pytest.fixture
def ends():
    """The links of two members."""
    store = open_store("127.0.0.1", 10)
    stores = store, join_store("127.0.0.1", store.port, 10)

    def make(rank):
        return make_links(stores[rank], "links", rank, 2, HANDLES, "127.0.0.1", 10, CPU)

    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(make, range(2)))
    yield made
    for links in made:
        links.close()


def test_messages_of_any_size_and_dtype_arrive_and_their_memory_is_used_again(ends):
    sender, receiver = ends
    messages = [
        torch.arange(1000, dtype=torch.float32),
        torch.randn(7).to(torch.bfloat16),
        torch.tensor([2**62, -1]),
        torch.arange(5000, dtype=torch.float32)[100:-50],
    ]
    descriptors = []
    for _ in range(5):
        arrived = [torch.zeros_like(message) for message in messages]
        coming = [receiver.receive(target, 0, tag) for tag, target in enumerate(arrived)]
        sent = [sender.send(message, 1, tag) for tag, message in enumerate(messages)]
        for transfer in coming:
            transfer.wait(LIMIT)
        for transfer in sent:
            transfer.wait(LIMIT)
        assert all(torch.equal(a, b) for a, b in zip(arrived, messages, strict=True))
        descriptors.append(len(os.listdir("/proc/self/fd")))
    assert descriptors[0] == descriptors[-1]


def test_a_message_is_sent_only_once_it_is_received(ends):
    sender, _ = ends
    sent = sender.send(torch.ones(3), 1, 0)
    with pytest.raises(RuntimeError, match="imed out"):
        sent.wait(timedelta(seconds=0.3))


def test_memory_that_is_gone_or_of_another_size_is_refused():
    with pytest.raises(RuntimeError, match="a message of 8 bytes came where 12 were expected"):
        copy_from(HostHandle(os.getpid(), 0, 0, 8), torch.zeros(3))
    with pytest.raises(RuntimeError, match="the memory of process 1234567 cannot be read"):
        copy_from(HostHandle(1234567, 0, 0, 12), torch.zeros(3))


def test_memory_that_took_the_place_of_the_senders_is_refused():
    copies = shared_memory._HostCopies()
    fd, _ = copies.copy(torch.ones(3))
    inode = os.fstat(fd).st_ino
    copies.close()
    try:
        again, _ = copies.copy(torch.full((3,), 2.0))
        assert again == fd, "the system gives the lowest free number"
        with pytest.raises(RuntimeError, match="the descriptor is of something else"):
            copy_from(HostHandle(os.getpid(), fd, inode, 12), torch.zeros(3))
    finally:
        copies.close()


def test_links_that_close_give_back_the_memory_of_messages_that_nobody_read():
    def descriptors():
        links = (os.path.join("/proc/self/fd", number) for number in os.listdir("/proc/self/fd"))
        return [link for link in links if os.path.lexists(link) and "memfd:megasync" in os.readlink(link)]

    class Broken(Transfer):
        def __init__(self):
            pass

        def wait(self, limit):
            raise RuntimeError("connection closed by peer")

    before, copies = len(descriptors()), shared_memory._HostCopies()
    sent = [
        shared_memory._Sent(Broken(), Broken(), copies, copies.copy(torch.ones(elements))) for elements in (1, 9, 1000)
    ]
    read = copies.copy(torch.ones(5))
    copies.reuse(read)
    for transfer in sent:
        with pytest.raises(RuntimeError, match="closed by peer"):
            transfer.wait(LIMIT)
    assert len(descriptors()) > before
    copies.close()
    # A receiver's confirmation that comes too late.
    copies.reuse(read)
    copies.close()
    assert len(descriptors()) == before and all(memory.closed for memory in (read[1], *(s._copy[1] for s in sent)))


def test_what_is_no_handle_is_refused(ends, monkeypatch):
    sender, receiver = ends
    monkeypatch.setattr(shared_memory.msgspec.json, "encode", lambda handle: b'{"type": "Pickle"}')
    _sent = sender.send(torch.ones(3), 1, 0)
    with pytest.raises(RuntimeError, match="not a handle of a message"):
        receiver.receive(torch.zeros(3), 0, 0).wait(LIMIT)


def test_a_handle_of_gpu_memory_names_the_part_of_its_storage(monkeypatch):
    """With a stand-in for CUDA's own handles, which name a storage by number."""
    storages: dict[bytes, torch.UntypedStorage] = {}

    def share(storage):
        memory = len(storages).to_bytes(64, "big")
        storages[memory] = storage
        return 0, memory, storage.nbytes(), 0, b"/torch_counter" * 3, 17, bytes(range(64)), True

    def opened(device, memory, nbytes, offset, counter, counter_offset, event, waits):
        assert (nbytes, offset, counter_offset, event, waits) == (4000, 0, 17, bytes(range(64)), True)
        return storages[memory]

    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", share)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", opened)
    whole = torch.arange(1000, dtype=torch.float32)
    part = whole[100:300]
    text = msgspec.json.encode(shared_memory._cuda_handle(part))
    assert len(text) <= HANDLE_BYTES
    handle = msgspec.json.decode(text, type=Handle)
    assert isinstance(handle, CudaHandle) and handle.start == 400 and handle.nbytes == 800
    assert torch.equal(shared_memory._opened(handle, CPU), part.view(torch.uint8))


def test_only_shared_devices_need_handles():
    assert link_backend(True, Device("cuda")) == HANDLES
    assert link_backend(False, Device("cuda")) == "nccl"
    assert link_backend(False, Device("cpu")) == "gloo"
