"""How long training waits for a checkpoint, and how much slower its steps are while the files are written.

    python benchmarks/checkpoint.py MODEL [--device cuda] [--dtype bfloat16] [--rounds 5] [--folder PLACE]

One rank trains MODEL on a short batch. In each round it saves three ways, with a step before and after: the usual way
(`torch.save` of weights and optimizer state, synced to disk, while training waits), `MegatronLearner.save`, which waits
as well, and `begin_save`, after which steps go on until `finish_save` finds everything written. The limit for the last
one is a plain copy of the same bytes to host memory. Times are medians; --folder chooses the disk.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megasync.config.schema import ModelConfig, OptimizerConfig, TrainerConfig
from megasync.device import resolve_device

if TYPE_CHECKING:
    from megasync.trainer.learner import MegatronLearner

TOKENS = 128


def seconds(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def torch_save(tensors: list[torch.Tensor], path: Path) -> None:
    with path.open("wb") as file:
        torch.save(tensors, file)
        file.flush()
        os.fsync(file.fileno())


def measure(engine: MegatronLearner, step: Callable[[], object], folder: Path, rounds: int) -> dict[str, float]:
    """Medians in seconds, by name."""
    held = engine.optimizer.slices(engine.weights).values()
    tensors = [*engine.params().values(), *(tensor for part in held for tensor in part.tensors.values())]
    hosts = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
    for host in hosts:
        host.zero_()
    found: dict[str, list[float]] = defaultdict(list)
    for number in range(rounds):
        path = folder / f"{number}"
        found["a step"].append(seconds(step))
        found["copy"].append(seconds(lambda: [host.copy_(tensor) for host, tensor in zip(hosts, tensors, strict=True)]))
        found["torch.save"].append(seconds(lambda path=path: torch_save(tensors, path.with_suffix(".pt"))))
        found["save"].append(seconds(lambda path=path: engine.save(path, {})))
        shutil.rmtree(path)
        found["begin_save"].append(seconds(lambda path=path: engine.begin_save(path, {})))
        begin, complete = time.perf_counter(), False
        while not complete:
            found["a step while files are written"].append(seconds(step))
            complete = engine.finish_save(wait=False)
        found["until complete"].append(time.perf_counter() - begin)
        shutil.rmtree(path)
        path.with_suffix(".pt").unlink()
    found["bytes"] = [float(sum(tensor.nbytes for tensor in tensors))]
    return {name: statistics.median(values) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--folder", type=Path, help="where checkpoints are written; default: the folder for temporary files"
    )
    given = parser.parse_args()
    device = resolve_device(given.device)
    device.prepare_process(local_rank=0)
    from megasync.trainer.batch import Sample
    from megasync.trainer.learner import MegatronLearner

    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        dist.init_process_group(device.backend, init_method=f"file://{name}/store", rank=0, world_size=1)
        trainer = TrainerConfig(tokens_per_microbatch=TOKENS, optimizer=OptimizerConfig(lr=1e-6))
        engine = MegatronLearner(ModelConfig(path=given.model, dtype=given.dtype), trainer, device, 0, 10)
        engine.initialize()
        ids = [token % engine.layout.sizes.vocab for token in range(TOKENS)]
        share = engine.local_batch([Sample.of(ids[:1], ids[1:])])

        def step() -> None:
            engine.forward_backward(share, lambda batch, logprobs, _: (-logprobs.mean(), {}))
            engine.update(1, loss_is_finite=True)

        step()
        found = measure(engine, step, Path(name), given.rounds)
        dist.destroy_process_group()
    copy = found["copy"]
    print(f"{found.pop('bytes') / 1e6:.0f} MB of weights, main weights and moments; medians of {given.rounds}\n")
    print("| | seconds | x copy |\n|---|---|---|")
    for name, value in found.items():
        print(f"| {name} | {value:.3f} | {value / copy:.2f} |")


if __name__ == "__main__":
    main()
