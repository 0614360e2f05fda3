"""Compares the trainer's model with Hugging Face's on one device: log-probs and the gradient norm of one batch.

    python benchmarks/parity.py MODEL [--device cuda] [--dtype bfloat16] [--sequences 8] [--tokens 256]

On a GPU the trainer uses Transformer Engine's layers, on a CPU Megatron's own. Two correct models in bfloat16 differ
from each other, so both are compared with Hugging Face in float32: the trainer's error may be at most twice that of
Hugging Face in the same dtype, plus 1e-4. Exits with status 1 if it is larger.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist

from megasync.config.schema import ModelConfig, OptimizerConfig, TrainerConfig
from megasync.device import resolve_device

SLACK, TIMES = 1e-4, 2.0


def draw(config: dict, sequences: int, tokens: int) -> list[list[int]]:
    """Random token sequences of different lengths, without padding: Hugging Face computes no gradient for its row."""
    vocab, padding = config["vocab_size"], config.get("pad_token_id")
    generator = torch.Generator().manual_seed(0)
    lengths = [max(8, tokens - index * tokens // (2 * sequences)) for index in range(sequences)]
    drawn = [torch.randint(0, vocab, (length,), generator=generator).tolist() for length in lengths]
    return [[(token + 1) % vocab if token == padding else token for token in row] for row in drawn]


def of_hugging_face(model: str, dtype: torch.dtype, device: torch.device, rows: list[list[int]]) -> tuple[list, float]:
    """Log-probs of all tokens but the first of each sequence, and the gradient norm of their mean."""
    from transformers import AutoModelForCausalLM

    # Any: transformers' `to` has no usable type.
    network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    network.to(device)
    found, total = [], sum(len(row) - 1 for row in rows)
    for row in rows:
        ids = torch.tensor([row], device=device)
        logits = network(ids).logits[0, :-1].float()
        scores = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        (-scores.sum() / total).backward()
        found.append(scores.detach().cpu())
    norm = sum(float(weight.grad.float().pow(2).sum()) for weight in network.parameters() if weight.grad is not None)
    return found, norm**0.5


def of_trainer(model: str, dtype: str, kind: str, rows: list[list[int]]) -> tuple[list, float]:
    """The same of `MegatronLearner`, with one rank."""
    device = resolve_device(kind)
    device.prepare_process(local_rank=0)
    from megasync.trainer.batch import Sample
    from megasync.trainer.learner import MegatronLearner

    with tempfile.NamedTemporaryFile() as meeting:
        dist.init_process_group(device.backend, init_method=f"file://{meeting.name}.store", rank=0, world_size=1)
    # The learning rate does not matter: the norm is that of the gradient before the step.
    trainer = TrainerConfig(tokens_per_microbatch=max(map(len, rows)) * 2, optimizer=OptimizerConfig(lr=1e-6))
    engine = MegatronLearner(ModelConfig(path=model, dtype=dtype), trainer, device, 0, 10)
    engine.initialize()
    scores = [torch.tensor(row) for row in engine.logprobs(rows)]
    samples = [Sample.of(row[:1], row[1:]) for row in rows]
    total = sum(len(row) - 1 for row in rows)

    def mean_loss(batch, logprobs, entropy):
        return -logprobs.sum() * (float(batch.counted) / total), {}

    engine.forward_backward(engine.local_batch(samples), mean_loss)
    norm = engine.update(1, loss_is_finite=True).grad_norm
    dist.destroy_process_group()
    return scores, float(norm)


def mean_difference(these: list, those: list) -> float:
    """Mean absolute difference per token, in nats."""
    return float((torch.cat(these) - torch.cat(those)).abs().mean())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    given = parser.parse_args()

    from megasync.layout.model_files import read_hf_config

    rows = draw(read_hf_config(given.model), given.sequences, given.tokens)
    place = torch.device(given.device)
    exact, exact_norm = of_hugging_face(given.model, torch.float32, place, rows)
    theirs, their_norm = of_hugging_face(given.model, getattr(torch, given.dtype), place, rows)
    ours, our_norm = of_trainer(given.model, given.dtype, given.device, rows)
    numbers = {
        "logprob error": mean_difference(ours, exact),
        "logprob error, Hugging Face": mean_difference(theirs, exact),
        "gradient norm error": abs(our_norm - exact_norm) / exact_norm,
        "gradient norm error, Hugging Face": abs(their_norm - exact_norm) / exact_norm,
    }
    wrong = [
        name
        for name in ("logprob error", "gradient norm error")
        if not numbers[name] <= TIMES * numbers[f"{name}, Hugging Face"] + SLACK
    ]
    print("| | trainer | Hugging Face |\n|---|---|---|")
    for name in ("logprob error", "gradient norm error"):
        print(f"| {name} | {numbers[name]:.2e} | {numbers[f'{name}, Hugging Face']:.2e} |")
    print("RESULT " + json.dumps(numbers))
    if wrong:
        print(f"larger than {TIMES:g} x that of Hugging Face in {given.dtype} + {SLACK}: {', '.join(wrong)}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
