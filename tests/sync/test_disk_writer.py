"""Files that ranks write are what safetensors reads back, and a disk that is full says so by path."""

import hashlib

import pytest
import torch
from safetensors import safe_open
from waits import PATIENCE

from megasync.device import Device
from megasync.errors import SyncError
from megasync.layout.layout import Layout
from megasync.layout.shards import load_shards, part_name
from megasync.layout.topology import Topology
from megasync.sync.broadcast.plan import plan_broadcast
from megasync.sync.disk.writer import DiskWriter
from megasync.sync.messages import WrittenFile
from megasync.sync.stream import Shards


@pytest.fixture
def source(make_model, save_model, tmp_path):
    model = make_model()
    return model, tmp_path, save_model(model, tmp_path)


def test_the_files_of_one_rank_hold_the_model_in_the_served_dtype(source, tmp_path):
    model, folder, config = source
    layout = Layout(config, Topology())
    plan = plan_broadcast(layout, 3000, "bfloat16")
    writer = DiskWriter(plan, Shards(layout, "bfloat16", 0, load_shards(folder, layout, 0)), Device("cpu"))
    out = tmp_path / "out"
    out.mkdir()
    assert writer.listen(5) is not None
    writer.join("t", [None], 5)
    report = writer.write(str(out), 1, 10)
    assert report.seconds.keys() == {"pack", "wire", "disk", "total"}
    assert sorted(path.name for path in out.iterdir()) == sorted(report.files)
    assert len(report.files) == len(plan.buckets) > 3
    found = {}
    for name, written in report.files.items():
        data = (out / name).read_bytes()
        assert written == WrittenFile(len(data), hashlib.sha256(data).hexdigest())
        with safe_open(out / name, framework="pt") as file:
            found |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    expected = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.processes
async def test_a_full_disk_is_named_by_path_and_the_next_attempt_works(source, local_ranks, tmp_path):
    _, folder, config = source
    topology = Topology(tensor=2, pipeline=2)
    count = len(plan_broadcast(Layout(config, topology), 3000, "float32").buckets)
    ranks = await local_ranks(folder, topology, 3000)
    out = tmp_path / "out"
    out.mkdir()
    full = out / part_name(2, count)
    full.symlink_to("/dev/full")
    for attempt in ("a", "b"):
        addresses = await ranks.call("disk_listen", PATIENCE, timeout=PATIENCE)
        await ranks.call("disk_join", attempt, addresses, PATIENCE, timeout=PATIENCE)
        if attempt == "b":
            full.unlink()
            break
        with pytest.raises(SyncError, match=rf"rank 0 failed to write version 4: {full} .*No space left on device"):
            await ranks.call("disk_write", str(out), 4, PATIENCE, timeout=PATIENCE)
        await ranks.call("disk_leave", timeout=PATIENCE)
    reports = await ranks.call("disk_write", str(out), 5, PATIENCE, timeout=PATIENCE)
    assert sorted(name for report in reports for name in report.files) == [part_name(i, count) for i in range(count)]
    assert [bool(report.files) for report in reports] == [True, False, True, False]
