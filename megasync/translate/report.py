"""The Markdown report of a translation: what changes in meaning, what is open, and what has no counterpart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megasync.config.limits import as_typed
from megasync.translate.translation import Kind, Translation

_SECTIONS: dict[Kind, tuple[str, str]] = {
    "open": ("To be filled in", "What the file alone does not say."),
    "choice": ("Chosen", "Keys that exclude one another, or needed another one."),
    "without": ("Without a counterpart", "Options that do nothing here, and what there is instead."),
    "unknown": ("Unknown", "Options that the translation does not know, with their values."),
}


def report(translation: Translation) -> str:
    """The whole report, as a page of its own."""
    return "\n\n".join(_parts(translation)) + "\n"


def _parts(translation: Translation) -> Iterator[str]:
    source = translation.source
    counts = [(len(translation.of(kind)), head) for kind, (head, _) in _SECTIONS.items()]
    said = ", ".join(f"{count} {head.lower()}" for count, head in counts if count)
    yield f"# Translated from {source}"
    options = len({entry.option for entry in translation.translated})
    yield f"`{translation.path.name}`: {options} options are translated" + (f"; {said}." if said else ".")
    command = "sft" if translation.supervised else "train"
    yield (
        f"In the folder in which `{translation.path.name}` is run, because paths are relative to it: check the "
        f"configuration with `megasync plan DIR/run.yaml`, then start it with `megasync {command} DIR/run.yaml`."
    )
    for kind, (head, meaning) in _SECTIONS.items():
        if remarks := translation.of(kind):
            yield f"## {head}"
            yield meaning
            yield _list(f"`{each.option}`: {each.text}" if each.option else each.text for each in remarks)
    if changed := {(entry.option, entry.note): entry for entry in translation.translated if entry.note}:
        yield "## Changed in meaning"
        yield _list(f"`{each.option}`, here `{each.key}`: {each.note}" for each in changed.values())
    if translation.defaults:
        yield f"## Defaults of {source}"
        yield "The file is silent about them, and megasync's are others."
        yield _list(f"`{key}: {as_typed(value)}`" for key, value in translation.defaults)
    yield "## Columns of the data"
    yield _list(
        f"`{each.column}`{f' ({each.said_by})' if each.said_by else ''}: {each.here}" for each in translation.columns
    )
    yield "## Translated"
    yield "| option | key | value |\n|---|---|---|\n" + "\n".join(
        f"| `{entry.option}` | `{entry.key}` | `{_cell(as_typed(entry.value))}` |" for entry in translation.translated
    )


def _list(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", r"\|").replace("\n", " ")
