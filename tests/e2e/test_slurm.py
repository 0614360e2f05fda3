"""`sbatch launch/slurm.sbatch` and `slurm_het.sbatch` under real Slurm.

A run on the nodes of a job is preempted, loses a node, and resumes later.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from namespaces import FakeHosts, permitted
from slurm import FakeSlurm, installed
from waits import wait_until

ROOT = Path(__file__).parents[2]
ENDLESS = {"total_steps": 100_000}
SMALL = {"rollout": {"servers": 1}, "cluster": {"devices_per_node": 2}, "checkpoint": {"every_steps": 2}}

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not installed(), reason="needs Slurm and munge"),
    pytest.mark.skipif(not permitted(), reason="needs root, namespaces, and iproute2 and util-linux"),
]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHosts]:
    made = FakeHosts(tmp_path_factory.mktemp("hosts"), 4)
    yield made
    made.close()


@pytest.fixture(scope="module")
def cluster(hosts: FakeHosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeSlurm]:
    """Three nodes, n1 to n3."""
    made = FakeSlurm(tmp_path_factory.mktemp("slurm"), hosts)
    yield made
    made.close()


class Batch:
    """A job, and the output of its script over all of its starts."""

    def __init__(self, cluster: FakeSlurm, out: Path, *words: str | Path) -> None:
        self._cluster, self._out = cluster, out
        options = ("--parsable", f"--chdir={ROOT}", f"--output={out}")
        self.job = cluster.command("sbatch", *options, *words).strip().partition(";")[0]

    @property
    def output(self) -> str:
        return self._out.read_text(errors="replace") if self._out.exists() else ""

    def wait_for(self, text: str, since: str = "") -> None:
        """Behind the first `since`, where one is named."""
        self._until(lambda: text in self.output.partition(since)[2] if since else text in self.output, text)

    def wait(self) -> None:
        self._until(lambda: not self._cluster.command("squeue", "-h", "-j", self.job), "its end")

    def signal(self, name: str) -> None:
        """To the script alone, as Slurm does before the time limit."""
        self._cluster.command("scancel", "--batch", f"--signal={name}", self.job)

    def _until(self, condition: Callable[[], object], what: str) -> None:
        def met() -> bool:
            there = self._cluster.command("squeue", "-h", "-j", self.job)
            found = condition()
            assert found or there, f"the job ended before {what!r}:\n{self.output}"
            return bool(found)

        wait_until(met, lambda: f"waited for {what!r} in vain:\n{self.output}\n{self._cluster.command('squeue', '-l')}")


def test_a_preempted_job_saves_and_resumes_when_requeued(cluster, miniature, tmp_path) -> None:
    config = miniature(schedule=ENDLESS, **SMALL)
    batch = Batch(cluster, tmp_path / "job.out", "--nodes=2", ROOT / "launch" / "slurm.sbatch", config)
    batch.wait_for("step 3/")
    cluster.take_all_nodes()
    requeued = "requeueing the job"
    batch.wait_for(requeued)
    saved = int(re.findall(r"trained (\d+) steps", batch.output)[-1])
    batch.wait_for(f"step {saved + 2}/", requeued)
    assert "over 2 nodes" in batch.output
    assert f"step {saved}/" not in batch.output.partition(requeued)[2], "it went on from there"
    batch.signal("TERM")
    batch.wait()
    assert batch.output.count("published version") == 2, batch.output


@pytest.mark.hosts
def test_a_job_killed_without_notice_resumes_from_its_last_checkpoint(cluster, miniature, tmp_path) -> None:
    config = miniature(schedule=ENDLESS, **SMALL)
    script = ROOT / "launch" / "slurm.sbatch"
    batch = Batch(cluster, tmp_path / "job.out", "--partition=abrupt", "--nodes=2", script, config)
    batch.wait_for("step 5/")
    cluster.take_all_nodes()
    batch.wait_for("resuming with the configuration ")
    batch.wait_for("resuming after step ")
    resumed_after = int(re.findall(r"resuming after step (\d+)", batch.output)[-1])
    assert resumed_after >= 4, batch.output
    batch.wait_for(f"step {resumed_after + 2}/", "resuming with the configuration ")
    batch.signal("TERM")
    batch.wait()


@pytest.mark.hosts
def test_a_heterogeneous_job_loses_a_node_and_finishes_on_another(cluster, hosts, miniature, tmp_path) -> None:
    config = miniature(schedule=ENDLESS | {"total_steps": 20}, **SMALL)
    script = ROOT / "launch" / "slurm_het.sbatch"
    batch = Batch(cluster, tmp_path / "job.out", "--nodes=1", ":", "--nodes=1", script, config)
    batch.wait_for("step 5/")
    runs = {name: hosts.processes(name) for name in ("host1", "host2", "host3")}
    assert runs["host1"].count("ray::TrainerRan") == 2 and "sglang::schedul" not in runs["host1"]
    assert "sglang::schedul" in runs["host2"] and "ray::TrainerRan" not in runs["host2"]
    assert runs["host3"] == ["slurmd"]

    cluster.command("scontrol", "update", "nodename=n2", "state=down", "reason=test")
    # Slurm ends what is left of the job, and starts it anew on the nodes that are there.
    batch.wait_for("resuming with the configuration ")
    batch.wait_for(f"Ray node ready at {hosts.address('host3')}")
    batch.wait()
    resumed_after = int(re.findall(r"resuming after step (\d+)", batch.output)[-1])
    assert resumed_after >= 4, batch.output
    assert "trained 20 steps" in batch.output
    # What ran on the node that Slurm gave up held a control pipe.
    wait_until(lambda: set(hosts.processes("host2")) <= {"slurmd"}, lambda: str(hosts.processes("host2")))
    cluster.command("scontrol", "update", "nodename=n2", "state=resume")
