"""torch.profiler around single steps of a rank (`observe.profile_steps`, `observe.profile_ranks`).

A profile that cannot be taken or written is logged, and the step goes on: it must not cost the other ranks their step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from megasync.observe import trace

log = logging.getLogger(__name__)

# Below the run directory.
PROFILE_FOLDER = "profile"


@contextmanager
def profiled(run_dir: Path, step: int, rank: int) -> Iterator[None]:
    """Profiles a block and writes `profile/step-<step>-rank-<rank>.json.gz`, which Perfetto and chrome://tracing open.

    Operators on the CPU, and kernels on the GPU if there is one. The trace gets an instant that names the file.
    """
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    profiler = profile(activities=activities)
    try:
        profiler.start()
    except RuntimeError as error:  # such as another profiler that is attached to the process
        log.warning("Step %d of rank %d is not profiled: %s", step, rank, error)
        yield
        return
    try:
        yield
    except BaseException:
        with suppress(RuntimeError):
            profiler.stop()
        raise
    file = Path(PROFILE_FOLDER) / f"step-{step}-rank-{rank}.json.gz"
    try:
        profiler.stop()
        (run_dir / PROFILE_FOLDER).mkdir(exist_ok=True)
        profiler.export_chrome_trace(str(run_dir / file))
    except (OSError, RuntimeError) as error:
        log.warning("The profile of step %d of rank %d could not be written: %s", step, rank, error)
        return
    trace.instant("rank", "profile", step=step, file=str(file))
    log.info("Profile of step %d: %s", step, run_dir / file)
