"""Every kind of sandbox does what the protocol says."""

import asyncio
import contextlib
import io
import json
import os
import shutil
import subprocess
import tarfile

import pytest
from waits import until

from megasync.errors import ConfigError, DataError, SandboxError
from megasync.sandboxes import Limits, Spec, local
from megasync.sandboxes.bubblewrap import _problem
from megasync.sandboxes.kinds import starter_of
from megasync.sandboxes.local import Isolation
from megasync.sandboxes.pool import WarmPool
from megasync.sandboxes.protocol import archive_of
from megasync.sandboxes.remote import SandboxServer

pytestmark = pytest.mark.processes
LIMITS = Limits(cpu_seconds=5, wall_seconds=20, memory_mb=512, disk_mb=8, files=200, processes=32)
# Stands for the client of Docker and Podman: a container is a folder, entered without isolation.
# Its /work is a folder of the test. As the real programs, it enters no container before `run` has made it, and no
# working folder that is missing.
FAKE = """#!/bin/sh
case "$1" in
run) echo "$@" >> {place}/calls; mkdir -p {place}/box; exec cat ;;
exec) [ -d {place}/box ] || exit 1 ;;
esac
echo "$@" >> {place}/calls
case "$1" in
exec) shift 2; while :; do case "$1" in
    --workdir) cd {place}/box$2 || exit 9; shift 2 ;;
    --env) export "$2"; shift 2 ;;
    *) break ;; esac; done; shift; [ "$PWD" = "/" ] && cd {place}/box
    exec "$1" "$2" "$(printf %s "$3" | sed 's# /work# {place}/box/work#g')" ;;
diff) echo 'C /work'; echo 'A /work/a' ;;
esac
"""


@contextlib.asynccontextmanager
async def started(kind, monkeypatch, tmp_path, **options):
    """A starter of a kind, with what it needs around it."""
    server = None
    if kind == "plain":
        monkeypatch.setattr(local, "isolation", lambda: Isolation("", os.geteuid() == 0))
        monkeypatch.setattr(local.tempfile, "tempdir", "/tmp")
    if kind == "bubblewrap" and (problem := await asyncio.to_thread(_problem)):
        pytest.skip(problem)
    name = {"plain": "process"}.get(kind, kind)
    if kind == "remote":
        server = SandboxServer(starter_of(Spec(limits=LIMITS)), "key")
        await server.start()
        options |= {"url": server.url, "key": "key"}
    limits = {} if kind == "remote" else {n: getattr(LIMITS, n) for n in Limits.__slots__}
    starter = starter_of({"kind": name, "limits": limits, **options})
    try:
        yield starter
    finally:
        await starter.close()
        if server is not None:
            await server.close()


LOCAL = ("process", "plain", "bubblewrap", "remote")


@pytest.mark.parametrize("kind", LOCAL)
async def test_commands_share_files_and_processes_until_they_are_killed(kind, monkeypatch, tmp_path):
    async with started(kind, monkeypatch, tmp_path) as starter, await starter.start() as sandbox:
        await sandbox.put({"folder/say.sh": b"#!/bin/sh\ncat; echo $WORD $PWD >&2; exit 3\n"})
        result = await sandbox.run("./say.sh", stdin="told\n", cwd="folder", env={"WORD": "word"})
        assert (result.code, result.stdout) == (3, "told\n")
        assert result.stderr.startswith("word /") and result.stderr.endswith("/work/folder\n")
        assert (await sandbox.run(["python3", "-c", "print(6 * 7)"])).stdout == "42\n"
        # What a command leaves keeps running, and ends with `kill`.
        await sandbox.run("(while :; do echo x >> grows; sleep 0.01; done) & sleep 0.1")
        first = await sandbox.get("grows")
        await sandbox.run(f"until [ $(wc -c < grows) -gt {len(first)} ]; do sleep 0.01; done")
        await sandbox.kill()
        assert await sandbox.get("grows") == await sandbox.get("grows")


@pytest.mark.parametrize("kind", LOCAL)
async def test_a_fork_has_the_files_and_not_the_processes(kind, monkeypatch, tmp_path):
    async with started(kind, monkeypatch, tmp_path) as starter, await starter.start() as sandbox:
        links = "ln -s a b; ln a c; mkfifo d; touch e; chmod 000 e; echo there > /tmp/kept || true"
        await sandbox.run(f"echo one > a; mkdir -p f/g; echo two > f/g/h; {links}; sleep 600 &")
        # Fails where the sandbox sees the machine's own /tmp.
        async with await starter.start(await sandbox.snapshot()) as fork:
            await sandbox.run("echo changed > a")
            assert (await fork.run("cat a b c f/g/h; ls")).stdout == "one\none\none\ntwo\na\nb\nc\nf\n"
            if kind != "plain":
                assert (await fork.run("cat /tmp/kept; cat /proc/[0-9]*/comm")).stdout.count("sleep") == 0
            await fork.run("echo mine > a")
            assert await sandbox.get("a") == b"changed\n"
    if kind == "plain":
        os.unlink("/tmp/kept")


@pytest.mark.parametrize("kind", LOCAL)
async def test_limits_hold_and_what_exceeds_them_is_killed(kind, monkeypatch, tmp_path):
    async with started(kind, monkeypatch, tmp_path) as starter, await starter.start() as sandbox:
        late = await sandbox.run("echo early; setsid sleep 600 & sleep 600", seconds=0.5)
        assert (late.code, late.stdout) == (None, "early\n")
        flood = await sandbox.run("head -c 100000 /dev/zero", output_bytes=1000)
        assert (len(flood.stdout), flood.cut) == (1000, True)
        memory = await sandbox.run(["python3", "-c", "bytearray(10**9)"])
        assert "MemoryError" in memory.stderr
        if kind != "plain":
            disk = await sandbox.run("head -c 20000000 /dev/zero > big")
            assert "No space left" in disk.stderr
            await sandbox.run("rm big")
        forks = "import os, time\nfor n in range(64):\n    if not os.fork(): time.sleep(600)"
        assert "BlockingIOError" in (await sandbox.run(["python3", "-c", forks])).stderr
        await sandbox.kill()
        assert (await sandbox.run("echo fine")).stdout == "fine\n"


@pytest.mark.parametrize("kind", LOCAL)
async def test_what_cannot_be_written_or_read_is_an_error_of_the_caller(kind, monkeypatch, tmp_path):
    async with started(kind, monkeypatch, tmp_path) as starter, await starter.start() as sandbox:
        await sandbox.run("mkfifo pipe; head -c 100 /dev/zero > file")
        for path, problem in (("none", "No such file"), ("pipe", "neither a file nor a folder")):
            with pytest.raises(DataError, match=problem):
                await sandbox.get(path)
        # Without namespaces, /proc is a folder like any other.
        for target in ("file/x", *(() if kind == "plain" else ("/proc/x",))):
            with pytest.raises(DataError, match="cannot be written"):
                await sandbox.put({"a": b""}, target)
        assert (await sandbox.run(["no-such-program"])).code == 127
        with tarfile.open(fileobj=io.BytesIO(await sandbox.get(""))) as tar:
            assert sorted(tar.getnames()) == ["file"]


@pytest.mark.parametrize("kind", LOCAL)
async def test_orders_to_a_stopped_sandbox_fail_as_the_infrastructure(kind, monkeypatch, tmp_path):
    async with started(kind, monkeypatch, tmp_path) as starter:
        sandbox = await starter.start()
        await sandbox.stop()
        await sandbox.stop()
        with pytest.raises(SandboxError, match="stopped"):
            await sandbox.run("true")


async def test_a_cancelled_command_stops_the_sandbox(monkeypatch, tmp_path):
    async with started("process", monkeypatch, tmp_path) as starter, await starter.start() as sandbox:
        run = asyncio.create_task(sandbox.run("sleep 600"))
        await asyncio.sleep(0)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        with pytest.raises(SandboxError, match="stopped"):
            await sandbox.run("true")


async def test_a_sandbox_begins_with_its_folder_and_sees_what_is_visible(monkeypatch, tmp_path):
    (tmp_path / "repository" / "src").mkdir(parents=True)
    (tmp_path / "repository" / "src" / "a.py").write_text("print('a')")
    (tmp_path / "shown").mkdir()
    (tmp_path / "shown" / "b").write_text("b")
    options = {"folder": str(tmp_path / "repository"), "visible": [str(tmp_path / "shown")]}
    for kind in ("process", "bubblewrap"):
        async with started(kind, monkeypatch, tmp_path, **options) as starter, await starter.start() as sandbox:
            command = f"python3 src/a.py; cat {tmp_path}/shown/b; touch {tmp_path}/shown/c; ls {tmp_path}"
            result = await sandbox.run(command)
            assert result.stdout == "a\nbshown\n"
            assert "Read-only" in result.stderr
            await sandbox.run("rm -r src")
    assert (tmp_path / "repository" / "src" / "a.py").exists()


async def test_a_root_folder_is_an_image(monkeypatch, tmp_path):
    image, shell = tmp_path / "image", shutil.which("sh")
    linked = await asyncio.to_thread(subprocess.check_output, ["ldd", shell], text=True)
    for path in (shell, *(word for word in linked.split() if word.startswith("/"))):
        target = image / ("bin/sh" if path == shell else path[1:])
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    (image / "srv").mkdir()
    (image / "srv" / "here").write_text("of the image\n")
    async with started("process", monkeypatch, tmp_path, image=str(image)) as starter, await starter.start() as sandbox:
        assert (await sandbox.run("read x < /srv/here; echo $x; > /srv/x")).stdout == "of the image\n"
        assert (await sandbox.run(["python3"])).code == 127


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"kind": "vm"}, "unknown sandbox kind 'vm'; kinds: process, bubblewrap"),
        ({"memory": 5}, "no option 'memory'; it has kind, image"),
        ({"limits": {"memory_gb": 1}}, "memory_gb"),
        ({"limits": {"memory_mb": 0}}, "memory_mb=0 must be an integer above 0"),
        ({"limits": 5}, "must be a mapping"),
        ({"kind": "docker"}, "docker needs an image"),
        ({"kind": "apptainer", "image": "a.sif"}, "apptainer is not on the PATH"),
        ({"kind": "remote"}, "needs url and key"),
        ({"kind": "bubblewrap", "image": "/"}, "takes no image"),
        ({"kind": 5}, "kind=5 of a sandbox must be text"),
        ({"image": "python:3.12"}, "is not a root folder"),
        ({"folder": "/nowhere"}, "is not a folder of this machine"),
        ({"visible": ["/nowhere"]}, "must be an absolute path that exists"),
        ({"image": "/", "visible": ["/usr/share"]}, "the image has a folder of that name"),
        ({"kind": "remote", "url": "http://x", "key": "k", "network": True}, "are those of its server"),
    ],
)
def test_a_wrong_option_is_refused(options, problem, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=problem):
        starter_of(options)


async def test_a_pool_hands_out_each_sandbox_once_and_keeps_itself_full(monkeypatch, tmp_path):
    async with started("process", monkeypatch, tmp_path) as starter:
        pool = WarmPool(starter, 2)
        await pool.fill()
        assert pool.warm == 2
        handed = [await pool.start() for _ in range(3)]
        await pool.fill()
        assert (pool.warm, len({*map(id, handed)})) == (2, 3)
        fork = await pool.start(archive_of({"work/a": b"there"}))
        assert await fork.get("a") == b"there"
        await asyncio.gather(*(sandbox.stop() for sandbox in [*handed, fork]))
        await pool.close()


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """A stand-in for a container program on the PATH, which notes how it is called."""
    for name in ("docker", "podman"):
        (tmp_path / name).write_text(FAKE.format(place=tmp_path))
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


@pytest.mark.parametrize("kind", ["docker", "podman"])
async def test_containers_are_driven_by_command_lines(kind, fake, monkeypatch):
    options = {"image": "python:3.12", "visible": ["/usr"]}
    async with started(kind, monkeypatch, fake, **options) as starter, await starter.start() as sandbox:
        # The stand-in would kill this process.
        monkeypatch.setattr(sandbox, "kill", lambda: asyncio.sleep(0))
        assert (await sandbox.run("echo $WORD; exit 3", env={"WORD": "word"})).stdout == "word\n"
        assert (await sandbox.run("sleep 600", seconds=0.2)).code is None
        await sandbox.put({"a": b"there"}, str(fake / "box" / "work"))
        assert await sandbox.get(str(fake / "box" / "work" / "a")) == b"there"
    calls = (fake / "calls").read_text().splitlines()
    assert calls[0].startswith("run --interactive --rm --name megasync-")
    assert "--network none --memory 512m --pids-limit 32 " in calls[0]
    assert calls[0].endswith("--volume /usr:/usr:ro --entrypoint cat python:3.12")
    assert calls[-1].startswith("rm --force megasync-")


async def test_a_container_starts_with_the_content_of_a_folder(fake, monkeypatch, tmp_path):
    (tmp_path / "content").mkdir()
    (tmp_path / "content" / "a").write_text("there\n")
    options = {"image": "python:3.12", "folder": str(tmp_path / "content")}
    async with started("docker", monkeypatch, fake, **options) as starter, await starter.start() as sandbox:
        assert (await sandbox.run("cat a")).stdout == "there\n"


async def test_a_container_that_does_not_start_says_why(fake, monkeypatch):
    (fake / "docker").write_text("#!/bin/sh\necho 'no daemon at the socket' >&2; exit 1\n")
    async with started("docker", monkeypatch, fake, image="python:3.12") as starter:
        with pytest.raises(SandboxError, match="docker starts no container of python:3.12: no daemon at the socket"):
            await starter.start()


async def test_a_server_refuses_strangers_and_what_it_does_not_know(monkeypatch, tmp_path):
    import aiohttp

    starter = starter_of(Spec(limits=LIMITS))
    server = SandboxServer(starter, "key", most=1)
    await server.start()
    sandbox = await starter.start()
    lent = server.lent(sandbox)
    url, key = lent.__enter__()
    own, other = ({"Authorization": f"Bearer {value}"} for value in (key, "guess"))
    async with aiohttp.ClientSession() as session:

        async def status(method, address, headers, **options):
            async with session.request(method, address, headers=headers, **options) as answer:
                return answer.status, (await answer.json())["error"]

        # Its own key opens nothing else.
        for address, headers in (
            (f"{server.url}/sandboxes", own),
            (f"{url}/run", other),
            (f"{url}/run", {}),
            (f"{server.url}/sandboxes/unknown/run", own),
        ):
            assert (await status("POST", address, headers, json={"command": "true"}))[0] == 401
        for order, problem in (
            ([], "JSON object"),
            ({}, "needs a command"),
            ({"command": 5}, "no command=5"),
            ({"command": "true", "user": "root"}, "no user='root'"),
            ({"command": "true", "seconds": float("nan")}, "seconds=nan must be above 0"),
            ({"command": "true", "output_bytes": 2**40}, "at most"),
        ):
            code, said = await status("POST", f"{url}/run", own, json=order)
            assert code == 400 and problem in said
        full = {"Authorization": "Bearer key"}
        assert (await status("POST", f"{server.url}/sandboxes", full)) == (
            503,
            "all 1 sandboxes of this server are in use; stop some, or raise --most",
        )
        async with session.post(f"{url}/run", headers=own, json={"command": ["echo", "hi"]}) as answer:
            assert json.loads(await answer.text())["stdout"] == "hi\n"
        lent.__exit__(None, None, None)
        assert (await status("POST", f"{url}/run", full, json={"command": "true"}))[0] == 404
    await sandbox.stop()
    await server.close()


async def test_a_sandbox_of_a_lost_client_is_stopped():
    server = SandboxServer(starter_of(Spec(limits=LIMITS)), "key", lease=0.05)
    await server.start()
    client = starter_of(Spec("remote", url=server.url, key="key"))
    sandbox = await client.start()
    (leased,) = server._leased.values()
    async with asyncio.timeout(60):
        await until(lambda: leased.sandbox._ending is not None)
    with pytest.raises(SandboxError, match="or the sandbox was stopped"):
        await sandbox.run("true")
    await sandbox.stop()
    await client.close()
    await server.close()
