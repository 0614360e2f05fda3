"""Transformer Engine's real Python imports over the stand-in extension, and layers build on the meta device."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megasync.errors import ConfigError
from megasync.lab.rehearsal import packages
from megasync.lab.rehearsal import te_extension as tex
from megasync.lab.rehearsal.device import RehearsalDevice
from megasync.lab.rehearsal.transformer_engine import VERSION

SECOND_MEGATRON = "0.19.2"
# Builds one tensor-parallel rank of 1,024 on the meta device and prints what the model consists of.
BUILD = """
import json, sys
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from megasync.lab.rehearsal.device import RehearsalDevice
from megasync.lab.rehearsal.packages import add_to_path
if sys.argv[1]:
    add_to_path("megatron-core", sys.argv[1])
device = RehearsalDevice(meta=True)
device.prepare_process(0)
import megatron.core
import transformer_engine
from megatron.core.extensions.transformer_engine import HAVE_TE
from megasync.config.schema import TrainerConfig
from megasync.layout.layout import Layout
from megasync.layout.topology import Topology
from megasync.trainer.learner import open_process_groups
from megasync.trainer.model import build_chunks
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
trainer = TrainerConfig(tensor_parallel=2, sequence_parallel=True, data_parallel=512, expert_parallel=4)
dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=1024)
topology = Topology.from_config(trainer)
open_process_groups(topology)
model_parallel_cuda_manual_seed(0)
layout = Layout(json.loads(sys.argv[2]), topology, "te", False)
(chunk,) = build_chunks(layout, trainer, device, torch.bfloat16)
modules = {type(module).__module__.split(".")[0] for module in chunk.modules()}
print(json.dumps({
    "have_te": HAVE_TE,
    "versions": [megatron.core.__version__.split("+")[0], transformer_engine.__version__],
    "devices": sorted({str(parameter.device) for parameter in chunk.parameters()}),
    "packages": sorted(modules),
}))
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("family", "megatron"),
    [
        ("qwen3_moe", ""),
        ("deepseek_v3", SECOND_MEGATRON),
        pytest.param("qwen3_moe", SECOND_MEGATRON, marks=pytest.mark.matrix),
        pytest.param("deepseek_v3", "", marks=pytest.mark.matrix),
    ],
)
def test_layers_of_transformer_engine_build_on_the_meta_device(model_configs, megatron, family):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BUILD, megatron, json.dumps(model_configs[family])],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    built = json.loads(done.stdout.splitlines()[-1])
    assert built["have_te"]
    assert built["versions"] == [megatron or "0.16.1", VERSION]
    assert built["devices"] == ["meta"]
    assert "transformer_engine" in built["packages"]


def test_a_missing_package_is_an_error_with_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(packages, "FOLDER", tmp_path)
    with pytest.raises(ConfigError, match=r"transformer-engine 9\.9 is not in .*megasync install rehearsal"):
        packages.add_to_path("transformer-engine", "9.9")


def test_a_package_chosen_after_its_import_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(packages, "FOLDER", tmp_path)
    (tmp_path / "pytest-9.9" / "pytest").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"pytest was imported before pytest 9\.9 was chosen"):
        packages.add_to_path("pytest", "9.9")
    assert not any("pytest-9.9" in folder for folder in sys.path)


def test_a_rehearsal_has_the_options_of_a_gpu_rank_on_the_cpu():
    device = RehearsalDevice()
    assert (device.spec, device.expert_dispatcher, device.backend) == ("te", "alltoall", "gloo")
    assert [str(RehearsalDevice(meta=meta).torch_device) for meta in (False, True)] == ["cpu", "meta"]


def test_the_lock_pins_the_versions_that_the_stand_ins_are_written_for():
    lock = Path(__file__).parents[3] / "launch/rehearsal.lock"
    pins = dict(line.split("==") for line in lock.read_text().splitlines() if "==" in line)
    assert pins == {"transformer-engine": VERSION, "megatron-core": SECOND_MEGATRON}
    gpu = lock.with_name("gpu.lock").read_text()
    assert all(f"\n{name}=={version} " in gpu for name, version in pins.items())
    for library, reported in (("cublas", tex.get_cublasLt_version()), ("cudnn-cu13", tex.get_cudnn_version())):
        match = re.search(rf"^nvidia-{library}==(\d+)\.(\d+)\.(\d+)", gpu, re.MULTILINE)
        assert reported == sum(int(part) * 100**place for place, part in zip((2, 1, 0), match.groups(), strict=True))
