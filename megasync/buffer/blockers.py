"""What an admission or a batch waits for, in words that name who holds it up."""

from __future__ import annotations

from megasync.buffer.book import Book
from megasync.buffer.entry import LIVE, State
from megasync.config.pacing import Pacing


def of_admission(book: Book, pacing: Pacing, remaining: int | None) -> str | None:
    """None when a prompt can be admitted. ``remaining`` groups are yet to be trained in this run; None is unbounded.

    Near the end of a run live groups never outnumber those that remain, which are whole batches; more can be live only
    when the run was resumed with smaller ones.
    """
    live = book.live()
    slots = book.slots()
    if live + slots[State.UNPUBLISHED] >= pacing.capacity:
        taken = ", ".join(f"{slots[state]} {state}" for state in (*LIVE, State.UNPUBLISHED) if slots[state])
        return f"a free slot: all {pacing.capacity} are taken ({taken})"
    if remaining is not None and live >= remaining:
        return f"a drop: {book.trained} trained and {live} live groups are all that the run needs"
    return None


def of_lease(book: Book, pacing: Pacing, now: float) -> str | None:
    """None when a batch is complete."""
    need, window = pacing.groups_per_step, pacing.window
    ready = book.ready(window)
    if ready >= need:
        return None
    oldest = book.oldest_unfinished()
    text = f"{need} finished groups: {ready} ready"
    if oldest is not None:
        outside = book.slots()[State.FINISHED] - ready
        text += f", {outside} more behind the window of {window}" if outside else ""
        text += f", {oldest.uid} is the oldest and {oldest.state} for {now - oldest.since:.1f} s"
    return text
