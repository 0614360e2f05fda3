"""CPU time of one data-parallel rank in a training step, without the model: what it costs to know and load its share.

    python benchmarks/trainer_share.py [--ranks 64] [--sequences 8192] [--mean 5740] [--spec te|local] [--minibatches 1]

The real `PolicyTrainer` and `MegatronLearner` run with headers of a whole batch and recorded bodies; only the
transformer is missing: log-probs are zeros. Lengths are log-normal with a tail to 32k tokens, and a group has 8
responses. Times are CPU seconds of this process, medians over the steps. The second table is about packing alone.

receive   unpickling the leased batch
plan      packing
load      reading the share's bodies and decoding them
batches   tensors of all microbatches, and the loss of each with its targets
rest      advantages, counts, metrics
"""

from __future__ import annotations

import argparse
import json
import pickle
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megasync.buffer.payload import LeasedGroup, StoredBody, encode
from megasync.buffer.segments import SegmentWriter, load_trajectories
from megasync.config.schema import AlgorithmConfig, ModelConfig, TrainerConfig
from megasync.device import Device
from megasync.trajectory import Group, Trajectory
from megasync.trajectory.runs import Runs

BUDGET = 32_768
GROUP = 8
MODEL = {
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}

Device("cpu").prepare_process(local_rank=0)

# Megatron may be imported only after `prepare_process`.
from megasync.trainer.adam import Adam  # noqa: E402
from megasync.trainer.batch import Batch  # noqa: E402
from megasync.trainer.learner import LocalBatch, MegatronLearner  # noqa: E402
from megasync.trainer.optimizer import Update  # noqa: E402
from megasync.trainer.packing import Lengths, Packing, plan_packing  # noqa: E402
from megasync.trainer.policy import PolicyTrainer  # noqa: E402


class Stopwatch(dict[str, float]):
    """CPU seconds by part."""

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = time.process_time()
        yield
        self[name] = self.get(name, 0.0) + time.process_time() - start


class PacksForGpu(Device):
    """A CPU for which batches are built as on a GPU."""

    @property
    def spec(self) -> str:
        return "te"


class NullEngine(MegatronLearner):
    """The engine without a model and without other ranks."""

    watch = Stopwatch()

    def plan(self, lengths: Lengths) -> Packing:
        with self.watch.part("plan"):
            return super().plan(lengths)

    def zero_grad(self) -> None:
        pass

    def run(self, batch: LocalBatch, evaluate: Any, *, forward_only: bool, replays: bool = True) -> list[Any]:
        with self.watch.part("batches"):
            return [evaluate(each, torch.zeros(()))[1] for each in self._batches(batch, replays=False)]

    def score_rows(
        self, rows: torch.Tensor, batch: Batch, temperature: float | torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(len(batch.targets)), torch.zeros(len(batch.targets))

    def _sum_reports(self, reports: list[dict[str, torch.Tensor]]) -> dict[str, float]:
        return {name: sum(float(report[name]) for report in reports) for name in reports[0]}

    def update(self, step: int | Adam, loss_is_finite: bool = True, norms: bool = False) -> Update:
        return Update(loss_is_finite, 1.0, 1e-6)


def response_lengths(draw: np.random.Generator, count: int, mean: float) -> np.ndarray:
    """Log-normal, with a tail to the budget."""
    sigma = 0.9
    return draw.lognormal(np.log(mean) - sigma**2 / 2, sigma, count).clip(16, BUDGET - 600).astype(int)


def record(folder: Path, sequences: int, mean: float) -> list[LeasedGroup]:
    """Groups with bodies in segment files."""
    draw = np.random.default_rng(0)
    writer, leased = SegmentWriter(folder), []
    for row, lengths in enumerate(response_lengths(draw, sequences, mean).reshape(-1, GROUP)):
        prompt = draw.integers(0, 100_000, draw.integers(100, 600), dtype=np.int32)
        members = [
            Trajectory(
                prompt,
                draw.integers(0, 100_000, length, dtype=np.int32),
                Runs.fill(1, length),
                draw.standard_normal(length, dtype=np.float32),
                Runs.join([Runs.fill(3, length // 2), Runs.fill(4, length - length // 2)]),
                reward=float(place % 2),
            )
            for place, length in enumerate(lengths.tolist())
        ]
        encoded = encode(Group(f"0:{row}", members))
        assert not isinstance(encoded.body, StoredBody)
        leased.append(LeasedGroup(encoded.header, writer.append(encoded.pieces)))
    writer.sync()
    writer.close()
    return leased


def measure_share(folder: Path, leased: Sequence[LeasedGroup], given: argparse.Namespace) -> dict[str, float]:
    """Seconds of each part of a step, and their total."""
    (folder / "config.json").write_text(json.dumps(MODEL))
    config = TrainerConfig(data_parallel=given.ranks, tokens_per_microbatch=BUDGET, minibatches=given.minibatches)
    device = PacksForGpu("cpu") if given.spec == "te" else Device("cpu")
    engine = NullEngine(ModelConfig(path=str(folder), dtype="bfloat16"), config, device, rank=given.ranks // 2)
    policy = PolicyTrainer(engine, AlgorithmConfig(), dump_dir=folder)
    sent, read = pickle.dumps(leased, protocol=5), Counter()

    def load(group: LeasedGroup, places: Sequence[int]) -> Sequence[Trajectory]:
        with engine.watch.part("load"):
            found = load_trajectories(group, places)
        read["sequences"] += len(found)
        read["tokens"] += sum(len(t.prompt_ids) + len(t.response_ids) for t in found)
        return found

    steps = []
    for step in range(1, given.steps + 1):
        engine.watch.clear()
        with engine.watch.part("total"):
            with engine.watch.part("receive"):
                groups = pickle.loads(sent)
            policy.step(groups, load, step, 4)
        steps.append(dict(engine.watch))
    median = {name: statistics.median(step[name] for step in steps) for name in steps[0]}
    total = median.pop("total")
    median["rest"] = total - sum(median.values())
    print(f"own share: {read['sequences'] // len(steps)} sequences, {read['tokens'] // len(steps)} tokens")
    print(f"| {' | '.join(median)} | total |\n|{'---|' * (len(median) + 1)}")
    print(f"| {' | '.join(f'{seconds:.3f}' for seconds in median.values())} | {total:.3f} |")
    return median | {"total": total}


def measure_packing(sequences: int, ranks: int, mean: float) -> float:
    """CPU seconds of packing."""
    draw = np.random.default_rng(0)
    fed, prompts = response_lengths(draw, sequences, mean), np.arange(sequences) // GROUP
    lengths = Lengths(prompts, draw.integers(100, 600, sequences // GROUP)[prompts], fed)
    start = time.process_time()
    packing = plan_packing(lengths, ranks=ranks, budget=BUDGET, attention_cost=0.04, share_prompts=False)
    seconds = time.process_time() - start
    loads = packing.work[packing.table].sum(axis=1)
    fill = packing.counted_tokens / (packing.table.size * BUDGET)
    print(f"| {sequences} | {ranks} | {seconds:.2f} | {fill:.3f} | {loads.max() / loads.mean():.4f} |")
    return seconds


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64, help="data-parallel ranks")
    parser.add_argument("--sequences", type=int, default=8192)
    parser.add_argument("--mean", type=float, default=5740, help="tokens of a response, on average")
    parser.add_argument("--spec", choices=("te", "local"), default="te", help="layer spec; local shares prompts")
    parser.add_argument("--minibatches", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    return parser.parse_args(given)


def measure_step(given: argparse.Namespace) -> dict[str, float]:
    """Seconds of each part of one rank's step with a recorded batch."""
    with tempfile.TemporaryDirectory() as folder:
        leased = record(Path(folder), given.sequences, given.mean)
        tokens = sum(t.prompt_tokens + t.response_tokens for group in leased for t in group.header.trajectories)
        print(f"{given.sequences} sequences, {tokens} tokens, {given.ranks} data-parallel ranks, spec {given.spec}")
        return measure_share(Path(folder), leased, given)


def main() -> None:
    given = arguments()
    measure_step(given)
    print("\n| sequences | ranks | packing, s | fill | heaviest rank / mean |\n|---|---|---|---|---|")
    for sequences, ranks in ((given.sequences, given.ranks), (65_536, 512)):
        measure_packing(sequences, ranks, given.mean)


if __name__ == "__main__":
    main()
