"""Reward for mathematics: 1.0 when the final answer equals the reference as mathematics, 0.0 when it does not.

Needs the package math-verify (`pip install 'megasync[math]'`). Equality is symbolic: 1/2, 0.5 and \\frac{1}{2} agree.

Some answers keep the symbolic engine busy forever. The package interrupts it with an alarm signal, which works only on
a main thread, so the runner calls `math_reward` in worker processes (`needs_main_thread`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

from megasync.errors import DataError

log = logging.getLogger(__name__)
# Outside a main thread timeouts are off, and the package would warn about that on every call.
logging.getLogger("math_verify").setLevel(logging.ERROR)

# Seconds for parsing one text as mathematics, and for comparing two. An answer that takes longer counts as wrong.
TIMEOUT_SECONDS = 5


def math_reward(
    completions: Sequence[str],
    *,
    answer: Sequence[str] | None = None,
    solution: Sequence[str] | None = None,
    **columns: object,
) -> list[float | None]:
    """Scores each completion against its row's `answer` column, or `solution` where rows have no `answer`.

    None (the response is left out) where the reference itself cannot be parsed, which is logged. Raises
    DataError when rows have neither column, or when math-verify is not installed.
    """
    references = answer if answer is not None else solution
    if references is None:
        raise DataError(f"math_reward needs an answer or a solution column; the rows have {sorted(columns)}")
    return [_score(completion, str(reference)) for completion, reference in zip(completions, references, strict=True)]


# Read by `RewardRunner`.
setattr(math_reward, "needs_main_thread", True)  # noqa: B010 - functions declare no attributes


def _score(completion: str, reference: str) -> float | None:
    try:
        from math_verify import parse, verify
    except ModuleNotFoundError as error:
        raise DataError("math_reward needs the package math-verify: pip install 'megasync[math]'") from error
    # The package takes None for no timeout, but declares int.
    timeout: Any = TIMEOUT_SECONDS if threading.current_thread() is threading.main_thread() else None
    gold = parse(f"${reference}$", parsing_timeout=timeout)
    if not gold:
        log.warning("Reference answer %r cannot be parsed as mathematics; its responses are not scored", reference)
        return None
    return float(verify(gold, parse(completion, parsing_timeout=timeout), timeout_seconds=timeout))
