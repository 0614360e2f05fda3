"""Traps in episodes: a test sets one at a place, and the first episode that comes there waits in it to be killed.

Only the standard library, for servers in environments of their own.
"""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

from waits import wait_until

# The environment variable with the folder of traps.
FOLDER = "EPISODE_TRAPS"
FINISHED = "finished.jsonl"
# Seconds that an episode stays in a trap: much longer than a test waits for anything.
STAY = 3600.0


def folder() -> str:
    return os.environ[FOLDER]


def sprung(place: str, pid: int) -> bool:
    """Whether this episode is in a trap; then the test that set it learns of the process `pid`."""
    try:
        Path(folder(), place).rename(Path(folder(), f"{place}.{pid}"))
    except FileNotFoundError:
        return False
    return True


def caught(place: str, looks: Callable[[], object]) -> int:
    """Sets a trap and returns the process that an episode in it has named. Calls `looks` while it waits."""
    Path(folder(), place).touch()
    found = wait_until(
        lambda: looks() or [*Path(folder()).glob(f"{place}.*")], lambda: f"no episode came to the trap {place}"
    )
    found[0].unlink()
    return int(found[0].suffix[1:])


def finish(answers: list[str]) -> float:
    """Records an episode that has come to its end. Returns its reward, which no other one has: at least 1."""
    reward = 1 + random.getrandbits(23) / 2**23
    with Path(folder(), FINISHED).open("a") as file:
        file.write(json.dumps({"reward": reward, "answers": answers}) + "\n")
    return reward


def finished() -> dict[float, dict]:
    """The recorded episodes by their rewards."""
    lines = map(json.loads, Path(folder(), FINISHED).read_text().splitlines())
    return {line["reward"]: line for line in lines}
