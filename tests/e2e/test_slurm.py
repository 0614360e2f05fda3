"""`sbatch launch/slurm.sbatch`: a run on the nodes of a job, which makes room and goes on later."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from namespaces import FakeHosts, permitted
from slurm import FakeSlurm, installed

ROOT = Path(__file__).parents[2]
PATIENCE = 300.0
ENDLESS = {"total_steps": 100_000, "groups_per_step": 4, "samples_per_group": 4}

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not installed(), reason="needs Slurm and munge"),
    pytest.mark.skipif(not permitted(), reason="needs root, namespaces, and iproute2 and util-linux"),
]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[FakeSlurm]:
    for folder in ("hosts", "slurm"):
        (tmp_path / folder).mkdir()
    hosts = FakeHosts(tmp_path / "hosts", 3)
    try:
        made = FakeSlurm(tmp_path / "slurm", hosts)
        try:
            yield made
        finally:
            made.close()
    finally:
        hosts.close()


def until(condition: Callable[[], object], what: Callable[[], str]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.5)


def test_a_job_that_must_make_room_saves_and_goes_on_when_it_is_back(cluster, miniature, tmp_path) -> None:
    config = miniature(schedule=ENDLESS, rollout={"servers": 1}, cluster={"devices_per_node": 2})
    out = tmp_path / "job.out"
    words = ["--parsable", f"--chdir={ROOT}", f"--output={out}", "--nodes=2", ROOT / "launch" / "slurm.sbatch", config]
    job = cluster.command("sbatch", *words).strip()

    def output() -> str:
        return out.read_text(errors="replace") if out.exists() else ""

    until(lambda: "step 3/" in output(), output)
    cluster.command("scancel", "--batch", "--signal=USR1", job)
    until(lambda: "the job goes back into the queue" in output(), output)
    saved = int(re.findall(r"trained (\d+) steps", output())[-1])
    until(lambda: f"step {saved + 2}/" in output().split("goes back into the queue")[1], output)
    assert "over 2 nodes" in output()
    assert f"step {saved}/" not in output().split("goes back into the queue")[1], "it went on from there"
    cluster.command("scancel", "--batch", "--signal=TERM", job)
    until(lambda: output().count("published version") == 2, output)
    until(lambda: not cluster.command("squeue", "-h", "-j", job), output)
