"""Training throughput of the real ranks on synthetic groups, compared with Hugging Face with as many threads.

    python benchmarks/trainer.py CONFIG [--prompt 110] [--response 8] [--steps 5] [key=value ...]

Both do one policy-gradient forward and backward pass over the same sequences. megasync packs them without padding,
splits them over its ranks, and computes logits only where a response token is predicted. The Hugging Face baseline is
one process that pads them into batches, as most small trainers do. The results are medians over the steps, without the
first one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import statistics
import tempfile
import time
from multiprocessing.connection import Connection

from megasync.buffer.payload import LeasedGroup, in_memory
from megasync.config import Config, load_config
from megasync.config.pools import pool_specs
from megasync.layout.model_files import read_hf_config
from megasync.trainer.rank import TrainerRank
from megasync.trajectory import Group, Trajectory


def make_groups(config: Config, prompt: int, response: int, vocab: int) -> list[LeasedGroup]:
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
        group = Group(f"0:{row}", [answer(ids) for _ in range(config.schedule.samples_per_group)])
        groups.append(in_memory(group))
    return groups


def rank_process(pipe: Connection, config: Config, rank: int, world: int, folder: str) -> None:
    worker = TrainerRank(config, rank, world, folder)
    if rank == 0:
        pipe.send(worker.rendezvous())
    worker.start(*pipe.recv())
    while (job := pipe.recv()) is not None:
        start = time.monotonic()
        worker.step(*job)
        pipe.send(time.monotonic() - start)
    worker.stop()


def measure_ranks(config: Config, groups: list[LeasedGroup], steps: int) -> list[float]:
    """Time of each step on the slowest rank, in seconds."""
    world = pool_specs(config)["trainer"].slots
    context = multiprocessing.get_context("spawn")
    pairs = [context.Pipe() for _ in range(world)]
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=rank_process, args=(theirs, config, rank, world, folder))
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in processes:
            process.start()
        pipes = [ours for ours, _ in pairs]
        address = pipes[0].recv()
        for pipe in pipes:
            pipe.send(address)
        seconds = []
        for step in range(1, steps + 2):
            for pipe in pipes:
                pipe.send((groups, step, 0))
            seconds.append(max(pipe.recv() for pipe in pipes))
        for pipe in pipes:
            pipe.send(None)
        for process in processes:
            process.join()
    return seconds[1:]


def measure_hugging_face(config: Config, groups: list[LeasedGroup], steps: int, threads: int) -> list[float]:
    """Time of each step, in seconds. Padded batches have about as many tokens as megasync's microbatches."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    dtype = getattr(torch, config.model.dtype)
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-6)
    sequences = [t.prompt_ids + t.response_ids for group in groups for t in group.trajectories]
    prompts = [len(t.prompt_ids) for group in groups for t in group.trajectories]
    longest = max(map(len, sequences))
    size = max(1, config.trainer.tokens_per_microbatch // longest)
    seconds = []
    for _ in range(steps + 1):
        start = time.monotonic()
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
        seconds.append(time.monotonic() - start)
    return seconds[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--prompt", type=int, default=110, help="tokens of a prompt, on average")
    parser.add_argument("--response", type=int, default=8, help="tokens of a response, on average")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    given = parser.parse_intermixed_args()
    config = load_config(given.config, given.overrides)
    groups = make_groups(config, given.prompt, given.response, read_hf_config(config.model.path)["vocab_size"])
    tokens = sum(len(t.prompt_ids) + len(t.response_ids) for group in groups for t in group.trajectories)
    world = pool_specs(config)["trainer"].slots
    print(f"{sum(len(g.trajectories) for g in groups)} sequences, {tokens} tokens, {world} ranks, {config.model.dtype}")
    ours = statistics.median(measure_ranks(config, groups, given.steps))
    theirs = statistics.median(measure_hugging_face(config, groups, given.steps, world))
    print("| way | seconds a step | tokens/s | ratio |\n|---|---|---|---|")
    print(f"| megasync, {world} ranks | {ours:.2f} | {tokens / ours:.0f} | {theirs / ours:.2f} |")
    print(f"| Hugging Face, padded, {world} threads | {theirs:.2f} | {tokens / theirs:.0f} | 1.00 |")


if __name__ == "__main__":
    main()
