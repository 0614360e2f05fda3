"""What Slurm says of the job that this process is part of."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from megasync.cluster.marks import POOLS
from megasync.errors import ConfigError, MegasyncError
from megasync.launch.hosts import Host

# Runs one command on a node of the allocation, beside what else runs there.
SHELL = "srun --overlap --quiet --nodes=1 --ntasks=1 --kill-on-bad-exit=0 --nodelist"

# Slurm's controller may be busy, or away for a moment.
ANSWER_SECONDS = 120.0
# What scontrol says of a job that it is asked to requeue and that is in the queue.
WAITS_ALREADY = "job is pending"


def slurm_hosts(environment: Mapping[str, str] = os.environ) -> list[Host]:
    """The nodes of the allocation; of a heterogeneous one the first part trains and the second generates.

    Raises ConfigError outside an allocation.
    """
    parts = int(environment.get("SLURM_HET_SIZE", "0"))
    if not parts:
        return [Host(name, address=_address(name)) for name in _names(environment, "SLURM_JOB_NODELIST")]
    if parts != len(POOLS):
        raise ConfigError(f"the job has {parts} parts; a heterogeneous job has one for each of {', '.join(POOLS)}")
    return [
        Host(name, pool, SHELL.replace("srun", f"srun --het-group={part}", 1), _address(name))
        for part, pool in enumerate(POOLS)
        for name in _names(environment, f"SLURM_JOB_NODELIST_HET_GROUP_{part}")
    ]


def _names(environment: Mapping[str, str], variable: str) -> list[str]:
    nodes = environment.get(variable)
    if not nodes:
        raise ConfigError(f"{variable} is not set; --slurm is for jobs that `sbatch launch/slurm.sbatch CONFIG` starts")
    return _scontrol("show", "hostnames", nodes).split()


def _address(node: str) -> str:
    """A node's name in Slurm need not be one by which its neighbours find it."""
    words = _scontrol("show", "node", node, "--oneliner").split()
    return next((word.removeprefix("NodeAddr=") for word in words if word.startswith("NodeAddr=")), node)


def _scontrol(*words: str) -> str:
    shown = subprocess.run(["scontrol", *words], capture_output=True, text=True, check=False)
    if shown.returncode:
        raise ConfigError(f"`scontrol {' '.join(words)}` failed: {shown.stderr.strip()}")
    return shown.stdout


def run_file(run_root: str, environment: Mapping[str, str] = os.environ) -> Path:
    """Names the run that a requeued job goes on with."""
    return Path(run_root) / f"slurm-{environment['SLURM_JOB_ID']}.run"


def requeue(environment: Mapping[str, str] = os.environ) -> None:
    """Slurm ends this job and starts it again when there is room. One that Slurm has put back by itself is left there.

    Raises MegasyncError when Slurm refuses.
    """
    job = environment["SLURM_JOB_ID"]
    command = ["scontrol", "requeue", job]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=ANSWER_SECONDS)
        refusal = (done.stderr.strip() or f"status {done.returncode}") if done.returncode else ""
    except subprocess.TimeoutExpired:
        refusal = f"no answer in {ANSWER_SECONDS:g} s"
    if refusal and WAITS_ALREADY not in refusal.lower():
        raise MegasyncError(
            f"Slurm does not put job {job} back into its queue: {refusal}; submit the same command again with "
            f"--continue RUN_ROOT/slurm-{job}.run, which goes on from what was saved"
        )
