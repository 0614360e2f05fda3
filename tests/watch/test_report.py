"""A report says what the run's files say, loads nothing, and lets nothing that a run recorded act."""

import gzip
import json
import re
from base64 import b64decode
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest
from made_runs import HOSTILE, make_run, write_trace

from megasync.errors import ConfigError, DataError
from megasync.observe.metrics import read_metrics
from megasync.watch import figures
from megasync.watch.configuration import ABSENT, changed, differences, shown
from megasync.watch.document import Facts
from megasync.watch.files import open_run, write_document
from megasync.watch.html_page import render_html
from megasync.watch.markdown_page import render_markdown
from megasync.watch.picture import picture
from megasync.watch.report import make_report
from megasync.watch.run_folder import RunFolder

KINDS = {
    "finished": {},
    "crashed": {"status": "running", "steps": 7},
    "failed": {"status": "failed", "steps": 7},
    "one step": {"steps": 1},
    "nothing trained": {"steps": 0, "status": "failed"},
    "older": {"older": True},
    "supervised": {"supervised": True},
}


class Page(HTMLParser):
    """Tables as rows of (text, exact value), the elements with their attributes, and all text that is shown."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.elements, self.text = [], [], ""
        self._open = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append(["", None])
        elif tag == "data":
            self.rows and "td" in self._open and self.rows[-1][-1].__setitem__(1, float(dict(attributes)["value"]))

    def handle_endtag(self, tag):
        while tag in self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data):
        if not {"script", "style"} & set(self._open):
            self.text += data
            if {"td", "th"} & set(self._open):
                self.rows[-1][-1][0] += data


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    run_dir = make_run(tmp_path_factory.mktemp("runs"))
    write_trace(run_dir, 20)
    return run_dir


@pytest.fixture(scope="module")
def page(run_dir):
    return Page(render_html(make_report(RunFolder(run_dir))))


def row_of(page, label):
    return next(row for row in page.rows if row[0][0] == label)


@pytest.mark.matrix
def test_every_metric_has_its_numbers_in_the_report(run_dir, page):
    columns = read_metrics(run_dir)
    for name in columns.keys() - {"step", "time"}:
        values = [value for value in columns[name] if value is not None]
        expected = [len(values), values[0], values[-1], min(values), np.mean(values), max(values)]
        assert [exact for _, exact in row_of(page, name)[2:8]] == pytest.approx(expected), name


def test_the_ledgers_balance_is_in_the_report(page):
    assert [row_of(page, label)[1][1] for label in ("admitted", "trained", "unaccounted for")] == [90, 80, 0]
    assert row_of(page, "dropped: reward_failed")[1][1] == 5


def test_a_fault_is_listed_with_its_consequences(page):
    row = next(row for row in page.rows if len(row) == 5 and row[1][0] == "server-0")
    assert "exit status -9" in row[2][0] and [row[3][1], row[4][1]] == pytest.approx([0.5, 1.9])


@pytest.mark.every(2)
@pytest.mark.parametrize(("older", "devices"), [(False, "2 × NVIDIA H100 80GB HBM3; trainer on 1 host"), (True, "cpu")])
def test_the_devices_are_those_that_the_ranks_reported(tmp_path, older, devices):
    run = RunFolder(make_run(tmp_path, steps=1, older=older))
    (facts,) = [block for block in make_report(run).sections[0].blocks if isinstance(block, Facts)]
    assert dict(facts.rows)["Devices"] == devices


def test_phases_of_a_step_add_up(page):
    total = row_of(page, "Steps")[1][1]
    parts = ["Waiting for finished groups", "Publishing weights", "Everything else"]
    parts.append("Training: scoring, forward and backward passes, optimizer")
    assert sum(row_of(page, label)[1][1] for label in parts) == pytest.approx(total)


@pytest.mark.every(4)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_in_any_state_has_a_report(tmp_path, kind):
    run = RunFolder(make_run(tmp_path, **KINDS[kind]))
    document = make_report(run)
    page, (markdown, _) = Page(render_html(document)), render_markdown(document, "figures")
    for text in (page.text, markdown):
        assert run.status in text and "How to reproduce it" in text
    assert document.notes == []


@pytest.mark.every(2)
@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "state.json", "events.jsonl", "ledger.db"])
def test_a_report_without_a_file_says_so_or_does_without(tmp_path, name):
    run_dir = make_run(tmp_path, steps=5)
    (run_dir / name).unlink()
    notes = make_report(RunFolder(run_dir)).notes
    assert bool(notes) == (name in ("config.yaml", "metrics.jsonl")) and all(name in note for note in notes)


def test_text_of_a_run_stays_text(run_dir, page):
    assert sum(1 for tag, _ in page.elements if tag == "script") == 3
    assert HOSTILE in page.text
    markdown, _ = render_markdown(make_report(RunFolder(run_dir)), "figures")
    assert "<script" not in markdown and "&lt;script&gt;" in markdown and "\\`\\`\\`" in markdown


def test_a_report_is_small_enough_to_mail_and_the_same_each_time(run_dir, pictures):
    document = make_report(RunFolder(run_dir))
    text = render_html(document)
    pictures.clear()
    assert len(text.encode()) < 2.5e6 and render_html(document) == text


def test_names_in_a_picture_stay_as_they_are(run_dir):
    name = 'a transform="rotate(-0 " x="0.123456" font-family: b; <c>'
    figure = figures.throughput(RunFolder(run_dir))
    figure.data[0].name = name
    drawn = ElementTree.fromstring(picture(figure, prefix="p"))
    assert name in [element.text for element in drawn.iter("{http://www.w3.org/2000/svg}text")]


def test_a_page_refers_to_nothing_outside(page):
    places = [value for _, found in page.elements for key, value in found.items() if key in ("src", "href", "data")]
    assert all(place.startswith(("#", "data:")) for place in places), places
    (policy,) = [found["content"] for tag, found in page.elements if found.get("http-equiv")]
    assert policy == "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def test_every_figure_is_there_without_javascript(page):
    stills = [found for _, found in page.elements if found.get("class") == "still"]
    lives = [found for _, found in page.elements if found.get("class") == "live"]
    assert len(stills) == len(lives) >= 16 and all(still["aria-label"] for still in stills)
    assert sum(1 for tag, _ in page.elements if tag == "svg") == len(stills)


@pytest.mark.matrix
def test_markdown_names_the_pictures_that_are_written(run_dir, tmp_path):
    written = write_document(make_report(RunFolder(run_dir)), tmp_path / "new" / "r.md", "x", markdown=True)
    named = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", written.read_text())
    assert named and all((written.parent / place).read_bytes().startswith(b"\x89PNG") for place in named)
    for part in written.read_text().split("\n\n"):
        if part.startswith("|"):
            assert len({line.replace("\\|", "").count("|") for line in part.split("\n")}) == 1


def test_without_out_a_report_has_the_runs_name(run_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert write_document(make_report(RunFolder(run_dir)), None, "some-run").name == "some-run.html"


def test_a_file_that_cannot_be_written_is_named(run_dir, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="--out"):
        write_document(make_report(RunFolder(run_dir)), tmp_path / "file" / "r.html", "x")


def test_a_folder_of_runs_is_no_run(run_dir):
    assert open_run(run_dir).name == run_dir.name
    with pytest.raises(ConfigError, match="name one"):
        open_run(run_dir.parent)


@pytest.mark.matrix
def test_reading_a_run_for_a_report_changes_nothing_in_it(tmp_path):
    run_dir = make_run(tmp_path, steps=3)
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in run_dir.rglob("*")}
    render_html(make_report(RunFolder(run_dir)))
    assert {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in run_dir.rglob("*")} == before


def test_only_settings_that_differ_are_told():
    base = {"schedule.total_steps": 100, "model.dtype": "bfloat16", "data.sets.a.kind": "digits"}
    assert [item.key for item in changed(base)] == ["data.sets.a.kind"]
    (steps,) = differences([base, base | {"schedule.total_steps": 7}])
    assert (steps.key, steps.values, steps.default) == ("schedule.total_steps", (100, 7), 100)
    (absent,) = differences([base, {key: value for key, value in base.items() if "sets" not in key}])
    assert absent.values == ("digits", ABSENT)
    # A key that one run does not have stands for its default.
    assert differences([{"schedule.total_steps": 100}, {}]) == []
    assert differences([{"a": True}, {"a": 1}]) != []


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("rollout.auxiliary.api_key", "abc", "(hidden)"),
        ("rollout.sampling.max_new_tokens", 5, "5"),
        ("rollout.external", ["http://user:secret@host:1"], '["http://(hidden)@host:1"]'),
        ("a", None, "null"),
        ("a", 1e-6, "1e-06"),
        ("a", ABSENT, "–"),
    ],
)
def test_a_value_is_shown_on_one_line_and_secrets_are_not(key, value, text):
    assert shown(value, key) == text


def test_figures_of_the_page_are_the_logged_numbers(run_dir):
    text = render_html(make_report(RunFolder(run_dir)))
    (data,) = re.findall(r'<script type="text/plain" id="figures">(.*?)</script>', text)
    drawn = json.loads(gzip.decompress(b64decode(data)))
    traces = {trace["name"]: trace["y"] for figure in drawn for trace in figure["data"]}
    for name, metric in (("generated, mean", "rollout/response_length"), ("mean |log-prob gap|", "train/logprob_diff")):
        values = np.frombuffer(b64decode(traces[name]["bdata"]), traces[name]["dtype"])
        assert values.tolist() == [value for value in read_metrics(run_dir)[metric] if value is not None]
