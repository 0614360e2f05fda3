"""Models of special families reach a real bfloat16 server by each transport with the bits that a load gives.

DeepSeek has projections that the engine fuses only when it gets them together, weights that it derives from others
after loading, and a router's bias that stays float32. GLM-4.5's router, bfloat16 in training, is float32 in the engine.
Gemma 3 has a vision tower, which the server loaded and no sync touches. That of Llama 4 it does not even build.
"""

from dataclasses import replace

import pytest
from engine_models import make_model
from real_servers import checksums, make_server, score
from safetensors.torch import load_file, save_file

from megasync.layout.layout import Layout
from megasync.layout.model_files import read_hf_config
from megasync.layout.topology import Topology
from megasync.sync.broadcast.plan import plan_broadcast

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
    paths = [tmp_path_factory.mktemp(f"model{seed}") for seed in range(3)]
    tower = {}
    for seed, path in enumerate(paths):
        make_model(path, family, seed)
        weights = load_file(path / "model.safetensors")
        # What a trainer in bfloat16 holds, also where the engine keeps float32.
        rounded = {name: weight if name.endswith("_bias") else weight.bfloat16() for name, weight in weights.items()}
        frozen = Layout(read_hf_config(path), Topology()).frozen_tensors
        tower = tower or {name: rounded[name] for name in frozen}
        save_file(rounded | tower, path / "model.safetensors", metadata={"format": "pt"})
    return paths


async def test_each_transport_leaves_what_a_load_leaves(family, folders, publishing, control, tmp_path):
    topology, dtypes = CASES[family]
    plan = plan_broadcast(Layout(read_hf_config(folders[0]), topology), BUCKET_BYTES, "bfloat16")
    assert {bucket.dtype for bucket in plan.buckets} == dtypes
    process = make_server(folders[0], tmp_path / "server.log", 1)
    process.spec = replace(process.spec, dtype="bfloat16")
    server = control(await process.start(180))

    async def held_and_scored():
        return await checksums(server), await score(server, PROMPT)

    try:
        expected = []
        for folder in folders[1:]:
            await server.post("/update_weights_from_disk", {"model_path": str(folder)}, timeout=300)
            expected.append(await held_and_scored())
        assert expected[0] != expected[1]
        ranks = None
        for version, kind in enumerate(("broadcast", "p2p", "disk"), 1):
            sync, ranks = await publishing(kind, folders[0], [server], topology, BUCKET_BYTES, "bfloat16", ranks)
            await ranks.call("load", str(folders[1 + version % 2]), timeout=300)
            await sync.publish(version)
            assert await server.weight_version() == version
            assert await held_and_scored() == expected[version % 2], kind
            await sync.close()
    finally:
        await process.stop()
