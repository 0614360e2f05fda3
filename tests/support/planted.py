"""Plants faults, each in a copy of the tree, and reports which tier finds each:

    .venv/bin/python tests/support/planted.py [NUMBER ...]

A fault's tests are those that its file reaches, as `--affected` sees it. The likeliest run first, up to the first
failure: the cheapest tier before the others, and within a tier the nearest files, from which a fault is seen whole. As
many faults are tried at once as there are cores. `tests/suite/test_planted.py` sees that each text is still there once.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

import affected

ROOT = Path(__file__).parents[2]
# Fails for every planted fault.
CHECK = "tests/suite/test_planted.py"
# Of each tier, the tests that lower ones do not have, and the longest way of imports to a test that is worth trying.
TIERS = {
    "fast": (["--tier", "fast"], 3),
    "standard": (["--tier", "standard", "-m", "processes or standard"], 2),
    "full": (["--tier", "full", "-m", "real or ranks or matrix or extra"], 20),
}


class Fault(NamedTuple):
    file: str
    old: str
    new: str

    def planted(self, root: Path) -> str:
        """The file's text with the fault. Raises ValueError if what it replaces is not there exactly once."""
        path = root / self.file
        text = path.read_text() if path.exists() else ""
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.file} has {count} times, not once, the text of a planted fault: {self.old!r}")
        return text.replace(self.old, self.new)


FAULTS = (
    Fault(
        "megasync/algorithms/losses.py",
        "trainer.float() - behaviour.float()",
        "behaviour.float() - trainer.float()",
    ),
    Fault("megasync/algorithms/advantages.py", "centred) / (len(rewards) - 1))", "centred) / len(rewards))"),
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
    Fault("megasync/trainer/gated_delta_net.py", ".triu(1)", ".triu(0)"),
    Fault("megasync/data/digits.py", "while len(drawn) < config.size:", "while len(drawn) <= config.size:"),
    Fault("megasync/coding/reward.py", "elif not self._partial:", "elif self._partial:"),
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
        '        atomic_write(partial / folder / MARKER, "")\n    durable_rename(partial, path)\n',
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


def found_by(fault: Fault, users: dict[str, set[str]]) -> str:
    """The tier and the test that fail first."""
    by_distance: dict[int, list[str]] = {}
    for file, far in sorted(affected.reached_by({fault.file}, users).items()):
        if file != CHECK:
            by_distance.setdefault(far, []).append(file)
    with tempfile.TemporaryDirectory(prefix="planted-") as name:
        folder = Path(name)
        copy(folder)
        (folder / fault.file).write_text(fault.planted(folder))
        for tier, (options, farthest) in TIERS.items():
            for far in sorted(far for far in by_distance if far <= farthest):
                if failure := first_failure(folder, [*options, *by_distance[far]]):
                    return f"{tier}: {failure}"
    return "not found"


def first_failure(folder: Path, arguments: list[str]) -> str:
    command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-p", "no:cacheprovider", "-rf", *arguments]
    path = {**os.environ, "PYTHONPATH": str(folder)}
    ran = subprocess.run(command, cwd=folder, env=path, capture_output=True, text=True)
    if failure := re.search(r"^(FAILED|ERROR) \S+", ran.stdout, re.MULTILINE):
        return failure[0]
    # 5: none of these tests is of the tier.
    return "" if ran.returncode in (0, 5) else f"pytest ended with {ran.returncode}: {(ran.stdout + ran.stderr)[-999:]}"


def main() -> None:
    chosen = [int(number) for number in sys.argv[1:]] or range(len(FAULTS))
    users = affected.users_of_files(ROOT)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        numbers = {pool.submit(found_by, FAULTS[number], users): number for number in chosen}
        for result in as_completed(numbers):
            number = numbers[result]
            print(f"{number:2} {FAULTS[number].file}: {result.exception() or result.result()}", flush=True)


if __name__ == "__main__":
    main()
