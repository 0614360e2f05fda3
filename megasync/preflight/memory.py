"""Memory that a trainer rank and a server need, in bytes, from sizes alone. Weights, gradients, optimizer and buckets
are exact sums over the layout; activations are an estimate of what a decoder layer keeps for its backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import prod
from pathlib import Path

from megasync.config.check_reward_models import read_reward_model
from megasync.config.schema import Config, RewardModelConfig, RolloutConfig, SyncConfig
from megasync.sync.broadcast_plan import ITEM_BYTES
from megasync.sync.layout import Layout

# Megatron keeps gradients in float32 whatever the parameters are, and Adam two float32 moments per parameter.
GRAD_BYTES = 4
ADAM_BYTES = 8
# float32 copy of parameters that are themselves kept in a shorter type.
MASTER_BYTES = 4
# The loss holds logits once in the compute type and twice in float32 (shifted logits, their softmax).
LOSS_FLOAT_COPIES = 2
# Buckets that exist at a time: one is packed while the other is on the wire.
BUCKETS = 2


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes on one trainer rank."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    sync_buckets: int

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, slots=True)
class ServerMemory:
    """Bytes on one tensor-parallel rank of a server. `kv_tokens` is None when nothing says how much memory there is."""

    weights: int
    kv_bytes_per_token: int
    kv_tokens: int | None
    # Where `kv_tokens` comes from, in words.
    kv_source: str
    # Where the next version is kept until it is committed, if that is on the device.
    arena: int = 0

    @property
    def kv_room(self) -> int | None:
        return None if self.kv_tokens is None else self.kv_tokens * self.kv_bytes_per_token


def stage_memory(config: Config, layout: Layout, bucket: int, stage: int) -> RankMemory:
    """Memory of the fullest rank of a pipeline stage: the one that also sends its weights, at most `bucket` bytes a
    message.
    """
    trainer, item = config.trainer, ITEM_BYTES[config.model.dtype]
    topology = layout.topology
    rank = topology.rank(0, 0, stage)
    shapes = layout.params(rank)
    experts = sum(prod(shapes[item.param]) for item in layout.of_rank(rank) if item.ep is not None)
    elements = sum(prod(shape) for shape in shapes.values())
    # Elements whose optimizer state this rank keeps; of experts there are fewer copies to spread it over.
    kept = elements
    if trainer.distributed_optimizer and topology.data > 1:
        kept = -(-(elements - experts) // topology.data) - (-experts // topology.expert_data)
    state = ADAM_BYTES + (MASTER_BYTES if item < MASTER_BYTES else 0)
    last = stage == trainer.pipeline_parallel - 1
    return RankMemory(
        weights=elements * item,
        gradients=elements * GRAD_BYTES,
        optimizer=kept * state,
        activations=_activations(config, layout, stage, item),
        logits=_logits(config, layout, item) if last else 0,
        sync_buckets=BUCKETS * bucket,
    )


def checkpoint_bytes(config: Config, layout: Layout) -> int:
    """Bytes of one training checkpoint: the weights once, and every rank's share of the optimizer."""
    weights = sum(prod(shape) for shape in layout.hf_tensors.values()) * ITEM_BYTES[config.model.dtype]
    ranks = layout.topology.tensor * layout.topology.data
    stages = range(layout.topology.pipeline)
    return weights + sum(stage_memory(config, layout, 0, stage).optimizer * ranks for stage in stages)


def microbatch_tokens(config: Config) -> int:
    """Tokens of the largest microbatch: the budget, or one longest sequence where that is longer."""
    return max(config.trainer.tokens_per_microbatch, longest_sequence(config))


def longest_sequence(config: Config) -> int:
    """Tokens of the longest prompt with the longest response."""
    return config.data.prompt.max_tokens + config.rollout.sampling.max_new_tokens


def _activations(config: Config, layout: Layout, stage: int, item: int) -> int:
    """What the layers of one stage keep per token, times the microbatches in flight (1F1B: stages below this one).

    Per layer: four hidden-sized tensors (inputs of both norms and of both projections after them); q, k, v before and
    after rotation and the attention output; the MLP's gate, up, activated gate and their product.
    """
    trainer, sizes = config.trainer, layout.sizes
    tensor = trainer.tensor_parallel
    hidden = sizes.hidden / (tensor if trainer.sequence_parallel else 1)
    attention = (2 * (sizes.q_rows + 2 * sizes.kv_rows) + sizes.q_rows) / tensor
    mlp = 4 * sizes.active_width / tensor
    whole = 4 * hidden + attention + mlp
    layers = sum(len(chunk) for chunk in layout.stages[stage])
    in_flight = trainer.pipeline_parallel - stage
    if trainer.recompute == "full":  # layer inputs of all microbatches, and one layer at work
        per_token = layers * hidden * in_flight + whole
    else:
        per_token = layers * whole * in_flight
    return int(per_token * item * microbatch_tokens(config))


def _logits(config: Config, layout: Layout, item: int) -> int:
    """Logits of response tokens only: a prompt's rows never reach the output layer."""
    rows = microbatch_tokens(config) * config.rollout.sampling.max_new_tokens // longest_sequence(config)
    columns = layout.padded_vocab // config.trainer.tensor_parallel
    return rows * columns * (item + 4 * LOSS_FLOAT_COPIES)


def server_memory(config: Config, layout: Layout, device_bytes: int | None) -> ServerMemory:
    """`device_bytes` is the memory of one device; None (a CPU) leaves the KV cache open unless the config fixes it."""
    rollout, sizes, item = config.rollout, layout.sizes, ITEM_BYTES[config.model.dtype]
    tensor = rollout.tensor_parallel
    total = sum(prod(shape) for shape in layout.hf_tensors.values()) * item
    # Every rank keeps the whole latent, which all heads share; otherwise keys and values of its own groups.
    channels = sizes.kv_a_rows or 2 * max(1, sizes.groups // tensor) * sizes.head_dim
    per_token = sizes.layers * channels * item
    weights = -(-total // tensor)
    return _kv_cache("rollout", rollout, weights, per_token, device_bytes, _arena(config.sync, weights))


def _arena(sync: SyncConfig, weights: int) -> int:
    if sync.arena == "host" or sync.transport not in ("auto", "p2p"):
        return 0
    return weights if sync.arena_mb is None else sync.arena_mb * 2**20


def reward_memory(key: str, model: RewardModelConfig, dtype: str, device_bytes: int | None) -> ServerMemory | None:
    """The same for a reward model, from its folder: the size of its files, whatever its family is, and its config.json.

    None while the folder is not on this machine. `dtype` is the policy's, which it takes where it names none.
    """
    folder = Path(model.path).expanduser()
    if not folder.is_dir():
        return None
    values = read_reward_model(key, model)
    item = ITEM_BYTES[model.dtype or dtype]
    stored = ITEM_BYTES.get(str(values.get("dtype") or values.get("torch_dtype")), item)
    total = sum(path.stat().st_size for path in folder.glob("*.safetensors")) * item // stored
    heads = values["num_attention_heads"]
    groups = values.get("num_key_value_heads") or heads
    head_dim = values.get("head_dim") or values["hidden_size"] // heads
    per_token = values["num_hidden_layers"] * 2 * max(1, groups // model.tensor_parallel) * head_dim * item
    return _kv_cache(key, model, -(-total // model.tensor_parallel), per_token, device_bytes)


def _kv_cache(
    key: str,
    servers: RolloutConfig | RewardModelConfig,
    weights: int,
    per_token: int,
    device_bytes: int | None,
    arena: int = 0,
) -> ServerMemory:
    if device_bytes is None:
        tokens = servers.max_total_tokens
        source = "decided by SGLang at start" if tokens is None else f"{key}.max_total_tokens"
        return ServerMemory(weights, per_token, tokens, source, arena)
    room = int(device_bytes * servers.mem_fraction) - weights
    tokens = max(0, room // per_token)
    source = f"{key}.mem_fraction={servers.mem_fraction:g} of {device_bytes / 1e9:.0f} GB"
    if servers.max_total_tokens is not None and servers.max_total_tokens <= tokens:
        tokens, source = servers.max_total_tokens, f"{key}.max_total_tokens"
    return ServerMemory(weights, per_token, tokens, source, arena)
