"""Prompts get workers, and a prompt that kills its workers is found among those that ran beside it."""

import json
import random

from hypothesis import given
from hypothesis import strategies as st

from megasync.errors import PoisonPrompt
from megasync.rollout.placement import Placement
from megasync.trajectory import Prompt


def prompt(key):
    row = int(key.rpartition(":")[2])
    return Prompt(key, [row], {"prompt": str(row)})


class Crew:
    """Workers by number, whose processes are replaced when they are lost. `killers` are rows that kill their worker."""

    def __init__(self, workers, killers=(), folder=None):
        self.refunds, self.changes, self.losses, self.time = [], 0, 0, 0.0
        self.placement = Placement(folder, self.refunds.append, lambda: self.time)
        self.placement.follow(self.changed)
        self.killers = set(killers)
        self.alive = {}
        for number in range(workers):
            self.start(number)
        self.unplaced, self.poison, self.done = [], {}, []

    def changed(self):
        self.changes += 1

    def start(self, number):
        self.alive[number] = process = (number, random.random())
        self.placement.add(process, number)

    def place(self, key):
        try:
            process = self.placement.place(key, prompt(key))
        except PoisonPrompt as error:
            self.poison[key] = str(error)
            self.placement.ended(key)
            return None
        if process is None:
            self.unplaced.append(key)
            return None
        assert process in self.alive.values(), "only a worker that lives gets prompts"
        return process[0]

    def place_waiting(self):
        waiting, self.unplaced = self.unplaced, []
        return {key: self.place(key) for key in waiting}

    def running(self, number):
        return list(self.placement._processes[self.alive[number]].running)

    def finish(self, key):
        self.placement.ended(key)
        self.done.append(key)

    def lose(self, number):
        """As `RolloutWorkers`: the loss, the replacement, and then the prompts are placed again."""
        self.time += 1.0
        self.losses += 1
        keys, process = self.running(number), self.alive.pop(number)
        self.placement.remove(process, "it died")
        self.start(number)
        self.unplaced += keys
        self.place_waiting()


def test_each_prompt_goes_to_the_worker_with_the_fewest():
    crew = Crew(3)
    assert [crew.place(f"0:{row}") for row in range(6)] == [0, 1, 2, 0, 1, 2]
    crew.finish("0:1")
    assert crew.place("0:7") == 1


def test_prompts_of_two_losses_run_in_trials_and_are_free_once_they_complete():
    crew = Crew(1)
    for row in range(4):
        crew.place(f"0:{row}")
    crew.lose(0)
    crew.lose(0)
    assert crew.running(0) == ["0:0", "0:1", "0:2", "0:3"]
    assert crew.place("0:9") is None, "the worker of a trial gets nothing else"
    crew.finish("0:0")
    crew.lose(0)
    for key in ("0:1", "0:2"):
        assert crew.running(0) == [key], "one at a time"
        crew.finish(key)
        crew.place_waiting()
    changes = crew.changes
    crew.finish("0:3")
    assert crew.changes > changes, "followers are called when the trial has ended"
    crew.place_waiting()
    assert crew.running(0) == ["0:9"]
    assert crew.poison == {}


def test_a_prompt_that_kills_its_worker_is_found_reported_and_not_run_again(tmp_path):
    crew = Crew(1, folder=tmp_path)
    for row in range(4):
        crew.place(f"0:{row}")
    crew.lose(0)
    crew.lose(0)
    assert crew.refunds == []
    crew.lose(0)
    assert crew.running(0) == ["0:0"], "one at a time"
    crew.lose(0)
    assert crew.poison == {}, "one loss alone may be a coincidence"
    assert crew.running(0) == ["0:0"]
    crew.lose(0)
    assert list(crew.poison) == ["0:0"]
    assert len(crew.refunds) == crew.losses, "its losses do not count against the worker's restarts"
    assert "ran on 2 rollout workers that were lost beside others, and alone on 2 more" in crew.poison["0:0"]
    report = json.loads((tmp_path / "0-0.json").read_text())
    assert (report["uid"], report["reason"], report["row"]) == ("0:0", "kills_workers", {"prompt": "0"})
    assert [len(report["deaths"][kind]) for kind in ("crowd", "alone")] == [2, 2]
    assert report["last_death"] == "it died"
    # The same row in the next epoch.
    assert crew.place("1:0") is None
    assert "1:0" in crew.poison
    assert crew.place("1:9") is None, "its neighbours are still on trial"


def test_a_trial_without_an_idle_worker_waits_for_one_that_gets_nothing_new():
    placement = Placement(clock=iter(range(100)).__next__)

    def place(row):
        return placement.place(f"0:{row}", prompt(f"0:{row}"))

    for worker in "ABC":
        placement.add(worker)
    assert [place(row) for row in (0, 1, 2)] == ["A", "B", "C"]
    placement.remove("A")
    assert place(0) == "B"
    # None of the lost ones is replaced: their restarts are used up.
    placement.remove("B")
    assert (place(0), place(1)) == (None, None)
    placement.ended("0:2")
    assert (place(1), place(0)) == (None, "C")
    placement.ended("0:0")
    assert place(1) == "C"


def test_a_member_that_was_not_placed_yet_is_not_blamed_for_the_loss_of_its_trial():
    crew = Crew(1)
    crew.place("0:0")
    for _ in range(3):
        crew.time += 1.0
        crew.placement.remove(crew.alive.pop(0), "it died")
        crew.start(0)
        if not crew.placement._trial:
            crew.place("0:0")
    crew.placement.remove(crew.alive.pop(0), "it died")
    crew.start(0)
    assert crew.place("0:0") == 0
    assert crew.poison == {}


def test_a_worker_that_is_stopped_on_purpose_counts_against_no_prompt():
    crew = Crew(1)
    crew.place("0:0")
    for _ in range(8):
        crew.time += 1.0
        crew.placement.remove(crew.alive.pop(0), "it was stopped", by_prompts=False)
        crew.start(0)
        assert crew.place("0:0") == 0
        assert crew.placement.metrics()["rollout/worker_suspects"] == 0.0


@given(
    workers=st.integers(1, 4),
    prompts=st.integers(1, 24),
    killers=st.sets(st.integers(0, 23), max_size=3),
    seed=st.integers(0, 2**16),
    slack=st.sampled_from([0.0, 0.3]),
    strikes=st.integers(0, 4),
)
def test_killers_are_found_and_everything_else_completes(workers, prompts, killers, seed, slack, strikes):
    """`slack` is the share of prompts that complete before a killer strikes. Workers also die of themselves: `strikes`
    times, though never twice under the same prompt alone, which would rightly be taken for the cause.
    """
    choice, unlucky = random.Random(seed), set()
    crew = Crew(workers, killers)
    for row in range(prompts):
        crew.place(f"0:{row}")
    for _ in range(400):
        crew.place_waiting()
        running = [(number, key) for number in crew.alive for key in crew.running(number)]
        if not running:
            break
        number, key = choice.choice(running)
        beside = crew.running(number)
        if prompt(key).prompt_ids[0] in crew.killers:
            crew.lose(number)
        elif strikes and choice.random() < 0.3 and not (len(beside) == 1 and key in unlucky):
            unlucky |= set(beside) if len(beside) == 1 else set()
            strikes -= 1
            crew.lose(number)
            crew.losses -= 1
        elif choice.random() < 0.3 + slack or not any(prompt(k).prompt_ids[0] in crew.killers for k in beside):
            crew.finish(key)
    rows = {f"0:{row}" for row in range(prompts)}
    guilty = {key for key in rows if prompt(key).prompt_ids[0] in killers}
    assert set(crew.poison) == guilty
    assert sorted(crew.done) == sorted(rows - guilty)
    assert crew.placement._reserved is None, "every trial ends"
    assert crew.losses <= len(guilty) * 5
    # Refunds: of all losses in trials, and of those that a killer explains. What is left fits into a worker's budget.
    assert crew.losses <= len(crew.refunds)
