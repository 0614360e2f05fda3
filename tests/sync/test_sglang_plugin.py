"""What the ranks of a server tell each other."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from megasync.sync.sglang_plugin import MAX_ERROR_BYTES, _gather


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_words_arrive_as_they_were_said_and_long_ones_are_cut(group: dist.ProcessGroup) -> None:
    assert _gather("", group) == [""]
    assert _gather("no room für 3 GB", group) == ["no room für 3 GB"]
    assert _gather("x" * 10_000, group) == ["x" * MAX_ERROR_BYTES]
