"""Options of the configuration reach Megatron's objects."""

import pytest
import torch

from megasync.config.schema import MegatronConfig, ModelConfig, TrainerConfig
from megasync.device import Device
from megasync.errors import ConfigError
from megasync.trainer.learner import MegatronLearner
from megasync.trainer.model import transformer_config


def engine(model, **options):
    return MegatronLearner(ModelConfig(path=model), TrainerConfig(**options), Device("cpu"), 0)


def built(model, **options):
    made = engine(model, **options)
    return transformer_config(made.layout, made.trainer_config, made.device, torch.float32)


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({}, {"recompute_granularity": None, "gradient_accumulation_fusion": False}),
        ({"recompute": "full"}, {"recompute_method": "uniform", "recompute_num_layers": 1}),
        ({"recompute": "full", "recompute_layers": 2}, {"recompute_method": "block", "recompute_num_layers": 2}),
        (
            {"recompute": "selective", "recompute_modules": ["mlp"]},
            {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
        ),
        ({"megatron": MegatronConfig(model={"deterministic_mode": True})}, {"deterministic_mode": True}),
        # A value that megasync would set otherwise.
        ({"megatron": MegatronConfig(model={"batch_p2p_comm": False})}, {"batch_p2p_comm": False}),
    ],
)
def test_options_of_the_model(models, monkeypatch, options, fields):
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    config = built(models["llama"], **options)
    assert {name: getattr(config, name) for name in fields} == fields


def test_an_unknown_field_is_refused_before_anything_is_built(models):
    with pytest.raises(ConfigError, match=r"trainer\.megatron\.model\.batch_p2p_com cannot be set.*'batch_p2p_comm'"):
        engine(models["llama"], megatron=MegatronConfig(model={"batch_p2p_com": False}))


def test_what_megatron_refuses_is_a_configuration_error(models):
    table = MegatronConfig(model={"cpu_offloading": True, "cpu_offloading_num_layers": 99})
    with pytest.raises(ConfigError, match="Megatron refuses the options of trainer"):
        built(models["llama"], megatron=table)
