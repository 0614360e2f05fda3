"""Everything that the pages refer to exists: links, commands and options, files, configuration keys."""

import re
from itertools import chain
from pathlib import Path

import pytest
import typer

from megasync.app.async_trainer import AsyncTrainer
from megasync.cli.commands import app
from megasync.config.load import schema_keys
from megasync.starters.fetch import fetch

ROOT = Path(__file__).parents[2]
PAGES = sorted(chain(ROOT.glob("*.md"), *(ROOT.glob(f"{place}/**/*.md") for place in ("docs", "examples", "patches"))))
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
CALL = re.compile(r"(?:^|[\s;(/])megasync ([a-z][a-z-]*)([^#\n]*)", re.MULTILINE)
SCRIPT = re.compile(r"(?:^|[\s(])(?:bash|sbatch) (launch/[a-z_]+\.(?:sh|sbatch))([^#\n]*)", re.MULTILINE)
MODULE = re.compile(r"(?:[a-z_0-9]+/)*[a-z_0-9]+\.py")
FILE = re.compile(r"\b(?:launch|configs|examples|tests|patches|docs)/[\w./-]*\w")
# Modules of other projects that the pages name.
FOREIGN = {"test_engine.py"}
COMMANDS = typer.main.get_command(app).commands
KEYS = {key for key, _ in schema_keys()}
SECTIONS = {key.split(".")[0] for key in KEYS if "." in key}


def calls(text: str) -> list[tuple[str, str]]:
    """The commands that a text calls, each with what follows it; a name may have two words."""
    found = []
    for command, rest in CALL.findall(text):
        second = next(iter(rest.split()), "")
        longer = f"{command} {second}"
        found.append((longer, rest.partition(second)[2]) if longer in COMMANDS else (command, rest))
    return found


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub generates for the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def code(page: Path) -> list[str]:
    """Fenced blocks and inline code."""
    text = page.read_text(encoding="utf-8")
    return [*FENCE.findall(text), *SPAN.findall(FENCE.sub("", text))]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_have_a_target(page):
    broken = []
    for link in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        path, _, anchor = link.partition("#")
        if ":" in path:
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_exist_with_their_options(page):
    unknown = []
    for command, rest in calls("\n".join(code(page))):
        options = set(re.findall(r"(?<=\s)--[a-z][a-z0-9-]*", rest))
        known = set(chain(*(param.opts for param in COMMANDS[command].params))) if command in COMMANDS else set()
        if command not in COMMANDS or not options <= known | {"--help"}:
            unknown.append(f"{command}{rest}")
    assert unknown == []


def script_options(script: str) -> set[str]:
    """The options of a script: those in its text, and of the command or the file to which it passes its arguments."""
    text = (ROOT / script).read_text(encoding="utf-8")
    called = re.findall(r"bin/megasync ([a-z-]+).*\"\$@\"", text)
    known = set(chain(*(param.opts for command in called for param in COMMANDS[command].params)))
    files = re.findall(r"(launch/\w+\.py) \"\$@\"", text)
    if "pytest" in text:
        files.append("tests/conftest.py")
        known.add("--collect-only")
    for source in (text, *((ROOT / file).read_text(encoding="utf-8") for file in files)):
        known |= set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", source))
    return known


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_launch_scripts_have_the_options_that_pages_pass(page):
    unknown = [
        f"{script}{rest}"
        for script, rest in SCRIPT.findall("\n".join(code(page)))
        if not set(re.findall(r"(?<=\s)--[a-z][a-z-]*", rest)) <= script_options(script)
    ]
    assert unknown == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_mentioned_files_exist(page):
    named = set(chain(*map(FILE.findall, code(page))))
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_mentioned_modules_exist(page):
    """By path below the root or the package, or by name alone."""
    modules = {f"/{path.relative_to(ROOT)}" for path in ROOT.glob("[a-z]*/**/*.py")}
    named = {span for span in code(page) if MODULE.fullmatch(span)} - FOREIGN
    assert [path for path in sorted(named) if not any(module.endswith(f"/{path}") for module in modules)] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_mentioned_keys_exist(page):
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    # Further columns of a table may have the keys of other libraries.
    text = re.sub(r"^(\|[^|\n]*\|).*$", r"\1", text, flags=re.MULTILINE)
    named = {span.split("=")[0].split(":")[0] for span in SPAN.findall(text)}
    keys = {key for key in named if re.fullmatch(r"[a-z_]+(\.[a-z_0-9]+)+", key) and key.split(".")[0] in SECTIONS}
    assert sorted(keys - KEYS) == []


def test_every_page_can_be_reached_from_the_readme():
    """Directly or through other pages."""
    reached, ahead = set(), [ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        reached.add(page)
        for link in LINK.findall(page.read_text(encoding="utf-8")):
            target = (page.parent / link.partition("#")[0]).resolve()
            if target.suffix == ".md" and target not in reached and target.is_file():
                ahead.append(target)
    assert sorted(set((ROOT / "docs").rglob("*.md")) - reached) == []


def test_every_command_is_in_the_docs():
    called = {command for page in PAGES for command, _ in calls("\n".join(code(page)))}
    assert set(COMMANDS) - called == set()


def test_numbers_of_the_readme_are_on_the_page_that_it_links():
    """Every figure of megasync's own cell; so that a new measurement reaches the README."""
    table = (
        (ROOT / "README.md").read_text(encoding="utf-8").split("## Compared with other frameworks")[1].split("\n## ")[0]
    )
    claims = 0
    for row in [line for line in table.splitlines() if line.startswith("|")][2:]:
        own, source = (row.strip("|").split("|")[column] for column in (1, 3))
        pages = re.findall(r"\(([\w/]+\.md)", source)
        text = "".join((ROOT / page).read_text(encoding="utf-8") for page in pages)
        for figure in re.findall(r"\d+(?:\.\d+)?", own):
            assert re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d.]*\d)", text), f"{figure} is not in {pages}: {own}"
            claims += 1
    assert claims > 10


def test_the_design_page_lists_every_package():
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    rooms = {
        f"{place.name}/" if place.is_dir() else place.name
        for place in (ROOT / "megasync").iterdir()
        if not place.name.startswith("_") and (place.is_dir() or place.suffix == ".py")
    }
    assert {room for room in rooms if f"`{room}" not in text} == set()


def test_the_complete_example_of_the_readme_starts(tmp_path, monkeypatch):
    """All of it except training: names, arguments, configuration, reward and rows."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (program,) = [block for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    fetch("digits", tmp_path / "models" / "digits")
    started = []
    monkeypatch.setattr(AsyncTrainer, "train", lambda trainer: started.append(trainer))
    names: dict = {"__name__": "__main__"}
    exec(compile(program, "README.md", "exec"), names)
    assert len(started) == 1 and started[0].config.name == "complement"
    row = names["rows"][0]
    assert names["reward"]([row["answer"], ""], answer=[row["answer"]] * 2) == [1.0, 0.0]
