"""Which prompts are worth generating, judged by how often the model solved them before.

A policy is a pure function of a row's past scores, such as `by_success`, or a user's own. What it leaves out is
admitted and dropped at once, so the ledger accounts for it, and the scores that it judges by come from there after a
crash.

Invariant: what is known of a row is one score for each epoch, that of the newest generation of its group, in the order
of epochs. It depends neither on the order in which groups end nor on the times that one is generated, so a resumed run
judges as the live one did; `Curriculum.record` guarantees this.

Policies are called in a thread, once for each prompt whose row has a score: a slow one delays prompts, never requests.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from megasync.base.importing import check_call, load_function
from megasync.concurrency.foreign import DeadlineExceeded, guard
from megasync.concurrency.threads import DaemonThreads
from megasync.config import builtin
from megasync.config.schema import DataConfig
from megasync.errors import DataError

log = logging.getLogger(__name__)

# Seconds that a policy may take for one row.
JUDGE_SECONDS = 60.0
_threads = DaemonThreads(limit=1)


@dataclass(frozen=True, slots=True)
class RowHistory:
    """``scores`` are mean rewards of the row's groups, one for each of ``epochs``, which ascend."""

    scores: tuple[float, ...] = ()
    epochs: tuple[int, ...] = ()


# Whether to generate a row in an epoch, from what is known of it.
Policy = Callable[[RowHistory, int], bool]


def by_success(
    history: RowHistory,
    epoch: int,
    *,
    solved: float = 1.0,
    hopeless: float = 0.0,
    patience: float = 1,
    postpone: float = 2.0,
) -> bool:
    """Leaves out a row for good whose last ``patience`` groups all scored at least ``solved``; postpones one whose last
    groups all scored at most ``hopeless`` until ``postpone`` epochs after the newest of them.
    """
    count = math.ceil(patience)
    recent = history.scores[-count:]
    if len(recent) < count:
        return True
    if min(recent) >= solved:
        return False
    return max(recent) > hopeless or epoch - history.epochs[-1] > postpone


def curriculum_of(config: DataConfig) -> Policy | None:
    """The policy that a configuration names, with its options; None without one. Raises ConfigError."""
    if config.curriculum is None:
        return None
    name = config.curriculum
    policy = partial(load_function(builtin.CURRICULA.get(name, name)), **config.curriculum_options)
    check_call(policy, f"data.curriculum={name} must take a row's history and an epoch", RowHistory(), 0)
    return guard(policy, f"data.curriculum={name}")


class Curriculum:
    """Judges prompts by uid, "<epoch>:<row>". ``rows`` is the number of rows."""

    def __init__(self, policy: Policy, rows: int) -> None:
        self._policy = policy
        self._rows = rows
        # The scores of each row by epoch.
        self._scores: defaultdict[int, dict[int, float]] = defaultdict(dict)
        # Prompts that were left out since the last one that was not.
        self._left_out = 0
        self._warned = False

    def restore(self, scores: Iterable[tuple[str, float]]) -> None:
        """Takes the scores of an earlier process."""
        for uid, score in scores:
            self.record(uid, score)

    def record(self, uid: str, score: float) -> None:
        """Takes the mean reward of a group that has ended, in place of that of an earlier generation of it."""
        epoch, row = map(int, uid.split(":"))
        self._scores[row][epoch] = score

    async def wants(self, uid: str) -> bool:
        """Whether to generate a prompt now. Never refuses more of them in a row than there are rows.

        Raises DataError for a policy that does not return within JUDGE_SECONDS, and what the policy raises.
        """
        epoch, row = map(int, uid.split(":"))
        if row not in self._scores or await self._judged(self._history(row), epoch):
            self._left_out = 0
            return True
        self._left_out += 1
        if self._left_out <= self._rows:
            return False
        self._left_out = 0
        if not self._warned:
            self._warned = True
            log.warning("data.curriculum leaves out every row; training goes on with some of them all the same")
        return True

    async def _judged(self, history: RowHistory, epoch: int) -> bool:
        try:
            return await _threads.call(lambda: bool(self._policy(history, epoch)), "data.curriculum", JUDGE_SECONDS)
        except DeadlineExceeded as error:
            raise DataError(f"{error}, for {history} in epoch {epoch}; make the policy faster") from None

    def _history(self, row: int) -> RowHistory:
        epochs, scores = zip(*sorted(self._scores[row].items()), strict=True)
        return RowHistory(scores, epochs)
