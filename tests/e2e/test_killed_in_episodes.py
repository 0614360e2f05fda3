"""Runs in which whatever an episode needs is killed in the middle of one: each sample is trained once, nothing is left.

The servers' own logs say what was sampled, and the episodes' records which of them came to their end, with rewards that
no other has. So a trained trajectory names its episode, and every token its place in a server's answer.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import psutil
import pytest
import traps
from processes import command_line, gone
from run_metrics import rows_of

from megasync.buffer.groups import TRAINED
from megasync.data.digits import CHARACTERS, END_TOKEN
from megasync.observe import rollouts
from megasync.serving.process import free_port
from megasync.watch.recorded import RolloutIndex

pytestmark = [pytest.mark.real, pytest.mark.extra, pytest.mark.timeout(900)]

SUPPORT = Path(traps.__file__).parent
STEP_GROUPS, SAMPLES = 2, 2
AGENTS = {"agent": "trapped_agent:play"}
ENVIRONMENTS = {
    "environment": {
        "kind": "openenv",
        "options": {"command": "uvicorn trapped_environment:app --host {host} --port {port}", "folder": str(SUPPORT)},
        "max_turns": 3,
        "pool": 8,
    }
}

# A server's answer: ids and log-probs.
Answer = tuple[tuple[int, np.float32], ...]


def worker_of(process: psutil.Process) -> psutil.Process:
    """The rollout worker in which a process of an episode is, or below which."""
    return next(each for each in (process, *process.parents()) if "RolloutWorker" in command_line(each))


def keeper_of(process: psutil.Process) -> psutil.Process:
    """The process that owns the sandboxes of a worker or driver."""
    return next(child for child in process.children() if "keeper.py" in command_line(child))


def sandbox_of(process: psutil.Process) -> psutil.Process:
    """The first process of the sandbox in which the trapped episode waits."""
    keeper = keeper_of(process)
    while True:
        for below in keeper.children(recursive=True):
            if traps.folder() in command_line(below):
                return next(each for each in (below, *below.parents()) if each.ppid() == keeper.pid)


# The processes of MCP servers and of the environment server say themselves who they are.
VICTIMS = {"worker": worker_of, "keeper": keeper_of, "sandbox": sandbox_of}
VICTIMS |= dict.fromkeys(("tools", "remote_tools", "environment"), lambda process: process)


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The run's folder for temporary files: a short path, because sockets are in it."""
    with tempfile.TemporaryDirectory(prefix="traps-", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


@pytest.fixture
def model(digits_model: Path, tmp_path: Path) -> Path:
    """The digits model with a template that joins messages as they are."""
    folder = shutil.copytree(digits_model, tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    return folder


@pytest.fixture
def remote_tools(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An MCP server that does not belong to the run, whose host starts it again whenever it ends."""
    port = free_port()
    monkeypatch.setenv("REMOTE_TOOLS_URL", f"http://127.0.0.1:{port}/mcp")
    # Both end with the process that starts them, also if that is killed.
    again = 'while :; do setpriv --pdeathsig KILL "$0" "$1" "$2"; done'
    host_program = ["setpriv", "--pdeathsig", "KILL", "bash", "-c", again]
    program = [sys.executable, str(SUPPORT / "mcp_program.py"), str(port)]
    # Without the run's variables, by which what a run leaves behind is found.
    clean = {"PATH": os.environ["PATH"]}
    host = subprocess.Popen([*host_program, *program], env=clean, start_new_session=True)
    yield
    os.killpg(host.pid, signal.SIGKILL)
    host.wait()


@pytest.mark.parametrize(
    ("workers", "plays", "kills"),
    [
        (2, AGENTS, ["worker", "remote_tools", "keeper", "tools", "sandbox"]),
        (0, AGENTS, ["tools", "keeper", "remote_tools"]),
        (2, ENVIRONMENTS, ["environment", "worker", "environment"]),
    ],
    ids=["agents in workers", "agents in the driver", "environment servers"],
)
def test_each_sample_is_trained_once_and_nothing_is_left(
    miniature, launch, the_run_dir, model, temporary, tmp_path, monkeypatch, request, workers, plays, kills
) -> None:
    if plays is AGENTS:
        pytest.importorskip("mcp")
        request.getfixturevalue("remote_tools")
    elif not (Path(sys.prefix) / "openenv").exists():
        pytest.skip("needs openenv in an environment of its own: megasync install openenv")
    folder, sampled = tmp_path / "traps", tmp_path / "sampled"
    folder.mkdir()
    monkeypatch.setenv(traps.FOLDER, str(folder))
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    config = miniature(
        model={"path": str(model), "dtype": "float32"},
        data={"eval": None, "prompt": {"format": "chat" if plays is ENVIRONMENTS else "raw", "max_tokens": 16}},
        eval=None,
        schedule={"total_steps": 1000, "groups_per_step": STEP_GROUPS, "samples_per_group": SAMPLES},
        rollout={
            "servers": 1,
            "workers": workers,
            "server_args": {
                "--log-requests": True,
                "--log-requests-level": 3,
                "--log-requests-format": "json",
                "--log-requests-target": str(sampled),
            },
            # The log has a line for each answer.
            "stream_interval": 0,
            "save_partials_seconds": 0,
            **plays,
        },
        trainer={"tensor_parallel": 1},
        checkpoint={"every_steps": 2, "export": False},
    )
    run = launch("train", config)

    def looks() -> None:
        run.family()
        assert run.process.poll() is None, run.output

    for kind in kills:
        run.wait_for(f"step {run.last_step() + 1}/")
        inside = psutil.Process(traps.caught(kind, looks))
        VICTIMS[kind](inside).kill()
    run.wait_for(f"step {run.last_step() + 1}/")
    traps.caught("driver", looks)
    last = run.last_step() + 3
    # A resumed run counts anew. The samples of a lost worker are played by others and not counted.
    failures = max(row.get("rollout/failures_infrastructure", 0.0) for row in rows_of(the_run_dir()))
    assert failures >= len(kills) - kills.count("worker")
    run.process.kill()
    assert run.survivors() == []
    run = launch("resume", the_run_dir(), f"schedule.total_steps={last}")
    assert run.wait() == 0, run.output
    assert run.survivors() == []

    rows = rows_of(the_run_dir())
    assert all(row.get("rollout/groups_dropped", 0.0) == row.get("rollout/samples_failed", 0.0) == 0.0 for row in rows)
    check_trained(the_run_dir(), last, sampled)
    # Ports and sockets without a file end with their processes.
    assert gone(lambda: [p for p in psutil.process_iter() if is_of(p, folder) or is_of(p, temporary)])
    # Ray keeps logs, and kills ranks, in which wandb has made empty folders. At the death of the driver it also kills
    # the supervisor of the server, which would have removed the server's folder.
    left = [path.name for path in temporary.iterdir() if path.name != "ray" and "wandb" not in path.name]
    assert len(left) <= 1 and all(name.startswith("megasync-sglang-") for name in left)
    assert not [line for line in Path("/proc/self/mounts").read_text().splitlines() if str(temporary) in line]


def is_of(process: psutil.Process, folder: Path) -> bool:
    """Whether a process has the folder in its command line or its environment."""
    try:
        return str(folder) in command_line(process) or str(folder) in "\n".join(process.environ().values())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def check_trained(run_dir: Path, steps: int, sampled: Path) -> None:
    """Each admitted sample is in one step, with the reward of one episode, and with what a server sampled for it."""
    with closing(sqlite3.connect(run_dir / "ledger.db")) as database:
        groups = {uid: (state, step) for uid, state, step in database.execute("SELECT uid, state, step FROM groups")}
    assert {state for state, _ in groups.values()} <= {state.value for state in TRAINED}
    assert len(groups) == steps * STEP_GROUPS
    index = RolloutIndex(run_dir)
    # Not `index.rows`, where a response that is trained again takes the place of the first one.
    rows = [row for row in index.update() if not row.dropped]
    # A step after the last checkpoint was trained again when the run was resumed, by a process with files of its own.
    newest: dict[int, int] = {}
    for row in rows:
        newest[row.step] = max(newest.get(row.step, 0), _number(row))
    episodes = defaultdict(list)
    for row in rows:
        if _number(row) == newest[row.step]:
            assert row.step == groups[row.uid][1]
            episodes[row.uid, row.reward].append(row)
    finished, left = traps.finished(), _answers_of_servers(sampled)
    # Two episodes of one reward, or one of a reward that none has got, are among the things that must not be.
    assert len({reward for _, reward in episodes}) == len(episodes)
    assert Counter(uid for uid, _ in episodes) == dict.fromkeys(groups, SAMPLES)
    for (uid, reward), parts in episodes.items():
        assert reward in finished, f"{uid} is trained with the reward {reward}, which no episode has got"
        in_order = sorted(parts, key=lambda row: row.sample)
        answers = [answer for row in in_order for answer in _trained_answers(index.read(row))]
        assert [_text(answer) for answer in answers] == finished[reward]["answers"]
        assert all(_taken(answer, left) for answer in answers), f"no server has sampled {answers}, or not so often"


def _number(row: rollouts.IndexRow) -> int:
    return int(row.pair.rpartition("-")[2])


def _trained_answers(response: rollouts.Response) -> list[Answer]:
    """The trained tokens, each stretch of them by itself: other tokens are between the answers of an episode."""
    mask = np.concatenate([[0], response.mask.expand(), [0]])
    ends = np.flatnonzero(np.diff(mask))
    return [
        tuple(zip(response.ids[start:end].tolist(), response.logprobs[start:end], strict=True))
        for start, end in zip(ends[::2], ends[1::2], strict=True)
    ]


def _text(answer: Answer) -> str:
    return "".join([*CHARACTERS, END_TOKEN][token] for token, _ in answer).removesuffix(END_TOKEN)


def _answers_of_servers(folder: Path) -> Counter[Answer]:
    found = Counter[Answer]()
    for file in folder.iterdir():
        for line in file.read_text().splitlines():
            event = json.loads(line.partition("] ")[2])
            if event["event"] == "request.finished":
                tokens = event["out"]["meta_info"].get("output_token_logprobs") or ()
                found[tuple((token, np.float32(logprob)) for logprob, token, *_ in tokens)] += 1
    return found


def _taken(answer: Sequence, left: Counter[Answer]) -> bool:
    """Takes an answer out of those of servers: one of them, or several, if it went on after it was interrupted."""
    for end in range(len(answer), 0, -1):
        if left[answer[:end]] > 0:
            left[answer[:end]] -= 1
            if end == len(answer) or _taken(answer[end:], left):
                return True
            left[answer[:end]] += 1
    return False
