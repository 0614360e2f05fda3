"""The check of a GPU environment finds planted faults, also here, where there is neither a GPU nor such packages."""

import ast
import inspect
import os
import subprocess
from pathlib import Path

import pytest
from launch_scripts import program

from megasync import device
from megasync.serving import server
from megasync.serving.server import stand_ins_path

check = program("check_gpu_environment")
ROOT = Path(__file__).parents[2]
# What SGLang 0.5.23 reads without the variables; a variable that is not here is unknown to it.
SGLANG_READS = {
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": ("true", True),
    "SGLANG_RETURN_ORIGINAL_LOGPROB": ("true", True),
    "SGLANG_FORWARD_UNKNOWN_TOOLS": ("false", False),
    "SGLANG_REQUEST_STATE_WAIT_TIMEOUT": ("4", 4),
    "SGLANG_EXTERNAL_MODEL_PACKAGE": ("", ""),
}


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)
    # The check reads what the ranks would be given.
    for name in check.RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def answer(program, environment, *names, unknown=()):
    """Stands for the process that imports SGLang: reads variables as it would."""
    values = {}
    for name in names:
        given = environment.get(name)
        _, default = SGLANG_READS[name]
        if given is None:
            values[name] = default
        elif isinstance(default, bool):
            values[name] = given == "1"
        else:
            values[name] = type(default)(given)
    return {"values": values, "unknown": list(unknown), "servers": {"NCCL_CUMEM_ENABLE": "0"}}


def problems(monkeypatch, reader=answer):
    monkeypatch.setattr(check, "run_python", reader)
    monkeypatch.setattr(check, "grep", lambda word: True)
    return {item.name: item for item in check.check_environment() if item.problem}


def test_servers_and_ranks_have_every_variable(monkeypatch):
    assert problems(monkeypatch) == {}


def test_a_forgotten_variable_is_found(monkeypatch):
    monkeypatch.delitem(server._ENVIRONMENT, "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION")
    monkeypatch.delitem(device._CUDA_ENVIRONMENT, "NCCL_CUMEM_ENABLE")
    found = problems(monkeypatch)
    assert set(found) == {"server: SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "rank: NCCL_CUMEM_ENABLE"}
    assert "megasync/serving/server.py" in found["server: SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"].fix
    assert "set NCCL_CUMEM_ENABLE=0 in megasync/device.py" in found["rank: NCCL_CUMEM_ENABLE"].fix


def test_a_variable_that_upstream_has_renamed_is_found(monkeypatch):
    name = "SGLANG_FORWARD_UNKNOWN_TOOLS"
    found = problems(monkeypatch, lambda *words: answer(*words, unknown=[name]))
    assert "does not know" in found[f"server: {name}"].problem


def test_signatures_that_no_longer_fit_are_found():
    def stock(self, names, load_format=None):
        pass

    def fits(self, names, load_format=None):
        pass

    def open_ended(self, names, **rest):
        pass

    def old(self, names, shapes):
        pass

    signature = inspect.signature
    assert check.compare("x", signature(fits), signature(stock)).problem == ""
    assert check.compare("x", signature(open_ended), signature(stock)).problem == ""
    item = check.compare("x", signature(old), signature(stock))
    assert "also passes load_format" in item.problem and "no longer has shapes" in item.problem and item.fix


def test_a_name_that_upstream_no_longer_has_is_found():
    tree = ast.parse("def f():\n    from torch.nn import Linear, Gone\n    import json\n    from .near import x\n")
    names = list(check.imported_names(tree))
    assert names == [("torch.nn", "Linear"), ("torch.nn", "Gone")]
    items = [check.attempt(name, lambda m=module, n=name: check.find(m, n), "fix") for module, name in names]
    assert not items[0].problem and "Gone" in items[1].problem


@pytest.mark.matrix
@pytest.mark.processes
def test_the_hooks_fit_the_installed_sglang():
    """With the CPU's stand-ins for compiled packages; the plugin's targets and SGLang's calls of them are real."""
    env = {**os.environ, "PYTHONPATH": stand_ins_path(), "SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}
    words = [check.sys.executable, "launch/check_gpu_environment.py", "--run", "hooks"]
    done = subprocess.run(words, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("ITEMS"))
    items = [check.Item(*item) for item in check.json.loads(line.removeprefix("ITEMS"))]
    assert len(items) > 15 and [item for item in items if item.problem] == []


def test_servers_on_gpus_find_the_compilers_of_their_environment(monkeypatch, tmp_path):
    (tmp_path / "cu13" / "lib64").mkdir(parents=True)

    class Package:
        submodule_search_locations = (str(tmp_path),)

    monkeypatch.setattr(device, "find_spec", lambda name: Package)
    found = device.compiler_environment({"PATH": "/usr/bin"})
    assert found["CUDA_HOME"] == str(tmp_path / "cu13")
    assert found["PATH"].split(os.pathsep) == [str(Path(check.sys.executable).parent), "/usr/bin"]
    assert "CUDA_HOME" not in device.compiler_environment({"CUDA_HOME": "/opt/cuda"})
    assert "CUDNN_HOME" not in found
    # Transformer Engine would take the system's cuDNN before the one that torch has loaded.
    (tmp_path / "cudnn" / "lib").mkdir(parents=True)
    (tmp_path / "cudnn" / "lib" / "libcudnn.so.9").touch()
    assert device.compiler_environment({})["CUDNN_HOME"] == str(tmp_path / "cudnn")
    for name in ("CUDNN_HOME", "CUDNN_PATH"):
        assert "CUDNN_HOME" not in device.compiler_environment({name: "/opt/cudnn"})
    monkeypatch.setattr(device, "find_spec", lambda name: None)
    assert not {"CUDA_HOME", "CUDNN_HOME"} & device.compiler_environment({}).keys()


@pytest.mark.matrix
@pytest.mark.processes
def test_a_library_that_needs_a_part_of_cudnn_finds_it(tmp_path):
    """As Transformer Engine's library does, which is linked to libcudnn_graph and loaded after libcudnn alone."""
    folder = tmp_path / "cudnn" / "lib"
    folder.mkdir(parents=True)
    for name in ("libcudnn.so.9", "libcudnn_graph.so.9"):
        built = ["gcc", "-shared", "-xc", os.devnull, f"-Wl,-soname,{name}", "-o", folder / name]
        subprocess.run(built, check=True)
    user = tmp_path / "libuser.so"
    linked = [folder / "libcudnn_graph.so.9", "-Wl,--no-as-needed"]
    subprocess.run(["gcc", "-shared", "-xc", os.devnull, "-xnone", *reversed(linked), "-o", user], check=True)
    load = f"import ctypes; ctypes.CDLL({str(user)!r})"
    prepare = "from megasync.device import set_cuda_environment; set_cuda_environment(); "

    def succeeds(code):
        env = {**os.environ, "CUDNN_HOME": str(folder.parent)}
        return (
            subprocess.run([check.sys.executable, "-c", code], env=env, capture_output=True, check=False).returncode
            == 0
        )

    assert not succeeds(load) and succeeds(prepare + load)


def test_imports_that_need_an_extra_are_no_faults(monkeypatch):
    monkeypatch.setattr(check, "requires", lambda name: ["torch==2", "mcp==2.3 ; extra == 'mcp'"])
    assert check.of_an_extra("ModuleNotFoundError: No module named 'mcp'")
    assert check.of_an_extra("ConfigError: tools need the package mcp, which is not installed")
    for fault in ("", "ModuleNotFoundError: No module named 'torch'", "OSError: libcudnn_graph.so.9: no such file"):
        assert not check.of_an_extra(fault)
