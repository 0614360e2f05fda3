"""Fake hosts on one machine: namespaces with separate addresses, processes, /dev/shm and Ray folders.

A bridge in another namespace connects them, so that the machine's own network is not touched. Needs root.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

from waits import PATIENCE, wait_until

# The first process of a host; when it ends, the kernel kills the others. The empty resolv.conf makes name resolution
# answer at once.
INIT = """
hostname {name}
mkdir -p /tmp/ray && mount --bind {home}/ray /tmp/ray
mount -t tmpfs -o size=1g tmpfs /dev/shm
mount --bind {root}/hosts /etc/hosts
mount --bind {root}/resolv.conf /etc/resolv.conf
touch {home}/up
while :; do sleep 3600; done
"""


def permitted() -> bool:
    """Whether this process may create network namespaces and has the required tools."""
    if os.geteuid() or not all(shutil.which(tool) for tool in ("ip", "unshare", "nsenter", "setpriv")):
        return False
    name = f"mstry{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        return False
    subprocess.run(["ip", "netns", "delete", name], check=False)
    return True


class FakeHosts:
    """`number` hosts, host0 to host<n-1>, until `close`."""

    def __init__(self, root: Path, number: int) -> None:
        self.root = root
        self.names = [f"host{index}" for index in range(number)]
        # Short, because interface names are limited in length. Unique, because other tests may have hosts too.
        self._prefix = f"ms{os.getpid() % 100_000}"
        self._switch = f"{self._prefix}sw"
        self._net = f"10.{100 + os.getpid() % 100}.{os.getpid() // 100 % 250}"
        self._first: dict[str, subprocess.Popen] = {}
        lines = ["127.0.0.1 localhost", *(f"{self.address(name)} {name}" for name in self.names)]
        (root / "hosts").write_text("\n".join(lines) + "\n")
        (root / "resolv.conf").write_text("")
        try:
            self._make_switch()
            for name in self.names:
                self._plug_in(name)
                self.switch_on(name)
        except BaseException:
            self.close()
            raise

    def address(self, name: str) -> str:
        return f"{self._net}.{10 + self.names.index(name)}"

    @property
    def outside(self) -> Path:
        """The network namespace of another machine, which reaches all hosts."""
        return Path("/run/netns") / self._switch

    @property
    def shell(self) -> str:
        """A remote shell for `--shell`: the host's name follows it, then the command."""
        path = self.root / "on_host"
        if not path.exists():
            path.write_text(
                "#!/usr/bin/env bash\n"
                "set -eu\nhost=$1\nshift\n"
                f'exec nsenter --target "$(cat {self.root}/"$host"/pid)" --net --mount --pid --uts --ipc '
                f'env HOME={self.root}/"$host"/home "$@"\n'
            )
            path.chmod(0o755)
        return str(path)

    def switch_on(self, name: str) -> None:
        """Starts a host, for the first time or after `crash`."""
        home = self.root / name
        for folder in ("ray", "home"):
            (home / folder).mkdir(parents=True, exist_ok=True)
        (home / "up").unlink(missing_ok=True)
        init = INIT.format(name=name, home=home, root=self.root)
        # Not `ip netns exec`, which hides /sys/fs/cgroup.
        self._first[name] = subprocess.Popen(
            [
                # If the test is killed, its hosts are killed too.
                *("setpriv", "--pdeathsig", "KILL"),
                *("nsenter", f"--net=/run/netns/{self._prefix}{name}"),
                *("unshare", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc"),
                *("bash", "-c", init),
            ],
            start_new_session=True,
        )
        wait_until((home / "up").exists, lambda: f"{name} did not come up")
        unshare = self._first[name].pid
        # The host's first process is the child of unshare, which setpriv and nsenter became.
        children = Path(f"/proc/{unshare}/task/{unshare}/children").read_text().split()
        (home / "pid").write_text(children[0])

    def crash(self, name: str) -> None:
        """Kills everything on a host at once, like a power failure."""
        os.kill(int((self.root / name / "pid").read_text()), signal.SIGKILL)
        self._first[name].wait(PATIENCE)

    def cut(self, name: str) -> None:
        """Disconnects a host from the network."""
        self._ip("link", "set", f"to-{name}", "down", inside=self._switch)

    def run(self, name: str, *words: str) -> str:
        """Runs a command on a host and returns its output."""
        return subprocess.run([self.shell, name, *words], capture_output=True, text=True, check=True).stdout

    def processes(self, name: str) -> list[str]:
        """Names of the processes on a host, without those of the fake host itself and `ps`."""
        found = self.run(name, "ps", "-e", "-o", "comm=").splitlines()
        return [command for command in found if command not in ("bash", "sleep", "ps", "sshd")]

    def kill(self, name: str, process: str) -> None:
        """Kills the processes with this name on a host."""
        table = [line.split(maxsplit=1) for line in self.run(name, "ps", "-e", "-o", "pid=,comm=").splitlines()]
        self.run(name, "kill", "-KILL", *(pid for pid, command in table if command == process))

    def listening(self, name: str) -> set[tuple[str, str]]:
        """TCP addresses on which a host's processes listen, each with the name of such a process."""
        look = ("ss", "--no-header", "--listening", "--tcp", "--numeric", "--processes")
        lines = self.run(name, *look).splitlines()
        places = ((line.split()[3].rpartition(":")[0], line.partition('(("')[2].partition('"')[0]) for line in lines)
        return {(address.partition("%")[0], process) for address, process in places if process != "sshd"}

    def heal(self, name: str) -> None:
        self._ip("link", "set", f"to-{name}", "up", inside=self._switch)

    def close(self) -> None:
        for name, first in self._first.items():
            with suppress(ProcessLookupError, ValueError, FileNotFoundError):
                os.kill(int((self.root / name / "pid").read_text()), signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                first.wait(2.0)
            first.kill()
            first.wait()
        for name in (*(f"{self._prefix}{name}" for name in self.names), self._switch):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)

    def _make_switch(self) -> None:
        self._ip("netns", "add", self._switch)
        self._ip("link", "add", "bridge", "type", "bridge", inside=self._switch)
        self._ip("address", "add", f"{self._net}.1/24", "dev", "bridge", inside=self._switch)
        for device in ("lo", "bridge"):
            self._ip("link", "set", device, "up", inside=self._switch)

    def _plug_in(self, name: str) -> None:
        host = f"{self._prefix}{name}"
        self._ip("netns", "add", host)
        self._ip("link", "add", "eth0", "type", "veth", "peer", f"to-{name}", "netns", self._switch, inside=host)
        self._ip("address", "add", f"{self.address(name)}/24", "dev", "eth0", inside=host)
        for device in ("lo", "eth0"):
            self._ip("link", "set", device, "up", inside=host)
        self._ip("route", "add", "default", "via", f"{self._net}.1", inside=host)
        self._ip("link", "set", f"to-{name}", "master", "bridge", "up", inside=self._switch)

    @staticmethod
    def _ip(*words: str, inside: str = "") -> None:
        place = ["-n", inside] if inside else []
        subprocess.run(["ip", *place, *words], check=True, capture_output=True)
