"""Every family in each kind of layout, and what Hugging Face computes for it."""

import json
from pathlib import Path

import pytest
import torch
from random_models import ALIASES
from safetensors.torch import load_file

from megasync.config.schema import TrainerConfig
from megasync.layout.layout import Layout
from megasync.layout.model_files import read_hf_config
from megasync.layout.shards import assemble
from megasync.layout.topology import Topology

WHOLE = {"distributed_optimizer": False}
# Microbatches of one length, which the longest of `trainer_ranks.rows` fits.
PADDED = {"tokens_per_microbatch": 96, "pad_microbatches": True}
INTERLEAVED = {"pipeline_parallel": 2, "virtual_pipeline": 2, "tokens_per_microbatch": 64}
SPARSE_LAYOUTS = {
    1: {"one": {}},
    2: {
        "ep2": {"data_parallel": 2, "expert_parallel": 2, "tokens_per_microbatch": 64, **WHOLE},
        "ep2-distributed": {"data_parallel": 2, "expert_parallel": 2},
        "dp2-distributed": {"data_parallel": 2},
        "tp2-ep2-etp1": {
            "tensor_parallel": 2,
            "sequence_parallel": True,
            "expert_parallel": 2,
            "expert_tensor_parallel": 1,
            "recompute": "full",
            **PADDED,
        },
        "tp2-etp1": {"tensor_parallel": 2, "sequence_parallel": True, "expert_tensor_parallel": 1},
        "pp2-vpp2": INTERLEAVED,
    },
    4: {
        "tp2-dp2-ep2-etp2": {
            "tensor_parallel": 2,
            "data_parallel": 2,
            "sequence_parallel": True,
            "expert_parallel": 2,
            "tokens_per_microbatch": 64,
            **WHOLE,
        },
        "tp2-dp2-ep2-etp1": {
            "tensor_parallel": 2,
            "data_parallel": 2,
            "sequence_parallel": True,
            "expert_parallel": 2,
            "expert_tensor_parallel": 1,
        },
        "dp2-ep2-pp2-vpp2": {"data_parallel": 2, "expert_parallel": 2, **INTERLEAVED, **PADDED, **WHOLE},
    },
}
DENSE_LAYOUTS = {
    1: {"one": {}},
    2: {
        "tp2-sp": {"tensor_parallel": 2, "sequence_parallel": True},
        "dp2-distributed": {"data_parallel": 2},
        "pp2-vpp2": INTERLEAVED,
    },
}
LATENT_LAYOUTS = {
    1: {"one": {}, "small-microbatches": {"tokens_per_microbatch": 64}},
    2: {
        "tp2-sp": {"tensor_parallel": 2, "sequence_parallel": True, "recompute": "full"},
        "tp2-ep2-etp1": SPARSE_LAYOUTS[2]["tp2-ep2-etp1"],
        "ep2": SPARSE_LAYOUTS[2]["ep2"],
        "ep2-distributed": SPARSE_LAYOUTS[2]["ep2-distributed"],
        "pp2-vpp2": INTERLEAVED,
    },
}
# Biases of experts are not split.
WHOLE_EXPERT_LAYOUTS = {
    1: LATENT_LAYOUTS[1],
    2: {
        "tp2-etp1": {**SPARSE_LAYOUTS[2]["tp2-etp1"], "recompute": "full"},
        **{label: LATENT_LAYOUTS[2][label] for label in ("tp2-ep2-etp1", "ep2", "ep2-distributed", "pp2-vpp2")},
    },
}
# For what differs from another family in nothing that is split.
ONE_RANK = {1: {"one": {}}}
FAMILIES = {
    "qwen3_moe": SPARSE_LAYOUTS,
    "qwen2_moe": SPARSE_LAYOUTS,
    "mistral": DENSE_LAYOUTS,
    "glm4": DENSE_LAYOUTS,
    "gemma3_text": DENSE_LAYOUTS,
    "gemma3": DENSE_LAYOUTS,
    "deepseek_v3": LATENT_LAYOUTS,
    "deepseek_v3_plain": LATENT_LAYOUTS,
    "kimi_k2": ONE_RANK,
    "glm4_moe": LATENT_LAYOUTS,
    "glm4_moe_plain": ONE_RANK,
    "minimax_m2": LATENT_LAYOUTS,
    "gpt_oss": WHOLE_EXPERT_LAYOUTS,
    "qwen3_next": LATENT_LAYOUTS,
    "qwen3_5_text": ONE_RANK,
    "qwen3_5": ONE_RANK,
    "llama4_text": LATENT_LAYOUTS,
    "llama4_text_plain": ONE_RANK,
    "llama4": ONE_RANK,
    "qwen3_5_moe": LATENT_LAYOUTS,
}


def cases_of(families):
    """(family, layout) -> its options, from family -> ranks -> layout -> options."""
    return {
        (family, label): options for family, w in families.items() for ls in w.values() for label, options in ls.items()
    }


def assert_computed(ranks, expected, layout, options):
    """What `rank_engines.layouts` returned on each rank is what Hugging Face computes, (log-probs, loss, gradients).

    Float32. Log-probs and losses agree to 1e-5, gradients to 1e-5 plus 1e-4 of their size, norms to 1e-4 of theirs.
    """
    logprobs, loss, gradients = expected
    for rank in ranks:
        # Machines round differently: of log-probs around 5, some differ by 1.1e-5.
        torch.testing.assert_close(rank["scores"], logprobs, atol=1e-5, rtol=1e-5)
        assert rank["loss"] == pytest.approx(loss, abs=1e-5)
        assert rank["tokens"] == len(logprobs)
        assert rank["grad_norm"] == pytest.approx(norm(gradients), rel=1e-4)
        assert torch.equal(rank["after"], ranks[0]["after"])
    # With the distributed optimizer, each data-parallel rank has only a part of the gradients' sum.
    copies = options.get("data_parallel", 1) * options.get("context_parallel", 1)
    if copies > 1 and not options.items() >= WHOLE.items():
        return
    assert layout.hf_tensors.keys() - gradients.keys() == biases(layout)
    for name, grad in gradients.items():
        found = assemble(name, layout, lambda rank, param: ranks[rank]["gradients"][param])
        wanted = torch.zeros_like(found) if grad is None else grad
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


def assert_same_weights(one, other, gradients):
    """Folders of two layouts have the same weights after a step of 1e-3; returns whether a weight went either way.

    Adam's first step is nearly the sign of the gradient: elements whose gradient is all rounding go either way.
    """
    (weights,), (others,) = ([load_file(file) for file in folder.glob("*.safetensors")] for folder in (one, other))
    assert weights.keys() == others.keys() >= gradients.keys()
    either = False
    for name, weight in weights.items():
        difference = (others[name] - weight).abs()
        if name not in gradients:
            assert (difference == 0).all(), name
            continue
        assert difference.max() < 2.1e-3, name
        assert (difference[gradients[name].abs() > 1e-4] < 1e-5).all(), name
        either = either or bool((difference > 1e-5).any())
    return either


def reference(path, rows, balance=0.0, squares=0.0):
    """With ``balance``, the loss has that much of Switch Transformer's load-balancing loss, summed over layers.

    With ``squares`` also that much of the z-loss of routers, equation 5 of https://arxiv.org/abs/2202.08906.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    values = json.loads((Path(path) / "config.json").read_text())
    kind = values.pop("model_type")
    config = AutoConfig.for_model(ALIASES.get(kind, kind), **values)
    kind = AutoModelForImageTextToText if "vision_config" in values else AutoModelForCausalLM
    model = kind.from_pretrained(path, config=config, dtype=torch.float32, attn_implementation="eager")
    tokens = sum(len(row["response"]) for row in rows)
    logprobs, loss = [], 0.0
    for row in rows:
        ids = torch.tensor([row["prompt"] + row["response"]])
        output = model(ids, output_router_logits=True) if balance else model(ids)
        logits = output.logits[0, len(row["prompt"]) - 1 : -1]
        if "support" in row:
            outside = torch.tensor([[token not in ids for token in range(logits.shape[1])] for ids in row["support"]])
            # Without a probability, but with a finite logarithm for the entropy.
            logits = logits.masked_fill(outside, -1e9)
        log_p = logits.log_softmax(-1)
        logprobs.append(log_p.gather(1, ids[0, len(row["prompt"]) :, None])[:, 0])
        entropy = -(log_p.exp() * log_p).sum(-1)
        loss = loss - (logprobs[-1].sum() + 0.1 * entropy.sum()) / tokens
        if balance:
            # The last token is never fed to the engine's model.
            loss = loss + balance * sum(switch_loss(logits[:-1], 2) for logits in output.router_logits)
            loss = loss + squares * sum(logits[:-1].logsumexp(-1).square().mean() for logits in output.router_logits)
    loss.backward()
    return torch.cat(logprobs).detach(), loss.item(), dict(gradients(model))


def switch_loss(logits, topk):
    """Equation 4 of https://arxiv.org/abs/2101.03961, for top-k routing: experts x sum of load share x mean weight."""
    weights = logits.softmax(-1)
    chosen = torch.zeros_like(weights).scatter(1, weights.topk(topk).indices, 1.0)
    return weights.shape[1] * (chosen.mean(0) / topk * weights.mean(0)).sum()


# Hugging Face's modules that text does not reach.
VISION = (
    "model.vision_tower.",
    "model.multi_modal_projector.",
    "model.visual.",
    "vision_model.",
    "multi_modal_projector.",
)


def gradients(model):
    """Gradients under the names of a checkpoint, where experts are apart."""
    if model.config.model_type == "minimax_m2":
        spelling = {".mlp.": ".block_sparse_moe.", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    elif model.config.model_type == "gemma3":
        spelling = {"model.language_model.": "language_model.model."}
    else:
        spelling = {}
    for name, gradient in _split_experts(model):
        if name.startswith(VISION):
            continue
        for found, own in spelling.items():
            name = name.replace(found, own)
        yield name, gradient


def _split_experts(model):
    for name, parameter in model.named_parameters():
        if model.config.model_type in ("gpt_oss", "llama4_text", "llama4", "qwen3_5_moe"):
            yield name, parameter.grad
        elif name.endswith("experts.gate_up_proj"):
            for expert, grad in enumerate(parameter.grad):
                for half, part in zip(("gate", "up"), grad.chunk(2), strict=True):
                    yield name.replace("gate_up_proj", f"{expert}.{half}_proj.weight"), part
        elif name.endswith("experts.down_proj"):
            for expert, grad in enumerate(parameter.grad):
                yield name.replace("down_proj", f"{expert}.down_proj.weight"), grad
        else:
            yield name, parameter.grad


def biases(map_):
    """Tensors without a gradient: the biases of a router's choice."""
    return {name for name in map_.hf_tensors if name.endswith("e_score_correction_bias")}


def norm(grads):
    return torch.stack([grad.square().sum() for grad in grads.values() if grad is not None]).sum().sqrt().item()


def layout_of(path, options, flavour="local"):
    return Layout(read_hf_config(path), Topology.from_config(TrainerConfig(**options)), flavour)


def assert_agrees(ranks, map_, expected):
    """Log-probs, losses, norms and gradients of ranks in float32 are those of `reference`, where they have them.

    Log-probs and losses agree to 1e-5, gradients to 1e-5 plus 1e-4 of their size, their norm to 1e-4 of its size.
    """
    logprobs, loss, gradients = expected
    gradients = {name: gradient for name, gradient in gradients.items() if gradient is not None}
    for rank in ranks:
        torch.testing.assert_close(rank["scores"], logprobs, atol=1e-5, rtol=0)
        assert rank["loss"] == pytest.approx(loss, abs=1e-5)
        assert rank["grad_norm"] == pytest.approx(norm(gradients), rel=1e-4)
    if ranks[0]["gradients"] is not None:
        assert_gradients([rank["gradients"] for rank in ranks], map_, gradients)


def assert_gradients(held, map_, expected):
    """Those of all ranks, put together; a tensor without an expected gradient has none."""
    for name in map_.hf_tensors.keys() - biases(map_):
        found = assemble(name, map_, lambda rank, param: held[rank][param])
        own = expected.get(name, torch.zeros_like(found))
        torch.testing.assert_close(found, own, atol=1e-5, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
