"""A rank under verl's own workers: `verl_rank.py RANK WORLD FOLDER`.

FOLDER/request.json has runs by name; FOLDER/result-RANK.pt gets what `run` returned of each, by the same names.
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
import verl.utils.model
from megatron.core import parallel_state
from transformers import AutoModelForTokenClassification
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import (
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    McoreOptimizerConfig,
    TrainingWorkerConfig,
)
from verl.workers.config.engine import EngineRouterReplayConfig
from verl.workers.engine_workers_tinker import TinkerTrainingWorker
from verl.workers.utils.losses import sft_loss

from megasync.errors import ConfigError
from megasync.integrations.verl import MegasyncEngineConfig
from megasync.layout.model_files import read_hf_config
from megasync.layout.routes import RouteFormat

# This file is executed as a program, which pytest's path does not apply to.
sys.path.append(str(Path(__file__).parents[2] / "support"))
from verl_data import MINIBATCH, SEQUENCES, jagged_batch, loss_of, padded_output, routed_batch

MODEL_TYPES = {"actor": "language_model", "critic": "value_model"}
FULL = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
# In which the minibatches of two data-parallel ranks come one after the other.
BY_MINIBATCH = [0, 1, 4, 5, 2, 3, 6, 7]


def load_eager_value_model(local_path, torch_dtype, model_config, trust_remote_code):
    """verl's own way to load a critic asks for flash attention, which no CPU has."""
    return AutoModelForTokenClassification.from_pretrained(
        local_path, dtype=torch_dtype, config=model_config, attn_implementation="eager"
    )


verl.utils.model.load_valuehead_model = load_eager_value_model


def join(name):
    meeting = f"file://{Path(sys.argv[3]) / f'store-{name}'}"
    rank, world = int(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world, timeout=timedelta(seconds=120))


def worker_config(role, model, strategy, settings, padding):
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
        if mode := sizes.pop("router_replay", None):
            sizes["router_replay"] = EngineRouterReplayConfig(mode=mode)
        config = MegasyncEngineConfig(**{"dtype": "float32", **sizes})
        optimizer = McoreOptimizerConfig(lr_decay_style="constant", **adam)
    return TrainingWorkerConfig(
        model_type=MODEL_TYPES[role],
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


class Rank:
    """A worker of one role, asked as verl's driver asks all of them."""

    def __init__(self, role, model, strategy, settings, padding):
        self.role, self.path = role, model
        # A TrainingWorker that may also be asked for the parts of a step one by one.
        self.worker = TinkerTrainingWorker(worker_config(role, model, strategy, settings, padding))
        self.worker.reset()
        self.loss = loss_of(role, strategy)
        self.worker.set_loss_fn(self.loss)
        self.engine = self.worker.engine

    def share(self, order=range(SEQUENCES), **options):
        """This data-parallel rank's sequences, as verl hands them to a worker."""
        each = SEQUENCES // self.engine.get_data_parallel_size()
        first = self.engine.get_data_parallel_rank() * each
        return jagged_batch(self.role, list(order[first : first + each]), **options)

    def infer(self, each_its_own=False):
        """Padded results for this rank's responses, None where verl collects nothing."""
        data = self.share(compute_loss=False)
        if each_its_own:
            data.pop("temperature")
            mine = self.engine.get_data_parallel_rank()
            data["temperature"] = torch.linspace(0.5, 1.5, SEQUENCES).split(len(data))[mine]
        found = self.worker.infer_batch(data.clone())
        return padded_output(self.role, found, data) if self.engine.is_mp_src_rank_with_outputs() else None

    def routed(self):
        """As `infer`, with given experts."""
        each = SEQUENCES // self.engine.get_data_parallel_size()
        first = self.engine.get_data_parallel_rank() * each
        form = RouteFormat.of(read_hf_config(self.path))
        data = routed_batch(form, list(range(first, first + each)))
        found = self.worker.infer_batch(data.clone())
        return padded_output(self.role, found, data) if self.engine.is_mp_src_rank_with_outputs() else None

    def supervised_loss(self):
        """verl's loss of fine-tuning, over whole sequences that do not say which tokens are their responses."""
        data = self.share().select("input_ids", "position_ids")
        offsets = data["input_ids"].offsets()
        mask = torch.ones(int(offsets[-1]))
        mask[offsets[:-1]] = 0
        data["loss_mask"] = torch.nested.nested_tensor_from_jagged(mask, offsets)
        tu.assign_non_tensor(data, temperature=1.0)
        self.worker.set_loss_fn(partial(sft_loss, config=None))
        found = self._metrics(self.worker.infer_batch(data))
        self.worker.set_loss_fn(self.loss)
        return found

    def train_batch(self):
        """Metrics of one optimizer step over all sequences."""
        return self._metrics(self.worker.train_batch(self.share(global_batch_size=SEQUENCES)))

    def train_mini_batch(self):
        """Metrics of two optimizer steps, over half of the sequences each."""
        order = range(SEQUENCES) if self.engine.get_data_parallel_size() == 2 else BY_MINIBATCH
        data = self.share(order, global_batch_size=MINIBATCH, mini_batch_size=MINIBATCH)
        return self._metrics(self.worker.train_mini_batch(data))

    def train_in_parts(self):
        """Metrics of two backward passes over the same sequences, and of the optimizer step after them.

        The weights in between; or only the refusal, of an engine that could not keep gradients between calls.
        """
        try:
            self.worker.optimizer_zero_grad()
        except ConfigError as error:
            return {"refused": str(error)}
        losses = [
            self._metrics(self.worker.forward_backward(self.share(global_batch_size=SEQUENCES))) for _ in range(2)
        ]
        between = self.weights()
        return {"losses": losses, "between": between, "step": self.worker.optimizer_step(), "after": self.weights()}

    def _metrics(self, found):
        return None if found is None else tu.get(found, "metrics")

    def weights(self):
        tensors, adapter = self.engine.get_per_tensor_param()
        assert adapter is None
        return {name: tensor.detach().clone() for name, tensor in tensors}

    def copy(self):
        """Keeps the weights as verl's trainer with separate servers does."""
        from verl.utils.megatron_utils import copy_megatron_model_to_cpu

        return copy_megatron_model_to_cpu(self.engine.module)

    def infer_with(self, weights):
        """Results with the weights of an earlier `copy`; afterwards the current ones are restored."""
        from verl.utils.megatron_utils import restore_megatron_model_from_cpu

        present = self.copy()
        restore_megatron_model_from_cpu(self.engine.module, weights)
        found = self.infer()
        restore_megatron_model_from_cpu(self.engine.module, present)
        return found

    def offload_and_restore(self):
        """Offloads this rank's memory, exports nevertheless, and restores it: the export, and bytes at each point."""
        from megasync.trainer.offload import KINDS  # Only now: it takes names from Megatron.

        offload = self.engine._computation.offload

        def nbytes():
            stored = offload._storages().items()
            return {kind: sum(tensor.untyped_storage().nbytes() for tensor in tensors) for kind, tensors in stored}

        before = nbytes()
        offload.offload(*KINDS)
        weights = self.weights()
        away = nbytes()
        offload.restore(*KINDS)
        return weights, (before, away, nbytes())


def run(model, strategy, role="actor", settings=None, padding=True, save=None):
    rank = Rank(role, model, strategy, settings or {}, padding)
    found = {"dp": rank.engine.get_data_parallel_rank(), "before": rank.weights(), "infer": rank.infer()}
    if role == "actor":
        found |= {"each_its_own": rank.infer(each_its_own=True), "supervised": rank.supervised_loss()}
    if "router_replay" in (settings or {}):
        found["routed"] = rank.routed()
    if strategy != "fsdp2":
        reference = Rank(role, model, strategy, {**(settings or {}), "forward_only": True}, padding)
        first = rank.copy()
    found |= {"train": rank.train_batch(), "after": rank.weights(), "infer_after": rank.infer()}
    if strategy != "fsdp2":
        found["infer_before"] = rank.infer_with(first)
    if save:
        rank.worker.save_checkpoint(save, global_step=1)
        found["away"], found["held"] = rank.offload_and_restore()
    found |= {"next": rank.train_mini_batch(), "last": rank.weights()}
    if save:
        rank.worker.reset()
        rank.worker.load_checkpoint(save)
        found |= {"restored": rank.weights(), "again": rank.train_mini_batch(), "end": rank.weights()}
    found["parts"] = rank.train_in_parts()
    if strategy != "fsdp2":
        found["reference"] = reference.infer()
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
