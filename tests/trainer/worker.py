"""A trainer rank in a process of its own: `worker.py CASE RANK WORLD PORT FOLDER`.

Runs the function CASE of this file with the arguments in FOLDER/arguments.json, and leaves what it returns in
FOLDER/result-RANK.pt.
"""

import json
import logging
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megasync.config.schema import AlgorithmConfig, ModelConfig, OptimizerConfig, TrainerConfig
from megasync.device import resolve_device

DEVICE = resolve_device("cpu")
DEVICE.prepare_process(local_rank=0)

from megasync.errors import CheckpointError, MegasyncError
from megasync.trainer.engine import MegatronEngine
from megasync.trainer.packing import Sample


def make_engine(model, trainer=None, optimizer=None, dtype="float32", total_steps=10):
    options = dict(trainer or {})
    config = TrainerConfig(**options, optimizer=OptimizerConfig(**{"lr": 1e-3, **(optimizer or {})}))
    engine = MegatronEngine(
        ModelConfig(path=model, dtype=dtype), config, DEVICE, dist.get_rank(), dist.get_world_size(), total_steps
    )
    engine.initialize()
    return engine


def to_samples(rows):
    return [Sample(row["prompt"], row["response"], list(range(len(row["response"])))) for row in rows]


def cross_entropy(tokens):
    """A loss that touches every output: mean negative log-prob plus a little entropy, over `tokens`."""

    def loss(batch, logprobs, entropy):
        weight = float(batch.counted) / tokens
        return -(logprobs.sum() + 0.1 * entropy.sum()) * weight, {"tokens": torch.tensor(float(len(logprobs)) * batch.counted)}

    return loss


def layouts(models, rows, layouts, folder):
    """Scores, one training step and a checkpoint for each model in each layout."""
    found = {}
    for name, model in models.items():
        for label, trainer in layouts.items():
            engine = make_engine(model, trainer)
            samples = to_samples(rows)
            tokens = sum(len(sample.scored) for sample in samples)
            scores = engine.score(samples)
            sums = engine.forward_backward(samples, cross_entropy(tokens))
            update = engine.update(1, loss_is_finite=True)
            engine.save(Path(folder) / f"{name}-{label}", {"step": 1})
            found[name, label] = {
                "scores": torch.cat(scores),
                "loss": sums["loss"],
                "tokens": sums["tokens"],
                "grad_norm": update.grad_norm,
                "lr": update.lr,
                "after": torch.cat(engine.score(samples)),
                "microbatches": len(engine.microbatches(samples)),
            }
            engine.close()
    return found


def main() -> None:
    case, rank, world, port, folder = sys.argv[1], *map(int, sys.argv[2:5]), Path(sys.argv[5])
    logging.basicConfig(level=logging.WARNING)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world, timeout=timedelta(seconds=120)
    )
    result = globals()[case](**json.loads((folder / "arguments.json").read_text()))
    torch.save(result, folder / f"result-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
