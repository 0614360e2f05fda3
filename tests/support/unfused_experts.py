"""Hugging Face's models with a linear layer for each projection of each expert, to which PEFT can add adapters."""

import torch
from transformers import AutoModelForCausalLM


class Expert(torch.nn.Module):
    def __init__(self, gate_up, down):
        super().__init__()
        self.gate_proj, self.up_proj = (linear(half) for half in gate_up.chunk(2))
        self.down_proj = linear(down)

    def forward(self, x):
        return self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def linear(weight):
    layer = torch.nn.Linear(*weight.shape[::-1], bias=False)
    layer.weight = torch.nn.Parameter(weight.detach().clone())
    return layer


class Experts(torch.nn.ModuleList):
    """In place of the stacked experts of a layer."""

    def forward(self, hidden, chosen, weights):
        """``hidden`` [tokens, channels]; ``chosen`` and ``weights`` [tokens, experts of a token]."""
        output = torch.zeros_like(hidden)
        for number, expert in enumerate(self):
            tokens, place = torch.where(chosen == number)
            output = output.index_add(0, tokens, expert(hidden[tokens]) * weights[tokens, place, None])
        return output


class UnfusedModel(torch.nn.Module):
    """Has no config, by which PEFT would take its experts for stacked ones."""

    prepare_inputs_for_generation = None

    def __init__(self, path):
        super().__init__()
        whole = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
        self.model, self.lm_head = whole.model, whole.lm_head
        for layer in self.model.layers:
            if (stacked := getattr(layer.mlp, "experts", None)) is not None:
                pairs = zip(stacked.gate_up_proj, stacked.down_proj, strict=True)
                layer.mlp.experts = Experts(Expert(*pair) for pair in pairs)

    def forward(self, ids):
        """Logits [sequences, tokens, vocabulary] of ids [sequences, tokens]."""
        return self.lm_head(self.model(ids).last_hidden_state)
