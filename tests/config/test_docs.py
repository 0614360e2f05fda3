"""docs/configuration.md and the schema say the same."""

import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import get_type_hints

from omegaconf import MISSING as REQUIRED

from megasync.config.load import _section, schema_keys
from megasync.config.schema import Config

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


def test_the_table_of_other_libraries_names_keys_that_exist():
    keys = {key for key, _ in schema_keys()}
    rows = re.findall(r"^\| `([a-z_]+\.[\w.]+)[`:]", PAGE.split("## Every key")[0], re.MULTILINE)
    assert len(rows) > 10
    assert set(rows) <= keys
