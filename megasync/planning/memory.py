"""Estimates the memory of a trainer rank and of a server, in bytes, from sizes alone.

Weights, gradients, optimizer, buckets and the slots of the reference policy are exact sums over the layout. Activations
are an estimate of what decoder layers save for the backward pass. Loading a checkpoint, or onloading offloaded memory,
needs no more than a step: values are copied from host memory into existing tensors, and `Optimizer.load_state` frees
the present moments before it allocates new ones.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from math import prod
from pathlib import Path

from megasync.config.builtin import ADVANTAGES
from megasync.config.megatron_options import newer_megatron
from megasync.config.schema import Config, FrozenModelConfig, LoraConfig, RolloutConfig, SyncConfig
from megasync.layout.adapter import AdapterLayout, adapter_layout, kinds_of_projections
from megasync.layout.layout import Layout
from megasync.layout.quantized import SCALES_DTYPE, VALUES_DTYPE, QuantizedLayout
from megasync.preflight.check import planned_fp8
from megasync.serving.cache_size import bytes_per_token, cpu_cache_tokens, longest_request
from megasync.serving.frozen_folder import read_frozen_model
from megasync.serving.plugin_protocol import ADAPTERS_IN_BATCH, ADAPTERS_LOADED
from megasync.sync.broadcast.plan import ITEM_BYTES
from megasync.tenants.passes import TOGETHER
from megasync.trainer.architecture import chunks_of, full_microbatch

# Megatron always keeps gradients in float32.
GRAD_BYTES = 4
# float32 master copy of parameters in a shorter dtype.
MASTER_BYTES = 4
# Torch rounds a block of pinned memory up to a power of two.
PINNED = 2
# Logits that a rank holds at one time, those of them that are converted to float32 at a time, and the number of float32
# copies (`trainer.logprobs`).
LOGITS_PART = 2**26
LOGITS_CHUNK = 2**24
LOGITS_FLOAT_COPIES = 3
# A float32 number of an output head that computes in float32, or of a sum.
FLOAT32_BYTES = 4
# Buckets in memory: one is packed while the other is on the wire.
BUCKETS = 2
# Blocks of the reference policy on the device, and the alignment of each tensor in them (`trainer.reference`).
REFERENCE_SLOTS = 2
REFERENCE_ALIGNMENT = 256
# Load of the busiest expert-parallel rank, relative to the mean: the largest capacity factor in Switch Transformer
# (https://arxiv.org/abs/2101.03961, table 1). No token is dropped here, so less even routing needs more.
IMBALANCE = 2.0
# A position of a token.
INDEX_BYTES = 8
# Buffers of `trainer.tp_comm_overlap`: those that are gathered, in FP8 if layers are, and those summed up.
GATHERED_BUFFERS, SUMMED_BUFFERS = 8, 4
# Tokens of a gated delta net that flash-linear-attention computes together.
DELTA_CHUNK = 64
LAYER = re.compile(r"(\d+\.)?decoder\.layers\.\d+\.")


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes on one trainer rank."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    reference: int
    critic: int
    sync_buckets: int

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, slots=True)
class ServerMemory:
    """Bytes on one tensor-parallel rank of a server."""

    weights: int
    kv_bytes_per_token: int
    kv_tokens: int
    # What determines `kv_tokens`, in words.
    kv_source: str
    # Staging area for the next version, if it is on the device.
    arena: int = 0
    # Room for the adapters of a batch.
    adapters: int = 0

    @property
    def kv_room(self) -> int:
        return self.kv_tokens * self.kv_bytes_per_token

    @property
    def total(self) -> int:
        """Weights, adapters, KV cache and staging area."""
        return self.weights + self.adapters + self.kv_room + self.arena


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes of host memory on the fullest node, at most: what processes allocate besides their code and datasets.

    ``checkpoint`` is the copy that is written in the background, ``reference`` the reference policy's weights,
    ``staging`` the next version at the servers. ``offloaded`` is what ranks and servers that share devices move to the
    host in the other's turn: the optimizer's state, and weights. ``optimizer`` is the share of the optimizer's state
    that is always there, with its gradients (`trainer.optimizer.offload`).
    """

    checkpoint: int
    reference: int
    staging: int
    offloaded: int = 0
    optimizer: int = 0
    models: int = 0
    adapters: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


def host_memory(config: Config, layout: Layout, ranks: int, servers: int) -> HostMemory:
    """``ranks`` and ``servers`` are the most trainer ranks and server ranks on one node."""
    learners, item = _learners(config, layout), ITEM_BYTES[config.model.dtype]
    stages = [layout.topology.rank(0, 0, stage) for stage in range(layout.topology.pipeline)]
    # In turns, one of policy and critic is in host memory.
    both = max if config.critic.offload else sum

    def fullest(nbytes: Callable[[Config, Layout, int], int], both: Callable[[Iterable[int]], int] = sum) -> int:
        return ranks * max(both(nbytes(*learner, rank) for learner in learners) for rank in stages)

    sync, synced = config.sync, _server_weights(config, layout)
    staged = offloaded = 0
    if config.cluster.colocate:
        offloaded = fullest(_state, both) + servers * (synced + _frozen_weights(config, layout))
    else:
        if config.critic.offload:
            offloaded = fullest(_state, both)
        if sync.arena == "host" and sync.transport in ("auto", "p2p"):
            staged = synced if sync.arena_mb is None else sync.arena_mb * 2**20
    in_host = _has_reference(config) and not config.trainer.lora.rank
    return HostMemory(
        checkpoint=fullest(_copied),
        reference=ranks * max(_elements(layout, rank) * item for rank in stages) if in_host else 0,
        staging=servers * staged,
        offloaded=offloaded,
        optimizer=fullest(host_state),
        models=0 if config.serve is None else config.serve.models * fullest(_model_state),
        adapters=servers * ADAPTERS_LOADED * _served_adapter(config, layout),
    )


def _learners(config: Config, layout: Layout) -> list[tuple[Config, Layout]]:
    """Lists the models that are trained (policy or adapters, critic), each as the configuration of a policy."""
    learners = [(config, trained_adapters(config, layout) or layout)]
    if config.critic.enabled:
        trainer = replace(config.trainer, optimizer=config.critic.optimizer, lora=LoraConfig())
        critic = Layout(layout.hf_config, layout.topology, layout.spec, value_head=True)
        learners.append((replace(config, trainer=trainer), critic))
    return learners


def trained_adapters(config: Config, layout: Layout) -> AdapterLayout | None:
    """The adapters that ranks train; None if they train all weights. Those of a service are of all projections."""
    trainer = config.trainer
    if config.serve is not None:
        targets = sorted(set().union(*kinds_of_projections(layout).values()))
        trainer = replace(trainer, lora=replace(trainer.lora, targets=targets))
    return adapter_layout(layout, trainer)


def _model_state(config: Config, layout: Layout, rank: int) -> int:
    """Bytes of a model of a service in the host memory of a rank: adapters, gradients, and the optimizer's state."""
    elements, pinned = _elements(layout, rank), PINNED if config.cluster.device != "cpu" else 1
    state = _optimizer_elements(config, layout, rank) * _stored_bytes(config)
    return pinned * (elements * (ITEM_BYTES[config.model.dtype] + GRAD_BYTES) + state)


def _served_adapter(config: Config, layout: Layout) -> int:
    """Bytes of the adapters of a model on a rank of a service's server; 0 for a run."""
    if config.serve is None or (adapters := trained_adapters(config, layout)) is None:
        return 0
    total = sum(map(prod, adapters.hf_tensors.values())) * ITEM_BYTES[config.model.dtype]
    return -(-total // config.rollout.tensor_parallel)


def _elements(layout: Layout, rank: int) -> int:
    return sum(map(prod, layout.params(rank).values()))


def _copied(config: Config, layout: Layout, rank: int) -> int:
    """Bytes of what a rank writes of a checkpoint."""
    shapes = {name: prod(shape) for name, shape in layout.params(rank).items()}
    written = sum(shapes[name] for name, writer in layout.writers(rank).items() if writer == rank)
    item = ITEM_BYTES[config.model.dtype]
    return written * item + _optimizer_elements(config, layout, rank) * _stored_bytes(config)


def stage_memory(config: Config, layout: Layout, bucket: int, stage: int) -> RankMemory:
    """Memory of the fullest rank of a pipeline stage, which also sends weights in buckets of `bucket` bytes."""
    item, rank = ITEM_BYTES[config.model.dtype], layout.topology.rank(0, 0, stage)
    elements = _elements(layout, rank)
    (_, trained), *critics = _learners(config, layout)
    if isinstance(trained, AdapterLayout):
        elements += _elements(trained, rank)
        if config.sync.transport != "adapters":
            # The weights with the adapters merged, for servers.
            shapes = layout.params(rank)
            elements += sum(prod(shapes[each.item.param]) for each in trained.adapted(rank))
    copies = 0
    if (quantized := _in_fp8(config, layout)) is not None:
        # Values and scales, for servers that keep them.
        shapes = quantized.params(rank)
        quantized_items = [each for each in quantized.of_rank(rank) if each.dtype in (VALUES_DTYPE, SCALES_DTYPE)]
        copies = sum(prod(shapes[each.param]) * ITEM_BYTES[each.dtype] for each in quantized_items if each.dtype)
    gradients, optimizer = _elements(trained, rank) * GRAD_BYTES, _state(config, trained, rank)
    if config.serve is not None:
        # Those of earlier passes, while a pass computes its own; and adapters and gradients of the models that compute
        # a microbatch together.
        gradients = 2 * gradients + TOGETHER * 2 * _elements(trained, rank) * item
    critic = 0
    for learner, learned in critics:
        # Its activations exist while the policy's do not, and it has no logits.
        learning = _elements(learned, rank) * GRAD_BYTES + _state(learner, learned, rank)
        critic = _elements(learned, rank) * item + learning
        if config.critic.offload:
            critic -= min(learning, gradients + optimizer)
    return RankMemory(
        weights=elements * item + copies,
        gradients=gradients,
        optimizer=optimizer,
        activations=_activations(config, layout, stage, item),
        logits=_logits(config, layout, item) if stage == layout.topology.pipeline - 1 else 0,
        reference=reference_bytes(config, layout, rank),
        critic=critic,
        sync_buckets=BUCKETS * bucket,
    )


def _optimizer_elements(config: Config, layout: Layout, rank: int) -> int:
    """Elements of which a rank keeps the optimizer's state."""
    topology, shapes, elements = layout.topology, layout.params(rank), _elements(layout, rank)
    copies = topology.data * topology.context
    if not config.trainer.distributed_optimizer or copies == 1:
        return elements
    # Of experts there are fewer copies to spread it over.
    experts = sum(prod(shapes[item.param]) for item in layout.of_rank(rank) if item.ep is not None)
    return -(-(elements - experts) // copies) - (-experts // topology.expert_data)


def _state(config: Config, layout: Layout, rank: int) -> int:
    """Bytes of optimizer state on a rank's device: main weights and two moments."""
    item, optimizer = ITEM_BYTES[config.model.dtype], config.trainer.optimizer
    # A main weight of which the weight has the other bytes.
    each = _stored_bytes(config) - (item if optimizer.store_param_remainders else 0)
    elements = _optimizer_elements(config, layout, rank)
    return (elements - round(elements * optimizer.offload)) * each


def host_state(config: Config, layout: Layout, rank: int, pinned: int = PINNED) -> int:
    """Bytes of optimizer state that a rank has in host memory at most, with the gradients that are copied there.

    Main weights and moments are float32. ``pinned`` times as much is allocated for what is in pinned memory: gradients,
    and weights of a float32 model.
    """
    short = ITEM_BYTES[config.model.dtype] < MASTER_BYTES
    weights = MASTER_BYTES * (1 if short else pinned)
    moments = ITEM_BYTES["float32"] * 2
    share, elements = config.trainer.optimizer.offload, _optimizer_elements(config, layout, rank)
    offloaded = round(elements * share)
    if 0 < share < 1:
        # The parameter with which the share is reached is offloaded whole; experts have an optimizer of their own.
        experts = {item.param for item in layout.of_rank(rank) if item.ep is not None}
        sizes = {name: prod(shape) for name, shape in layout.params(rank).items()}
        for params in (experts, sizes.keys() - experts):
            offloaded += max((sizes[name] for name in params), default=0)
    return min(offloaded, elements) * (weights + moments + GRAD_BYTES * pinned)


def _stored_bytes(config: Config) -> int:
    """Bytes of the same in a checkpoint, which stores whole main weights."""
    optimizer = config.trainer.optimizer
    moments = ITEM_BYTES[optimizer.exp_avg_dtype] + ITEM_BYTES[optimizer.exp_avg_sq_dtype]
    return moments + (MASTER_BYTES if ITEM_BYTES[config.model.dtype] < MASTER_BYTES else 0)


def checkpoint_bytes(config: Config, layout: Layout) -> int:
    """Bytes of one training checkpoint: weights and optimizer state, each element once; also those of a critic."""
    stored = 0
    for learner, trained in _learners(config, layout):
        elements = sum(map(prod, trained.hf_tensors.values()))
        if not isinstance(trained, AdapterLayout):
            vocabularies = 1 if trained.tied or trained.value_head else 2
            elements += vocabularies * (trained.padded_vocab - trained.sizes.vocab) * trained.sizes.hidden
        stored += elements * (ITEM_BYTES[config.model.dtype] + _stored_bytes(learner))
    return stored


def microbatch_tokens(config: Config) -> int:
    """Tokens of a rank's largest microbatch: the budget, or its share of the longest sequence if that is longer.

    With `trainer.pad_microbatches` no sequence is longer, and the budget is rounded up as the trainer does.
    """
    context = config.trainer.context_parallel
    if config.trainer.pad_microbatches:
        return full_microbatch(config.trainer) // context
    share = (
        -(-longest_sequence(config) // context) if context == 1 else 2 * -(-longest_sequence(config) // (2 * context))
    )
    return max(config.trainer.tokens_per_microbatch, share)


def longest_sequence(config: Config) -> int:
    """Tokens of the longest prompt plus the longest response."""
    return config.data.prompt.max_tokens + config.rollout.sampling.max_new_tokens


def reference_bytes(config: Config, layout: Layout, rank: int) -> int:
    """Bytes of the two device slots through which the reference policy's weights are copied: twice the largest block.

    A block is what `trainer.reference` copies together: the embedding, a decoder layer, the final norm or the output
    layer. 0 without a reference. That of adapters is a copy of them on the device.
    """
    if not _has_reference(config):
        return 0
    if (adapters := adapter_layout(layout, config.trainer)) is not None:
        return _elements(adapters, rank) * ITEM_BYTES[config.model.dtype]
    blocks: dict[str, int] = defaultdict(int)
    shapes = layout.params(rank)
    for item in layout.of_rank(rank):
        layer = LAYER.match(item.param)
        nbytes = prod(shapes[item.param]) * ITEM_BYTES[item.dtype or config.model.dtype]
        blocks[layer.group() if layer else item.param] += -(-nbytes // REFERENCE_ALIGNMENT) * REFERENCE_ALIGNMENT
    return REFERENCE_SLOTS * max(blocks.values())


def _has_reference(config: Config) -> bool:
    estimator = ADVANTAGES.get(config.algorithm.advantage)
    return bool(config.algorithm.kl_coef) or (estimator is not None and estimator.reference)


def in_flight(pipeline: int, virtual: int, stage: int) -> tuple[int, ...]:
    """Microbatches whose activations a stage holds at most, for each of its chunks of layers.

    Plain 1F1B: ``pipeline - stage`` (Narayanan et al. 2019, PipeDream, https://arxiv.org/abs/1806.03377). Interleaved
    (Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, section 2.2): Megatron runs ``2 (pipeline - stage - 1) +
    (virtual - 1) pipeline`` forward passes of one chunk each before the first backward pass, then one of each in turns;
    the passes go through the chunks in groups of ``pipeline`` microbatches
    (`megatron.core.pipeline_parallel.schedules.get_pp_rank_microbatches`).
    """
    if virtual == 1:
        return (pipeline - stage,)
    passes = 2 * (pipeline - stage - 1) + (virtual - 1) * pipeline + 1
    turns = [turn // pipeline % virtual for turn in range(passes)]
    return tuple(turns.count(chunk) for chunk in range(virtual))


def _activations(config: Config, layout: Layout, stage: int, item: int) -> int:
    """What the chunks of a stage save, buffers of the layer that computes, and those of other keys of the trainer."""
    sparse = any(layer in layout.sizes.sparse_layers for chunk in layout.stages[stage] for layer in chunk)
    buffers = _dispatch_buffers(config, layout) * item * microbatch_tokens(config) if sparse else 0.0
    more = user_buffer_bytes(config, layout) + graph_bytes(config, layout)
    return saved_activations(config, layout, stage) + int(buffers) + more


def user_buffer_bytes(config: Config, layout: Layout) -> int:
    """Bytes of Transformer Engine's buffers for `trainer.tp_comm_overlap`, each with all tokens of a microbatch.

    One for each product of a layer: forward, for the gradient of the input and for that of the weight, of four matrices
    (`transformer_engine.pytorch.module.base.initialize_ub`).
    """
    if not config.trainer.tp_comm_overlap:
        return 0
    item = ITEM_BYTES[config.model.dtype]
    each = GATHERED_BUFFERS * (item if config.trainer.fp8 is None else 1) + SUMMED_BUFFERS * item
    return each * microbatch_tokens(config) * layout.sizes.hidden


def graph_bytes(config: Config, layout: Layout) -> int:
    """Bytes that `trainer.cuda_graphs` keeps beside what layers save (`torch.cuda.make_graphed_callables`).

    Each layer has an output, its gradient and the gradient of its input of its own, and the gradients of its weights
    unless the matrix product adds them to Megatron's buffer.
    """
    trainer = config.trainer
    if not trainer.cuda_graphs:
        return 0
    elements = 3 * layout.sizes.layers * microbatch_tokens(config) * _hidden(config, layout)
    if not trainer.gradient_accumulation_fusion:
        elements += sum(prod(shape) for name, shape in layout.params(0).items() if ".layers." in name)
    return int(elements * ITEM_BYTES[config.model.dtype])


def saved_activations(config: Config, layout: Layout, stage: int) -> int:
    """Bytes that the chunks of a stage save for their backward passes, for all microbatches in flight.

    What is recomputed counts once, for the layer at work. The last stage also saves the input of the final norm.
    """
    chunks = [[_kind(layout, layer) for layer in chunk] for chunk in layout.stages[stage]]
    kinds = {kind for chunk in chunks for kind in chunk}
    saved = {kind: _saved_by_layer(config, layout, *kind) for kind in kinds}
    counts = in_flight(config.trainer.pipeline_parallel, layout.topology.virtual, stage)
    hidden = _hidden(config, layout)
    less = {kind: _recomputed_in_layer(config, layout, *kind) for kind in kinds}
    per_token = sum(saved[kind] * count for chunk, count in zip(chunks, counts, strict=True) for kind in chunk)
    recomputed = [chunk[: _recomputed_layers(config, len(chunk))] for chunk in chunks]
    per_token -= sum(less[kind] * count for chunk, count in zip(recomputed, counts, strict=True) for kind in chunk)
    elements = (per_token + _recompute_peak(config, layout, stage)) * microbatch_tokens(config)
    if stage == config.trainer.pipeline_parallel - 1:
        elements += counts[-1] * hidden * microbatch_tokens(config)
    return int(elements * ITEM_BYTES[config.model.dtype])


def recompute_peak(config: Config, layout: Layout, stage: int) -> int:
    """Bytes that the layer at work saves again of what it recomputes."""
    return int(_recompute_peak(config, layout, stage) * microbatch_tokens(config) * ITEM_BYTES[config.model.dtype])


def _recompute_peak(config: Config, layout: Layout, stage: int) -> float:
    chunks = layout.stages[stage]
    kinds = {_kind(layout, layer) for chunk in chunks for layer in chunk[: _recomputed_layers(config, len(chunk))]}
    return max((_recomputed_in_layer(config, layout, *kind) for kind in kinds), default=0.0)


def _kind(layout: Layout, layer: int) -> tuple[bool, bool]:
    """Whether a layer has experts, and whether it has a gated delta net."""
    return layer in layout.sizes.sparse_layers, layer in layout.sizes.delta_layers


def _recomputed_layers(config: Config, layers: int) -> int:
    """Layers of a chunk that are recomputed, in whole or in part: its first ones, as Megatron chooses them."""
    if config.trainer.recompute is None:
        return 0
    return layers if config.trainer.recompute_layers is None else min(layers, config.trainer.recompute_layers)


def _recomputed_in_layer(config: Config, layout: Layout, sparse: bool, delta: bool) -> float:
    """Elements for each token of a microbatch that a recomputed layer does not keep.

    A recomputed layer, MLP or expert layer keeps its input. Transformer Engine fuses the norm before a dense MLP with
    its first projection, so that this norm is recomputed with the MLP, and only the norm before experts alone.
    """
    trainer, sizes, hidden = config.trainer, layout.sizes, _hidden(config, layout)
    if trainer.recompute == "full":
        return _saved_by_layer(config, layout, sparse, delta) - hidden
    modules, fused = trainer.recompute_modules, layout.spec == "te"
    wide = 3 if fused else 4
    less = 0.0
    if not sparse and "mlp" in modules:
        less += wide * sizes.intermediate / trainer.tensor_parallel + fused * hidden
    shared = wide * sizes.shared_intermediate / trainer.tensor_parallel
    width = sizes.moe_intermediate / layout.topology.expert_tensor_size
    if sparse and "moe" in modules:
        less += shared + _received(config, layout) * (_expert_input(layout) + (wide + _clamped(layout)) * width)
        less += _saved_around_experts(config, layout)
    elif sparse:
        less += shared * ("shared_experts" in modules)
        less += _received(config, layout) * (1 + _clamped(layout)) * width * ("moe_act" in modules)
    if "layernorm" in modules:
        less += hidden * (2 * (not fused) or sparse)
    return less


def _hidden(config: Config, layout: Layout) -> float:
    """Elements of a hidden state for each token of a microbatch, outside of the parts that tensor ranks share."""
    return layout.sizes.hidden / (config.trainer.tensor_parallel if config.trainer.sequence_parallel else 1)


def _saved_by_layer(config: Config, layout: Layout, sparse: bool, delta: bool) -> float:
    """Elements that a decoder layer saves for its backward pass, for each token of a microbatch.

    Four hidden-sized tensors: inputs and outputs of both norms; GLM-4 and Gemma 3 also save the inputs of norms of
    outputs.
    Of a gated MLP of width w, Transformer Engine saves the fused projections (2 w) and their product (w), as inputs of
    the next operations; Megatron's own layers also save the activated gate. An expert layer saves them for each copy of
    a token that its experts receive, and the copy itself; of a clamped SwiGLU, what `_clamped` says too. What is left
    out, such as routing and statistics of norms, is below 1.5 % (`rehearsal.activations` measures it).
    """
    sizes, tensor = layout.sizes, config.trainer.tensor_parallel
    wide = 3 if layout.spec == "te" else 4
    output_norms = sum(rule.local.endswith(".output_layernorm.weight") for rule in layout.family.layer)
    mixer = _saved_by_delta_net(config, layout) if delta else _saved_by_attention(config, layout)
    if layout.family.gates_attention and not delta:
        # The sigmoid of the gate, in float32, and the gated output.
        mixer += (1 + FLOAT32_BYTES / ITEM_BYTES[config.model.dtype]) * sizes.q_rows / tensor
    common = (4 + output_norms) * _hidden(config, layout) + mixer + _saved_by_adapters(config, layout, sparse)
    if not sparse:
        return common + wide * sizes.intermediate / tensor
    width = sizes.moe_intermediate / layout.topology.expert_tensor_size
    received = _received(config, layout) * (_expert_input(layout) + (wide + _clamped(layout)) * width)
    if config.trainer.moe_shared_expert_overlap and config.trainer.sequence_parallel:
        # Megatron itself gathers the tokens for the shared experts, and keeps them; a linear layer gathers them again.
        common += sizes.hidden
    common += _saved_around_experts(config, layout)
    return common + wide * sizes.shared_intermediate / tensor + received


def _saved_by_adapters(config: Config, layout: Layout, sparse: bool) -> float:
    """Elements of the narrow vectors between the factors of a layer's adapters, for each token.

    Queries, keys, values, gate and up have the tokens of all tensor ranks, the other two those of one under sequence
    parallelism. With `trainer.lora.targets` this is not counted: the frozen projections save less by more than that.
    """
    trainer = config.trainer
    if trainer.lora.targets:
        return 0.0
    split = trainer.tensor_parallel if trainer.sequence_parallel else 1
    mlp = 3 * _received(config, layout) if sparse else 2 + 1 / split
    return trainer.lora.rank * (3 + 1 / split + mlp)


def _saved_around_experts(config: Config, layout: Layout) -> float:
    """Elements that an expert layer saves for each token, beside what its experts do."""
    sizes, hidden = layout.sizes, _hidden(config, layout)
    elements = 0.0
    if any("shared_experts.gate_weight" in rule.local for rule in layout.family.sparse):
        # The output of the shared expert, which the gate multiplies.
        elements += hidden
    if newer_megatron() and not config.trainer.moe_permute_fusion:
        # The tokens of an expert are part of a sort of all pairs of a token and an expert.
        elements += sizes.experts * INDEX_BYTES / ITEM_BYTES[config.model.dtype] * hidden / sizes.hidden
    return elements


def _expert_input(layout: Layout) -> int:
    """What an expert layer saves of the hidden state of each copy of a token, twice if a weight multiplies it."""
    return layout.sizes.hidden * (2 if layout.family.scales_expert_inputs else 1)


def _clamped(layout: Layout) -> int:
    """What a clamped SwiGLU of experts saves for each of their channels, beside what others do.

    Gate and up after the clamps. Megatron's own layers also save the sigmoid and the product before the weight of the
    expert.
    """
    if not layout.family.clamped:
        return 0
    return 2 if layout.spec == "te" else 4


def _saved_by_attention(config: Config, layout: Layout) -> float:
    """Elements that attention saves for each token, beside its input: the inputs of its kernels.

    Queries and keys as they are rotated, values, and the output; before that the inputs of norms of queries and keys,
    if there are any. With latents: queries, keys, values and output of all heads, and inputs and
    outputs of the norms of the latents, which tensor ranks share under sequence parallelism. Megatron's own layers save
    queries, keys and values before and after rotation.
    """
    sizes, tensor = layout.sizes, config.trainer.tensor_parallel
    # Tensor ranks that share a key-value group have all of it.
    keys = sizes.kv_rows / min(tensor, sizes.groups)
    if layout.spec != "te":
        return 3 * sizes.q_rows / tensor + 4 * keys
    if layout.family.latent:
        latents = 2 * (sizes.q_lora + sizes.kv_lora) / (tensor if config.trainer.sequence_parallel else 1)
        # Since 0.19, for packed sequences, values are padded to the width of queries and the output is cut: they are as
        # wide as queries, and the output is saved a second time (`megatron.core.transformer.multi_latent_attention`).
        heads = 4 * sizes.q_rows + sizes.value_rows if newer_megatron() else 2 * (sizes.q_rows + sizes.value_rows)
        return latents + heads / tensor
    normed: float = any("q_layernorm" in rule.local for rule in layout.family.layer)
    if layout.family.norms_all_heads:
        # The norm's float32 input counts as two, and its output before the weights is saved too.
        normed = 3
    if (chunks := chunks_of(layout.hf_config)) is not None and chunks.normed:
        # The float32 input of norms without weights, which layers that attend to all tokens lack.
        normed = 2 * (1 - len(chunks.full) / sizes.layers)
    return (2 + normed) * (sizes.q_rows / tensor + keys)


def _saved_by_delta_net(config: Config, layout: Layout) -> float:
    """Elements that a gated delta net saves for each token, beside its input, with flash-linear-attention's kernels.

    Input of the convolution; queries and keys of all value heads; values; the solved system of each chunk; gates,
    outputs, and what both make, which is the input of the last projection. Plain torch saves several times as much.
    """
    heads = layout.sizes.delta
    assert heads is not None
    keys = 2 * heads.values * heads.key_dim
    # A decay and its two inputs, a length of the query and of the key, in float32, and two rates.
    scalars = 5 * FLOAT32_BYTES // ITEM_BYTES[config.model.dtype] + 2
    width = heads.conv_rows + keys + 4 * heads.value_rows + heads.values * (DELTA_CHUNK + scalars)
    return width / config.trainer.tensor_parallel


def _received(config: Config, layout: Layout) -> float:
    """Copies of tokens that a rank's experts receive, for each token of a microbatch, on the busiest rank.

    Each token goes to `topk` experts. Under sequence parallelism a tensor rank sends its own tokens only, and the ranks
    that share an expert all receive what any of them is sent. Routing is never even: see `IMBALANCE`.
    """
    topology, trainer = layout.topology, config.trainer
    mean = (
        layout.sizes.topk * topology.expert_tensor_size / (trainer.tensor_parallel if trainer.sequence_parallel else 1)
    )
    return mean * min(IMBALANCE, topology.expert)


def _dispatch_buffers(config: Config, layout: Layout) -> float:
    """Elements of the buffers of one expert layer's dispatch, for each token of a microbatch: nothing keeps them.

    Megatron's all-to-all dispatcher has, when it combines, the experts' output, the same in the order of the sending
    ranks, and what comes back from them (`megatron.core.transformer.moe.token_dispatcher.MoEAlltoAllTokenDispatcher`).
    """
    return 2 * _received(config, layout) * layout.sizes.hidden + layout.sizes.topk * _hidden(config, layout)


def _logits(config: Config, layout: Layout, item: int) -> int:
    """Bytes of the output layer's work: its input, the logits of a part of it, and the gradient of its weight.

    Only response tokens have logits: prompt rows never reach the output layer.
    """
    # If all sequences are the longest.
    rows = microbatch_tokens(config) * config.rollout.sampling.max_new_tokens // longest_sequence(config)
    hidden = layout.sizes.hidden
    columns = layout.padded_vocab // config.trainer.tensor_parallel
    computed = FLOAT32_BYTES if config.trainer.float32_head else item
    logits, parts = min(rows * columns, LOGITS_PART), -(-rows * columns // LOGITS_PART)
    floats = LOGITS_FLOAT_COPIES * min(logits, LOGITS_CHUNK) * FLOAT32_BYTES
    summed = computed if parts == 1 else FLOAT32_BYTES
    # A head in another dtype has a copy of its weight; a gradient that is summed in another one is converted.
    weights = summed + (item if summed != item else 0) + (computed if computed != item else 0)
    return rows * hidden * item + logits * computed + floats + columns * hidden * weights


def free_for_servers(config: Config, stages: Sequence[RankMemory], device_bytes: int | None) -> int | None:
    """Bytes of a device that servers share out: all of it, or what the weights of a rank on the same device leave."""
    if device_bytes is None or not config.cluster.colocate:
        return device_bytes
    return device_bytes - max(stage.weights for stage in stages)


def server_memory(config: Config, layout: Layout, device_bytes: int | None) -> ServerMemory:
    """Memory of a rollout server. `device_bytes` is that of one device which is free as it starts; None for a CPU."""
    rollout = config.rollout
    per_token = bytes_per_token(layout.hf_config, rollout, config.model.dtype)
    synced = _server_weights(config, layout)
    weights = synced + _frozen_weights(config, layout)
    longest, arena = longest_request(config, rollout), _arena(config.sync, synced)
    # Requests without an adapter count as one.
    adapters = (ADAPTERS_IN_BATCH + 1) * _served_adapter(config, layout)
    return _kv_cache("rollout", rollout, weights, per_token, device_bytes, longest, arena, adapters)


def _in_fp8(config: Config, layout: Layout) -> QuantizedLayout | None:
    """The weights as the policy's servers keep them, if that is in block FP8."""
    return planned_fp8(layout, Path(config.model.path)) if config.rollout.fp8 else None


def _server_weights(config: Config, layout: Layout) -> int:
    """Bytes of the weights on one rank of a server that a sync replaces, at most.

    Each pipeline stage counts the embedding and the head; each attention group has its own embedding and attention.
    """
    if (quantized := _in_fp8(config, layout)) is not None:
        layout = quantized
    groups = config.rollout.attention_data_parallel
    nbytes = {
        name: prod(shape)
        * ITEM_BYTES[layout.hf_dtype(name, config.model.dtype)]
        * (groups if ".self_attn." in name or "embed_tokens" in name else 1)
        for name, shape in layout.hf_tensors.items()
    }
    in_layers = sum(size for name, size in nbytes.items() if ".layers." in name)
    layers = layout.sizes.layers
    stage = -(-layers // config.rollout.pipeline_parallel)
    return -(-(sum(nbytes.values()) - in_layers + in_layers * stage // layers) // config.rollout.tensor_parallel)


def _frozen_weights(config: Config, layout: Layout) -> int:
    """Bytes of a vision tower on one rank of a server, which no sync replaces."""
    total = sum(map(prod, layout.frozen_tensors.values())) * ITEM_BYTES[config.model.dtype]
    return -(-total // config.rollout.tensor_parallel)


def _arena(sync: SyncConfig, weights: int) -> int:
    if sync.arena == "host" or sync.transport not in ("auto", "p2p"):
        return 0
    return weights if sync.arena_mb is None else sync.arena_mb * 2**20


def frozen_memory(key: str, model: FrozenModelConfig, config: Config, device_bytes: int | None) -> ServerMemory | None:
    """Memory of a frozen model's server, from its config.json and the size of its files, whatever its family.

    None if its weights are not on this machine.
    """
    folder = Path(model.path).expanduser()
    if not any(folder.glob("*.safetensors")):
        return None
    values = read_frozen_model(key, model)
    dtype = model.dtype or config.model.dtype
    item = ITEM_BYTES[dtype]
    stored = ITEM_BYTES.get(str(values.get("dtype") or values.get("torch_dtype")), item)
    total = sum(path.stat().st_size for path in folder.glob("*.safetensors")) * item // stored
    per_token = bytes_per_token(values, model, dtype)
    weights, longest = -(-total // model.tensor_parallel), longest_request(config, model)
    return _kv_cache(key, model, weights, per_token, device_bytes, longest)


def _kv_cache(
    key: str,
    servers: RolloutConfig | FrozenModelConfig,
    weights: int,
    per_token: int,
    device_bytes: int | None,
    longest: int,
    arena: int = 0,
    adapters: int = 0,
) -> ServerMemory:
    if device_bytes is None:
        tokens, source = servers.max_total_tokens, f"{key}.max_total_tokens"
        if tokens is None:
            tokens, source = cpu_cache_tokens(per_token, longest), f"{source}=null on a CPU"
        return ServerMemory(weights, per_token, tokens, source, arena, adapters)
    room = int(device_bytes * servers.mem_fraction) - weights - adapters
    tokens = max(0, room // per_token)
    source = f"{key}.mem_fraction={servers.mem_fraction:g} of {device_bytes / 1e9:.0f} GB"
    if servers.max_total_tokens is not None and servers.max_total_tokens <= tokens:
        tokens, source = servers.max_total_tokens, f"{key}.max_total_tokens"
    return ServerMemory(weights, per_token, tokens, source, arena, adapters)
