"""Programs are scored by the tests that they pass."""

import pytest

from megasync.coding import reward
from megasync.coding.reward import CodeReward
from megasync.errors import DataError
from megasync.sandboxes import local

DOUBLE = [{"input": "2\n", "output": "4\n"}, {"input": "5\n", "output": "10"}, {"input": "0", "output": "0\n\n"}]


def fenced(program, language="python"):
    return f"Here it is:\n```{language}\n{program}\n```\nDone."


@pytest.mark.processes
@pytest.mark.parametrize(
    ("completion", "tests", "strict", "partial"),
    [
        (fenced("print(int(input()) * 2)"), DOUBLE, 1.0, 1.0),
        (fenced("print(int(input()) + 2)"), DOUBLE, 0.0, 1 / 3),
        (fenced("print(1)") + fenced("print(int(input()) * 2)", ""), DOUBLE, 1.0, 1.0),
        ("print(int(input()) * 2)", DOUBLE, 1.0, 1.0),
        ("Print twice the input.", DOUBLE, 0.0, 0.0),
        (fenced("print(int(input()) * 2"), DOUBLE, 0.0, 0.0),
        (fenced("def f(x):\n    return 2 * x"), "assert f(2) == 4", 1.0, 1.0),
        (fenced("def f(x):\n    return 3 * x"), "assert f(2) == 4", 0.0, 0.0),
        (fenced("import os\ndef f(x):\n    os._exit(0)"), "assert f(2) == 4", 0.0, 0.0),
        (fenced("raise SystemExit"), "assert f(2) == 4", 0.0, 0.0),
        (fenced("print(1)"), [], None, None),
        (fenced("print(1)"), None, None, None),
    ],
)
async def test_a_program_is_scored_by_its_tests(completion, tests, strict, partial):
    assert await CodeReward()([completion], tests=[tests]) == [strict]
    assert await CodeReward(partial=True)([completion], tests=[tests]) == [partial]


@pytest.mark.processes
async def test_a_program_that_never_ends_affects_only_its_own_score():
    reward = CodeReward(cpu_seconds=1, wall_seconds=20, parallel=2)
    completions = [fenced("while True: pass"), fenced("print(4)"), fenced("print(5)")]
    assert await reward(completions, tests=[DOUBLE[:1]] * 3) == [0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"answer": ["1"]}, r"needs a tests column; the rows have \['answer'\]"),
        ({"tests": [[{"input": "1"}]]}, r"tests=\[\{'input': '1'\}\] cannot be used: the keys"),
        ({"tests": ["print(f(2))"]}, "no assertion in them runs"),
    ],
)
async def test_rows_without_usable_tests_are_an_error(columns, message):
    with pytest.raises(DataError, match=message):
        await CodeReward()([fenced("print(1)")], **columns)
    with pytest.raises(DataError, match=message.replace("rows have", "row has")):
        CodeReward.check_row({name: values[0] for name, values in columns.items()})


async def test_each_row_of_a_call_has_its_own_tests():
    reward, same = CodeReward(), "def check(candidate):\n    assert candidate(1) == 1"
    with pytest.raises(DataError, match="entry_point"):
        await reward(["", ""], tests=[same, same], entry_point=["f", None])
    assert await reward(["", ""], tests=[same, None], entry_point=["f", None]) == [0.0, None]


async def test_equal_responses_to_the_same_tests_are_run_once(monkeypatch):
    started = []

    async def run(program, check, limits):
        started.append((program, check.text))
        return program == "f = 1"

    monkeypatch.setattr(reward, "run_check", run)
    first, other = "assert f == 1", "assert f > 0"
    scores = await CodeReward()(["f = 1", "f = 2", "f = 1", "f = 1"], tests=[first, first, first, other])
    assert scores == [1.0, 0.0, 1.0, 1.0]
    assert sorted(started) == [("f = 1", first), ("f = 1", other), ("f = 2", first)]


def test_a_kernel_without_network_isolation_is_refused_if_isolation_is_required(monkeypatch):
    monkeypatch.setattr("megasync.coding.reward.isolation", lambda: local.Isolation("", False))
    CodeReward()
    with pytest.raises(TypeError, match="require_no_network.*user namespaces|namespaces.*container"):
        CodeReward(require_no_network=True)


def test_a_machine_that_cannot_run_programs_is_refused(monkeypatch):
    monkeypatch.setattr(local, "probe", lambda kind: "no clone")
    local.isolation.cache_clear()
    for limits in ({}, {"cpu_seconds": 1}):
        with pytest.raises(TypeError, match="cannot run programs on this machine.*no clone"):
            CodeReward(**limits)
