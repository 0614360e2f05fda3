"""Numbers from users' code: what counts as one, in one place."""

from __future__ import annotations

import math
from typing import Any


def finite_float(value: Any) -> float | None:
    """The value as a float; None for what is not a finite real number, whatever it does when it is asked.

    Takes Python's numbers and bools, and scalars of NumPy and torch. Text is not a number, even where it spells one.
    """
    if isinstance(value, str | bytes | bytearray):
        return None
    try:
        number = float(value.item() if hasattr(value, "item") else value)
    except Exception:  # noqa: BLE001 - a user's own class raises what it likes
        return None
    return number if math.isfinite(number) else None
