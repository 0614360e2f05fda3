"""A private Slurm cluster on fake hosts: the controller on the first host, and one node on each of the others.

There is no accounting and no cgroups. A munge daemon with its own key and socket authenticates users. Credentials
expire early, because a requeued job waits until those of its first start have expired. A job in the partition `urgent`
preempts other jobs, which are requeued. Jobs in `main` are signalled before that, jobs in `abrupt` are not.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from namespaces import FakeHosts
from waits import wait_until

# Seconds that a preempted job has to end.
GRACE_SECONDS = 240
TOOLS = ("slurmctld", "slurmd", "sbatch", "munged")

CONFIG = """
ClusterName=fake
SlurmctldHost=host0({controller})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/socket/munge,cred_expire=20
CredType=cred/munge
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/controller.pid
SlurmdPidFile={root}/%n.pid
SlurmctldLogFile={root}/controller.log
SlurmdLogFile={root}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=3
MpiDefault=none
SwitchType=switch/none
ReturnToService=1
SlurmdParameters=config_overrides
SlurmctldParameters=preempt_send_user_signal
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdTimeout=60
KillWait=15
JobRequeue=1
"""


def installed() -> bool:
    return all(shutil.which(tool) for tool in TOOLS)


class FakeSlurm:
    """A cluster of nodes n1, n2, ... on host1, host2, ... Real daemons; only the machines are fake."""

    def __init__(self, root: Path, hosts: FakeHosts) -> None:
        self._root, self._hosts = root, hosts
        self._munge: subprocess.Popen | None = None
        for folder in ("state", "spool", "socket", "munge"):
            (root / folder).mkdir()
        for folder in (root, root / "socket"):
            folder.chmod(0o755)
        (root / "munge").chmod(0o700)
        key = root / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        nodes = [
            f"NodeName=n{index} NodeHostname={name} NodeAddr={hosts.address(name)} CPUs=2 RealMemory=1000 State=UNKNOWN"
            for index, name in enumerate(hosts.names)
            if index
        ]
        self._number = len(nodes)
        kinds = {
            "main": f"Default=YES PriorityTier=1 GraceTime={GRACE_SECONDS}",
            "abrupt": "PriorityTier=1",
            "urgent": "PriorityTier=2 PreemptMode=OFF",
        }
        partitions = [
            f"PartitionName={name} Nodes=n[1-{self._number}] MaxTime=INFINITE State=UP {words}"
            for name, words in kinds.items()
        ]
        text = CONFIG.format(root=root, controller=hosts.address("host0"))
        (root / "slurm.conf").write_text("\n".join([text, *nodes, *partitions, ""]))
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def command(self, *words: str | os.PathLike) -> str:
        """Runs a Slurm command on the controller's host and returns its output."""
        found = subprocess.run(self._on("host0", *words), capture_output=True, text=True, check=False)
        assert found.returncode == 0, f"{words}: {found.stderr}"
        return found.stdout

    def take_all_nodes(self) -> None:
        """Briefly preempts every job on all nodes."""
        words = ("--partition=urgent", f"--nodes={self._number}", "--exclusive", "--chdir=/", "--output=/dev/null")
        self.command("sbatch", *words, "--wrap=true")

    def close(self) -> None:
        """Stops munge. The daemons on the hosts end with the hosts."""
        if self._munge is not None:
            self._munge.terminate()
            self._munge.wait()

    def _start(self) -> None:
        munge = self._root / "munge"
        files = {"key": "key", "pid": "pid", "log": "log", "seed": "seed"}
        options = [f"--{name}-file={munge / file}" for name, file in files.items()]
        socket = f"--socket={self._root / 'socket' / 'munge'}"
        # In the foreground, so that it always ends with the test.
        command = ["setpriv", "--pdeathsig", "KILL", "munged", "--foreground", "--force", socket, *options]
        self._munge = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until(lambda: (self._root / "socket" / "munge").exists(), lambda: (munge / "log").read_text())
        self.command("slurmctld", "-c")
        for index, name in enumerate(self._hosts.names):
            if index:
                subprocess.run(self._on(name, "slurmd", "-N", f"n{index}"), check=True, capture_output=True)
        idle = ("sinfo", "-h", "-p", "main", "-t", "idle", "-o", "%D")
        wait_until(lambda: self.command(*idle).strip() == str(self._number), lambda: self.command("sinfo", "-N", "-l"))

    def _on(self, host: str, *words: str | os.PathLike) -> list[str]:
        settings = ["env", f"SLURM_CONF={self._root / 'slurm.conf'}"]
        return [self._hosts.shell, host, *settings, *(str(word) for word in words)]
