"""Damaged folders are refused by their headers, before anything starts: policy, frozen models, critic, adapters."""

import json
import os
import shutil
from pathlib import Path

import pytest
from header_files import write_header, write_headers

from megasync.errors import ConfigError
from megasync.layout import shards
from megasync.layout.adapter import adapter_config, adapter_layout
from megasync.preflight.check import check_config, model_layout

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
PART = "model-00002-of-00003.safetensors"


def refused(config, **kwargs) -> str:
    with pytest.raises(ConfigError) as caught:
        check_config(config, **kwargs)
    return str(caught.value)


def change_header(file: Path, change) -> None:
    with file.open("r+b") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
        change(header)
        text = json.dumps(header).encode()
        assert len(text) <= size, "the header has to keep its place"
        opened.seek(8)
        opened.write(text.ljust(size))


def change_index(folder: Path, change) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def first(header: dict) -> dict:
    return header["model.embed_tokens.weight"]


ONE_FILE = {
    "a byte is missing": (lambda file: os.truncate(file, file.stat().st_size - 1), "not fully covered"),
    "half is missing": (lambda file: os.truncate(file, file.stat().st_size // 2), "not fully covered"),
    "a byte too many": (lambda file: os.truncate(file, file.stat().st_size + 1), "not fully covered"),
    "cut in the header": (lambda file: os.truncate(file, 20), "cannot be read as safetensors"),
    "empty": (lambda file: os.truncate(file, 0), "it is empty"),
    "Git LFS": (lambda file: file.write_text("version https://git-lfs.github.com/spec/v1\noid x\n"), "git lfs pull"),
    "an error page": (
        lambda file: file.write_text("<!DOCTYPE html><title>404</title>"),
        "cannot be read as safetensors",
    ),
    "a pickle": (lambda file: file.write_bytes(b"\x80\x02}q\x00." * 9), "cannot be read as safetensors"),
    "header of 2**63 bytes": (lambda file: file.write_bytes(b"\xff" * 7 + b"\x7f{}"), "cannot be read as safetensors"),
    "another shape": (
        lambda file: change_header(file, lambda header: first(header).update(shape=[64, 100])),
        "shape [64, 100], but its config.json requires [100, 64]",
    ),
    "integers": (
        lambda file: change_header(file, lambda header: first(header).update(dtype="I32")),
        "is stored as I32",
    ),
    "a folder": (lambda file: (file.unlink(), file.mkdir()), "neither model.safetensors nor"),
    "a broken link": (
        lambda file: (file.unlink(), file.symlink_to("../../blobs/gone")),
        "a link to ../../blobs/gone, which does not exist",
    ),
}


@pytest.mark.parametrize(("damage", "said"), ONE_FILE.values(), ids=ONE_FILE)
@pytest.mark.parametrize("planning", [False, True])
def test_a_damaged_file_is_refused(make, model, damage, said, planning):
    check_config(make(), planning=planning)
    damage(model / FILE)
    assert said in refused(make(), planning=planning)


def test_a_tensor_that_is_missing_or_of_another_model_is_named(make, model):
    values = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(values | {"num_hidden_layers": 7}))
    assert "has no tensor 'model.layers.6." in refused(make())
    (model / "config.json").write_text(json.dumps(values | {"intermediate_size": 128}))
    assert "requires [128, 64]" in refused(make())


SEVERAL_FILES = {
    "a shard is missing": (lambda folder: (folder / PART).unlink(), f"{PART} is missing"),
    "a shard is a pointer": (
        lambda folder: (folder / PART).write_text("version https://git-lfs.github.com/spec/v1\n"),
        "git lfs pull",
    ),
    "no index": (lambda folder: (folder / INDEX).unlink(), f"neither {FILE} nor {INDEX}"),
    "an index that is not JSON": (lambda folder: (folder / INDEX).write_text("{"), "cannot be read as JSON"),
    "a deep index": (lambda folder: (folder / INDEX).write_text("[" * 100_000), "cannot be read as JSON"),
    "an index that is not UTF-8": (
        lambda folder: (folder / INDEX).write_bytes(b"\xff\xfe{}"),
        "cannot be read as JSON",
    ),
    "an index that is a list": (lambda folder: (folder / INDEX).write_text("[1]"), "must hold one JSON object"),
    "no weight_map": (lambda folder: (folder / INDEX).write_text("{}"), "has no weight_map"),
    "a weight_map that is a list": (
        lambda folder: (folder / INDEX).write_text('{"weight_map": ["a"]}'),
        "has no weight_map",
    ),
    "another shard": (
        lambda folder: change_index(folder, lambda where: where.update({"model.norm.weight": _other(where)})),
        "has no tensor 'model.norm.weight', although",
    ),
    "outside": (
        lambda folder: change_index(folder, lambda where: where.update({"model.norm.weight": "../x.safetensors"})),
        "names '../x.safetensors'",
    ),
    "a number": (
        lambda folder: change_index(folder, lambda where: where.update({"model.norm.weight": 3})),
        "names 3 for 'model.norm.weight'",
    ),
    "a tensor is not listed": (
        lambda folder: change_index(folder, lambda where: where.pop("model.norm.weight")),
        "has no tensor 'model.norm.weight', which its config.json requires",
    ),
}


def _other(where: dict) -> str:
    return next(file for file in where.values() if file != where["model.norm.weight"])


@pytest.fixture
def parts(model):
    (model / FILE).unlink()
    write_headers(model, files=3)
    return model


@pytest.mark.parametrize(("damage", "said"), SEVERAL_FILES.values(), ids=SEVERAL_FILES)
def test_damaged_shards_and_indices_are_refused(make, parts, damage, said):
    check_config(make())
    damage(parts)
    assert said in refused(make())


def test_each_file_of_a_large_model_is_opened_once(make, model, monkeypatch):
    values = json.loads((model / "config.json").read_text()) | {"num_hidden_layers": 120}
    (model / "config.json").write_text(json.dumps(values))
    (model / FILE).unlink()
    write_headers(model, files=1000)
    opened, real = [], shards.safe_open
    monkeypatch.setattr(shards, "safe_open", lambda path, framework: (opened.append(path), real(path, framework))[1])
    check_config(make())
    assert len(opened) == len({*opened}) == 1000


FROZEN = {
    "auxiliary_models.helper": ["auxiliary_models.helper.path={}"],
    "teachers.one": ["teachers.one.path={}"],
    "reward_models.judge": [
        "reward_models.judge={{kind: generative, path: {}}}",
        "rollout.rewards.judge.model=judge",
    ],
}


@pytest.mark.parametrize("key", FROZEN)
@pytest.mark.parametrize("planning", [False, True])
def test_damaged_frozen_models_are_refused_by_their_keys(make, model, tmp_path, key, planning):
    folder = Path(shutil.copytree(model, tmp_path / "frozen"))
    config = make(*(text.format(folder) for text in FROZEN[key]))
    check_config(config, planning=planning)
    os.truncate(folder / FILE, 100)
    assert f"{key}.path: {folder / FILE} cannot be read" in refused(config, planning=planning)
    write_header(folder / FILE, {"model.norm.weight": (64,)})
    assert "has no tensor 'model." in refused(config, planning=planning)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"other": FILE}}))
    assert f"{folder / FILE} has no tensor 'other'" in refused(config, planning=planning)


def test_a_frozen_model_of_a_family_that_only_servers_know_has_any_tensors(make, model, tmp_path):
    folder = Path(shutil.copytree(model, tmp_path / "frozen"))
    values = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"model_type": "phi3"}))
    write_header(folder / FILE, {"anything": (2, 3)})
    check_config(make(f"auxiliary_models.helper.path={folder}"))


def test_a_critic_may_lack_its_head_only(make, model, tmp_path):
    folder = Path(shutil.copytree(model, tmp_path / "critic"))
    config = make("algorithm.advantage=gae", "critic.enabled=true", f"critic.path={folder}")
    check_config(config)
    change_header(folder / FILE, lambda header: first(header).update(dtype="I32"))
    assert "critic.path: 'model.embed_tokens.weight'" in refused(config)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["trainer.lora.path={}"], "trainer.lora.path"),
        (
            ["sync.transport=adapters", "eval.sets.old={{data: {{kind: digits, source: copy}}, adapter: {}}}"],
            "eval.sets.old.adapter",
        ),
    ],
)
def test_damaged_adapters_are_refused(make, tmp_path, overrides, key):
    lora = ["trainer.lora.rank=4", "trainer.lora.targets=[q_proj, k_proj, v_proj]"]
    base, _ = model_layout(make())
    config = make(*lora)
    layout = adapter_layout(base, config.trainer)
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(adapter_config(layout.shape, "")))
    config = make(*lora, *(text.format(folder) for text in overrides))
    weights = folder / "adapter_model.safetensors"
    assert f"{key}: {folder} has neither" in refused(config)
    write_header(weights, layout.hf_tensors)
    check_config(config)
    os.truncate(weights, 99)
    assert f"{key}: {weights} cannot be read" in refused(config)
    write_header(weights, {name: (*shape[:1], 7) for name, shape in layout.hf_tensors.items()})
    assert "but its config.json requires" in (said := refused(config)) and key in said
