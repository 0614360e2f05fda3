"""docs/keys documents every key of the schema, docs/configuration.md lists its pages, and both are up to date."""

import re
from dataclasses import dataclass

import pytest

from megasync.config.load import entry_of, schema_keys, section_of
from megasync.config.schema import (
    AuxiliaryModelConfig,
    Config,
    EvalSetConfig,
    McpConfig,
    RewardConfig,
    RewardModelConfig,
    TeacherConfig,
    TrainSetConfig,
)
from megasync.planning import reference
from megasync.planning.reference import KEYS, MARK, PAGE, Section, comments, rewritten, write

TEXT = "".join(page.read_text(encoding="utf-8") for page in KEYS.glob("*.md"))


def test_the_pages_are_up_to_date(tmp_path):
    """`python -m megasync.planning.reference` updates them, and deletes those of sections that are gone."""
    page, keys = tmp_path / "configuration.md", tmp_path / "keys"
    page.write_text(PAGE.read_text(encoding="utf-8").partition(MARK)[0] + MARK)
    keys.mkdir()
    (keys / "gone.md").write_text("# `gone`\n")
    write(page, keys)
    assert page.read_text() == PAGE.read_text(encoding="utf-8")
    written, committed = ({each.name: each.read_text() for each in place.glob("*.md")} for place in (keys, KEYS))
    assert written == committed and len(written) > 10


def test_every_key_has_a_row():
    rows = set(re.findall(r"^\| `([\w.<>]+)` \|", TEXT, re.MULTILINE))
    # Described once, for `data.train` and `trainer.optimizer`.
    same = ("data.eval.", "sft.train.", "sft.validation.", "critic.optimizer.")
    keys = {key for key, hint in schema_keys() if section_of(hint) is None and not key.startswith(same)}
    named = {
        "auxiliary_models": AuxiliaryModelConfig,
        "data.sets": TrainSetConfig,
        "eval.sets": EvalSetConfig,
        "reward_models": RewardModelConfig,
        "rollout.rewards": RewardConfig,
        "rollout.tools.mcp": McpConfig,
        "teachers": TeacherConfig,
    }
    assert {key for key, hint in schema_keys() if entry_of(hint)} == set(named)
    for prefix, cls in named.items():
        below = schema_keys(cls, f"{prefix}.<name>.")
        keys |= {key for key, hint in below if section_of(hint) is None and key.count(".") == prefix.count(".") + 2}
    assert rows == keys


def test_a_row_has_the_allowed_values_and_the_default():
    assert "| `schedule.stale` | mask, regenerate, drop | `regenerate` |" in TEXT
    assert "| `rollout.kv_pressure` | number, above 0 and at most 1, or null | `0.9` |" in TEXT
    assert "| `cluster.address` | auto or host:port, or null | `null` |" in TEXT
    assert "| `model.path` | text | required |" in TEXT
    assert "| `eval.sets.<name>.repeats` | whole number, at least 1, or null | `null` |" in TEXT


def test_pages_that_a_comment_names_are_linked():
    assert "[gateway.md](../gateway.md)" in TEXT and "docs/gateway.md" not in TEXT


@dataclass
class Sample:
    """A section."""

    # The first line
    # and the second.
    documented: int = 0
    undocumented: int = 0


def test_the_comment_above_a_key_is_its_meaning():
    assert comments(Sample) == {"documented": "The first line and the second."}
    assert comments(Config)["run_root"] == "Folder in which run directories are made, as `<name>-<time>`."


def test_a_key_without_a_comment_is_refused():
    with pytest.raises(ValueError, match="Sample.undocumented has no comment"):
        list(reference._written(Section("sample.", Sample), {}))


def test_a_page_without_the_mark_is_refused():
    with pytest.raises(ValueError, match="no line"):
        rewritten("# Configuration\n")
