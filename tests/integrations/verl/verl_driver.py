"""verl's driver over a worker group of real Ray actors, each a rank of actor and critic: `verl_driver.py FOLDER`.

FOLDER/request.json has the number of ranks, the sizes of the engine and the model of each role. FOLDER/result.pt
receives the driver's result of each role.
"""

import json
import os
import sys
from pathlib import Path

os.environ["VERL_PLATFORM"] = "cpu"

import ray
import torch
from tensordict import TensorDict
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.single_controller.ray.base import create_colocated_worker_cls
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import TrainingWorker
from verl_rank import worker_config

# This file is executed as a program, which pytest's path does not apply to.
sys.path.append(str(Path(__file__).parents[2] / "support"))
from verl_data import MINIBATCH, SEQUENCES, jagged_batch, loss_of, padded_output

SETTINGS = {"param_offload": True, "optimizer_offload": True}
# verl reserves this many CPUs for a worker; these are not the machine's.
CPUS = 10


class ExportingWorker(TrainingWorker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export(self):
        """The model, whole on every rank."""
        tensors, _ = self.engine.get_per_tensor_param()
        return {name: tensor.clone() for name, tensor in tensors}


def wait(answer):
    return answer if isinstance(answer, TensorDict) else answer.get()


def drive(role, workers, folder):
    workers.reset()
    workers.set_loss_fn(loss_of(role, "megasync"))

    def train(call, **options):
        return tu.get(wait(call(jagged_batch(role, **options))), "metrics")

    def train_on():
        # As a user who moves the memory himself.
        workers.to("device")
        sizes = {"global_batch_size": MINIBATCH, "mini_batch_size": MINIBATCH}
        found = train(workers.train_mini_batch, disable_auto_offload=True, **sizes)
        workers.to("cpu")
        return found

    data = jagged_batch(role, compute_loss=False)
    found = {"before": workers.export(), "dp": 0, "infer": padded_output(role, wait(workers.infer_batch(data)), data)}
    found["train"] = train(workers.train_batch, global_batch_size=SEQUENCES)
    found["after"] = workers.export()
    workers.save_checkpoint(str(folder / role), global_step=1)
    found |= {"next": train_on(), "last": workers.export()}
    workers.reset()
    workers.load_checkpoint(str(folder / role))
    return found | {"again": train_on(), "end": workers.export()}


def main():
    folder = Path(sys.argv[1])
    request = json.loads((folder / "request.json").read_text())
    world, models = request["world"], request["models"]
    settings = {**SETTINGS, **request["sizes"]}
    ray.init(
        address="local",
        num_cpus=CPUS * world,
        include_dashboard=False,
        runtime_env={"env_vars": {"VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1"}},
    )
    try:
        roles = {
            role: RayClassWithInitArgs(
                cls=ray.remote(ExportingWorker), config=worker_config(role, model, "megasync", settings, padding=True)
            )
            for role, model in models.items()
        }
        group = RayWorkerGroup(
            resource_pool=RayResourcePool(process_on_nodes=[world], use_gpu=False),
            ray_cls_with_init=create_colocated_worker_cls(roles),
            device_name="cpu",
        )
        workers = group.spawn(prefix_set=roles.keys())
        torch.save({role: drive(role, workers[role], folder) for role in roles}, folder / "result.pt")
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
