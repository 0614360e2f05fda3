"""The check that the first sentence of each public docstring stands alone."""

import ast

import pytest
from launch_scripts import program

check = program("check_docstrings")


@pytest.mark.parametrize(
    ("docstring", "problem"),
    [
        ("Those of whole sequences.", "'Those'"),
        ("It goes on.", "'It'"),
        ("That of some positions, in ascending order.", "'That'"),
        ("Of a position as it is reported.", "'Of'"),
        ("As `resume`.", "'As'"),
        ("What it sends.\n\nRaises ValueError.", "'What'"),
        ("With: a factor.", "'With'"),
        ("See `Critic.save`.", "'See'"),
        ("Seconds.", "single word"),
        ("`pytest.approx`. Compares numbers.", "single word"),
        ("The rows that are left", "end as a sentence"),
        ("The rows that are left\n\nThe others go.", "end as a sentence"),
    ],
)
def test_a_first_sentence_that_does_not_stand_alone_is_found(docstring: str, problem: str) -> None:
    assert problem in check.fault(docstring)


@pytest.mark.parametrize(
    "docstring",
    [
        "The rows that are left.",
        "Returns the rows that are left; `None` without any.\n\nOf these, the first is",
        "Ends the processes, including those in the middle\nof a call. As before, they leave nothing.",
        "Itself an iterator: yields rows.",
        "Offsets of the rows, [rows].",
    ],
)
def test_a_first_sentence_that_stands_alone_passes(docstring: str) -> None:
    assert check.fault(docstring) == ""


def test_a_module_may_have_a_title() -> None:
    assert check.fault("What the launcher starts on each host.", module=True) == ""
    assert check.fault("Those of the launcher.", module=True)


def test_every_public_definition_is_visited_and_no_other() -> None:
    source = """
class Public:
    def method(self):
        def local(): ...
    def _private(self): ...
    class Inner:
        @property
        def row(self): ...
class _Private:
    def method(self): ...
try:
    async def fetch(): ...
except ImportError:
    def fallback(): ...
"""
    names = [name for _, name in check.definitions(ast.parse(source))]
    assert names == ["Public", "Public.method", "Public.Inner", "Public.Inner.row", "fetch", "fallback"]


def test_a_line_names_place_definition_and_sentence() -> None:
    source = '"""Rows."""\n\nclass Rows:\n    def last(self):\n        """Those at the end."""\n'
    module, method = check.faults(source)
    assert module.startswith("1: the module: 'Rows.' is a single word")
    assert method.startswith("4: Rows.last: 'Those at the end.' begins with 'Those'")


def test_the_repository_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main([]) == 0, capsys.readouterr().out
    assert any(path.name == "layout.py" for path in check.checked_files(["megasync"]))
