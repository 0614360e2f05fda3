"""Every metric is documented once, under the name that a run logs."""

import ast
import re
from pathlib import Path

import pytest

import megasync
from megasync.observe.registry import METRICS, PAGE, metric_of

SOURCE = Path(megasync.__file__).parent
PREFIXES = {metric.name.partition("/")[0] for metric in METRICS if "/" in metric.name}
# A name as the source writes it; {} stands for what an f-string fills in.
NAME = re.compile(rf"(?:{'|'.join(PREFIXES)})/[\w{{}}@/]*(?:[^\W_]|}})")
CATCH_ALL = metric_of("rollout/no such metric")


def test_every_row_of_the_page_is_a_metric_with_a_name_of_its_own_and_a_sentence():
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert len(rows) == len(METRICS) == len({metric.name for metric in METRICS})
    for metric in METRICS:
        assert metric.meaning.endswith(".") and metric.meaning[0].isupper() and "|" not in metric.meaning


def names_of(tree):
    """Texts of a module that look like metrics, with {} for what is filled in."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_every_name_in_the_source_is_in_the_registry():
    names = {
        name
        for path in SOURCE.rglob("*.py")
        for name in names_of(ast.parse(path.read_text(encoding="utf-8")))
        if NAME.fullmatch(name)
    }
    assert {"train/loss", "eval/score", "rollout/dropped_{}", "sync/{}_seconds"} <= names
    # Runs show the rest of names that are filled in altogether: a test of a whole run looks up what it has logged.
    written = {name.replace("{}", "x") for name in names if not name.endswith("/{}")}
    assert not {name for name in written if metric_of(name) in (None, CATCH_ALL)}


ROOT = SOURCE.parent
# Pages that name metrics of the reader's own workflow.
OF_WORKFLOWS = {"gateway.md", "workflows.md"}


PAGES = [ROOT / "README.md", PAGE, *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_metric_that_a_page_names_is_in_the_registry(path):
    """What has a dot before a letter is a file, or the name in another system."""
    named = set(re.findall(rf"`((?:{'|'.join(PREFIXES)})/[^`\s]+)`", path.read_text(encoding="utf-8")))
    metrics = {name for name in named if not re.search(r"\.[a-z]|/(\.\.\.|\*)?$", name)}
    unknown = {None} if path.name in {*OF_WORKFLOWS, PAGE.name} else {None, CATCH_ALL}
    assert not {name for name in metrics if metric_of(name) in unknown}


@pytest.mark.parametrize(
    ("logged", "name"),
    [
        ("train/loss", "train/loss"),
        ("train/server_kl@3", "train/server_kl@<versions>"),
        ("eval/score@0.7", "eval/score@<temperature>"),
        ("eval/hard-set/pass8@1", "eval/<set>/pass<k>@<temperature>"),
        ("sync/pause_seconds", "sync/pause_seconds"),
        ("sync/wire_seconds", "sync/<phase>_seconds"),
        ("rollout/reward/math/none", "rollout/reward/<function>/none"),
        ("rollout/dropped_uniform", "rollout/dropped_<reason>"),
        ("rollout/search/hits", "rollout/<metric...>"),
        ("teachers/large/too_long", "teachers/<name>/too_long"),
    ],
)
def test_a_logged_name_belongs_to_its_metric(logged, name):
    assert metric_of(logged).name == name


@pytest.mark.parametrize("name", ["trian/loss", "train/", "loss", "eval/a/b/score", "version/x"])
def test_an_unknown_name_belongs_to_none(name):
    assert metric_of(name) is None
