"""Plants faults, one at a time, in a copy of the tree and reports which tier finds each:

    .venv/bin/python tests/support/planted.py [NUMBER ...]

Each tier runs, nearest first, tests that the changed file reaches, up to the first failure; whole runs, which every
change reaches, come last. A fault whose text is no longer there exactly once is reported as stale.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import affected

ROOT = Path(__file__).parents[2]
# Of each tier, the tests that lower ones do not have.
TIERS = {
    "fast": ["--tier", "fast"],
    "standard": ["--tier", "standard", "-m", "processes or standard"],
    "full": ["--tier", "full", "-m", "real or ranks or matrix or extra"],
}


# Imports between the changed file and a test; only the full tier looks farther.
NEAR = 2


class Fault(NamedTuple):
    file: str
    old: str
    new: str


FAULTS = (
    Fault(
        "megasync/algorithms/importance.py",
        "trainer.float() - behaviour.float()",
        "behaviour.float() - trainer.float()",
    ),
    Fault("megasync/algorithms/advantages/grpo.py", "/ (len(rewards) - 1))", "/ len(rewards))"),
    Fault(
        "megasync/control/publishing.py", "if failed or self._reservations.pinned() else None", "if failed else None"
    ),
    Fault(
        "megasync/control/pinning.py",
        "finally:\n                    self._servers.unpin(servers.urls)",
        "finally:\n                    pass",
    ),
    Fault("megasync/layout/engine_layout.py", "if slot.hf_name in frozen}", "if slot.hf_name not in frozen}"),
    Fault("megasync/sync/shard/sync.py", "if bases == {self._bases.get(plan)}", "if self._bases.get(plan) in bases"),
    Fault("megasync/sync/shard/sender.py", "self.bytes += lane.bytes", "self.bytes = lane.bytes"),
    Fault(
        "megasync/rollout/conversation.py",
        "[_marked_call(call) for call in calls]",
        "[_marked_call(calls[0]), *calls[1:]]",
    ),
    Fault("megasync/serving/health.py", "if streak >= limit:", "if streak > limit:"),
    Fault(
        "megasync/serving/health.py", "not self._probe_streak and not self._request_streak", "not self._probe_streak"
    ),
    Fault("megasync/trainer/quantized.py", "op=dist.ReduceOp.MAX", "op=dist.ReduceOp.SUM"),
    Fault("megasync/trainer/packing.py", "root * (root + 1) // 2", "root * (root - 1) // 2"),
    Fault("megasync/trainer/gated_delta_rule.py", ".triu(1)", ".triu(0)"),
    Fault("megasync/data/digits.py", "while len(drawn) < config.size:", "while len(drawn) <= config.size:"),
    Fault("megasync/rewards/code_reward.py", "elif not self._partial:", "elif self._partial:"),
    Fault("megasync/evaluation/evaluate.py", "counts.rewards / counts.scored if", "counts.rewards / total if"),
    Fault(
        "megasync/concurrency/tasks.py",
        "return await asyncio.gather(*tasks)\n    finally:\n        await ",
        "return await asyncio.gather(*tasks)\n    finally:\n        ",
    ),
    Fault("megasync/base/files.py", "        fsync_tree(draft)\n", ""),
    Fault(
        "megasync/buffer/beginning.py",
        "        fsync(draft)\n        durable_rename(draft, path)\n",
        "        durable_rename(draft, path)\n        fsync(path)\n",
    ),
    Fault(
        "megasync/trainer/checkpoint.py",
        '    atomic_write(partial / MARKER, "")\n    durable_rename(partial, path)\n',
        '    durable_rename(partial, path)\n    atomic_write(path / MARKER, "")\n',
    ),
    Fault(
        "megasync/trajectory/runs.py",
        'np.searchsorted(self.ends, start, "right")',
        'np.searchsorted(self.ends, start, "left")',
    ),
)


def copy(folder: Path) -> None:
    """The files of the checkout as they are now; models and the environment by links."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    subprocess.run(["cp", "--parents", "-t", folder, *names.strip("\0").split("\0")], cwd=ROOT, check=True)
    for name in (".venv", "models"):
        if (ROOT / name).exists() and not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)


def found_by(folder: Path, fault: Fault) -> str:
    """The tier and the test that fail first."""
    reached = affected.distances(folder, {fault.file})
    files = sorted(reached, key=lambda file: (reached[file], file))
    for tier, options in TIERS.items():
        chosen = [file for file in files if tier == "full" or reached[file] <= NEAR]
        ran = subprocess.run(
            [sys.executable, "-m", "pytest", "-n", "0", "-x", "-p", "no:cacheprovider", "-rf", *options, *chosen],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder)},
            capture_output=True,
            text=True,
        )
        if failure := re.search(r"^(FAILED|ERROR) \S+", ran.stdout, re.MULTILINE):
            return f"{tier}: {failure[0]}"
        if ran.returncode not in (0, 5):
            return f"{tier}: pytest ended with {ran.returncode}: {ran.stdout[-500:]}{ran.stderr[-500:]}"
    return "not found"


def main() -> None:
    chosen = [int(number) for number in sys.argv[1:]] or range(len(FAULTS))
    with tempfile.TemporaryDirectory(prefix="planted-") as name:
        folder = Path(name)
        copy(folder)
        for number in chosen:
            fault = FAULTS[number]
            path = folder / fault.file
            text = path.read_text() if path.exists() else ""
            if text.count(fault.old) != 1:
                print(f"{number:2} {fault.file}: stale: {fault.old!r}", flush=True)
                continue
            path.write_text(text.replace(fault.old, fault.new))
            print(f"{number:2} {fault.file}: {found_by(folder, fault)}", flush=True)
            path.write_text(text)


if __name__ == "__main__":
    main()
