"""When a batch is complete, and what one bad item does to the others in it."""

import asyncio
import threading

import pytest
from deepresearch.batcher import Batcher, Busy
from passing_time import pass_time
from waits import PATIENCE

LONG = 3600.0  # seconds: a deadline that no test waits for


class Work:
    """Doubles numbers and notes the batches; waits for `go` first, where it is given, and fails at negative numbers."""

    def __init__(self, go=None):
        self.batches, self.go, self.began = [], go, threading.Event()

    def __call__(self, items):
        self.batches.append(list(items))
        self.began.set()
        if self.go is not None:
            assert self.go.wait(PATIENCE)
        if min(items) < 0:
            raise ValueError(f"{min(items)} is negative")
        return [2 * item for item in items]


async def test_a_full_batch_does_not_wait():
    work = Work()
    batcher = Batcher(work, max_batch=3, max_wait=LONG)
    batcher.start()
    assert await asyncio.gather(*(batcher.submit(n) for n in range(6))) == [0, 2, 4, 6, 8, 10]
    assert work.batches == [[0, 1, 2], [3, 4, 5]]
    await batcher.close()


async def test_an_incomplete_batch_is_sent_at_its_deadline():
    pass_time(0.0)
    work, sizes = Work(), []
    batcher = Batcher(work, max_batch=100, max_wait=LONG, on_batch=sizes.append)
    batcher.start()
    answers = [asyncio.create_task(batcher.submit(number)) for number in (1, 2)]
    for _ in range(5):
        await asyncio.sleep(0)
    assert work.batches == []
    pass_time(LONG)
    assert await asyncio.gather(*answers) == [2, 4]
    assert (work.batches, sizes) == ([[1, 2]], [2])
    await batcher.close()


async def test_items_that_arrive_during_a_batch_form_the_next_without_another_wait():
    go = threading.Event()
    work = Work(go)
    batcher = Batcher(work, max_batch=10, max_wait=0.0)
    batcher.start()
    first = asyncio.create_task(batcher.submit(0))
    assert await asyncio.to_thread(work.began.wait, PATIENCE)
    rest = [asyncio.create_task(batcher.submit(n)) for n in range(1, 5)]
    await asyncio.sleep(0)
    go.set()
    assert await asyncio.gather(first, *rest) == [0, 2, 4, 6, 8]
    assert work.batches == [[0], [1, 2, 3, 4]]
    await batcher.close()


async def test_one_bad_item_does_not_fail_its_batch():
    work = Work()
    batcher = Batcher(work, max_batch=3, max_wait=LONG)
    batcher.start()
    answers = await asyncio.gather(*(batcher.submit(n) for n in (1, -5, 3)), return_exceptions=True)
    assert (answers[0], answers[2]) == (2, 6)
    with pytest.raises(ValueError, match="-5 is negative"):
        raise answers[1]
    assert work.batches == [[1, -5, 3], [1], [-5], [3]]
    await batcher.close()


async def test_too_few_results_are_an_error_for_the_whole_batch():
    batcher = Batcher(lambda items: [], max_batch=2, max_wait=LONG)
    batcher.start()
    answers = await asyncio.gather(batcher.submit(1), batcher.submit(2), return_exceptions=True)
    assert [str(answer) for answer in answers] == ["0 results came back for a batch of 1"] * 2
    await batcher.close()


async def test_cancelled_items_are_not_processed():
    go = threading.Event()
    work = Work(go)
    batcher = Batcher(work, max_batch=1, max_wait=0.0)
    batcher.start()
    first = asyncio.create_task(batcher.submit(1))
    assert await asyncio.to_thread(work.began.wait, PATIENCE)
    gone, stays = (asyncio.create_task(batcher.submit(n)) for n in (2, 3))
    await asyncio.sleep(0)
    gone.cancel()
    go.set()
    assert await asyncio.gather(first, stays) == [2, 6]
    assert work.batches == [[1], [3]]
    await batcher.close()


async def test_a_full_queue_refuses():
    batcher = Batcher(Work(), max_batch=1, max_wait=0.0, max_queue=1)
    waiting = asyncio.create_task(batcher.submit(1))
    await asyncio.sleep(0)
    with pytest.raises(Busy, match="1 queries are waiting"):
        await batcher.submit(2)
    batcher.start()
    assert await waiting == 2
    await batcher.close()


async def test_closing_answers_accepted_items_and_refuses_new_ones():
    batcher = Batcher(Work(), max_batch=10, max_wait=LONG)
    batcher.start()
    taken = asyncio.create_task(batcher.submit(4))
    await asyncio.sleep(0)
    await batcher.close()
    assert await taken == 8
    with pytest.raises(Busy, match="shutting down"):
        await batcher.submit(5)
    await batcher.close()
