"""Commands for a scheduler, around a run that it may pre-empt. FILE is the run's `--continue` file, in a shared folder.

    python -m megasync.launch.preemption stop FILE SECONDS    before a host is taken away: has the run saved and stopped
    python -m megasync.launch.preemption check FILE           after the run: UNFINISHED if it has to be started again

A run that stops on request exits with 0, as one does that has reached its goal; a scheduler must tell them apart.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from megasync.errors import MegasyncError

# Exit status of a run that has saved and wants to be continued: EX_TEMPFAIL of sysexits.h.
UNFINISHED = 75
POLL_SECONDS = 0.5


def is_complete(file: Path | None) -> bool:
    """Whether the run that a `--continue` file names has reached its goal."""
    from megasync.app.resume_file import read_resume_file
    from megasync.observe.state_file import read_state

    run_dir = None if file is None else read_resume_file(file)
    state = None if run_dir is None else read_state(run_dir)
    return state is not None and state.status == "finished"


def stop_run(file: Path, seconds: float) -> str:
    """Asks the run to finish its step, save and stop, and waits up to `seconds` until it has. Returns what happened.

    Raises MegasyncError if the run refuses, which it does while it is starting: then there is nothing to save.
    """
    from megasync.app.mailbox import ask
    from megasync.app.resume_file import read_resume_file
    from megasync.app.run_lock import is_held

    deadline = time.monotonic() + seconds
    run_dir = read_resume_file(file)
    if run_dir is None or not is_held(run_dir):
        return f"no run of {file} is live"
    try:
        ask(run_dir, "stop", timeout=seconds)
    except MegasyncError:
        if is_held(run_dir):
            raise
    while is_held(run_dir):
        if time.monotonic() >= deadline:
            return f"the run in {run_dir} did not stop within {seconds:g} s"
        time.sleep(POLL_SECONDS)
    return f"the run in {run_dir} has stopped"


def main(arguments: list[str]) -> int:
    try:
        match arguments:
            case ["stop", file, seconds]:
                print(stop_run(Path(file), float(seconds)), flush=True)
                return 0
            case ["check", file]:
                return 0 if is_complete(Path(file)) else UNFINISHED
            case _:
                print(__doc__, file=sys.stderr)
                return 2
    except MegasyncError as error:
        print(error, file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
