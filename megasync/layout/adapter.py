"""Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685) as a layout: the rectangles of their factors.

An adapter adds ``scale * up @ down`` to the weight of a linear projection, with ``down`` [rank, in] (PEFT's ``lora_A``)
and ``up`` [out, rank] (``lora_B``). Hugging Face's projections have one each. Where Megatron fuses several of them, the
fused parameter has one ``down`` for each, and one ``up`` whose rows are cut as its own are. Whatever reads a `Layout`
(loading, checkpoints, exports) so reads and writes adapters of any topology, under PEFT's names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from megasync.errors import ConfigError
from megasync.layout.families import Split
from megasync.layout.layout import Layout, Placed
from megasync.layout.topology import Topology

if TYPE_CHECKING:
    from megasync.config.schema import TrainerConfig

# PEFT's prefix of the names of modules.
PREFIX = "base_model.model."
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
WEIGHT = ".weight"
# Narrow projections of latent attention, which Transformer Engine's layers do not split: they have no adapters, so that
# those of a model are the same with both kinds of layers.
UNADAPTED = ("q_a_proj", "kv_a_proj_with_mqa")
# Those whose adapters servers compute beside the model.
SERVED_TARGETS = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"})
SPLITS = (Split.ROW, Split.COLUMN, Split.GATED, Split.QKV, Split.GATED_QKV)
# The file of the optimizer's state beside PEFT's files.
OPTIMIZER = "optimizer.safetensors"
# The output layer. Adapters of it are added to logits, so the embedding that it may be tied to stays as it is.
UNEMBED = "lm_head"


@dataclass(frozen=True)
class AdapterShape:
    """The rank of all factors, the scale of their product, and the names of the adapted projections."""

    rank: int
    scale: float
    targets: tuple[str, ...]


@dataclass(frozen=True)
class Adapted:
    """A parameter of the model, and the names of its factors: one of ``downs`` for each tensor that is fused in it."""

    item: Placed
    downs: tuple[str, ...]
    up: str

    @property
    def module(self) -> str:
        """The path of the linear layer."""
        return self.item.param.rpartition(".")[0]


def adapter_layout(base: Layout, trainer: TrainerConfig) -> AdapterLayout | None:
    """The layout of the adapters that a run trains, or None if it trains all weights. Raises as `AdapterLayout`."""
    lora = trainer.lora
    if not lora.rank:
        return None
    targets = lora.targets or {name for names in fused_projections(base) for name in names}
    return AdapterLayout(base, AdapterShape(lora.rank, lora.alpha / lora.rank, tuple(sorted(targets))))


def kinds_of_projections(layout: Layout) -> dict[str, set[str]]:
    """The projections that can have adapters, by whether they are part of "attention", of an "mlp" or the "unembed"."""
    kinds: dict[str, set[str]] = {"attention": set(), "mlp": set(), "unembed": {UNEMBED}}
    for pp in range(layout.topology.pipeline):
        for item in layout.placed(pp):
            if is_linear(item):
                kind = "mlp" if ".mlp." in item.param else "attention"
                kinds[kind] |= {projection(name) for name, _ in item.tensors}
    return kinds


class AdapterLayout(Layout):
    """The adapters of a model as ``base`` lays it out.

    Raises ConfigError for a target that the model lacks, and for a part of the projections that Megatron fuses.
    """

    def __init__(self, base: Layout, shape: AdapterShape) -> None:
        super().__init__(base.hf_config, base.topology, base.spec)
        self.base = base
        self.shape = shape
        _check_targets(base, shape.targets)

    @cached_property
    def frozen_tensors(self) -> dict[str, tuple[int, ...]]:
        """Empty: a folder of adapters has no other tensors."""
        return {}

    def on(self, topology: Topology) -> AdapterLayout:
        return AdapterLayout(self.base.on(topology), self.shape)

    def adapted(self, rank: int) -> list[Adapted]:
        """The adapted parameters of a rank. That of a tied output layer has the name that an untied one would have."""
        ep, pp = self.topology.expert_coords(rank).ep, self.topology.coords(rank).pp
        return [_adapted(item) for item in self._adapted_items(pp) if item.ep in (None, ep)]

    def factors_of(self, rank: int, targets: Collection[str]) -> dict[str, tuple[int, ...]]:
        """The shape of each factor, by its name in PEFT, of another adapter of the same model."""
        shapes: dict[str, tuple[int, ...]] = {}
        for tensor, shape in self.base.hf_tensors.items():
            if projection(tensor) in targets and len(shape) == 2:
                shapes[self._peft_name(tensor, DOWN)] = (rank, shape[1])
                shapes[self._peft_name(tensor, UP)] = (shape[0], rank)
        return shapes

    def sources(self, item: Placed, rank: int) -> list[int]:
        """For each row of a parameter of the model, the number of the tensor that it is a row of."""
        topology = self.topology
        part = topology.coords(rank).tp if item.ep is None else topology.expert_coords(rank).etp
        if item.split is Split.ROW:
            return [0] * item.shapes[0][0]
        spans = sorted((local.row, local.rows, index) for index, _, local in self.base.rectangles(item, part))
        return [index for _, rows, index in spans for _ in range(rows)]

    @cached_property
    def _targets(self) -> frozenset[str]:
        return frozenset(self.shape.targets)

    def _adapted_items(self, pp: int) -> Iterator[Placed]:
        for item in self.base.placed(pp):
            if is_linear(item) and all(projection(name) in self._targets for name, _ in item.tensors):
                yield item
        if UNEMBED in self._targets and pp == self.topology.pipeline - 1:
            yield self.base.head()

    def _place_stage(self, pp: int) -> Iterator[Placed]:
        rank = self.shape.rank
        for item in self._adapted_items(pp):
            adapted = _adapted(item)
            down = Split.ROW if item.split is Split.ROW else Split.REPLICATED
            for name, (tensor, shape) in zip(adapted.downs, item.tensors, strict=True):
                yield Placed(down, name, ((self._peft_name(tensor, DOWN), (rank, shape[1])),), ep=item.ep)
            up = Split.REPLICATED if item.split is Split.ROW else item.split
            tensors = tuple((self._peft_name(tensor, UP), (shape[0], rank)) for tensor, shape in item.tensors)
            yield Placed(up, adapted.up, tensors, ep=item.ep)

    def _peft_name(self, tensor: str, ending: str) -> str:
        root, modules = self.family.root, self.family.modules
        name = tensor.removesuffix(WEIGHT)
        if modules and name.startswith(root):
            name = modules + name.removeprefix(root)
        return PREFIX + name + ending


def is_linear(item: Placed) -> bool:
    """Whether a parameter consists of matrices of linear projections that can have adapters."""
    weights = all(name.endswith(WEIGHT) and len(shape) == 2 for name, shape in item.tensors)
    adapted = not any(projection(name) in UNADAPTED for name, _ in item.tensors)
    return weights and adapted and item.split in SPLITS and item.stacked is None


def projection(tensor: str) -> str:
    """The name of a projection within its module, as PEFT's ``target_modules`` have it."""
    return tensor.removesuffix(WEIGHT).rpartition(".")[2]


def fused_projections(layout: Layout) -> list[tuple[str, ...]]:
    """The projections of a model that can have adapters; those in one tuple need them together."""
    projections: dict[tuple[str, ...], None] = {}
    for pp in range(layout.topology.pipeline):
        for item in layout.placed(pp):
            if is_linear(item):
                projections[tuple(projection(name) for name, _ in item.tensors)] = None
    return list(projections)


def adapter_config(shape: AdapterShape, model_path: str) -> dict[str, Any]:
    """PEFT's ``adapter_config.json``."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model_path,
        "r": shape.rank,
        "lora_alpha": shape.scale * shape.rank,
        "target_modules": sorted(shape.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


# What changes the computation or the names of an adapter, and the values with which it does not.
PLAIN: Mapping[str, Collection[Any]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "fan_in_fan_out": (False, None),
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": ([], None),
    "layers_to_transform": ([], None),
    "target_parameters": ([], None),
}


def check_adapter_config(peft_config: Mapping[str, Any], shape: AdapterShape, key: str) -> None:
    """Raises ConfigError if the ``adapter_config.json`` of a folder is not that of an adapter of this shape.

    ``key`` names the folder in messages.
    """
    for name, allowed in PLAIN.items():
        if name in peft_config and peft_config[name] not in allowed:
            raise ConfigError(f"{key} has {name}={peft_config[name]!r}, which is not supported")
    expected = adapter_config(shape, "")
    for name, option in (("r", "rank"), ("lora_alpha", "alpha")):
        if peft_config.get(name) != expected[name]:
            raise ConfigError(
                f"{key} has {name}={peft_config.get(name)!r}, but trainer.lora.{option} is {expected[name]!r}; set "
                f"trainer.lora.{option}={peft_config.get(name)!r}"
            )
    targets: Any = peft_config.get("target_modules")
    modules: list[Any] = cast("list[Any]", targets) if isinstance(targets, list) else []
    if {str(module).rpartition(".")[2] for module in modules} != set(shape.targets):
        raise ConfigError(
            f"{key} has target_modules={targets!r}, but trainer.lora.targets is "
            f"{sorted(shape.targets)}; they must name the same projections"
        )


def check_served_beside(peft_config: Mapping[str, Any], shape: AdapterShape, key: str) -> tuple[int, set[str]]:
    """The rank and the adapted projections of an ``adapter_config.json``.

    Raises ConfigError if servers of adapters of ``shape`` cannot serve it too.
    """
    rank, target_modules = peft_config.get("r"), peft_config.get("target_modules")
    modules: list[Any] = cast("list[Any]", target_modules) if isinstance(target_modules, list) else [target_modules]
    targets = {str(module).rpartition(".")[2] for module in modules}
    if peft_config.get("peft_type") != "LORA" or not isinstance(rank, int):
        raise ConfigError(
            f"{key} has peft_type={peft_config.get('peft_type')!r} and r={rank!r}; it must be a LoRA adapter"
        )
    if rank > shape.rank:
        raise ConfigError(f"{key} has rank {rank}, but servers have room for trainer.lora.rank={shape.rank}; raise it")
    if others := sorted(targets - set(shape.targets)):
        raise ConfigError(
            f"{key} adapts {others[0]}, which trainer.lora.targets={sorted(shape.targets)} does not; name the same "
            f"projections"
        )
    return rank, targets


def _check_targets(layout: Layout, targets: Collection[str]) -> None:
    fused = fused_projections(layout)
    projections = [*sorted({name for names in fused for name in names}), UNEMBED]
    if unknown := sorted(set(targets) - set(projections)):
        raise ConfigError(f"trainer.lora.targets names {unknown[0]!r}; the model has {', '.join(projections)}")
    for names in fused:
        chosen = [name for name in names if name in targets]
        if chosen and len(chosen) < len(names):
            raise ConfigError(
                f"trainer.lora.targets names {', '.join(chosen)} of {', '.join(names)}, which Megatron computes as one "
                f"projection; name all of them or none"
            )


def _adapted(item: Placed) -> Adapted:
    module, _, leaf = item.param.rpartition(".")
    # Grouped experts have their number in the name of the weight.
    expert = leaf.removeprefix("weight")
    downs = tuple(f"{module}.adapter.down{expert}_{index}" for index in range(len(item.tensors)))
    return Adapted(item, downs, f"{module}.adapter.up{expert}")
