"""What the stand-in for streams calls a race, and what it does not."""

import pytest
import torch
from streamed_gpu import StreamedGpu

from megasync.device import record_event, side_stream, synchronize, wait_event

WORDS = 8


@pytest.fixture
def gpu(monkeypatch):
    gpu = StreamedGpu()
    gpu.stand_in(monkeypatch)
    with gpu.here():
        yield gpu


def device() -> torch.device:
    return torch.device("cuda", 0)


@pytest.mark.parametrize("waits", [True, False])
def test_a_stream_must_wait_for_another_ones_write(gpu, waits):
    values = torch.ones(WORDS, device="cuda")
    ready = record_event(device())
    with side_stream(device()):
        if waits:
            wait_event(ready, device())
        values.sum()
    assert bool(gpu.races) != waits
    assert waits or "sum reads what ones has written" in gpu.races[0]


@pytest.mark.parametrize("waits", [True, False])
def test_memory_is_reused_only_after_its_last_read(gpu, waits):
    buffer = torch.zeros(WORDS, device="cuda")
    synchronize(device())
    with side_stream(device()):
        buffer.sum()
        done = record_event(device())
    if waits:
        wait_event(done, device())
    buffer.fill_(3)
    assert bool(gpu.races) != waits
    assert waits or "fill_ writes what sum has read" in gpu.races[0]


def test_other_bytes_of_the_same_memory_are_no_race(gpu):
    table = torch.zeros(4, WORDS, device="cuda")
    synchronize(device())
    table[:, :3].fill_(1)
    with side_stream(device()):
        table[:, 3:].fill_(2)
    assert gpu.races == []
    with side_stream(device()):
        table[1, 2:4].sum()
    assert len(gpu.races) == 1


@pytest.mark.parametrize("waits", [True, False])
def test_a_copy_to_pinned_memory_must_have_ended_before_the_host_reads(gpu, waits):
    values, kept = torch.ones(WORDS, device="cuda"), torch.empty(WORDS, pin_memory=True)
    kept.copy_(values, non_blocking=True)
    if waits:
        synchronize(device())
    assert kept.tolist() == [1.0] * WORDS
    assert bool(gpu.races) != waits


def test_a_copy_from_pinned_memory_must_have_ended_before_the_host_writes(gpu):
    values, kept = torch.empty(WORDS, device="cuda"), torch.ones(WORDS, pin_memory=True)
    values.copy_(kept, non_blocking=True)
    kept.fill_(2)
    assert gpu.races == ["fill_ writes what copy_ has read, without waiting for it"]
