"""Starts or joins Ray, and finally shuts down only what it started."""

from __future__ import annotations

import logging
import os
import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import ray
from megasync_patches import ray_loopback  # pyright: ignore[reportMissingImports] - the folder patches/

from megasync.base.files import bytes_text, ray_environment, ray_token
from megasync.base.shared_memory import FIX, FOLDER, SHARED_MEMORY_BYTES, free_shared_memory
from megasync.config import Config
from megasync.config.host import LOOPBACK, reach_directly, resolve_host
from megasync.errors import MegasyncError

log = logging.getLogger(__name__)

# Actors without a device (router, workers) still need a worker slot each in Ray's accounting of processes.
SPARE_CPUS = 2
# How often a local Ray is started that is late, and what Ray says of one.
STARTS, LATE = 4, "timed out during startup"


class RayCluster:
    """The Ray session of one run: a small local cluster of its own, or an existing cluster."""

    def __init__(self, config: Config, devices_needed: int) -> None:
        self._address = config.cluster.address
        # At least a whole node, so that servers can be added during the run.
        self._devices = max(devices_needed, config.cluster.devices_per_node)
        self._host = resolve_host(config.cluster.host)
        self._owned = False

    def connect(self) -> None:
        if ray.is_initialized():
            log.info("Using the Ray session that is already initialised")
            return
        if not self._address and (room := free_shared_memory()) < SHARED_MEMORY_BYTES:
            log.warning("Only %s free at %s: Ray is slow, and NCCL may fail; %s", bytes_text(room), FOLDER, FIX)
        quiet = {"logging_level": logging.ERROR, "log_to_driver": False, "configure_logging": False}
        logging.getLogger("ray").setLevel(logging.ERROR)
        # Ray would otherwise rewrite CUDA_VISIBLE_DEVICES to "" for actors without GPUs; the servers set their own.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        # Processes that Ray starts inherit both.
        reach_directly(self._host)
        os.environ.update(ray_environment(os.environ))
        try:
            if self._address:
                ray.init(address=self._address, **quiet)
            else:
                os.environ.update(ray_token(os.environ))
                self._start(quiet)
                self._owned = True
        except Exception as error:  # Ray raises Exception itself when its processes are slow or their disk is full
            where = f"join Ray at {self._address}" if self._address else "start Ray on this machine"
            raise MegasyncError(
                f"could not {where}: {type(error).__name__}: {error}; check the free space in "
                f"{os.environ.get('RAY_TMPDIR', '/tmp')}/ray, where Ray keeps its logs and sockets, or try again if "
                "the machine was only too busy"
            ) from error

    def _start(self, quiet: dict[str, Any]) -> None:
        """Starts a local cluster; again if it was late, as Ray gives its own agents 15 s by a constant."""
        others = _ray_processes()
        for start in range(1, STARTS + 1):
            try:
                with ray_loopback.applied():
                    ray.init(
                        # Ray would otherwise join any other cluster on this machine.
                        address="local",
                        num_cpus=self._devices + SPARE_CPUS,
                        object_store_memory=SHARED_MEMORY_BYTES,
                        include_dashboard=False,
                        # Only this machine needs to reach it, wherever servers and ranks listen.
                        _node_ip_address=LOOPBACK,
                        **quiet,
                    )
                return
            except Exception as error:
                if LATE not in str(error) or start == STARTS:
                    raise
                log.warning("Ray took too long to start; starting it again")
                for process in _ray_processes() - others:
                    with suppress(psutil.NoSuchProcess):
                        process.kill()

    @staticmethod
    def restore_signals() -> None:
        """Restores the SIGTERM handler, which Ray's core replaces; call it in the main thread.

        The handler that it sets as it connects prints the stack, calls the one before, and aborts the process by an
        alarm a few seconds later; as it disconnects it leaves the system's default. Python still knows the previous
        handler, so setting it again is enough.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        handler = signal.getsignal(signal.SIGTERM)
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)
        if signal.getsignal(signal.SIGALRM) == signal.SIG_DFL:
            # Nothing in Python has set an alarm.
            signal.alarm(0)

    def close(self) -> None:
        """Disconnects from the cluster, which ends if this run started it."""
        if ray.is_initialized() and (self._owned or self._address):
            ray.shutdown()


def _ray_processes() -> set[psutil.Process]:
    """The children of this process that run a file of the package Ray."""
    folder = str(Path(ray.__file__).parent)
    found: set[psutil.Process] = set()
    for process in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if any(folder in word for word in process.cmdline()):
                found.add(process)
    return found
