"""Ending a pool of worker processes that may be in the middle of a call."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor

# Seconds that a killed process has until it is reaped.
REAP_SECONDS = 5.0


def kill_pool(pool: ProcessPoolExecutor) -> None:
    """Kills its processes; calls under way end with BrokenProcessPool. A pool by itself can only wait for its calls."""
    workers = list((pool._processes or {}).values())
    for worker in workers:
        worker.kill()
    pool.shutdown(wait=False, cancel_futures=True)
    for worker in workers:
        worker.join(timeout=REAP_SECONDS)
