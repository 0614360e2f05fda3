"""The first run of megasync on a GPU, as a ladder of stages of at most ten minutes each: launch/first_gpu.sh starts it.

    python launch/first_gpu.py [--device cuda|cpu] [--out FOLDER] [--only STAGE ...] [--skip STAGE ...]

Each stage is a command of its own, runs only if all earlier ones passed, and ends with a verdict. At the first failure
the ladder stops and names the file to send back: an archive with all logs, the versions and the results so far.
Results are results.json and report.md, a table for docs/benchmarks_gpu.md.

With one GPU, the trainer rank and the server share it (configs/first_gpu.yaml); with several, each half of them has its
own. `--device cpu` rehearses the ladder on a machine without a GPU: the same stages with tiny models, Megatron's own
layers instead of Transformer Engine's, and gloo instead of NCCL. What it measures there says nothing about GPUs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STAGE_SECONDS = 600.0
# Files of more than this are left out of the archive: weights, checkpoints.
ARCHIVED_BYTES = 20 * 10**6
# Dense bfloat16 TFLOP/s without sparsity, from the data sheets, by a part of the name that nvidia-smi reports.
PEAKS = {"B200": 2250, "GB200": 2500, "H100 PCIe": 756, "H100": 989, "H200": 989, "GH200": 989, "A100": 312}
PEAKS |= {"L40S": 362, "L4": 121, "A10": 125, "RTX 4090": 165, "RTX 3090": 71}
# The shape of Qwen3-0.6B, with random weights: speed does not depend on their values.
SHAPE = ROOT / "configs" / "models" / "qwen3_0_6b.json"
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY |= {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256}

Numbers = dict[str, float]
# (log, folder of the results) -> (why it failed or "", numbers)
Judge = Callable[[str, Path], tuple[str, Numbers]]
# (command, environment, log file, deadline in seconds) -> exit status, None after the deadline
Execute = Callable[[Sequence[str], Mapping[str, str], Path, float], int | None]


def accept(log: str, out: Path) -> tuple[str, Numbers]:
    """Accepts any log: the exit status of the command is the verdict."""
    return "", {}


@dataclass(frozen=True)
class Stage:
    """One rung. `question` is what it answers; with `skip`, why it cannot run here, it is left out."""

    name: str
    question: str
    command: Sequence[str]
    judge: Judge = accept
    environment: Mapping[str, str] = field(default_factory=dict)
    skip: str = ""


@dataclass
class Result:
    """How a stage ended: passed, failed, skipped or not run; `why` for all but the first."""

    name: str
    verdict: str
    why: str = ""
    seconds: float = 0.0
    numbers: Numbers = field(default_factory=dict)


def climb(stages: Sequence[Stage], out: Path, execute: Execute, say: Callable[[str], None] = print) -> list[Result]:
    """Runs the stages in order until one fails; results of all of them. The logs are `out`/STAGE.log."""
    results: list[Result] = []
    for number, stage in enumerate(stages, 1):
        if any(result.verdict == "failed" for result in results):
            results.append(Result(stage.name, "not run", "an earlier stage failed"))
            continue
        say(f"[{number}/{len(stages)}] {stage.name}: {stage.question}")
        result = run_stage(stage, out, execute)
        results.append(result)
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in result.numbers.items())
        detail = "; ".join(filter(None, [result.why, numbers]))
        say(f"    {result.verdict} after {result.seconds:.0f} s{': ' * bool(detail)}{detail}")
    return results


def run_stage(stage: Stage, out: Path, execute: Execute) -> Result:
    if stage.skip:
        return Result(stage.name, "skipped", stage.skip)
    log, begin = out / f"{stage.name}.log", time.monotonic()
    status = execute(stage.command, {**os.environ, **stage.environment}, log, STAGE_SECONDS)
    seconds = time.monotonic() - begin
    text = log.read_text(errors="replace") if log.is_file() else ""
    if status is None:
        return Result(stage.name, "failed", f"it did not end within {STAGE_SECONDS:.0f} s; see {log}", seconds)
    if status != 0:
        last = " | ".join([line.strip() for line in text.splitlines() if line.strip()][-3:])
        return Result(stage.name, "failed", f"exit status {status}: {last}; see {log}", seconds)
    try:
        why, numbers = stage.judge(text, out)
    except (ValueError, KeyError, IndexError, OSError, statistics.StatisticsError) as error:
        why, numbers = f"its output cannot be read ({type(error).__name__}: {error}); see {log}", {}
    return Result(stage.name, "failed" if why else "passed", why, seconds, numbers)


def execute(command: Sequence[str], environment: Mapping[str, str], log: Path, seconds: float) -> int | None:
    """Runs a command in a process group of its own, which is gone when this returns."""
    with log.open("w") as file:
        print("+", *command, file=file, flush=True)
        process = subprocess.Popen(
            command, cwd=ROOT, env=dict(environment), stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            # First as a user would stop it, so that servers and Ray end with it.
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            return None
        except BaseException:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
            raise


# What the stages print


def cells(log: str, first: str) -> list[str]:
    """The cells of the last table row that begins with `first`. Raises IndexError without one."""
    rows = [line.strip("| ").split(" | ") for line in log.splitlines() if line.startswith(f"| {first} |")]
    return [cell.strip(" |") for cell in rows[-1]]


def judge_parity(log: str, out: Path) -> tuple[str, Numbers]:
    result = [line for line in log.splitlines() if line.startswith("RESULT ")][-1]
    return "", json.loads(result.removeprefix("RESULT "))


def judge_sync(log: str, out: Path) -> tuple[str, Numbers]:
    _, seconds, _, paused, *_ = cells(log, "p2p")
    megabytes = float(re.findall(r"p2p: (\d+) MB", log)[0])
    return "", {"sync, s": float(seconds), "pause, s": float(paused), "MB": megabytes}


def judge_trainer(log: str, out: Path) -> tuple[str, Numbers]:
    row = [line for line in log.splitlines() if line.startswith("| megasync, ")][-1]
    seconds, rate = row.strip("| ").split(" | ")[1:3]
    numbers = {"step, s": float(seconds), "tokens/s": float(rate)}
    if utilisation := re.findall(r"model FLOPs utilisation: ([\d.]+)%", log):
        numbers["MFU, %"] = float(utilisation[0])
    return "", numbers


def judge_generation(log: str, out: Path) -> tuple[str, Numbers]:
    rows = [
        line.strip("| ").split(" | ") for line in log.splitlines() if re.match(r"\| \d+ \| \d+ \| megasync \|", line)
    ]
    return "", {f"tokens/s at {row[0]}": float(row[4]) for row in rows} | {"of raw calls": float(rows[-1][6])}


def judge_run(name: str, learns: bool) -> Judge:
    """Judges the run directory of `name`: every step trained and published, parity held, and the score not fallen."""

    def judge(log: str, out: Path) -> tuple[str, Numbers]:
        folder = max((out / "runs").glob(f"{name}-*/metrics.jsonl"), key=lambda path: path.stat().st_mtime)
        rows = [json.loads(line) for line in folder.read_text().splitlines()]
        steps = [row for row in rows if "time/step" in row]
        # The first steps compile kernels and fill the buffer.
        steady = steps[len(steps) // 3 :]

        def middle(key: str) -> float:
            return statistics.median(row[key] for row in steady if key in row)

        numbers = {
            "steps": float(len(steps)),
            "step, s": middle("time/step"),
            "sync, s": middle("time/sync"),
            "pause, s": middle("sync/pause_seconds"),
            "sampled tokens/s": middle("rollout/tokens_per_second"),
            "trained tokens/s": middle("train/tokens_per_second"),
            "parity": max(row["sync/parity"] for row in steps if "sync/parity" in row),
        }
        scores = [row["eval/score"] for row in rows if "eval/score" in row]
        if scores:
            numbers |= {"score before": scores[0], "score after": scores[-1]}
        bad = [
            row["step"]
            for row in steps
            if not math.isfinite(row.get("train/loss", math.nan)) or row.get("train/skipped")
        ]
        if bad:
            return f"steps {bad} were skipped or have a loss that is not finite", numbers
        if learns and scores[-1] <= scores[0]:
            return f"the score did not rise: {scores[0]:.3f} to {scores[-1]:.3f}", numbers
        return "", numbers

    return judge


# The ladder


@dataclass(frozen=True)
class Machine:
    """The machine under the ladder: `gpus` are the names of the GPUs; none with `device` cpu."""

    device: str
    gpus: tuple[str, ...] = ()

    @property
    def shared(self) -> bool:
        """Whether trainer rank and server share one device."""
        return len(self.gpus) < 2

    @property
    def peak(self) -> float | None:
        """TFLOP/s of one GPU; None if its name is unknown."""
        return next((float(peak) for part, peak in PEAKS.items() if self.gpus and part in self.gpus[0]), None)

    def overrides(self) -> list[str]:
        """Changes of the configuration that place its trainer and servers here."""
        if self.shared:
            return []
        half = len(self.gpus) // 2
        return [
            "cluster.share_device=false",
            f"cluster.devices_per_node={len(self.gpus)}",
            f"trainer.data_parallel={half}",
            f"rollout.servers={len(self.gpus) - half}",
            "sync.transport=p2p",
        ]


def ladder(machine: Machine, out: Path, models: Path) -> list[Stage]:
    """The stages for a machine. `models` is where the models are, or are created."""
    python, cpu = sys.executable, machine.device == "cpu"
    cli = [python, "-m", "megasync"]
    real, shape = models / ("digits" if cpu else "smollm2"), models / ("tiny-random" if cpu else "qwen3-0.6b-random")
    config, dtype = ("configs/quickstart.yaml", "float32") if cpu else ("configs/first_gpu.yaml", "bfloat16")
    shared = [f"run_root={out / 'runs'}", "observe.live=false", "checkpoint.every_steps=0", "checkpoint.export=false"]
    shared += ["sync.parity_every=1"]
    if cpu:
        # The quickstart, placed as configs/first_gpu.yaml is placed on one GPU.
        shared += [
            "cluster.share_device=true",
            "cluster.devices_per_node=1",
            "sync.transport=disk",
            "rollout.servers=1",
        ]
        shared += ["trainer.tensor_parallel=1", "schedule.total_steps=3", "eval.every_steps=3", "eval.samples=16"]
    shared += machine.overrides()
    task = [config, f"model.path={real}", *shared]
    size = [config, f"model.path={shape}", *([] if cpu else ["model.config=null"]), *shared]
    size += ["eval=null", "schedule.stop_at_score=null", "name=first-gpu-0.6b"]
    if not cpu:
        # Fits beside a server into 24 GB: `megasync plan` shows the sum.
        size += ["trainer.recompute=full", "rollout.max_total_tokens=32768", "schedule.total_steps=15"]
        size += ["rollout.sampling.max_new_tokens=256", "rollout.sampling.stop=[]"]
    turns = [*task, "name=first-gpu-in-turns", "cluster.share_device=false", "cluster.colocate=true"]
    turns += ["schedule.max_staleness=0", "sync.transport=p2p", "schedule.total_steps=3"]
    turns += ["eval=null", "schedule.stop_at_score=null"]
    turns += [f"rollout.servers={max(1, len(machine.gpus) // 2)}"]
    graphs = [*size, "name=first-gpu-graphs", "trainer.recompute=null", "trainer.tokens_per_microbatch=2048"]
    graphs += ["trainer.pad_microbatches=true", "trainer.cuda_graphs=true"]
    peak = [] if cpu or machine.peak is None else ["--peak", f"{machine.peak:g}"]
    trained = [*size, "schedule.groups_per_step=2", "schedule.samples_per_group=4"] if cpu else size
    create = [*cli, "fetch", real.name, "--out", str(real)]
    random = [str(out / "shape.json"), str(shape), "--tokenizer", str(real), "--dtype", dtype]
    return [
        Stage("doctor", "is the machine ready, and does every GPU answer?", [*cli, "doctor"], judge_doctor(machine)),
        Stage("model", f"can {real.name} be created?", create),
        Stage("random-model", f"can {shape.name} be created?", [*script("random_model"), *random]),
        Stage("rehearse", "do layers, groups and memory agree with the plan?", [*cli, "rehearse", *task]),
        Stage(
            "parity",
            "does the trainer compute what Hugging Face computes?",
            [*script("parity"), str(real), "--device", machine.device, "--dtype", dtype, *(["--tokens", "48"] * cpu)],
            judge_parity,
        ),
        Stage(
            "sync",
            "does a process send weights into a server's device?",
            [
                *script("sync"),
                # The benchmark asks for a longer context than the tiny model has.
                *(["--random-gb", "0.05"] if cpu else [str(real)]),
                "--tensor",
                "1",
                "--device",
                machine.device,
                "--dtype",
                dtype,
                "--rounds",
                "3",
            ],
            judge_sync,
            # NCCL refuses two processes on one GPU without it.
            {"NCCL_MULTI_RANK_GPU_ENABLE": "1"} if machine.shared and not cpu else {},
        ),
        Stage("run", f"does {real.name} train?", [*cli, "train", *task], judge_run("*", not cpu)),
        Stage("run-0.6b", f"does {shape.name} train?", [*cli, "train", *size], judge_run("first-gpu-0.6b", False)),
        Stage(
            "run-in-turns",
            "can ranks and servers use the same devices in turns?",
            [*cli, "train", *turns],
            judge_run("first-gpu-in-turns", False),
        ),
        Stage(
            "run-graphs",
            "do layers train as CUDA graphs?",
            [*cli, "train", *graphs],
            judge_run("first-gpu-graphs", False),
            skip="CUDA graphs need a GPU" if cpu else "",
        ),
        Stage(
            "trainer",
            "how fast is a training step?",
            [
                *script("trainer"),
                *trained,
                "--prompt",
                "64",
                "--response",
                "16" if cpu else "256",
                *peak,
                "--steps",
                "3",
            ],
            judge_trainer,
        ),
        Stage(
            "generation",
            "how fast do servers generate?",
            [
                *(*script("generation"), str(shape), "--device", machine.device, "--dtype", dtype, "--servers", "1"),
                *("--concurrency", "16", *(["64"] * (not cpu)), "--tokens", "16" if cpu else "256"),
                *("--requests", "32" if cpu else "256", "--repeats", "2"),
            ],
            judge_generation,
        ),
    ]


def script(name: str) -> list[str]:
    return [sys.executable, f"benchmarks/{name}.py"]


def judge_doctor(machine: Machine) -> Judge:
    def judge(log: str, out: Path) -> tuple[str, Numbers]:
        seen = len(re.findall(r"^\w+ +gpu \d", log, re.MULTILINE))
        if machine.device == "cuda" and seen < max(1, len(machine.gpus)):
            return f"megasync doctor sees {seen} GPU(s), nvidia-smi {len(machine.gpus)}; see doctor.log", {}
        return "", {"GPUs": float(seen)}

    return judge


# What is sent back


def write_results(out: Path, machine: Machine, results: Sequence[Result], versions: Mapping[str, str]) -> None:
    """results.json, report.md and the archive beside the folder."""
    data = {"machine": asdict(machine), "versions": dict(versions), "stages": [asdict(result) for result in results]}
    (out / "results.json").write_text(json.dumps(data, indent=1))
    (out / "report.md").write_text(report(machine, results, versions))
    with tarfile.open(archive_of(out), "w:gz") as archive:
        for path in sorted(out.rglob("*")):
            if path.is_file() and path.stat().st_size <= ARCHIVED_BYTES:
                archive.add(path, path.relative_to(out.parent))


def archive_of(out: Path) -> Path:
    return out.parent / f"{out.name}.tar.gz"


def report(machine: Machine, results: Sequence[Result], versions: Mapping[str, str]) -> str:
    """A table for docs/benchmarks_gpu.md."""
    where = (
        f"{len(machine.gpus)} x {machine.gpus[0]}" if machine.gpus else "a CPU, as a rehearsal: no figure is a GPU's"
    )
    lines = [f"`bash launch/first_gpu.sh` on {where}; {', '.join(f'{name} {v}' for name, v in versions.items())}.", ""]
    lines += ["| stage | verdict | s | measured |", "|---|---|---|---|"]
    for result in results:
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in result.numbers.items())
        detail = "; ".join(filter(None, [result.why.replace("|", "/"), numbers]))
        lines.append(f"| {result.name} | {result.verdict} | {result.seconds:.0f} | {detail} |")
    return "\n".join(lines) + "\n"


def find_machine(device: str) -> Machine:
    if device == "cpu":
        return Machine("cpu")
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        names = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError) as error:
        sys.exit(f"first_gpu: nvidia-smi does not answer ({error}); install NVIDIA's driver, or rehearse: --device cpu")
    if not names:
        sys.exit("first_gpu: nvidia-smi lists no GPU; check the driver and the container's --gpus option")
    return Machine("cuda", tuple(name.strip() for name in names))


def find_versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    names = ("torch", "megatron-core", "transformer-engine", "sglang", "ray", "nvidia-nccl-cu13")
    versions = {"python": sys.version.split()[0]}
    for name in names:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "none"
    return versions


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path, default=Path(time.strftime("first-gpu-%Y%m%d-%H%M%S")))
    parser.add_argument("--models", type=Path, default=ROOT / "models", help="folder of the models; default: models")
    parser.add_argument("--only", nargs="+", default=[], metavar="STAGE")
    parser.add_argument("--skip", nargs="+", default=[], metavar="STAGE")
    arguments = parser.parse_args()
    machine, out = find_machine(arguments.device), arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    shape = json.loads(SHAPE.read_text())
    (out / "shape.json").write_text(json.dumps(shape | TINY if machine.device == "cpu" else shape))
    stages = ladder(machine, out, arguments.models.resolve())
    names = [stage.name for stage in stages]
    if unknown := {*arguments.only, *arguments.skip} - set(names):
        parser.error(f"unknown stage {', '.join(sorted(unknown))}; the stages are {', '.join(names)}")
    stages = [
        stage
        for stage in stages
        if stage.name not in arguments.skip and (not arguments.only or stage.name in arguments.only)
    ]
    results: list[Result] = []
    try:
        results = climb(stages, out, execute)
    finally:
        write_results(out, machine, results, find_versions())
    print(f"\n{(out / 'report.md').read_text()}")
    failed = next((result for result in results if result.verdict == "failed"), None)
    if failed is not None:
        print(f"first_gpu: {failed.name} failed: {failed.why}\nfirst_gpu: send back {archive_of(out)}")
    else:
        print(f"first_gpu: all stages passed; send back {archive_of(out)} for docs/benchmarks_gpu.md")
    return int(failed is not None)


if __name__ == "__main__":
    sys.exit(main())
