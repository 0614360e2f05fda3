"""The recorded responses of a run: what was sampled, what it was worth, and how it was trained or why it was dropped.

    trainer ranks     responses of trained groups, each rank those that it computes ─┐
    rollout workers   responses of dropped groups, reference answers of all groups   ├─▶ RUN/rollouts ─▶ watch.recorded
                                                                                     ┘
    <process>-<n>.index    a JSON line a response: what a table shows and filters
    <process>-<n>.body     the tokens of the responses, at the places that the lines name
    <process>-<n>.answers  a JSON line a group: its uid and the beginning of its reference answer

One process writes a file, and only appends. A line is written after its body, so a complete line has a body; a torn
last line is not read. A process begins new files when it starts and when those of a number have reached an eighth of
its bytes, and removes its oldest: `RolloutLog._begin` keeps it within its bound, so the newest responses stay.

Which groups are recorded follows from their uids (`chosen`, `is_sampled`), so all processes agree on it without
communication. Recording never fails: what cannot be written is logged and left out.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from megasync.concurrency.first_use import prepared
from megasync.concurrency.foreign import shown
from megasync.trajectory import TOKEN_REWARDS, Line, Trajectory, Turn, finite_float
from megasync.trajectory.runs import Runs

log = logging.getLogger(__name__)

FOLDER = "rollouts"
INDEX, BODY, ANSWERS = SUFFIXES = ".index", ".body", ".answers"
FILE = re.compile(r"(?P<pair>(?P<process>.+)-(?P<number>[0-9]+))(?P<suffix>\.index|\.body|\.answers)")
# A process has files of at most this many numbers, so it forgets an eighth of its responses at a time.
PAIRS = 8
# Characters of a reference answer that are recorded.
ANSWER_CHARACTERS = 2000
# `IndexRow.sample` of a dropped group without any response.
NO_SAMPLE = -1

Ints, Floats = NDArray[np.int32], NDArray[np.float32]


@prepared
class IndexRow(msgspec.Struct, omit_defaults=True, gc=False):
    """One response in the index."""

    uid: str
    # Its position in its group.
    sample: int
    # The training step; 0 of a dropped group.
    step: int
    # That of the weights that the step began with; of a dropped group the newest that sampled a token.
    version: int
    time: float
    # Of the response, tool outputs included.
    tokens: int
    prompt_tokens: int
    # Its sample's, which the trajectories of a conversation that forked share; -1 if it is alone.
    number: int = -1
    set: str = ""
    reward: float | None = None
    # The mean over the trained tokens; None where nothing was computed, as `gap`.
    advantage: float | None = None
    # `version` minus the oldest that sampled a trained token.
    staleness: int = 0
    finish_reason: str = ""
    # Why the group was dropped.
    dropped: str = ""
    # Mean absolute difference between the log-probs of trainer and server at the trained tokens.
    gap: float | None = None
    # What it is among the trajectories of its sample, if there are several.
    line: Line | None = None
    # What workflow and reward functions reported.
    metrics: dict[str, float | None] = {}
    # The place of its body in bytes, and the name of the file, which only a reader knows.
    at: int = 0
    size: int = 0
    pair: str = ""


@prepared
class Response(msgspec.Struct, array_like=True, frozen=True):
    """The tokens of a response, and what is known of each; written as MessagePack with arrays as little-endian bytes.

    Arrays beside `prompt_ids` have an entry for each response token: NaN for those without one, None if there are none.
    """

    prompt_ids: Ints
    ids: Ints
    # Of the server.
    logprobs: Floats
    mask: Runs
    versions: Runs
    # Before the update.
    trainer_logprobs: Floats | None = None
    advantages: Floats | None = None
    rewards: Floats | None = None
    # What the reward function saw, and the error of a dropped group; empty if unknown.
    text: str = ""
    problem: str = ""
    # Who wrote which tokens.
    turns: tuple[Turn, ...] = ()


def _bytes_of(value: Any) -> Any:
    if isinstance(value, Runs):
        return value.values, value.ends
    return np.asarray(value, "<f4" if value.dtype.kind == "f" else "<i4").tobytes()


def _number(value: Any) -> Any:
    """Converts scalars of NumPy and torch, which users' functions return; what is no number becomes None."""
    try:
        return float(value)
    except Exception:  # noqa: BLE001 - a user's class may raise anything
        return None


_line = msgspec.json.Encoder(enc_hook=_number)
_body = msgspec.msgpack.Encoder(enc_hook=_bytes_of)


# Which groups are recorded


def _place(uid: str) -> float:
    """A number in [0, 1) that spreads uids evenly, the same in every process."""
    return int.from_bytes(blake2b(uid.encode(), digest_size=6).digest(), "big") / 2**48


def chosen(groups: Sequence[tuple[str, int]], most: int) -> list[int]:
    """Positions of the groups of a step that are recorded, ascending; groups are (uid, number of responses).

    As many groups as have together at most ``most`` responses, and at least one unless ``most`` is 0.
    """
    taken: list[int] = []
    left = most
    for position in sorted(range(len(groups)), key=lambda position: _place(groups[position][0])):
        left -= groups[position][1]
        if most <= 0 or (left < 0 and taken):
            break
        taken.append(position)
    return sorted(taken)


def is_sampled(uid: str, share: float) -> bool:
    """Whether a group that no step has taken is recorded, if this share of all groups is."""
    return _place(uid) < share


# Writing


def rollout_bytes(megabytes: int, processes: int) -> int:
    """The share of one of several trainer ranks, or of one of several rollout workers, of `observe.rollouts_mb`."""
    # Half is for ranks, half for workers.
    return megabytes * 2**20 // 2 // max(1, processes)


# Metrics of a trajectory under this name and its training set hold its reward.
_OF_SET = "reward@"


def recorded(
    uid: str,
    sample: int,
    trajectory: Trajectory,
    *,
    step: int,
    version: int,
    time: float,
    advantage: float | None = None,
    scores: Floats | None = None,
    advantages: Floats | None = None,
    dropped: str = "",
    problem: str = "",
) -> tuple[IndexRow, Response]:
    """A trajectory as it is recorded.

    ``scores`` are the trainer's log-probs of the trained tokens, and ``advantages`` those of the same tokens if they
    differ from token to token; then their mean takes the place of ``advantage``.
    """
    trained = np.flatnonzero(trajectory.loss_mask.expand())
    gap = None
    if scores is not None and len(trained):
        gap = finite_float(np.abs(scores - trajectory.logprobs[trained]).mean(dtype=np.float64))
    if advantages is not None:
        advantage = float(advantages.mean(dtype=np.float64))
    oldest = trajectory.oldest_version
    row = IndexRow(
        uid=uid,
        sample=sample,
        step=step,
        version=version,
        time=round(time, 3),
        tokens=len(trajectory.response_ids),
        prompt_tokens=len(trajectory.prompt_ids),
        number=-1 if trajectory.sample is None else trajectory.sample,
        set=next((name.removeprefix(_OF_SET) for name in trajectory.metrics if name.startswith(_OF_SET)), ""),
        reward=trajectory.reward,
        advantage=advantage,
        staleness=0 if oldest is None else version - oldest,
        finish_reason=trajectory.finish_reason,
        dropped=dropped,
        gap=gap,
        line=trajectory.line,
        metrics={**trajectory.metrics},
    )
    tokens = len(trajectory.response_ids)
    response = Response(
        prompt_ids=trajectory.prompt_ids,
        ids=trajectory.response_ids,
        logprobs=trajectory.logprobs,
        mask=trajectory.loss_mask,
        versions=trajectory.versions,
        trainer_logprobs=_at(scores, trained, tokens),
        advantages=_at(advantages, trained, tokens),
        rewards=trajectory.arrays.get(TOKEN_REWARDS),
        text=trajectory.text,
        problem=problem,
        turns=trajectory.turns,
    )
    return row, response


def _at(values: Floats | None, places: NDArray[Any], tokens: int) -> Floats | None:
    """Values of some tokens as an array over all of them, NaN elsewhere."""
    if values is None:
        return None
    spread = np.full(tokens, np.nan, np.float32)
    spread[places] = values
    return spread


def nothing_sampled(
    uid: str, *, time: float, prompt_tokens: int, dropped: str, problem: str
) -> tuple[IndexRow, Response]:
    """A dropped group that has no response."""
    empty = Trajectory([0], [], [], [], [])
    row, response = recorded(uid, NO_SAMPLE, empty, step=0, version=0, time=time, dropped=dropped, problem=problem)
    row.prompt_tokens = prompt_tokens
    return row, response


class RolloutLog:
    """Appends the responses that one process records. Opens nothing before the first of them."""

    def __init__(self, run_dir: Path, process: str, limit_bytes: int) -> None:
        """`process` names the writer among all of the run, such as ``trainer-0``."""
        self._folder = Path(run_dir) / FOLDER
        self._process = process
        self._limit = limit_bytes
        self._name = ""
        self._size = self._body_size = 0
        self._lock = Lock()

    def append(self, responses: Iterable[tuple[IndexRow, Response]]) -> None:
        """Records responses, on any thread. Never raises: logs what could not be written."""
        self._record(lambda: self._encoded(responses))

    def append_answer(self, uid: str, answer: object) -> None:
        """Records the reference answer of a group, whatever object it is. Never raises, as `append`."""
        self._record(lambda: {ANSWERS: _line.encode((uid, _beginning(answer))) + b"\n"})

    def _record(self, encoded: Callable[[], dict[str, bytes]]) -> None:
        try:
            with self._lock:
                if not self._name or self._size >= self._limit / PAIRS:
                    self._begin()
                for suffix, content in encoded().items():
                    with (self._folder / f"{self._name}{suffix}").open("ab") as file:
                        file.write(content)
                    self._size += len(content)
        except Exception as error:  # noqa: BLE001 - recording must not end a training step, whatever a response holds
            # The next ones go to new files, after the damage.
            self._name = ""
            log.warning("Could not record responses in %s: %s: %s", self._folder, type(error).__name__, error)

    def _encoded(self, responses: Iterable[tuple[IndexRow, Response]]) -> dict[str, bytes]:
        """Bodies and, to be written after them, the lines that name their places."""
        bodies, lines = [], []
        for row, response in responses:
            body = _body.encode(response)
            row.at, row.size = self._body_size, len(body)
            self._body_size += len(body)
            bodies.append(body)
            lines.append(_line.encode(row) + b"\n")
        return {BODY: b"".join(bodies), INDEX: b"".join(lines)}

    def _begin(self) -> None:
        """Begins files of the next number, and removes the oldest until the others leave room for them."""
        self._folder.mkdir(parents=True, exist_ok=True)
        # Some of a number may be missing: the process was killed between the first writes to them.
        earlier = sorted(
            {
                (int(match["number"]), match["pair"])
                for name in os.listdir(self._folder)
                if (match := FILE.fullmatch(name)) and match["process"] == self._process
            }
        )
        number = earlier[-1][0] + 1 if earlier else 1
        kept, room = 0, self._limit - self._limit / PAIRS
        for _, name in reversed(earlier):
            paths = [self._folder / f"{name}{suffix}" for suffix in SUFFIXES]
            kept += sum(path.stat().st_size for path in paths if path.exists())
            if kept > room:
                for path in paths:
                    path.unlink(missing_ok=True)
        self._name = f"{self._process}-{number}"
        self._size = self._body_size = 0


def _beginning(answer: object) -> str:
    """The text of an answer, or what Python shows of another object."""
    most = ANSWER_CHARACTERS + 1
    text = str.__getitem__(answer, slice(most)) if isinstance(answer, str) else shown(answer, most)
    cut = text if len(text) < most else f"{text[:ANSWER_CHARACTERS]} ..."
    # A lone surrogate cannot be written.
    return cut.encode(errors="replace").decode()
