"""Templates: what they write can start on any machine, explains its keys, and passes its own tests."""

import json
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest
import yaml

from megasync.config import Config, load_config, saved_values
from megasync.config.commands import is_supervised
from megasync.config.load import BASE_KEY, entry_of, section_of
from megasync.config.schema import DatasetConfig
from megasync.planning.plan import resolve_plan, resolve_supervised
from megasync.planning.reference import comments
from megasync.planning.start_checks import check_run
from megasync.starters import TEMPLATES, commented, find_model, run_files, write_run
from megasync.starters import folder as folder_module
from megasync.starters.fetch import fetch
from megasync.starters.model import Model

SHAPES = Path(__file__).parents[2] / "configs" / "models"
LARGE = Model("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", chats=True)
MODULES = ("reward", "tools", "agent", "search")


@pytest.fixture(scope="session")
def digits(tmp_path_factory):
    return fetch("digits", tmp_path_factory.mktemp("models") / "digits")


@pytest.fixture
def written(digits, tmp_path, monkeypatch):
    """Writes a template into a folder and goes there. The small models are links to what was made once, or missing."""

    def link(name, out):
        if name == "digits":
            out.parent.mkdir(parents=True)
            out.symlink_to(digits)

    monkeypatch.setattr(folder_module, "fetch", link)

    def write(template, model=None, gpus=0):
        model = model or find_model(TEMPLATES[template].model)
        write_run(tmp_path / "my run", run_files(template, model, gpus, "mine"), model)
        monkeypatch.chdir(tmp_path / "my run")
        monkeypatch.syspath_prepend(tmp_path / "my run")
        for name in MODULES:
            monkeypatch.delitem(sys.modules, name, raising=False)
        return tmp_path / "my run"

    yield write
    for name in MODULES:
        sys.modules.pop(name, None)


def explained(values, cls):
    """(key, value, meaning, default) of each key of a configuration that is no section."""
    hints, meanings = get_type_hints(cls), comments(cls)
    for name, value in values.items():
        below, entry = section_of(hints[name]), entry_of(hints[name])
        if below is not None:
            yield from explained(value, below)
            continue
        yield name, value, meanings[name], getattr(cls(), name)
        for keys in value.values() if entry is not None else ():
            yield from explained(keys, entry)


@pytest.mark.every(3)
@pytest.mark.parametrize("gpus", [0, 1, 2, 8])
@pytest.mark.parametrize("template", TEMPLATES)
def test_what_is_written_can_start(written, template, gpus):
    """On the CPU with the model that the template has by default, on GPUs with a larger one."""
    model = LARGE if gpus else None
    folder = written(template, model, gpus)
    small = "digits" if (folder / "models" / "digits").exists() else None
    shape = SHAPES / ("qwen3_0_6b.json" if gpus else "smollm2_135m.json")
    for path in folder.glob("*.yaml"):
        config = load_config(path, [] if small else [f"model.config={shape}"])
        left_out = check_run(config, planning=small is None)
        assert left_out == [] if small else all(".path=" in each for each in left_out)
        plan = (resolve_supervised if is_supervised(config) else resolve_plan)(config, None)
        assert not plan.refusals
        assert config.name == ("mine" if path.stem == "run" else f"mine-{path.stem}")


@pytest.mark.parametrize("template", TEMPLATES)
def test_each_key_differs_from_its_default_and_is_explained(written, template):
    for path in written(template).glob("*.yaml"):
        text = path.read_text()
        flat = " ".join(text.replace("#", " ").split())
        keys = yaml.safe_load(text)
        keys.pop(BASE_KEY, None)
        for name, value, meaning, default in explained(keys, Config):
            assert value != default, name
            assert " ".join(meaning.split()) in flat, name
        assert max(map(len, text.splitlines())) <= 120


def test_a_sentence_is_told_once_and_the_schema_orders_the_keys():
    row = {"source": "a.jsonl", "kind": "jsonl", "split": "train"}
    given = {
        "data": {"eval": row, "train": row, "sets": {"a": {"weight": 2.0}}},
        "seed": 0,
        "sft": {},
        "base": "b.yaml",
    }
    text = commented(given, "What it is.\n\nHow it goes.")
    kind, source = comments(DatasetConfig)["kind"], comments(DatasetConfig)["source"]
    assert text.startswith("# What it is.\n#\n# How it goes.\n\n")
    assert text.count(f"# {kind[:40]}") == 1 and text.count(f"# {source[:40]}") == 1
    assert yaml.safe_load(text) == {
        BASE_KEY: "b.yaml",
        "data": {
            "train": {"kind": "jsonl", "source": "a.jsonl"},
            "sets": {"a": {"weight": 2.0}},
            "eval": {"kind": "jsonl", "source": "a.jsonl"},
        },
    }
    assert text.index("train:") < text.index("sets:") < text.index("eval:")
    with pytest.raises(KeyError, match="trainr"):
        commented({"trainr": {}})


@pytest.mark.every(4)
@pytest.mark.parametrize("path", sorted(SHAPES.parent.glob("*_*.yaml")), ids=lambda path: path.stem)
def test_a_configuration_is_read_back_unchanged(path, tmp_path):
    given = load_config(path)
    (tmp_path / "run.yaml").write_text(commented(saved_values(given)))
    assert load_config(tmp_path / "run.yaml") == given


@pytest.mark.parametrize("template", TEMPLATES)
def test_rows_are_distinct_and_none_is_held_out_and_trained(written, template):
    folder = written(template)
    rows = {path.stem: path.read_text().splitlines() for path in (folder / "data").glob("*.jsonl")}
    assert len(rows["train"]) == 20 and len(rows["test"]) == 10
    asked = [line for name, lines in rows.items() if name != "corpus" for line in lines]
    assert len({*asked}) == len(asked) and all("prompt" in json.loads(line) for line in asked)


@pytest.mark.every(5)
@pytest.mark.processes
@pytest.mark.parametrize("template", ["reward", "math", "tools", "agent", "deepresearch"])
def test_the_tests_of_a_template_pass(written, template):
    """The other templates have those of `reward`."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=written(template), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr
