"""The Slurm job that this process belongs to: its nodes, and requeueing it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from megasync.config.pools import NODE_POOLS
from megasync.errors import ConfigError, MegasyncError
from megasync.launch.hosts import Host

# Runs one command on a node of the allocation, in addition to what already runs there.
SHELL = "srun --overlap --quiet --nodes=1 --ntasks=1 --kill-on-bad-exit=0 --nodelist"

# Slurm's controller may be busy or briefly unavailable.
REQUEUE_SECONDS = 120.0
# What scontrol reports if the job to requeue is already in the queue.
ALREADY_PENDING = "job is pending"


def slurm_hosts(environment: Mapping[str, str] = os.environ) -> list[Host]:
    """The nodes of the allocation. In a heterogeneous job the first component trains and the second generates.

    Raises ConfigError outside an allocation.
    """
    parts = int(environment.get("SLURM_HET_SIZE", "0"))
    if not parts:
        return [Host(name, address=_address(name)) for name in _names(environment, "SLURM_JOB_NODELIST")]
    if parts != len(NODE_POOLS):
        raise ConfigError(
            f"the job has {parts} components; a heterogeneous job needs one for each of {', '.join(NODE_POOLS)}"
        )
    return [
        Host(name, pool, SHELL.replace("srun", f"srun --het-group={part}", 1), _address(name))
        for part, pool in enumerate(NODE_POOLS)
        for name in _names(environment, f"SLURM_JOB_NODELIST_HET_GROUP_{part}")
    ]


def _names(environment: Mapping[str, str], variable: str) -> list[str]:
    nodes = environment.get(variable)
    if not nodes:
        raise ConfigError(
            f"{variable} is not set; use --slurm inside a job started by `sbatch launch/slurm.sbatch CONFIG`"
        )
    return _scontrol("show", "hostnames", nodes).split()


def _address(node: str) -> str:
    """The address of a node, whose Slurm name may not resolve on the other nodes."""
    words = _scontrol("show", "node", node, "--oneliner").split()
    return next((word.removeprefix("NodeAddr=") for word in words if word.startswith("NodeAddr=")), node)


def _scontrol(*words: str) -> str:
    shown = subprocess.run(["scontrol", *words], capture_output=True, text=True, check=False)
    if shown.returncode:
        raise ConfigError(f"`scontrol {' '.join(words)}` failed: {shown.stderr.strip()}")
    return shown.stdout


def run_file(run_root: str) -> Path:
    """The --continue file of this job, by which it resumes its run after a requeue."""
    return Path(run_root) / f"slurm-{os.environ['SLURM_JOB_ID']}.run"


def requeue(environment: Mapping[str, str] = os.environ) -> None:
    """Asks Slurm to end this job and queue it again. A job that Slurm has already requeued stays as it is.

    Raises MegasyncError if Slurm refuses.
    """
    job = environment["SLURM_JOB_ID"]
    command = ["scontrol", "requeue", job]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=REQUEUE_SECONDS)
        refusal = (done.stderr.strip() or f"status {done.returncode}") if done.returncode else ""
    except subprocess.TimeoutExpired:
        refusal = f"no answer within {REQUEUE_SECONDS:g} s"
    if refusal and ALREADY_PENDING not in refusal.lower():
        raise MegasyncError(
            f"Slurm refused to requeue job {job}: {refusal}; to resume from the last checkpoint, submit the same "
            f"command again with --continue RUN_ROOT/slurm-{job}.run"
        )
