"""Seeded schedules of faults over the real controller, buffer and rollouter. `megasync simulate` runs more of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest

from megasync.config.changes import leaves
from megasync.lab.sim import simulate
from megasync.lab.sim.chance import FAULTS, OF_TURNS
from megasync.lab.sim.driver import ABANDONED, AT_ANY_MOMENT, OF_WORKERS, OUTLIVED
from megasync.lab.sim.world import DEADLY_ROW, FIRST_COLOCATED, FIRST_EXACT, FIRST_WITH_WORKERS, RESUMABLE

SEEDS = int(os.environ.get("MEGASYNC_SIM_SEEDS", "72"))


def at_any_moment(*kinds: str) -> set[str]:
    return {f"at any moment: {kind}" for kind in kinds}


# First seed and number of seeds, the least share of runs that finish, and the faults that strike somewhere: a simulator
# that gives up often, or meets few faults, proves little.
KINDS = {
    "plain": (0, SEEDS, 0.75, {*FAULTS, *at_any_moment(*AT_ANY_MOMENT)}),
    "rollout workers": (FIRST_WITH_WORKERS, SEEDS // 6, 0.7, {DEADLY_ROW, *at_any_moment(*OF_WORKERS)}),
    "shared devices": (
        FIRST_COLOCATED,
        SEEDS // 6,
        0.7,
        {*OF_TURNS, "rank dies in a step", *at_any_moment("server dies")},
    ),
    "exact evaluations": (FIRST_EXACT, SEEDS // 4, 0.7, {OUTLIVED, ABANDONED, *at_any_moment("server dies")}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_schedule_satisfies_the_invariants_and_terminates(kind: str) -> None:
    first, seeds, least_finished, expected = KINDS[kind]
    ends: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    for seed in range(first, first + seeds):
        outcome = simulate(seed)
        ends[outcome.ended] += 1
        faults.update(outcome.faults)
    assert ends["finished"] > least_finished * seeds, ends
    assert expected <= faults.keys()


def test_what_a_resumed_schedule_changes_may_change() -> None:
    fixed = dict(leaves())
    assert [key for key in RESUMABLE if fixed[key]] == []


@pytest.mark.matrix
@pytest.mark.processes
def test_a_seed_reproduces_the_same_run_in_any_process() -> None:
    seed = next(seed for seed in range(100) if len(simulate(seed).faults) > 5)
    here = simulate(seed).history
    code = f"from megasync.lab.sim import simulate; print('\\n'.join(simulate({seed}).history))"
    for hash_seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        there = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        assert there.stdout.splitlines() == "\n".join(here).splitlines()
