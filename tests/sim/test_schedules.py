"""Seeded schedules of faults over the real controller, buffer and rollouter. `megasync simulate` runs more of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

from megasync.sim import simulate
from megasync.sim.chance import FAULTS

SEEDS = int(os.environ.get("MEGASYNC_SIM_SEEDS", "300"))


def test_no_schedule_breaks_a_law_and_every_run_ends() -> None:
    ends: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    for seed in range(SEEDS):
        outcome = simulate(seed)
        ends[outcome.ended] += 1
        faults.update(outcome.faults)
    # A simulator that gives up often, or meets few faults, proves little.
    assert ends["finished"] > 0.75 * SEEDS, ends
    assert set(FAULTS) <= set(faults), "each kind of fault struck somewhere"


def test_a_seed_is_the_same_run_again_in_any_process() -> None:
    seed = next(seed for seed in range(100) if len(simulate(seed).faults) > 5)
    here = simulate(seed).history
    code = f"from megasync.sim import simulate; print('\\n'.join(simulate({seed}).history))"
    for hash_seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        there = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        assert there.stdout.splitlines() == "\n".join(here).splitlines()
