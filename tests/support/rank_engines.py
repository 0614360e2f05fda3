"""What the bodies of rank tests share: engines, batches and training, in the process of a rank.

Only ranks import this (`worker.py`), because the device is prepared and Megatron loaded at once. The process has the
arguments of `worker.py`.
"""

import contextlib
import gc
import itertools
import json
import logging
import sys
from collections import defaultdict
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megasync.buffer.payload import in_memory
from megasync.buffer.segments import load_trajectories
from megasync.config.schema import (
    AlgorithmConfig,
    Config,
    CriticConfig,
    LoraConfig,
    MegatronConfig,
    ModelConfig,
    OptimizerConfig,
    TrainerConfig,
)
from megasync.device import resolve_device
from megasync.lab.rehearsal.device import RehearsalDevice
from megasync.lab.rehearsal.packages import add_to_path
from megasync.trajectory import BASELINE, TEACHER, TOKEN_REWARDS, Group, Trajectory

# Metrics of a step that depend on the clock, as in `trainer_ranks`.
TIMED = ("train/seconds", "train/tokens_per_second_per_device", "train/tflops_per_device")
FLAVOUR, _, MEGATRON = sys.argv[1].partition(" ")
STORES = Path(sys.argv[2])
MEETINGS = itertools.count()
if MEGATRON:
    add_to_path("megatron-core", MEGATRON)
DEVICE = RehearsalDevice() if FLAVOUR == "te" else resolve_device("cpu")
DEVICE.prepare_process(local_rank=0)

# Megatron may be imported only after `prepare_process`.

from megasync.errors import TrainingError  # noqa: E402
from megasync.trainer import checkpoint  # noqa: E402
from megasync.trainer.batch import Sample  # noqa: E402
from megasync.trainer.critic import Critic, critic_learner  # noqa: E402
from megasync.trainer.learner import MegatronLearner  # noqa: E402
from megasync.trainer.policy import PolicyTrainer  # noqa: E402
from megasync.trainer.rank import TrainerRank  # noqa: E402
from megasync.trainer.reference import SLOTS  # noqa: E402
from megasync.trajectory import Support  # noqa: E402


def make_engine(model, trainer=None, optimizer=None, dtype="float32", total_steps=10):
    gc.collect()
    options = dict(trainer or {})
    options["megatron"] = MegatronConfig(**options.get("megatron", {}))
    options["lora"] = LoraConfig(**options.get("lora", {}))
    config = TrainerConfig(**options, optimizer=OptimizerConfig(**{"lr": 1e-3, **(optimizer or {})}))
    engine = MegatronLearner(ModelConfig(path=model, dtype=dtype), config, DEVICE, dist.get_rank(), total_steps)
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
    # Each process group wraps it once more, to print the rank before every line.
    sys.excepthook = sys.__excepthook__
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world, timeout=timedelta(seconds=120)
    )


def to_samples(rows):
    """Rows may have ``routes`` [prompt and response tokens - 1, expert layers, experts per token] and a ``support``,
    ids for each response token.
    """
    return [
        replace(
            Sample.of(row["prompt"], row["response"]),
            routes=np.array(row["routes"], np.uint8) if "routes" in row else None,
            support=Support.of(row["support"]) if "support" in row else None,
        )
        for row in rows
    ]


def cross_entropy(tokens):
    """A loss that touches every output: mean negative log-prob plus a little entropy, over `tokens`."""

    def loss(batch, logprobs, entropy):
        weight = float(batch.counted) / tokens
        count = torch.tensor(float(len(logprobs) * batch.counted))
        return -(logprobs.sum() + 0.1 * entropy.sum()) * weight, {"tokens": count}

    return loss


def layouts(models, rows, layouts, folder, dtype="float32"):
    """Scores, one training step and a checkpoint for each model in each layout."""
    found = {}
    for name, model in models.items():
        for label, trainer in layouts.items():
            engine = make_engine(model, trainer, dtype=dtype)
            samples = to_samples(rows)
            tokens = sum(len(sample.scored) for sample in samples)
            scores = engine.score_everywhere(samples)
            served = {name: param.clone() for name, param in engine.params().items()}
            sums = engine.forward_backward(engine.local_batch(samples), cross_entropy(tokens))
            grads = gradients(engine)
            update = engine.update(1, loss_is_finite=True)
            engine.save(Path(folder) / f"{name}-{label}", {"step": 1})
            found[name, label] = {
                "scores": torch.cat(scores),
                "loss": sums["loss"],
                "tokens": sums["tokens"],
                "gradients": grads,
                "grad_norm": update.grad_norm,
                "buckets": len(engine.wrapped[0].bucket_groups),
                "decays_qk_norms": engine.optimizer._optimizer.config.apply_wd_to_qk_layernorm,
                "lr": update.lr,
                "after": torch.cat(engine.score_everywhere(samples)),
                "microbatches": len(engine.local_batch(samples).microbatches),
                "lengths": {batch.ids.shape[1] for batch in engine._batches(engine.local_batch(samples), False)},
                "attention": attention_backend(),
                "served": served if (trainer or {}).get("lora") else None,
            }
            close(engine)
    return found


def attention_backend():
    """The backend that Transformer Engine chose for the last attention; None with Megatron's own layers."""
    if DEVICE.spec == "local":
        return None
    from transformer_engine.pytorch.attention.dot_product_attention import dot_product_attention

    chosen = dot_product_attention._attention_backends
    return next(name for name in ("flash", "fused", "unfused") if chosen[f"use_{name}_attention"])


def gradients(engine):
    """Gradients by parameter name; None where each data-parallel rank has only a part of their sum."""
    if engine._models[0].ddp_config.use_distributed_optimizer:
        return None
    trained = {name: weight for name, weight in engine.trained.items() if weight.requires_grad}
    return {name: weight.main_grad.clone() for name, weight in trained.items()}


def make_groups(seed, groups=4, samples=3, vocab=131, uniform=(), teachers=False, stepped=False, forked=False):
    """Random groups; those in `uniform` have equal rewards. Every third response has a masked token.

    If `teachers`, all but these responses have log-probs of a teacher. If `stepped`, every other token of the others
    has a reward, a part of that of the response. If `forked`, the first two trajectories of a group are a sample.
    """
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
            arrays = {TEACHER: np.array(logprobs, np.float32) + 0.5} if teachers and member % 3 != 2 else {}
            if stepped and member % 3 != 0:
                places = np.arange(len(response))
                arrays[TOKEN_REWARDS] = np.where(places % 2 == 0, 0.1 * places, np.nan).astype(np.float32)
            more = {"metrics": {BASELINE: 0.5}, "arrays": arrays, "sample": max(0, member - forked)}
            members.append(Trajectory(prompt, response, mask, logprobs, [0] * len(response), reward=reward, **more))
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


def train(model, trainer=None, optimizer=None, dtype="float32", **arguments):
    """`train_engine` of a new engine."""
    engine = make_engine(model, trainer, optimizer, dtype)
    found = train_engine(engine, **arguments)
    close(engine)
    return found


def train_engine(engine, steps, algorithm=None, teachers=False, **batch):
    """Metrics and loads of a few policy steps, and the weights at the end. ``batch`` shapes `make_groups`."""
    policy = PolicyTrainer(engine, AlgorithmConfig(**(algorithm or {})), dump_dir="unused", teachers=teachers)
    # As the first weight sync does, which merges adapters.
    engine.params()
    batch["teachers"] = teachers
    loaded = [[] for _ in range(steps)]
    metrics = [train_on(policy, make_groups(n, **batch), n, n, loaded[n - 1]) for n in range(1, steps + 1)]
    # Those of the responses with a teacher are all trained.
    responses = [t for group in make_groups(1, **batch) for t in group.trajectories if TEACHER in t.arrays]
    teacher_tokens = sum(len(response.response_ids) for response in responses)
    return {"metrics": metrics, "weights": weights(engine), "loaded": loaded, "teacher_tokens": teacher_tokens}


def critics(model, runs, folder=None):
    """Metrics of policy steps with a critic, and the weights of both, once per entry of `runs`."""
    return {name: train_with_critic(model, folder=folder, **arguments) for name, arguments in runs.items()}


def train_with_critic(
    model, steps, trainer=None, critic=None, algorithm=None, optimizer=None, dtype="float32", folder=None, **batch
):
    """With a `folder`, a checkpoint after the second step is loaded into fresh engines, which go on from there."""
    algorithm = AlgorithmConfig(**{"advantage": "gae", **(algorithm or {})})
    critic = {"optimizer": {"lr": 1e-3}, **(critic or {})}
    config = CriticConfig(**critic | {"enabled": True, "optimizer": OptimizerConfig(**critic["optimizer"])})

    def start():
        engine = make_engine(model, trainer, optimizer, dtype)
        second = critic_learner(config, engine.model_config, engine.trainer_config, DEVICE, dist.get_rank(), seed=3)
        second.initialize()
        found = Critic(second, config)
        rank = TrainerRank(Config(algorithm=algorithm), dist.get_rank(), dist.get_world_size(), str(folder))
        rank._learner, rank._critic = engine, found
        return rank, PolicyTrainer(engine, algorithm, dump_dir="unused", critic=found)

    rank, policy = start()
    metrics = []
    for step in range(1, steps + 1):
        metrics.append(train_on(policy, make_groups(step, **batch), step, step))
        if folder is not None and step == 2:
            path = checkpoint.step_path(folder, step)
            rank.begin_save(str(path), {"step": step})
            rank.finish_save(wait=True)
            close_both(rank)
            rank, policy = start()
            rank.load(str(path))
    found = {"metrics": metrics, "weights": weights(rank._learner), "critic": weights(rank._critic.learner)}
    close_both(rank)
    return found


def close_both(rank):
    """The critic has the same process groups."""
    rank._critic.learner.chunks.clear()
    close(rank._learner)


def policies(model, runs):
    """`train` once per entry of `runs`. Those with the same engine share it: each begins with its first checkpoint."""
    by_engine = defaultdict(dict)
    for name, arguments in runs.items():
        options = {key: arguments[key] for key in ("trainer", "optimizer", "dtype") if key in arguments}
        by_engine[json.dumps(options, sort_keys=True)][name] = {
            key: value for key, value in arguments.items() if key not in options
        }
    found = {}
    for options, alike in by_engine.items():
        engine, start = make_engine(model, **json.loads(options)), STORES / f"start-{next(MEETINGS)}"
        engine.save(start)
        for name, arguments in alike.items():
            engine.load(start)
            engine._reference = None
            found[name] = train_engine(engine, **arguments)
        close(engine)
    return found


def layer_norms(runs):
    """Metrics of a step in which norms are measured by layers, for each entry of `runs`."""
    found = {}
    for name, arguments in runs.items():
        engine = make_engine(**arguments)
        policy = PolicyTrainer(engine, AlgorithmConfig(), dump_dir="unused", norms_every=2)
        found[name] = [train_on(policy, make_groups(step), step, step) for step in (1, 2)]
        close(engine)
    return found


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
            layer = engine.chunks[0].decoder.layers[0]
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
            "microbatches": len(engine.local_batch(samples).microbatches),
            "in_place": same and not moved and [t.data_ptr() for t in engine.params().values()] == places,
            "device_bytes": SLOTS * engine._reference._slot_bytes,
        }
        close(engine)
    return found


def guard(model, folder, optimizer=None):
    """A NaN that only one data-parallel rank computes with, until training fails."""
    engine = make_engine(model, {"data_parallel": dist.get_world_size(), "max_skipped_steps": 2}, optimizer)
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


def resume(runs, folder):
    """Steps 3 and 4 of an uninterrupted run, and of one that was saved after step 2 and loaded into a new engine."""
    found = {}
    for name, arguments in runs.items():
        path = Path(folder) / name
        options = {"model": arguments["model"], "trainer": arguments["trainer"], "dtype": arguments["dtype"]}
        options["optimizer"] = {"decay": "cosine", "warmup_steps": 1} | arguments.get("optimizer", {})

        def begin(options=options):
            engine = make_engine(**options)
            return engine, PolicyTrainer(engine, AlgorithmConfig(), dump_dir="unused")

        def continue_(engine, policy):
            metrics = [train_on(policy, make_groups(seed), seed) for seed in (3, 4)]
            for entry in metrics:
                for timed in TIMED:
                    entry.pop(timed)
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


def overlapped(models, trainers, folder, forgotten=False, optimizer=None, dtype="float32"):
    """What each reader of weights finds after updates, with and without gathering weights in forward passes.

    ``forgotten``: nobody waits for the weights.
    """
    found = {}
    for (name, model), (label, trainer) in itertools.product(models.items(), trainers.items()):
        for overlap in (False, True):
            gather = {"overlap_grad_reduce": True, "overlap_param_gather": overlap}
            bucket = {"megatron": {"ddp": {"bucket_size": 1000}}}
            engine = make_engine(model, {**trainer, **gather, **bucket}, optimizer, dtype)
            policy = PolicyTrainer(engine, AlgorithmConfig(), dump_dir="unused")
            samples = to_samples(
                [{"prompt": [1, 2, 3], "response": [4, 5, 6, 7]}, {"prompt": [8], "response": [9, 10]}]
            )
            share = engine.local_batch(samples)
            metrics = []
            waits = mock.patch.object(engine, "_gather") if forgotten and overlap else contextlib.nullcontext()
            with waits:
                # Its two minibatches follow each other, and the weight sync follows them.
                metrics.append(train_on(policy, make_groups(1), 1))
                stepped = weights(engine)
                results = {"weights": stepped}
                for update, reader in enumerate(("score", "save", "reference"), start=2):
                    engine.forward_backward(share, cross_entropy(6))
                    engine.update(update, loss_is_finite=True)
                    if reader == "score":
                        results["score"] = torch.cat(engine.score_everywhere(samples))
                    elif reader == "save":
                        path = Path(folder) / f"{name}-{label}-{overlap}"
                        engine.save(path, {})
                        results["save"] = {
                            key: value
                            for file in sorted(path.glob("model-*"))
                            for key, value in load_file(file).items()
                        }
                    else:
                        engine.keep_reference()
                        results["reference"] = torch.cat(engine.score_everywhere(samples, reference=True))
                metrics.append(train_on(policy, make_groups(2), 2))
            for entry in metrics:
                for timed in TIMED:
                    entry.pop(timed)
            found[name, label, overlap] = {
                **results,
                "metrics": metrics,
                "buckets": len(engine.wrapped[0].bucket_groups),
            }
            close(engine)
    return found


def states(model, ways, folder):
    """The optimizer's states after a step in each way, after loading each way's checkpoint into each other's engine,
    and what that logged.

    A way is an optimizer's options. Results are by parameter and kind, in float32.
    """
    found = {}

    def held(engine):
        slices = engine.optimizer.slices(engine.weights)
        parts = {
            name: {**part.tensors, **{kind: make() for kind, make in part.made.items()}}
            for name, part in slices.items()
        }
        return {(name, kind): tensor.float().clone() for name, kinds in parts.items() for kind, tensor in kinds.items()}

    for name, options in ways.items():
        engine = make_engine(
            model, {"data_parallel": dist.get_world_size()}, {**options, "clip_grad": 0.01}, "bfloat16"
        )
        start = held(engine)
        metrics = train_on(PolicyTrainer(engine, AlgorithmConfig(), dump_dir="unused"), make_groups(1), 1)
        engine.save(Path(folder) / name, {})
        dtypes = {
            str(tensor.dtype)
            for inner in engine.optimizer._inner()
            for state in inner.state.values()
            for tensor in state.values()
        }
        found[name] = {
            "start": start,
            "after": held(engine),
            "weights": weights(engine),
            "norm": metrics["train/grad_norm"],
            "dtypes": sorted(dtypes),
        }
        close(engine)
    for name, options in ways.items():
        engine = make_engine(model, {"data_parallel": dist.get_world_size()}, options, "bfloat16")
        for other in ways:
            with mock.patch.object(logging.getLogger("megasync.trainer.learner"), "info") as logged:
                engine.load(Path(folder) / other)
            converted = [call.args[1] for call in logged.call_args_list if "Converted" in call.args[0]]
            found[name, other] = {"after": held(engine), "weights": weights(engine), "converted": converted}
        close(engine)
    return found
