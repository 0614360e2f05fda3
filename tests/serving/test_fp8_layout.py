"""Values and scales of block FP8 get into SGLang's own model classes, latent attention and experts included."""

import json

import pytest
from random_models import MODELS, MORE_MODELS

from megasync.lab.engine_blueprint import engine_ranks
from megasync.lab.layout_check import check_layout
from megasync.layout.topology import Topology

pytestmark = [pytest.mark.processes, pytest.mark.matrix]

BLOCK = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
SIZES = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 64, "vocab_size": 128}
LATENT = {
    "q_lora_rank": 64,
    # With the rotary part the rows of a projection end within a block.
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}


@pytest.mark.parametrize(
    ("family", "sizes"), [("deepseek_v3", LATENT), ("qwen3_moe", {"head_dim": 32, "mlp_only_layers": []})]
)
def test_a_trainer_reaches_every_value_and_scale(tmp_path, family, sizes):
    config = (MODELS | MORE_MODELS)[family] | SIZES | sizes | {"num_hidden_layers": 4, "quantization_config": BLOCK}
    (tmp_path / "config.json").write_text(json.dumps(config))
    topology = Topology(tensor=2, pipeline=2, data=1, expert=2, expert_tensor=1)

    def ranks(dtype, specs):
        return engine_ranks(tmp_path, 2, dtype, "cpu", specs, fp8=True)

    report = check_layout(tmp_path, topology, "local", "bfloat16", 1, True, ranks, fp8=True)
    assert report.problems == () and report.ratio == 1.0
