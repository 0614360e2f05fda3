"""What an evaluation shows and leaves."""

from __future__ import annotations

import json
from io import StringIO

from rich.console import Console

from megasync.evaluation.evaluate import HeldOutAnswer, HeldOutScores
from megasync.offline.report import EvaluationProgress, scores_table, write_scores

ANSWERS = [
    HeldOutAnswer("", 0.0, 0, 0, "1+1=", "2", 1.0),
    HeldOutAnswer("", 0.0, 1, 0, "2+2=", error="ServerError: gone"),
]
FOUND = [HeldOutScores("", 0.0, 0.5, 1.0, 2, 1, {}), HeldOutScores("hard", 1.0, 0.25, 0.3, 8, 0, {1: 0.25, 4: 0.5})]


def console():
    return Console(file=StringIO(), width=100, color_system=None)


def test_every_answer_is_in_the_file_as_soon_as_it_is_known(tmp_path):
    out = console()
    with EvaluationProgress(tmp_path, [("", 0.0, 2)], out) as view:
        for number, answer in enumerate(ANSWERS, 1):
            view.answer(answer)
            lines = (tmp_path / "answers.jsonl").read_text().splitlines()
            assert len(lines) == number
    first, second = map(json.loads, lines)
    assert (first["set"], first["prompt"], first["text"], first["reward"]) == ("eval", "1+1=", "2", 1.0)
    assert (second["reward"], second["error"]) == (None, "ServerError: gone")
    assert "eval, temperature 0: 2 of 2 1 failed" in out.file.getvalue()


def test_a_terminal_sees_bars_with_what_failed(tmp_path):
    out = Console(file=StringIO(), width=100, force_terminal=True, color_system=None)
    with EvaluationProgress(tmp_path, [("", 0.0, 2)], out) as view:
        for answer in ANSWERS:
            view.answer(answer)
    text = out.file.getvalue()
    assert "2/2" in text and "1 failed" in text


def test_the_table_has_a_row_for_each_set_and_temperature():
    out = console()
    out.print(scores_table(FOUND))
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]] for line in out.file.getvalue().splitlines() if "│" in line
    ]
    assert rows == [
        ["eval", "0", "2", "0.500", "1.000", "-", "-", "1"],
        ["hard", "1", "8", "0.250", "0.300", "0.250", "0.500", "0"],
    ]


def test_the_scores_are_left_with_what_was_evaluated(tmp_path):
    write_scores(tmp_path, "models/m", FOUND, 1.23456)
    left = json.loads((tmp_path / "scores.json").read_text())
    assert (left["model"], left["seconds"], [row["set"] for row in left["scores"]]) == (
        "models/m",
        1.235,
        ["eval", "hard"],
    )
    assert left["scores"][1]["pass_at"] == {"1": 0.25, "4": 0.5}
