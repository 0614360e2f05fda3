"""The fields of `trainer.megatron`: which may be set, what is refused, and how values are converted."""

import re
from dataclasses import fields
from fnmatch import filter as matching
from pathlib import Path

import pytest

from megasync.config import megatron_options
from megasync.config.megatron_options import FIELDS, SINCE_0_19, check_megatron, converted, deciding_keys, types_of
from megasync.errors import ConfigError
from megasync.planning.megatron_page import PAGE, page

# The other version that is supported, where the rehearsal has installed it.
OTHER = Path(__file__).parents[2] / ".venv/rehearsal/megatron-core-0.19.2/megatron/core"
SOURCES = {
    "model": ("model_parallel_config.py", "transformer/transformer_config.py"),
    "ddp": ("distributed/distributed_data_parallel_config.py",),
    "optimizer": ("optimizer/optimizer_config.py",),
}


def installed() -> dict[str, dict[str, object]]:
    """The fields of Megatron's classes with their types, by table."""
    from megasync.device import import_megatron_uncompiled

    import_megatron_uncompiled()
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    classes = (MLATransformerConfig, DistributedDataParallelConfig, OptimizerConfig)
    return {table: {item.name: item.type for item in fields(cls)} for table, cls in zip(SOURCES, classes, strict=True)}


def declared(table: str) -> set[str]:
    """The fields that the sources of the other version declare."""
    return {name for file in SOURCES[table] for name in re.findall(r"^    (\w+): ", (OTHER / file).read_text(), re.M)}


def test_the_page_is_up_to_date():
    """`python -m megasync.planning.megatron_page` updates it."""
    assert page() == PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("table", FIELDS)
def test_megatron_has_each_field_that_may_be_set(table):
    types, megatrons = types_of(table), installed()[table]
    assert types.keys() - megatrons.keys() == types.keys() & {*SINCE_0_19}
    for name in types.keys() & megatrons.keys():
        if types[name] in (bool, int, float, str):
            assert megatrons[name] in (types[name], types[name] | None), name
    if OTHER.is_dir():
        assert types.keys() <= declared(table)


def test_keys_decide_fields_that_exist_and_that_may_not_be_set():
    known = {name for table in installed().values() for name in table}
    if OTHER.is_dir():
        known |= {name for table in SOURCES for name in declared(table)}
    for key, names in deciding_keys().items():
        for name in names:
            assert not any(matching(types_of(table), name) for table in FIELDS), (key, name)
            assert matching(known, name) or not OTHER.is_dir(), (key, name)


@pytest.mark.parametrize(
    ("table", "values", "message"),
    [
        ("model", {"context_parallel_size": 2}, "context_parallel_size cannot be set: set trainer.context_parallel "),
        ("model", {"activation_func": "relu"}, r"activation_func cannot be set: .*config\.json.*remove it"),
        ("model", {"tp_comm_split_ag": True}, r"set trainer\.tp_comm_overlap instead"),
        ("model", {"cuda_graph_impl": "local"}, r"set trainer\.cuda_graphs instead"),
        ("model", {"atention_backend": "flash"}, "did you mean 'attention_backend'"),
        ("model", {"attention_backend": "fast"}, "attention_backend=fast has the wrong type; expected flash or"),
        ("model", {"deterministic_mode": 1}, "deterministic_mode=1 has the wrong type; expected true or false"),
        ("model", {"moe_router_dtype": "bf16"}, "moe_router_dtype=bf16 .*expected fp32 or fp64 or null"),
        ("model", {"offload_modules": ["a", 1]}, "offload_modules"),
        ("ddp", {"bucket_size": 1.5}, "bucket_size=1.5 has the wrong type; expected a whole number or null"),
        ("ddp", {"bucket_size": True}, "bucket_size=true has the wrong type"),
        ("ddp", {"overlap_param_gather": True}, "set trainer.overlap_param_gather instead"),
        ("optimizer", {"exp_avg_dtype": "bfloat16"}, "set trainer.optimizer.exp_avg_dtype instead"),
        ("optimizer", {"main_params_dtype": "float16"}, "main_params_dtype cannot be set"),
        ("optimizer", {"optimizer_cpu_offload": True}, "set trainer.optimizer.offload instead"),
    ],
)
def test_a_refused_field_is_named_with_the_reason(table, values, message):
    with pytest.raises(ConfigError, match=rf"trainer\.megatron\.{table}\..*{message}"):
        check_megatron({table: values})


def test_a_field_of_the_newer_megatron_needs_it(monkeypatch):
    values = {"ddp": {"num_buckets": 3}}
    monkeypatch.setattr(megatron_options, "newer_megatron", lambda: True)
    check_megatron(values)
    monkeypatch.setattr(megatron_options, "newer_megatron", lambda: False)
    with pytest.raises(ConfigError, match=r"ddp\.num_buckets needs megatron-core 0\.19"):
        check_megatron(values)


def test_sound_values_pass_and_become_megatrons():
    from megatron.core.transformer.enums import AttnBackend

    values = {"attention_backend": "fused", "moe_z_loss_coeff": 1, "offload_modules": ["core_attn"]}
    check_megatron({"model": values, "ddp": {"bucket_size": None}, "optimizer": {}})
    assert converted("model", values) == values | {"attention_backend": AttnBackend.fused}
    assert converted("ddp", {"param_name_patterns_for_fp32_local_accumulation": ["a"]}) == {
        "param_name_patterns_for_fp32_local_accumulation": ("a",)
    }
