"""Faults with a duration: a slow process, a full disk, a cut network link. Each is undone however the experiment ends.

What cannot be undone is refused first: only a filesystem that the run has to itself is filled, and only a link of a
named network namespace is cut, never one of the machine's own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from megasync.errors import ConfigError, MegasyncError, raised_as

# A slow process is stopped for most of each period, so it runs at a fifth of its speed.
PERIOD_SECONDS, STOPPED_SHARE = 0.5, 0.8
# Bytes. Filling a larger filesystem would take longer than the fault should, and is probably a mistake.
LARGEST_DISK = 64 * 2**30
FILLER = ".megasync-chaos-fill"
CHUNKS = (64 * 2**20, 2**20, 4096)
# Mount points that other programs share.
SHARED = ("/", "/boot", "/dev/shm", "/home", "/run", "/tmp", "/var", "/var/tmp")
IP_SECONDS = 10.0


@contextmanager
def slowed(processes: Sequence[psutil.Process]) -> Iterator[None]:
    """Alternately stops and continues the processes, so that they answer, but late."""
    ended = threading.Event()

    def send(number: signal.Signals) -> None:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def alternate() -> None:
        try:
            while True:
                send(signal.SIGSTOP)
                if ended.wait(PERIOD_SECONDS * STOPPED_SHARE):
                    return
                send(signal.SIGCONT)
                if ended.wait(PERIOD_SECONDS * (1 - STOPPED_SHARE)):
                    return
        finally:
            send(signal.SIGCONT)

    thread = threading.Thread(target=alternate, name="slow", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@dataclass(frozen=True, slots=True)
class Disk:
    """A mounted filesystem that holds only the run directory."""

    mount: Path

    @classmethod
    def of(cls, folder: Path, run_root: Path) -> Disk:
        """The filesystem mounted at `folder`. Raises ConfigError when it is not the run's own."""
        mount, root = folder.resolve(), run_root.absolute().resolve()
        if not os.path.ismount(mount) or str(mount) in SHARED:
            raise ConfigError(
                f"--disk {folder} is not a filesystem of its own; it must be a mount point that nothing else uses, "
                f"such as one made by `mount -t tmpfs -o size=2g tmpfs {folder}`"
            )
        if not root.is_relative_to(mount):
            raise ConfigError(f"--disk {folder} does not contain run_root={run_root}; set run_root={mount}/runs")
        if (size := psutil.disk_usage(str(mount)).total) > LARGEST_DISK:
            raise ConfigError(
                f"--disk {folder} has {size / 2**30:.0f} GiB, more than the limit of {LARGEST_DISK / 2**30:.0f}; make "
                f"a smaller filesystem for the run"
            )
        (mount / FILLER).unlink(missing_ok=True)
        expected = {"lost+found", *root.relative_to(mount).parts[:1]}
        if others := sorted(path.name for path in mount.iterdir() if path.name not in expected):
            raise ConfigError(
                f"--disk {folder} contains {', '.join(others[:3])} besides run_root={run_root}, and a full disk would "
                f"affect these too; use a filesystem that contains only run_root"
            )
        return cls(mount)

    @contextmanager
    def filled(self) -> Iterator[None]:
        """Allocates all free space. Blocks that others free meanwhile stay available."""
        path = self.mount / FILLER
        try:
            with path.open("wb", buffering=0) as file:
                size = 0
                for chunk in CHUNKS:
                    with contextlib.suppress(OSError):
                        while True:
                            os.posix_fallocate(file.fileno(), size, chunk)
                            size += chunk
            yield
        finally:
            path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class NetworkInterface:
    """A network interface inside a named network namespace."""

    namespace: str
    interface: str

    @classmethod
    def parse(cls, text: str) -> NetworkInterface:
        """Parses NAMESPACE/INTERFACE. Raises ConfigError when the interface does not exist or is not up."""
        namespace, _, interface = text.partition("/")
        if not namespace or not interface:
            raise ConfigError(f"--cut {text} must be NAMESPACE/INTERFACE, such as host1/eth0: see `ip netns list`")
        link = cls(namespace, interface)
        with raised_as(ConfigError, f"--cut {text}", of=MegasyncError):
            state = link._ip("-oneline", "link", "show", "dev", interface)
        if ",UP" not in state and "<UP" not in state:
            raise ConfigError(f"--cut {text}: the interface is not up; set it up first")
        return link

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Takes the link down and up again."""
        self._ip("link", "set", "dev", self.interface, "down")
        try:
            yield
        finally:
            self._ip("link", "set", "dev", self.interface, "up")

    def _ip(self, *words: str) -> str:
        command = ["ip", "-netns", self.namespace, *words]
        what = f"`{' '.join(command)}` could not be run"
        with raised_as(MegasyncError, what, of=(OSError, subprocess.TimeoutExpired)):
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=IP_SECONDS)
        if done.returncode:
            raise MegasyncError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
        return done.stdout
