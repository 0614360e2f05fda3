"""Model FLOPs are those that torch counts in Hugging Face's models; the peak of a device follows from its name."""

import copy

import numpy as np
import pytest
import torch
from random_models import MODELS, MORE_MODELS
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from megasync.layout.layout import Layout
from megasync.layout.topology import Topology
from megasync.trainer.flops import ModelFlops, Work, peak_tflops
from megasync.trainer.packing import Lengths, plan_packing

TOKENS = 24
FAMILIES = {**MODELS, **{name: MORE_MODELS[name] for name in ("qwen3_moe", "qwen2_moe", "deepseek_v3", "glm4_moe")}}


def flops_of(config):
    return ModelFlops.of(Layout(config, Topology()))


def whole(tokens):
    """One sequence, each of whose tokens has a log-prob."""
    return Work(np.array([0]), np.array([0]), np.array([tokens]), tokens)


def built(config):
    torch.manual_seed(0)
    options = {**copy.deepcopy(config), "attn_implementation": "eager", "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**options), dtype=torch.float32).train()


def counted(model, backward):
    ids = torch.arange(TOKENS)[None] % 100
    with FlopCounterMode(display=False) as counter:
        logits = model(ids, use_cache=False).logits
        if backward:
            logits.square().mean().backward()
    return counter.get_total_flops()


def expected(config):
    """A forward pass in which attention computes the square, as eager attention does, in place of half of it."""
    flops = flops_of(config)
    work = whole(TOKENS)
    pairs = TOKENS * TOKENS
    assert work.pairs() == TOKENS * (TOKENS + 1) // 2
    return flops.token * TOKENS + flops.target * TOKENS + flops.pair * pairs * (flops.full + flops.limited)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_forward_pass_has_the_flops_that_torch_counts(name):
    config = FAMILIES[name]
    assert counted(built(config), backward=False) == expected(config)


@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3"])
def test_training_is_three_forward_passes(name):
    config = FAMILIES[name]
    assert counted(built(config), backward=True) == 3 * expected(config)


def test_linear_layers_of_a_gated_delta_net_have_the_flops_that_torch_counts():
    """Hugging Face computes the state in chunks, which is another algorithm; its products are batched."""
    config = MORE_MODELS["qwen3_next"]
    model = built(config)
    with FlopCounterMode(display=False) as counter:
        model(torch.arange(TOKENS)[None], use_cache=False)
    by_operation = counter.get_flop_counts()["Global"]
    linear = sum(count for operation, count in by_operation.items() if str(operation) in ("aten.mm", "aten.addmm"))
    flops, delta = flops_of(config), Layout(config, Topology()).sizes.delta
    assert flops.full == 1
    state = 2.0 * 3 * 3 * delta.values * delta.key_dim * delta.value_dim
    convolution = 2.0 * 3 * delta.conv_rows * delta.taps
    assert linear == (flops.token - state - convolution + flops.target) * TOKENS


def test_windows_limit_the_pairs_of_their_layers():
    work = whole(20)
    assert work.pairs(5) == sum(min(place, 5) for place in range(1, 21))
    assert work.pairs(100) == work.pairs() == 210
    flops = flops_of(MORE_MODELS["gpt_oss"])
    assert (flops.full, flops.limited, flops.window) == (2, 2, 5)
    difference = flops_of({**MORE_MODELS["gpt_oss"], "layer_types": ["full_attention"] * 4}).forward(work)
    assert difference - flops.forward(work) == flops.pair * 2 * (work.pairs() - work.pairs(5))


def test_chunks_limit_the_pairs_of_their_layers():
    work = whole(20)
    assert work.pairs(chunk=6) == sum(place % 6 + 1 for place in range(20))
    # A prompt of 10 tokens that is computed once, and two responses to it.
    tree = Work(np.array([10]), np.array([10, 10]), np.array([13, 15]), 0)
    computed = [*range(10), *range(10, 13), *range(10, 15)]
    assert tree.pairs(chunk=6) == sum(place % 6 + 1 for place in computed)
    flops = flops_of(MORE_MODELS["llama4_text"])
    assert (flops.full, flops.limited, flops.chunk) == (1, 3, 6)
    pairs = flops.forward(work) - flops.token * 20 - flops.target * work.targets
    assert pairs == flops.pair * (210 + 3 * work.pairs(chunk=6))


@pytest.mark.parametrize("shared", [True, False])
def test_a_shared_prompt_counts_once(shared):
    lengths = Lengths(np.array([0, 0, 1]), np.array([10, 10, 4]), np.array([3, 5, 7]))
    packing = plan_packing(lengths, ranks=1, budget=1000, attention_cost=0.1, share_prompts=shared)
    work = Work.of(packing, lengths, targets=15)
    assert work.tokens == packing.counted_tokens == (10 + 3 + 5 + 4 + 7 if shared else 13 + 15 + 11)
    of_responses = sum(range(11, 14)) + sum(range(11, 16)) + sum(range(5, 12))
    assert work.pairs() == (55 if shared else 2 * 55) + 10 + of_responses


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.0),
        ("NVIDIA GH200 480GB", 989.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA GeForce GTX 1080", None),
        ("cpu", None),
    ],
)
def test_the_peak_of_a_device_follows_from_its_name(name, peak):
    assert peak_tflops(name) == peak
