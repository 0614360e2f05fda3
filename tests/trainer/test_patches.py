"""Patches: refused on other versions, applied once, and each still needed by upstream."""

import subprocess
import sys

import megasync_patches
import pytest
from megasync_patches import Patch, PatchError

# Takes a training step with all patches but one, in a process forked after the slow imports and before any patch.
WITHOUT_ONE = """
import os, sys, traceback
import megatron.core.models.gpt.gpt_model, megatron.core.optimizer, megatron.core.distributed
import torch, megasync_patches

def attempt(left_out, model):
    torch.set_num_threads(1)
    for patch in megasync_patches.registered():
        if patch.needed() and patch.name != left_out:
            patch.apply()
    import torch.distributed as dist
    from megasync.config.schema import ModelConfig, TrainerConfig
    from megasync.device import Device
    from megasync.trainer.learner import MegatronLearner
    from megasync.trainer.batch import Sample
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = ModelConfig(path=model, dtype="bfloat16")
    engine = MegatronLearner(config, TrainerConfig(recompute="full"), Device("cpu"), 0)
    engine.initialize()
    share = engine.local_batch([Sample.of([1, 2], [3, 4])])
    engine.forward_backward(share, lambda batch, logprobs, entropy: (-logprobs.sum(), {}))
    assert engine.update(1, True).applied

for name in [*(patch.name for patch in megasync_patches.registered() if patch.needed()), "none"]:
    child = os.fork()
    if child == 0:
        try:
            attempt(name, sys.argv[1])
        except BaseException as error:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    print("without", name, "works" if os.waitpid(child, 0)[1] == 0 else "fails", flush=True)
"""


@pytest.mark.matrix
@pytest.mark.processes
def test_every_patch_is_still_needed(models):
    """A line "without X works" means that upstream does without patch X: delete it."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WITHOUT_ONE, models["deepseek_v3"]],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    expected = [f"without {patch.name} fails" for patch in megasync_patches.registered() if patch.needed()]
    assert done.stdout.splitlines() == [*expected, "without none works"], done.stderr[-3000:]


def test_versions_that_a_patch_was_not_written_for_are_refused():
    patch = Patch("sample", "torch", ("1.2.3",), "none", lambda: None)
    with pytest.raises(PatchError, match=r"'sample' was written for torch 1\.2\.3, but \d"):
        patch.needed()
    with pytest.raises(PatchError, match="no-such-package, which is not installed"):
        Patch("sample", "no-such-package", ("1",), "none", lambda: None).needed()


def test_nothing_is_applied_when_one_version_is_wrong(monkeypatch):
    applied = []
    patches = (
        Patch("right", "torch", ("2.13.0",), "none", lambda: applied.append("right")),
        Patch("wrong", "torch", ("0.0",), "none", lambda: applied.append("wrong")),
    )
    monkeypatch.setattr(megasync_patches, "registered", lambda: patches)
    with pytest.raises(PatchError):
        megasync_patches.apply_all("cpu")
    assert applied == []


def test_patches_are_applied_once_and_only_on_their_device(monkeypatch):
    applied = []
    patch = Patch("sample", "torch", ("2.13.0",), "none", lambda: applied.append(1))
    monkeypatch.setattr(megasync_patches, "registered", lambda: (patch,))
    monkeypatch.setattr(megasync_patches, "_active", [])
    megasync_patches.apply_all("cuda")
    assert megasync_patches.active() == ()
    megasync_patches.apply_all("cpu")
    megasync_patches.apply_all("cpu")
    assert megasync_patches.active() == ("sample",)
    assert applied == [1]


@pytest.mark.processes
def test_a_cpu_rank_imports_no_compiler():
    code = (
        "import sys; from megasync.device import resolve_device; resolve_device('cpu').prepare_process(0);"
        "import torch, megasync.trainer.learner;"
        "print([m for m in ('torch._dynamo', 'torch._inductor.compile_fx') if m in sys.modules],"
        "torch.compile.__module__)"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[] torch"


@pytest.mark.processes
def test_reading_the_registry_imports_no_upstream_package():
    code = (
        "import sys, megasync_patches; megasync_patches.registered(); import megasync.device;"
        "print([m for m in ('torch', 'megatron', 'ray', 'sglang') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
