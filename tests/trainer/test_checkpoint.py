"""A checkpoint is complete or absent, and a resumed run equals the run that never stopped."""

import itertools
import json
import os
import resource
import shutil
from functools import partial
from math import prod
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from sound_config import TINY

from megasync.config.schema import AlgorithmConfig
from megasync.errors import CheckpointError
from megasync.layout import shards
from megasync.layout.layout import Box, Layout
from megasync.layout.shards import ShardFiles, layout_of, reading_parts
from megasync.layout.topology import Topology
from megasync.trainer import checkpoint

# World -> name -> (model, dtype, trainer options).
RUNS = {
    1: {"one": ("qwen2", "float32", {})},
    2: {
        "distributed-optimizer": ("qwen2", "float32", {"data_parallel": 2}),
        "distributed-optimizer-bfloat16": ("qwen2", "bfloat16", {"data_parallel": 2}),
        "tensor-parallel-bfloat16": ("qwen2", "bfloat16", {"tensor_parallel": 2}),
        "pipeline": ("qwen2", "float32", {"pipeline_parallel": 2, "last_stage_layers": 1}),
        "experts": ("qwen3_moe", "float32", {"data_parallel": 2, "expert_parallel": 2}),
        "experts-bfloat16": ("qwen2_moe", "bfloat16", {"data_parallel": 2, "expert_parallel": 2}),
        "latent-attention-bfloat16": (
            "deepseek_v3",
            "bfloat16",
            {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2, "expert_tensor_parallel": 1},
        ),
        "adapters-of-cut-experts": (
            "qwen3_moe",
            "float32",
            {"data_parallel": 2, "expert_tensor_parallel": 2, "lora": {"rank": 4}},
        ),
        "experts-virtual-pipeline": ("qwen3_moe", "float32", {"pipeline_parallel": 2, "virtual_pipeline": 2}),
    },
}


@pytest.mark.every(5)
@pytest.mark.parametrize(("world", "name"), [(world, name) for world, runs in RUNS.items() for name in runs])
def test_a_resumed_run_is_bitwise_equal_to_an_uninterrupted_one(run_ranks, models, tmp_path, world, name):
    model, dtype, trainer = RUNS[world][name]
    run = {"model": models[model], "dtype": dtype, "trainer": trainer}
    for rank in run_ranks("resume", world, runs={name: run}, folder=str(tmp_path)):
        metrics, weights = rank[name]["straight"]
        resumed_metrics, resumed_weights = rank[name]["resumed"]
        assert metrics == resumed_metrics
        assert all(torch.equal(weights[key], resumed_weights[key]) for key in weights)
        assert rank[name]["state"] == {"step": 2, "note": "hello"}


# Ranks, trainer options. A run goes through them in this order, so every one is saved and loaded.
TP2 = {"tensor_parallel": 2, "sequence_parallel": True}
WHOLE_EXPERTS = {"expert_tensor_parallel": 1}
DENSE = [
    (2, {"data_parallel": 2}),
    (1, {}),
    (2, TP2),
    (2, {"data_parallel": 2, "distributed_optimizer": False}),
    (2, {"pipeline_parallel": 2, "pipeline_layout": [2, 1]}),
    (4, {"tensor_parallel": 2, "data_parallel": 2}),
    (4, {"context_parallel": 2, "data_parallel": 2}),
    (2, {"context_parallel": 2}),
]
EXPERTS = [
    (2, {"data_parallel": 2, "expert_parallel": 2}),
    (2, {"pipeline_parallel": 2, "virtual_pipeline": 2}),
    (4, {**TP2, "data_parallel": 2, "expert_parallel": 2, **WHOLE_EXPERTS}),
    (1, {}),
    (4, {**TP2, "data_parallel": 2, "expert_parallel": 4, **WHOLE_EXPERTS}),
    (2, TP2),
    (4, {"data_parallel": 4, "expert_parallel": 2}),
    (4, {"data_parallel": 4, "expert_tensor_parallel": 2}),
    (4, {"context_parallel": 2, "data_parallel": 2, "expert_parallel": 2}),
]
# Experts with biases are not split.
UNSPLIT = [run for run in EXPERTS if run[1].get("expert_tensor_parallel", run[1].get("tensor_parallel", 1)) == 1]
# Ranks that share an expert, with and without other copies of it.
CUT = [run for run in EXPERTS if run not in UNSPLIT]
ADAPTED = {"lora": {"rank": 4}}


@pytest.fixture(scope="module")
def hops(run_ranks, models, tmp_path_factory):
    """hops(model, dtype, topologies): the checkpoints, and metrics of the step after each, of rank 0."""

    def run(model, dtype, topologies):
        folder, source, results = tmp_path_factory.mktemp(f"{model}-{dtype}"), None, []
        for number, (world, trainer) in enumerate(topologies):
            target = folder / f"{number}"
            arguments = {"source": source and str(source), "target": str(target), "model": models[model]}
            metrics = run_ranks(hop, world, **arguments, trainer=trainer, dtype=dtype)[0]
            results.append((target, metrics))
            source = target
        return results

    return run


def contents(path):
    """Every Hugging Face tensor of a checkpoint: its weights, and what the optimizer holds of it, by kind."""
    described = json.loads((path / "layout.json").read_text())
    layout, dtype = layout_of(described)
    biases = {name for name in layout.hf_tensors if layout.hf_dtype(name, dtype) != dtype}
    with ShardFiles(path) as weights, checkpoint.OptimizerFiles(path, layout, described["sharded_optimizer"]) as held:
        reads = {kind: partial(held.part, kind) for kind in checkpoint.MOMENTS}
        if dtype == "bfloat16":
            reads[checkpoint.MAIN_WEIGHT] = partial(held.part, checkpoint.MAIN_WEIGHT)
        results = {
            (kind, name): reading_parts(layout, read)(
                name, Box(0, prod(shape[:-1]), 0, shape[-1]) if len(shape) > 1 else Box(0, shape[0], 0, 1)
            )
            for kind, read in {"weight": weights.part, **reads}.items()
            for name, shape in layout.hf_tensors.items()
            # A router's bias is no parameter.
            if kind == "weight" or name not in biases
        }
    return described["updates"], results


@pytest.mark.parametrize(
    ("model", "dtype", "topologies"),
    [
        pytest.param("qwen2", "float32", DENSE, marks=pytest.mark.matrix),
        pytest.param("llama", "bfloat16", DENSE, marks=pytest.mark.matrix),
        ("qwen2_moe", "bfloat16", EXPERTS[:4]),
        pytest.param("qwen2_moe", "bfloat16", EXPERTS, marks=pytest.mark.matrix),
        pytest.param(
            *("qwen2", "bfloat16", [(world, {**trainer, **ADAPTED}) for world, trainer in DENSE]),
            marks=pytest.mark.matrix,
        ),
        pytest.param(
            *("qwen3_moe", "float32", [(world, {**trainer, **ADAPTED}) for world, trainer in EXPERTS]),
            marks=pytest.mark.matrix,
        ),
        pytest.param("qwen3_moe", "float32", EXPERTS, marks=pytest.mark.matrix),
        pytest.param(
            *("qwen2_moe", "bfloat16", [(world, {**trainer, **ADAPTED}) for world, trainer in CUT]),
            marks=pytest.mark.matrix,
        ),
        pytest.param("deepseek_v3", "bfloat16", EXPERTS, marks=pytest.mark.matrix),
        pytest.param("gpt_oss", "bfloat16", UNSPLIT, marks=pytest.mark.matrix),
    ],
)
def test_a_run_resumes_on_any_topology_with_the_same_weights_and_moments(hops, model, dtype, topologies):
    first, *others = hops(model, dtype, topologies)
    updates, tensors = contents(first[0])
    # While the second factor of an adapter is zero, the first one has no gradient.
    moments = {name: value for (kind, name), value in tensors.items() if kind == "exp_avg_sq" and "lora_A" not in name}
    assert updates == 1 and all(value.any() for value in moments.values())
    for path, metrics in others:
        again, actual = contents(path)
        assert again == updates and actual.keys() == tensors.keys()
        assert [key for key, value in actual.items() if not torch.equal(value, tensors[key])] == []
        tolerance = 1e-5 if dtype == "float32" else 0.02
        for key in ("train/loss", "train/grad_norm"):
            assert metrics[key] == pytest.approx(first[1][key], rel=tolerance, abs=tolerance), (path, key)


def test_a_checkpoint_of_the_format_before_is_refused_with_a_fix(tmp_path):
    with pytest.raises(CheckpointError, match="has format 1, .* reads format 2; export it"):
        checkpoint._check({}, None, "float32")


def test_a_lost_slice_is_named(hops, tmp_path):
    (path, _), *_ = hops("qwen2", "float32", DENSE[:1])
    held = load_file(path / "optimizer-00001.safetensors")
    lost = next(key for key in held if key.startswith("exp_avg/"))
    with safe_open(path / "optimizer-00001.safetensors", "pt") as file:
        metadata = file.metadata()
    starts = json.loads(metadata["starts"])
    del starts[lost.partition("/")[2]]
    save_file(held, path / "optimizer-00001.safetensors", metadata={"starts": json.dumps(starts)})
    with pytest.raises(CheckpointError, match=f"lacks {held[lost].numel()} elements of exp_avg"):
        contents(path)


def test_a_failed_save_and_what_cannot_be_loaded_are_refused_on_every_rank(run_ranks, models, tmp_path):
    for rank in run_ranks(broken_checkpoints, 2, model=models["llama"], folder=str(tmp_path)):
        assert "could not write checkpoint" in rank["full"]
        assert "rank 1: " in rank["full"] and "File too large" in rank["full"]
        assert rank["left"] == ["step-00000001"]
        assert rank["latest"] == "step-00000001"
        assert rank["again"] is None
        assert "rank 1: " in rank["missing"]
        assert "model-00001.safetensors" in rank["missing"]
        assert rank["kept"], "no weight changes before all files are found"
        assert "already exists" in rank["existing"]
        assert "its dtype is float32, but this run's is bfloat16" in rank["layout"]
        assert "is not a complete checkpoint" in rank["absent"]


@pytest.mark.parametrize("damage", [Path.unlink, lambda file: file.write_bytes(file.read_bytes()[:-9])])
def test_what_is_missing_or_damaged_is_named_before_a_run_resumes(tmp_path, damage):
    path, layout = whole(tmp_path, 3), Layout(TINY, Topology(tensor=2))
    (path / shards.LAYOUT).write_text(json.dumps(shards.describe(layout, "float32")))
    for rank in range(2):
        for kind in ("model", "optimizer"):
            save_file({"w": torch.ones(9)}, path / f"{kind}-{rank:05d}.safetensors")
    checkpoint.check_readable(path)
    for file in [*path.iterdir()]:
        if file.name == checkpoint.MARKER:
            continue
        sound = file.read_bytes()
        damage(file)
        with pytest.raises(CheckpointError, match=f"cannot be resumed from: .*{file.name}.*remove that checkpoint"):
            checkpoint.check_readable(path)
        file.write_bytes(sound)


@pytest.fixture
def alone(monkeypatch):
    """Saves without other ranks and without a model."""
    monkeypatch.setattr(checkpoint, "run_collectively", lambda work, *_: work and work())
    monkeypatch.setattr(checkpoint, "all_agree", lambda ok, _: ok)
    monkeypatch.setattr(checkpoint, "describe", lambda *_: {})


def test_each_rank_syncs_what_it_wrote_and_the_marker_comes_after_all(alone, tmp_path, monkeypatch):
    """On a network file system no host can sync what another one wrote."""
    order, sync, replace = [], os.fsync, os.replace

    def synced(handle):
        order.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name.lstrip(".").partition(".")[0])
        sync(handle)

    def replaced(source, target):
        order.append(f"-> {Path(target).name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    layout = SimpleNamespace(writers=lambda rank: {"w": rank})
    path = checkpoint.step_path(tmp_path, 3)
    for rank in (1, 0):
        if rank:
            path.with_name(path.name + checkpoint.PARTIAL).mkdir(parents=True)
            monkeypatch.setattr(checkpoint, "_make_room", lambda *_: None)
        shard = checkpoint.Shard(layout, "float32", rank, {"w": torch.ones(2)}, {}, False, 0)
        assert checkpoint.begin(path, shard, {}, torch.device("cpu")).finish(wait=True)
        if rank:
            assert order == ["model-00001", "optimizer-00001"]
            order.clear()
    assert order[:2] == ["model-00000", "optimizer-00000"]
    assert [name for name in order if name.startswith("->")] == [
        *("-> layout.json", "-> state.json", "-> COMPLETE", "-> step-00000003")
    ]
    assert order[-4:] == [path.name, "-> step-00000003", "checkpoints", tmp_path.name]
    assert checkpoint.latest(tmp_path) == path


def test_copies_of_a_later_checkpoint_take_the_memory_of_the_one_before(monkeypatch):
    monkeypatch.setattr(checkpoint.HostMemory, "BLOCK", 256)
    memory = checkpoint.HostMemory()
    tensors = [
        *(torch.arange(count).to(dtype) for count in (0, 1, 7, 300) for dtype in (torch.bfloat16, torch.float64, bool)),
        *(torch.arange(6.0).view(2, 3).T, torch.tensor(3.0)),
    ]
    copies = [memory.copy(tensor) for tensor in tensors]
    assert all(copy.equal(tensor) and copy.is_contiguous() for copy, tensor in zip(copies, tensors, strict=True))
    places = [copy.data_ptr() for copy in copies]
    spans = sorted((copy.data_ptr(), copy.data_ptr() + copy.nbytes) for copy in copies if copy.nbytes)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    memory.clear()
    again = [memory.copy(torch.zeros_like(tensor)) for tensor in tensors]
    assert [copy.data_ptr() for copy in again] == places and not any(copy.any() for copy in copies)


KILLED = 9


def save_alone(path, value):
    """Saves one weight as a run of one rank does. Returns once the checkpoint is complete."""
    shard = checkpoint.Shard(ONE_WEIGHT, "float32", 0, {"w": torch.full((2,), value)}, {}, False, 0)
    checkpoint.begin(path, shard, {"step": checkpoint.step_of(path)}, torch.device("cpu")).finish(wait=True)


ONE_WEIGHT = SimpleNamespace(writers=lambda rank: {"w": 0})


def save_until_killed(path, point):
    """In a fork: saves, and ends the process as kill -9 would before its ``point``-th change of the disk."""
    left = itertools.count(point, -1)

    def killing(change):
        def changed(*args, **options):
            if next(left) == 1:
                os._exit(KILLED)
            return change(*args, **options)

        return changed

    for owner, name in ((os, "fsync"), (os, "replace"), (os, "rename"), (os, "mkdir"), (os, "open")):
        setattr(owner, name, killing(getattr(owner, name)))
    for owner in (checkpoint, shards):
        owner.save_file = killing(owner.save_file)
    try:
        save_alone(path, 2.0)
        os._exit(0)
    finally:
        os._exit(1)


def test_a_kill_at_any_point_of_a_save_leaves_the_newest_whole_checkpoint(alone, tmp_path):
    first, second = (checkpoint.step_path(tmp_path, step) for step in (1, 2))
    save_alone(first, 1.0)
    outcomes = []
    for point in itertools.count(1):
        if (child := os.fork()) == 0:
            save_until_killed(second, point)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        newest = checkpoint.latest(tmp_path)
        value = load_file(newest / "model-00000.safetensors")["w"][0]
        assert checkpoint.read_state(newest)["step"] == value == checkpoint.step_of(newest)
        outcomes.append(checkpoint.step_of(newest))
        if code == 0:
            break
        assert code == KILLED
        if newest == second:
            shutil.rmtree(second)
    assert len(outcomes) > 10 and outcomes == sorted(outcomes) and set(outcomes) == {1, 2}
    assert not checkpoint.prune(tmp_path, keep=2)


def whole(run, step):
    path = checkpoint.step_path(run, step)
    path.mkdir(parents=True)
    (path / checkpoint.STATE).write_text(json.dumps({"step": step}))
    (path / checkpoint.MARKER).touch()
    return path


@pytest.mark.parametrize(
    "name",
    [
        *("step-00000020-best", "step-00000030.bak", "step-00000030 (copy)", "best-step-00000020", "step-0000002x"),
        *("step-20", "step-000000020", "step-²²²²²²²²", "step-00000040.partial.bak", "step-00000020.partial-best"),
        *("step-", "step", "latest", "STEP-00000020", "step-00000020\n", "step--0000020"),
    ],
)
def test_names_that_are_no_checkpoints_are_neither_used_nor_removed(tmp_path, name):
    for step in (10, 20, 30):
        whole(tmp_path, step)
    foreign = tmp_path / checkpoint.FOLDER / name
    shutil.copytree(checkpoint.step_path(tmp_path, 30), foreign)
    assert [checkpoint.step_of(path) for path in checkpoint.complete(tmp_path)] == [10, 20, 30]
    assert checkpoint.prune(tmp_path, 1) == [checkpoint.step_path(tmp_path, step) for step in (10, 20)]
    assert checkpoint.latest(tmp_path) == checkpoint.step_path(tmp_path, 30)
    assert (foreign / checkpoint.MARKER).exists()
    with pytest.raises(CheckpointError, match="not named like a checkpoint"):
        checkpoint.step_of(foreign)


def test_a_kill_at_any_point_of_a_prune_leaves_no_half_checkpoint(tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    for point in range(100):
        run = tmp_path / str(point)
        files = {path: {each.name for each in path.iterdir()} for path in (whole(run, step) for step in (1, 2, 3))}
        calls = itertools.count()

        def killing(call, calls=calls, point=point):
            def killed(*args, **options):
                if next(calls) == point:
                    raise Killed
                return call(*args, **options)

            return killed

        with monkeypatch.context() as patch:
            for name in ("unlink", "rmdir", "replace", "fsync"):
                patch.setattr(os, name, killing(getattr(os, name)))
            try:
                checkpoint.prune(run, 1)
                ended = True
            except Killed:
                ended = False
        assert all({each.name for each in path.iterdir()} == files[path] for path in checkpoint.complete(run))
        checkpoint.prune(run, 1)
        assert [path.name for path in (run / checkpoint.FOLDER).iterdir()] == ["step-00000003"]
        if ended:
            break
    assert ended and point > 8


def test_only_whole_checkpoints_count_in_the_order_of_their_steps(tmp_path):
    assert checkpoint.latest(tmp_path) is None
    steps = [5, 99_999_999, 100_000_000, 1_000_000_000]
    newest = [whole(tmp_path, step) for step in steps][-1]
    checkpoint.step_path(tmp_path, 2_000_000_000).mkdir()
    assert checkpoint.latest(tmp_path) == newest
    assert [checkpoint.step_of(path) for path in checkpoint.complete(tmp_path)] == steps
    assert checkpoint.read_state(newest) == {"step": steps[-1]}
    with pytest.raises(CheckpointError, match="no COMPLETE file"):
        checkpoint.read_state(checkpoint.step_path(tmp_path, 2_000_000_000))


@pytest.mark.parametrize(
    ("keep", "needed", "left"),
    [(1, (), [3]), (2, (), [2, 3]), (5, (), [1, 2, 3]), (0, (), [1, 2, 3]), (1, (1, 3), [1, 3])],
)
def test_pruning_keeps_the_newest_and_what_a_reference_is_read_from_and_clears_broken_saves(
    tmp_path, keep, needed, left
):
    for step in (1, 2, 3):
        whole(tmp_path, step)
    checkpoint.partial_path(checkpoint.step_path(tmp_path, 4)).mkdir()
    checkpoint.prune(tmp_path, keep, needed)
    assert sorted((tmp_path / checkpoint.FOLDER).iterdir()) == [checkpoint.step_path(tmp_path, step) for step in left]


def test_a_reference_is_that_of_its_last_renewal():
    assert [checkpoint.reference_step(step, 4) for step in (0, 3, 4, 7, 8)] == [0, 0, 4, 4, 8]
    assert checkpoint.reference_step(7, 0) == 0


def hop(source, target, model, trainer, dtype):
    """A policy step from a checkpoint, or the second of two from the model if ``source`` is None: its metrics.

    What was loaded, or trained by the first step, is saved to ``target`` before.
    """
    from rank_engines import PolicyTrainer, close, make_engine, make_groups, train_on

    engine = make_engine(model, trainer, {"decay": "cosine", "warmup_steps": 1}, dtype)
    policy = PolicyTrainer(engine, AlgorithmConfig(), dump_dir="unused")
    if source is None:
        train_on(policy, make_groups(1), 1)
    else:
        engine.load(Path(source))
    engine.save(Path(target), {"step": 1})
    metrics = train_on(policy, make_groups(2), 2)
    close(engine)
    return metrics


def broken_checkpoints(model, folder):
    """Saves that fail on one rank, and checkpoints that are not whole."""
    from rank_engines import Sample, close, cross_entropy, make_engine, weights

    run = Path(folder)
    engine = make_engine(model, {"tensor_parallel": 2})

    def attempt(action, *args):
        try:
            action(*args)
        except CheckpointError as error:
            return str(error)
        return None

    engine.forward_backward(engine.local_batch([Sample.of([1, 2], [3, 4])]), cross_entropy(2))
    engine.update(1, loss_is_finite=True)
    engine.save(checkpoint.step_path(run, 1), {"step": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        # Room for the weights, not for the optimizer's two moments.
        weight_bytes = sum(tensor.nbytes for tensor in engine.params().values())
        resource.setrlimit(resource.RLIMIT_FSIZE, (3 * weight_bytes // 2, limits[1]))
    full = attempt(engine.save, checkpoint.step_path(run, 2))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    left = sorted(path.name for path in (run / "checkpoints").iterdir())
    latest = checkpoint.latest(run).name
    again = attempt(engine.load, checkpoint.step_path(run, 1))
    existing = attempt(engine.save, checkpoint.step_path(run, 1))
    engine.save(checkpoint.step_path(run, 3), {"step": 3})
    dist.barrier()
    if dist.get_rank() == 0:
        (checkpoint.step_path(run, 3) / "model-00001.safetensors").unlink()
    dist.barrier()
    before = weights(engine)
    missing = attempt(engine.load, checkpoint.step_path(run, 3))
    kept = all(torch.equal(before[name], tensor) for name, tensor in engine.params().items())
    close(engine)
    other = make_engine(model, {"data_parallel": 2}, dtype="bfloat16")
    layout = attempt(other.load, checkpoint.step_path(run, 1))
    absent = attempt(other.load, checkpoint.step_path(run, 9))
    close(other)
    names = ("full", "left", "latest", "again", "existing", "missing", "kept", "layout", "absent")
    return dict(zip(names, (full, left, latest, again, existing, missing, kept, layout, absent), strict=True))
