"""Trainer ranks, each in its own process: `worker.py FLAVOUR STORES SOCKETS`.

FLAVOUR is "local", or "te" for Transformer Engine's layers, then possibly with the version of another megatron-core:
"te 0.19.2". STORES is the folder of the rendezvous files, where rank N logs to log-N.txt. SOCKETS are the numbers of
one socket per rank, as JSON. Megatron is imported once, and the ranks are forked. Each line on a rank's socket is also
a folder: the function that its request.json names is called with the arguments given there, its result is written to
result-RANK.pt, and "done" is sent. An error ends the process.
"""

import collections
import contextlib
import gc
import itertools
import json
import logging
import os
import resource
import sys
import weakref
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from unittest import mock

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import numpy as np
import torch
import torch.distributed as dist
from local_ranks import forked
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
from megasync.data.row_file import RowFile, write_rows
from megasync.data.supervised import TokenRow
from megasync.device import resolve_device
from megasync.lab.rehearsal.device import RehearsalDevice
from megasync.lab.rehearsal.graphs import StandInGraph
from megasync.lab.rehearsal.packages import add_to_path
from megasync.layout import shards
from megasync.layout.block_fp8 import Block
from megasync.layout.quantized import QuantizedLayout
from megasync.layout.shards import load_shards
from megasync.layout.topology import Topology
from megasync.observe.rollouts import RolloutLog
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
from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate  # noqa: E402
from megatron.core.transformer.module import param_is_not_shared  # noqa: E402

from megasync.errors import CheckpointError, ConfigError, TrainingError  # noqa: E402
from megasync.trainer import checkpoint, layer_graphs  # noqa: E402
from megasync.trainer.architecture import rope_parameters  # noqa: E402
from megasync.trainer.batch import Sample  # noqa: E402
from megasync.trainer.critic import Critic, critic_engine  # noqa: E402
from megasync.trainer.engine import MegatronEngine  # noqa: E402
from megasync.trainer.layer_specs import chunk_specs  # noqa: E402
from megasync.trainer.model import named_weights, transformer_config  # noqa: E402
from megasync.trainer.param_attributes import set_param_attributes  # noqa: E402
from megasync.trainer.policy import PolicyTrainer  # noqa: E402
from megasync.trainer.quantized import QuantizedWeights  # noqa: E402
from megasync.trainer.rank import TrainerRank  # noqa: E402
from megasync.trainer.recording import Recorder  # noqa: E402
from megasync.trainer.reference import SLOTS  # noqa: E402
from megasync.trainer.supervised import SupervisedTrainer  # noqa: E402
from megasync.trajectory.support import Support  # noqa: E402


def make_engine(model, trainer=None, optimizer=None, dtype="float32", total_steps=10):
    gc.collect()
    options = dict(trainer or {})
    options["megatron"] = MegatronConfig(**options.get("megatron", {}))
    options["lora"] = LoraConfig(**options.get("lora", {}))
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
                "buckets": len(engine.wrapped[0].bucket_groups),
                "decays_qk_norms": engine.optimizer._optimizer.config.apply_wd_to_qk_layernorm,
                "lr": update.lr,
                "after": torch.cat(engine.score_everywhere(samples)),
                "microbatches": len(engine.share(samples).microbatches),
                "lengths": {batch.ids.shape[1] for batch in engine._batches(engine.share(samples), False)},
                "attention": attention_backend(),
                "served": served if (trainer or {}).get("lora") else None,
            }
            close(engine)
    return found


def too_long(model, rows, trainer):
    """The error of a share that one of the rows does not fit."""
    engine = make_engine(model, trainer)
    try:
        engine.share(to_samples(rows))
    except TrainingError as error:
        return str(error)
    finally:
        close(engine)


def fit(model, rows, layouts, folder, steps, optimizer, dtype="float32"):
    """Losses of some steps on the same rows in each layout, and the checkpoint after them."""
    found = {}
    for label, trainer in layouts.items():
        engine = make_engine(model, trainer, optimizer, dtype)
        samples = to_samples(rows)
        loss = cross_entropy(sum(len(sample.scored) for sample in samples))
        losses = []
        for step in range(1, steps + 1):
            losses.append(engine.forward_backward(engine.share(samples), loss)["loss"])
            engine.update(step, loss_is_finite=True)
        engine.save(Path(folder) / label)
        found[label] = losses
        close(engine)
    return found


def attention_backend():
    """The backend that Transformer Engine chose for the last attention; None with Megatron's own layers."""
    if DEVICE.spec == "local":
        return None
    from transformer_engine.pytorch.attention.dot_product_attention import dot_product_attention

    chosen = dot_product_attention._attention_backends
    return next(name for name in ("flash", "fused", "unfused") if chosen[f"use_{name}_attention"])


def marks(model, trainer):
    """By parameter: its shards, how its gradient is reduced, what the norm counts of it here, and in which buffer."""
    engine = make_engine(model, trainer)
    experts = {
        id(param) for part in engine._models for group in part.expert_parallel_bucket_groups for param in group.params
    }
    group = parallel_state.get_tensor_model_parallel_group()
    found = {}
    for name, param in engine.weights.items():
        if not isinstance(param, torch.nn.Parameter):
            continue
        counted = param_is_not_shared(param) and param_is_not_tensor_parallel_duplicate(param, group)
        found[name] = {
            "sharded": param.tensor_model_parallel,
            "dim": param.partition_dim,
            "sequence_parallel": param.sequence_parallel,
            "counted": param.numel() if counted else 0,
            "expert": id(param) in experts,
        }
    close(engine)
    return found


def fp8():
    """By recipe: output and gradients of a linear layer after two steps, and how far a quantised tensor is from its
    values, relative to the largest of its tensor or block. "none" is the layer in bfloat16."""
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe

    recipes = {
        "none": None,
        "delayed": recipe.DelayedScaling(),
        "current": recipe.Float8CurrentScaling(),
        "block": recipe.Float8BlockScaling(),
    }
    found = {}
    for name, scaling in recipes.items():
        torch.manual_seed(0)
        layer = te.LayerNormLinear(256, 128, params_dtype=torch.bfloat16, normalization="RMSNorm", device="cpu")
        x = torch.randn(128, 256).bfloat16().requires_grad_()
        for _ in range(2):
            layer.zero_grad()
            x.grad = None
            with te.autocast(enabled=scaling is not None, recipe=scaling):
                y = layer(x)
            y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).bfloat16())
        found[name] = {"y": y.detach(), "x": x.grad, "weight": layer.weight.grad, "bias": layer.bias.grad}
    return found


def experts_in_fp8(model, rows, trainer, recipe):
    """Scores, gradients and served weights in bfloat16, with a recipe, and with "more rows" of zeros than it needs.

    ``tokens`` of each expert, and to how many rows they are ``filled`` up, for each pass through a layer. ``chosen`` is
    the number of experts that the routers chose in all.
    """
    from megatron.core.transformer.moe.experts import TEGroupedMLP
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    found = {}
    for name in ("bfloat16", recipe, "more rows"):
        engine = make_engine(model, {**trainer, "fp8": None if name == "bfloat16" else recipe}, dtype="bfloat16")
        notes = {"tokens": [], "filled": [], "recipes": set(), "chosen": 0}

        def before_layer(layer, inputs, notes=notes):
            notes["chosen"] += inputs[0].shape[:-1].numel() * layer.config.moe_router_topk

        def before_experts(_, inputs, notes=notes):
            notes["tokens"] += inputs[1].tolist()

        def before_product(_, inputs, notes=notes):
            notes["filled"] += [int(count) for count in inputs[1]]
            if FP8GlobalStateManager.is_fp8_enabled():
                notes["recipes"].add(type(FP8GlobalStateManager.get_fp8_recipe()).__name__)

        for part in (part for chunk in engine.chunks for part in chunk.modules()):
            if isinstance(part, MoELayer):
                part.register_forward_pre_hook(before_layer)
            elif isinstance(part, TEGroupedMLP):
                part.register_forward_pre_hook(before_experts)
                part.linear_fc1.register_forward_pre_hook(before_product)
                if name == "more rows":
                    part.quantization_padding.align_size = part.quantization_unpadding.align_size = 64
        samples = to_samples(rows)
        scores = torch.cat(engine.score_everywhere(samples))
        served = {key: param.clone() for key, param in engine.params().items()}
        tokens = sum(len(sample.scored) for sample in samples)
        engine.forward_backward(engine.share(samples), cross_entropy(tokens))
        results = {"scores": scores, "served": served, "gradients": gradients(engine)}
        found[name] = {**notes, **results, "grad_norm": engine.update(1, loss_is_finite=True).grad_norm}
        close(engine)
    return found


def in_user_buffers(model, rows, ways, folder, dtype="bfloat16"):
    """`layouts`, with the exchanges of tokens in Transformer Engine's buffers in each, and what the buffers hold."""
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.module import base

    found = {}
    for label, trainer in ways.items():
        exchanges = collections.Counter()

        def counted(name, exchanges=exchanges):
            exchange = getattr(tex.CommOverlap, name)

            def run(buffer):
                exchanges[name] += 1
                return exchange(buffer)

            return mock.patch.object(tex.CommOverlap, name, run)

        held = {}
        initialize = base.initialize_ub

        def noted(*args, held=held, initialize=initialize, **options):
            initialize(*args, **options)
            held.update({name: buffer.nbytes for (name, _), buffer in base._ub_communicators.items()})

        with counted("gather"), counted("scatter"), mock.patch.object(base, "initialize_ub", noted):
            result = layouts({"m": model}, rows, {label: trainer}, folder, dtype)["m", label]
        found[label] = {**result, "exchanges": dict(exchanges), "held": held, "open": base.is_ub_initialized()}
    return found


# What `LayerGraphs` would do without one of its guards.
UNGUARDED = {
    "weights": mock.patch.object(layer_graphs, "_addresses", lambda params: []),
    "sequences": mock.patch.object(layer_graphs.LayerGraphs, "_set_starts", lambda graphs, packed: None),
}


def in_graphs(function, ways, unguarded=None, **arguments):
    """What a function below returns for each of the trainer's options, and how often each graph was launched."""
    found = {}
    for label, trainer in ways.items():
        launches = collections.Counter()

        def counted(graph, launches=launches, replay=StandInGraph.replay):
            launches[id(graph)] += 1
            replay(graph)

        with mock.patch.object(StandInGraph, "replay", counted), UNGUARDED.get(unguarded, contextlib.nullcontext()):
            result = globals()[function](trainer=trainer, **arguments)
        found[label] = {**result, "launches": sorted(launches.values())}
    return found


def one_layout(model, rows, trainer, folder, dtype):
    label = f"graphs-{'cuda_graphs' in trainer}"
    return layouts({"m": model}, rows, {label: trainer}, folder, dtype)["m", label]


def attention_parts(cases):
    """Per case the tokens of this rank among all, its output and gradients: Transformer Engine's attention whose tokens
    are split over all ranks. Float32 goes past `DotProductAttention`, which has no backend for it then."""
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch.attention.dot_product_attention.context_parallel import attn_forward_func_with_cp
    from transformer_engine_torch import thd_get_partitioned_indices

    world, rank, stream = dist.get_world_size(), dist.get_rank(), torch.cuda.current_stream()
    members, found = list(range(world)), []
    for case in cases:
        whole = torch.load(case["tensors"])
        lengths, layout = whole["lengths"], case["format"]
        padded = [-(-length // (2 * world)) * 2 * world for length in lengths]
        starts, offsets = (torch.tensor([0, *sizes]).cumsum(0).int() for sizes in (lengths, padded))
        indices, mask = thd_get_partitioned_indices(offsets, sum(padded), world, rank), "padding_causal"
        dtype = getattr(torch, case["dtype"])
        parts = [whole[name].to(dtype)[indices].contiguous() for name in ("q", "k", "v", "grad")]
        if layout != "thd":
            # Sequences of one length: [batch, length, heads, dim] or [length, batch, heads, dim].
            starts, mask = offsets, "causal"
            parts = [part.view(len(lengths), -1, *part.shape[1:]) for part in parts]
            if layout == "sbhd":
                parts = [part.transpose(0, 1).contiguous() for part in parts]
        q, k, v = (part.requires_grad_() for part in parts[:3])
        packed = {
            "cu_seqlens_q_padded": offsets,
            "cu_seqlens_kv_padded": offsets,
            "pad_between_seqs": padded != lengths,
        }
        if dtype == torch.float32:
            out = attn_forward_func_with_cp(
                True, q, k, v, starts, starts, max(padded), max(padded), offsets, offsets, 0.0,
                dist.group.WORLD, members, stream, case["comm"], 0.3, layout, mask,
                use_fused_attention=True, window_size=(-1, 0), pad_between_seqs=packed["pad_between_seqs"],
            )  # fmt: skip
        else:
            attention = te.DotProductAttention(
                q.shape[-2], (q.shape[-1], v.shape[-1]), k.shape[-2], qkv_format=layout, attn_mask_type=mask,
                softmax_scale=0.3, cp_group=dist.group.WORLD, cp_global_ranks=members, cp_stream=stream,
                cp_comm_type=case["comm"], attention_dropout=0.0,
            )  # fmt: skip
            lengths_of = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, "max_seqlen_q": max(padded)}
            lengths_of["max_seqlen_kv"] = max(padded)
            out = attention(q, k, v, **(lengths_of | packed if layout == "thd" else {}))
        out = out.view(*q.shape[:-1], v.shape[-1])
        out.backward(parts[3])
        rows = [out.detach(), q.grad, k.grad, v.grad]
        if layout == "sbhd":
            rows = [row.transpose(0, 1) for row in rows]
        found.append((indices, [row.reshape(-1, *row.shape[-2:]) for row in rows]))
    return found


def wrong_spec():
    def local(config, layout, layers, flavour, rope):
        return chunk_specs(config, layout, layers, "local", rope)

    return mock.patch("megasync.trainer.model.chunk_specs", local)


def refused_option():
    def options(*arguments):
        config = transformer_config(*arguments)
        config.normalization = "BatchNorm"
        return config

    return mock.patch("megasync.trainer.model.transformer_config", options)


def wrong_mark(mark, value, part):
    def set_attributes(weights, *arguments):
        set_param_attributes(weights, *arguments)
        for name, param in weights.items():
            if part in name:
                setattr(param, mark, value)

    return mock.patch("megasync.trainer.model.set_param_attributes", set_attributes)


def swapped_gate_and_up():
    load_folder = MegatronEngine._load_folder

    def load(*arguments):
        weights = load_folder(*arguments)
        fused = (name for name in weights if "linear_fc1.weight" in name)
        return weights | {name: torch.cat(weights[name].chunk(2)[::-1]) for name in fused}

    return mock.patch.object(MegatronEngine, "_load_folder", load)


def layers_in_a_row(topology, layers):
    """The layers of stages whose chunks follow each other, instead of alternating between the stages."""
    each = layers // (topology.pipeline * topology.virtual)
    ranges = [range(start, start + each) for start in range(0, layers, each)]
    return [ranges[stage * topology.virtual :][: topology.virtual] for stage in range(topology.pipeline)]


FAULTS = {
    "wrong spec": wrong_spec,
    "refused option": refused_option,
    "missing sequence-parallel mark": lambda: wrong_mark("sequence_parallel", False, "layer_norm_weight"),
    "missing tensor-parallel mark": lambda: wrong_mark("tensor_model_parallel", False, "linear_qkv.weight"),
    "experts in the dense group": lambda: wrong_mark("allreduce", True, ".experts."),
    "swapped gate and up": swapped_gate_and_up,
    "chunks out of turn": lambda: mock.patch.object(Topology, "stage_layers", layers_in_a_row),
}


def faulty(fault, model, rows, trainer, folder):
    """`layouts` with a fault, or the error that it causes."""
    with FAULTS[fault]():
        try:
            return layouts({"model": model}, rows, {"faulty": trainer}, folder)["model", "faulty"]
        except (ConfigError, AssertionError) as error:
            parallel_state.destroy_model_parallel()
            return f"{type(error).__name__}: {error}"


def is_freed(model, rows):
    """Whether a closed engine's model is freed after a training step."""
    engine = make_engine(model)
    engine.forward_backward(engine.share(to_samples(rows)), cross_entropy(10))
    chunk = weakref.ref(engine.chunks[0])
    close(engine)
    del engine
    gc.collect()
    return chunk() is None


def gradients(engine):
    """Gradients by parameter name; None where each data-parallel rank has only a part of their sum."""
    if engine._models[0].ddp_config.use_distributed_optimizer:
        return None
    trained = {name: weight for name, weight in engine.trained.items() if weight.requires_grad}
    return {name: weight.main_grad.clone() for name, weight in trained.items()}


def make_groups(seed, groups=4, samples=3, vocab=131, uniform=(), taught=False, stepped=False, forked=False):
    """Random groups; those in `uniform` have equal rewards. Every third response has a masked token.

    If `taught`, all but these responses have log-probs of a teacher. If `stepped`, every other token of the others has
    a reward, which is a part of that of the response. If `forked`, the first two trajectories of a group are a sample.
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
            arrays = {TEACHER: np.array(logprobs, np.float32) + 0.5} if taught and member % 3 != 2 else {}
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


def train(model, steps, trainer=None, algorithm=None, optimizer=None, dtype="float32", taught=False, **batch):
    """Metrics and loads of a few policy steps, and the weights at the end. ``batch`` shapes `make_groups`."""
    engine = make_engine(model, trainer, optimizer, dtype)
    policy = PolicyTrainer(engine, AlgorithmConfig(**(algorithm or {})), dump_dir="unused", taught=taught)
    # As the first weight sync does, which merges adapters.
    engine.params()
    batch["taught"] = taught
    loaded = [[] for _ in range(steps)]
    metrics = [train_on(policy, make_groups(n, **batch), n, n, loaded[n - 1]) for n in range(1, steps + 1)]
    # Those of the responses with a teacher are all trained.
    responses = [t for group in make_groups(1, **batch) for t in group.trajectories if TEACHER in t.arrays]
    taught_tokens = sum(len(response.response_ids) for response in responses)
    found = {"metrics": metrics, "weights": weights(engine), "loaded": loaded, "taught_tokens": taught_tokens}
    close(engine)
    return found


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
        second = critic_engine(config, engine.model_config, engine.trainer_config, DEVICE, dist.get_rank(), seed=3)
        second.initialize()
        found = Critic(second, config)
        rank = TrainerRank(Config(algorithm=algorithm), dist.get_rank(), dist.get_world_size(), str(folder))
        rank._engine, rank._critic = engine, found
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
    found = {"metrics": metrics, "weights": weights(rank._engine), "critic": weights(rank._critic.engine)}
    close_both(rank)
    return found


def close_both(rank):
    """The critic has the same process groups."""
    rank._critic.engine.chunks.clear()
    close(rank._engine)


def policies(model, runs):
    """`train` once per entry of `runs`."""
    return {name: train(model, **arguments) for name, arguments in runs.items()}


def recordings(model, folder, runs):
    """Metrics of a step for each entry of `runs`, whose responses are recorded below ``folder`` under its name."""
    found = {}
    for name, arguments in runs.items():
        engine = make_engine(model, arguments.get("trainer"))
        record = Recorder(
            RolloutLog(Path(folder) / name, f"trainer-{dist.get_rank()}", 2**24), arguments["most"], engine
        )
        algorithm = AlgorithmConfig(**arguments.get("algorithm", {}))
        policy = PolicyTrainer(engine, algorithm, dump_dir="unused", recorder=record)
        found[name] = train_on(policy, make_groups(1, **arguments.get("batch", {})), 1, 2)
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


def main_weights(model, trainers):
    """The float32 weights that a bfloat16 optimizer starts from, as one vector per layout."""
    found = {}
    for name, trainer in trainers.items():
        engine = make_engine(model, trainer, dtype="bfloat16")
        slices = engine.optimizer.slices(engine.weights).values()
        found[name] = torch.cat([part.tensors[checkpoint.MAIN_WEIGHT].clone() for part in slices])
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
        slices = engine.optimizer.slices(engine.weights).values()
        buffers = [buffer for part in engine._models for buffer in (*part.buffers, *part.expert_parallel_buffers)]
        found[name] = {
            "weights": sum(tensor.nbytes for tensor in engine.params().values()),
            "gradients": sum(buffer.grad_data.nbytes for buffer in buffers),
            "optimizer": sum(tensor.nbytes for part in slices for tensor in part.tensors.values()),
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
    from megasync.algorithms.advantages.grpo import of_group

    def plan(seed):
        members, advantages = [], []
        for group in make_groups(seed, uniform=uniform):
            members.append(group.trajectories)
            advantages.append(of_group([t.reward for t in group.trajectories], True))
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


def renewed_reference(model, folder, options=None):
    """The KL of four steps with a reference that is renewed every two, and of the fourth after a resume."""
    folder, trainer = Path(folder), {"tensor_parallel": dist.get_world_size(), **(options or {})}
    algorithm = AlgorithmConfig(kl_coef=0.1, reference_every=2)
    engine = make_engine(model, trainer)
    policy = PolicyTrainer(engine, algorithm, dump_dir="unused")
    kl = []
    for step in (1, 2, 3, 4):
        kl.append(train_on(policy, make_groups(step), step)["train/kl"])
        engine.save(checkpoint.step_path(folder, step), {"step": step})
    close(engine)
    rank = TrainerRank(Config(algorithm=algorithm), dist.get_rank(), dist.get_world_size(), str(folder))
    rank._engine = engine = make_engine(model, trainer)
    policy = PolicyTrainer(engine, algorithm, dump_dir="unused")
    rank.load(str(checkpoint.step_path(folder, 3)))
    resumed = train_on(policy, make_groups(4), 4)["train/kl"]
    close(engine)
    return {"kl": kl, "resumed": resumed}


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
            "microbatches": len(engine.share(samples).microbatches),
            "in_place": same and not moved and [t.data_ptr() for t in engine.params().values()] == places,
            "device_bytes": SLOTS * engine._reference._slot_bytes,
        }
        close(engine)
    return found


def supervised(model, layouts, rows, folder):
    """Steps on the first four rows and on the last one; the loss of all rows before and after."""
    found = {}
    rows = [TokenRow(np.array(ids, np.int32), np.array(trained, np.bool_)) for ids, trained in rows]
    path = Path(folder) / f"rows-{dist.get_rank()}"
    write_rows(path, rows)
    for label, trainer in layouts.items():
        engine = make_engine(model, trainer, {"betas": [0.9, 0.95], "clip_grad": 1.0})
        trainer, file, numbers = SupervisedTrainer(engine), RowFile(path), np.arange(len(rows))
        losses = [trainer.loss(file)]
        steps = [trainer.step(file, numbers[:4], 1), trainer.step(file, numbers[4:], 2)]
        found[label] = {"steps": steps, "losses": [*losses, trainer.loss(file)]}
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


def idle(model, folder):
    """Batches without anything to learn: equal rewards everywhere, everything masked, and in one half a NaN."""
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
    # One of two optimizer steps has a NaN.
    engine = make_engine(model, {"minibatches": 2})
    policy = PolicyTrainer(engine, AlgorithmConfig(), dump_dir=folder)
    half = make_groups(1, uniform=[3])
    first = half[0].trajectories[0]
    half[0].trajectories[0] = replace(first, logprobs=[float("nan"), *first.logprobs[1:]])
    half = train_on(policy, half, 1)
    close(engine)
    return {"uniform": uniform, "masked": masked, "unchanged": unchanged, "error": error, "half": half}


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
            share = engine.share(samples)
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
            with mock.patch.object(logging.getLogger("megasync.trainer.engine"), "info") as logged:
                engine.load(Path(folder) / other)
            converted = [call.args[1] for call in logged.call_args_list if "Converted" in call.args[0]]
            found[name, other] = {"after": held(engine), "weights": weights(engine), "converted": converted}
        close(engine)
    return found


def hop(source, target, model, trainer, dtype):
    """A policy step from a checkpoint, or the second of two from the model if ``source`` is None: its metrics.

    What was loaded, or trained by the first step, is saved to ``target`` before.
    """
    engine = make_engine(model, trainer, {"decay": "cosine", "warmup_steps": 1}, dtype)
    policy = PolicyTrainer(engine, AlgorithmConfig(), dump_dir="unused")
    if source is None:
        train_on(policy, make_groups(1), 1)
    else:
        engine.load(Path(source))
    engine.save(Path(target), {"step": 1})
    metrics = train_on(policy, make_groups(2), 2)
    close(engine)
    return metrics


def read_files(model, trainers, folder):
    """By trainer: what this rank read of the model folder and of a checkpoint, and whether the weights are right."""
    found, reads = {}, []
    fill = shards.fill_params

    def noted(layout, rank, read, dtype, names=None):
        reads.append(names)
        return fill(layout, rank, read, dtype, names)

    shards.fill_params = checkpoint.fill_params = noted
    for name, trainer in trainers.items():
        engine = make_engine(model, trainer)
        engine.save(Path(folder) / name)
        exact = load_shards(model, engine.layout, dist.get_rank())
        for weight in engine.params().values():
            weight.zero_()
        engine.load(Path(folder) / name)
        equal = all(torch.equal(engine.params()[param], value) for param, value in exact.items())
        folder_reads, _, checkpoint_reads = reads[-3:]
        found[name] = {"reads": [sorted(folder_reads), sorted(checkpoint_reads)], "all": sorted(exact), "equal": equal}
        close(engine)
    shards.fill_params = checkpoint.fill_params = fill
    return found


def quantized(model, names, block, trainers):
    """What a rank has for servers in block FP8, before and after its weights have changed, for each layout."""
    found = {}
    for label, trainer in trainers.items():
        engine = make_engine(model, trainer, dtype="bfloat16")
        weights = QuantizedWeights(
            QuantizedLayout(engine.layout, Block(*block), names), dist.get_rank(), engine.params()
        )
        params, states = weights.params(), []
        for change in (1.0, 1.5):
            with torch.no_grad():
                for param in engine.params().values():
                    param.mul_(change)
            weights.refresh()
            states.append({name: param.clone() for name, param in params.items()})
        found[label] = states
        close(engine)
    return found


def megatron_reads(models, checkpoints, trainer):
    """The parameters that Megatron's own GPTModel in this layout reads from a checkpoint of Megatron's format, with
    other values than an engine reads from the Hugging Face folder.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.models.gpt.gpt_model import GPTModel

    found = {}
    for name, path in models.items():
        engine = make_engine(path, trainer)
        layout = engine.layout
        config = transformer_config(layout, engine.trainer_config, DEVICE, torch.float32)
        rope = rope_parameters(layout.hf_config)
        model = GPTModel(
            config,
            chunk_specs(config, layout, range(layout.sizes.layers), DEVICE.spec, rope),
            vocab_size=layout.padded_vocab,
            max_sequence_length=64,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=layout.tied,
        )
        for param in model.parameters():
            param.data.fill_(7.0)
        # Without Transformer Engine's extra state.
        state = {"model": model.sharded_state_dict()}
        loaded = dist_checkpointing.load(state, checkpoints[name], strict="log_unexpected")
        model.load_state_dict(loaded["model"], strict=False)
        own = named_weights([model])
        found[name] = [param for param, weight in engine.weights.items() if not torch.equal(own[param], weight)]
        close(engine)
    return found


def absent_weights(model, broken):
    """The error of each data-parallel rank when the first one, which reads for all, has the ``broken`` folder."""
    config = TrainerConfig(data_parallel=2)
    path = model if dist.get_rank() else broken
    engine = MegatronEngine(ModelConfig(path=path, dtype="float32"), config, DEVICE, dist.get_rank(), 10)
    try:
        engine.initialize()
    except CheckpointError as error:
        return str(error)
    finally:
        close(engine)


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
    other = make_engine(model, {"data_parallel": 2}, dtype="bfloat16")
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


def main():
    sockets = json.loads(sys.argv[3])
    rank, link = forked(sockets)
    log = os.open(STORES / f"log-{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    join(rank, len(sockets))
    for line in link.makefile():
        folder = Path(line.strip())
        request = json.loads((folder / "request.json").read_text())
        torch.save(globals()[request["case"]](**request["arguments"]), folder / f"result-{rank}.pt")
        link.sendall(b"done\n")
        # The groups of the last engine have threads that wake up a hundred times a second, and this process may stay
        # idle for long.
        gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
