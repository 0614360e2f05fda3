"""A run that is killed anywhere and taken up again: the ledger, the checkpoint and the prompt source agree."""

import asyncio
import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest
from killed import cut_short
from local_buffer import kill
from local_rollouter import local_rollouter

from megasync.buffer import AsyncBuffer
from megasync.buffer.beginning import begin_ledger, resume_ledger
from megasync.buffer.ledger import Ledger, begun
from megasync.buffer.payload import encode_partial
from megasync.config.schema import PromptConfig, ScheduleConfig
from megasync.data import PromptSource, Renderer
from megasync.errors import LedgerError
from megasync.starters.digits import digits_tokenizer
from megasync.trajectory import Partial, Trajectory

ROWS, STEPS = 5, 12
SCHEDULE = ScheduleConfig(groups_per_step=2, samples_per_group=2, max_staleness=1, max_inflight_groups=3)
TOTAL = STEPS * SCHEDULE.groups_per_step


def prompts():
    rows = [{"prompt": str(n)} for n in range(ROWS)]
    return PromptSource(rows, Renderer(digits_tokenizer(), PromptConfig(), 16), shuffle=True, seed=0)


class Life:
    """One life of a run's driver, from a checkpoint (step, version) on; `trained` is what that checkpoint stands on."""

    def __init__(self, path, step, version, trained, rng, schedule=SCHEDULE, failures=0.05, steps=STEPS):
        self.random, self.step, self.trained, self.failures = rng, step, dict(trained), failures
        self.source = prompts()
        if not path.exists():
            begin_ledger(path, step, version, {}, self.source.state())
        self.steps, total = steps, steps * schedule.groups_per_step
        resumed = resume_ledger(path, schedule, total, step)
        self.source.restore(resumed.origin)
        self.source.skip(resumed.admitted)
        self.version = version if resumed.version == version else resumed.version + 1
        self.buffer = AsyncBuffer(schedule, total, ledger=path)
        self.rollouter = local_rollouter(None, self.source, self.buffer, self.answer, schedule)

    async def answer(self, client, sample):
        version = self.version
        for _ in range(self.random.choice([0, 0, 2, 10])):
            await asyncio.sleep(0)
        if self.random.random() < self.failures:
            raise RuntimeError("unlucky")
        return Trajectory(sample["prompt_ids"], [1], [1], [-0.1], [version], reward=self.random.random())

    async def live(self):
        """Until the last step, or until death, at a random moment. The last checkpoint as (step, version, trained)."""
        checkpoint = self.step, self.version, dict(self.trained)
        rollout = asyncio.create_task(self.rollouter.run())
        try:
            await self.buffer.publish(self.version)
            while self.step < self.steps:
                groups = await self.buffer.lease(self.step + 1, self.version)
                if self.random.random() < 0.1:
                    return checkpoint
                self.step += 1
                self.trained[self.step] = [group.uid for group in groups]
                await self.buffer.ack(self.step)
                if self.random.random() < 0.1:
                    return checkpoint
                self.version += 1
                await self.buffer.publish(self.version)
                if self.random.random() < 0.4 or self.step == self.steps:
                    checkpoint = self.step, self.version, dict(self.trained)
                    await self.buffer.before_checkpoint(0)
                if self.random.random() < 0.1:
                    return checkpoint
            return checkpoint
        finally:
            rollout.cancel()
            await asyncio.gather(rollout, return_exceptions=True)
            self.counts = await self.buffer.counts()
            kill(self.buffer)


async def run_through(path, rng, schedules=None, failures=0.05):
    """One life after another until the last step, each with another schedule and number of steps: the uids of each
    step, and the batch sizes. Every life's counts balance, and its versions are new."""
    step, version, trained, sizes = 0, 0, {}, {}
    for schedule, steps in schedules or itertools.repeat((SCHEDULE, STEPS)):
        life = Life(path, step, version, trained, rng, schedule, failures, max(step, steps))
        assert life.version >= version, "a number is not given to two sets of weights"
        before = step
        step, version, trained = await life.live()
        sizes |= dict.fromkeys(range(before + 1, step + 1), schedule.groups_per_step)
        counts = life.counts
        assert counts["admitted"] == counts["trained"] + sum(counts["dropped"].values()) + counts["live"]
        if step == life.steps:
            break
    uids = [uid for batch in trained.values() for uid in batch]
    assert len(set(uids)) == len(uids)
    assert {number: len(batch) for number, batch in trained.items()} == sizes and len(sizes) == step
    ledger = Ledger(path)
    admitted = ledger.admitted()
    rows = dict(ledger._db.execute("SELECT uid, state FROM groups"))
    ledger.close()
    assert {uid for uid, state in rows.items() if state in ("unpublished", "published")} == set(uids)
    # Nobody was passed over: what was admitted is the source's order without a gap.
    source = prompts()
    assert admitted == [source.next().uid for _ in admitted] and len(admitted) == counts["admitted"]
    return trained


@pytest.mark.every(6)
@pytest.mark.parametrize("seed", range(25))
async def test_every_prompt_is_trained_exactly_once_across_repeated_kills(tmp_path, seed):
    trained = await run_through(tmp_path / "ledger.db", random.Random(seed))
    assert len(trained) == STEPS


@pytest.mark.every(4)
@pytest.mark.parametrize("seed", range(10))
async def test_synchronous_batches_of_a_killed_run_equal_those_of_an_uninterrupted_run(tmp_path, seed):
    schedules = itertools.repeat((replace(SCHEDULE, max_staleness=0), STEPS))
    trained = await run_through(tmp_path / "ledger.db", random.Random(seed), schedules, failures=0)
    source = prompts()
    assert trained == {n: [source.next().uid for _ in range(SCHEDULE.groups_per_step)] for n in range(1, STEPS + 1)}


@pytest.mark.every(6)
@pytest.mark.parametrize("seed", range(25))
async def test_a_run_can_resume_with_a_different_schedule_each_time(tmp_path, seed):
    """Batches, staleness, window and length of the run change at every start; no group is lost, and nothing hangs."""
    rng = random.Random(f"schedules {seed}")

    def schedules():
        for start in range(100):
            schedule = ScheduleConfig(
                groups_per_step=rng.randint(1, 6),
                samples_per_group=rng.randint(2, 3),
                max_staleness=rng.randint(0, 2),
                weight_sync_steps=rng.randint(1, 2),
                window_fraction=rng.choice([None, 0.3, 1.0]),
                stale=rng.choice(["mask", "regenerate", "drop"]),
                max_inflight_groups=rng.choice([None, 3]),
            )
            yield schedule, rng.randint(8, STEPS) if start < 6 else STEPS

    await run_through(tmp_path / "ledger.db", rng, schedules())


async def one_step(path, trajectory_of, uids=("0:0", "0:1", "0:2", "0:3")):
    """Four groups: two trained by step 1 and published as version 1, one finished, one being generated."""
    buffer = AsyncBuffer(SCHEDULE, TOTAL, ledger=path)
    for uid in uids:
        await buffer.admit(uid)
    for uid in uids[:3]:
        await buffer.commit(trajectory_of(uid, 0, 0))
    await buffer.lease(1, 0)
    await buffer.ack(1)
    await buffer.publish(1)
    return buffer


async def test_resume_keeps_finished_groups_and_continues_the_others_from_their_partials(tmp_path, group):
    path = tmp_path / "ledger.db"
    begin_ledger(path, 0, 0, {}, {"rows": 5})
    buffer = await one_step(path, group)
    partial = encode_partial(Partial("digest", [7, 8], [-0.1, -0.2], [1, 1]))
    await buffer.save_partials({("0:3", 1, 0): partial})
    await buffer.close("killed")
    kill(buffer)

    for _ in range(2):  # a run that dies while it resumes
        resumed = resume_ledger(path, SCHEDULE, TOTAL, 1)
    assert (resumed.version, resumed.admitted, resumed.origin) == (1, ["0:0", "0:1", "0:2", "0:3"], {"rows": 5})
    again = AsyncBuffer(SCHEDULE, TOTAL, ledger=path)
    assert await again.reclaim() == "0:3"
    assert await again.partials("0:3") == {(1, 0): partial.data}
    await again.commit(group("0:3", 1, 1))
    assert await again.partials("0:3") == {}
    assert [leased.header for leased in await again.lease(2, 1)] == [
        group("0:2", 0, 0).header,
        group("0:3", 1, 1).header,
    ]
    kill(again)


async def test_a_ledger_that_does_not_match_the_checkpoint_is_rejected(tmp_path, group):
    path = tmp_path / "ledger.db"
    begin_ledger(path, 0, 0, {}, {})
    buffer = await one_step(path, group)
    await buffer.release()
    with pytest.raises(
        LedgerError, match="does not belong to this checkpoint.*of step 9.*no step after 1.*move it away"
    ):
        resume_ledger(path, SCHEDULE, TOTAL, 9)


async def test_a_new_ledger_continues_the_counters_of_the_checkpoint(tmp_path, group):
    path = tmp_path / "ledger.db"
    counters = {
        "trained": 8,
        "dropped": {"failed": 2},
        "regenerated": 3,
        "damaged": 0,
        "masked_tokens": 0,
        "removed_trajectories": 1,
    }
    begin_ledger(path, 4, 4, counters, {"position": 10})
    resumed = resume_ledger(path, SCHEDULE, TOTAL, 4)
    assert (resumed.version, resumed.admitted, resumed.origin) == (4, [], {"position": 10})
    buffer = AsyncBuffer(SCHEDULE, TOTAL, ledger=path)
    for uid in ("2:0", "2:1"):
        await buffer.admit(uid)
        await buffer.commit(group(uid, 4, 4))
    await buffer.lease(5, 4)
    await buffer.ack(5)
    assert (await buffer.before_checkpoint(0))["buffer"] == counters | {"trained": 10}
    assert (await buffer.counts())["admitted"] == 12
    kill(buffer)


def test_a_missing_or_empty_ledger_is_reported_as_not_begun_rather_than_damaged(tmp_path):
    path = tmp_path / "ledger.db"
    for empty in (False, True):
        if empty:
            path.touch()
        assert not begun(path)
        with pytest.raises(LedgerError, match="ended before it began; start it again"):
            resume_ledger(path, SCHEDULE, TOTAL, 0)
    begin_ledger(path, 0, 0, {}, {"rows": 5})
    assert begun(path) and resume_ledger(path, SCHEDULE, TOTAL, 0).origin == {"rows": 5}
    assert [file.name for file in tmp_path.iterdir()] == ["ledger.db"]


def test_the_log_of_a_missing_ledger_is_refused(tmp_path):
    (tmp_path / "ledger.db-wal").write_bytes(b"of another ledger")
    with pytest.raises(LedgerError, match="is the log of a missing ledger; put"):
        begin_ledger(tmp_path / "ledger.db", 0, 0, {}, {})


@pytest.mark.processes
def test_interrupted_ledger_creation_leaves_either_no_ledger_or_a_complete_one(tmp_path):
    setup = """
from megasync.buffer import beginning

def begin(folder): ...

def work(folder):
    beginning.begin_ledger(folder / "ledger.db", 0, 0, {}, {"rows": 5})
"""
    modules = ("megasync/buffer/ledger.py", "megasync/buffer/beginning.py", "megasync/base/files.py")
    cases = cut_short(setup, tmp_path, modules, (0, 1000, 4096, 8192, 20_000, 40_000, 80_000), every=5)
    for case in cases:
        path = case.folder / "ledger.db"
        if case.ended == "failed":
            assert "LedgerError" in case.error and "disk" in case.error
            assert list(case.folder.iterdir()) == []
        if case.ended == "done" or path.exists():
            assert begun(path)
        else:
            begin_ledger(path, 0, 0, {}, {"rows": 5})
            assert [file.name for file in case.folder.iterdir()] == ["ledger.db"], "what a kill left is cleared"
        assert resume_ledger(path, SCHEDULE, TOTAL, 0).origin == {"rows": 5}
    assert Counter(case.ended for case in cases)["killed"] > 15 and {"failed", "done"} <= {c.ended for c in cases}


async def test_resume_does_not_reuse_the_number_of_an_unpublished_version_seen_in_tokens(tmp_path, group):
    """A server had version 1 already when the run was killed, before the buffer heard of it."""
    path = tmp_path / "ledger.db"
    begin_ledger(path, 0, 0, {}, {})
    buffer = AsyncBuffer(SCHEDULE, TOTAL, ledger=path)
    await buffer.admit("0:0")
    await buffer.commit(group("0:0", 0, 1))
    kill(buffer)
    assert resume_ledger(path, SCHEDULE, TOTAL, 0).version == 1
