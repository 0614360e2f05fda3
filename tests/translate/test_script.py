"""A Python script is parsed, never imported, and gives the values that its expressions say by themselves."""

import pytest

from megasync.errors import ConfigError
from megasync.translate.script import read_script


def value(expression: str, before: str = "") -> tuple[object, str]:
    return read_script(f"{before}\nGRPOConfig(x={expression})\n").arguments["x"]


@pytest.mark.parametrize(
    ("expression", "before", "expected"),
    [
        ("1e-6", "", 1e-6),
        ("-3", "", -3),
        ("['a', 2]", "", ["a", 2]),
        ("{'a': {'b': False}}", "", {"a": {"b": False}}),
        ("dict(a=1)", "", {"a": 1}),
        ("N * 2 + 1", "N = 4", 9),
        ("f'{A}-{B}'", "A = 'x'\nB = 2", "x-2"),
        ("B", "A = 1\nB = A", 1),
        ("torch.bfloat16", "import torch", "bfloat16"),
        ("args.lr", "p.add_argument('--lr', default=0.1)\nargs = p.parse_args()", 0.1),
        ("reward", "def reward(completions): ...", "script:reward"),
        ("reward", "from a.b import reward", "a.b:reward"),
        ("N", "if __name__ == '__main__':\n    N = 4", 4),
    ],
)
def test_values_are_those_of_the_expressions(expression, before, expected):
    assert value(expression, before) == (expected, "")


@pytest.mark.parametrize(
    ("expression", "before", "reason"),
    [
        ("f(1)", "", "known only when the script runs"),
        ("N", "", "known only when the script runs"),
        ("N", "N = 1\nN = 2", "assigned more than once"),
        ("N", "if a:\n    N = 1", "assigned more than once, or on a condition"),
        ("N", "for N in a: ...", "not assigned a value of its own"),
        ("args.x", "args = p.parse_args()", "known only when the script runs"),
        ("A", "A = B\nB = A", "known only when the script runs"),
        ("1 / 0", "", "arithmetic"),
        ("'a' * 1000000000", "", "no number"),
        ("10 ** 10 ** 10", "", "arithmetic"),
        ("f'{a!r}'", "a = 1", "formats"),
        ("[x for x in y]", "", "known only when the script runs"),
    ],
)
def test_other_values_have_a_reason(expression, before, reason):
    assert reason in value(expression, before)[1]


def test_trainers_adapters_and_data_sets_are_read():
    script = read_script(
        "rows = load_dataset('a/b', 'main', split='train')\n"
        "held_out = load_dataset('a/b', 'main', split='test')\n"
        "config = GRPOConfig(learning_rate=1e-5)\n"
        "config.beta = 0.1\n"
        "GRPOTrainer(model='m', args=config, train_dataset=rows, peft_config=LoraConfig(r=8, lora_alpha=16))\n"
    )
    assert {name: value for name, (value, _) in script.arguments.items()} == {
        "dataset_name": "a/b",
        "dataset_config": "main",
        "dataset_train_split": "train",
        "dataset_test_split": "test",
        "learning_rate": 1e-5,
        "beta": 0.1,
        "model": "m",
        "use_peft": True,
        "lora_r": 8,
        "lora_alpha": 16,
    }


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("load_dataset('json', data_files='a.jsonl', split='train')", "a.jsonl"),
        ("load_dataset(path='parquet', data_files={'train': 'a.parquet', 'test': 'b.parquet'})", "a.parquet"),
        ("load_dataset('someone/rows', data_files='a.jsonl')", "someone/rows"),
    ],
)
def test_files_of_a_data_set_come_before_the_name_of_their_reader(call, expected):
    assert read_script(call).arguments["dataset_name"] == (expected, "")


def test_what_changes_the_rows_or_comes_from_the_command_line_is_said():
    notes = read_script(
        "parser = TrlParser((GRPOConfig,))\nscript, training = parser.parse_args_and_config()\n"
        "rows = load_dataset('a').map(change)\nGRPOTrainer(**more)\n"
    ).notes
    assert len(notes) == 3
    assert "command line" in notes[0] and "**more" in notes[1] and "`change` (line 3)" in notes[2]


@pytest.mark.parametrize("text", ["GRPOConfig(", "\0", "x = " + "(" * 5000, "x = " + "-" * 100_000 + "1"])
def test_what_python_does_not_parse_is_refused(text):
    with pytest.raises(ConfigError):
        read_script(text)
