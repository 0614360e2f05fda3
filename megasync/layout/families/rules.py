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
    """A Hugging Face tensor: name pattern, and shape as `Sizes.shape` takes it."""

    name: str
    shape: tuple[str | int, ...]


@dataclass(frozen=True)
class Rule:
    """One Megatron parameter, the Hugging Face tensors inside it (in fused order), and its split."""

    split: Split
    tensors: tuple[Tensor, ...]
    # The parameter's name under Megatron's own layers.
    local: str
    # Its name and its split under Transformer Engine's layers, where they differ.
    te: str | None = None
    te_split: Split | None = None
    # Switches in config.json: the rule applies only if `when` is true and `unless` is false.
    when: str | None = None
    unless: str | None = None
    # The dtype that an export always stores; None for the model's own.
    dtype: str | None = None
    # The engine fuses these tensors with those of the previous rule, and must receive all of them together.
    joined: bool = False
    # Each tensor rank computes the gradient of a replicated parameter from all tokens, even under sequence parallelism.
    all_tokens: bool = False
    # The Hugging Face tensor has those of all experts along its first dimension; `transposed`: each transposed.
    stacked: bool = False
    transposed: bool = False
    # For each tensor of a parameter that is cut by sections, the rows that each section has for one key head of a gated
    # delta net.
    sections: tuple[tuple[str, ...], ...] = ()
    # The tensors hold these rows key head by key head, not section by section.
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


# What the names of a layer's tensors, and of its parameters, begin with.
HF_LAYER, LAYER = "model.layers.{layer}.", "decoder.layers.{layer}."


def of_layer(
    split: Split, hf: str, shape: tuple[str | int, ...], megatron: str, te: str | None = None, **options: Any
) -> Rule:
    """The rule of a layer's parameter that is one tensor. All names are those within the layer."""
    return Rule(split, (Tensor(HF_LAYER + hf, shape),), LAYER + megatron, te and LAYER + te, **options)


# Before and after the layers, in all families.
EMBEDDING = Rule(
    Split.VOCAB, (Tensor("model.embed_tokens.weight", ("vocab", "hidden")),), "embedding.word_embeddings.weight"
)
FINAL_NORM = Rule(Split.REPLICATED, (Tensor("model.norm.weight", ("hidden",)),), "decoder.final_layernorm.weight")
HEAD = Rule(Split.VOCAB, (Tensor("lm_head.weight", ("vocab", "hidden")),), "output_layer.weight")


@dataclass(frozen=True)
class Family:
    """The rules and switches of one model type."""

    # Rules of every layer.
    layer: tuple[Rule, ...]
    # Rules of layers without experts, and of layers with experts.
    dense: tuple[Rule, ...]
    sparse: tuple[Rule, ...] = ()
    # The only supported value of options that change the parameters.
    fixed: Mapping[str, Any] = field(default_factory=dict[str, Any])
    # The values of options that config.json leaves out.
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    # What the config.json of an export states whatever the source's says.
    exported: Mapping[str, Any] = field(default_factory=dict[str, Any])
    # Neighbouring channels are rotated together, not the halves of a head.
    interleaved_rotary: bool = False
    # The option that may leave some channels unrotated: a share (`partial_rotary_factor`) or a number (`rotary_dim`).
    partial_rotary: str | None = None
    # The supported kinds of rotary scaling.
    rope_types: tuple[str, ...] = ("default", "llama3")
    # Queries, keys and values pass through latents.
    latent: bool = False
    # This family's names of options that it calls something else, by the names that `Sizes` are read from.
    spelling: Mapping[str, str] = field(default_factory=dict[str, str])
    # Layers may have a sliding window (`sliding_window`, `layer_types` in config.json).
    windows: bool = False
    # Experts clamp the inputs of a SwiGLU that differs from the others' (`swiglu_limit`; gpt-oss), and their gate and
    # up rows alternate.
    clamped: bool = False
    # Rules of layers with a gated delta net, which replace `layer` there; `Sizes.delta_layers` says where.
    delta: tuple[Rule, ...] = ()
    # Norms multiply by 1 plus their weight.
    zero_centered_norms: bool = False
    # Layers with a window have a rotary base of their own.
    local_rotary: bool = False
    # Gates pass GELU (its approximation by tanh), not SiLU.
    gelu: bool = False
    # The embedding of a token is multiplied by the square root of its size.
    scaled_embeddings: bool = False
    # Tokens attend within chunks of their sequence; every fourth layer attends to all tokens and rotates nothing (Llama
    # 4).
    chunks: bool = False
    # The one expert of a token gets its input times the sigmoid of its score.
    scales_expert_inputs: bool = False
    # Experts may be stored in MXFP4.
    mxfp4: bool = False
    # The vision tower of the folder; config.json then has the language model in `text_config`.
    vision: Tower | None = None
    # The prefix of the names of tensors. One that ends with `.model` has the output layer beside it.
    root: str = "model"
    # The prefix of the names of transformers' modules; None: `root`.
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
