"""Time and memory of the output layer, log-probs and entropies of one microbatch, forward and backward.

    python benchmarks/output_head.py [--tokens 4096] [--hidden 1024] [--vocabulary 151936] [--dtype float32] [--steps 3]

`megasync` projects a part of the rows at a time (`trainer.logprobs`). `megatron` computes all logits and takes
Megatron's vocabulary-parallel cross entropy of them, without an entropy. `torch` computes all logits and their
log-softmax in float32, as trainers on top of Hugging Face models do. Each runs in a process of its own; seconds are
those of the fastest step, memory is the peak above what the process had before the first step, with the gradient of
the weight.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch.nn.functional import linear

from megasync.trainer.logprobs import token_logprobs

# Log-probs of the targets, and entropies if they are computed.
Found = tuple[torch.Tensor, torch.Tensor | None]
Scores = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Found]


def megasync_scores(rows: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> Found:
    return token_logprobs(rows, weight, targets, vocab_size=len(weight))


def megatron_scores(rows: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> Found:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
    from torch._C._distributed_c10d import HashStore

    if not parallel_state.is_initialized():
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
    return -vocab_parallel_cross_entropy(linear(rows, weight)[:, None].float(), targets[:, None])[:, 0], None


def torch_scores(rows: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> Found:
    log_p = linear(rows, weight).float().log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


WAYS: dict[str, Scores] = {"megasync": megasync_scores, "megatron": megatron_scores, "torch": torch_scores}


def run(way: str, args: argparse.Namespace, pipe: Connection) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, args.dtype)
    torch.manual_seed(0)
    rows = torch.randn(args.tokens, args.hidden, dtype=dtype, device=device, requires_grad=True)
    weight = (torch.randn(args.vocabulary, args.hidden, dtype=dtype, device=device) * 0.02).requires_grad_()
    targets = torch.randint(0, args.vocabulary, (args.tokens,), device=device)
    WAYS[way](rows[:2], weight, targets[:2])
    before, seconds, total = peak_bytes(device), [], 0.0
    for _ in range(args.steps):
        rows.grad = weight.grad = None
        start = now(device)
        logprobs, _ = WAYS[way](rows, weight, targets)
        logprobs.sum().backward()
        seconds.append(now(device) - start)
        total = logprobs.double().sum().item()
    pipe.send((min(seconds), peak_bytes(device) - before, total))


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="float32")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    logits = args.tokens * args.vocabulary * torch.finfo(getattr(torch, args.dtype)).bits // 8
    print(f"all logits: {logits / 1e9:.2f} GB, the weight: {logits / args.tokens * args.hidden / 1e9:.2f} GB")
    for way in WAYS:
        ours, theirs = context.Pipe()
        process = context.Process(target=run, args=(way, args, theirs))
        process.start()
        seconds, nbytes, total = ours.recv()
        process.join()
        print(f"{way:9} {seconds:8.2f} s {nbytes / 1e9:8.2f} GB   sum of log-probs {total:.6g}")


if __name__ == "__main__":
    main()
