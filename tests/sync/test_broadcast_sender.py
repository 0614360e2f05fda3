"""Real trainer ranks send to real receivers over gloo; the receivers join and read the way a stock server does."""

import asyncio
import hashlib
import json
import sys

import pytest
import torch
from safetensors.torch import load_file
from waits import PATIENCE

from megasync.errors import SyncError
from megasync.layout.layout import Layout
from megasync.layout.topology import Topology
from megasync.sync.broadcast.plan import group_name, plan_broadcast

pytestmark = pytest.mark.processes

RECEIVER = """
import hashlib, importlib.util, json, sys
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world, rendezvous

# SGLang's own reader, without the rest of SGLang.
home = Path(importlib.util.find_spec("sglang").origin).parent
spec = importlib.util.spec_from_file_location("tensor_bucket", home / "srt/weight_sync/tensor_bucket.py")
sys.modules["tensor_bucket"] = tensor_bucket = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tensor_bucket)

groups = {}
for name, host, port, rank, size in json.loads(sys.argv[1]):
    store, rank, size = next(rendezvous(f"tcp://{host}:{port}", rank, size, timeout=timedelta(seconds=60)))
    store.set_timeout(timedelta(seconds=60))
    groups[name], _ = _new_process_group_helper(
        size, rank, [], Backend("gloo"), PrefixStore(name, store), group_name=name, timeout=timedelta(seconds=60))
    _world.pg_group_ranks[groups[name]] = {i: i for i in range(size)}
found = {}
for name, names, dtypes, shapes in json.loads(sys.argv[2]):
    bucket = tensor_bucket.FlattenedTensorBucket.empty(names, dtypes, shapes, "cpu")
    dist.broadcast(bucket.get_flattened_tensor(), src=0, group=groups[name])
    for key, tensor in bucket.reconstruct_tensors():
        found[key] = hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
print("RESULT" + json.dumps(found), flush=True)
"""


def digest(tensor):
    return hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("topology", "tied", "dtype", "kind"),
    [
        (Topology(tensor=2, pipeline=2), True, "float32", {"model_type": "qwen3"}),
        (Topology(tensor=2, data=2), False, "bfloat16", {"model_type": "qwen3"}),
        (Topology(tensor=2, data=2, expert=2), False, "bfloat16", {"model_type": "qwen3_moe", **EXPERTS}),
    ],
    ids=["pipeline", "data", "experts"],
)
async def test_receivers_get_bitwise_what_the_checkpoint_holds(
    make_model, save_model, local_ranks, tmp_path, topology, tied, dtype, kind
):
    model = make_model(tie_word_embeddings=tied, head_dim=4, **kind)
    plan = plan_broadcast(Layout(save_model(model, tmp_path), topology), 3000, dtype)
    assert len(plan.of_stage(0)) > 3
    ranks = await local_ranks(tmp_path, topology, 3000, dtype)
    addresses = await ranks.call("sync_listen", PATIENCE, timeout=PATIENCE)
    assert [address is not None for address in addresses] == [r in plan.senders for r in range(topology.world)]
    receivers = []
    for rank in (1, 2):
        groups = [[group_name("t", s), *addresses[sender], rank, 3] for s, sender in enumerate(plan.senders)]
        buckets = [
            [
                group_name("t", b.stage),
                [e.name for e in b.tensors],
                [dtype] * len(b.tensors),
                [e.shape for e in b.tensors],
            ]
            for b in plan.buckets
        ]
        command = [sys.executable, "-c", RECEIVER, json.dumps(groups), json.dumps(buckets)]
        receivers.append(await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE))
    await ranks.call("sync_join", "t", addresses, 2, PATIENCE, timeout=PATIENCE)
    seconds = await ranks.call("sync_send", 1, PATIENCE, timeout=PATIENCE)
    assert seconds[0]["wire"] > 0
    saved = load_file(tmp_path / "model.safetensors")
    expected = {name: digest(tensor.to(getattr(torch, dtype))) for name, tensor in saved.items()}
    for receiver in receivers:
        answer, _ = await receiver.communicate()
        assert json.loads(answer.partition(b"RESULT")[2]) == expected


async def test_nobody_waits_longer_than_the_deadline_and_the_next_attempt_starts_clean(
    make_model, save_model, local_ranks, tmp_path
):
    topology = Topology(tensor=2)
    save_model(make_model(), tmp_path)
    ranks = await local_ranks(tmp_path, topology, 3000)
    for attempt in ("a", "b"):
        addresses = await ranks.call("sync_listen", PATIENCE, timeout=PATIENCE)
        with pytest.raises(SyncError, match=rf"rank 0 could not join {attempt} of stage 0"):
            # No server comes.
            await ranks.call("sync_join", attempt, addresses, 1, 2, timeout=PATIENCE)
        await ranks.call("sync_leave", timeout=PATIENCE)


async def test_sending_without_a_group_and_foreign_parameters_are_refused(
    make_model, save_model, local_ranks, tmp_path
):
    save_model(make_model(), tmp_path)
    ranks = await local_ranks(tmp_path, Topology(), 3000)
    with pytest.raises(SyncError, match="failed to send version 3.*not joined"):
        await ranks.call("sync_send", 3, 5, timeout=PATIENCE)


def test_a_model_that_is_not_the_layouts_is_refused_by_name(make_model, save_model, tmp_path):
    from megasync.device import Device
    from megasync.layout.shards import load_shards
    from megasync.sync.broadcast.sender import BroadcastSender
    from megasync.sync.stream import Shards

    layout = Layout(save_model(make_model(), tmp_path), Topology())
    params = load_shards(tmp_path, layout, 0)
    del params["decoder.final_layernorm.weight"]
    with pytest.raises(SyncError, match=r"decoder\.final_layernorm\.weight, layout \(16,\), model None"):
        BroadcastSender(plan_broadcast(layout, 1000, "float32"), Shards(layout, "float32", 0, params), Device("cpu"))
