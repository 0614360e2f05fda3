"""CPU time of passes of several models, each by itself and together in a microbatch.

    megasync fetch digits
    python benchmarks/adapter_bank.py [--models 8] [--rounds 5]

One trainer rank on one thread computes a pass of importance sampling and its gradients for each model: adapters of rank
32 on the digits model in float32, groups of responses of 16 tokens to random prompts of 8. Figures are milliseconds of
CPU for one pass of each model, medians over rounds in which both ways take turns.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from megasync.config.schema import LoraConfig, ModelConfig, OptimizerConfig, TrainerConfig
from megasync.device import resolve_device
from megasync.layout.adapter import AdapterShape, kinds_of_projections
from megasync.layout.layout import Layout
from megasync.layout.model_files import read_hf_config
from megasync.layout.topology import Topology
from megasync.service.interfaces import Datum, Pass, ServedModel
from megasync.service.ranks import checked
from megasync.tenants.passes import LossPass

MODEL, RANK, PROMPT, RESPONSE = "models/digits", 32, 8, 16
# Prompts of a pass, and responses to each.
SIZES = [(1, 1), (1, 4), (4, 4), (4, 8), (16, 8)]


def drawn(draw: np.random.Generator, vocab: int, prompts: int, samples: int) -> LossPass:
    data = []
    for _ in range(prompts):
        prompt = draw.integers(0, vocab, PROMPT)
        for _ in range(samples):
            ids = np.concatenate([prompt, draw.integers(0, vocab, RESPONSE)])
            count = len(ids) - 1
            inputs = {
                "target_tokens": ids[1:],
                "logprobs": np.full(count, -2.0, np.float32),
                "advantages": draw.standard_normal(count).astype(np.float32),
            }
            data.append(Datum(ids[:-1], inputs))
    return checked(Pass("importance_sampling", {}, data, True), ServedModel("", 1000, vocab, RANK))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    device = resolve_device("cpu")
    device.prepare_process(local_rank=0)
    # Imported after `prepare_process`, which may patch Megatron.
    from megasync.tenants.adapter_bank import AdapterBank
    from megasync.trainer.learner import MegatronLearner

    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    kinds = kinds_of_projections(Layout(read_hf_config(MODEL), Topology()))
    targets = sorted(set().union(*kinds.values()))
    lora = LoraConfig(rank=RANK, alpha=32.0, targets=targets)
    trainer = TrainerConfig(tokens_per_microbatch=4096, optimizer=OptimizerConfig(lr=1e-3), lora=lora)
    learner = MegatronLearner(ModelConfig(path=MODEL, dtype="float32"), trainer, device, 0)
    learner.initialize()
    bank, vocab = AdapterBank(learner), learner.layout.sizes.vocab
    names = [f"model-{number}" for number in range(given.models)]
    for number, name in enumerate(names):
        bank.create(name, AdapterShape(RANK, 1.0, tuple(targets)), number)
    draw = np.random.default_rng(0)
    print("| tokens of a pass | each by itself, ms | together, ms |\n|---|---|---|")
    for prompts, samples in SIZES:
        passes = [(name, drawn(draw, vocab, prompts, samples)) for name in names]
        spent: dict[str, list[float]] = {"apart": [], "together": []}
        # The first round warms up.
        for _ in range(given.rounds + 1):
            for way, calls in (("apart", [[each] for each in passes]), ("together", [passes])):
                begun = time.process_time()
                for call in calls:
                    bank.compute(call)
                spent[way].append(1e3 * (time.process_time() - begun))
        apart, together = (statistics.median(each[1:]) for each in spent.values())
        print(f"| {int(passes[0][1].lengths.sum())} | {apart:.0f} | {together:.0f} |", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
