"""Checks that the first sentence of each public docstring stands alone.

`python launch/check_docstrings.py [FOLDER...]` prints one line for each that does not, and then exits with 1.

A reader meets it in an index or in an editor's hint, without the class or the function above it. So it does not begin
with a word that refers to something elsewhere, has more than one word, and its paragraph ends as a sentence.
"""

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

FOLDERS = ("megasync", "launch", "benchmarks", "examples", "patches")

# Each begins a phrase whose subject stands elsewhere: "Those of whole sequences.", "As `resume`.", "What it sends."
REFERRING = frozenset(["As", "It", "Its", "Of", "See", "That", "Their", "Them", "They", "Those", "What", "With"])

# The title of a module may begin so: "What the launcher starts on each host of a job".
TITLES = frozenset({"What"})

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def fault(docstring: str, *, module: bool = False) -> str:
    """The rule that the first sentence of a docstring breaks, in words; empty if it breaks none."""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    words = re.split(r"(?<=[.!?]) ", paragraph)[0].split()
    opener = words[0].strip(":,")
    if opener in (REFERRING - TITLES if module else REFERRING):
        return f"begins with {opener!r}, which refers to something elsewhere: name the subject"
    if len(words) == 1:
        return "is a single word: say what is done to what"
    if paragraph[-1] not in ".:!?":
        return "does not end as a sentence"
    return ""


def definitions(node: ast.AST, scope: str = "") -> Iterator[tuple[Definition, str]]:
    """The public classes, functions and methods of a module, with their qualified names."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, Definition):
            yield from definitions(child, scope)
        elif not child.name.startswith("_"):
            yield child, scope + child.name
            if isinstance(child, ast.ClassDef):
                yield from definitions(child, f"{scope}{child.name}.")


def faults(source: str) -> list[str]:
    """Checks all docstrings of Python code; returns a line `NUMBER: NAME: what is wrong` for each fault."""
    module = ast.parse(source)
    lines: list[str] = []
    for node, name in [(module, "the module"), *definitions(module)]:
        docstring = ast.get_docstring(node)
        if docstring and (problem := fault(docstring, module=node is module)):
            lines.append(f"{getattr(node, 'lineno', 1)}: {name}: {docstring.splitlines()[0]!r} {problem}")
    return lines


def checked_files(folders: Iterable[str]) -> list[Path]:
    """The Python files below folders of the repository."""
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def main(arguments: list[str]) -> int:
    """Prints every fault below the folders named by the arguments, or below all; returns the exit status."""
    lines = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in checked_files(arguments or FOLDERS)
        for line in faults(path.read_text())
    ]
    print("\n".join(lines or ["Each public docstring begins with a sentence that stands alone."]))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
