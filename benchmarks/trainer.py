"""Training throughput of the real ranks on synthetic groups, compared with plain Megatron and with Hugging Face.

    python benchmarks/trainer.py CONFIG [--prompt 110] [--response 8] [--steps 5] [--hf] [key=value ...]

All do one policy-gradient forward and backward pass and an update over the same sequences. megasync packs them without
padding, splits them over its ranks, computes a common prompt once, and computes logits only where a response token is
predicted. Plain Megatron runs in the same ranks on the same microbatches, alternating with megasync. With --hf, the
Hugging Face baseline is one process with as many threads that pads the sequences into batches, as most small trainers
do. The results are CPU seconds of all processes, which other work on the machine changes little; on GPUs they are
seconds of the slowest rank. They are medians over the steps, without the first one. With `--peak`, the TFLOP/s of one
GPU in the model's dtype, the model FLOPs utilisation is reported: a step's FLOPs are 6 x (weights without the
embedding) x (tokens computed), without attention and recomputation, and a common prompt counts once.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from math import prod
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, cast

import torch

from megasync.buffer.payload import in_memory
from megasync.config import Config, load_config
from megasync.config.pools import pool_specs
from megasync.device import resolve_device
from megasync.layout.layout import Layout
from megasync.layout.model_files import read_hf_config
from megasync.layout.topology import Topology
from megasync.trainer.rank import TrainerRank
from megasync.trajectory import Group, Trajectory

if TYPE_CHECKING:
    from megasync.trainer.batch import Batch
    from megasync.trainer.learner import LocalBatch, MegatronLearner


def make_groups(config: Config, prompt: int, response: int, vocab: int) -> list[Group]:
    """The groups of one step, with random tokens. Lengths vary by up to 25% around the given ones."""
    draw = random.Random(0)

    def tokens(length: int) -> list[int]:
        return [draw.randrange(vocab) for _ in range(max(1, round(length * draw.uniform(0.75, 1.25))))]

    def answer(ids: list[int]) -> Trajectory:
        out = tokens(response)
        return Trajectory(ids, out, [1] * len(out), [-5.0] * len(out), [0] * len(out), reward=draw.random())

    groups = []
    for row in range(config.schedule.groups_per_step):
        ids = tokens(prompt)
        groups.append(Group(f"0:{row}", [answer(ids) for _ in range(config.schedule.samples_per_group)]))
    return groups


def rank_process(pipe: Connection, config: Config, rank: int, world: int, folder: str) -> None:
    worker = TrainerRank(config, rank, world, folder)
    if rank == 0:
        pipe.send(worker.rendezvous())
    worker.start(*pipe.recv())
    shares, run = [], worker._learner.run

    def recording_run(batch: LocalBatch, *args: Any, **kwargs: Any) -> list[Any]:
        shares.append(batch)
        return run(batch, *args, **kwargs)

    worker._learner.run = recording_run
    plain: PlainMegatron | None = None
    device = worker._learner.device.torch_device
    while (job := pipe.recv()) is not None:
        with Clock(device) as ours:
            worker.step(*job)
        plain = plain or PlainMegatron(worker._learner)
        torch.distributed.barrier()
        with Clock(device) as theirs:
            plain.step(shares[-1], job[1])
        pipe.send((ours.seconds, theirs.seconds))
    worker.stop()


class Clock:
    """CPU seconds of this process; on a GPU, seconds until the GPU has finished."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def _now(self) -> float:
        if self._device.type == "cpu":
            return time.process_time()
        torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def __enter__(self) -> Clock:
        self._start = self._now()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = self._now() - self._start


class PlainMegatron:
    """Megatron's own GPTModel, cross entropy, gradient reduction and optimizer, on the microbatches of an engine.

    Only its attention over packed tokens is megasync's: on a CPU Megatron has none. One pipeline stage.
    """

    def __init__(self, engine: MegatronLearner) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.models.gpt.gpt_model import GPTModel

        from megasync.trainer.architecture import rope_parameters
        from megasync.trainer.layer_specs import chunk_specs
        from megasync.trainer.model import transformer_config
        from megasync.trainer.optimizer import Optimizer

        layout, trainer, device = engine.layout, engine.trainer_config, engine.device
        config = transformer_config(layout, trainer, device, engine.dtype)
        config.perform_initialization = True
        # Without it no gradient is reduced over ranks.
        config.finalize_model_grads_func = finalize_model_grads
        rope = rope_parameters(layout.hf_config)
        # Any: Megatron accepts specs of layers here, although it does not declare so.
        specs: Any = chunk_specs(config, layout, range(layout.sizes.layers), device.spec, rope)
        model = GPTModel(
            config,
            specs,
            vocab_size=layout.padded_vocab,
            max_sequence_length=layout.hf_config["max_position_embeddings"],
            position_embedding_type="rope",
            rotary_base=int(rope["rope_theta"]),
            share_embeddings_and_output_weights=layout.tied,
        )
        options = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=trainer.distributed_optimizer and trainer.data_parallel > 1,
        )
        self._engine = engine
        self._model = DistributedDataParallel(config, options, model)
        self._optimizer = Optimizer([self._model], trainer, 10, engine.dtype, device.torch_device)

    def step(self, share: LocalBatch, number: int) -> None:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=self._engine._batches(share, replays=False),
            model=self._model,
            num_microbatches=len(share.microbatches),
            seq_length=1,
            micro_batch_size=1,
            forward_only=False,
        )
        self._optimizer.step(number, True)

    def _forward(self, batches: Iterator[Batch], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        """The loss is the mean negative log-prob of the targets, over all ranks."""
        batch = next(batches)
        rows = batch.packed.rows
        labels, counts = torch.zeros_like(batch.ids), torch.zeros(batch.ids.shape, device=batch.ids.device)
        labels[0, rows] = batch.targets
        counts[0, rows] = float(batch.counted)
        losses = model(batch.ids, None, None, labels=labels, packed_seq_params=batch.packed)
        return losses, lambda losses: ((losses * counts).sum(), counts.sum().int(), {})


def measure_ranks(config: Config, groups: list[Group], steps: int) -> list[tuple[float, float]]:
    """Seconds of each step (see `Clock`): megasync's, and those of plain Megatron right after it."""
    together = sum if resolve_device(config.cluster.device).kind == "cpu" else max
    world = pool_specs(config)["trainer"].slots
    leased = [*map(in_memory, groups)]
    context = multiprocessing.get_context("spawn")
    pairs = [context.Pipe() for _ in range(world)]
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=rank_process, args=(theirs, config, rank, world, folder), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process, (_, theirs) in zip(processes, pairs, strict=True):
            process.start()
            # With its only other end in the process, the pipe ends when the process dies.
            theirs.close()
        pipes = [ours for ours, _ in pairs]
        address = answers(pipes[:1])[0]
        for pipe in pipes:
            pipe.send(address)
        seconds = []
        for step in range(1, steps + 2):
            for pipe in pipes:
                pipe.send((leased, step, 0))
            ours, plain = zip(*answers(pipes), strict=True)
            seconds.append((together(ours), together(plain)))
        for pipe in pipes:
            pipe.send(None)
        for process in processes:
            process.join()
    return seconds[1:]


def answers(pipes: Sequence[Any]) -> list[Any]:
    """One answer of each rank. Exits when a rank dies: the others would wait for it, so they end with this process."""
    found: dict[int, Any] = {}
    while len(found) < len(pipes):
        for pipe in wait([pipe for rank, pipe in enumerate(pipes) if rank not in found]):
            rank = pipes.index(cast("Connection", pipe))
            try:
                found[rank] = pipes[rank].recv()
            except EOFError:
                sys.exit(f"rank {rank} died; see its error above")
    return [found[rank] for rank in range(len(pipes))]


def measure_hugging_face(config: Config, groups: list[Group], steps: int, threads: int) -> list[float]:
    """CPU seconds of each step. Padded batches have about as many tokens as megasync's microbatches."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    dtype = getattr(torch, config.model.dtype)
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-6)
    sequences = [[*t.prompt_ids.tolist(), *t.response_ids.tolist()] for group in groups for t in group.trajectories]
    prompts = [len(t.prompt_ids) for group in groups for t in group.trajectories]
    longest = max(map(len, sequences))
    size = max(1, config.trainer.tokens_per_microbatch // longest)
    seconds = []
    for _ in range(steps + 1):
        start = time.process_time()
        for begin in range(0, len(sequences), size):
            chunk, starts = sequences[begin : begin + size], prompts[begin : begin + size]
            ids = torch.tensor([s + [0] * (longest - len(s)) for s in chunk])
            mask = torch.tensor([[p <= i < len(s) for i in range(longest)] for s, p in zip(chunk, starts, strict=True)])
            logits = model(
                ids, attention_mask=torch.tensor([[i < len(s) for i in range(longest)] for s in chunk])
            ).logits
            scores = logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
            (-(scores * mask[:, 1:]).sum() / sum(map(len, sequences))).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.process_time() - start)
    return seconds[1:]


def weights_of(config: Config) -> int:
    """Number of weights that each token is multiplied with: all but the embedding, which stays where it is tied."""
    layout = Layout(read_hf_config(config.model.path), Topology())
    tied = layout.sizes.tied
    shapes = [shape for name, shape in layout.hf_tensors.items() if tied or "embed_tokens" not in name]
    return sum(prod(shape) for shape in shapes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--prompt", type=int, default=110, help="tokens of a prompt, on average")
    parser.add_argument("--response", type=int, default=8, help="tokens of a response, on average")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--hf", action="store_true", help="also measure Hugging Face")
    parser.add_argument("--peak", type=float, help="TFLOP/s of one GPU, to report the model FLOPs utilisation")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    given = parser.parse_intermixed_args()
    config = load_config(given.config, given.overrides)
    groups = make_groups(config, given.prompt, given.response, read_hf_config(config.model.path)["vocab_size"])
    tokens = sum(len(t.prompt_ids) + len(t.response_ids) for group in groups for t in group.trajectories)
    world = pool_specs(config)["trainer"].slots
    print(f"{sum(len(g.trajectories) for g in groups)} sequences, {tokens} tokens, {world} ranks, {config.model.dtype}")
    pairs = measure_ranks(config, groups, given.steps)
    ours, plain = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratios = [theirs / mine for mine, theirs in pairs]
    unit = "CPU second" if resolve_device(config.cluster.device).kind == "cpu" else "second"
    print(f"| way | {unit}s a step | tokens per {unit} | megasync's speed / its |\n|---|---|---|---|")
    print(f"| megasync, {world} ranks | {ours:.2f} | {tokens / ours:.0f} | |")
    spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    print(f"| megatron-core, {world} ranks | {plain:.2f} | {tokens / plain:.0f} | {spread} |")
    if given.peak:
        computed = sum(
            len(g.trajectories[0].prompt_ids) + sum(len(t.response_ids) for t in g.trajectories) for g in groups
        )
        utilisation = 6 * weights_of(config) * computed / (ours * world * given.peak * 1e12)
        print(f"model FLOPs utilisation: {utilisation:.1%} of {given.peak:g} TFLOP/s a GPU")
    if given.hf:
        theirs = statistics.median(measure_hugging_face(config, groups, given.steps, world))
        print(f"| Hugging Face, padded, {world} threads | {theirs:.2f} | {tokens / theirs:.0f} | {theirs / ours:.2f} |")


if __name__ == "__main__":
    main()
