"""Adapters in every kind of layout compute what Hugging Face computes with the adapters merged into the weights.

Hugging Face gives the gradient of each merged weight, and the product rule those of the two factors:
``scale * grad @ down.T`` and ``scale * up.T @ grad``. `assert_computed` says how exactly all of it agrees.
"""

from pathlib import Path

import pytest
import torch
from family_layouts import (
    DENSE_LAYOUTS,
    INTERLEAVED,
    SPARSE_LAYOUTS,
    WHOLE,
    assert_computed,
    assert_same_weights,
    cases_of,
    reference,
)
from random_adapters import ALPHA, RANK, adapted_reference, adapters_of, write_adapters
from safetensors.torch import load_file

from megasync.config.schema import LoraConfig, TrainerConfig
from megasync.errors import ConfigError
from megasync.layout.adapter import adapter_layout
from megasync.layout.layout import Layout
from megasync.layout.model_files import read_hf_config
from megasync.layout.shards import assemble, export_checkpoint
from megasync.layout.topology import Topology
from megasync.offline.merge import export_model

EXPERT_LAYOUTS = {
    1: {"one": {}, "recompute": {"recompute": "full", "tokens_per_microbatch": 64}},
    2: {
        "tp2-ep2-etp1": SPARSE_LAYOUTS[2]["tp2-ep2-etp1"],
        "ep2": {"data_parallel": 2, "expert_parallel": 2, "tokens_per_microbatch": 64, **WHOLE},
        "ep2-distributed": {"data_parallel": 2, "expert_parallel": 2},
        "pp2-vpp2": {**INTERLEAVED, "recompute": "full"},
    },
}
# Ranks that share an expert: those of one sequence, or of several, beside other copies of it and beside other experts.
CUT_EXPERT_LAYOUTS = {
    1: EXPERT_LAYOUTS[1],
    2: {
        **EXPERT_LAYOUTS[2],
        "tp2-etp2": {"tensor_parallel": 2, "sequence_parallel": True, "recompute": "full"},
        "dp2-etp2": {"data_parallel": 2, "expert_tensor_parallel": 2, "tokens_per_microbatch": 64, **WHOLE},
    },
    4: {
        "tp2-dp2-ep2-etp2": SPARSE_LAYOUTS[4]["tp2-dp2-ep2-etp2"],
        "dp4-etp2-distributed": {"data_parallel": 4, "expert_tensor_parallel": 2},
    },
}
LAYOUTS = {
    1: {**DENSE_LAYOUTS[1], "recompute": EXPERT_LAYOUTS[1]["recompute"]},
    2: {
        **DENSE_LAYOUTS[2],
        "tp2": {"tensor_parallel": 2},
        "cp2": {"context_parallel": 2, "tokens_per_microbatch": 32, **WHOLE},
    },
}
FAMILIES = {
    "mistral": LAYOUTS,
    "glm4": LAYOUTS,
    "gemma3_text": {2: {"tp2-sp": LAYOUTS[2]["tp2-sp"]}, 1: {"one": {}}},
    "qwen3_moe": CUT_EXPERT_LAYOUTS,
    "deepseek_v3": {world: CUT_EXPERT_LAYOUTS[world] for world in (1, 2)},
    "minimax_m2": EXPERT_LAYOUTS,
    "gpt_oss": EXPERT_LAYOUTS,
    "qwen3_next": EXPERT_LAYOUTS,
    # All but its experts, which are in tensors of all of them.
    "llama4_text": {1: {"one": {}}, 2: {"tp2-ep2-etp1": EXPERT_LAYOUTS[2]["tp2-ep2-etp1"]}},
}
CASES = cases_of(FAMILIES)


@pytest.fixture(scope="module")
def folders(models, tmp_path_factory):
    """family -> (PEFT folder of random adapters, folder of the model with these merged)."""
    return {family: write_adapters(models[family], tmp_path_factory.mktemp(family)) for family in FAMILIES}


@pytest.fixture(scope="module")
def results(run_ranks, models, rows, folders, tmp_path_factory):
    saved, results = tmp_path_factory.mktemp("checkpoints"), {}
    for family, worlds in FAMILIES.items():
        lora = {"rank": RANK, "alpha": ALPHA, "path": str(folders[family][0])}
        for world, layouts in worlds.items():
            options = {label: {**layout, "lora": lora} for label, layout in layouts.items()}
            mine = {family: models[family]}
            ranks = run_ranks("layouts", world, models=mine, rows=rows, layouts=options, folder=str(saved))
            results |= {key: [rank[key] for rank in ranks] for key in ranks[0]}
    return results, saved


@pytest.fixture(scope="module")
def expected(folders, rows):
    """family -> (log-probs, loss, gradients of the factors by their names)."""
    return {family: adapted_reference(*folder, rows) for family, folder in folders.items()}


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_a_layout_computes_what_the_merged_model_does_and_serves_it(results, folders, expected, models, family, layout):
    options, ranks = CASES[family, layout], results[0][family, layout]
    adapters = adapters_of(models[family], options)
    assert_computed(ranks, expected[family], adapters, options)
    for name, weight in load_file(folders[family][1] / "model.safetensors").items():
        served = assemble(name, adapters.base, lambda rank, param: ranks[rank]["served"][param])
        torch.testing.assert_close(served, weight, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("family", "layout"), [case for case in CASES if case[1] != "one"])
def test_adapters_after_a_step_are_those_of_one_rank(results, expected, models, family, layout, tmp_path):
    """As PEFT folders."""
    for label in ("one", layout):
        export_checkpoint(results[1] / f"{family}-{label}", models[family], tmp_path / label)
    assert_same_weights(tmp_path / "one", tmp_path / layout, expected[family][2])
    one, other = (results[0][family, label][0]["after"] for label in ("one", layout))
    torch.testing.assert_close(other, one, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["mistral", "qwen3_moe"])
def test_a_merged_export_scores_as_the_trained_model(results, models, rows, family, tmp_path):
    label = "tp2-sp" if family == "mistral" else "tp2-ep2-etp1"
    export_model(results[1] / f"{family}-{label}", models[family], tmp_path / "merged")
    logprobs, *_ = reference(tmp_path / "merged", rows)
    torch.testing.assert_close(results[0][family, label][0]["after"], logprobs, atol=1e-5, rtol=0)


@pytest.mark.matrix
def test_peft_computes_the_same_from_the_same_folder(folders, models, expected, rows):
    """From the folder that ranks read, and from one that they wrote (their export has the same form)."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(models["mistral"], dtype=torch.float32, attn_implementation="eager")
    model = peft.PeftModel.from_pretrained(base, folders["mistral"][0])
    results = []
    with torch.no_grad():
        for row in rows:
            ids = torch.tensor([row["prompt"] + row["response"]])
            log_p = model(ids).logits[0, len(row["prompt"]) - 1 : -1].log_softmax(-1)
            results.append(log_p.gather(1, ids[0, len(row["prompt"]) :, None])[:, 0])
    torch.testing.assert_close(torch.cat(results), expected["mistral"][0], atol=1e-5, rtol=0)


# With the usual epsilon, Adam makes whole steps of rounding errors where a gradient is zero.
STEPS, LR, BETAS, EPS, DECAY = 3, 1e-2, (0.9, 0.99), 1e-3, 0.01
FIT = {
    2: {
        "tp2-etp1": {"tensor_parallel": 2, "sequence_parallel": True, "expert_tensor_parallel": 1},
        "tp2-etp2": {"tensor_parallel": 2, "sequence_parallel": True},
    },
    4: {"tp2-dp2-etp2-distributed": {"tensor_parallel": 2, "sequence_parallel": True, "data_parallel": 2}},
}


@pytest.fixture(scope="module")
def fitted(run_ranks, models, rows, folders, tmp_path_factory):
    """layout -> losses of steps on all ranks, and the PEFT folder after them."""
    saved, results = tmp_path_factory.mktemp("fitted"), {}
    lora = {"rank": RANK, "alpha": ALPHA, "path": str(folders["qwen3_moe"][0])}
    optimizer = {"lr": LR, "betas": list(BETAS), "eps": EPS, "weight_decay": DECAY, "clip_grad": 0.0}
    for world, layouts in FIT.items():
        given = {label: {**options, "lora": lora} for label, options in layouts.items()}
        arguments = {"layouts": given, "folder": str(saved), "steps": STEPS, "optimizer": optimizer}
        ranks = run_ranks(fit, world, model=models["qwen3_moe"], rows=rows, **arguments)
        for label in layouts:
            export_checkpoint(saved / label, models["qwen3_moe"], saved / f"{label}-peft")
            results[label] = [rank[label] for rank in ranks], saved / f"{label}-peft"
    return results


@pytest.fixture(scope="module")
def fitted_by_peft(models, rows, folders):
    """Losses of the same steps, and the factors after them."""
    peft = pytest.importorskip("peft")
    from unfused_experts import UnfusedModel

    base = UnfusedModel(models["qwen3_moe"])
    model = peft.PeftModel.from_pretrained(base, folders["qwen3_moe"][0], is_trainable=True)
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    adam = torch.optim.AdamW(trained.values(), lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    tokens, losses = sum(len(row["response"]) for row in rows), []
    for _ in range(STEPS):
        loss = 0.0
        for row in rows:
            ids = torch.tensor([row["prompt"] + row["response"]])
            log_p = model.base_model(ids)[0, len(row["prompt"]) - 1 : -1].log_softmax(-1)
            chosen = log_p.gather(1, ids[0, len(row["prompt"]) :, None])
            loss = loss - (chosen.sum() - 0.1 * (log_p.exp() * log_p).sum()) / tokens
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    return losses, {name.replace(".default.", "."): param.detach() for name, param in trained.items()}


@pytest.mark.parametrize("layout", [label for layouts in FIT.values() for label in layouts])
def test_adapters_of_experts_after_some_steps_are_those_of_peft(fitted, fitted_by_peft, layout):
    losses, factors = fitted_by_peft
    assert losses[-1] < losses[0] - 0.1
    ranks, folder = fitted[layout]
    for rank in ranks:
        assert rank == pytest.approx(losses, abs=1e-5)
    exported = load_file(folder / "adapter_model.safetensors")
    assert exported.keys() == factors.keys() and any(".experts." in name for name in factors)
    for name, factor in factors.items():
        torch.testing.assert_close(exported[name], factor, atol=1e-5, rtol=0, msg=f"{name} differs")


def refusal(path, **lora):
    trainer = TrainerConfig(lora=LoraConfig(rank=RANK, **lora))
    with pytest.raises(ConfigError) as refused:
        adapter_layout(Layout(read_hf_config(path), Topology()), trainer)
    return str(refused.value)


def test_targets_that_do_not_fit_are_refused_by_name(models):
    text = refusal(models["mistral"], targets=["o_proj", "wo"])
    assert "trainer.lora.targets names 'wo'" in text and "o_proj" in text
    assert "names q_proj of q_proj, k_proj, v_proj" in refusal(models["mistral"], targets=["q_proj"])


def fit(model, rows, layouts, folder, steps, optimizer, dtype="float32"):
    """Losses of some steps on the same rows in each layout, and the checkpoint after them."""
    from rank_engines import close, cross_entropy, make_engine, to_samples

    results = {}
    for label, trainer in layouts.items():
        engine = make_engine(model, trainer, optimizer, dtype)
        samples = to_samples(rows)
        loss = cross_entropy(sum(len(sample.scored) for sample in samples))
        losses = []
        for step in range(1, steps + 1):
            losses.append(engine.forward_backward(engine.local_batch(samples), loss)["loss"])
            engine.update(step, loss_is_finite=True)
        engine.save(Path(folder) / label)
        results[label] = losses
        close(engine)
    return results
