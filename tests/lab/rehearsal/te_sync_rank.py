"""A trainer rank with Transformer Engine's layers that answers the calls of `local_ranks.LocalRanks`."""

import sys
from datetime import timedelta
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

import torch.distributed as dist
from local_ranks import Params, Rank, main

from megasync.config.schema import ModelConfig, OptimizerConfig, TrainerConfig
from megasync.lab.rehearsal.device import RehearsalDevice


class TrainedRank(Rank):
    """Holds the weights of a model that it trains."""

    def __init__(self, settings):
        device = RehearsalDevice()
        device.prepare_process(settings["rank"])
        from megasync.trainer.learner import MegatronLearner

        topology = settings["topology"]
        dist.init_process_group(
            "gloo",
            init_method=f"file://{settings['folder']}/rendezvous",
            rank=settings["rank"],
            world_size=topology["tensor"] * topology["pipeline"] * topology["data"],
            timeout=timedelta(seconds=60),
        )
        trainer = TrainerConfig(
            tensor_parallel=topology["tensor"],
            pipeline_parallel=topology["pipeline"],
            expert_parallel=topology["expert"],
            expert_tensor_parallel=topology["expert_tensor"],
            sequence_parallel=topology["tensor"] > 1,
            optimizer=OptimizerConfig(lr=1e-2),
        )
        model = ModelConfig(path=settings["folder"], dtype=settings["dtype"])
        self._engine = MegatronLearner(model, trainer, device, settings["rank"], total_steps=10)
        self._engine.initialize()
        self._steps = 0
        self._serve(self._engine.layout, settings, Params(self._engine.params()))

    def train(self, sequences):
        """One step towards these sequences, and their log-probs after it."""
        from megasync.trainer.batch import Sample

        share = self._engine.local_batch([Sample.of(ids[:1], ids[1:]) for ids in sequences])
        self._engine.forward_backward(share, lambda batch, logprobs, entropy: (-logprobs.mean(), {}))
        self._steps += 1
        assert self._engine.update(self._steps, loss_is_finite=True).applied
        return self._engine.logprobs(sequences)


if __name__ == "__main__":
    main(TrainedRank)
