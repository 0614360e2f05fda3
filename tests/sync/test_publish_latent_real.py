"""Models of special families reach a real bfloat16 server by each transport with the bits that a load gives.

DeepSeek has projections that the engine fuses only when it gets them together, weights that it derives from others
after loading, and a router's bias that stays float32. GLM-4.5's router, bfloat16 in training, is float32 in the engine.
Gemma 3 has a vision tower, which the server loaded and no sync touches. That of Llama 4 it does not even build.
"""

import pytest
from engine_models import make_model
from safetensors.torch import load_file, save_file

from megasync.config.schema import RolloutConfig, SyncConfig, TimeoutConfig
from megasync.device import Device
from megasync.layout.layout import Layout
from megasync.layout.model_files import read_hf_config
from megasync.layout.topology import Topology
from megasync.serving.control import ServerControl
from megasync.serving.server import ServerSpec, SGLangServer
from megasync.sync.broadcast.plan import plan_broadcast
from megasync.sync.broadcast.sync import BroadcastSync
from megasync.sync.disk.sync import DiskSync
from megasync.sync.disk.version_folders import VersionFolders
from megasync.sync.shard.sync import ShardSync

pytestmark = pytest.mark.real

EXPERTS = Topology(tensor=2, expert=2, expert_tensor=1)
# Family -> trainer ranks, and the dtypes of what they send.
CASES = {
    "deepseek_v3": (EXPERTS, {"bfloat16", "float32"}),
    "glm4_moe": (EXPERTS, {"bfloat16", "float32"}),
    "gemma3": (Topology(tensor=2), {"bfloat16"}),
    "llama4": (EXPERTS, {"bfloat16"}),
}
FULL_TIER = ("glm4_moe", "llama4")
# Less than both down projections of a layer together.
BUCKET_BYTES = 2048
PROMPT = [3, 90, 17, 44, 5, 5, 61]


@pytest.fixture(
    scope="module",
    params=[pytest.param(family, marks=pytest.mark.matrix if family in FULL_TIER else ()) for family in CASES],
)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def folders(family, tmp_path_factory):
    """Three models of one shape, with the same vision tower if they have one."""
    found = [tmp_path_factory.mktemp(f"model{seed}") for seed in range(3)]
    tower = {}
    for seed, path in enumerate(found):
        make_model(path, family, seed)
        weights = load_file(path / "model.safetensors")
        # What a trainer in bfloat16 holds, also where the engine keeps float32.
        rounded = {name: weight if name.endswith("_bias") else weight.bfloat16() for name, weight in weights.items()}
        frozen = Layout(read_hf_config(path), Topology()).frozen_tensors
        tower = tower or {name: rounded[name] for name in frozen}
        save_file(rounded | tower, path / "model.safetensors", metadata={"format": "pt"})
    return found


async def held_and_scored(server):
    found = await server.post("/weights_checker", {"action": "checksum"}, timeout=60)
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": 1},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    answer = (await server.post("/generate", body, timeout=60))["meta_info"]
    logprobs = [entry[0] for entry in answer["input_token_logprobs"][1:]]
    return [rank["checksums"] for rank in found["ranks"]], logprobs


async def test_each_transport_leaves_what_a_load_leaves(family, folders, local_ranks, tmp_path):
    topology, dtypes = CASES[family]
    layout = Layout(read_hf_config(folders[0]), topology)
    plan = plan_broadcast(layout, BUCKET_BYTES, "bfloat16")
    assert {bucket.dtype for bucket in plan.buckets} == dtypes
    rollout = RolloutConfig(
        context_length=1024, max_total_tokens=4096, mem_fraction=0.5, server_args={"--skip-tokenizer-init": True}
    )
    engine = SGLangServer(ServerSpec(folders[0], rollout, "bfloat16", "cpu"), "127.0.0.1", 0, tmp_path / "server.log")
    server = ServerControl(await engine.start(180))
    timeouts = TimeoutConfig(weight_sync=60.0)
    syncs = []
    try:
        expected = []
        for folder in folders[1:]:
            await server.post("/update_weights_from_disk", {"model_path": str(folder)}, timeout=60)
            expected.append(await held_and_scored(server))
        assert expected[0] != expected[1]
        ranks = await local_ranks(folders[0], topology, BUCKET_BYTES, "bfloat16")
        syncs.append(BroadcastSync([server], ranks, plan, 1, SyncConfig(), timeouts, Device("cpu")))
        syncs.append(ShardSync([server], ranks, layout, "bfloat16", "gloo", SyncConfig(bucket_mb=1), timeouts))
        # As the ranks have it; smaller than the configuration allows.
        syncs[1]._bucket_bytes = BUCKET_BYTES
        versions = VersionFolders(tmp_path / "sync", folders[0], plan, keep=2)
        syncs.append(DiskSync([server], ranks, plan, versions, SyncConfig(), timeouts))
        for version, sync in enumerate(syncs, 1):
            await ranks.call("load", str(folders[1 + version % 2]), timeout=20)
            await sync.publish(version)
            assert await server.weight_version() == version
            assert await held_and_scored(server) == expected[version % 2], type(sync).__name__
    finally:
        for sync in syncs:
            await sync.close()
        await server.close()
        await engine.stop()
