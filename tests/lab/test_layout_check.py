"""`megasync check-layout`: invalid input, consistent numbers, and SGLang's own layouts."""

import json
import re
import sys

import pytest
from engine_models import make_model
from fake_engine import fake_engine, traced
from msgspec import structs

from megasync.cli import commands as cli
from megasync.lab import engine_blueprint, transfer_check
from megasync.lab.layout_check import check_layout
from megasync.lab.render_layout import report_data
from megasync.layout.layout import Layout
from megasync.layout.topology import Topology

DENSE = {
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "vocab_size": 301,
    "num_hidden_layers": 2,
    "dtype": "bfloat16",
}


@pytest.fixture
def folder(tmp_path):
    """Creates a folder that contains only a config.json."""

    def write(**changes):
        (tmp_path / "config.json").write_text(json.dumps(DENSE | changes))
        return tmp_path

    return write


@pytest.fixture
def call(monkeypatch, capsys):
    """The program inside this process: (status, stdout, stderr)."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["megasync", "check-layout", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return caught.value.code or 0, *capsys.readouterr()

    return call


@pytest.fixture
def no_sglang(monkeypatch):
    def started(*args):
        raise AssertionError("SGLang was started")

    monkeypatch.setattr(engine_blueprint, "engine_ranks", started)


@pytest.fixture
def in_miniature(monkeypatch):
    """Replaces SGLang with the miniature engine."""

    def ranks(model, size, dtype, device, specs, server_args, fp8):
        layout = Layout(json.loads((model / "config.json").read_text()), Topology())
        return traced(fake_engine(layout.hf_config, size), layout)

    monkeypatch.setattr(engine_blueprint, "engine_ranks", ranks)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, (), "--random"),
        ({}, ("--random", "--tp", 3), "num_attention_heads=4 is not divisible"),
        ({}, ("--random", "--pp", 3), "2 layers do not fit"),
        ({}, ("--random", "--dp", 2, "--ep", 2), "the model has none"),
        ({}, ("--random", "--dtype", "float64"), "float64"),
        ({"model_type": "gpt9"}, ("--random",), "'gpt9'"),
        ({"attention_bias": True}, ("--random",), "attention_bias=True"),
    ],
)
def test_invalid_input_is_refused_before_a_process_starts(folder, call, no_sglang, changes, options, message):
    status, out, err = call(folder(**changes), *options)
    assert (status, out) == (cli.REFUSED, "") and message in err


def test_a_missing_folder_is_refused_by_name(call, no_sglang, tmp_path):
    status, _, err = call(tmp_path / "absent")
    assert status == cli.REFUSED and "absent" in err


def test_the_numbers_of_a_report_are_consistent(folder):
    path, size = folder(), 2
    layout = Layout(DENSE, Topology(2, 2, 2))

    def ranks(dtype, specs):
        assert dtype == "bfloat16" and dict(specs) == layout.hf_tensors
        return traced(fake_engine(DENSE, size), layout)

    report = check_layout(path, layout.topology, "local", None, bucket_mb=1, random=True, engine_ranks=ranks)
    assert report.problems == () and report.verdict.startswith("OK: 21 tensors")
    assert [use.rank for use in report.trainer] == list(range(8)) and len(report.engine) == size
    sent, received = (
        sum(getattr(use, name) for use in side)
        for side, name in ((report.trainer, "sent_bytes"), (report.engine, "received_bytes"))
    )
    assert sent == received == report.wire_bytes
    assert sum(use.buckets for use in report.trainer) == sum(use.buckets for use in report.engine)
    # Messages end on whole words; norms go to both ranks.
    assert 1.0 <= report.ratio < 1.01 and report.minimum_bytes > report.parameters * 2
    # The miniature engine is float32, whatever it is sent.
    assert set(report.casts) == {"bfloat16 -> float32"} and len(report.casts["bfloat16 -> float32"]) == 21
    assert [group.ranks for group in report.replica_groups] == [(0, 2), (1, 3), (4, 6), (5, 7)]
    padding = sum(sum(values.values()) for values in report.constants.values())
    assert padding == 2 * (304 - 301) * 32
    assert json.loads(json.dumps(report_data(report)))["ok"] is True


def test_a_failed_check_has_status_1_and_names_the_tensor(folder, call, in_miniature, monkeypatch):
    name = "model.layers.1.mlp.up_proj.weight"
    check = transfer_check._EngineSide._check_slot

    def crossed(self, slot, live, counts):
        """Expects the rows of the other rank."""
        box = slot.hf_box
        other = slot._replace(hf_box=box._replace(row=box.rows - box.row)) if slot.hf_name == name else slot
        check(self, other, live, counts)

    monkeypatch.setattr(transfer_check._EngineSide, "_check_slot", crossed)
    path = folder()
    assert call(path, "--random", "--engine-tp", 2)[0] == cli.UNHEALTHY
    status, out, _ = call(path, "--random", "--engine-tp", 2, "--json")
    found = json.loads(out)
    assert status == cli.UNHEALTHY and not found["ok"] and name in found["offenders"] and name in found["verdict"]


def test_a_tensor_that_the_engine_does_not_keep_is_a_failure(folder, call, in_miniature, monkeypatch):
    name, whole = "model.norm.weight", engine_blueprint.engine_ranks

    def ranks(*args):
        found = whole(*args)
        return [
            structs.replace(rank, slots=tuple(slot for slot in rank.slots if slot.hf_name != name)) for rank in found
        ]

    monkeypatch.setattr(engine_blueprint, "engine_ranks", ranks)
    status, _, err = call(folder(), "--random")
    assert status == cli.UNHEALTHY and f"keep 0 of the 32 elements of '{name}'" in err


@pytest.mark.real
def test_real_layouts_of_dense_and_expert_models(call, tmp_path):
    make_model(tmp_path / "dense", "qwen3")
    options = ("--tp", 2, "--pp", 2, "--engine-tp", 2, "--engine-pp", 2, "--device", "cpu")
    status, out, err = call(tmp_path / "dense", *options)
    assert status == 0, err
    assert re.search("OK: 24 tensors .* into 4 engine rank", " ".join(out.split()))
    make_model(tmp_path / "experts", "qwen3_moe")
    (tmp_path / "experts" / "model.safetensors").unlink()
    options = ("--tp", 2, "--pp", 2, "--ep", 2, "--etp", 1, "--engine-tp", 2, "--random", "--json", "--device", "cpu")
    status, out, err = call(tmp_path / "experts", *options, "--engine-ep", 2)
    assert status == 0 and json.loads(out)["ok"], err
    status, out, err = call(tmp_path / "experts", *options)
    assert status == 0, err
    found = json.loads(out)
    assert found["ok"] and len(found["trainer"]) == 4 and len(found["engine"]) == 2
    # 24 rows of an expert over two ranks are padded to what the kernels take.
    assert any("experts" in param for param in found["constants"])


def test_groups_of_attention_must_divide_the_ranks(folder, call):
    status, _, err = call(folder(), "--engine-tp", 3, "--engine-dp-attention", 2)
    assert status == cli.REFUSED and "--engine-dp-attention=2 does not divide --engine-tp=3" in err


@pytest.mark.real
def test_the_error_of_a_model_that_sglang_cannot_build_quotes_sglang(folder, call):
    status, _, err = call(folder(architectures=["NobodysModel"]), "--random", "--device", "cpu")
    assert status == cli.REFUSED and "NobodysModel" in err
