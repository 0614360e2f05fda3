"""What a commit exchanges and what it copies, decided by what refers to each parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from megasync.layout.engine_layout import Fill, ParamRectangle
from megasync.sync.messages import InboundBucket, ReceivePlan
from megasync.sync.shard import arena as arena_module
from megasync.sync.shard.arena import Arena

ROWS, COLS = 6, 8
CPU = torch.device("cpu")
ALL = ParamRectangle("w", 0, ROWS, COLS, COLS, 1)
RIGHT = ParamRectangle("w", 4, ROWS, 4, COLS, 1)


def bucket(tag: int, *rectangles: ParamRectangle, dtype: str = "float32") -> InboundBucket:
    elements = sum(rectangle.rows * rectangle.cols for rectangle in rectangles)
    return InboundBucket(tag, 0, dtype, elements, elements * getattr(torch, dtype).itemsize, rectangles)


class Engine:
    """A parameter ``w`` of an engine, and versions of it that arrive by ``plan``."""

    def __init__(self, *buckets: InboundBucket, fills: tuple[Fill, ...] = (), exchange: bool = True) -> None:
        self.plan = ReceivePlan("k", buckets or (bucket(0, ALL),), fills)
        self.w = nn.Parameter(torch.zeros(ROWS, COLS), requires_grad=False)
        self.exchange = exchange
        self.arena: Arena | None = None

    def publish(self, whole: torch.Tensor, mode: Callable = torch.no_grad) -> bool:
        """Whether the parameter's address has changed. ``mode`` is the engine's; another thread stages."""
        if self.arena is None:
            with mode():
                self.arena = Arena(self.plan, {"w": self.w}, CPU, self.exchange)
        before = self.w.data_ptr()
        self.arena.begin()
        for each in self.plan.buckets:
            parts = [rectangle.of(whole).reshape(-1) for rectangle in each.rectangles]
            message = torch.cat(parts).to(getattr(torch, each.dtype)).view(torch.uint8)
            landing = self.arena.landing(each)
            if landing is None:
                self.arena.put(each, message)
            else:
                landing.copy_(message)
        with mode():
            self.arena.commit({"w": self.w})
        return self.w.data_ptr() != before


@pytest.fixture
def versions() -> Iterator[torch.Tensor]:
    torch.manual_seed(0)
    return iter([torch.randn(ROWS, COLS) for _ in range(4)])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "buckets",
    [
        pytest.param([bucket(0, ALL)], id="in place"),
        pytest.param([bucket(0, ALL._replace(cols=4)), bucket(1, RIGHT)], id="scattered"),
        pytest.param([bucket(0, ALL, dtype="bfloat16")], id="cast"),
    ],
)
def test_a_parameter_of_its_own_memory_is_exchanged_and_never_copied(versions, monkeypatch, buckets, mode: Callable):
    engine = Engine(*buckets)
    monkeypatch.setattr(arena_module, "copy_all", lambda copies: pytest.fail("copied") if list(copies) else None)
    addresses = set()
    for whole in versions:
        before = engine.w._version
        assert engine.publish(whole, mode)
        assert torch.equal(engine.w, whole.to(getattr(torch, buckets[0].dtype)).float())
        # Caches of derived weights compare versions and addresses, of which the latter come back.
        assert engine.w._version > before
        addresses.add(engine.w.data_ptr())
    assert len(addresses) == 2


def view(engine: Engine) -> torch.Tensor:
    return engine.w[:, 4:]


def tie(engine: Engine) -> torch.Tensor:
    return nn.Parameter(engine.w.data, requires_grad=False)


@pytest.mark.parametrize("alias", [view, tie])
@pytest.mark.parametrize("late", [False, True], ids=["from the start", "made between two commits"])
def test_other_tensors_in_a_parameters_memory_see_each_version(versions, alias: Callable, late: bool):
    engine = Engine()
    other = None if late else alias(engine)
    assert engine.publish(next(versions)) == late
    if other is None:
        other = alias(engine)
    for whole in versions:
        assert not engine.publish(whole)
        assert torch.equal(engine.w, whole)
        assert torch.equal(other, whole[:, COLS - other.shape[1] :])


def test_the_same_parameter_under_two_names_stays_one(versions):
    engine = Engine()
    head = nn.Module()
    head.weight = engine.w
    whole = next(versions)
    assert engine.publish(whole)
    assert torch.equal(head.weight, whole)


def part_of_a_larger_tensor(engine: Engine) -> None:
    engine.w.data = torch.zeros(2 * ROWS, COLS)[:ROWS]


def shared_with_other_processes(engine: Engine) -> None:
    engine.w.data.share_memory_()


@pytest.mark.parametrize("make", [part_of_a_larger_tensor, shared_with_other_processes])
def test_memory_that_is_not_the_parameters_alone_is_copied_into(versions, make: Callable):
    engine = Engine()
    make(engine)
    for whole in versions:
        assert not engine.publish(whole)
        assert torch.equal(engine.w, whole)


def test_an_engine_that_remembers_addresses_gets_copies(versions):
    engine = Engine(exchange=False)
    for whole in versions:
        assert not engine.publish(whole)
        assert torch.equal(engine.w, whole)


def test_what_no_message_writes_stays_and_what_a_load_fills_is_filled(versions):
    kept = Engine(bucket(0, RIGHT))
    kept.w.fill_(3.0)
    filled = Engine(bucket(0, RIGHT), fills=(Fill(*ALL, 7.0),))
    for whole in versions:
        assert not kept.publish(whole)
        assert filled.publish(whole)
        for engine, rest in ((kept, 3.0), (filled, 7.0)):
            assert torch.equal(engine.w[:, 4:], whole[:, 4:])
            assert bool((engine.w[:, :4] == rest).all())


def test_large_copies_use_all_cores_and_copy_everything(monkeypatch):
    monkeypatch.setattr(arena_module, "PARALLEL_BYTES", 0)
    monkeypatch.setattr(arena_module.os, "sched_getaffinity", lambda _: range(3))
    sources = [torch.randn(5) for _ in range(7)]
    targets = [nn.Parameter(torch.zeros(5)) for _ in sources]
    with torch.no_grad():
        arena_module.copy_all(zip(targets, sources, strict=True))
    assert all(map(torch.equal, targets, sources))
