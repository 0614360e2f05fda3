"""File datasets: rows in order, and errors that name the file and the line."""

import json
import re
import sys

import pytest

from megasync.config.schema import DataConfig, DatasetConfig
from megasync.data import load_dataset
from megasync.data.datasets import default_reward, no_default_reward, warn_of_missing_answers
from megasync.data.match import match_answer
from megasync.errors import DataError


def write(path, *rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def load(source, kind="jsonl", **more):
    return load_dataset(DatasetConfig(kind, str(source), **more))


def test_jsonl_rows_keep_file_order_and_size_limits_them_to_the_first_rows(tmp_path):
    path = write(tmp_path / "a.jsonl", *({"prompt": f"q{n}", "answer": n} for n in range(5)), "")
    assert [r["prompt"] for r in load(path)[0]] == ["q0", "q1", "q2", "q3", "q4"]
    assert [r["answer"] for r in load(path, size=2)[0]] == [0, 1]
    assert len(load(path, size=99)[0]) == 5


def test_a_folder_dataset_loads_only_the_files_of_its_split(tmp_path):
    write(tmp_path / "train-1.jsonl", {"prompt": "b"})
    write(tmp_path / "train-0.jsonl", {"prompt": "a"})
    write(tmp_path / "test.jsonl", {"prompt": "c"})
    assert [r["prompt"] for r in load(tmp_path)[0]] == ["a", "b"]
    assert [r["prompt"] for r in load(tmp_path, split="test")[0]] == ["c"]
    with pytest.raises(DataError, match=r"no dev\*\.jsonl file.*test\.jsonl, train-0\.jsonl, train-1\.jsonl"):
        load(tmp_path, split="dev")


def test_a_dataset_has_a_reward_function_only_with_an_answer_column(tmp_path):
    assert load(write(tmp_path / "a.jsonl", {"prompt": "q", "answer": "1"}))[1] is match_answer
    assert load(write(tmp_path / "b.jsonl", {"prompt": "q"}))[1] is None


def test_rows_without_an_answer_are_counted_and_the_first_is_named(tmp_path, caplog):
    rows = ({"prompt": "q", "answer": answer} for answer in ("1", None, float("nan"), " "))
    loaded, reward = load(write(tmp_path / "a.jsonl", *rows))
    warn_of_missing_answers(loaded, print)
    assert reward is match_answer and not caplog.text
    warn_of_missing_answers(loaded, reward)
    assert "3 of 4 rows have no answer" in caplog.text and "a.jsonl:2" in caplog.text


def test_rows_without_any_answer_say_what_is_missing():
    assert default_reward([{"prompt": "q", "answer": None}]) is None
    assert no_default_reward([{"prompt": "q", "answer": None}]) == 'the column "answer" is empty in all 1 rows'
    assert no_default_reward([{"prompt": "q", "solution": "1"}]) == (
        "the rows have no column \"answer\", only ['prompt', 'solution']"
    )


def test_an_answer_that_is_neither_text_nor_a_number_is_for_another_reward(tmp_path):
    rows, reward = load(write(tmp_path / "a.jsonl", {"prompt": "q", "answer": {"ground_truth": "1"}}))
    assert reward is None
    assert re.search(
        r'a\.jsonl:1, column "answer": a reference answer must be text.*data\.columns', no_default_reward(rows)
    )


def test_sets_of_which_one_has_no_answer_say_so():
    assert "not every set" in no_default_reward([{"prompt": "q", "answer": "1"}, {"prompt": "q"}])


def test_columns_are_found_under_the_names_of_the_configuration(tmp_path):
    path = write(tmp_path / "a.jsonl", {"question": "1+1?", "reward_model": {"ground_truth": "2"}})
    data = DataConfig(columns={"prompt": "question", "answer": "reward_model.ground_truth"})
    rows, reward = load_dataset(DatasetConfig("jsonl", str(path)), data)
    assert (rows[0]["prompt"], rows[0]["answer"], reward) == ("1+1?", "2", match_answer)


def test_rows_know_their_file_and_line(tmp_path):
    write(tmp_path / "train-0.jsonl", {"prompt": "a"}, "", {"prompt": "b"})
    assert [row.where for row in load(tmp_path)[0]] == [f"{tmp_path}/train-0.jsonl:{line}" for line in (1, 3)]


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "q"}\r\n')
    assert load(tmp_path / "a.jsonl")[0] == [{"prompt": "q"}]


def test_invalid_dataset_sources_and_settings_are_rejected(tmp_path):
    with pytest.raises(DataError, match="nowhere.jsonl does not exist"):
        load(tmp_path / "nowhere.jsonl")
    with pytest.raises(DataError, match=r"empty\.jsonl is empty"):
        load(write(tmp_path / "empty.jsonl", "", ""))
    with pytest.raises(DataError, match="size must be at least 1, got 0"):
        load(tmp_path, size=0)
    with pytest.raises(DataError, match="unknown dataset kind 'csv'; kinds: digits, reasoning_gym, verifiers, jsonl"):
        load(tmp_path, kind="csv")


@pytest.mark.parametrize(("kind", "package"), [("parquet", "pyarrow"), ("hf", "datasets")])
def test_a_missing_package_names_the_extra(monkeypatch, tmp_path, kind, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DataError, match=rf"{kind} needs the package {package}, .*pip install 'megasync\[datasets\]'"):
        load(tmp_path, kind=kind)


def test_parquet_files_load_as_rows(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    assert load(tmp_path, kind="parquet")[0] == rows
    (tmp_path / "bad.parquet").write_text("no")
    with pytest.raises(DataError, match=r"bad\.parquet cannot be read as parquet"):
        load(tmp_path / "bad.parquet", kind="parquet")


def test_hugging_face_datasets_load_as_rows(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]
    (tmp_path / "files").mkdir()
    write(tmp_path / "files" / "train.jsonl", *rows)
    assert load(tmp_path / "files", kind="hf")[0] == rows
    built = datasets.load_dataset(str(tmp_path / "files"))
    built.save_to_disk(tmp_path / "dict")
    built["train"].save_to_disk(tmp_path / "single")
    assert load(tmp_path / "dict", kind="hf")[0] == rows
    assert load(tmp_path / "single", kind="hf")[0] == rows
    with pytest.raises(DataError, match="split dev"):
        load(tmp_path / "dict", kind="hf", split="dev")
    with pytest.raises(DataError, match="split dev"):
        load(tmp_path / "files", kind="hf", split="dev")
