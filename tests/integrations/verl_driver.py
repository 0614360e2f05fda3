"""verl's driver and its worker group of real Ray actors: `verl_driver.py MODEL RESULT`. Four workers on two cores."""

import os
import sys

os.environ["VERL_PLATFORM"] = "cpu"

import ray
import torch
import torch.distributed as dist
from tensordict import TensorDict
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.padding import no_padding_2_padding
from verl_rank import SEQUENCES, actor_loss, jagged_batch, worker_config

WORLD = 4
SETTINGS = {"tensor_model_parallel_size": 2}
# verl reserves this many CPUs for a worker; these are not the machine's.
CPUS = 10 * WORLD


class CpuWorker(TrainingWorker):
    """verl asks for one backend for the CPU and one for the device, which here is the CPU again; torch refuses that."""

    def __init__(self, config):
        dist.init_process_group("gloo")
        super().__init__(config)


def wait(answer):
    return answer if isinstance(answer, TensorDict) else answer.get()


def main():
    model, result = sys.argv[1:]
    ray.init(
        address="local",
        num_cpus=CPUS,
        include_dashboard=False,
        runtime_env={"env_vars": {"VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1"}},
    )
    try:
        config = worker_config(model, "megasync", SETTINGS, padding=True)
        workers = RayWorkerGroup(
            resource_pool=RayResourcePool(process_on_nodes=[WORLD], use_gpu=False),
            ray_cls_with_init=RayClassWithInitArgs(cls=ray.remote(CpuWorker), config=config),
            device_name="cpu",
        )
        workers.reset()
        workers.set_loss_fn(actor_loss("megasync"))
        data = jagged_batch(compute_loss=False)
        scored = wait(workers.infer_batch(data))
        options = {"global_batch_size": SEQUENCES, "mini_batch_size": SEQUENCES}
        trained = [tu.get(wait(workers.train_mini_batch(jagged_batch(**options))), "metrics") for _ in range(2)]
        scores = {name: no_padding_2_padding(scored[name], data) for name in ("log_probs", "entropy")}
        torch.save({"dp": 0, "infer": scores, "train": trained[0], "next": trained[1]}, result)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
