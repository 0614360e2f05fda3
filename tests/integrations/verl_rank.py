"""A rank under verl's own TrainingWorker: `verl_rank.py RANK WORLD FOLDER`.

FOLDER/request.json is a list of runs; FOLDER/result-RANK.pt gets what `run` returned of each, by name.
"""

import json
import os
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path

os.environ["VERL_PLATFORM"] = "cpu"

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from tensordict import TensorDict
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import (
    ActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    McoreOptimizerConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

from megasync.integrations.verl import MegasyncEngineConfig

PROMPT, RESPONSE, SEQUENCES, VOCAB = 9, 12, 8, 300
FULL = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}


def join(name):
    meeting = f"file://{Path(sys.argv[3]) / f'store-{name}'}"
    rank, world = int(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world, timeout=timedelta(seconds=120))


def padded_batch(seed=0):
    """Prompts padded on the left, responses on the right, as verl's trainer has them. Some response tokens are masked."""
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
    }


def share(engine, **options):
    """This data-parallel rank's sequences, as verl hands them to a worker."""
    each = SEQUENCES // engine.get_data_parallel_size()
    first = engine.get_data_parallel_rank() * each
    return jagged_batch(slice(first, first + each), **options)


def jagged_batch(rows=slice(None), **options):
    """Some of the sequences without padding, as verl's trainer sends them to its workers."""
    mine = {name: tensor[rows].clone() for name, tensor in padded_batch().items()}
    data = left_right_2_no_padding(TensorDict(mine, batch_size=len(mine["input_ids"])))
    tu.assign_non_tensor(data, temperature=0.8, calculate_entropy=True, **options)
    return data


def temperatures(engine):
    """One for each of this rank's sequences, all different."""
    each = SEQUENCES // engine.get_data_parallel_size()
    return torch.linspace(0.5, 1.5, SEQUENCES).split(each)[engine.get_data_parallel_rank()]


def worker_config(model, strategy, settings, padding):
    sizes = {
        "max_token_len_per_gpu": 40,
        "infer_max_token_len_per_gpu": 48,
        "micro_batch_size_per_gpu": 2,
        "infer_micro_batch_size_per_gpu": 1,
        **settings,
    }
    adam = {"lr": 1e-3, "weight_decay": 0.0, "betas": (0.9, 0.95), "clip_grad": 0.5}
    adam |= {"lr_warmup_steps": 0, "total_training_steps": 10}
    if strategy == "fsdp2":
        # verl has registered this engine for accelerators only; it runs on a CPU all the same.
        os.environ["VERL_ENGINE_DEVICE"] = "cuda"
        config = FSDPEngineConfig(
            strategy=strategy, model_dtype="fp32", mixed_precision=FULL, use_torch_compile=False, **sizes
        )
        optimizer = FSDPOptimizerConfig(**adam)
    else:
        os.environ.pop("VERL_ENGINE_DEVICE", None)
        config = MegasyncEngineConfig(**{"dtype": "float32", **sizes})
        optimizer = McoreOptimizerConfig(lr_decay_style="constant", **adam)
    return TrainingWorkerConfig(
        model_type="language_model",
        model_config=HFModelConfig(
            path=model,
            load_tokenizer=False,
            use_remove_padding=padding,
            override_config={"attn_implementation": "eager"},
        ),
        engine_config=config,
        optimizer_config=optimizer,
        checkpoint_config=CheckpointConfig(save_contents=["model", "optimizer", "extra", "hf_model"]),
    )


def actor_loss(strategy):
    actor = ActorConfig(
        strategy=strategy, rollout_n=1, ppo_mini_batch_size=SEQUENCES, use_dynamic_bsz=True, entropy_coeff=0.01
    )
    return partial(ppo_loss, config=actor)


def make_worker(model, strategy, settings, padding):
    worker = TrainingWorker(worker_config(model, strategy, settings, padding))
    worker.reset()
    worker.set_loss_fn(actor_loss(strategy))
    return worker


def infer(worker, each_its_own=False):
    """Padded log-probs and entropies of this rank's responses, None where verl collects nothing."""
    data = share(worker.engine, compute_loss=False)
    if each_its_own:
        data.pop("temperature")
        data["temperature"] = temperatures(worker.engine)
    found = worker.infer_batch(data.clone())
    if not worker.engine.is_mp_src_rank_with_outputs():
        return None
    return {name: no_padding_2_padding(found[name], data) for name in ("log_probs", "entropy")}


def train(worker):
    """Metrics of one optimizer step over all sequences."""
    data = share(worker.engine, global_batch_size=SEQUENCES, mini_batch_size=SEQUENCES)
    found = worker.train_mini_batch(data)
    return None if found is None else tu.get(found, "metrics")


def weights(worker):
    tensors, adapter = worker.engine.get_per_tensor_param()
    assert adapter is None
    return {name: tensor.detach().clone() for name, tensor in tensors}


def run(model, strategy, settings=None, padding=True, save=None):
    worker = make_worker(model, strategy, settings or {}, padding)
    found = {
        "dp": worker.engine.get_data_parallel_rank(),
        "before": weights(worker),
        "infer": infer(worker),
        "each_its_own": infer(worker, each_its_own=True),
    }
    if strategy != "fsdp2":
        reference = make_worker(model, strategy, {**(settings or {}), "forward_only": True}, padding)
    found |= {
        "train": train(worker),
        "after": weights(worker),
    }
    if save:
        worker.save_checkpoint(save, global_step=1)
    found |= {"next": train(worker), "last": weights(worker)}
    if save:
        worker.reset()
        worker.load_checkpoint(save)
        found |= {"restored": weights(worker), "again": train(worker), "end": weights(worker)}
    if strategy != "fsdp2":
        found["reference"] = infer(reference)
        parallel_state.destroy_model_parallel()
    return found


def main():
    folder = Path(sys.argv[3])
    found = {}
    for index, (name, request) in enumerate(json.loads((folder / "request.json").read_text()).items()):
        join(index)
        found[name] = run(**request)
        dist.destroy_process_group()
    torch.save(found, folder / f"result-{sys.argv[1]}.pt")


if __name__ == "__main__":
    main()
