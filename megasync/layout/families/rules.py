"""The rules of a family's table: which Hugging Face tensors make up which Megatron parameter.

In a pattern, ``{layer}`` is the global layer on the Hugging Face side and the model chunk's own layer on the Megatron
side. Likewise ``{expert}`` is the global expert, and the expert's number on its rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from megasync.layout.families.vision import Tower


class Split(Enum):
    """How tensor parallelism cuts a Megatron parameter that is made of one or more Hugging Face tensors."""

    REPLICATED = "every rank holds the whole"
    ROW = "input features (columns of the matrix) are cut"
    COLUMN = "output features (rows of the matrix) are cut contiguously"
    GATED = "gate rows, then up rows, in two tensors or one; each half is cut, a rank holds its gate and its up rows"
    QKV = "rows run q..q k v per key-value group; the whole is cut contiguously"
    GATED_QKV = "rows run q..q gate..gate k v per group; the first tensor has query, then gate, of each head in turn"
    SECTIONS = "sections of several sizes follow one another; each is cut, a rank holds its part of each"
    VOCAB = "rows are cut after padding the vocabulary"


@dataclass(frozen=True)
class Tensor:
    """A Hugging Face tensor: name pattern, and shape as numbers and names of `Sizes` fields."""

    name: str
    shape: tuple[str | int, ...]


@dataclass(frozen=True)
class Rule:
    """One Megatron parameter, the Hugging Face tensors inside it (in fused order), and its split.

    ``te`` and ``te_split`` are the name and the split under Transformer Engine's layers if they differ. ``when`` and
    ``unless`` name switches in config.json: the rule applies only if the first is true and the second false. ``dtype``
    is what an export always stores, if that is not the model's own. ``joined``: the engine fuses these tensors with
    those of the previous rule, and must receive all of them together. ``all_tokens``: each tensor rank computes a
    replicated parameter's gradient from all tokens, even under sequence parallelism. ``stacked``: the Hugging Face
    tensor has those of all experts along its first dimension; ``transposed``: each transposed. ``sections`` of a
    parameter that is cut by sections are, for each tensor, the rows that each of its sections has for one key head of a
    gated delta net. ``grouped``: a tensor has them key head by key head, not section by section.
    """

    split: Split
    tensors: tuple[Tensor, ...]
    local: str
    te: str | None = None
    te_split: Split | None = None
    when: str | None = None
    unless: str | None = None
    dtype: str | None = None
    joined: bool = False
    all_tokens: bool = False
    stacked: bool = False
    transposed: bool = False
    sections: tuple[tuple[str, ...], ...] = ()
    grouped: bool = False

    def param(self, spec: str) -> str:
        return self.te if spec == "te" and self.te else self.local

    def cut(self, spec: str) -> Split:
        return self.te_split if spec == "te" and self.te_split else self.split

    def holds(self, config: Mapping[str, Any]) -> bool:
        wanted = self.when is None or config.get(self.when)
        return bool(wanted) and not (self.unless and config.get(self.unless))

    @property
    def per_expert(self) -> bool:
        """Whether the rule describes one parameter of each expert, split over the ranks that share an expert."""
        return "{expert}" in self.local


# Before and after the layers, in all families.
EMBEDDING = Rule(
    Split.VOCAB, (Tensor("model.embed_tokens.weight", ("vocab", "hidden")),), "embedding.word_embeddings.weight"
)
FINAL_NORM = Rule(Split.REPLICATED, (Tensor("model.norm.weight", ("hidden",)),), "decoder.final_layernorm.weight")
HEAD = Rule(Split.VOCAB, (Tensor("lm_head.weight", ("vocab", "hidden")),), "output_layer.weight")


@dataclass(frozen=True)
class Family:
    """A model type.

    ``layer`` holds the rules of every layer, ``dense`` and ``sparse`` those of layers without and with experts only.
    ``fixed`` gives the only supported value of options that change the parameters, ``defaults`` the values of options
    that config.json leaves out, and ``exported`` what an export's config.json states whatever the source's says.
    ``interleaved_rotary``: neighbouring channels are rotated together, not the halves of a head. ``partial_rotary``:
    the option of config.json that may leave some of the channels unrotated; it gives a share of them
    (``partial_rotary_factor``) or a number (``rotary_dim``). ``rope_types``: the supported kinds of rotary scaling.
    ``latent``: queries, keys and values pass through latents. ``spelling``: this family's names, by the names that
    `Sizes` are read from, of options that it calls something else. ``windows``: layers may have a sliding window, of
    which config.json tells (``sliding_window``, ``layer_types``). ``clamped``: experts clamp the inputs of a SwiGLU
    that differs from the others' (``swiglu_limit``; gpt-oss), and their gate and up rows alternate. ``delta``: rules of
    layers with a gated delta net, which replace ``layer`` there; `Sizes.delta_layers` says where.
    ``zero_centered_norms``: norms multiply by 1 plus their weight. ``local_rotary``: layers with a window have a rotary
    base of their own. ``gelu``: gates pass GELU (its approximation by tanh), not SiLU. ``scaled_embeddings``: the
    embedding of a token is multiplied by the square root of its size. ``vision``: the folder also has this vision
    tower, and config.json has the language model in ``text_config``. ``root``: what names of tensors begin with in
    place of ``model``; one that ends with ``.model`` has the output layer beside it. ``modules``: what those of
    transformers' modules begin with, where that is something else. ``chunks``: tokens attend within chunks of their
    sequence, except in every fourth layer, which attends to all tokens and rotates nothing (Llama 4).
    ``scales_expert_inputs``: the one expert of a token gets its input times the sigmoid of its score. ``mxfp4``:
    experts may be stored in MXFP4.
    """

    layer: tuple[Rule, ...]
    dense: tuple[Rule, ...]
    sparse: tuple[Rule, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict[str, Any])
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    exported: Mapping[str, Any] = field(default_factory=dict[str, Any])
    interleaved_rotary: bool = False
    partial_rotary: str | None = None
    rope_types: tuple[str, ...] = ("default", "llama3")
    latent: bool = False
    spelling: Mapping[str, str] = field(default_factory=dict[str, str])
    windows: bool = False
    clamped: bool = False
    delta: tuple[Rule, ...] = ()
    zero_centered_norms: bool = False
    local_rotary: bool = False
    gelu: bool = False
    scaled_embeddings: bool = False
    chunks: bool = False
    scales_expert_inputs: bool = False
    mxfp4: bool = False
    vision: Tower | None = None
    root: str = "model"
    modules: str | None = None

    def named(self, pattern: str) -> str:
        """The name in this family's folders of a tensor that the rules call ``pattern``."""
        if pattern.startswith("model."):
            return self.root + pattern.removeprefix("model")
        return self.root.removesuffix("model") + pattern if self.root.endswith(".model") else pattern

    @property
    def gates_attention(self) -> bool:
        """The output of attention is multiplied by the sigmoid of a gate."""
        return any(rule.split is Split.GATED_QKV for rule in self.layer)

    @property
    def has_sinks(self) -> bool:
        """Attention has a learnable sink per head."""
        return any(rule.local.endswith(".softmax_offset") for rule in self.layer)

    @property
    def has_expert_biases(self) -> bool:
        """Linear layers of experts have biases, which Megatron supports where experts are not split."""
        return any(rule.per_expert and rule.local.endswith(".bias") for rule in self.sparse)

    @property
    def norms_outputs(self) -> bool:
        """Attention and MLP normalise their output before it is added to the residual."""
        return any(rule.local.endswith(".output_layernorm.weight") for rule in self.layer)

    @property
    def norms_all_heads(self) -> bool:
        """Queries and keys are normalised over all heads together, not head by head."""
        return any(rule.local.endswith(".k_layernorm.weight") and rule.split is Split.COLUMN for rule in self.layer)

    @property
    def has_router_bias(self) -> bool:
        """Experts are chosen by sigmoid scores and a bias, possibly within the best groups of experts only."""
        return any(rule.local.endswith(".expert_bias") for rule in self.sparse)
