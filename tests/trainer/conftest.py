import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megasync.layout.layout import Layout
from megasync.layout.topology import Topology

WORKER = Path(__file__).with_name("worker.py")
# Seconds for one request; many times what any needs, even on a crowded machine.
TIMEOUT = 240

# Two groups (one in qwen3): tensor parallelism over 2 ranks splits them evenly, over 4 it cuts through them. The
# vocabulary is odd on purpose, and 3 layers make uneven stages.
BASE = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MODELS = {
    "llama": {
        **BASE,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "head_dim": 12,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 3.0,
            "original_max_position_embeddings": 32,
        },
    },
    "qwen2": {
        **BASE,
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "tie_word_embeddings": True,
        "rope_theta": 5000.0,
    },
    "qwen3": {
        **BASE,
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "head_dim": 16,
        "num_key_value_heads": 1,
        "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0},
    },
}
EXPERTS = {
    "num_hidden_layers": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0},
}
# Families beside the first three: experts with and without a shared one, a dense layer among the sparse; each with a
# number of layers that two stages of two chunks can share.
MORE_MODELS = {
    "qwen3_moe": {
        **BASE,
        **EXPERTS,
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": 16,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "qwen2_moe": {
        **BASE,
        **EXPERTS,
        "model_type": "qwen2_moe",
        "architectures": ["Qwen2MoeForCausalLM"],
        "shared_expert_intermediate_size": 40,
        "norm_topk_prob": False,
        "mlp_only_layers": [],
        "tie_word_embeddings": True,
    },
    "mistral": {
        **BASE,
        "num_hidden_layers": 4,
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "head_dim": 16,
        "sliding_window": None,
        "rope_theta": 10000.0,
    },
    "glm4": {
        **BASE,
        "num_hidden_layers": 4,
        "model_type": "glm4",
        "architectures": ["Glm4ForCausalLM"],
        "head_dim": 16,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "rope_theta": 10000.0,
    },
}
LATENTS = {
    **BASE,
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "num_experts_per_tok": 4,
    "n_routed_experts": 8,
    "moe_intermediate_size": 32,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-6,
}
# Latent attention with and without a latent for queries, with yarn and plainly rotated; groups of experts or none.
MORE_MODELS |= {
    "deepseek_v3": {
        **LATENTS,
        "q_lora_rank": 24,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 4,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
        },
    },
    "deepseek_v3_plain": {
        **LATENTS,
        "q_lora_rank": None,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 2,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    },
}


def write_model(folder: Path, config: dict, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """A Hugging Face folder with random weights, without a tokenizer."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    layout = Layout(config, Topology())
    for name, shape in layout.hf_tensors.items():
        noise = torch.randn(shape, generator=generator) * 0.1
        tensors[name] = (noise + 1.0 if "norm" in name else noise).to(
            getattr(torch, layout.hf_dtype(name, _name(dtype)))
        )
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "dtype": _name(dtype)}))
    return folder


def _name(dtype: torch.dtype) -> str:
    return str(dtype).split(".")[1]


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    more_experts = {"qwen3_moe_top4": {**MORE_MODELS["qwen3_moe"], "num_experts_per_tok": 4}}
    configs = {**MODELS, **MORE_MODELS, **more_experts}
    return {name: str(write_model(root / name, config, seed)) for seed, (name, config) in enumerate(configs.items())}


@pytest.fixture(scope="session")
def rows() -> list[dict]:
    """Prompts and responses: three groups with a common prompt, one lone response, lengths from 1 to 40."""
    generator = torch.Generator().manual_seed(7)

    def tokens(count: int) -> list[int]:
        return torch.randint(0, 131, (count,), generator=generator).tolist()

    found = []
    for prompt_length, lengths in ((5, (1, 2, 3)), (38, (4, 40)), (12, (6, 6, 9, 1)), (3, (17,))):
        prompt = tokens(prompt_length)
        found += [{"prompt": prompt, "response": tokens(length)} for length in lengths]
    return found


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "run_ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.processes)


class Ranks:
    """``world`` worker processes in one process group, which take one request after another."""

    def __init__(self, world: int, folder: Path) -> None:
        self._logs = [folder / f"log-{rank}.txt" for rank in range(world)]
        self._processes = []
        for rank, log in enumerate(self._logs):
            with log.open("w") as stderr:
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, str(WORKER), str(rank), str(world), str(folder)],
                        env={**os.environ, "OMP_NUM_THREADS": "1"},
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=stderr,
                        text=True,
                    )
                )

    def run(self, case: str, folder: Path, arguments: dict) -> list:
        (folder / "request.json").write_text(json.dumps({"case": case, "arguments": arguments}))
        watchdog = threading.Timer(TIMEOUT, self.close)
        watchdog.start()
        try:
            for process in self._processes:
                process.stdin.write(f"{folder}\n")
                process.stdin.flush()
            for process, log in zip(self._processes, self._logs, strict=True):
                assert "done\n" in iter(process.stdout.readline, ""), f"{case}:\n{log.read_text()[-6000:]}"
        finally:
            watchdog.cancel()
        return [torch.load(folder / f"result-{rank}.pt", weights_only=False) for rank in range(len(self._processes))]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


@pytest.fixture(scope="session")
def run_ranks(tmp_path_factory):
    """run_ranks(case, world, **arguments): what `worker.py`'s function returns on each rank. Processes are kept."""
    kept: dict[int, Ranks] = {}

    def run(case: str, world: int, **arguments) -> list:
        folder = tmp_path_factory.mktemp(case)
        if world not in kept:
            kept[world] = Ranks(world, folder)
        try:
            return kept[world].run(case, folder, arguments)
        except BaseException:
            kept.pop(world).close()
            raise

    yield run
    for ranks in kept.values():
        ranks.close()
