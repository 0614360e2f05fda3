"""What the ranks of a server tell each other."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from megasync.sglang.pipeline import gather


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_words_arrive_as_they_were_said(group: dist.ProcessGroup) -> None:
    for said in (b"", "no room für 3 GB".encode(), b"x" * 10_000, b"\0end\0"):
        assert gather(said, group) == [said]
