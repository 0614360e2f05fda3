"""Responses to the same held-out prompts, before and after training."""

from __future__ import annotations

from collections.abc import Sequence

from megasync.observe.samples import before_and_after
from megasync.watch.document import Cell, Section, Table, fixed, shortened
from megasync.watch.run_folder import RunFolder

# Prompts that are shown, and characters of each text.
SHOWN, CHARACTERS = 8, 600


def samples(run: RunFolder) -> Section:
    section = Section("Responses before and after training")
    pairs = before_and_after(run.answers)[:SHOWN]
    rows: list[Sequence[Cell]] = [
        (
            shortened(early.prompt, CHARACTERS),
            shortened(early.text, CHARACTERS),
            fixed(early.reward, 2),
            shortened(late.text, CHARACTERS),
            fixed(late.reward, 2),
        )
        for early, late in pairs
    ]
    if pairs:
        first, last = min(early.step for early, _ in pairs), max(late.step for _, late in pairs)
        headings = ("Prompt", f"Step {first}", "Reward", f"Step {last}", "Reward ")
        caption = "The most likely responses to the same held-out prompts."
        section.add(Table(caption, headings, rows, texts=(headings[0], headings[1], headings[3])))
    return section
