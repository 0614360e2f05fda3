"""What a run would refuse is refused by `plan` and `doctor` in the same words, before anything starts."""

import asyncio
import itertools
import json
import shutil
import sys
from copy import deepcopy
from functools import partial
from pathlib import Path

import pytest
from mutations import SEEDS, try_mutations
from word_model import make_word_model

from megasync.app import async_trainer
from megasync.app.async_trainer import AsyncTrainer
from megasync.cli import commands
from megasync.config import Config, load_config
from megasync.errors import DataError, MegasyncError
from megasync.planning import start_checks
from megasync.planning.finding import FAILURE, OK
from megasync.planning.run_doctor import find_contradiction
from megasync.planning.start_checks import check_run
from megasync.starters.fetch import fetch
from megasync.supervised import run as supervised_run
from megasync.supervised.run import train_supervised

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
    monkeypatch.setattr(supervised_run, "new_run_dir", start)


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


# Each named section has an entry, which the list of all keys of the schema cannot have.
WHOLE = {
    "a chat": {
        "data": {
            "prompt": {"format": "chat", "system": "yes", "max_tokens": 64, "template": "{prompt}", "examples": 0},
            "columns": {"prompt": "prompt", "answer": "answer"},
            "sets": {"one": {"weight": 1.0}, "two": {"weight": 2.0}},
        },
        "eval": {"every_steps": 2, "samples": 1, "temperatures": [0.0, 1.0], "repeats": 2, "sets": {"more": {}}},
        "rollout": {
            "sampling": {"max_new_tokens": 4, "stop": ["yes"], "temperature": 1.0, "top_k": 8},
            "rewards": {"math": {"weight": 0.5}, "own": {"function": "users_module:length", "weight": 1}},
            "chat": {"tool_format": "hermes", "template_options": {"enable_thinking": False}},
            "server_args": {"--log-level": "info"},
        },
        "trainer": {"lora": {"rank": 2, "targets": ["o_proj"]}, "megatron": {}},
        "observe": {"samples": 2},
    },
    "tools": {
        "data": {"prompt": {"format": "chat", "max_tokens": 64}},
        "rollout": {
            "sampling": {"max_new_tokens": 4},
            "chat": {"tool_format": "hermes"},
            "tools": {
                "functions": ["users_module:add"],
                "mcp": {
                    "files": {
                        **{"command": ["python", "files.py"], "environment": {"A": "b"}, "tools": ["read"]},
                        **{"prefix": "f_", "pool": 2, "shared": False},
                    },
                    "web": {"url": "http://127.0.0.1:9/mcp", "headers": {"Authorization": "Bearer x"}, "shared": True},
                },
            },
        },
    },
    "an environment": {
        "data": {"prompt": {"format": "chat", "max_tokens": 64}},
        "rollout": {
            "sampling": {"max_new_tokens": 4},
            "environment": {"kind": "harbor", "options": {"sandbox": {"kind": "process", "limits": {"memory_mb": 64}}}},
        },
    },
    "other models": {
        "teachers": {
            "large": {"sources": ["one"], "servers": 1, "mem_fraction": 0.1, "server_args": {"--log-level": "info"}}
        },
        "auxiliary_models": {"helper": {"servers": 1, "pool": "own", "mem_fraction": 0.1}},
        "algorithm": {"teacher_coef": 0.5, "advantage_options": {}, "loss_options": {}},
    },
    "supervised": {
        "sft": {"epochs": 2, "rows_per_step": 1, "max_tokens": 32, "validate_every_steps": 1},
        "trainer": {"optimizer": {"lr": 1e-3, "betas": [0.9, 0.95], "warmup_steps": 0}},
    },
}


def whole(kind: str, model: Path, rows: str) -> dict:
    """The configuration as a mapping. `rows` is a file."""
    values = json.loads(json.dumps(WHOLE[kind])) | {
        "model": {"path": str(model), "dtype": "float32"},
        "cluster": {"device": "cpu"},
        "schedule": {"total_steps": 4, "groups_per_step": 2, "samples_per_group": 2, "stop_at_score": None},
        "checkpoint": {"every_steps": 2},
    }
    dataset, data = {"kind": "jsonl", "source": rows, "size": 2}, values.setdefault("data", {})
    values["eval"] = {"samples": 1} | values.get("eval", {})
    data["eval"] = dict(dataset)
    for each in (*data.get("sets", {}).values(), *values.get("eval", {}).get("sets", {}).values()):
        each["data"] = dict(dataset)
    if kind == "supervised":
        values["sft"] |= {"train": dict(dataset), "validation": dict(dataset)}
    elif "sets" not in data:
        data["train"] = dict(dataset)
    for section in ("teachers", "auxiliary_models"):
        for each in values.get(section, {}).values():
            each["path"] = str(model)
    return values


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("kind", WHOLE)
def test_any_change_of_a_configuration_is_refused_alike_or_begins(make, model, tmp_path, seeds, kind):
    """Train, doctor and plan; a plan may leave out what is on another machine."""
    make()
    if kind == "tools":
        pytest.importorskip("mcp")
    (file := tmp_path / "some.jsonl").write_text('{"prompt": "yes", "answer": "no", "data_source": "one"}\n' * 2)
    sound = whole(kind, model, str(file)) | {"run_root": str(tmp_path / "runs")}

    def read(values: dict) -> None:
        config = load_config(values)
        said = outcome(check_run, config)
        assert said == outcome(train, config)
        check_run(config, planning=True)
        if said:
            raise MegasyncError(said)

    read(sound)
    refused = try_mutations(read, sound, seeds, MegasyncError)
    assert 0 < refused < len(seeds)


def outcome(check, config: Config) -> str:
    """The refusal; "" if the run would begin."""
    try:
        check(deepcopy(config))
    except MegasyncError as error:
        return f"{type(error).__name__}: {error}"
    except AssertionError as error:
        assert str(error) == "a run begins"
    return ""
