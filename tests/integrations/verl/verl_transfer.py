"""A trainer rank or a rollout worker of a weight transfer: `verl_transfer.py trainer|rollout RANK MODEL FILE`.

MODEL is a Hugging Face folder, which the trainer ranks hold in tensor-parallel shards. Each line of standard input is a
JSON object. "prepare" is answered with the metadata of `prepare`. Any other line contains the arguments of
`init_process_group` and optionally a `fault`; the answer is the number of tensors that a rollout worker received and
wrote to FILE, or the error.
"""

import asyncio
import json
import os
import sys
from contextlib import contextmanager
from pathlib import Path

os.environ["VERL_PLATFORM"] = "cpu"

from safetensors.torch import save_file

from megasync.errors import SyncError
from megasync.integrations.verl import checkpoint_engine
from megasync.integrations.verl.weights import Weights
from megasync.layout.layout import Layout
from megasync.layout.shards import load_shards
from megasync.layout.topology import Topology
from megasync.sync.stream import Shards

TRAINERS = 2
# Many tensors fit into one bucket, the vocabulary's do not.
BUCKET = 40_000
LATE = "decoder.layers.1.self_attention.linear_proj.weight"


class FailingParams(dict):
    """Gives no parameter of the second layer's projection: a rank that fails after half of its share is sent."""

    def __getitem__(self, name):
        if name == LATE:
            raise ValueError("no more tensors")
        return super().__getitem__(name)


class Trainer:
    def __init__(self, rank, model):
        config = json.loads((Path(model) / "config.json").read_text())
        self.layout = Layout(config, Topology(tensor=TRAINERS))
        self.rank, self.params = rank, load_shards(model, self.layout, rank)

    async def transfer(self, engine, fault):
        params = FailingParams(self.params) if fault == "breaks down" else self.params

        @contextmanager
        def held():
            yield Shards(self.layout, "bfloat16", self.rank, params)

        if fault == "is damaged":
            checkpoint_engine.signed = lambda value: 5
        await engine.send_weights(Weights(held), global_steps=4)
        return 0


class Rollout:
    def __init__(self, file):
        self.file = file

    async def transfer(self, engine, fault):
        found = {}
        async for name, tensor in engine.receive_weights(global_steps=4):
            found[name] = tensor.clone()
            if fault == "breaks down" and len(found) == 10:
                raise ValueError("no room")
        save_file(found, self.file)
        return len(found)


def main():
    role, rank, model, file = sys.argv[1], int(sys.argv[2]), *sys.argv[3:]
    side = Trainer(rank, model) if role == "trainer" else Rollout(file)
    is_master = (role, rank) == ("trainer", 0)
    engine = checkpoint_engine.MegasyncCheckpointEngine(BUCKET, is_master=is_master, timeout=60.0, host="127.0.0.1")
    signed = checkpoint_engine.signed
    for line in sys.stdin:
        request = json.loads(line)
        if request == "prepare":
            answer = engine.prepare()
        else:
            fault = request.pop("fault")
            engine.init_process_group(**request)
            try:
                answer = {"tensors": asyncio.run(side.transfer(engine, fault))}
            except (SyncError, ValueError) as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            checkpoint_engine.signed = signed
            engine.finalize()
        print(f"answer {json.dumps(answer)}", flush=True)


if __name__ == "__main__":
    main()
