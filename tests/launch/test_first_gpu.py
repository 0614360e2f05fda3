"""The ladder of the first GPU run: verdicts, the stop at the first failure, and what is sent back."""

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml
from launch_scripts import program

first_gpu = program("first_gpu")
ROOT = Path(__file__).parents[2]
ONE = first_gpu.Machine("cuda", ("NVIDIA H100 80GB HBM3",))
EIGHT = first_gpu.Machine("cuda", ("NVIDIA A100-SXM4-80GB",) * 8)
CPU = first_gpu.Machine("cpu")

PARITY = 'RESULT {"logprob error": 0.001}\n'
SYNC = "p2p: 269 MB on the wire, 1.0000 of what the servers' ranks keep\n| p2p | 0.125 | 1.00 | 0.020 | 0 |\n"
TRAINER = (
    "| megasync, 4 ranks | 0.50 | 12000 | |\n| megatron-core, 4 ranks | 0.60 | 10000 | 1.2 |\n"
    "model FLOPs utilisation: 31.5% of 989 TFLOP/s a GPU\n"
)
GENERATION = "| 16 | 256 | raw | 9 | 2400 | 0.5 | 1.00 |\n| 16 | 256 | megasync | 9 | 2300 | 0.6 | 0.96 |\n"


def steps(out, name, last_score=0.5, loss=0.1, count=6):
    folder = out / "runs" / f"{name}-20260101-000000"
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"step": 0, "eval/score": 0.1}]
    for step in range(1, count + 1):
        rows.append(
            {"step": step, "time/step": 1.0, "time/sync": 0.2, "sync/pause_seconds": 0.1, "sync/parity": 0.01}
            | {"rollout/tokens_per_second": 900.0, "train/tokens_per_second": 800.0, "train/loss": loss}
        )
    rows.append({"step": count, "eval/score": last_score})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


class Machine:
    """Answers for the commands of a ladder; `planted` maps a stage to the exit status and log that it has instead."""

    def __init__(self, out, stages, planted=None):
        self.out, self.stages, self.planted, self.ran = out, stages, planted or {}, []
        self.logs = {"doctor": "ok       gpu 0   NVIDIA H100\n", "parity": PARITY, "sync": SYNC, "trainer": TRAINER}
        self.logs["generation"] = GENERATION

    def execute(self, command, environment, log, seconds):
        name = log.stem
        self.ran.append((name, dict(environment)))
        status, text = self.planted.get(name, (0, self.logs.get(name, "")))
        if name.startswith("run"):
            steps(self.out, name.replace("run", "first-gpu"))
        log.write_text(text)
        return status


def climb(out, machine=ONE, **planted):
    stages = first_gpu.ladder(machine, out, out / "models")
    answers = Machine(out, stages, planted)
    said = []
    return first_gpu.climb(stages, out, answers.execute, said.append), answers, said


def test_all_stages_pass_in_order_with_their_figures(tmp_path):
    results, answers, _ = climb(tmp_path)
    assert [result.name for result in results] == [name for name, _ in answers.ran]
    assert {result.verdict for result in results} == {"passed"}, results
    figures = {result.name: result.numbers for result in results}
    assert figures["sync"] == {"sync, s": 0.125, "pause, s": 0.02, "MB": 269.0}
    assert figures["trainer"] == {"step, s": 0.5, "tokens/s": 12000.0, "MFU, %": 31.5}
    assert figures["generation"] == {"tokens/s at 16": 2300.0, "of raw calls": 0.96}
    assert figures["run"]["steps"] == 6 and figures["run"]["score after"] == 0.5


def test_the_first_failure_stops_the_ladder_and_is_packed_to_be_sent_back(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    results, answers, said = climb(out, sync=(1, "a\nncclInvalidUsage: Duplicate GPU detected\n"))
    verdicts = {result.name: result.verdict for result in results}
    assert verdicts["parity"] == "passed" and verdicts["sync"] == "failed" and verdicts["run"] == "not run"
    assert [name for name, _ in answers.ran][-1] == "sync"
    failed = next(result for result in results if result.verdict == "failed")
    assert "exit status 1" in failed.why and "Duplicate GPU detected" in failed.why and "sync.log" in failed.why
    assert any("Duplicate GPU" in line for line in said)

    (out / "weights.bin").write_bytes(b"\0" * (first_gpu.ARCHIVED_BYTES + 1))
    first_gpu.write_results(out, ONE, results, {"torch": "2.14.1"})
    with tarfile.open(first_gpu.archive_of(out)) as archive:
        names = set(archive.getnames())
    assert {"out/sync.log", "out/doctor.log", "out/results.json", "out/report.md"} <= names
    assert "out/weights.bin" not in names
    data = json.loads((out / "results.json").read_text())
    assert data["machine"]["gpus"] == list(ONE.gpus) and data["versions"] == {"torch": "2.14.1"}
    assert "| sync | failed |" in (out / "report.md").read_text()


@pytest.mark.parametrize(
    ("stage", "answer", "why"),
    [
        ("generation", (None, ""), "did not end within 600 s"),
        ("trainer", (0, "no table\n"), "its output cannot be read"),
        ("doctor", (0, "warning  gpu   no GPU\n"), "sees 0 GPU"),
    ],
)
def test_a_stage_fails_after_its_deadline_and_without_a_result(tmp_path, stage, answer, why):
    results, _, _ = climb(tmp_path, **{stage: answer})
    failed = next(result for result in results if result.verdict == "failed")
    assert (failed.name, why in failed.why) == (stage, True), failed


@pytest.mark.parametrize(
    ("changes", "why"), [({"last_score": 0.1}, "the score did not rise"), ({"loss": float("nan")}, "not finite")]
)
def test_a_run_that_learns_nothing_or_diverges_fails(tmp_path, changes, why):
    steps(tmp_path, "first-gpu", **changes)
    found, numbers = first_gpu.judge_run("*", True)("", tmp_path)
    assert why in found and numbers["steps"] == 6


def test_one_gpu_is_shared_and_several_are_divided(tmp_path):
    one, eight = (
        {stage.name: stage for stage in first_gpu.ladder(machine, tmp_path, tmp_path)} for machine in (ONE, EIGHT)
    )
    assert not [word for word in one["run"].command if "share_device" in word]
    # NCCL refuses a second process on a GPU without it.
    assert one["sync"].environment == {"NCCL_MULTI_RANK_GPU_ENABLE": "1"} and eight["sync"].environment == {}
    assert {"cluster.share_device=false", "trainer.data_parallel=4", "rollout.servers=4"} <= set(eight["run"].command)
    assert "989" in one["trainer"].command and "312" in eight["trainer"].command


@pytest.mark.matrix
@pytest.mark.parametrize("machine", [ONE, EIGHT, CPU], ids=["one", "eight", "cpu"])
def test_every_run_of_the_ladder_is_a_valid_configuration_that_fits(machine, tmp_path, monkeypatch):
    from megasync.config import load_config
    from megasync.planning.plan import resolve_plan
    from megasync.preflight.check import check_config

    monkeypatch.chdir(ROOT)
    shapes = {"run": "smollm2_135m", "run-0.6b": "qwen3_0_6b", "run-in-turns": "smollm2_135m"}
    shapes["run-graphs"] = "qwen3_0_6b"
    for stage in first_gpu.ladder(machine, tmp_path / "out", tmp_path / "models"):
        if stage.name not in shapes or stage.skip:
            continue
        path, *overrides = stage.command[stage.command.index("train") + 1 :]
        config = load_config(path, [*overrides, f"model.config=configs/models/{shapes[stage.name]}.json"])
        check_config(config, planning=True)
        in_turns = stage.name == "run-in-turns"
        assert config.cluster.device == machine.device and config.cluster.colocate == in_turns
        assert config.cluster.share_device == (machine.shared and not in_turns)
        if machine.device == "cuda":
            assert resolve_plan(config, 24 * 10**9).refusals == ()


def test_the_shape_of_the_rehearsal_is_a_small_version_of_the_real_one():
    shape = json.loads(first_gpu.SHAPE.read_text())
    assert set(first_gpu.TINY) <= set(shape)
    assert yaml.safe_load((ROOT / "configs" / "first_gpu.yaml").read_text())["cluster"]["share_device"] is True


@pytest.mark.real
@pytest.mark.parametrize(
    "left_out",
    [
        pytest.param(["doctor", "rehearse", "sync", "run-0.6b", "run-in-turns", "trainer", "generation"], id="short"),
        pytest.param(["rehearse"], id="whole", marks=pytest.mark.matrix),
    ],
)
def test_the_ladder_is_rehearsed_on_a_cpu(tmp_path, left_out):
    out = tmp_path / "out"
    command = [sys.executable, "launch/first_gpu.py", "--device", "cpu", "--out", str(out)]
    done = subprocess.run(
        [*command, "--models", str(tmp_path / "models"), "--skip", *left_out],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    results = json.loads((out / "results.json").read_text())["stages"]
    assert done.returncode == 0, [result for result in results if result["verdict"] != "passed"]
    assert {result["name"]: result["verdict"] for result in results if result["verdict"] != "passed"} == {
        "run-graphs": "skipped"
    }
    figures = {result["name"]: result["numbers"] for result in results}
    assert figures["parity"]["logprob error"] < 1e-5 and figures["run"]["steps"] == 3
    assert "no figure is a GPU's" in (out / "report.md").read_text()
