"""Renders a rehearsal as a table for a terminal, or as data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megasync.lab.rehearsal.report import RankReport, Rehearsal
from megasync.layout.layout import Layout

# Differences of one rank that are shown.
SHOWN = 3


def rehearsal_data(rehearsals: Iterable[Rehearsal], layout: Layout) -> dict[str, Any]:
    """All figures in bytes and seconds, with the coordinates of each rank, ready for JSON."""
    runs = [*rehearsals]
    return {
        "world": layout.topology.world,
        "ok": all(run.difference is None for run in runs),
        "rehearsals": [
            {
                "megatron": run.megatron,
                "difference": run.difference,
                "ranks": [_coordinates(layout, rank.rank) | asdict(rank) for rank in run.ranks],
            }
            for run in runs
        ],
    }


def _coordinates(layout: Layout, rank: int) -> dict[str, int]:
    coords = layout.topology.coords(rank)._asdict()
    return coords | (layout.topology.expert_coords(rank)._asdict() if layout.sizes.experts else {})


def rehearsal_tables(rehearsals: Iterable[Rehearsal], layout: Layout) -> RenderableType:
    """A table, the differences and a verdict for each version of megatron-core."""
    parts: list[RenderableType] = []
    for run in rehearsals:
        parts += [_ranks(run, layout), *_differences(run), Text()]
    return Group(*parts[:-1])


def _ranks(run: Rehearsal, layout: Layout) -> Table:
    """One row for all ranks of a stage with the same figures."""
    kinds = [kind for kind in next((rank.held for rank in run.ranks if rank.held), {})]
    title = f"megatron-core {run.megatron}: {len(run.ranks)} of {layout.topology.world} ranks, GB held|planned"
    table = Table(title=title, title_justify="left", collapse_padding=True, pad_edge=False)
    for column in ("stage", "ranks", "params", *kinds, "s"):
        table.add_column(column, justify="left" if column == "ranks" else "right", overflow="fold")
    rows: dict[tuple[Any, ...], list[RankReport]] = {}
    for rank in run.ranks:
        stage = layout.topology.coords(rank.rank).pp
        figures = tuple(_gigabytes(rank, kind) for kind in kinds)
        rows.setdefault((stage, rank.parameters, figures), []).append(rank)
    for (stage, parameters, figures), ranks in rows.items():
        seconds = max(rank.seconds for rank in ranks)
        table.add_row(str(stage), _names(ranks), f"{parameters / 1e9:.3f}B", *figures, f"{seconds:.1f}")
    return table


def _gigabytes(rank: RankReport, kind: str) -> str:
    return f"{rank.held[kind] / 1e9:.2f}|{rank.planned[kind] / 1e9:.2f}" if kind in rank.held else "-"


def _names(ranks: list[RankReport]) -> str:
    numbers = [str(rank.rank) for rank in ranks]
    return ", ".join(numbers) if len(numbers) <= SHOWN else f"{numbers[0]} to {numbers[-1]} ({len(numbers)})"


def _differences(run: Rehearsal) -> list[Text]:
    if run.difference is None:
        return [Text(f"all {len(run.ranks)} rehearsed ranks are as planned", style="bold green")]
    different = [rank for rank in run.ranks if rank.differences]
    texts = [Text(run.difference, style="red")]
    texts += [Text(f"rank {different[0].rank}: {text}", style="red") for text in different[0].differences[1:SHOWN]]
    count = sum(len(rank.differences) for rank in different)
    verdict = f"{len(different)} of {len(run.ranks)} rehearsed ranks differ, in {count} place(s)"
    return [*texts, Text(verdict, style="bold red")]
