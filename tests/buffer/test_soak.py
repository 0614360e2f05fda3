"""Thousands of groups through the real rollouter, client, buffer and ledger against a null server: nothing grows."""

import asyncio
import gc
import random
import time
from pathlib import Path

import psutil
import pytest
from fake_sglang import FakeSGLang
from local_buffer import kill
from local_rollouter import local_rollouter

from megasync.buffer import AsyncBuffer
from megasync.buffer.beginning import begin_ledger
from megasync.buffer.ledger import LOG_PAGES
from megasync.config.schema import PromptConfig, SamplingConfig, ScheduleConfig
from megasync.data import PromptSource, Renderer
from megasync.rollout.client import RequestSettings, RolloutClient, ServedModel
from megasync.serving.control import ServerControl
from megasync.starters.digits import digits_tokenizer

TOKENS, SAMPLES = 512, 2
SCHEDULE = ScheduleConfig(groups_per_step=8, samples_per_group=SAMPLES, max_staleness=1)
STEPS_PER_CHECKPOINT = 10
# Python objects of a finished group: what would stay behind if the buffer held on to it. Measured, and rounded down.
GROUP_BYTES = 50_000
PAGE = 4096 + 24


async def workflow(client, sample):
    reply = await client.generate(sample["prompt_ids"], ignore_eos=True)
    return reply.trajectory(reward=random.random())


async def soak(path: Path, groups: int) -> list[tuple[int, int, int]]:
    """(resident bytes, bytes of the ledger, bytes of its log) at every checkpoint."""
    rows = [{"prompt": str(n % 10) * (1 + n // 10)} for n in range(100)]
    source = PromptSource(rows, Renderer(digits_tokenizer(), PromptConfig(), 16), shuffle=True, seed=0)
    begin_ledger(path, 0, 0, {}, {"cursor": source.state(), "pending": []})
    steps = groups // SCHEDULE.groups_per_step
    buffer = AsyncBuffer(SCHEDULE, steps * SCHEDULE.groups_per_step, ledger=path)
    found = []
    async with FakeSGLang() as server:
        control = ServerControl(server.url)
        client = RolloutClient(
            server.url,
            [control],
            ServedModel(server.vocab, TOKENS + 16),
            RequestSettings(SamplingConfig(max_new_tokens=TOKENS), 60.0),
        )
        rollouter = local_rollouter(client, source, buffer, workflow, SCHEDULE)
        rollout = asyncio.create_task(rollouter.run())
        for step in range(1, steps + 1):
            lease = asyncio.create_task(buffer.lease(step, step - 1))
            await asyncio.wait({lease, rollout}, return_when=asyncio.FIRST_COMPLETED)
            if rollout.done():
                rollout.result()
            assert len(await lease) == SCHEDULE.groups_per_step
            await buffer.ack(step)
            server.version = step
            await buffer.publish(step)
            server.requests.clear()
            server.headers.clear()
            if step % STEPS_PER_CHECKPOINT == 0:
                await buffer.checkpointed(step, max(0, step - STEPS_PER_CHECKPOINT))
                gc.collect()
                log = path.with_name(path.name + "-wal")
                found.append((psutil.Process().memory_info().rss, path.stat().st_size, log.stat().st_size))
        counts = await buffer.counts()
        assert counts["trained"] == steps * SCHEDULE.groups_per_step and counts["live"] == 0
        rollouter.stop()
        await rollout
        await client.close()
        await control.close()
    kill(buffer)
    return found


@pytest.mark.parametrize("groups", [800, pytest.param(10_000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
async def test_memory_and_ledger_size_stay_bounded_in_a_long_run(tmp_path, groups):
    start = time.monotonic()
    found = await soak(tmp_path / "ledger.db", groups)
    warm = found[: 1 + len(found) // 3]
    memory, file, log = (max(column) for column in zip(*warm, strict=True))
    later_memory, later_file, later_log = (max(column) for column in zip(*found[len(warm) :], strict=True))
    print(
        f"\n{groups} groups in {time.monotonic() - start:.0f} s; after a third and at the end: memory "
        f"{memory / 1e6:.0f} and {later_memory / 1e6:.0f} MB, ledger {file / 1e6:.1f} and {later_file / 1e6:.1f} MB, "
        f"log {log / 1e6:.1f} and {later_log / 1e6:.1f} MB"
    )
    held = groups * 2 // 3 * GROUP_BYTES
    assert later_memory - memory < held // 4
    assert later_file < file + 100 * groups + 64 * 4096, "only the row of each group stays"
    assert later_log <= 1.5 * LOG_PAGES * PAGE
