"""Models by name reach every node of a run: two Ray nodes on this machine, and a hub on loopback."""

import pytest
import ray
from local_hub import LocalHub, environment, model_files
from ray.cluster_utils import Cluster

from megasync.base.files import ray_environment
from megasync.cluster.pools import Pools
from megasync.config.pools import PoolSpec
from megasync.models.hub import missing_here

FILES = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"weights" * 1000}


@pytest.mark.matrix
@pytest.mark.processes
async def test_nodes_of_a_run_make_one_download_and_say_what_they_lack(monkeypatch, tmp_path):
    hub = LocalHub()
    commit = hub.push("tiny/model", FILES)
    for name, value in (environment(hub, tmp_path) | ray_environment({})).items():
        monkeypatch.setenv(name, value)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address, log_to_driver=False)
        pools = Pools({"trainer": PoolSpec("trainer", slots=2, devices=1, slots_per_node=1)}, "cpu")
        await pools.create(timeout=300)
        folder = tmp_path / "hub" / "models--tiny--model" / "snapshots" / commit
        answers = await pools.ask_nodes(missing_here, {f"tiny/model@{commit}": str(folder)})
        assert [answer for _, answer in answers] == ["", ""]
        refused = await pools.ask_nodes(missing_here, {"tiny/none": ""})
        assert len(refused) == 2 and all("no repository tiny/none" in answer for _, answer in refused)
        pools.remove()
    finally:
        ray.shutdown()
        cluster.shutdown()
        hub.close()
    assert model_files(folder) == FILES
    assert len(hub.downloads()) == 1
