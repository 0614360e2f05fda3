"""Numbers as people read them: three significant digits, a unit, the same width wherever the value is alike."""

from __future__ import annotations

import math
import time

NOTHING = "–"
_LARGE = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def number(value: float | None, digits: int = 3) -> str:
    """12345 -> 12.3k, 0.01234 -> 0.0123, 2.0 -> 2. None and NaN are a dash."""
    if value is None or math.isnan(value):
        return NOTHING
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    size = abs(value)
    for scale, suffix in _LARGE:
        # 999.9 thousand reads better as 1M than as 1000k.
        if size >= scale * (1 - 0.5 * 10**-digits):
            whole_digits = 1 + math.floor(math.log10(max(1.0, size / scale)))
            return f"{value / scale:.{max(0, digits - whole_digits)}f}{suffix}"
    if size and size < 10 ** -(digits + 1):
        return f"{value:.{digits - 2}e}"
    return _plain(value, digits)


def fixed(value: float | None, places: int = 3) -> str:
    """A value that is compared with its neighbours: always the same number of places."""
    return NOTHING if value is None or not math.isfinite(value) else f"{value:.{places}f}"


def share(value: float | None) -> str:
    """0.1234 -> 12 %, 0.00123 -> 0.12 %."""
    if value is None or not math.isfinite(value):
        return NOTHING
    percent = 100 * value
    places = 0 if percent == 0 or abs(percent) >= 9.95 else 1 if abs(percent) >= 0.95 else 2
    return f"{percent:.{places}f} %"


def duration(seconds: float | None) -> str:
    """0.0123 -> 12 ms, 4.2 -> 4.2 s, 83 -> 1 min 23 s, 7380 -> 2 h 3 min, 200000 -> 2 d 7 h."""
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if seconds < 0.9995:
        return f"{_plain(seconds * 1e3, 2)} ms" if seconds else "0 s"
    if seconds < 59.5:
        return f"{_plain(seconds, 2)} s"
    total = round(seconds)
    for unit, name, small, small_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if total >= unit:
            rest = total % unit // small
            return f"{total // unit} {name}" + (f" {rest} {small_name}" if rest else "")
    return f"{total} s"


def coarse(seconds: float) -> str:
    """A duration in its largest unit only: 7380 -> 2 h."""
    return " ".join(duration(seconds if seconds < 1 else math.floor(seconds)).split()[:2])


def age(then: float | None, now: float | None = None) -> str:
    """How long ago a moment was, in epoch seconds, in its largest unit: "3 min ago"."""
    if then is None:
        return NOTHING
    seconds = (time.time() if now is None else now) - then
    return "just now" if seconds < 2 else f"{coarse(seconds)} ago"


def size(value: float | None) -> str:
    """Bytes in powers of 1000: 797696 -> 798 kB."""
    if value is None or not math.isfinite(value):
        return NOTHING
    for scale, suffix in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(value) >= scale:
            return f"{_plain(value / scale, 3)} {suffix}"
    return f"{value:.0f} B"


def counted(count: int, noun: str) -> str:
    """1, "fault" -> 1 fault; 1200 -> 1,200 faults."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def clock(moment: float | None) -> str:
    """A moment in epoch seconds as the local time of day."""
    return _when(moment, "%H:%M:%S")


def day_and_clock(moment: float | None) -> str:
    """A moment in epoch seconds as local date and time."""
    return _when(moment, "%Y-%m-%d %H:%M:%S")


def _when(moment: float | None, form: str) -> str:
    try:
        return NOTHING if moment is None else time.strftime(form, time.localtime(moment))
    except (ValueError, ArithmeticError, OSError):
        # No clock shows it.
        return NOTHING


def moment(time_of: float, now: float | None) -> str:
    """A moment in epoch seconds: its time of day, with the date in front if that is another day than `now`."""
    return clock(time_of) if now and day_and_clock(time_of)[:10] == day_and_clock(now)[:10] else day_and_clock(time_of)


def _plain(value: float, digits: int) -> str:
    """So many significant digits, but no digit before the point is lost, and no zeros at the end."""
    if value == 0:
        return "0"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
