"""The record of a batch whose step raised an error: what is needed to look into it, or to try it again by hand."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from megasync.files import atomic_write
from megasync.trajectory import Group

log = logging.getLogger(__name__)

FOLDER = "failed_steps"


def record_failure(folder: Path, step: int, version: int, groups: Sequence[Group], error: str) -> None:
    """Writes uids and trajectories (tokens, masks, log-probs, versions, rewards) to ``folder/step-<step>-<first uid>.json``.

    A later attempt on the same groups replaces it. A record that cannot be written is logged and costs nothing else.
    """
    uids = [group.uid for group in groups]
    batch = [{"uid": group.uid, "trajectories": [asdict(t) for t in group.trajectories]} for group in groups]
    record = {"step": step, "version": version, "error": error, "uids": uids, "batch": batch}
    path = folder / f"step-{step:08d}-{uids[0].replace(':', '-')}.json"
    try:
        # JSON has no spelling for numbers that are not finite.
        text = json.dumps(json.loads(json.dumps(record), parse_constant=str), allow_nan=False)
        folder.mkdir(parents=True, exist_ok=True)
        atomic_write(path, text)
    except (OSError, TypeError, ValueError) as failure:
        log.error("The batch of failed step %d could not be recorded at %s: %s", step, path, failure)
