"""Writes docs/knobs.md from `table`: the names that other libraries have for megasync's keys.

`python -m megasync.translate.page` writes it. A test checks that the page is up to date.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from megasync.base.files import atomic_write
from megasync.config.load import schema_keys
from megasync.translate.table import COLUMNS, SAME, SHOWN, TABLES, Row

PAGE = Path(__file__).resolve().parents[2] / "docs" / "knobs.md"
_TITLES = {"verl": "verl", "slime": "slime", "trl": "TRL"}
_FORMS = {
    "verl": "Hydra overrides in a shell script, or YAML. A script with `fully_async` in its program, or with "
    "`async_training.*`, is an asynchronous run; others are synchronous.",
    "slime": "Flags in a shell script, arrays such as `ROLLOUT_ARGS=(...)` included. Model sizes of `scripts/models/` "
    "are not needed: config.json has them.",
    "trl": "`GRPOConfig`, `AsyncGRPOConfig`, `RLOOConfig` or `SFTConfig` in a Python script, which is parsed and not "
    "run; YAML; or a shell script, with the YAML file that its `--config` names.",
}
_HEAD = """# Coming from another library

With `--from LIBRARY FILE`, megasync init translates a configuration of verl, slime or TRL: into a run, and a report of
what is open, what has no counterpart and what changes in meaning. The tables below are its rules. The file is read and
never run: in a shell script variables, arrays, arithmetic and `${NAME:-default}` are substituted, and what only a run
could tell is listed, not guessed. A variable that the script never sets stays one: `${oc.env:NAME}`. Defaults of the
library that differ from megasync's are translated too, so that a run trains as it did there. Where two keys exclude one
another, one is chosen, and the report says which.

Meanings are close, not always identical; names were read in the libraries' sources."""


def page() -> str:
    """The Markdown page: a table for each library, those that are translated first."""
    return "\n\n".join((_HEAD, *_parts())) + "\n"


def _parts() -> Iterator[str]:
    for library, rows in TABLES.items():
        yield f"## {_TITLES[library]}"
        yield _FORMS[library]
        yield _columns(library)
        reinforced = [row for row in rows if row.sft is not True]
        yield _table(row for row in reinforced if row.key)
        yield f"### {_TITLES[library]}: supervised training\n\nBeside the keys above that are the same for both."
        yield _table(row for row in rows if row.sft is True and row.key)
        yield f"### {_TITLES[library]}: without a counterpart"
        lines = [f"| {row.note} | {_names(row)} |" for row in rows if not row.key]
        yield "| instead | option |\n|---|---|\n" + "\n".join(lines)
    yield "## Others\n\nTheir names are shown, and their configurations are not translated."
    for library, rows in SHOWN.items():
        yield f"### {library}"
        yield _table(rows)


def _columns(library: str) -> str:
    lines = [f"| {each.here} | `{each.column}` | {each.said_by} |" for each in COLUMNS[library]]
    return "| here | column | named by |\n|---|---|---|\n" + "\n".join(lines)


def _table(rows: Iterable[Row]) -> str:
    lines = [f"| `{_key(row.key)}` | {_names(row)} | {_default(row)} | {row.note} |" for row in rows]
    return "| here | option | default there | difference |\n|---|---|---|---|\n" + "\n".join(lines)


@cache
def _known() -> set[str]:
    return {key for key, _ in schema_keys()}


def _key(key: str) -> str:
    """A key as it is written: free-form pairs and named sections in braces."""
    known = _known()
    parts = key.split(".")
    count = next(at for at in range(len(parts), 0, -1) if ".".join(parts[:at]) in known)
    rest = ": {".join(parts[count:])
    return ".".join(parts[:count]) + (f": {{{rest}: ...{'}' * len(parts[count:])}" if rest else "")


def _names(row: Row) -> str:
    return ", ".join(f"`{name}`" for name in row.spellings) or "every file"


def _default(row: Row) -> str:
    return "" if row.default in (SAME, None, "") else f"`{row.default}`"


if __name__ == "__main__":
    atomic_write(Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE, page())
