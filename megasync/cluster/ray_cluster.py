"""Starts or joins Ray, and leaves only what was there before."""

from __future__ import annotations

import logging
import os
import signal
import threading

import ray
from megasync_patches import ray_loopback

from megasync.config import Config
from megasync.config.host import LOOPBACK
from megasync.errors import MegasyncError

log = logging.getLogger(__name__)

# Actors that take no device (buffer, router) still need a worker slot each in Ray's accounting of processes.
SPARE_CPUS = 2
OBJECT_STORE_BYTES = 512 * 1024**2


class RayCluster:
    """A Ray session for one run: its own small local cluster, or a cluster that is already there."""

    def __init__(self, config: Config, devices_needed: int) -> None:
        self._address = config.cluster.address
        # Up to a whole node, so that servers can be added while the run goes on.
        self._devices = max(devices_needed, config.cluster.devices_per_node)
        self._owned = False

    def connect(self) -> None:
        if ray.is_initialized():
            log.info("using the Ray session that is already initialised")
            return
        quiet = {"logging_level": logging.ERROR, "log_to_driver": False, "configure_logging": False}
        logging.getLogger("ray").setLevel(logging.ERROR)
        # Ray would otherwise rewrite CUDA_VISIBLE_DEVICES to "" for actors without GPUs; the servers set their own.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        try:
            if self._address:
                ray.init(address=self._address, **quiet)
            else:
                with ray_loopback.applied():
                    ray.init(
                        # Not whatever other cluster runs here.
                        address="local",
                        num_cpus=self._devices + SPARE_CPUS,
                        object_store_memory=OBJECT_STORE_BYTES,
                        include_dashboard=False,
                        # Nobody else need reach it, wherever servers and ranks listen.
                        _node_ip_address=LOOPBACK,
                        **quiet,
                    )
                self._owned = True
        except (
            Exception
        ) as error:  # Ray's own processes may be slow, or their disk full; it raises Exception itself then
            where = f"join Ray at {self._address}" if self._address else "start Ray on this machine"
            raise MegasyncError(
                f"could not {where}: {type(error).__name__}: {error}; Ray keeps its logs and "
                f"sockets in {os.environ.get('RAY_TMPDIR', '/tmp')}/ray, where there must be room; a machine that was "
                "only too busy needs another try"
            ) from error

    @staticmethod
    def give_back_signals() -> None:
        """For the main thread, after `connect`: Ray's core takes SIGTERM, prints its stack and aborts the process on it.

        Python still knows the handler that was there before; setting it again is enough.
        """
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGTERM)
            if handler is not None:
                signal.signal(signal.SIGTERM, handler)

    def close(self) -> None:
        """Disconnects; a cluster that this run started ends with it."""
        if ray.is_initialized() and (self._owned or self._address):
            ray.shutdown()
