"""The engine under verl's TrainingWorker, in spawned ranks, compared with verl's FSDP2 engine on equal data."""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import make_tiny_model, make_tiny_value_model

pytest.importorskip("verl.version", reason="verl is not installed; run `megasync install verl`")

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification
from verl_data import OUTPUTS, PROMPT, TEMPERATURE, padded_batch, routed_batch

from megasync.layout.model_files import read_hf_config
from megasync.layout.routes import RouteFormat

RANK = Path(__file__).with_name("verl_rank.py")
DRIVER = Path(__file__).with_name("verl_driver.py")
WORLD = 2
# Seconds for all runs together; several times what they need on two busy cores.
TIMEOUT = 400
AWAY = {"param_offload": True, "optimizer_offload": True}
SIZES = {
    "tensor": {"tensor_model_parallel_size": 2},
    "pipeline": {"pipeline_model_parallel_size": 2, "use_dynamic_bsz": False, **AWAY},
    "data": {},
}
EXPERTS = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
RUNS = {
    "fsdp2": {"strategy": "fsdp2", "padding": False},
    "tensor": {"settings": SIZES["tensor"]},
    "pipeline": {"settings": SIZES["pipeline"]},
    "data": {"settings": SIZES["data"], "padding": False},
    "bfloat16": {"settings": {**SIZES["tensor"], "dtype": "bfloat16"}},
    "experts": {"settings": {**EXPERTS, "router_replay": "R3"}},
    "fsdp2 experts": {"strategy": "fsdp2", "padding": False},
    "critic fsdp2": {"strategy": "fsdp2", "padding": False},
    "critic fsdp2 experts": {"strategy": "fsdp2", "padding": False},
    **{f"critic {name}": {"settings": settings} for name, settings in SIZES.items()},
    "critic experts": {"settings": EXPERTS},
}
# Which of verl's runs computes the same as ours.
ACTORS = {"tensor": "fsdp2", "pipeline": "fsdp2", "data": "fsdp2", "experts": "fsdp2 experts"}
CRITICS = {f"critic {name}": f"critic {theirs}" for name, theirs in ACTORS.items()}
THEIRS = ACTORS | CRITICS
OURS = [*THEIRS, "bfloat16"]
# Whose gradients may stay where they are between calls.
IN_PARTS = [name for name in THEIRS if not name.endswith("pipeline")]


def role_of(name):
    return "critic" if name.startswith("critic") else "actor"


SCORES = [(name, output) for name in THEIRS for output in OUTPUTS[role_of(name)]]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    """The folder that each run trains."""
    root = tmp_path_factory.mktemp("models")
    dense, sparse = (str(make_tiny_model(root / family, family, tokenizer=False)) for family in ("qwen3", "qwen3_moe"))
    critics = [str(make_tiny_value_model(root / f"critic-{family}", family)) for family in ("qwen3", "qwen3_moe")]
    folders = {"actor": (dense, sparse), "critic": critics}
    return {name: folders[role_of(name)]["experts" in name] for name in RUNS}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("checkpoint")


@pytest.fixture(scope="module")
def found(models, saved, tmp_path_factory) -> dict[str, list[dict]]:
    """For each run, what it found on each rank."""
    folder = tmp_path_factory.mktemp("ranks")
    requests = {
        name: {"model": models[name], "role": role_of(name), "strategy": "megasync", **request}
        for name, request in RUNS.items()
    }
    for name in OURS:
        requests[name]["save"] = str(saved / name)
    (folder / "request.json").write_text(json.dumps(requests))
    ranks, logs = [], [folder / f"log-{rank}.txt" for rank in range(WORLD)]
    try:
        for rank, log in enumerate(logs):
            place = {"RANK": rank, "WORLD_SIZE": WORLD, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
            with log.open("w") as output:
                ranks.append(
                    subprocess.Popen(
                        [sys.executable, str(RANK), str(rank), str(WORLD), str(folder)],
                        env={**os.environ, "OMP_NUM_THREADS": "1", **{key: str(value) for key, value in place.items()}},
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )
        for process, log in zip(ranks, logs, strict=True):
            assert process.wait(TIMEOUT) == 0, log.read_text()[-6000:]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    results = [torch.load(folder / f"result-{rank}.pt", weights_only=False) for rank in range(WORLD)]
    return {name: [result[name] for result in results] for name in RUNS}


def inferred(ranks, name, pass_="infer"):
    """Whole batch, in the order of the data-parallel ranks that verl collects from."""
    parts = {rank["dp"]: rank[pass_][name] for rank in ranks if rank[pass_] is not None}
    return torch.cat([parts[dp] for dp in sorted(parts)])


def metrics(ranks, step):
    return next(rank[step] for rank in ranks if rank[step] is not None)


def check_close(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], atol=1e-4, rtol=0, msg=name)


def response_tokens(model):
    """(row, response tokens, logits that predict them) of each sequence, by the Hugging Face model alone."""
    batch = padded_batch()
    for row, (ids, kept) in enumerate(zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)):
        count = int(kept[PROMPT:].sum())
        yield row, count, ids[kept][-count:], model(ids[kept][None]).logits[0, -count - 1 : -1].detach()


# Scores


@pytest.mark.parametrize("layout, name", SCORES)
def test_scores_are_those_of_verls_engine(found, layout, name):
    for pass_ in ("infer", "infer_after"):
        theirs = inferred(found[THEIRS[layout]], name, pass_)
        assert theirs.abs().max() > 1
        torch.testing.assert_close(inferred(found[layout], name, pass_), theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("layout", ACTORS)
@pytest.mark.parametrize("name", OUTPUTS["actor"])
def test_each_sequence_may_have_a_temperature_of_its_own(found, layout, name):
    ours, theirs = (inferred(found[run], name, "each_its_own") for run in (layout, THEIRS[layout]))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    assert not torch.allclose(ours, inferred(found[layout], name), atol=1e-2)


@pytest.mark.parametrize("layout", SIZES)
def test_scores_are_those_of_the_hugging_face_model(found, models, layout):
    logprobs, values = (inferred(found[name], OUTPUTS[role_of(name)][0]) for name in (layout, f"critic {layout}"))
    policy = AutoModelForCausalLM.from_pretrained(models[layout], dtype=torch.float32)
    for row, count, ids, logits in response_tokens(policy):
        expected = (logits / TEMPERATURE).log_softmax(-1).gather(1, ids[:, None])[:, 0]
        torch.testing.assert_close(logprobs[row, :count], expected, atol=1e-4, rtol=0)
    critic = AutoModelForTokenClassification.from_pretrained(models[f"critic {layout}"], dtype=torch.float32).eval()
    for row, count, _, logits in response_tokens(critic):
        torch.testing.assert_close(values[row, :count], logits[:, 0], atol=1e-4, rtol=0)


def test_given_experts_are_replayed(found, models):
    """Those of the rollout, `router_replay.mode=R3`."""
    form = RouteFormat.of(read_hf_config(models["experts"]))
    data = routed_batch(form)
    # Layer by layer for each sequence. Hugging Face also feeds the last token, whose experts do not matter.
    calls = (row[:, layer].long() for row in data["routed_experts"].unbind() for layer in range(form.layers))
    choose = torch.topk

    def topk(values, k, *arguments, **options):
        if values.shape[-1] != form.experts or k != form.per_token:
            return choose(values, k, *arguments, **options)
        experts = next(calls)
        return torch.return_types.topk((values.gather(-1, experts), experts))

    policy = AutoModelForCausalLM.from_pretrained(models["experts"], dtype=torch.float32)
    logprobs = inferred(found["experts"], "log_probs", "routed")
    with mock.patch("torch.topk", topk):
        for row, count, ids, logits in response_tokens(policy):
            expected = (logits / TEMPERATURE).log_softmax(-1).gather(1, ids[:, None])[:, 0]
            torch.testing.assert_close(logprobs[row, :count], expected, atol=1e-4, rtol=0)
    assert next(calls, None) is None
    assert (logprobs - inferred(found["experts"], "log_probs")).abs().max() > 1e-2


def test_bfloat16_is_as_close_to_float32_as_its_digits_allow(found):
    """A bfloat16 has 8 significant bits, and log-probs here reach 15: a rounding step is 0.06."""
    ours, exact = (inferred(found[run], "log_probs") for run in ("bfloat16", "fsdp2"))
    assert 0 < (ours - exact).abs().max() < 0.3
    assert (ours - exact).abs().mean() < 0.05
    ours, exact = (metrics(found[run], "train")["grad_norm"] for run in ("bfloat16", "fsdp2"))
    assert ours == pytest.approx(exact, rel=0.1)


@pytest.mark.parametrize("layout", OURS)
def test_an_engine_that_only_scores_keeps_the_first_weights_beside_one_that_trains(found, layout):
    for name in OUTPUTS[role_of(layout)]:
        assert torch.equal(inferred(found[layout], name, "reference"), inferred(found[layout], name))
        assert not torch.equal(inferred(found[layout], name, "reference"), inferred(found[layout], name, "infer_after"))


@pytest.mark.parametrize("layout", ACTORS)
def test_the_loss_of_fine_tuning_is_that_of_verls_engine(found, layout):
    ours, theirs = (metrics(found[run], "supervised")["loss"] for run in (layout, THEIRS[layout]))
    assert theirs > 1
    assert ours == pytest.approx(theirs, rel=1e-3)


# Training


@pytest.mark.parametrize("layout", THEIRS)
@pytest.mark.parametrize("step, steps", [("train", 1), ("next", 2)], ids=["train_batch", "train_mini_batch"])
def test_loss_and_gradient_norm_are_those_of_verls_engine(found, layout, step, steps):
    ours, theirs = metrics(found[layout], step), metrics(found[THEIRS[layout]], step)
    for name in ("loss", "grad_norm"):
        assert len([ours[name]] if steps == 1 else ours[name]) == steps
        assert ours[name] == pytest.approx(theirs[name], rel=1e-3), name


@pytest.mark.parametrize("layout", THEIRS)
def test_weights_after_a_step_are_those_of_verls_engine(found, layout):
    for rank in found[layout]:
        check_close(rank["after"], found[THEIRS[layout]][0]["after"])
        assert any(not torch.equal(rank["after"][name], rank["before"][name]) for name in rank["after"])


@pytest.mark.parametrize("layout", IN_PARTS)
def test_gradients_of_two_calls_add_up_as_in_verls_engine(found, layout):
    ours, theirs = ([rank["parts"] for rank in found[run]] for run in (layout, THEIRS[layout]))
    assert metrics(ours, "step")["grad_norm"] == pytest.approx(metrics(theirs, "step")["grad_norm"], rel=1e-3)
    for rank, parts in zip(found[layout], ours, strict=True):
        assert all(torch.equal(parts["between"][name], tensor) for name, tensor in rank["last"].items())
        assert any(not torch.equal(parts["after"][name], tensor) for name, tensor in rank["last"].items())
        check_close(parts["after"], theirs[0]["after"])


@pytest.mark.parametrize("layout", ["pipeline", "critic pipeline"])
def test_gradients_that_would_be_lost_between_calls_are_refused(found, layout):
    for rank in found[layout]:
        assert "param_offload" in rank["parts"]["refused"]


@pytest.mark.parametrize("layout", OURS)
def test_earlier_weights_can_be_swapped_in(found, layout):
    """Training after it is checked by `test_loss_and_gradient_norm_are_those_of_verls_engine`."""
    for name in OUTPUTS[role_of(layout)]:
        assert torch.equal(inferred(found[layout], name, "infer_before"), inferred(found[layout], name))


# Weights


@pytest.mark.parametrize("layout", OURS)
def test_every_rank_exports_the_folder_bit_for_bit(found, layout, models):
    folder = load_file(Path(models[layout]) / "model.safetensors")
    dtype = torch.bfloat16 if layout == "bfloat16" else torch.float32
    for rank in found[layout]:
        assert rank["before"].keys() == folder.keys()
        assert all(torch.equal(rank["before"][name], tensor.to(dtype)) for name, tensor in folder.items())


@pytest.mark.parametrize("layout", OURS)
def test_a_new_engine_continues_from_a_checkpoint(found, layout):
    for rank in found[layout]:
        assert all(torch.equal(rank["restored"][name], tensor) for name, tensor in rank["after"].items())
        assert all(torch.equal(rank["end"][name], tensor) for name, tensor in rank["last"].items())
    again, straight = metrics(found[layout], "again"), metrics(found[layout], "next")
    assert again["loss"] == straight["loss"]
    assert again["grad_norm"] == straight["grad_norm"]


@pytest.mark.parametrize("layout", OURS)
def test_the_exported_folder_holds_the_trained_weights(found, layout, saved):
    folder = load_file(saved / layout / "huggingface" / "model.safetensors")
    trained = found[layout][0]["after"]
    assert folder.keys() == trained.keys()
    assert all(torch.equal(folder[name], tensor) for name, tensor in trained.items())


@pytest.mark.parametrize("layout", CRITICS)
def test_verls_critic_loads_the_exported_folder(found, layout, saved):
    folder = saved / layout / "huggingface"
    config = AutoConfig.from_pretrained(folder)
    family = "Qwen3Moe" if "experts" in layout else "Qwen3"
    assert (config.architectures, config.num_labels) == ([f"{family}ForTokenClassification"], 1)
    model, report = AutoModelForTokenClassification.from_pretrained(folder, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    values = inferred(found[layout], "values", "infer_after")
    for row, count, _, logits in response_tokens(model.eval()):
        torch.testing.assert_close(values[row, :count], logits[:, 0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("layout", OURS)
def test_memory_is_offloaded_and_restored(found, layout):
    """Training after it is checked by `test_a_new_engine_continues_from_a_checkpoint`."""
    for rank in found[layout]:
        before, away, back = rank["held"]
        assert before["weights"] > 0 and before["gradients"] > 0 and before["optimizer"] > 0
        assert set(away.values()) == {0}
        assert back == before
        assert all(torch.equal(rank["away"][name], tensor) for name, tensor in rank["after"].items())


# Through Ray


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((4, {"pipeline_model_parallel_size": 2}), id="pipeline x data"),
        pytest.param(
            (8, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
            id="tensor x pipeline x data",
            marks=pytest.mark.matrix,
        ),
    ],
)
def through_ray(request, models, tmp_path_factory) -> dict[str, dict]:
    """What verl's driver got from a worker group, by role; that of grpo_cpu.sh is tensor parallel."""
    folder = tmp_path_factory.mktemp("driver")
    world, sizes = request.param
    roles = {"actor": models["fsdp2"], "critic": models["critic fsdp2"]}
    (folder / "request.json").write_text(json.dumps({"world": world, "sizes": sizes, "models": roles}))
    log = folder / "log.txt"
    with log.open("w") as output:
        process = subprocess.Popen([sys.executable, str(DRIVER), str(folder)], stdout=output, stderr=subprocess.STDOUT)
    try:
        assert process.wait(TIMEOUT) == 0, log.read_text()[-6000:]
    finally:
        process.kill()
        process.wait()
    return torch.load(folder / "result.pt", weights_only=False)


ROLES = pytest.mark.parametrize("role, theirs", [("actor", "fsdp2"), ("critic", "critic fsdp2")])


@ROLES
def test_verls_worker_group_of_ray_actors_computes_the_same(found, through_ray, role, theirs):
    ours = [through_ray[role]]
    for name in OUTPUTS[role]:
        torch.testing.assert_close(inferred(ours, name), inferred(found[theirs], name), atol=1e-4, rtol=0)
    for step in ("train", "next"):
        expected = metrics(found[theirs], step)
        for name in ("loss", "grad_norm"):
            assert metrics(ours, step)[name] == pytest.approx(expected[name], rel=1e-3), (step, name)


@ROLES
def test_every_actor_of_the_group_exports_the_same_weights(found, models, through_ray, role, theirs):
    folder = load_file(Path(models[theirs]) / "model.safetensors")
    ours = through_ray[role]
    for before, after in zip(ours["before"], ours["after"], strict=True):
        assert before.keys() == folder.keys()
        assert all(torch.equal(before[name], tensor) for name, tensor in folder.items())
        assert all(torch.equal(after[name], tensor) for name, tensor in ours["after"][0].items())
        check_close(after, found[theirs][0]["after"])


@ROLES
def test_the_worker_group_continues_from_its_checkpoint(through_ray, role, theirs):
    ours = through_ray[role]
    for name in ("loss", "grad_norm"):
        assert ours["again"][name] == ours["next"][name]
    for last, end in zip(ours["last"], ours["end"], strict=True):
        assert all(torch.equal(end[name], tensor) for name, tensor in last.items())
