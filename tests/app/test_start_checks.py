"""What a run would refuse is refused by `plan` and `doctor` in the same words, before anything starts."""

import asyncio
import itertools
import json
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
from word_model import make_word_model

from megasync.app import async_trainer, start_checks, supervised
from megasync.app.async_trainer import AsyncTrainer
from megasync.app.start_checks import check_run
from megasync.app.supervised import train_supervised
from megasync.cli import commands
from megasync.config import Config, load_config
from megasync.errors import DataError, MegasyncError
from megasync.models import fetch
from megasync.planning.finding import FAILURE, OK
from megasync.planning.run_doctor import find_contradiction

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
MODULE = '''
import megasync

def length(completions, **columns):
    return [1.0 for _ in completions]

async def rollout(client, sample):
    return await client.generate(sample.prompt_ids)

def not_async(client, sample):
    return None

def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One.
        b: Another.
    """
    return a + b

def undocumented(*anything):
    return anything

number = 3
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Its chat template shows no tools."""
    return make_word_model(tmp_path_factory.mktemp("models") / "words", ["yes", "no"])


@pytest.fixture
def rows(tmp_path):
    """Writes a jsonl file, one line for each row or text."""

    numbers = itertools.count()

    def write(*given) -> str:
        path = tmp_path / f"rows{next(numbers)}.jsonl"
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in given))
        return f"{{kind: jsonl, source: {path}}}"

    return write


@pytest.fixture
def make(model, rows, tmp_path, monkeypatch):
    (tmp_path / "users_module.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "users_module", raising=False)

    def make(*overrides: str) -> Config:
        values = {
            "model": {"path": str(model), "dtype": "float32"},
            "run_root": str(tmp_path / "runs"),
            "cluster": {"device": "cpu"},
            "rollout": {"sampling": {"max_new_tokens": 4}},
        }
        return load_config(values, [f"data.train={rows({'prompt': 'yes', 'answer': 'no'})}", *overrides])

    return make


def train(config: Config) -> None:
    if config.sft.train is not None:
        train_supervised(config)
    else:
        asyncio.run(AsyncTrainer(config).run())


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch):
    def start(*_: object) -> None:
        raise AssertionError("a run begins")

    monkeypatch.setattr(async_trainer, "new_run_dir", start)
    monkeypatch.setattr(supervised, "new_run_dir", start)


def refusal(config: Config) -> str:
    """The one text with which train (or sft), plan and doctor refuse a configuration."""
    texts = set()
    for check in (train, partial(check_run, planning=True), check_run):
        with pytest.raises(MegasyncError) as caught:
            check(config)
        texts.add(f"{type(caught.value).__name__}: {caught.value}")
    finding = find_contradiction(config, check_run)
    assert finding.status == FAILURE
    (text,) = texts
    assert finding.detail == text.partition(": ")[2]
    return text


CHAT = "data.prompt.format=chat"
TOOL = "rollout.tools.functions=[users_module:add]"
BAD = {
    "a misspelt module": (["rollout.reward=users_modul:length"], "there is no module 'users_modul'"),
    "a missing function": (["rollout.reward=users_module:lenght"], "has no 'lenght'"),
    "no function": (["rollout.reward=users_module:number"], "not a function"),
    "one of several rewards": (
        ["rollout.rewards={math: {}, mine: {function: 'users_module:gone'}}"],
        "has no 'gone'",
    ),
    "a missing workflow": (["rollout.workflow=users_module:gone"], "has no 'gone'"),
    "a sync workflow": (["rollout.workflow=users_module:not_async"], "must be written as `async def"),
    "a missing agent": (["rollout.agent=users_module:gone"], "has no 'gone'"),
    "a missing environment": ([CHAT, "rollout.environment={kind: 'users_module:Gone'}"], "has no 'Gone'"),
    "a missing tool": ([CHAT, "rollout.tools.functions=[users_module:gone]"], "has no 'gone'"),
    "no tool": ([CHAT, "rollout.tools.functions=[users_module:undocumented]"], "undocumented"),
    "tools without a known format": ([CHAT, TOOL], "tools need the model's tool call format"),
    "a missing curriculum": (["data.curriculum=users_module:gone"], "has no 'gone'"),
    "a missing estimator": (["algorithm.advantage=users_module:gone"], "has no 'gone'"),
    "a reward of a held-out set": (
        ["eval.sets.more={data: {kind: digits, source: copy}, reward: 'users_module:gone'}"],
        "has no 'gone'",
    ),
    "a prompt with other columns": (["data.prompt.template='{question}'"], "names the column 'question'"),
    "more examples than rows": (["data.prompt.examples=1"], "leaves nothing of 1 training rows"),
    "a prompt that is too long": (
        ["data.prompt.max_tokens=1", "data.prompt.system=yes no"],
        "longer than data.prompt",
    ),
}
BAD_ROWS = {
    "no prompt": ([{"question": "yes"}], 'no "prompt" column'),
    "a broken line": (['{"prompt": "yes"'], ".jsonl:1: not valid JSON"),
    "no rows": ([], ".jsonl"),
    "no reward": ([{"prompt": "yes"}], "there is no reward"),
    "a number": ([{"prompt": 3, "answer": "no"}], "prompt"),
    "messages in a raw prompt": ([{"prompt": [{"role": "user", "content": "x"}], "answer": "no"}], "format=chat"),
}


@pytest.mark.parametrize(("overrides", "said"), BAD.values(), ids=BAD)
def test_train_plan_and_doctor_refuse_the_same_configurations(make, overrides, said):
    assert said in refusal(make(*overrides))


@pytest.mark.parametrize(("lines", "said"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_train_plan_and_doctor_refuse_the_same_rows(make, rows, lines, said):
    for key in ("data.train", "data.eval") if lines != [{"prompt": "yes"}] else ("data.train",):
        assert said in refusal(make(f"{key}={rows(*lines)}"))


BAD_SUPERVISED = {
    "no answer": ([{"prompt": "yes"}], [], "the column 'answer' (sft.answer) must be text"),
    "a broken line": (["{"], [], ".jsonl:1: not valid JSON"),
    "nothing to train": ([{"messages": [{"role": "user", "content": "x"}]}], [], "no message has the role 'assistant'"),
    "too long": ([{"prompt": "yes", "answer": "yesno"}], ["sft.max_tokens=1"], "more than sft.max_tokens=1"),
    "a warm-up longer than the run": (
        [{"prompt": "yes", "answer": "no"}],
        ["trainer.optimizer.warmup_steps=5"],
        "warmup_steps=5",
    ),
}


@pytest.mark.parametrize(("lines", "overrides", "said"), BAD_SUPERVISED.values(), ids=BAD_SUPERVISED)
def test_sft_plan_and_doctor_refuse_the_same(make, rows, lines, overrides, said):
    assert said in refusal(make(f"sft.train={rows(*lines)}", *overrides))


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("{{ raise_exception('roles must alternate') if m.role == 'tool' else m.content }}", "roles must alternate"),
        ("{{ m.content if m.role != 'tool' }}", "leaves out the results of calls"),
    ],
    ids=["a role that is refused", "a role that is left out"],
)
def test_tools_that_the_template_cannot_serve_are_refused(make, model, tmp_path, written, said):
    """As Gemma 2 and Llama 2 refuse them."""
    folder = shutil.copytree(model, tmp_path / "without-tools")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}" + written + "<eos>{% endfor %}")
    text = refusal(make(f"model.path={folder}", CHAT, TOOL, "rollout.chat.tool_format=hermes"))
    assert said in text and str(folder) in text


def test_a_template_that_does_not_show_tools_is_named_before_the_start(make, caplog):
    check_run(make(CHAT, TOOL, "rollout.chat.tool_format=hermes"))
    assert "does not show tools to the model" in caplog.text


def test_a_sound_configuration_passes_all_of_them(make):
    for overrides in ([], [CHAT, TOOL, "rollout.chat.tool_format=hermes", "rollout.reward=users_module:length"]):
        config = make(*overrides)
        assert check_run(config, planning=True) == check_run(config) == []
        assert find_contradiction(config, check_run).status == OK
        with pytest.raises(AssertionError, match="a run begins"):
            train(config)


def test_what_is_not_on_this_machine_is_named_and_the_rest_is_checked(make, model, rows):
    """As a plan of another machine's run, or of a dataset on a hub."""
    absent = [f"model.config={model / 'config.json'}", "model.path=/absent"]
    hub = "data.eval={kind: hf, source: someone/some_rows}"
    assert check_run(make(*absent, hub), planning=True) == ["model.path=/absent", "data.eval (hf:someone/some_rows)"]
    assert check_run(make(hub)) == ["data.eval (hf:someone/some_rows)"]
    for overrides, said in (
        (["rollout.reward=users_modul:length"], "there is no module"),
        (["rollout.rewards={mine: {function: 'users_module:gone'}}"], "has no 'gone'"),
        (["rollout.workflow=users_module:not_async"], "async def"),
        ([f"data.train={rows('{')}"], "not valid JSON"),
    ):
        with pytest.raises(MegasyncError, match=said):
            check_run(make(*absent, *overrides), planning=True)


@pytest.mark.parametrize("command", ["plan", "doctor"])
def test_the_commands_run_these_checks(monkeypatch, tmp_path, capsys, command):
    fetched = fetch("digits", tmp_path / "digits")

    def refuse(config: Config, planning: bool = False) -> list[str]:
        assert planning == (command == "plan")
        raise DataError("refused")

    monkeypatch.setattr(start_checks, "check_run", refuse)
    overrides = [f"model.path={fetched}", f"run_root={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["megasync", command, str(CONFIG), *overrides])
    with pytest.raises(SystemExit) as ended:
        commands.main()
    assert ended.value.code != 0 and "refused" in "".join(capsys.readouterr())
