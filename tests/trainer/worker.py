"""A trainer rank in its own process: `worker.py RANK WORLD STORES`.

STORES is the folder of the rendezvous files. Each line of standard input is also a folder: the function that its
request.json names is called with the arguments given there, its result is written to result-RANK.pt, and "done" is
printed. An error ends the process.
"""

import collections
import contextlib
import gc
import itertools
import json
import resource
import sys
import weakref
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megasync.buffer.payload import in_memory
from megasync.buffer.segments import load_trajectories
from megasync.config.schema import AlgorithmConfig, ModelConfig, OptimizerConfig, TrainerConfig
from megasync.device import resolve_device
from megasync.trajectory import Group, Trajectory

STORES = Path(sys.argv[3])
MEETINGS = itertools.count()
DEVICE = resolve_device("cpu")
DEVICE.prepare_process(local_rank=0)

# Megatron may be imported only after `prepare_process`.
from megasync.errors import CheckpointError, TrainingError  # noqa: E402
from megasync.trainer import checkpoint  # noqa: E402
from megasync.trainer.batch import Sample  # noqa: E402
from megasync.trainer.engine import MegatronEngine  # noqa: E402
from megasync.trainer.policy import PolicyTrainer  # noqa: E402
from megasync.trainer.reference import SLOTS  # noqa: E402


def make_engine(model, trainer=None, optimizer=None, dtype="float32", total_steps=10):
    gc.collect()
    options = dict(trainer or {})
    config = TrainerConfig(**options, optimizer=OptimizerConfig(**{"lr": 1e-3, **(optimizer or {})}))
    engine = MegatronEngine(ModelConfig(path=model, dtype=dtype), config, DEVICE, dist.get_rank(), total_steps)
    engine.initialize()
    return engine


def close(engine):
    """Ends the engine and all process groups, whose threads would pile up otherwise, and opens the world again."""
    rank, world = dist.get_rank(), dist.get_world_size()
    engine.close()
    dist.barrier()
    dist.destroy_process_group()
    join(rank, world)


def join(rank, world):
    """Opens the process group at a meeting point that no group before it has used."""
    meeting = STORES / f"store-{next(MEETINGS)}"
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world, timeout=timedelta(seconds=120)
    )


def to_samples(rows):
    return [Sample.of(row["prompt"], row["response"]) for row in rows]


def cross_entropy(tokens):
    """A loss that touches every output: mean negative log-prob plus a little entropy, over `tokens`."""

    def loss(batch, logprobs, entropy):
        weight = float(batch.counted) / tokens
        count = torch.tensor(float(len(logprobs) * batch.counted))
        return -(logprobs.sum() + 0.1 * entropy.sum()) * weight, {"tokens": count}

    return loss


def layouts(models, rows, layouts, folder):
    """Scores, one training step and a checkpoint for each model in each layout."""
    found = {}
    for name, model in models.items():
        for label, trainer in layouts.items():
            engine = make_engine(model, trainer)
            samples = to_samples(rows)
            tokens = sum(len(sample.scored) for sample in samples)
            scores = engine.score_everywhere(samples)
            sums = engine.forward_backward(engine.share(samples), cross_entropy(tokens))
            grads = gradients(engine)
            update = engine.update(1, loss_is_finite=True)
            engine.save(Path(folder) / f"{name}-{label}", {"step": 1})
            found[name, label] = {
                "scores": torch.cat(scores),
                "loss": sums["loss"],
                "tokens": sums["tokens"],
                "gradients": grads,
                "grad_norm": update.grad_norm,
                "lr": update.lr,
                "after": torch.cat(engine.score_everywhere(samples)),
                "microbatches": len(engine.share(samples).microbatches),
            }
            close(engine)
    return found


def is_freed(model, rows):
    """Whether a closed engine's model is freed after a training step."""
    engine = make_engine(model)
    engine.forward_backward(engine.share(to_samples(rows)), cross_entropy(10))
    chunk = weakref.ref(engine._chunks[0])
    close(engine)
    del engine
    gc.collect()
    return chunk() is None


def gradients(engine):
    """Gradients by parameter name; None where each data-parallel rank has only a part of their sum."""
    if engine._models[0].ddp_config.use_distributed_optimizer:
        return None
    trained = {name: weight for name, weight in engine._params.items() if weight.requires_grad}
    return {name: weight.main_grad.clone() for name, weight in trained.items()}


def make_groups(seed, groups=4, samples=3, vocab=131, uniform=()):
    """Random groups; those in `uniform` have equal rewards. Every third response has a masked token."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(low, high):
        count = int(torch.randint(low, high, (1,), generator=generator))
        return torch.randint(0, vocab, (count,), generator=generator).tolist()

    found = []
    for index in range(groups):
        prompt, members = tokens(3, 20), []
        for member in range(samples):
            response = tokens(2, 12)
            mask = [1] * len(response)
            mask[0] = int(member % 3 != 2)
            logprobs = (torch.randn(len(response), generator=generator) * 0.1 - 4.9).tolist()
            reward = 1.0 if index in uniform else float(member)
            members.append(Trajectory(prompt, response, mask, logprobs, [0] * len(response), reward=reward))
        found.append(Group(f"0:{index}", members))
    return found


def train_on(policy, groups, step, version=0, loaded=None):
    """One step of `policy`, as a rank gets its groups; the trajectories that it loads are added to `loaded`."""

    def load(group, places):
        if loaded is not None:
            loaded.extend((group.uid, place) for place in places)
        return load_trajectories(group, places)

    return policy.step([*map(in_memory, groups)], load, step, version)


def weights(engine):
    return {name: tensor.clone() for name, tensor in engine.params().items()}


def train(model, steps, trainer=None, algorithm=None, optimizer=None, dtype="float32", **batch):
    """Metrics and loads of a few policy steps, and the weights at the end. ``batch`` shapes `make_groups`."""
    engine = make_engine(model, trainer, optimizer, dtype)
    policy = PolicyTrainer(engine, AlgorithmConfig(**(algorithm or {})), dump_dir="unused")
    loaded = [[] for _ in range(steps)]
    metrics = [train_on(policy, make_groups(n, **batch), n, n, loaded[n - 1]) for n in range(1, steps + 1)]
    found = {"metrics": metrics, "weights": weights(engine), "loaded": loaded}
    close(engine)
    return found


def policies(model, runs):
    """`train` once per entry of `runs`."""
    return {name: train(model, **arguments) for name, arguments in runs.items()}


def main_weights(model, trainers):
    """The float32 weights that a bfloat16 optimizer starts from, as one vector per layout."""
    found = {}
    for name, trainer in trainers.items():
        engine = make_engine(model, trainer, dtype="bfloat16")
        state = engine._optimizer.state()
        found[name] = torch.cat([tensor.flatten().clone() for tensor in state["main_weights"]])
        close(engine)
    return found


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
    found = {}
    sample = Sample.of([1] * prompt, [2] * response)
    for name, (model, dtype, trainer) in runs.items():
        engine = make_engine(model, {**trainer, "tokens_per_microbatch": prompt + response}, dtype=dtype)
        count = 8 if trainer.get("pipeline_parallel", 1) > 1 else trainer.get("data_parallel", 1)
        saved = SavedBytes(engine.params().values())
        with torch.autograd.graph.saved_tensors_hooks(saved.keep, lambda saved: saved()):
            engine.forward_backward(engine.share([sample] * count), cross_entropy(response))
        engine.update(1, loss_is_finite=True)
        state = engine._optimizer.state()
        moments = [value for group in state["moments"] for kept in group.values() for value in kept.values()]
        moments = [value for value in moments if torch.is_tensor(value) and value.numel() > 1]
        buffers = [buffer for part in engine._models for buffer in (*part.buffers, *part.expert_parallel_buffers)]
        found[name] = {
            "weights": sum(tensor.nbytes for tensor in engine.params().values()),
            "gradients": sum(buffer.grad_data.nbytes for buffer in buffers),
            "optimizer": sum(tensor.nbytes for tensor in [*moments, *state.get("main_weights", [])]),
            "activations": saved.peak,
        }
        checkpoint = Path(folder) / name
        engine.save(checkpoint)
        dist.barrier()
        found[name]["checkpoint"] = sum(file.stat().st_size for file in checkpoint.iterdir())
        close(engine)
    return found


def by_hand(model, uniform):
    """One step of the on-policy gradient over *all* trajectories, and two PPO minibatches, without PolicyTrainer."""
    from megasync.algorithms.advantages import group_advantages

    def plan(seed):
        members, advantages = [], []
        for group in make_groups(seed, uniform=uniform):
            members.append(group.trajectories)
            advantages.append(group_advantages([t.reward for t in group.trajectories], True))
        return members, advantages

    def flat(groups):
        return [item for group in groups for item in group]

    def scored(trajectory):
        return [i for i, keep in enumerate(trajectory.loss_mask) if keep]

    def update(engine, members, advantages, old):
        share = engine.share(samples := [Sample.of(t.prompt_ids, t.response_ids, scored(t)) for t in members])
        tokens = sum(len(sample.scored) for sample in samples)

        def loss(batch, logprobs, entropy):
            total = 0.0
            own = share.microbatches[batch.index].sequences
            for index, part in zip(own, logprobs.split(batch.counts), strict=True):
                ratio = (part - (part.detach() if old is None else old[index])).exp()
                free, bounded = ratio * advantages[index], ratio.clamp(0.8, 1.28) * advantages[index]
                total = total - torch.minimum(free, bounded).sum()
            return total / tokens, {}

        engine.forward_backward(share, loss)
        return engine.update(1, True).grad_norm

    members, advantages = plan(1)
    engine = make_engine(model)
    norm = update(engine, flat(members), flat(advantages), None)
    after_one = weights(engine)
    close(engine)

    engine = make_engine(model, optimizer={"lr": 0.05})
    halves = [(flat(members[part]), flat(advantages[part])) for part in (slice(2), slice(2, None))]
    # Scored in the trainer's packing, without those that have no advantage: Adam amplifies differences in rounding.
    olds = []
    for trajectories, weighed in halves:
        samples = [Sample.of(t.prompt_ids, t.response_ids, scored(t)) for t in trajectories]
        scores = iter(engine.score_everywhere([s for s, weight in zip(samples, weighed, strict=True) if weight]))
        olds.append(
            [next(scores) if weight else torch.zeros(len(s.scored)) for s, weight in zip(samples, weighed, strict=True)]
        )
    for half, old in zip(halves, olds, strict=True):
        update(engine, *half, old)
    after_two = weights(engine)
    close(engine)
    return {"grad_norm": norm, "after_one": after_one, "after_two": after_two}


def reference(model):
    """Scores by reference weights, before and after training, and whether the current ones are unchanged."""
    engine = make_engine(model, {"tensor_parallel": dist.get_world_size()})
    policy = PolicyTrainer(engine, AlgorithmConfig(kl_coef=0.1), dump_dir="unused")
    samples = [Sample.of(t.prompt_ids, t.response_ids, [0, 1]) for t in make_groups(1)[0].trajectories]
    initial = torch.cat(engine.score_everywhere(samples))
    metrics = [train_on(policy, make_groups(seed), seed) for seed in (1, 2)]
    trained = torch.cat(engine.score_everywhere(samples))
    referred = torch.cat(engine.score_everywhere(samples, reference=True))
    again = torch.cat(engine.score_everywhere(samples))
    close(engine)
    return {"initial": initial, "trained": trained, "referred": referred, "again": again, "metrics": metrics}


def streamed_reference(runs):
    """For each model in its layout: scores of the reference, of other weights, of the reference streamed through the
    device, and of the others again; whether the weights are where they were, also after a pass that failed."""
    found = {}
    for name, (model, trainer) in runs.items():
        engine = make_engine(model, {**trainer, "tokens_per_microbatch": 16})
        samples = [Sample.of(t.prompt_ids, t.response_ids, [0, 1]) for g in make_groups(1) for t in g.trajectories]
        scores = {"reference": torch.cat(engine.score_everywhere(samples))}
        engine.keep_reference()
        for tensor in engine.params().values():
            tensor.mul_(1.1)
        before, places = weights(engine), [tensor.data_ptr() for tensor in engine.params().values()]
        scores["others"] = torch.cat(engine.score_everywhere(samples))
        scores["streamed"] = torch.cat(engine.score_everywhere(samples, reference=True))
        scores["again"] = torch.cat(engine.score_everywhere(samples))
        with contextlib.suppress(KeyError), engine._reference.applied():
            layer = engine._chunks[0].decoder.layers[0]
            first = next(layer.parameters())
            failing = layer.register_forward_pre_hook(lambda *_: {}["fails while reference weights are in place"])
            try:
                layer(None)
            finally:
                failing.remove()
        moved = first.data_ptr() not in places
        same = all(torch.equal(before[name], tensor) for name, tensor in engine.params().items())
        found[name] = {
            "scores": scores,
            "microbatches": len(engine.share(samples).microbatches),
            "in_place": same and not moved and [t.data_ptr() for t in engine.params().values()] == places,
            "device_bytes": SLOTS * engine._reference._slot_bytes,
        }
        close(engine)
    return found


def guard(model, folder):
    """A NaN that only one data-parallel rank computes with, until training fails."""
    engine = make_engine(model, {"data_parallel": dist.get_world_size(), "max_skipped_steps": 2})
    policy = PolicyTrainer(engine, AlgorithmConfig(), dump_dir=folder)
    good, bad = make_groups(1), make_groups(1)
    first = bad[0].trajectories[0]
    bad[0].trajectories[0] = replace(first, logprobs=[float("nan"), *first.logprobs[1:]])
    before = weights(engine)
    skipped = train_on(policy, bad, 1)
    unchanged = all(torch.equal(before[name], tensor) for name, tensor in engine.params().items())
    fine = train_on(policy, good, 2)
    changed = any(not torch.equal(before[name], tensor) for name, tensor in engine.params().items())
    finite = all(tensor.isfinite().all() for tensor in engine.params().values())
    error = None
    survived = 0
    try:
        for step in range(3, 10):
            train_on(policy, bad, step)
            survived += 1
    except TrainingError as caught:
        error = str(caught)
    close(engine)
    return {
        "skipped": skipped,
        "unchanged": unchanged,
        "fine": fine,
        "changed": changed and finite,
        "survived": survived,
        "error": error,
    }


def idle(model):
    """Batches without anything to learn: equal rewards everywhere, and everything masked."""
    engine = make_engine(model)
    policy = PolicyTrainer(engine, AlgorithmConfig(), dump_dir="unused")
    before = weights(engine)
    uniform = train_on(policy, make_groups(1, uniform=range(4)), 1)
    masked = make_groups(2)
    for group in masked:
        group.trajectories[:] = [replace(t, loss_mask=[0] * len(t.loss_mask)) for t in group.trajectories]
    masked = train_on(policy, masked, 2)
    unchanged = all(torch.equal(before[name], tensor) for name, tensor in engine.params().items())
    try:
        train_on(policy, [Group("lone", make_groups(1)[0].trajectories[:1])], 3)
        error = None
    except TrainingError as caught:
        error = str(caught)
    close(engine)
    return {"uniform": uniform, "masked": masked, "unchanged": unchanged, "error": error}


def resume(runs, folder):
    """Steps 3 and 4 of an uninterrupted run, and of one that was saved after step 2 and loaded into a new engine."""
    found = {}
    for name, arguments in runs.items():
        path = Path(folder) / name
        options = {"model": arguments["model"], "trainer": arguments["trainer"], "dtype": arguments["dtype"]}

        def begin(options=options):
            engine = make_engine(**options, optimizer={"decay": "cosine", "warmup_steps": 1})
            return engine, PolicyTrainer(engine, AlgorithmConfig(), dump_dir="unused")

        def continue_(engine, policy):
            metrics = [train_on(policy, make_groups(seed), seed) for seed in (3, 4)]
            for entry in metrics:
                entry.pop("train/seconds")
            return metrics, weights(engine)

        engine, policy = begin()
        for seed in (1, 2):
            train_on(policy, make_groups(seed), seed)
        engine.save(path, {"step": 2, "note": "hello"})
        straight = continue_(engine, policy)
        close(engine)
        engine, policy = begin()
        state = engine.load(path)
        resumed = continue_(engine, policy)
        close(engine)
        found[name] = {"straight": straight, "resumed": resumed, "state": state}
    return found


def broken_checkpoints(model, folder):
    """Saves that fail on one rank, and checkpoints that are not whole."""
    run = Path(folder)
    engine = make_engine(model, {"tensor_parallel": 2})

    def attempt(action, *args):
        try:
            action(*args)
        except CheckpointError as error:
            return str(error)
        return None

    engine.forward_backward(engine.share([Sample.of([1, 2], [3, 4])]), cross_entropy(2))
    engine.update(1, loss_is_finite=True)
    engine.save(checkpoint.step_path(run, 1), {"step": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        # Room for the weights, not for the optimizer's two moments.
        weight_bytes = sum(tensor.nbytes for tensor in engine.params().values())
        resource.setrlimit(resource.RLIMIT_FSIZE, (3 * weight_bytes // 2, limits[1]))
    full = attempt(engine.save, checkpoint.step_path(run, 2))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    left = sorted(path.name for path in (run / "checkpoints").iterdir())
    latest = checkpoint.latest(run).name
    again = attempt(engine.load, checkpoint.step_path(run, 1))
    existing = attempt(engine.save, checkpoint.step_path(run, 1))
    engine.save(checkpoint.step_path(run, 3), {"step": 3})
    dist.barrier()
    if dist.get_rank() == 0:
        (checkpoint.step_path(run, 3) / "model-00001.safetensors").unlink()
    dist.barrier()
    before = weights(engine)
    missing = attempt(engine.load, checkpoint.step_path(run, 3))
    kept = all(torch.equal(before[name], tensor) for name, tensor in engine.params().items())
    close(engine)
    other = make_engine(model, {"data_parallel": 2})
    layout = attempt(other.load, checkpoint.step_path(run, 1))
    absent = attempt(other.load, checkpoint.step_path(run, 9))
    close(other)
    return {
        "full": full,
        "left": left,
        "latest": latest,
        "again": again,
        "existing": existing,
        "missing": missing,
        "kept": kept,
        "layout": layout,
        "absent": absent,
    }


def main() -> None:
    rank, world = int(sys.argv[1]), int(sys.argv[2])
    join(rank, world)
    for line in sys.stdin:
        folder = Path(line.strip())
        request = json.loads((folder / "request.json").read_text())
        torch.save(globals()[request["case"]](**request["arguments"]), folder / f"result-{rank}.pt")
        print("done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
