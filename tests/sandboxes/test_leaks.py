"""Nothing outlives a sandbox, and no sandbox outlives its owner or its keeper, however those end."""

import asyncio
import gc
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from processes import family, gone, lives
from sandboxes import of_sandboxes
from waits import until

from megasync.errors import SandboxError
from megasync.sandboxes import Spec, local
from megasync.sandboxes.bubblewrap import BubblewrapStarter, _problem
from megasync.sandboxes.local import Isolation, Keeper, LocalStarter

pytestmark = pytest.mark.processes
KINDS = ("process", "plain", "bubblewrap")
# Leaves processes in sessions of their own, deep folders, a file that nobody may read, and open descriptors.
MESS = """
mkdir -p a/b; touch x; chmod 000 x a/b; mkfifo p; exec 9> held
for i in 1 2 3; do setsid sh -c 'trap "" TERM; while :; do sleep 600; done' & done
"""


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def starter_of(kind, monkeypatch):
    if kind == "plain":
        monkeypatch.setattr(local, "isolation", lambda: Isolation("", False))
    if kind == "bubblewrap" and (problem := _problem()):
        pytest.skip(problem)
    return (BubblewrapStarter if kind == "bubblewrap" else LocalStarter)(Spec())


def held(keeper, folder):
    """What this process and the keeper hold: descriptors, and mounts of the folder. Others may mount what they like."""
    return [
        found
        for pid in (os.getpid(), keeper)
        for found in (
            len(os.listdir(f"/proc/{pid}/fd")),
            [line for line in Path(f"/proc/{pid}/mounts").read_text().splitlines() if str(folder) in line],
        )
    ]


@pytest.mark.parametrize("kind", KINDS)
async def test_many_starts_and_stops_leave_nothing(kind, monkeypatch, folder):
    starter = starter_of(kind, monkeypatch)
    await (await starter.start()).stop()
    keeper = Keeper.shared().process.pid
    # Not what other tests have left to the garbage collector.
    gc.collect()
    before = held(keeper, folder)

    async def once(number):
        sandbox = await starter.start()
        if number % 3:
            await sandbox.run(MESS)
        if number % 5:
            await sandbox.stop()
        else:
            # Nobody may stop one whose task is cancelled in the middle of an order.
            run = asyncio.create_task(sandbox.run("sleep 600"))
            await asyncio.sleep(0)
            run.cancel()
            await asyncio.wait({run})

    for first in range(0, 24, 8):
        await asyncio.gather(*map(once, range(first, first + 8)))
    assert held(keeper, folder) == before
    assert list(folder.iterdir()) == []
    assert gone(lambda: of_sandboxes(folder))


OWNER = """
import asyncio, tempfile
from megasync.sandboxes import Spec, local
from megasync.sandboxes.bubblewrap import BubblewrapStarter
from megasync.sandboxes.local import Isolation, Keeper, LocalStarter
tempfile.tempdir = {folder!r}
if {kind!r} == "plain":
    local.isolation = lambda: Isolation("", False)

async def main():
    starter = (BubblewrapStarter if {kind!r} == "bubblewrap" else LocalStarter)(Spec())
    sandboxes = [await starter.start() for _ in range(3)]
    for sandbox in sandboxes:
        await sandbox.run({mess!r})
    print(Keeper.shared().process.pid, flush=True)
    await sandboxes[0].run("sleep 600")

asyncio.run(main())
"""


def begun(script):
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("victim", ["owner", "keeper", "both"])
async def test_the_death_of_owner_or_keeper_ends_all_sandboxes(victim, kind, monkeypatch, folder):
    starter_of(kind, monkeypatch)
    script = OWNER.format(folder=str(folder), kind=kind, mess=MESS)
    owner = await asyncio.to_thread(begun, script)
    keeper = int(await asyncio.to_thread(owner.stdout.readline))
    started = [process for process in family(owner.pid) if process.pid not in (owner.pid, keeper)]
    # Of each sandbox its first process, and three loops.
    assert len(started) >= 12
    for pid in {"owner": [owner.pid], "keeper": [keeper], "both": [owner.pid, keeper]}[victim]:
        os.kill(pid, 9)
    assert gone(lambda: started)
    # Its command fails when the keeper dies, and the script with it.
    assert await asyncio.to_thread(owner.wait, 60) != 0
    owner.stdout.close()
    async with asyncio.timeout(300):
        await until(lambda: not lives(keeper))
        if victim != "owner":
            local.sweep()
        await until(lambda: list(folder.iterdir()) == [])


@pytest.mark.parametrize("kind", KINDS)
async def test_a_new_keeper_takes_the_place_of_a_dead_one(kind, monkeypatch, folder):
    starter = starter_of(kind, monkeypatch)
    lost = await starter.start()
    keeper = Keeper.shared().process
    keeper.kill()
    keeper.wait()
    with pytest.raises(SandboxError):
        await lost.run("true")
    async with await starter.start() as sandbox:
        assert (await sandbox.run("echo fine")).stdout == "fine\n"
    await lost.stop()
    assert list(folder.iterdir()) == []
