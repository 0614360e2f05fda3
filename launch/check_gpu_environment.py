"""Checks an environment for GPU nodes on a machine that need not have one: `.venv-gpu/bin/python` runs this file.

    python launch/check_gpu_environment.py [--only NAME ...] [--json FILE]

Every check runs in a process of its own, prints what it found, and never stops the others. The exit status is 1 if any
item fails; each such item says what is wrong and what to do about it. Nothing is downloaded or changed.

Without a GPU two stand-ins are used, and the table says so. `libcuda.so.1` is a library whose functions all answer "no
device", so that the compiled parts of torch, SGLang and Transformer Engine can be loaded. In the check `arguments`,
`torch.cuda` describes a GPU that is not there, so that SGLang resolves its options and builds its models on the meta
device as on that GPU. No kernel runs.
"""

from __future__ import annotations

import argparse
import ast
import ctypes
import importlib.util
import inspect
import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from importlib.metadata import requires, version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 900
PACKAGES = ("megatron", "sglang", "sglang_router", "ray", "transformer_engine", "torch", "transformers")
REINSTALL = "install the versions of launch/gpu.lock: megasync install gpu"
ADAPT = "adapt megasync to this version, or install the one of launch/gpu.lock"
OWN_CUDNN = "unset CUDNN_HOME, CUDNN_PATH and LD_LIBRARY_PATH: they must name no cuDNN but the one that torch loads"
# SGLang's attributes that the plugin's hooks use on the objects that they are called with.
USED_INSIDE = {
    "sglang.srt.utils.weight_checker.WeightChecker": ("_placement", "_get_model", "_parallelism_info"),
    "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater": (
        "get_model",
        "_assert_weight_cache_inactive",
    ),
}
# What SGLang must read in the environment that megasync gives to a server, and why another value would be wrong.
SERVER_VARIABLES: dict[str, tuple[object, str]] = {
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": (False, "a health probe hangs while a server is paused"),
    "SGLANG_RETURN_ORIGINAL_LOGPROB": (False, "log-probs ignore the temperature, so importance ratios are wrong"),
    "SGLANG_FORWARD_UNKNOWN_TOOLS": (True, "calls of unknown tools are dropped"),
    "SGLANG_REQUEST_STATE_WAIT_TIMEOUT": (1, "requests of lost clients keep running"),
    "SGLANG_EXTERNAL_MODEL_PACKAGE": ("megasync.sglang.models", "some model families are unknown to SGLang"),
}
# What trainer ranks must have, and why. None: what SGLang sets for its servers.
RANK_VARIABLES: dict[str, tuple[str | None, str]] = {
    "NCCL_CUMEM_ENABLE": (None, "NCCL cannot connect processes that allocate memory in different ways"),
    "CUDA_DEVICE_MAX_CONNECTIONS": ("1", "sequence parallelism needs kernels to start in program order"),
}


class Item(NamedTuple):
    """One checked thing. `problem` is empty if it is as it should be."""

    name: str
    problem: str = ""
    fix: str = ""
    note: str = ""


def check_driver() -> Iterator[Item]:
    """Whether this machine has a driver and a GPU; neither is required."""
    from megasync.device import why_no_gpu

    trouble = why_no_gpu()
    note = "a stand-in: every call answers that there is no device" if os.environ.get(STAND_IN) else ""
    yield Item("libcuda.so.1", note=note or "the machine's")
    yield Item("GPU", note="present" if trouble is None else f"no GPU: {trouble}")


def check_imports() -> Iterator[Item]:
    """Every module of megasync can be imported, but for what needs verl or an extra that is not installed."""
    import megasync

    for name in modules_of(megasync):
        if (".integrations.verl" in name and not name.endswith("verl_versions")) or ".starters.parts." in name:
            continue  # parts of starters are copied into a user's folder, and imported there
        item = attempt(name, lambda name=name: importlib.import_module(name), REINSTALL)
        yield Item(name, note=item.problem) if of_an_extra(item.problem) else item


def of_an_extra(problem: str) -> bool:
    """Whether an import failed for a package that only an extra of megasync brings."""
    missing = re.search(r"No module named '([\w-]+)|needs? the package ([\w-]+)", problem)
    package = (missing[1] or missing[2]).replace("_", "-") if missing else ""
    return any(
        re.split(r"[^\w.-]", requirement)[0] == package and "extra ==" in requirement
        for requirement in requires("megasync") or ()
    )


def check_names() -> Iterator[Item]:
    """Every name that megasync and its patches import from an upstream package exists, also inside functions."""
    for package in ("megasync", "megasync_patches"):
        (folder,) = importlib.import_module(package).__path__
        for path in sorted(Path(folder).rglob("*.py")):
            place = f"{package}/{path.relative_to(folder)}"
            if "verl" in place or "standins" in place or "/shipped/" in place:
                continue
            for module, name in imported_names(ast.parse(path.read_text(encoding="utf-8"))):
                label = f"{module}.{name}" if name else module
                yield attempt(f"{place}: {label}", lambda m=module, n=name: find(m, n), ADAPT)


def check_transformer_engine() -> Iterator[Item]:
    """Transformer Engine's extension for torch is built and can be loaded; on a GPU, its attention is fused."""
    from megasync.device import set_cuda_environment

    set_cuda_environment()

    def load() -> str:
        importlib.import_module(
            "torch"
        )  # it finds NCCL, which Transformer Engine's library needs and does not look for
        te = importlib.import_module("transformer_engine.pytorch")
        tex = importlib.import_module("transformer_engine_torch")
        for name in ("Linear", "LayerNormLinear", "GroupedLinear", "DotProductAttention", "RMSNorm"):
            getattr(te, name)
        return f"{version('transformer-engine')}, {len([n for n in dir(tex) if n[0] != '_'])} names"

    yield attempt("transformer_engine_torch", load, REINSTALL)
    yield attempt("Megatron sees Transformer Engine", megatron_has_te, REINSTALL)
    if has_gpu():
        yield attempt("attention of packed sequences is fused", fused_attention, OWN_CUDNN)


def check_overrides() -> Iterator[Item]:
    """Every method of the trainer that overrides one of Megatron's takes what that one takes."""
    import megasync.trainer

    for name in modules_of(megasync.trainer):
        for cls in vars(importlib.import_module(name)).values():
            if not inspect.isclass(cls) or cls.__module__ != name:
                continue
            for method, function in vars(cls).items():
                stock = next((vars(base)[method] for base in upstream_bases(cls) if method in vars(base)), None)
                if stock is not None and inspect.isfunction(function) and method != "__init__":
                    yield compare(f"{cls.__qualname__}.{method}", inspect.signature(function), inspect.signature(stock))


def check_trainer_options() -> Iterator[Item]:
    """Megatron and Transformer Engine accept the options and layer specs of every GPU configuration."""
    from megasync.device import Device

    for path, config, layout in gpu_configurations():
        yield attempt(
            f"{path.name}: {config.trainer.tensor_parallel} x {config.trainer.pipeline_parallel} x "
            f"{config.trainer.data_parallel} ranks",
            lambda c=config, la=layout: build_options(c, la, Device("cuda")),
            "change the option in megasync/trainer/model.py or layer_specs.py",
        )


def check_patches() -> Iterator[Item]:
    """Every patch fits the installed version, and replaces only what exists."""
    import megasync_patches  # pyright: ignore[reportMissingImports] - it is the folder `patches`

    os.environ["MEGASYNC_BIND"] = "127.0.0.1"  # a launcher's choice, for the patch of Ray's interface
    for info in pkgutil.iter_modules(megasync_patches.__path__):
        patch = getattr(module := importlib.import_module(f"megasync_patches.{info.name}"), "PATCH", None)
        if patch is None or patch.package == "verl":
            continue
        yield attempt(patch.name, lambda p=patch, m=module: apply_patch(p, m), ADAPT)


def check_hooks() -> Iterator[Item]:
    """Each hook of the SGLang plugin has its target, and takes every call that SGLang's source makes of it."""
    from megasync.sglang.guard import GuardedServer
    from megasync.sglang.updates import Plugin

    for target, kind, hook in hooks_of(Plugin(), GuardedServer("key", None)):
        stock = attempt(target, lambda t=target: resolve(t), ADAPT)
        yield stock
        if stock.problem:
            continue
        taken = inspect.signature(hook)
        if kind == "AROUND":
            taken = taken.replace(parameters=list(taken.parameters.values())[1:])
        yield compare(f"{target}: parameters", taken, inspect.signature(resolve(target)))
        for place, call in calls_of(target.rpartition(".")[2]):
            yield attempt(f"{target}: call at {place}", lambda c=call, t=taken, n=target: bind(t, c, n), ADAPT)
    for owner, names in USED_INSIDE.items():
        source = inspect.getsource(resolve(owner))
        for name in names:
            gone = "" if re.search(rf"\b{name}\b", source) else f"{owner} no longer has {name}"
            yield Item(f"{owner}.{name}", gone, ADAPT if gone else "")


def check_arguments() -> Iterator[Item]:
    """SGLang accepts the command line of a server of every GPU configuration, and its model class takes the weights."""
    from megasync.device import set_cuda_environment
    from megasync.serving.server import ServerSpec, SGLangServer

    set_cuda_environment()  # as servers have it: their kernels' packages look for CUDA when they are imported
    if not has_gpu():
        describe_gpu()

    for path, config, layout in gpu_configurations():
        with tempfile.TemporaryDirectory() as folder:
            values = dict(layout.hf_config)
            Path(folder, "config.json").write_text(json.dumps(values))
            spec = ServerSpec(folder, config.rollout, config.model.dtype, "cuda")
            server = SGLangServer(spec, "127.0.0.1", 30000, Path(folder, "log"))
            fix = "change megasync/serving/server.py or the configuration's server_args"
            yield from parsed_options(path.name, server, fix)
            yield attempt(f"{path.name}: resolved", lambda s=server: resolve_arguments(s), fix)
            yield attempt(
                f"{path.name}: {config.rollout.tensor_parallel} rank(s) trace the weights",
                lambda c=config, s=server, f=folder: trace_weights(c, s, f),
                ADAPT,
            )


def check_rehearsal() -> Iterator[Item]:
    """`megasync rehearse` finds no difference for any GPU configuration of a run."""
    from megasync.config.commands import is_served

    for path in (path for path, config, _ in gpu_configurations() if not is_served(config)):
        command = [sys.executable, "-m", "megasync", "rehearse", str(path)]
        yield attempt(path.name, lambda c=command: last_line(c), "see `megasync rehearse` for this configuration")


def last_line(command: list[str]) -> str:
    """The last line that a command prints. Raises RuntimeError with its last lines if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    lines = (done.stdout + done.stderr).strip().splitlines() or [f"status {done.returncode}"]
    if done.returncode:
        raise RuntimeError(" ".join(lines[-6:]))
    return lines[-1]


def check_environment() -> Iterator[Item]:
    """Servers and ranks get the environment variables that upstream needs; none is forgotten or renamed."""
    from megasync.device import set_cuda_environment
    from megasync.serving.server import ServerSpec, SGLangServer

    _, config, _ = next(gpu_configurations())
    server = SGLangServer(ServerSpec("model", config.rollout, "bfloat16", "cuda"), "127.0.0.1", 30000, "log")
    read = run_python(READ_VARIABLES, server.environment(), *SERVER_VARIABLES)
    variables = {name: value for name, value in server.environment().items() if name.startswith("SGLANG_")}
    for name, (wanted, why) in SERVER_VARIABLES.items():
        fix = f"set {name} in megasync/serving/server.py: otherwise {why}"
        if name in read["unknown"]:
            yield Item(f"server: {name}", "SGLang does not know this variable", f"{ADAPT}: otherwise {why}")
        elif read["values"][name] != wanted:
            yield Item(f"server: {name}", f"SGLang reads {read['values'][name]!r} instead of {wanted!r}", fix)
        else:
            yield Item(f"server: {name}", note=repr(wanted))
    for name in sorted(variables.keys() - SERVER_VARIABLES.keys()):
        mentions = grep(name)
        yield Item(
            f"server: {name}", "" if mentions else "SGLang does not read this variable", "" if mentions else ADAPT
        )
    for name in RANK_VARIABLES:
        os.environ.pop(name, None)
    set_cuda_environment()
    for name, (wanted, why) in RANK_VARIABLES.items():
        wanted = read["servers"].get(name) if wanted is None else wanted
        actual = os.environ.get(name)
        fix = f"set {name}={wanted} in megasync/device.py: otherwise {why}"
        problem = "" if actual == wanted else f"ranks get {actual!r}, not {wanted!r}"
        yield Item(f"rank: {name}", problem, fix if problem else "", note=str(wanted))


def check_compilers() -> Iterator[Item]:
    """In a server's environment SGLang finds ninja and a CUDA compiler, which builds a kernel for torch's CUDA."""
    from megasync.serving.server import ServerSpec, SGLangServer

    _, config, _ = next(gpu_configurations())
    server = SGLangServer(ServerSpec("model", config.rollout, "bfloat16", "cuda"), "127.0.0.1", 30000, "log")
    environment = server.environment()
    fix = f"unset CUDA_HOME and CUDA_PATH, or let them name a toolkit of torch's CUDA, with compiler; else {REINSTALL}"
    ninja = shutil.which("ninja", path=environment["PATH"])
    yield Item(
        "ninja", "" if ninja else f"not on PATH={environment['PATH']}", "" if ninja else REINSTALL, note=ninja or ""
    )
    home = run_python(FIND_CUDA, environment)
    with tempfile.TemporaryDirectory() as folder:
        yield attempt(f"{home}/bin/nvcc", lambda: build_kernel(Path(home), Path(folder), environment), fix)


def check_doctor() -> Iterator[Item]:
    """`megasync doctor` fails nothing, and warns of nothing but a missing GPU."""
    from megasync.planning.doctor import examine
    from megasync.planning.finding import OK

    findings = [finding for finding in examine() if finding.status != OK]
    wanted = [] if has_gpu() else ["gpu"]
    for finding in findings:
        told = finding.subject in wanted and finding.detail.startswith("no GPU")
        # The machine's own trouble, such as little memory, is no fault of the environment.
        of_machine = finding.subject in ("memory", "disk", "shared memory", "cpu", "open files", "ray's interface")
        problem = "" if told or of_machine else f"{finding.status}: {finding.detail}"
        yield Item(f"doctor: {finding.subject}", problem, finding.fix if problem else "", note=finding.detail)
    for subject in wanted:
        missing = (
            "" if subject in [finding.subject for finding in findings] else "doctor does not say that there is no GPU"
        )
        yield Item("doctor says that there is no GPU", missing, "repair megasync/planning/doctor.py" if missing else "")


CHECKS: dict[str, Callable[[], Iterator[Item]]] = {
    "driver": check_driver,
    "transformer engine": check_transformer_engine,
    "imports": check_imports,
    "names": check_names,
    "patches": check_patches,
    "overrides": check_overrides,
    "trainer options": check_trainer_options,
    "hooks": check_hooks,
    "arguments": check_arguments,
    "rehearsal": check_rehearsal,
    "environment": check_environment,
    "compilers": check_compilers,
    "doctor": check_doctor,
}

# What the checks are made of


def attempt(name: str, action: Callable[[], object], fix: str) -> Item:
    """An item that passes if `action` does not raise; text that it returns becomes the note."""
    try:
        done = action()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return Item(name, text[:600], fix)
    return Item(name, note=done if isinstance(done, str) else "")


def modules_of(package: ModuleType) -> list[str]:
    """Dotted names of a package's modules, without importing any."""
    root = Path(package.__path__[0])
    modules = []
    for path in sorted(root.rglob("*.py")):
        parts = [package.__name__, *path.relative_to(root).with_suffix("").parts]
        if parts[-1] != "__main__":
            modules.append(".".join(part for part in parts if part != "__init__"))
    return modules


def imported_names(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(module, name) of every import of an upstream package; the name is empty for plain imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.split(".")[0] in PACKAGES)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            module = node.module or ""
            yield from ((module, alias.name) for alias in node.names if module.split(".")[0] in PACKAGES)


def find(module: str, name: str) -> None:
    """Raises ImportError or AttributeError if the module, or the name in it, does not exist."""
    owner = importlib.import_module(module)
    if name and not hasattr(owner, name):
        importlib.import_module(f"{module}.{name}")


def resolve(target: str) -> Any:
    """The object with a dotted name, which may be a class's method."""
    parts = target.split(".")
    for size in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:size]))
        except ModuleNotFoundError as error:
            if error.name is None or not ".".join(parts[:size]).startswith(error.name):
                raise
            continue
        return reduce(getattr, parts[size:], module)
    raise ModuleNotFoundError(target)


def upstream_bases(cls: type) -> list[type]:
    return [base for base in cls.__mro__[1:] if base.__module__.split(".")[0] in ("megatron", "transformer_engine")]


def compare(name: str, ours: inspect.Signature, theirs: inspect.Signature) -> Item:
    """Fails if `ours` has no place for a parameter of `theirs`, or names one that is not there."""
    named, more = parameters(ours)
    stock, starred = parameters(theirs)
    missing = [] if more else [name for name in stock if name not in named]
    extra = [] if starred else [name for name in named if name not in stock]
    problems = []
    if missing:
        problems.append(f"upstream also passes {', '.join(missing)}")
    if extra:
        problems.append(f"upstream no longer has {', '.join(extra)}")
    return Item(name, "; ".join(problems), ADAPT if problems else "")


def parameters(signature: inspect.Signature) -> tuple[list[str], bool]:
    """The names of parameters after the first, and whether any others are taken as well."""
    declared = list(signature.parameters.values())
    open_ended = [p for p in declared if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    return [p.name for p in declared[1:] if p not in open_ended], bool(open_ended)


def bind(signature: inspect.Signature, call: ast.Call, target: str) -> None:
    """Raises TypeError if a call in upstream's source does not fit; calls with `*` or `**` are taken as fitting."""
    if any(isinstance(argument, ast.Starred) for argument in call.args) or any(k.arg is None for k in call.keywords):
        return
    method = inspect.isclass(resolve(target.rpartition(".")[0]))
    named = {keyword.arg: None for keyword in call.keywords if keyword.arg}
    signature.bind(*([None] * (len(call.args) + method)), **named)


def sglang_sources() -> Iterator[Path]:
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"the environment has no sglang; {REINSTALL}")
    yield from sorted((Path(spec.submodule_search_locations[0]) / "srt").rglob("*.py"))


def grep(word: str) -> bool:
    return any(word in path.read_text(encoding="utf-8", errors="replace") for path in sglang_sources())


def calls_of(name: str) -> Iterator[tuple[str, ast.Call]]:
    """Where SGLang calls a function or method of this name: (place, call). Names as common as `handle` are left out."""
    if name == "handle":
        return
    for path in sglang_sources():
        text = path.read_text(encoding="utf-8", errors="replace")
        if f"{name}(" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Call):
                continue
            called = node.func
            inner = isinstance(called, ast.Attribute) and ast.unparse(called).startswith(("self.tp_worker", "recv_req"))
            called_name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", None)
            # A manager of the same method name forwards requests; only the updater's own callers are checked.
            if called_name == name and not inner and is_updater_call(called):
                yield f"{path.name}:{node.lineno}", node


def is_updater_call(called: ast.expr) -> bool:
    owner = ast.unparse(called.value) if isinstance(called, ast.Attribute) else ""
    return owner == "" or owner.endswith(("weight_updater", "updater")) or owner == "self"


def hooks_of(*parts: Any) -> list[tuple[str, str, Callable[..., Any]]]:
    """(target, kind, hook) of what the plugin registers."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    hooks: list[tuple[str, str, Callable[..., Any]]] = []
    with mock.patch.object(
        HookRegistry, "register", lambda target, hook, kind: hooks.append((target, kind.name, hook))
    ):
        for part in parts:
            part.register()
    return hooks


def apply_patch(patch: Any, module: ModuleType) -> str:
    """Applies a patch. Raises AttributeError for what it sets on an upstream module or class that has no such name."""
    if not patch.needed():
        return "not needed"
    for name, _ in imported_names(ast.parse(inspect.getsource(module))):
        importlib.import_module(name)
    for name in getattr(module, "MODULES", ()):
        importlib.import_module(name)
    owners: dict[int, Any] = {}
    for loaded in [m for n, m in list(sys.modules.items()) if n.split(".")[0] in PACKAGES and m is not None]:
        owners[id(loaded)] = loaded
        for value in list(vars(loaded).values()):
            if inspect.isclass(value) and value.__module__.split(".")[0] in PACKAGES:
                owners[id(value)] = value
    before = {key: set(vars(owner)) for key, owner in owners.items()}
    patch.apply()
    for key, owner in owners.items():
        new = [n for n in set(vars(owner)) - before[key] if not inspect.ismodule(vars(owner)[n]) and n[:2] != "__"]
        ours = [n for n in new if "megasync" in (getattr(vars(owner)[n], "__module__", "") or "megasync")]
        if ours and not inherited(owner, ours) and not all(map(grep, ours)):
            raise AttributeError(f"{owner.__name__} has no {', '.join(ours)} to replace")
    return f"{patch.package} {patch.installed()}"


def inherited(owner: Any, names: list[str]) -> bool:
    return inspect.isclass(owner) and all(any(name in vars(base) for base in owner.__mro__[1:]) for name in names)


def fused_attention() -> str:
    """Computes attention as trainer ranks do. Raises RuntimeError if Transformer Engine has only its slow fallback."""
    torch = importlib.import_module("torch")
    attention = importlib.import_module("transformer_engine.pytorch.attention.dot_product_attention")
    starts = torch.tensor([0, 100, 256], dtype=torch.int32, device="cuda")
    queries, keys, values = torch.randn(3, 256, 8, 128, dtype=torch.bfloat16, device="cuda")
    compute = attention.DotProductAttention(8, 128, qkv_format="thd", attn_mask_type="padding_causal")
    compute(queries, keys, values, cu_seqlens_q=starts, cu_seqlens_kv=starts, max_seqlen_q=156, max_seqlen_kv=156)
    selected = attention._attention_backends
    if selected["use_unfused_attention"]:
        raise RuntimeError("Transformer Engine chose UnfusedDotProductAttention, which is many times slower")
    return "flash" if selected["use_flash_attention"] else "cuDNN"


def megatron_has_te() -> str:
    from megatron.core.extensions import transformer_engine as extension

    if not extension.HAVE_TE:
        raise ImportError("megatron.core.extensions.transformer_engine.HAVE_TE is false")
    return version("megatron-core")


def gpu_configurations() -> Iterator[tuple[Path, Any, Any]]:
    """(file, configuration, layout) of the shipped configurations that run on GPUs."""
    from megasync.config import load_config
    from megasync.preflight.check import model_layout

    for path in sorted((ROOT / "configs").rglob("*.yaml")):
        if path.name == "base.yaml":  # names no model
            continue
        config = load_config(path)
        if config.cluster.device == "cpu":
            continue
        yield path, config, model_layout(config, planning=True)[0]


def build_options(config: Any, layout: Any, device: Any) -> str:
    import torch

    from megasync.trainer.architecture import rope_parameters
    from megasync.trainer.layer_specs import chunk_specs
    from megasync.trainer.model import transformer_config

    options = transformer_config(layout, config.trainer, device, getattr(torch, config.model.dtype))
    chunk_specs(options, layout, layout.stages[0][0], device.spec, rope_parameters(layout.hf_config))
    return f"megatron-core {version('megatron-core')}"


def parsed_options(name: str, server: Any, fix: str) -> Iterator[Item]:
    """Whether SGLang's parser knows each option, and reads the value that was meant."""
    from sglang.srt.server_args import prepare_server_args

    parsed = attempt(f"{name}: parsed", lambda: prepare_server_args(server.command()[3:]), fix)
    yield parsed
    if parsed.problem:
        return
    settings = prepare_server_args(server.command()[3:])
    for option, value in server.arguments().items():
        attribute = option.removeprefix("--").replace("-", "_")
        read = getattr(settings, attribute, None)
        if value is None or value is False or not hasattr(settings, attribute):
            continue
        problem = "" if str(read) == str(value) else f"SGLang reads {option}={read!r} instead of {value!r}"
        if problem:
            yield Item(f"{name}: {option}", problem, fix)


def resolve_arguments(server: Any) -> str:
    from sglang.srt.server_args import prepare_server_args

    settings = prepare_server_args(server.command()[3:])
    settings.resolve_once()
    from sglang.srt.arg_groups.model_override_base import resolving_view

    view = resolving_view(settings)
    return f"attention backend {view.attention_backend}, sampling {view.sampling_backend}"


def trace_weights(config: Any, server: Any, folder: str) -> str:
    """Builds SGLang's model class for every rank on the meta device, with few layers, and traces its loader."""
    from megasync.lab.engine_blueprint import trace_ranks
    from megasync.layout.layout import Layout
    from megasync.layout.topology import Topology

    path = Path(folder, "config.json")
    values = json.loads(path.read_text())
    values["num_hidden_layers"] = values.get("first_k_dense_replace", 0) + 2
    for key in ("layer_types", "mlp_only_layers"):
        if isinstance(values.get(key), list):
            values[key] = values[key][: values["num_hidden_layers"]]
    path.write_text(json.dumps(values))
    layout = Layout(values, Topology())
    arguments = [*server.command()[3:], "--skip-tokenizer-init"]
    ranks = trace_ranks(arguments, list(layout.hf_tensors.items()))
    return f"{len(ranks)} rank(s), {len(ranks[0].slots)} slots in {values['num_hidden_layers']} layers"


# Run in the environment of a server: what SGLang reads there, and what it sets itself for its processes.
READ_VARIABLES = """
import inspect, json, os, re, sys
from sglang.srt.entrypoints import engine
from sglang.srt.environ import envs
values, unknown = {}, []
for name in sys.argv[1:]:
    if hasattr(envs, name):
        values[name] = getattr(envs, name).get()
    elif name == "SGLANG_RETURN_ORIGINAL_LOGPROB":
        from sglang.srt.layers import sampler
        values[name] = getattr(sampler, name)
    else:
        unknown.append(name)
source = inspect.getsource(engine._set_envs_and_config)
# Each is a flag that is on with symmetric memory or NVLS, which megasync's servers do not use.
servers = {name: os.environ.get(name, "0") for name in re.findall(r'os.environ\\["(NCCL_[A-Z_]+)"\\] = str', source)}
print("ANSWER" + json.dumps({"values": values, "unknown": unknown, "servers": servers}))
"""


# Where SGLang looks for CUDA's compiler.
FIND_CUDA = """
import json
from sglang.kernels.jit.utils.compile.toolchain import cuda_home
print("ANSWER" + json.dumps(cuda_home()))
"""

# Uses headers that refuse a compiler of another version.
KERNEL = """
#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <cub/block/block_reduce.cuh>
__global__ void twice(__nv_bfloat16 *x, int n) {
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < n) x[at] = __hadd(x[at], x[at]);
}
extern "C" int run(void *x, int n, cudaStream_t stream) {
    twice<<<1, 256, 0, stream>>>((__nv_bfloat16 *)x, n);
    return cudaGetLastError();
}
"""


def build_kernel(home: Path, folder: Path, environment: Mapping[str, str]) -> str:
    """Compiles and links a kernel for Hopper with the options of SGLang's own builds. Raises RuntimeError."""
    import torch

    source, made, library = (folder / name for name in ("kernel.cu", "kernel.o", "kernel.so"))
    source.write_text(KERNEL)
    compiler = [
        str(home / "bin" / "nvcc"),
        "-Xcompiler",
        "-fPIC",
        "-std=c++20",
        "-gencode=arch=compute_90a,code=sm_90a",
    ]
    linker = ["c++", "-shared", str(made), f"-L{home}/lib64", "-lcudart", f"-L{home}/lib64/stubs", "-lcuda"]
    for command in ([*compiler, "-c", str(source), "-o", str(made)], [*linker, "-o", str(library)]):
        done = subprocess.run(
            command, env=dict(environment), capture_output=True, text=True, timeout=SECONDS, check=False
        )
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line or "cannot find" in line]
            raise RuntimeError("; ".join(errors[:3]) or done.stderr[-300:])
    told = subprocess.run([compiler[0], "--version"], capture_output=True, text=True, check=True).stdout
    release = re.findall(r"release ([0-9.]+)", told)[0]
    if release.split(".")[0] != str(torch.version.cuda).split(".")[0]:
        raise RuntimeError(f"it is of CUDA {release}, torch is built for {torch.version.cuda}")
    return f"CUDA {release}"


def run_python(program: str, environment: dict[str, str], *words: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWER")]
    if not lines:
        raise RuntimeError(done.stderr[-1000:])
    return json.loads(lines[-1].removeprefix("ANSWER"))


# Stand-ins for a machine without a GPU

# Folder of the stand-in library, in the environment of the checks; unset where the machine has a driver.
STAND_IN = "MEGASYNC_STAND_IN_DRIVER"
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE


def has_gpu() -> bool:
    from megasync.device import why_no_gpu

    return why_no_gpu() is None


def stand_in_driver(folder: Path) -> None:
    """Compiles libcuda.so.1 with every function of the CUDA headers; each answers that there is no device."""
    spec = importlib.util.find_spec("nvidia")
    places = spec.submodule_search_locations if spec else None
    headers = [header for place in places or () for header in Path(place).glob("*/include/cuda.h")]
    if not headers:
        raise FileNotFoundError(f"the environment has no cuda.h (package nvidia-cuda-runtime); {REINSTALL}")
    text = headers[0].read_text(encoding="utf-8", errors="replace")
    names = set(re.findall(r"\b(cu[A-Z]\w*)\(", text)) | set(
        re.findall(r"#\s*define\s+cu\w+\s+(?:\w+\()?(cu[A-Z]\w*)", text)
    )
    source = folder / "driver.c"
    source.write_text("".join(f"int {name}(void) {{ return {NO_DEVICE}; }}\n" for name in sorted(names)))
    library = folder / "libcuda.so.1"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", "-o", str(library), str(source)], check=True
    )


def describe_gpu() -> None:
    """Makes torch describe eight H100 that are not there. Only for code that asks, and computes nothing."""
    import torch

    total = 80 * 2**30

    class Queue:
        """Stands for a stream or an event."""

        cuda_stream = 0

        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: None

    properties = SimpleNamespace(
        major=9,
        minor=0,
        name="NVIDIA H100 80GB HBM3",
        total_memory=total,
        multi_processor_count=132,
        warp_size=32,
        L2_cache_size=50 * 2**20,
        max_threads_per_multi_processor=2048,
        shared_memory_per_block_optin=232_448,
        is_integrated=False,
    )
    answers: dict[str, object] = {
        "is_available": True,
        "is_initialized": True,
        "device_count": 8,
        "current_device": 0,
        "get_device_capability": (properties.major, properties.minor),
        "get_device_name": properties.name,
        "get_device_properties": properties,
        "mem_get_info": (total - 2**30, total),
        "set_device": None,
        "synchronize": None,
        "empty_cache": None,
        "current_stream": Queue(),
        "default_stream": Queue(),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    torch.cuda.Stream = torch.cuda.Event = Queue


# Running and reporting


def run_check(name: str) -> None:
    """In the process of one check: prints its items."""
    sys.path.insert(0, str(ROOT))
    items: list[Item] = []
    try:
        items.extend(CHECKS[name]())
    except Exception as error:  # noqa: BLE001 - whatever stops a check is its result
        items.append(Item(name, f"{type(error).__name__}: {error}"[:600], REINSTALL))
    print("ITEMS" + json.dumps(items))


def start_check(name: str, environment: dict[str, str]) -> tuple[list[Item], float]:
    begin = time.monotonic()
    command = [sys.executable, str(Path(__file__).resolve()), "--run", name]
    try:
        done = subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return [Item(name, f"took more than {SECONDS} s", "run it alone: --only " + name)], time.monotonic() - begin
    lines = [line for line in done.stdout.splitlines() if line.startswith("ITEMS")]
    if not lines:
        last = " ".join((done.stderr.strip().splitlines() or ["no message"])[-1].split())
        return [Item(name, f"ended with status {done.returncode}: {last}", REINSTALL)], time.monotonic() - begin
    return [Item(*item) for item in json.loads(lines[-1].removeprefix("ITEMS"))], time.monotonic() - begin


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", choices=CHECKS, default=list(CHECKS), metavar="NAME", help=", ".join(CHECKS)
    )
    parser.add_argument("--json", type=Path, help="also write all items to this file")
    parser.add_argument("--run", choices=CHECKS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        run_check(arguments.run)
        return 0
    with tempfile.TemporaryDirectory(prefix="megasync-no-driver-") as folder:
        environment = dict(os.environ, TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
        environment.pop(STAND_IN, None)
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError:
            stand_in_driver(Path(folder))
            environment[STAND_IN] = folder
            environment["LD_LIBRARY_PATH"] = os.pathsep.join(
                [folder, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
            )
        results: dict[str, list[Item]] = {}
        rows = []
        for name in arguments.only:
            items, seconds = start_check(name, environment)
            results[name] = items
            failed = [item for item in items if item.problem]
            for item in failed:
                print(f"FAILED {name}: {item.name}\n       {item.problem}\n    -> {item.fix}", flush=True)
            notes = "; ".join(f"{item.name}: {item.note}" for item in items if item.note and not item.problem)
            rows.append((name, str(len(items)), str(len(failed)), f"{seconds:.0f} s", notes[:200]))
            print(f"{name}: {len(items) - len(failed)} of {len(items)} in order", flush=True)
    print("\n| check | items | failed | time | notes |\n|---|---|---|---|---|")
    print("\n".join(f"| {' | '.join(row)} |" for row in rows))
    if arguments.json:
        arguments.json.write_text(
            json.dumps({name: [item._asdict() for item in items] for name, items in results.items()}, indent=1)
        )
    return int(any(item.problem for items in results.values() for item in items))


if __name__ == "__main__":
    sys.exit(main())
