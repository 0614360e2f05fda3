"""The trace of real SGLang servers against their real loaders, element by element, on every tensor-parallel rank."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import torch
from engine_models import FAMILIES, checkpoint_specs, make_model
from oracle import engine_oracle

from megasync.config.schema import RolloutConfig
from megasync.config.schema.rollout import PIPELINED, UNTIED
from megasync.errors import ServerError
from megasync.lab.engine_blueprint import engine_ranks
from megasync.lab.layout_check import check_layout
from megasync.layout.engine_layout import EngineRank
from megasync.layout.families import sizes_of
from megasync.layout.layout import Layout
from megasync.layout.model_files import read_hf_config
from megasync.layout.topology import Topology
from megasync.serving.control import ServerControl
from megasync.serving.plugin_control import PluginControl
from megasync.serving.plugin_protocol import LOAD_FORMAT, encode
from megasync.serving.server import ServerSpec, SGLangServer

pytestmark = pytest.mark.real

LEAN = [("qwen3", 1), ("qwen3_moe", 2)]
# On a CPU their log-probs say nothing, or the server ends: stock SGLang launches a Triton kernel, for Qwen2-MoE's
# shared expert and for MiniMax-M2's norms (without AMX). They load weights as on a GPU.
UNSCORED = {"qwen2_moe", "minimax_m2"}
# SGLang serves them on GPUs and on CPUs with AMX only, with what has to be named to build them here.
UNSERVED = {
    "gpt_oss": {"--attention-backend": "triton"},
    "qwen3_next": {"--mamba-radix-cache-strategy": "no_buffer", "--disable-overlap-schedule": True},
    "qwen3_5": {"--mamba-radix-cache-strategy": "no_buffer", "--disable-overlap-schedule": True},
    "qwen3_5_moe": {"--mamba-radix-cache-strategy": "no_buffer", "--disable-overlap-schedule": True},
}
# SGLang leaves their tower out.
TOWERLESS = {"llama4"}
# The families whose stages of a pipeline SGLang builds.
STAGED = {*FAMILIES} - {"gemma3", "gemma3_text", "llama4", "qwen3_5", "qwen3_next"}
PROMPT = [5, 6, 7, 8, 250, 300]


def with_plugins(monkeypatch, names: str) -> None:
    """Servers that start from now on load these plugins only, with the oracle's folder among those they look into."""
    monkeypatch.setenv("PYTHONPATH", str(Path(engine_oracle.__file__).parent))
    monkeypatch.setenv("SGLANG_PLUGINS", names)


@asynccontextmanager
async def serving(path: Path, tensor_parallel: int):
    """Control of a server over the model folder ``path``, stopped at the end."""
    rollout = RolloutConfig(
        context_length=1024,
        max_total_tokens=4096,
        max_running_requests=8,
        # Of what is free at the start; other processes on the machine take from it meanwhile.
        mem_fraction=0.5,
        tensor_parallel=tensor_parallel,
        server_args={"--skip-tokenizer-init": True},
    )
    server = SGLangServer(ServerSpec(path, rollout, "float32", "cpu"), "127.0.0.1", 0, path.with_suffix(".log"))
    control = ServerControl(await server.start(240))
    try:
        yield control
    finally:
        await control.close()
        await server.stop()


def logprobs(model, prompt: list[int]) -> list[float]:
    with torch.no_grad():
        results = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    return [float(results[i, token]) for i, token in enumerate(prompt[1:])]


async def score(control: ServerControl, prompt: list[int]) -> list[float]:
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 1, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    answer = await control.post("/generate", body)
    return [entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]]


async def commit(control: ServerControl, request: dict) -> None:
    await control.post("/begin_weight_update")
    body = {"names": [encode(request)], "dtypes": [], "shapes": [], "group_name": "", "load_format": LOAD_FORMAT}
    try:
        await control.post("/update_weights_from_distributed", body)
    finally:
        await control.post("/end_weight_update")


@pytest.mark.parametrize(
    ("family", "tensor_parallel"),
    [
        pytest.param(family, tp, marks=[] if (family, tp) in LEAN else pytest.mark.matrix)
        for family in sorted(FAMILIES.keys() - UNSERVED.keys())
        for tp in (1, 2)
    ],
)
async def test_a_server_computes_what_hugging_face_does_and_loads_what_its_trace_says(
    family, tensor_parallel, tmp_path, monkeypatch
):
    with_plugins(monkeypatch, "megasync,engine_oracle")
    path = tmp_path / "model"
    model = make_model(path, family)
    async with serving(path, tensor_parallel) as control:
        engine = PluginControl(control)
        hello = await engine.hello()
        assert [rank.rank for rank in hello] == list(range(tensor_parallel))
        assert {(rank.ranks, rank.dtype) for rank in hello} == {(tensor_parallel, "float32")}
        assert len({rank.pid for rank in hello}) == tensor_parallel
        specs = checkpoint_specs(path)
        ranks = await engine.trace(specs)
        if family not in UNSCORED:
            # After the trace, which wrote nothing.
            assert await score(control, PROMPT) == pytest.approx(logprobs(model, PROMPT), abs=1e-4)
        assert ranks == await engine.trace(specs)
        assert all(rank.unwritten == () for rank in ranks)
        # The same without a server.
        assert ranks == await asyncio.to_thread(engine_ranks, path, tensor_parallel, "float32", "cpu", specs)
        question = {"specs": specs, "ranks": msgspec.to_builtins(ranks)}
        body = {"action": engine_oracle.ACTION, "skip_tensor_list": [json.dumps(question)], "selector": "target"}
        results = await control.post("/weights_checker", body)
        answers = [json.loads(rank["checksums"][engine_oracle.ACTION]) for rank in results["ranks"]]
        print(family, tensor_parallel, answers)
        assert [answer["different"] for answer in answers] == [[]] * tensor_parallel
        loaded = sum(box.rows * box.cols for rank in ranks for _, box, *_ in rank.slots)
        assert sum(answer["loaded"] for answer in answers) == loaded
        layout = Layout(read_hf_config(path), Topology())
        left = layout.frozen_tensors if family in TOWERLESS else ()
        assert loaded >= sum(torch.Size(shape).numel() for name, shape in specs if name not in left)
        assert not any(slot.hf_name in left for rank in ranks for slot in rank.slots)


@pytest.mark.matrix
@pytest.mark.parametrize("family", UNSERVED)
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_a_model_that_is_not_served_here_loads_what_its_trace_says(tensor_parallel, family, tmp_path):
    path = tmp_path / "model"
    make_model(path, family)
    specs = checkpoint_specs(path)
    options = UNSERVED[family]
    ranks = engine_ranks(path, tensor_parallel, "float32", "cpu", specs, options)
    assert all(rank.unwritten == () for rank in ranks)
    loaded = sum(box.rows * box.cols for rank in ranks for _, box, *_ in rank.slots)
    assert loaded >= sum(torch.Size(shape).numel() for _, shape in specs)
    rollout = RolloutConfig(tensor_parallel=tensor_parallel, server_args={"--skip-tokenizer-init": True, **options})
    server = SGLangServer(ServerSpec(path, rollout, "float32", "cpu"), "127.0.0.1", 30000, tmp_path / "log")
    program = Path(engine_oracle.__file__).parents[1] / "real_loads.py"
    command = [sys.executable, str(program), json.dumps(server.command()[3:]), json.dumps(specs)]
    done = subprocess.run(command, env=server.environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads(done.stdout.splitlines()[-1])
    assert [answer["different"] for answer in answers] == [[]] * tensor_parallel
    assert sum(answer["loaded"] for answer in answers) == loaded
    # What trainer ranks send is what a load keeps, with experts over two ranks.
    experts = {"expert": 2, "expert_tensor": 1} if sizes_of(read_hf_config(path)).experts else {}
    topology = Topology(tensor=2, pipeline=2, **experts)
    report = check_layout(path, topology, "te", "float32", 1, False, lambda dtype, specs: ranks)
    assert report.problems == () and report.wire_bytes == report.minimum_bytes
    if family == "gpt_oss":
        # A folder in MXFP4 is served unquantized.
        (tmp_path / "mxfp4").mkdir()
        config = json.loads((path / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
        (tmp_path / "mxfp4" / "config.json").write_text(json.dumps(config))
        assert ranks == engine_ranks(tmp_path / "mxfp4", tensor_parallel, "float32", "cpu", specs, options)


@pytest.mark.matrix
def test_ranks_of_stages_and_of_groups_of_attention_together_load_every_tensor(tmp_path):
    """Of each family that SGLang can pipeline, tied too, and of some with data-parallel attention."""
    assert {*PIPELINED} <= STAGED
    cases, asked = [], []
    for family, tied, options in [
        *((family, False, {"--pp-size": 2}) for family in FAMILIES if family in {*STAGED, "gemma3_text"}),
        *((family, True, {"--pp-size": 2}) for family in (*UNTIED, "qwen2")),
        *((family, False, {"--attn-dp-size": 2}) for family in ("qwen3", "qwen3_moe", "deepseek_v3")),
    ]:
        path = tmp_path / f"{family}-{tied}{''.join(options)}"
        make_model(path, family)
        config = json.loads((path / "config.json").read_text())
        changes = {"tie_word_embeddings": True} if tied else {}
        (path / "config.json").write_text(json.dumps(config | changes))
        specs = [spec for spec in checkpoint_specs(path) if not (tied and spec[0] == "lm_head.weight")]
        arguments = {"--skip-tokenizer-init": True, **UNSERVED.get(family, {}), **options}
        rollout = RolloutConfig(tensor_parallel=2, server_args=arguments)
        server = SGLangServer(ServerSpec(path, rollout, "float32", "cpu"), "127.0.0.1", 30000, tmp_path / "log")
        cases.append((path, family, tied, options))
        asked.append((server.command()[3:], specs))
    (tmp_path / "asked.json").write_text(json.dumps(asked))
    program = Path(engine_oracle.__file__).parents[1] / "staged_models.py"
    command = [sys.executable, str(program), str(tmp_path / "asked.json"), str(tmp_path / "answers.json")]
    done = subprocess.run(command, env=server.environment(), capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads((tmp_path / "answers.json").read_text())
    wrong = {}
    for (path, family, tied, options), answer in zip(cases, answers, strict=True):
        name, problem = path.name, answer["problem"]
        if family not in STAGED or (tied and family in UNTIED):
            if not problem:
                wrong[name] = "SGLang has a pipeline for it"
            continue
        if not problem:
            ranks = msgspec.convert(answer["ranks"], list[EngineRank])
            tensor, each = (1, None) if family == "mistral" else (2, 1 if family == "gpt_oss" else None)
            topology = Topology(tensor=tensor, pipeline=2, expert_tensor=each)
            count = 4 if "--pp-size" in options else 2
            report = check_layout(path, topology, "te", "float32", 1, True, lambda dtype, specs, ranks=ranks: ranks)
            exact = report.problems == () and report.wire_bytes == report.minimum_bytes
            problem = "" if exact and len(ranks) == count else f"{len(ranks)} ranks, {report.verdict}"
        if problem:
            wrong[name] = problem
    assert wrong == {}


async def test_a_commit_succeeds_on_all_ranks_or_is_refused_by_all(tmp_path, monkeypatch):
    """DeepSeek's attention computes with values derived from its parameters, which a commit has to derive anew."""
    with_plugins(monkeypatch, "engine_puppet")
    paths = [tmp_path / "old", tmp_path / "new"]
    for seed, path in enumerate(paths):
        make_model(path, "deepseek_v3", seed)
    request = {"model": str(paths[1] / "model.safetensors")}
    async with serving(paths[0], 2) as control:
        old = await score(control, PROMPT)
        await control.post("/update_weights_from_disk", {"model_path": str(paths[1])})
        new = await score(control, PROMPT)
        assert max(abs(a - b) for a, b in zip(old, new, strict=True)) > 0.1
        await control.post("/update_weights_from_disk", {"model_path": str(paths[0])})

        told = await PluginControl(control).call("stage", {"version": 3}, dict)
        assert told == [{"command": "stage", "payload": {"version": 3}, "rank": rank} for rank in (0, 1)]
        with pytest.raises(ServerError, match="status 400.*as before: rank 1: ValueError: nothing is staged here"):
            await commit(control, request | {"fail_check": 1})
        assert await score(control, PROMPT) == pytest.approx(old, abs=1e-5)
        with pytest.raises(ServerError, match="status 400.*weights are mixed: rank 1: ValueError: the copy broke"):
            await commit(control, request | {"fail_commit": 1})
        await commit(control, request)
        assert await score(control, PROMPT) == pytest.approx(new, abs=1e-5)
