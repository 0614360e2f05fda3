"""What the controller does when a rank or a server is lost, over the real buffer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from controller_rig import FakePublisher, FakeTrainer, Rig

from megasync.control.recovery import named_loss
from megasync.errors import RankLost, TrainingError
from megasync.sync.attempt import PublishError


def trained_once(rig: Rig, steps: int) -> None:
    """The final weights have seen every group of `steps` steps exactly once, and the buffer agrees."""
    assert len(rig.trainer.weights) == len(set(rig.trainer.weights)) == steps * 2
    counts = rig.buffer._state.counts()
    assert counts["trained"] == steps * 2
    assert counts["admitted"] == counts["trained"] + sum(counts["dropped"].values()) + counts["live"]


@pytest.mark.parametrize("call", ["step 1", "step 4", "save 2", "save 6"])
async def test_a_lost_rank_takes_training_back_to_the_checkpoint_and_every_group_counts_once(call: str) -> None:
    rig = Rig(trainer=FakeTrainer(lose={call: 1}), checkpoint_every=2)
    progress = await rig.run()
    assert progress.step == 6
    assert (rig.trainer.restarts, rig.publisher.forgotten) == (1, 1)
    trained_once(rig, 6)
    assert [state["step"] for state in rig.trainer.saved] == [2, 4, 6]
    assert rig.observer.events == [("fault", "trainer"), ("recovery", "trainer")]
    assert rig.publisher.versions == sorted(set(rig.publisher.versions)), "none names two sets of weights"
    if call == "step 4":
        # Three steps were published, then the weights of step 2 again, then steps 3 to 6.
        assert rig.publisher.versions == [1, 2, 3, 4, 5, 6, 7, 8]
        last = rig.observer.metrics[-1]
        assert (last["faults/trainer_restarts"], last["faults/steps_trained_again"]) == (1, 1)
        assert any("attempt 1 of 3: rank 1 died during step 4" in text for text in rig.observer.messages)


async def test_training_goes_on_with_fewer_ranks_and_grows_back_without_training_a_step_again() -> None:
    trainer = FakeTrainer(lose={"step 4": 1})
    trainer.room_after = {5}
    rig = Rig(trainer=trainer, checkpoint_every=2)
    await rig.run()
    assert trainer.restarts == 2 and trainer.data_parallel == rig.publisher.data_parallel == 2
    trained_once(rig, 6)
    # The step before the ranks grow is saved for them.
    assert [state["step"] for state in trainer.saved] == [2, 4, 5, 6]
    assert [step for step, _, _ in trainer.steps] == [1, 2, 3, 3, 4, 5, 6]
    sizes = [metrics["trainer/data_parallel"] for metrics in rig.observer.metrics if "trainer/data_parallel" in metrics]
    assert sizes == [2, 2, 2, 1, 1, 1, 2]


@pytest.mark.parametrize(("call", "again_from"), [("step 3", 0), ("step 5", 2), ("finish 4", 2)])
async def test_a_rank_lost_while_a_checkpoint_is_written_takes_training_back_to_the_one_before(
    call, again_from
) -> None:
    """Each checkpoint is complete only when the next one is due."""
    rig = Rig(trainer=FakeTrainer(lose={call: 1}, slow_saves=True), checkpoint_every=2)
    progress = await rig.run()
    assert progress.step == 6 and rig.trainer.restarts == 1
    trained_once(rig, 6)
    steps = [step for step, _, _ in rig.trainer.steps]
    lost = next(index for index, step in enumerate(steps) if index and step <= steps[index - 1])
    assert steps[lost:] == [*range(again_from + 1, 7)]
    assert [state["step"] for state in rig.trainer.saved] == [2, 4, 6]


async def test_training_waits_for_checkpoints_if_they_are_not_written_in_the_background() -> None:
    rig = Rig(trainer=FakeTrainer(lose={"step 3": 1}, slow_saves=True), checkpoint_every=2, background=False)
    await rig.run()
    assert [step for step, _, _ in rig.trainer.steps] == [1, 2, 3, 4, 5, 6]


async def test_the_version_of_an_interrupted_publish_is_never_reused() -> None:
    # A server may hold the weights of the lost step under number 2.
    rig = Rig(trainer=FakeTrainer(lose={"check": 1}), publisher=FakePublisher(lose={2: ["a"]}))
    await rig.run()
    assert rig.publisher.versions == [1, *range(3, 10)]
    assert rig.fleet.failed == [], "the rank was at fault, not the server"
    trained_once(rig, 6)


@pytest.mark.parametrize("most", [0, 2])
async def test_consecutive_restarts_without_a_new_step_are_limited(most: int) -> None:
    rig = Rig(trainer=FakeTrainer(lose={"step 3": 100}), checkpoint_every=2, max_restarts=most)
    words = rf"rank 1 died during step 3; .*{most} times in a row.*trainer\.max_restarts={most}"
    with pytest.raises(TrainingError, match=words):
        await rig.run()
    assert rig.trainer.restarts == most


async def test_a_new_step_resets_the_restart_budget() -> None:
    rig = Rig(trainer=FakeTrainer(lose={"step 2": 2, "step 3": 2, "step 5": 2}), checkpoint_every=2, max_restarts=2)
    assert (await rig.run()).step == 6
    assert rig.trainer.restarts == 6
    trained_once(rig, 6)


async def test_a_rank_that_is_lost_while_it_starts_is_one_more_restart() -> None:
    rig = Rig(trainer=FakeTrainer(lose={"step 3": 1, "restart": 1}), checkpoint_every=2)
    assert (await rig.run()).step == 6
    assert rig.trainer.restarts == 2
    trained_once(rig, 6)


async def test_a_server_that_fails_a_sync_is_left_out_and_the_rest_gets_the_version() -> None:
    rig = Rig(publisher=FakePublisher(lose={3: ["a"]}))
    progress = await rig.run()
    assert (progress.step, progress.version) == (6, 6)
    assert [list(reasons) for reasons in rig.fleet.failed] == [["a"]]
    assert rig.publisher.only[2:4] == [(3, None), (3, {"b"})]


async def test_a_sync_that_loses_every_server_waits_for_one_to_come_back() -> None:
    rig = Rig(publisher=FakePublisher(lose={3: ["a", "b"]}))
    running = asyncio.create_task(rig.run())
    while not rig.fleet.failed:
        await asyncio.sleep(0)
    rig.fleet.come("a")
    progress = await running
    assert (progress.step, progress.version) == (6, 6)
    assert rig.fleet.up == {"a": True}


async def test_a_sync_that_fails_because_of_a_link_is_retried_a_few_times() -> None:
    rig = Rig(publisher=FakePublisher(lose={2: []}))
    rig.fleet.up["c"] = False
    assert (await rig.run()).version == 6
    assert rig.observer.events == [("fault", "sync"), ("recovery", "sync")]
    assert rig.fleet.up == {"a": True, "b": True, "c": True}, "joiners of a full sync serve after it"

    class Broken(FakePublisher):
        async def publish(self, version, only=None):
            raise PublishError("no route", version, "listen", {})

    with pytest.raises(PublishError, match="no route"):
        await Rig(publisher=Broken()).run()


async def test_a_joiner_gets_the_published_version_while_the_trainer_waits() -> None:
    rig = Rig(rollout={"stall_after": 0})
    running = asyncio.create_task(rig.run())
    await rig.starved()
    rig.fleet.come("c")
    while not rig.fleet.up["c"]:
        await asyncio.sleep(0)
    assert rig.publisher.only == [(0, {"c"})]
    rig.controller.request_stop("enough")
    await running


async def test_a_joiner_gets_a_new_version_when_the_trainer_has_newer_weights() -> None:
    # Two steps train before a sync; after the first of them no group is finished any more.
    rig = Rig(weight_sync_steps=2, rollout={"stall_after": 2})
    running = asyncio.create_task(rig.run())
    while not rig.trainer.steps:
        await asyncio.sleep(0)
    await rig.starved()
    rig.fleet.come("c")
    while not rig.fleet.up["c"]:
        await asyncio.sleep(0)
    assert rig.publisher.only == [(1, None)]
    assert (rig.controller.progress.step, rig.controller.progress.unpublished) == (1, 0)
    rig.controller.request_stop("enough")
    await running


@pytest.mark.parametrize("failure", [{"lose": {0: ["c"]}}, {"disagree": {0: ["c"]}}], ids=["sync", "parity"])
async def test_a_joiner_that_fails_its_sync_or_parity_does_not_serve(failure: dict[str, Any]) -> None:
    rig = Rig(rollout={"stall_after": 0}, publisher=FakePublisher(**failure))
    running = asyncio.create_task(rig.run())
    await rig.starved()
    rig.fleet.come("c")
    while not (rig.fleet.failed or rig.fleet.disagreeing):
        await asyncio.sleep(0)
    rig.controller.request_stop("enough")
    await running
    assert "c" not in rig.fleet.up


async def test_a_server_that_fails_parity_is_restarted_and_the_others_serve_the_version() -> None:
    rig = Rig(publisher=FakePublisher(disagree={3: ["a"]}))
    progress = await rig.run()
    assert (progress.step, progress.version) == (6, 6)
    assert rig.fleet.disagreeing == [{"a": "off by 3 nats"}]
    # Version 3 is not published again: the others hold it.
    assert rig.publisher.versions == [1, 2, 3, 4, 5, 6]
    assert rig.fleet.up == {"b": True}
    assert rig.observer.metrics[-1]["faults/parity_restarts"] == 1.0


async def test_a_joiner_that_fails_the_parity_of_an_ordinary_publish_does_not_serve() -> None:
    rig = Rig(publisher=FakePublisher(disagree={3: ["c"]}))
    ack = rig.buffer.ack

    async def come_between_step_and_publish(step: int) -> None:
        await ack(step)
        if step == 3:
            rig.fleet.up["c"] = False

    rig.buffer.ack = come_between_step_and_publish
    await rig.run()
    assert rig.fleet.disagreeing == [{"c": "off by 3 nats"}]
    assert "c" not in rig.fleet.up and rig.observer.metrics[-1]["faults/servers_joined"] == 0.0


async def test_a_version_that_no_server_serves_is_published_again_to_the_restarted_ones() -> None:
    rig = Rig(publisher=FakePublisher(lose={3: ["b"]}, disagree={3: ["a"]}))
    running = asyncio.create_task(rig.run())
    while not rig.fleet.disagreeing:
        await asyncio.sleep(0)
    assert rig.fleet.up == {}
    rig.fleet.come("a2")
    await running
    assert rig.publisher.versions == [1, 2, 3, 3, 4, 5, 6]
    assert rig.fleet.up == {"a2": True}


async def test_the_fleet_knows_which_servers_are_in_a_sync() -> None:
    rig = Rig(publisher=FakePublisher(lose={3: ["a"]}), evaluate=False)
    await rig.run()
    assert rig.fleet.synced[:4] == [{"a", "b"}, {"a", "b"}, {"a", "b"}, {"b"}]
    assert rig.fleet.in_sync == set()


@pytest.mark.parametrize(
    ("slots", "named"),
    [
        ((), "trainer"),
        ((1,), "rank 1"),
        ((0, 2), "ranks 0, 2"),
        (tuple(range(20)), "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"),
    ],
)
def test_a_loss_is_named_after_its_ranks(slots, named) -> None:
    loss = RankLost("lost")
    loss.slots = slots
    assert named_loss(loss) == named


@pytest.mark.parametrize("checkpoint_every", [0, 1, 2])
@pytest.mark.parametrize("outlasts", [1, 2, 4])
async def test_a_score_is_of_the_weights_that_the_run_goes_on_from(checkpoint_every: int, outlasts: int) -> None:
    """The evaluation of step 2 goes on while ranks are lost in step 3, until step 2 + `outlasts` is trained again.

    Only from a checkpoint of step 2 does training go on from the weights that are being evaluated.
    """
    rig: Any = None
    begun: list[tuple[int, int]] = []

    async def evaluation(step: int, version: int, pinned: object) -> None:
        begun.append((step, version))
        if len(begun) == 2:
            while not (rig.trainer.restarts and rig.controller.progress.step >= 2 + outlasts):
                await asyncio.sleep(0)

    rig = Rig(
        trainer=FakeTrainer(lose={"step 3": 1}), evaluation=evaluation, score=0.7, checkpoint_every=checkpoint_every
    )
    scored: list[tuple[int, int]] = []
    rig.observer.evaluation = lambda step, version, metrics: scored.append((step, version))
    progress = await rig.run()
    assert begun[1] == (2, 2)
    kept = checkpoint_every > 0
    assert ((2, 2) in scored) == kept
    lost = [step for step, _ in scored] != sorted({step for step, _ in scored})
    assert not lost and [step for step, _ in progress.history] == [step for step, _ in scored]
    assert (rig.controller._abandoned_evaluations == 1) == (not kept)


async def test_a_target_that_lost_weights_have_reached_does_not_end_the_run() -> None:
    rig: Any = None

    async def evaluation(step: int, version: int, pinned: object) -> None:
        if version == 2:
            while not (rig.trainer.restarts and rig.controller.progress.step >= 3):
                await asyncio.sleep(0)

    rig = Rig(trainer=FakeTrainer(lose={"step 3": 1}), evaluation=evaluation, stop_at_score=0.9)
    score = {2: 1.0}
    rig.controller._evaluate = _scoring(rig.controller._evaluate, score)
    progress = await rig.run()
    assert progress.step == 6 and not rig.controller.stop_reason


def _scoring(evaluate: Any, scores: dict[int, float]) -> Any:
    async def scored(step: int, version: int, pinned: object) -> dict[str, float]:
        return await evaluate(step, version, pinned) | {"eval/score": scores.get(version, 0.1)}

    return scored
