"""Ranks of full-size models, on up to 1,024 ranks, are what the topology, the layout and `megasync plan` say."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest

from megasync.config import load_config
from megasync.config.schema import Config, CriticConfig, LoraConfig, ModelConfig, OptimizerConfig, TrainerConfig
from megasync.lab.rehearsal.driver import MEGATRONS, rehearse, sampled_ranks
from megasync.layout.layout import Layout
from megasync.layout.topology import Topology
from megasync.preflight.check import model_layout

ROOT = Path(__file__).parents[3]
SHIPPED = (
    "configs/qwen3_8b_math.yaml",
    "configs/qwen3_32b_math.yaml",
    "configs/recipes/qwen3_32b_8_gpus.yaml",
    "examples/deepresearch/qwen3_8b.yaml",
)


def sizes(tp: int, pp: int = 1, dp: int = 1, ep: int = 0, etp: int = 1, **options) -> dict:
    """Options of the trainer; with ``ep`` also those of experts."""
    experts = {"expert_parallel": ep, "expert_tensor_parallel": etp} if ep else {}
    return {"tensor_parallel": tp, "pipeline_parallel": pp, "data_parallel": dp, **experts, **options}


# Model, sizes of the trainer, and the version of megatron-core in the standard tier.
RUNS = {
    "qwen3-8b": ("qwen3_8b", sizes(4, dp=16), "0.16.1"),
    "qwen3-32b": ("qwen3_32b", sizes(8, 2, 64), "0.19.2"),
    "llama3-70b-interleaved": (
        "llama3_70b",
        sizes(8, 4, 32, virtual_pipeline=5, pipeline_layout=[3, *[4] * 18, 5], recompute=None),
        "0.16.1",
    ),
    "qwen3-30b-a3b": ("qwen3_30b_a3b", sizes(2, dp=32, ep=8), "0.19.2"),
    "qwen3-235b-a22b": (
        "qwen3_235b_a22b",
        sizes(4, 4, 64, ep=16, first_stage_layers=23, last_stage_layers=23),
        "0.16.1",
    ),
    "deepseek-v3": (
        "deepseek_v3",
        sizes(4, 8, 32, ep=32, first_stage_layers=8, last_stage_layers=5, recompute=None),
        "0.19.2",
    ),
    "glm-4.5": ("glm_4_5", sizes(8, 4, 32, ep=32), "0.19.2"),
    "minimax-m2": ("minimax_m2", sizes(8, 2, 16, ep=16), "0.16.1"),
    "gpt-oss-120b": ("gpt_oss_120b", sizes(4, 2, 16, ep=32), "0.16.1"),
    # Tensor ranks that share the one key-value group.
    "gemma-3-1b": ("gemma_3_1b", sizes(4, 2, 8, recompute=None), "0.19.2"),
    # Language models of folders with a vision tower.
    "gemma-3-27b": ("gemma_3_27b", sizes(8, 2, 8, recompute=None), "0.16.1"),
    "qwen3.5-9b": ("qwen3_5_9b", sizes(4, 2, 8, recompute=None), "0.16.1"),
    "qwen3-next-80b-a3b": ("qwen3_next_80b_a3b", sizes(4, 2, 16, ep=32, recompute=None), "0.19.2"),
    # Experts in tensors of all experts that two ranks share, from a folder with a vision tower.
    "llama-4-scout": ("llama_4_scout", sizes(4, 4, 8, ep=16, etp=2, recompute=None), "0.19.2"),
    # Experts that two ranks share.
    "kimi-k2": ("kimi_k2", sizes(8, 8, 16, ep=16, etp=2, first_stage_layers=7, last_stage_layers=6), "0.16.1"),
}


def configuration(name: str, **options) -> Config:
    model, trainer, _ = RUNS[name]
    config = Config(
        model=ModelConfig(path="models/absent", config=str(ROOT / f"configs/models/{model}.json"), dtype="bfloat16"),
        trainer=TrainerConfig(**{"sequence_parallel": True, "recompute": "full"} | trainer | options),
    )
    config.cluster.device = "cuda"
    return config


def layout_of(config: Config) -> Layout:
    return model_layout(config, planning=True)[0]


def assert_as_planned(config: Config, ranks: list[int], megatron: str) -> None:
    found = rehearse(config, ranks, megatron)
    assert found.difference is None
    assert [rank.rank for rank in found.ranks] == ranks
    layout = layout_of(config)
    for rank in found.ranks:
        assert rank.parameters == sum(map(prod, layout.params(rank.rank).values()))
        # What frozen projections beside adapters save has no plan.
        kinds = {"weights", "gradients", "optimizer"} | (set() if config.trainer.lora.targets else {"activations"})
        kinds |= {"host"} if config.trainer.optimizer.offload else set()
        assert rank.held.keys() == rank.planned.keys() == kinds


@pytest.mark.processes
@pytest.mark.parametrize("path", SHIPPED)
def test_shipped_configurations(path):
    config = load_config(ROOT / path)
    assert_as_planned(config, sampled_ranks(layout_of(config)), "0.16.1")


FULL_TIER = (
    "minimax-m2",
    "gpt-oss-120b",
    "gemma-3-1b",
    "gemma-3-27b",
    "qwen3.5-9b",
    "qwen3-next-80b-a3b",
    "llama-4-scout",
)
# The shipped configurations have these models.
EVERYWHERE = [
    pytest.param(name, marks=pytest.mark.matrix if name in FULL_TIER else ())
    for name in RUNS
    if name not in ("qwen3-8b", "qwen3-32b")
]


@pytest.mark.processes
@pytest.mark.parametrize("name", EVERYWHERE)
def test_ends_of_full_size_models(name):
    """The first, a middle and the last rank."""
    config = configuration(name)
    world = Topology.from_config(config.trainer).world
    assert_as_planned(config, [0, world // 2 + 1, world - 1], RUNS[name][2])


OPTIONS = {
    "modules": ("qwen3-8b", {"recompute": "selective", "recompute_modules": ["mlp"], "float32_head": True}),
    "some-layers": ("qwen3-8b", {"recompute": "full", "recompute_layers": 10, "overlap_grad_reduce": True}),
    "experts": (
        "qwen3-30b-a3b",
        {"recompute": "selective", "recompute_modules": ["moe_act", "layernorm"], "moe_permute_fusion": True},
    ),
    "expert-layers": ("qwen3-30b-a3b", {"recompute": "selective", "recompute_modules": ["moe"]}),
    "shared-experts": ("deepseek-v3", {"recompute": "selective", "recompute_modules": ["mlp", "shared_experts"]}),
    "moments": (
        "qwen3-8b",
        {"optimizer": OptimizerConfig(exp_avg_dtype="bfloat16", exp_avg_sq_dtype="bfloat16")},
    ),
    "remainders": (
        "qwen3-30b-a3b",
        {"optimizer": OptimizerConfig(exp_avg_dtype="bfloat16", store_param_remainders=True)},
    ),
    "offloaded": ("qwen3-8b", {"optimizer": OptimizerConfig(offload=1.0)}),
    "half-offloaded": ("qwen3-30b-a3b", {"optimizer": OptimizerConfig(offload=0.5)}),
    "offloaded-adapters": ("qwen3-8b", {"optimizer": OptimizerConfig(offload=1.0), "lora": LoraConfig(rank=64)}),
    "offloaded-adapters-of-cut-experts": (
        "qwen3-30b-a3b",
        {"optimizer": OptimizerConfig(offload=1.0), "lora": LoraConfig(rank=64), "expert_tensor_parallel": 2},
    ),
    "overlapped-shared-experts": ("deepseek-v3", {"moe_shared_expert_overlap": True}),
    "overlapped-exchanges": ("qwen3-32b", {"pad_microbatches": True, "tp_comm_overlap": True}),
    "graphs": ("qwen3-8b", {"pad_microbatches": True, "cuda_graphs": True, "recompute": None}),
    "fp8": ("qwen3-8b", {"fp8": "tensorwise", "recompute": None}),
    "fp8-experts": ("qwen3-30b-a3b", {"fp8": "blockwise", "recompute": None}),
    "fp8-recomputed": ("deepseek-v3", {"fp8": "blockwise", "recompute": "full"}),
    "adapters": ("qwen3-32b", {"lora": LoraConfig(rank=64)}),
    "adapters-of-experts": ("qwen3-30b-a3b", {"lora": LoraConfig(rank=64)}),
    "adapters-of-cut-experts": ("qwen3-30b-a3b", {"lora": LoraConfig(rank=64), "expert_tensor_parallel": 2}),
    "some-adapters": ("qwen3-8b", {"lora": LoraConfig(rank=16, targets=["o_proj"])}),
}


def every(kinds: dict, first: tuple[str, ...]) -> list:
    """All of them; those that are not among the first ones in the full tier only."""
    return [pytest.param(kind, marks=() if kind in first else pytest.mark.matrix) for kind in kinds]


@pytest.mark.processes
@pytest.mark.parametrize("megatron", [MEGATRONS[0], pytest.param(MEGATRONS[1], marks=pytest.mark.matrix)])
@pytest.mark.parametrize("option", every(OPTIONS, ("modules", "offloaded", "overlapped-shared-experts")))
def test_options_change_memory_as_planned(option, megatron):
    name, options = OPTIONS[option]
    assert_as_planned(configuration(name, **options), [0], megatron)


@pytest.mark.processes
@pytest.mark.matrix
@pytest.mark.parametrize("megatron", MEGATRONS)
@pytest.mark.parametrize("path", SHIPPED)
def test_every_rank_of_shipped_configurations(path, megatron):
    config = load_config(ROOT / path)
    assert_as_planned(config, [*range(layout_of(config).topology.world)], megatron)


@pytest.mark.processes
@pytest.mark.matrix
@pytest.mark.parametrize("megatron", MEGATRONS)
@pytest.mark.parametrize("name", RUNS)
def test_every_stage_and_expert_coordinate_of_full_size_models(name, megatron):
    config = configuration(name)
    assert_as_planned(config, sampled_ranks(layout_of(config)), megatron)


# Critics beside policies: on one stage and on several, in turns, with experts, with tied embeddings, beside adapters.
CRITICS = {
    "beside": ("qwen3-8b", {}, {}),
    "on stages": ("qwen3-32b", {}, {}),
    "in turns": ("qwen3-32b", {}, {"offload": True}),
    "with its own optimizer": ("qwen3-8b", {}, {"optimizer": OptimizerConfig(exp_avg_dtype="bfloat16")}),
    "of experts": ("qwen3-30b-a3b", {}, {}),
    "of a tied model": ("gemma-3-1b", {}, {}),
    "of interleaved stages": ("llama3-70b-interleaved", {}, {"offload": True}),
    "of latent attention": ("deepseek-v3", {}, {}),
    "beside adapters": ("qwen3-32b", {"lora": LoraConfig(rank=16)}, {}),
    "in turns with adapters": ("qwen3-32b", {"lora": LoraConfig(rank=16)}, {"offload": True}),
}


@pytest.mark.processes
@pytest.mark.parametrize("case", every(CRITICS, ("in turns", "of experts")))
def test_critics(case):
    """The critic of the first and the last rank, which has the value head."""
    name, options, keys = CRITICS[case]
    config = replace(configuration(name, **options), critic=CriticConfig(enabled=True, **keys))
    found = rehearse(config, [0, Topology.from_config(config.trainer).world - 1], RUNS[name][2])
    assert found.difference is None
    assert all(rank.held["critic"] > 0 for rank in found.ranks)


@pytest.mark.parametrize("name", RUNS)
def test_a_sample_has_every_stage_and_expert_coordinate(name):
    layout = layout_of(configuration(name))
    topology = layout.topology
    ranks = sampled_ranks(layout)
    found = {(topology.coords(rank).pp, topology.expert_coords(rank).ep) for rank in ranks}
    assert found == {(pp, ep) for pp in range(topology.pipeline) for ep in range(topology.expert)}
    assert {0, topology.world - 1} <= set(ranks)
    assert len(ranks) <= len(found) + 1


# A fault, the rank that must find it, and words of the difference that names it.
FAULTS = {
    "none": (0, None),
    "a spec name": (0, "first 0.decoder.layers.0.self_attention.linear_qkv.layer_norm_weight: the table has none"),
    "a missing mark": (0, "q_layernorm.weight has sequence_parallel=False"),
    "a mark too many": (0, "router.weight has tensor_model_parallel=True"),
    "experts reduced over all data ranks": (0, "the expert_data_parallel group has 16 rank(s)"),
    "experts in the wrong buffer": (0, "is not in the buffer of its kind of layer"),
    "an order of expert ranks": (1, "the expert_model_parallel group has"),
    "an option that Transformer Engine refuses": (0, "Unsupported normalization type"),
    "an interleaved stage that is off by one": (0, "the layout says"),
    "a gradient buffer of 16 bits": (0, "gradients:"),
    "recomputation that is not switched on": (0, "activations:"),
    "weights in another dtype": (0, "is torch.float32; the layout says torch.bfloat16"),
}


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """The differences that each fault leads to; all faults are planted one after another in one process."""
    config = configuration(
        "qwen3-30b-a3b", pipeline_parallel=2, data_parallel=16, virtual_pipeline=3, expert_parallel=4
    )
    folder = tmp_path_factory.mktemp("planted")
    from megasync.config import save_config

    save_config(config, folder / "config.yaml")
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("planted_faults.py"))]
    faults = json.dumps({fault: rank for fault, (rank, _) in FAULTS.items()})
    done = subprocess.run(
        [*command, str(folder / "config.yaml"), faults],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.processes
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(planted, fault):
    words = FAULTS[fault][1]
    if words is None:
        assert planted[fault] == []
    else:
        assert any(words in difference for difference in planted[fault]), planted[fault][:3]
