"""A trainer rank or a rollout worker of a weight transfer: `verl_transfer.py trainer|rollout`.

Each line of standard input is a JSON object. "prepare" answers with the metadata of `prepare`; any other is the arguments
of `init_process_group` and, for a trainer, after how many tensors to `fail`; it answers with a fingerprint of each tensor
by name, or with the error.
"""

import asyncio
import hashlib
import json
import os
import sys

os.environ["VERL_PLATFORM"] = "cpu"

import torch

from megasync.errors import SyncError
from megasync.integrations.verl.checkpoint_engine import MegasyncCheckpointEngine

TRAINS = sys.argv[1] == "trainer"
# Two buckets of several tensors, one tensor above the limit, one scalar.
SHAPES = {"a": (7, 5), "b": (13,), "large": (40, 30), "scalar": (), "c": (9, 11), "d": (3, 3)}
BUCKET = 1000


def weights():
    generator = torch.Generator().manual_seed(3)
    for index, (name, shape) in enumerate(SHAPES.items()):
        dtype = torch.bfloat16 if index % 2 else torch.float32
        yield name, torch.randn(shape, generator=generator).to(dtype)


def fingerprint(tensor):
    content = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return [str(tensor.dtype), list(tensor.shape), hashlib.sha256(content).hexdigest()]


def failing(after):
    for index, item in enumerate(weights()):
        if index == after:
            raise ValueError("no more tensors")
        yield item


async def transfer(engine, fail):
    if TRAINS:
        await engine.send_weights(weights() if fail is None else failing(fail), global_steps=4)
        return {name: fingerprint(tensor) for name, tensor in weights()}
    return {name: fingerprint(tensor) async for name, tensor in engine.receive_weights(global_steps=4)}


def main():
    engine = MegasyncCheckpointEngine(BUCKET, is_master=TRAINS, timeout=60.0, host="127.0.0.1")
    for line in sys.stdin:
        request = json.loads(line)
        if request == "prepare":
            answer = engine.prepare()
        else:
            fail = request.pop("fail", None)
            engine.init_process_group(**request)
            try:
                answer = {"tensors": asyncio.run(transfer(engine, fail))}
            except (SyncError, ValueError) as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            engine.finalize()
        print(f"answer {json.dumps(answer)}", flush=True)


if __name__ == "__main__":
    main()
