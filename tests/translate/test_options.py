"""Options of Hydra, of flags and of YAML: their values, what is listed instead of guessed, and what is refused."""

from pathlib import Path

import pytest

from megasync.errors import ConfigError
from megasync.translate import options
from megasync.translate.options import Option, parsed, read_arguments, read_flags, read_hydra, read_text

SCRIPT, YAML, PYTHON = Path("run.sh"), Path("run.yaml"), Path("run.py")


def hydra(words: str) -> options.Given:
    return read_hydra(f"python -m verl.trainer.main_ppo a.x=0 {words}", SCRIPT, {"a.x"})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1), ("1e-6", 1e-6), ("-1", -1), (".5", 0.5), ("1.", 1.0), ("True", True), ("false", False),
        ("null", None), ("None", None), ("'1'", "1"), ("a b", "a b"), ("['a', \"b\"]", ["a", "b"]), ("[1,2]", [1, 2]),
        ("{a: 1}", {"a": 1}), ("~/x", "~/x"), ("1_000", "1_000"), ("${oc.env:A}/x", "${oc.env:A}/x"), ("", ""),
    ],
)  # fmt: skip
def test_values_are_typed_as_in_hydra(text, value):
    assert parsed(text) == Option(value)


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("a.b=1,2", "a sweep of Hydra"),
        ("'a.b=range(1,5)'", "a sweep of Hydra"),
        ("'a.b=${x.y}'", "refers to x.y"),
        ("'a.b=${oc.select:x}'", "a reference that is not read"),
        ("'a.b=[1'", ""),
        ("a.b=$(nproc)", "the output of a command"),
    ],
)
def test_values_that_need_more_than_the_file_are_unresolved(word, reason):
    assert reason in hydra(word).options["a.b"].unresolved


def test_prefixes_of_hydra_are_understood():
    given = hydra("+a.b=1 ++a.c=2 ~a.d ~a.e=1 'a.f=${a.b}' 'a.g=x${a.f}y' --config-name=c --multirun $@")
    values = {name: option.value for name, option in given.options.items()}
    assert values == {"a.x": 0, "a.b": 1, "a.c": 2, "a.f": 1, "a.g": "x1y"}
    notes = " ".join(given.notes)
    assert "~a.d" in notes and "~a.e" in notes and "--multirun" in notes and "$@" in notes


def test_an_option_given_twice_is_said_and_the_last_counts():
    given = hydra("a.b=1 a.b=2")
    assert given.options["a.b"].value == 2 and given.notes == [
        "`a.b` is given twice, as `1` and `2`; the last one counts"
    ]
    assert hydra("a.b=2 a.b=2").notes == []


def test_references_that_go_in_circles_end():
    assert "refers to" in hydra("'a.b=${a.c}' 'a.c=${a.b}'").options["a.b"].unresolved


def test_flags_take_the_words_up_to_the_next_one():
    script = "ray job submit --address=x -- python train.py --lr 1e-6 --stop -1 --all --names a b --eps=0.5 --all"
    given = read_flags(script, SCRIPT, {"lr", "stop"})
    values = {name: option.value for name, option in given.options.items()}
    assert values == {"lr": 1e-6, "stop": -1, "all": True, "names": ["a", "b"], "eps": 0.5}


def test_the_launchers_processes_count_and_its_other_options_do_not():
    script = "accelerate launch --num_processes 8 --x 1 run.py --learning-rate 1e-6"
    given = read_arguments(script, SCRIPT, {"num_processes", "learning_rate"})
    assert {name: option.value for name, option in given.options.items()} == {"num_processes": 8, "learning_rate": 1e-6}


def test_of_several_commands_the_fullest_is_read():
    script = "serve --lr 1\npython train.py --lr 1 --beta 2 --eps 3\npython train.py --lr 1 --beta 3 --eps 4 --n 2\n"
    given = read_flags(script, SCRIPT, {"lr", "beta", "eps", "n"})
    assert given.options["beta"].value == 3
    assert given.notes == ["the command on line 3 is translated; others like it are on lines 2"]


def test_a_configuration_that_a_command_names_is_read_too(tmp_path):
    (tmp_path / "grpo.yaml").write_text("beta: 0.1\nlearning_rate: 1e-5\n")
    given = read_arguments("trl grpo --config grpo.yaml --beta 0.2", tmp_path / "run.sh", {"beta", "config"})
    assert {name: option.value for name, option in given.options.items()} == {"beta": 0.2, "learning_rate": 1e-5}
    assert "not found" in read_arguments("trl grpo --config no.yaml", SCRIPT, {"config"}).notes[0]


def test_yaml_is_flattened_and_the_files_below_it_are_named():
    given = read_hydra("defaults: [ppo_trainer, _self_]\na:\n  b: 1e-6\n  c: [1]\n  d: ${a.b}\n", YAML, set())
    assert {name: option.value for name, option in given.options.items()} == {"a.b": 1e-6, "a.c": [1], "a.d": 1e-6}
    assert given.program == "ppo_trainer" and "ppo_trainer" in given.notes[0]


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    "text",
    [
        BOMB,
        "a: &a {b: *a}",
        "a: 1\na: 2",
        "a: [",
        "- 1",
        "{" * 5000,
        "".join(f"{' ' * depth}a:\n" for depth in range(200)) + " " * 200 + "b: 1",
        "\n".join(f"k{number}: 1" for number in range(6000)),
    ],
)
def test_yaml_that_is_no_configuration_is_refused(text):
    with pytest.raises(ConfigError):
        read_hydra(text, YAML, set())


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"\x00\x01", "not UTF-8 text"), (b"\xff\xfe", "not UTF-8 text"), (b"a" * (2**20 + 1), "larger than 1 MiB")],
)
def test_files_that_are_no_text_are_refused(tmp_path, content, said):
    (tmp_path / "run.sh").write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        read_text(tmp_path / "run.sh")


def test_missing_files_and_folders_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        read_text(tmp_path / "no.sh")
    with pytest.raises(ConfigError, match="is a folder"):
        read_text(tmp_path)


@pytest.mark.parametrize("read", [read_hydra, read_flags])
def test_a_python_script_of_a_library_that_has_none_is_refused(read):
    with pytest.raises(ConfigError, match="Python script"):
        read("", PYTHON, set())
