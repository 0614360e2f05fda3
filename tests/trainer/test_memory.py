"""The memory that `megasync plan` predicts for a rank is what the engine uses."""

import collections
import json
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table

from megasync.config.schema import (
    Config,
    DataConfig,
    ModelConfig,
    PromptConfig,
    RolloutConfig,
    SamplingConfig,
    TrainerConfig,
)
from megasync.layout.layout import Layout
from megasync.layout.topology import Topology
from megasync.planning.memory import checkpoint_bytes, in_flight, stage_memory

RUNS = {
    "tp2-float32": ("float32", {"tensor_parallel": 2}),
    "tp2-bfloat16": ("bfloat16", {"tensor_parallel": 2}),
    "pp2-uneven": ("bfloat16", {"pipeline_parallel": 2, "first_stage_layers": 1}),
    "dp2-replicated": ("bfloat16", {"data_parallel": 2, "distributed_optimizer": False}),
    "dp2-distributed": ("bfloat16", {"data_parallel": 2, "distributed_optimizer": True}),
    "pp2": ("float32", {"pipeline_parallel": 2}),
    "pp2-vpp2": ("float32", {"pipeline_parallel": 2, "virtual_pipeline": 2}),
    "experts": ("float32", {"data_parallel": 2, "distributed_optimizer": False}),
    "experts-top4": ("float32", {"data_parallel": 2, "distributed_optimizer": False}),
}
# Interleaved stages take a model of four layers.
MODELS = {"pp2": "mistral", "pp2-vpp2": "mistral", "experts": "qwen3_moe", "experts-top4": "qwen3_moe_top4"}
# A distributed optimizer begins each parameter at a round number of elements, and cuts where a rank's share ends.
PADDING = 0.01
TOKENS = {"prompt": 8, "response": 16}


@pytest.fixture(scope="module")
def held(run_ranks, models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    runs = {name: (model_of(models, name), *run) for name, run in RUNS.items()}
    return run_ranks(held_bytes, 2, runs=runs, **TOKENS, folder=str(folder))


def model_of(models, name):
    return models[MODELS.get(name, "qwen3")]


def configured(models, name):
    """A configuration of that run, and its layout."""
    model = model_of(models, name)
    dtype, parallel = RUNS[name]
    config = Config(
        model=ModelConfig(path=model, dtype=dtype),
        data=DataConfig(prompt=PromptConfig(max_tokens=TOKENS["prompt"])),
        rollout=RolloutConfig(sampling=SamplingConfig(max_new_tokens=TOKENS["response"])),
        trainer=TrainerConfig(**parallel, tokens_per_microbatch=sum(TOKENS.values())),
    )
    values = json.loads((Path(model) / "config.json").read_text())
    return config, Layout(values, Topology.from_config(config.trainer))


def planned(models, name, rank):
    config, layout = configured(models, name)
    return stage_memory(config, layout, 0, layout.topology.coords(rank).pp)


def planned_activations(models, name, rank):
    """What a stage saves: of the planned logits, without what only exists while the loss is computed."""
    config, layout = configured(models, name)
    columns = layout.padded_vocab // config.trainer.tensor_parallel
    head = TOKENS["response"] * (layout.sizes.hidden + columns) * {"float32": 4, "bfloat16": 2}[config.model.dtype]
    plan = planned(models, name, rank)
    return plan.activations + (head if plan.logits else 0)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", RUNS)
def test_weights_gradients_and_optimizer_are_exact(held, models, name, rank):
    real, plan = held[rank][name], planned(models, name, rank)
    assert real["weights"] == plan.weights
    padding = PADDING if name == "dp2-distributed" else 0
    for kind in ("gradients", "optimizer"):
        assert real[kind] == pytest.approx(getattr(plan, kind), rel=padding, abs=0)


@pytest.mark.parametrize("name", ["tp2-float32", "tp2-bfloat16", "dp2-replicated", "pp2", "pp2-vpp2", "experts"])
def test_activations_have_the_estimated_size(held, models, name):
    """Without fused layers more is saved, such as float32 copies in norms; never several times as much."""
    assert 1 <= held[0][name]["activations"] / planned_activations(models, name, 0) <= 2.5


@pytest.mark.parametrize("rank", [0, 1])
def test_interleaving_adds_the_activations_that_are_planned(held, models, rank):
    """Against the plain schedule of the same stages, which leaves out what the estimate of a layer leaves out."""
    plain, interleaved = (planned_activations(models, name, rank) for name in ("pp2", "pp2-vpp2"))
    expected = interleaved / plain
    assert expected > 1.2
    measured = held[rank]["pp2-vpp2"]["activations"] / held[rank]["pp2"]["activations"]
    assert measured == pytest.approx(expected, rel=0.05)


def test_each_further_expert_of_a_token_adds_the_activations_that_are_planned(held, models):
    """They include the copy of the token that is dispatched. Unfused local experts save two more of their widths."""
    two, four = (planned(models, name, 0).activations for name in ("experts", "experts-top4"))
    buffers = 2 * 3 * 48 * 4 * sum(TOKENS.values())  # of the layer that computes: nothing is saved of those
    measured = held[0]["experts-top4"]["activations"] - held[0]["experts"]["activations"]
    assert 1 <= measured / (four - two - buffers) <= 1.5


@pytest.mark.parametrize(("pipeline", "virtual"), [(1, 1), (4, 1), (2, 2), (4, 2), (4, 3), (8, 4)])
def test_microbatches_in_flight_are_those_of_megatrons_schedule(pipeline, virtual):
    """What Megatron runs before the first backward pass, and one more: counted in its own table of chunks."""
    count = 8 * pipeline
    for stage in range(pipeline):
        group = SimpleNamespace(size=lambda: pipeline, rank=lambda stage=stage: stage)
        chunks = virtual if virtual > 1 else None
        ranks = SimpleNamespace(pp_group=group, virtual_pipeline_model_parallel_size=chunks)
        warmup = get_pp_rank_microbatches(count, virtual, pipeline, p2p_communicator=ranks)[2]
        table = [chunk for _, chunk in get_schedule_table(count, virtual, pipeline)]
        expected = tuple(table[: warmup + 1].count(chunk) for chunk in range(virtual))
        assert in_flight(pipeline, virtual, stage) == expected


@pytest.mark.parametrize("name", RUNS)
def test_a_checkpoint_has_the_planned_size(held, models, name):
    """Except for headers of files and tensors and random states of ranks, which matter in such a small model."""
    planned_bytes = checkpoint_bytes(*configured(models, name))
    assert 0 <= held[0][name]["checkpoint"] - planned_bytes <= 128 * 1024


class SavedBytes:
    """Bytes of the storages that autograd keeps for backward passes at a time; ``weights`` do not count."""

    def __init__(self, weights):
        self._weights = {tensor.untyped_storage().data_ptr() for tensor in weights}
        self._uses = collections.Counter()
        self._now = self.peak = 0

    def keep(self, tensor):
        def saved():
            return tensor

        place, nbytes = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
        if place not in self._weights:
            self._count(place, nbytes, 1)
            weakref.finalize(saved, self._count, place, nbytes, -1)
        return saved

    def _count(self, place, nbytes, change):
        before, self._uses[place] = self._uses[place] > 0, self._uses[place] + change
        self._now += nbytes * ((self._uses[place] > 0) - before)
        self.peak = max(self.peak, self._now)


def held_bytes(runs, prompt, response, folder):
    """Bytes that this rank holds after a step under each of `runs` (model, dtype, layout): by kind, the most that was
    saved for backward passes at a time, and all ranks' checkpoint. A microbatch is a sequence of so many tokens; there
    is one for each data-parallel rank, and enough of them to fill a pipeline."""
    from rank_engines import Sample, close, cross_entropy, make_engine

    results = {}
    sample = Sample.of([1] * prompt, [2] * response)
    for name, (model, dtype, trainer) in runs.items():
        engine = make_engine(model, {**trainer, "tokens_per_microbatch": prompt + response}, dtype=dtype)
        count = 8 if trainer.get("pipeline_parallel", 1) > 1 else trainer.get("data_parallel", 1)
        saved = SavedBytes(engine.params().values())
        with torch.autograd.graph.saved_tensors_hooks(saved.keep, lambda saved: saved()):
            engine.forward_backward(engine.local_batch([sample] * count), cross_entropy(response))
        engine.update(1, loss_is_finite=True)
        slices = engine.optimizer.slices(engine.weights).values()
        buffers = [buffer for part in engine._models for buffer in (*part.buffers, *part.expert_parallel_buffers)]
        results[name] = {
            "weights": sum(tensor.nbytes for tensor in engine.params().values()),
            "gradients": sum(buffer.grad_data.nbytes for buffer in buffers),
            "optimizer": sum(tensor.nbytes for part in slices for tensor in part.tensors.values()),
            "activations": saved.peak,
        }
        saved_to = Path(folder) / name
        engine.save(saved_to)
        dist.barrier()
        results[name]["checkpoint"] = sum(file.stat().st_size for file in saved_to.iterdir())
        close(engine)
    return results
