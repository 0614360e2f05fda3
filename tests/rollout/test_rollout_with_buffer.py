"""The rollouter with the real buffer and the real source: what a run knows of the life before it."""

import asyncio
import random
import shutil
import sqlite3

from local_buffer import kill
from local_rollouter import local_rollouter
from responses import grow

from megasync.buffer import AsyncBuffer
from megasync.buffer.beginning import begin_ledger, resume_ledger
from megasync.buffer.segments import load
from megasync.config.schema import PromptConfig, ScheduleConfig
from megasync.data import PromptSource, Renderer
from megasync.data.curriculum import Curriculum, by_success
from megasync.rewards import RewardRunner
from megasync.rollout.conversation import Generation
from megasync.rollout.group_worker import FailurePolicy
from megasync.rollout.workflow import single_turn
from megasync.starters.digits import digits_tokenizer
from megasync.trajectory import Trajectory

SCHEDULE = ScheduleConfig(groups_per_step=2, samples_per_group=2, max_staleness=1, max_inflight_groups=3)


class FakeHalfway:
    """Samples two tokens of a response and then stands still, or finishes at once what somebody else began."""

    def __init__(self):
        self.beginnings = []

    async def generate(self, prompt_ids, keep, **options):
        parts = keep(str(prompt_ids))
        self.beginnings.append(list(parts.token_ids))
        if not len(parts):
            grow(parts, [7, 8], version=0)
            await asyncio.Event().wait()
        return Generation.of(prompt_ids, parts.token_ids, parts.logprobs, parts.versions, "stop")


async def test_a_killed_run_continues_the_responses_that_it_had_begun(tmp_path):
    ledger, client = tmp_path / "ledger.db", FakeHalfway()
    begin_ledger(ledger, 0, 0, {}, {})
    rewards = RewardRunner(lambda completions, **columns: [float(index) for index, _ in enumerate(completions)])

    def life():
        renderer = Renderer(digits_tokenizer(), PromptConfig(), 16)
        source = PromptSource([{"prompt": str(n)} for n in range(4)], renderer, shuffle=False, seed=0)
        buffer = AsyncBuffer(SCHEDULE, total_groups=2, ledger=ledger)
        return (
            source,
            buffer,
            local_rollouter(
                *(client, source, buffer, single_turn, SCHEDULE),
                rewards=rewards,
                failures=FailurePolicy(save_seconds=0.01),
            ),
        )

    _, buffer, rollouter = life()
    first = asyncio.create_task(rollouter.run())
    while any([len(await buffer.partials(uid)) < SCHEDULE.samples_per_group for uid in ("0:0", "0:1")]):
        await asyncio.sleep(0.01)
    # What a kill leaves: the files as they are.
    left = tmp_path / "left"
    left.mkdir()
    for file in tmp_path.glob("ledger.*"):
        (shutil.copytree if file.is_dir() else shutil.copy)(file, left / file.name)
    rollouter.stop()
    await first
    ledger = left / "ledger.db"

    resumed = resume_ledger(ledger, SCHEDULE, 2, 0)
    client.beginnings.clear()
    source, buffer, rollouter = life()
    source.skip(resumed.admitted)
    second = asyncio.create_task(rollouter.run())
    groups = await buffer.lease(1, 0)
    assert client.beginnings == [[7, 8]] * 2 * SCHEDULE.samples_per_group
    assert {group.uid for group in groups} == {"0:0", "0:1"}
    assert all(t.response_ids.tolist() == [7, 8] for group in groups for t in load(group).trajectories)
    await buffer.close("done")
    await second
    await rewards.close()


async def test_a_resumed_run_leaves_out_the_rows_that_were_solved_before(tmp_path):
    """Row 0 is always solved. The second life knows that from the ledger alone."""
    ledger, total, version = tmp_path / "ledger.db", 16, 0
    begin_ledger(ledger, 0, 0, {}, {"cursor": None})

    async def answer(client, sample):
        await asyncio.sleep(0)
        solved = sample["prompt"] == "0"
        reward = 1.0 if solved else random.random() / 2
        return Trajectory(sample["prompt_ids"], [1], [1], [-0.1], [version], reward=reward)

    def life(scores=()):
        rows = [{"prompt": str(n)} for n in range(4)]
        source = PromptSource(rows, Renderer(digits_tokenizer(), PromptConfig(), 16), shuffle=False, seed=0)
        curriculum = Curriculum(by_success, len(rows))
        curriculum.restore(scores)
        buffer = AsyncBuffer(SCHEDULE, total_groups=total, ledger=ledger)
        return source, buffer, local_rollouter(None, source, buffer, answer, SCHEDULE, curriculum=curriculum)

    async def train(buffer, rollouter, steps):
        nonlocal version
        rollout = asyncio.create_task(rollouter.run())
        uids = []
        for step in steps:
            uids += [group.uid for group in await buffer.lease(step, step - 1)]
            await buffer.ack(step)
            version = step
            await buffer.publish(step)
        rollouter.stop()
        await rollout
        await buffer.close("killed")
        kill(buffer)
        return uids

    _, buffer, rollouter = life()
    assert "0:0" in await train(buffer, rollouter, (1, 2))
    resumed = resume_ledger(ledger, SCHEDULE, total, 2)
    assert dict(resumed.scores)["0:0"] == 1.0 and all(0 <= score <= 1 for _, score in resumed.scores)
    source, buffer, rollouter = life(resumed.scores)
    source.skip(resumed.admitted)
    later = await train(buffer, rollouter, range(3, 9))
    # The first life may have ended between an admission and the drop of a row that is left out.
    drawn = [uid for uid in later if uid not in resumed.admitted]
    assert drawn and not any(uid.endswith(":0") for uid in drawn)
    counted = sqlite3.connect(ledger).execute("SELECT uid, state FROM groups WHERE reason = 'left_out'").fetchall()
    assert counted and all(uid.endswith(":0") and state == "dropped" for uid, state in counted)
