"""The task dump shows where each task waits, innermost frame last, and counts equal tasks."""

from __future__ import annotations

import asyncio

from megasync.observe.stacks import describe_tasks


async def inner(event: asyncio.Event) -> None:
    await event.wait()


async def outer(event: asyncio.Event) -> None:
    await inner(event)


async def test_tasks_waiting_at_the_same_place_are_merged_into_one_line_with_the_await_chain() -> None:
    event = asyncio.Event()
    tasks = [asyncio.create_task(outer(event), name=f"group 0:{row}") for row in range(3)]
    tasks.append(asyncio.create_task(inner(event), name="watch"))
    await asyncio.sleep(0)
    lines = describe_tasks(tasks).splitlines()
    event.set()
    await asyncio.gather(*tasks)
    assert len(lines) == 2
    assert lines[0].startswith("   3 x group: ")
    chain = [part.split()[-1] for part in lines[0].partition(": ")[2].split(" > ")]
    assert chain == ["outer", "inner", "wait"]
    assert lines[1].startswith("   1 x watch: ")


async def test_a_deep_await_chain_is_truncated_at_its_outer_end() -> None:
    event = asyncio.Event()

    async def deep(levels: int) -> None:
        await (deep(levels - 1) if levels else event.wait())

    task = asyncio.create_task(deep(20), name="deep")
    await asyncio.sleep(0)
    text = describe_tasks([task])
    event.set()
    await task
    assert text.partition(": ")[2].startswith("... > ")
    assert text.endswith("wait")
