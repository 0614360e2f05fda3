"""The exact commands of each launch script."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
SNAPSHOTS = Path(__file__).parent / "dry_runs"
CONFIG = "configs/qwen3_32b_math.yaml"

HOSTS = """\
# two of each
gpu1 trainer
gpu2 trainer
me@gpu3 rollout
gpu4 rollout
"""
JOB = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "n1,n2,n3,n4"}
PARTS = {
    "SLURM_JOB_ID": "18",
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "n1,n2",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "n3,n4",
}


@pytest.mark.parametrize(
    ("script", "arguments", "environment"),
    [
        ("single_node.sh", ["trainer.tensor_parallel=4", "--continue", "this.run"], {}),
        ("multi_node.sh", ["--hosts", "hosts.txt", "--interface", "ib0", "seed=3"], {}),
        ("slurm.sbatch", ["seed=3"], JOB),
        ("slurm_het.sbatch", [], PARTS),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_dry_run_equals_the_recorded_one(script, arguments, environment, tmp_path: Path, fake_scontrol: Path) -> None:
    """If a change of the commands is intended, write the new text to tests/launch/dry_runs/."""
    checkout = tmp_path / "checkout"
    (checkout / "launch").mkdir(parents=True)
    (checkout / "launch" / script).write_bytes((ROOT / "launch" / script).read_bytes())
    (checkout / "configs").symlink_to(ROOT / "configs")
    (checkout / ".venv" / "bin").mkdir(parents=True)
    program = checkout / ".venv" / "bin" / "megasync"
    program.write_text(f'#!/usr/bin/env bash\nexec {sys.executable} -m megasync "$@"\n')
    program.chmod(0o755)
    (checkout / "hosts.txt").write_text(HOSTS)
    shown = subprocess.run(
        ["bash", f"launch/{script}", CONFIG, *arguments, "--dry-run"],
        cwd=checkout,
        env={"PATH": f"{fake_scontrol}:/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    text = shown.stdout.replace(sys.executable, "PYTHON").replace(str(checkout), "CHECKOUT")
    text = re.sub(r"\d{8}-\d{6}", "TIME", text)
    assert text == (SNAPSHOTS / f"{script}.txt").read_text(encoding="utf-8")
