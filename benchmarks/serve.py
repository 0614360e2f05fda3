"""Speed of `megasync serve` with one tenant and several, against SkyRL's server and against megasync's own loop.

    python3.12 -m venv .venv-skyrl && .venv-skyrl/bin/pip install "skyrl[tinker,jax]==0.4.0" aiohttp uv      # once
    megasync fetch digits
    python benchmarks/serve.py [--shape small] [--rounds 3] [--steps 10] [--sides megasync skyrl] [KEY=VALUE ...]
    python benchmarks/serve.py --tenants 8 --sides loop megasync

Both servers get the same recipe (`serve_recipe.py`), each from a client that it speaks: SkyRL from the one in its
environment, megasync from the one in its own. A side is started and stopped in each round, the sides take turns, and
each has all cores. SkyRL computes with all of them, each of megasync's processes with `--threads`. Both compute in
float32. The first steps of a recipe are not counted: SkyRL compiles in them. It has room for the adapters that are used
and no more, since it computes with all of them, and its largest batch is that of a step.

Times are medians over the counted steps of all rounds, ratios are taken within a round. `CPU` are seconds of all
processes of a server, which other work on the machine changes little; an idle SGLang server also uses some. `memory` is
the proportional set size of these processes after the last step, which counts shared pages once.

`--sides megasync loop` also compares with `megasync train`, with as many prompts, responses, ranks and servers, and
synchronous as the recipe is. Its responses end with the end token, so in this comparison the recipe's do too; at a
learning rate of 1e-6 both have the lengths of the untrained model.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import asynchrony
import psutil

HERE = Path(__file__).parent
ROOT = HERE.parent
RECIPE = HERE / "serve_recipe.py"
PEER = ROOT / ".venv-skyrl"
WARM_UP = 2
RANK = 32
# Maximum seconds until a server answers, and between two steps.
PATIENCE = 600.0
# Seconds that a server gets to end.
END_SECONDS = 60.0
# In the environment of all processes of a side, by which they are found.
MARK = "MEGASYNC_BENCHMARK"
PHASES = ("save", "sample", "train", "update")


@dataclass(frozen=True)
class Shape:
    """The sizes of a step: a group of ``samples`` responses for each of ``prompts``; lengths in tokens."""

    model: str
    vocabulary: int
    context: int
    prompts: int
    samples: int
    prompt: int
    response: int

    @property
    def sequences(self) -> int:
        return self.prompts * self.samples


SHAPES = {
    "small": Shape("models/digits", 15, 256, prompts=16, samples=8, prompt=8, response=16),
    # Passes of which several tenants' share a microbatch.
    "tiny": Shape("models/digits", 15, 256, prompts=4, samples=4, prompt=8, response=16),
    # About 8,000 tokens a step.
    "large": Shape("models/digits", 15, 256, prompts=32, samples=8, prompt=16, response=16),
    "smollm2": Shape("models/smollm2", 49152, 512, prompts=4, samples=4, prompt=32, response=16),
}


@dataclass
class Run:
    """The counted steps of a recipe, the CPU seconds of the server in a step, and its bytes after the last one."""

    rows: list[dict[str, Any]]
    cpu: list[float] = field(default_factory=list)
    memory: int = 0

    def median(self, key: str) -> float:
        return statistics.median(row[key] for row in self.rows)

    def step(self) -> float:
        return statistics.median(row["end"] - row["start"] for row in self.rows)

    def rate(self, tokens: str, phase: str) -> float:
        return statistics.median(row[tokens] / row[phase] for row in self.rows)

    def tokens_per_second(self) -> float:
        """Tokens sampled and trained per second while all tenants have counted steps; a step's spread over its time."""
        tenants = {row["tenant"] for row in self.rows}
        start = max(min(row["start"] for row in self.rows if row["tenant"] == one) for one in tenants)
        end = min(max(row["end"] for row in self.rows if row["tenant"] == one) for one in tenants)
        if start >= end:
            raise SystemExit("no time at which all tenants have counted steps: raise --steps")
        return sum(
            (row["sampled"] + row["trained"])
            * max(0.0, min(end, row["end"]) - max(start, row["start"]))
            / (row["end"] - row["start"])
            for row in self.rows
        ) / (end - start)


class Processes:
    """The processes of a side, also those that left its process tree."""

    def __init__(self) -> None:
        self._mark = secrets.token_hex(8)
        self.environment = os.environ | {MARK: self._mark}

    def alive(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def cpu_seconds(self) -> float:
        total = 0.0
        for process in self.alive():
            with suppress(psutil.Error):
                total += sum(process.cpu_times()[:2])
        return total

    def memory(self) -> int:
        total = 0
        for process in self.alive():
            with suppress(psutil.Error):
                total += process.memory_full_info().pss
        return total

    def end(self, first: subprocess.Popen[bytes]) -> None:
        """Asks the first process to end, and kills what is left after a while."""
        first.terminate()
        with suppress(subprocess.TimeoutExpired):
            first.wait(END_SECONDS)
        for process in self.alive():
            with suppress(psutil.Error):
                process.kill()
        first.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Side:
    """A server, and the interpreter whose client speaks to it."""

    def __init__(self, name: str, shape: Shape, given: argparse.Namespace) -> None:
        self._name, self._shape, self._given = name, shape, given
        self._keys = [f"tml-{secrets.token_hex(16)}" for _ in range(given.tenants)]
        self._processes = Processes()
        self._url = ""
        self._python = given.client if name == "megasync" else given.peer / "bin" / "python"

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Starts the server, and leaves no process of it."""
        with tempfile.TemporaryDirectory() as folder:
            port, log = free_port(), Path(folder) / "output"
            self._url = f"http://127.0.0.1:{port}"
            start = self._megasync if self._name == "megasync" else self._skyrl
            command, variables = start(Path(folder), port)
            with log.open("wb") as output:
                server = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=self._processes.environment | variables,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            try:
                self._wait(server)
                yield
            except BaseException:
                print(log.read_text()[-4000:], file=sys.stderr)
                raise
            finally:
                self._processes.end(server)

    def _megasync(self, folder: Path, port: int) -> tuple[list[str | Path], dict[str, str]]:
        keys = folder / "keys"
        keys.touch(0o600)
        keys.write_text("".join(f"tenant{number} {key}\n" for number, key in enumerate(self._keys)))
        own = (f"run_root={folder}", f"serve.port={port}", f"serve.keys={keys}", *sizes(self._shape))
        return [
            sys.executable, "-m", "megasync", "serve", "configs/serve_quickstart.yaml", *own, *self._given.overrides
        ], {"OMP_NUM_THREADS": str(self._given.threads)}  # fmt: skip

    def _skyrl(self, folder: Path, port: int) -> tuple[list[str | Path], dict[str, str]]:
        peer, shape = self._given.peer.absolute(), self._shape
        # Places for the base model and for the recipe's.
        options = {
            "max_lora_adapters": 2,
            "max_lora_rank": RANK,
            "train_micro_batch_size": shape.sequences,
            "sample_max_num_sequences": shape.sequences,
        } | self._given.peer_options
        # It starts its engine with the `uv run` that started it.
        command = [peer / "bin" / "uv", "run", "--no-project", "--active", "-m", "skyrl.tinker.api"]
        command += ["--host", "127.0.0.1", "--port", str(port), "--base-model", shape.model, "--backend", "jax"]
        command += ["--backend-config", json.dumps(options), "--database-url", f"sqlite:///{folder / 'tinker.db'}"]
        command += ["--checkpoints-base", str(folder / "checkpoints")]
        path = f"{peer / 'bin'}{os.pathsep}{os.environ['PATH']}"
        return command, {
            "VIRTUAL_ENV": str(peer), "PATH": path, "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "UV_OFFLINE": "1"
        }  # fmt: skip

    def _wait(self, server: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + PATIENCE
        while True:
            with suppress(OSError), urllib.request.urlopen(f"{self._url}/api/v1/healthz", timeout=5):
                return
            if server.poll() is not None:
                raise SystemExit(f"{self._name} ended with {server.returncode} before it served")
            if time.monotonic() > deadline:
                raise SystemExit(f"{self._name} does not serve after {PATIENCE:g} s")
            time.sleep(0.5)

    def recipe(self, tenants: int, **changed: Any) -> Run:
        """Runs the recipe with some tenants, and returns its counted steps."""
        steps = WARM_UP + self._given.steps
        own = {"url": self._url, "keys": self._keys[:tenants], "rank": RANK, "steps": steps, "lr": 1e-3, "stop": []}
        argument = json.dumps(asdict(self._shape) | own | changed)
        script = subprocess.Popen(
            [self._python, RECIPE, argument],
            stdout=subprocess.PIPE,
            env=os.environ | {"TINKER_TELEMETRY": "0"},
            text=True,
        )
        lines: queue.Queue[str] = queue.Queue()

        def read() -> None:
            for line in script.stdout or ():
                lines.put(line)
            lines.put("")

        threading.Thread(target=read, daemon=True).start()
        found, used = [], []
        try:
            for _ in range(steps * tenants):
                if not (line := lines.get(timeout=PATIENCE)):
                    raise SystemExit(f"the recipe ended with {script.wait()}")
                found.append(json.loads(line))
                used.append(self._processes.cpu_seconds())
            memory = self._processes.memory()
        except queue.Empty:
            raise SystemExit(f"{self._name}: no step in {PATIENCE:g} s") from None
        finally:
            script.kill()
            script.wait()
        skipped = WARM_UP * tenants
        cpu = [end - start for start, end in zip(used[skipped - 1 :], used[skipped:], strict=False)]
        return Run([row for row in found if row["step"] >= WARM_UP], cpu, memory)


def sizes(shape: Shape) -> list[str]:
    """Overrides that give `megasync serve` and `megasync train` the sizes of a shape."""
    return [
        f"model.path={shape.model}",
        "model.dtype=float32",
        f"trainer.lora.rank={RANK}",
        f"rollout.context_length={shape.context}",
        f"rollout.max_running_requests={shape.sequences}",
        f"rollout.max_total_tokens={2 * shape.sequences * (shape.prompt + shape.response)}",
    ]


def own_loop(shape: Shape, steps: int) -> float:
    """Median seconds of a step of `megasync train` with the sizes of a shape."""
    digits = f"{{kind: digits, source: increment, size: 4096, options: {{length: {shape.prompt - 2}}}}}"
    rows = asynchrony.run(
        "configs/quickstart.yaml",
        0,
        steps,
        False,
        [
            *sizes(shape),
            f"data.train={digits}",
            f"data.prompt.max_tokens={shape.prompt}",
            f"schedule.groups_per_step={shape.prompts}",
            f"schedule.samples_per_group={shape.samples}",
            "schedule.stop_at_score=null",
            f"rollout.sampling.max_new_tokens={shape.response}",
            "rollout.servers=1",
            "trainer.tensor_parallel=1",
            "trainer.optimizer.lr=1e-6",
        ],
    )
    return statistics.median(row["time/step"] for row in rows)


def spread(values: Sequence[float], digits: int = 2) -> str:
    """The median and the range of some values."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def report(found: dict[str, list[Run]]) -> None:
    print(f"| | s a step | {' | '.join(f'{name}, s' for name in PHASES)} | forward_backward, tokens/s "
          "| sampling, tokens/s | CPU, s a step | memory, GB | reward |")  # fmt: skip
    print(f"|---|{'---|' * (6 + len(PHASES))}")
    for name, runs in found.items():
        if not runs:
            continue
        rows = [row for run in runs for row in run.rows]
        whole = Run(rows)
        phases = " | ".join(f"{whole.median(phase):.3f}" for phase in PHASES)
        last = max(row["step"] for row in rows)
        ends = [statistics.mean(row["reward"] for row in rows if row["step"] == step) for step in (WARM_UP, last)]
        print(
            f"| {name} | {spread([run.step() for run in runs])} | {phases} | {whole.rate('trained', 'train'):,.0f} "
            f"| {whole.rate('sampled', 'sample'):,.0f} | {statistics.median(s for run in runs for s in run.cpu):.2f} "
            f"| {max(run.memory for run in runs) / 1e9:.2f} | {ends[0]:.2f} to {ends[1]:.2f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="changes to configs/serve_quickstart.yaml")
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="counted steps of a recipe")
    parser.add_argument("--sides", nargs="+", choices=["megasync", "skyrl", "loop"], default=["megasync", "skyrl"])
    parser.add_argument("--tenants", type=int, default=1, help="compare so many with one, on megasync")
    parser.add_argument("--peer", type=Path, default=PEER, help="environment of SkyRL")
    parser.add_argument("--threads", type=int, default=1, help="of each of megasync's ranks and servers")
    parser.add_argument("--peer-options", type=json.loads, default={}, help="JSON: options of SkyRL's backend")
    parser.add_argument("--client", type=Path, default=Path(sys.executable), help="interpreter with megasync's client")
    given = parser.parse_intermixed_args()
    # Without this handler, SIGTERM would end the benchmark but not the servers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    if "loop" in given.sides and given.shape != "small":
        parser.error(f"--shape {given.shape}: the own loop's digit task has prompts as short as those of small")
    shape = SHAPES[given.shape]
    alone: dict[str, list[Run]] = {name: [] for name in given.sides if name != "loop"}
    together: list[float] = []
    against_loop: list[float] = []
    for _ in range(given.rounds):
        for name, runs in alone.items():
            side = Side(name, shape, given)
            with side.serving():
                runs.append(side.recipe(1))
                if name == "megasync" and given.tenants > 1:
                    many = side.recipe(given.tenants)
                    together.append(many.tokens_per_second() / runs[-1].tokens_per_second())
                if name == "megasync" and "loop" in given.sides:
                    against_loop.append(1 / side.recipe(1, stop=None, lr=1e-6).step())
            print(f"{name}: {runs[-1].step():.2f} s a step", file=sys.stderr, flush=True)
        if against_loop:
            against_loop[-1] *= own_loop(shape, given.steps)
    report(alone)
    if len(alone) == 2 and all(alone.values()):
        pairs = list(zip(alone["skyrl"], alone["megasync"], strict=True))
        print(
            f"\nmegasync's speed / SkyRL's: step {spread([theirs.step() / ours.step() for theirs, ours in pairs])}",
            end="",
        )
        for label, tokens, phase in (("forward_backward", "trained", "train"), ("sampling", "sampled", "sample")):
            ratios = [ours.rate(tokens, phase) / theirs.rate(tokens, phase) for theirs, ours in pairs]
            print(f", {label} {spread(ratios)}", end="")
        cpu = [statistics.median(theirs.cpu) / statistics.median(ours.cpu) for theirs, ours in pairs]
        print(f", CPU {spread(cpu)}")
    if together:
        print(f"megasync: {given.tenants} tenants' tokens/s in sum / one tenant's: {spread(together)}")
    if against_loop:
        print(f"megasync: one tenant's speed / the own loop's: {spread(against_loop)}")


if __name__ == "__main__":
    main()
