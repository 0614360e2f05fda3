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

SEEDS = int(os.environ.get("MEGASYNC_SIM_SEEDS", "150"))


def test_every_schedule_satisfies_the_invariants_and_terminates() -> None:
    ends: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    for seed in range(SEEDS):
        outcome = simulate(seed)
        ends[outcome.ended] += 1
        faults.update(outcome.faults)
    # A simulator that gives up often, or meets few faults, proves little.
    assert ends["finished"] > 0.75 * SEEDS, ends
    assert set(FAULTS) <= set(faults), "each kind of fault struck somewhere"
    assert {f"at any moment: {kind}" for kind in AT_ANY_MOMENT} <= set(faults)


def test_every_schedule_with_rollout_workers_satisfies_them_too() -> None:
    ends: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    for seed in range(FIRST_WITH_WORKERS, FIRST_WITH_WORKERS + SEEDS // 6):
        outcome = simulate(seed)
        ends[outcome.ended] += 1
        faults.update(outcome.faults)
    assert ends["finished"] > 0.7 * SEEDS / 6, ends
    assert {f"at any moment: {kind}" for kind in OF_WORKERS} | {DEADLY_ROW} <= set(faults)


def test_every_schedule_with_shared_devices_satisfies_them_too() -> None:
    ends: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    for seed in range(FIRST_COLOCATED, FIRST_COLOCATED + SEEDS // 6):
        outcome = simulate(seed)
        ends[outcome.ended] += 1
        faults.update(outcome.faults)
    assert ends["finished"] > 0.7 * SEEDS / 6, ends
    assert {*OF_TURNS, "rank dies in a step", "at any moment: server dies"} <= set(faults)


def test_every_schedule_with_exact_evaluations_satisfies_them_too() -> None:
    ends: Counter[str] = Counter()
    met: Counter[str] = Counter()
    for seed in range(FIRST_EXACT, FIRST_EXACT + SEEDS // 6):
        outcome = simulate(seed)
        ends[outcome.ended] += 1
        met.update(outcome.faults)
    assert ends["finished"] > 0.7 * SEEDS / 6, ends
    assert {OUTLIVED, ABANDONED, "at any moment: server dies"} <= set(met)


def test_what_a_resumed_schedule_changes_may_change() -> None:
    fixed = dict(leaves())
    assert [key for key in RESUMABLE if fixed[key]] == []


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
