"""docs/configuration.md and the schema say the same."""

import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import get_type_hints

import pytest
from omegaconf import MISSING as REQUIRED

from megasync.config.load import _section, schema_keys
from megasync.config.schema import Config, EvalSetConfig, RewardModelConfig

PAGE = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `([\w.]+)` \| (required|`.*?`) \| (.+) \|$", re.MULTILINE)
TABLE = {key: default.strip("`").replace("\\|", "|") for key, default, _ in ROW.findall(PAGE)}


def defaults(cls=Config, prefix=""):
    hints = get_type_hints(cls)
    for item in fields(cls):
        section = _section(hints[item.name])
        if section is not None:
            yield from defaults(section, f"{prefix}{item.name}.")
            continue
        value = item.default if item.default is not MISSING else item.default_factory()
        yield f"{prefix}{item.name}", value


def written(value):
    words = {REQUIRED: "required", "": '""', "None": "null", "True": "true", "False": "false"}
    return words.get(str(value), str(value)).replace("\n", "\\n")


def test_every_key_has_a_row_with_its_default():
    assert {key: written(value) for key, value in defaults() if not key.startswith("data.eval.")} == TABLE


@pytest.mark.parametrize(("prefix", "section"), [("reward_models", RewardModelConfig), ("eval.sets", EvalSetConfig)])
def test_every_key_of_a_section_under_a_name_has_a_row_with_its_default(prefix, section):
    rows = re.findall(rf"^\| `{re.escape(prefix)}\.<name>\.(\w+)` \| (required|`.*?`) \|", PAGE, re.MULTILINE)
    hints = get_type_hints(section)
    expected = {}
    for item in fields(section):
        value = item.default if item.default is not MISSING else item.default_factory()
        below = _section(hints[item.name])
        required = below is not None and any(each.default == REQUIRED for each in fields(below))
        expected[item.name] = "required" if required else "{}" if below is not None else written(value)
    assert {key: default.strip("`") for key, default in rows} == expected


def test_the_table_of_other_libraries_names_keys_that_exist():
    keys = {key for key, _ in schema_keys()}
    rows = re.findall(r"^\| `([a-z_]+\.[\w.]+)[`:]", PAGE.split("## Every key")[0], re.MULTILINE)
    assert len(rows) > 10
    assert set(rows) <= keys
