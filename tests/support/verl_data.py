"""Batches as verl's trainer sends them to its workers, and the losses that it uses for actor and critic."""

from functools import partial

import torch
from verl import DataProto
from verl.utils import tensordict_utils as tu
from verl.workers.config import ActorConfig, CriticConfig
from verl.workers.utils.losses import ppo_loss, value_loss
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

PROMPT, RESPONSE, SEQUENCES, VOCAB = 9, 12, 8, 300
MINIBATCH = SEQUENCES // 2
TEMPERATURE = 0.8
# The per-token outputs of each kind of model.
OUTPUTS = {"actor": ("log_probs", "entropy"), "critic": ("values",)}


def padded_batch(seed=0):
    """Prompts padded on the left and responses on the right, as in verl's trainer. Some response tokens are masked."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=generator)

    prompts = torch.randint(2, PROMPT + 1, (SEQUENCES,), generator=generator)
    responses = torch.randint(1, RESPONSE + 1, (SEQUENCES,), generator=generator)
    attention = torch.cat(
        [
            torch.arange(PROMPT) >= PROMPT - prompts[:, None],
            torch.arange(RESPONSE) < responses[:, None],
        ],
        dim=1,
    ).long()
    ids = torch.randint(3, VOCAB, (SEQUENCES, PROMPT + RESPONSE), generator=generator) * attention
    mask = attention[:, PROMPT:].clone()
    mask[::3, 0] = 0
    return {
        "input_ids": ids,
        "prompts": ids[:, :PROMPT],
        "responses": ids[:, PROMPT:],
        "attention_mask": attention,
        "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
        "response_mask": mask,
        "old_log_probs": -5.7 + 0.1 * random(SEQUENCES, RESPONSE),
        "advantages": random(SEQUENCES, 1).expand(-1, RESPONSE).contiguous(),
        "values": 0.3 * random(SEQUENCES, RESPONSE),
        "returns": random(SEQUENCES, RESPONSE),
    }


def jagged_batch(role, rows=slice(None), **options):
    """The selected sequences without padding, as verl's trainer sends them to its workers."""
    # A critic's batch also has a temperature, which the critic ignores.
    asked = {"temperature": TEMPERATURE, "calculate_entropy": role == "actor"}
    mine = {name: tensor[rows].clone() for name, tensor in padded_batch().items()}
    data = left_right_2_no_padding(DataProto.from_single_dict(mine, meta_info=asked).to_tensordict())
    tu.assign_non_tensor(data, **options)
    return data


def routed_batch(form, rows=slice(None)):
    """`jagged_batch` of an actor with random experts for each token, as verl sends it with `router_replay.mode=R3`."""
    generator = torch.Generator().manual_seed(3)
    scores = torch.rand((SEQUENCES, PROMPT + RESPONSE, form.layers, form.experts), generator=generator)
    routes = scores.argsort(dim=-1)[..., : form.per_token].to(torch.int16)
    data = jagged_batch("actor", rows, compute_loss=False)
    kept = padded_batch()["attention_mask"].bool()
    mine = [each[mask] for each, mask in zip(routes[rows], kept[rows], strict=True)]
    data["routed_experts"] = torch.nested.as_nested_tensor(mine, layout=torch.jagged)
    tu.assign_non_tensor(data, enable_routing_replay=True)
    return data


def padded_output(role, found, data):
    """The outputs for the response tokens by name, each [sequences, RESPONSE]."""
    return {name: no_padding_2_padding(found[name], data) for name in OUTPUTS[role]}


def loss_of(role, strategy):
    options = {"strategy": strategy, "rollout_n": 1, "ppo_mini_batch_size": SEQUENCES, "use_dynamic_bsz": True}
    if role == "actor":
        return partial(ppo_loss, config=ActorConfig(entropy_coeff=0.01, **options))
    return partial(value_loss, config=CriticConfig(**options))
