"""The fields of `trainer.megatron`: what is refused, how values are converted, and the page that lists them."""

from dataclasses import fields
from importlib.metadata import version
from pathlib import Path

import pytest

from megasync.config.load import schema_keys
from megasync.config.megatron_options import (
    CLASSES,
    KEYS,
    PAGE,
    REASONS,
    check_megatron,
    converted,
    decided,
    installed_root,
    megatron_fields,
    page,
)
from megasync.errors import ConfigError

ROOT = installed_root()
OTHER = Path(__file__).parents[2] / ".venv/rehearsal/megatron-core-0.19.2/megatron/core"


def test_the_page_is_up_to_date():
    """`python -m megasync.config.megatron_options` updates it."""
    assert page(ROOT, version("megatron-core")) == PAGE.read_text(encoding="utf-8")


def test_the_parsed_fields_are_those_of_the_classes():
    from megasync.device import import_megatron_uncompiled

    import_megatron_uncompiled()
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    parsed = {table: set(megatron_fields(table, ROOT)) for table in (*CLASSES, "latent")}
    model = {item.name for item in fields(TransformerConfig) if not item.name.startswith("_")}
    assert parsed["model"] == model
    latent = {item.name for item in fields(MLATransformerConfig) if not item.name.startswith("_")}
    assert parsed["latent"] == latent - model
    assert parsed["ddp"] == {item.name for item in fields(DistributedDataParallelConfig)}
    assert parsed["optimizer"] == {item.name for item in fields(OptimizerConfig)}


def test_deciding_keys_exist_and_no_field_is_decided_twice():
    keys = dict(schema_keys())
    for table in CLASSES:
        assert KEYS[table].keys() <= keys.keys()
        names = [name for words in (*KEYS[table].values(), *REASONS[table].values()) for name in words.split()]
        assert len(names) == len(set(names))


@pytest.mark.parametrize("table", CLASSES)
def test_decided_fields_exist_in_a_supported_version(table):
    known = set()
    for root in (ROOT, OTHER) if OTHER.is_dir() else (ROOT,):
        known |= set(megatron_fields(table, root)) | (
            set(megatron_fields("latent", root)) if table == "model" else set()
        )
    missing = decided(table).keys() - known
    # Without the other version, only its own fields may be missing.
    assert not missing if OTHER.is_dir() else len(missing) < 50


@pytest.mark.parametrize(
    ("table", "values", "message"),
    [
        ("model", {"context_parallel_size": 2}, "context_parallel_size cannot be set"),
        ("model", {"activation_func": "relu"}, "activation_func cannot be set: config.json"),
        ("model", {"tp_comm_overlap": True}, r"set trainer\.tp_comm_overlap instead"),
        ("model", {"cuda_graph_impl": "local"}, r"set trainer\.cuda_graphs instead"),
        ("model", {"atention_backend": "flash"}, "did you mean 'attention_backend'"),
        ("model", {"attention_backend": "fast"}, "attention_backend=fast has the wrong type; Megatron takes flash or"),
        ("model", {"deterministic_mode": 1}, "deterministic_mode=1 has the wrong type; Megatron takes true or false"),
        ("model", {"moe_router_dtype": "bf16"}, r"moe_router_dtype=bf16.*one of \['fp32', 'fp64'\], null"),
        ("model", {"offload_modules": ["a", 1]}, "offload_modules"),
        ("ddp", {"bucket_size": 1.5}, "bucket_size=1.5 has the wrong type; Megatron takes a whole number, null"),
        ("ddp", {"bucket_size": True}, "bucket_size=true has the wrong type"),
        ("ddp", {"overlap_param_gather": True}, "set trainer.overlap_param_gather instead"),
        ("ddp", {"align_param_gather": True}, "weight sync reads all parameters"),
        ("optimizer", {"exp_avg_dtype": "bfloat16"}, "set trainer.optimizer.exp_avg_dtype instead"),
        ("optimizer", {"main_params_dtype": "float16"}, "megasync keeps main weights and gradients in float32"),
        ("optimizer", {"optimizer_cpu_offload": True}, "set trainer.optimizer.offload instead"),
    ],
)
def test_a_refused_field_is_named_with_the_reason(table, values, message):
    with pytest.raises(ConfigError, match=rf"trainer\.megatron\.{table}\..*{message}"):
        check_megatron({table: values}, latent=False)


def test_sound_values_pass_and_become_megatrons():
    from megatron.core.transformer.enums import AttnBackend

    values = {"attention_backend": "fused", "moe_z_loss_coeff": 1, "offload_modules": ["core_attn"]}
    check_megatron({"model": values, "ddp": {"bucket_size": None}, "optimizer": {}}, latent=False)
    assert converted("model", values) == values | {"attention_backend": AttnBackend.fused}
