"""Every kind of sandbox does what the protocol says."""

import asyncio
import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile

import pytest
from containers import image, output
from mutations import SEEDS, try_mutations
from processes import family
from waits import deadlines, until

from megasync.errors import ConfigError, DataError, SandboxError
from megasync.sandboxes import Limits, Spec, containers, local
from megasync.sandboxes.bubblewrap import _problem
from megasync.sandboxes.kinds import starter_of
from megasync.sandboxes.local import Isolation
from megasync.sandboxes.pool import WarmPool
from megasync.sandboxes.protocol import archive_of
from megasync.sandboxes.remote import SandboxServer

pytestmark = pytest.mark.processes
LIMITS = Limits(cpu_seconds=5, wall_seconds=20, memory_mb=512, disk_mb=8, files=200, processes=32)
# Stands for the client of Docker and Podman: a container is a folder, entered without isolation.
# Its /work is a folder of the test. The kernel holds the limits that are in the file `held`.
FAKE = """#!/bin/sh
echo "$@" | head -n 1 >> {place}/calls
case "$1" in
run) mkdir -p {place}/box/work; echo $(cat {place}/held); while read -r order; do echo; done ;;
exec) shift; while :; do case "$1" in
    --interactive) shift ;;
    --env) export "$2"; shift 2 ;;
    *) break ;; esac; done
    cd {place}/box; wrapper=$4 cwd=$6; shift 6
    for word; do shift; set -- "$@" "$(printf %s "$word" | sed 's#/work#{place}/box/work#g')"; done
    exec sh -c "$wrapper" sh "$(printf %s "$cwd" | sed 's#^/work#{place}/box/work#')" "$@" ;;
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
    if kind in CONTAINERS and "image" not in options:
        options["image"] = await asyncio.to_thread(image, kind)
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


CONTAINERS = ("docker", "podman")
KINDS = ("process", "plain", "bubblewrap", "remote", *CONTAINERS)


@pytest.mark.parametrize("kind", KINDS)
async def test_commands_share_files_and_processes_until_they_are_killed(kind, monkeypatch, tmp_path):
    async with started(kind, monkeypatch, tmp_path) as starter, await starter.start() as sandbox:
        await sandbox.put({"folder/say.sh": b"#!/bin/sh\ncat; echo $WORD $PWD >&2; exit 3\n"})
        result = await sandbox.run("./say.sh", stdin="told\n", cwd="folder", env={"WORD": "word"})
        assert (result.code, result.stdout) == (3, "told\n")
        assert result.stderr.startswith("word /") and result.stderr.endswith("/work/folder\n")
        assert (await sandbox.run(["expr", "6", "*", "7"])).stdout == "42\n"
        # What a command leaves keeps running, and ends with `kill`.
        await sandbox.run("(while :; do echo x >> grows; sleep 0.01; done) & sleep 0.1")
        first = await sandbox.get("grows")
        await sandbox.run(f"until [ $(wc -c < grows) -gt {len(first)} ]; do sleep 0.01; done")
        await sandbox.kill()
        assert await sandbox.get("grows") == await sandbox.get("grows")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_fork_has_the_files_and_not_the_processes(kind, monkeypatch, tmp_path):
    async with started(kind, monkeypatch, tmp_path) as starter, await starter.start() as sandbox:
        links = "ln -s a b; ln a c; mkfifo d; touch e; chmod 000 e; echo there > /tmp/kept || true"
        await sandbox.run(f"echo one > a; mkdir -p f/g; echo two > f/g/h; {links}; sleep 600 &")
        # Fails where the sandbox sees the machine's own /tmp.
        async with await starter.start(await sandbox.snapshot()) as fork:
            await sandbox.run("echo changed > a")
            rest = "a\nb\nc\nd\ne\nf\n" if kind in CONTAINERS else "a\nb\nc\nf\n"
            assert (await fork.run("cat a b c f/g/h; ls")).stdout == f"one\none\none\ntwo\n{rest}"
            if kind != "plain":
                assert (await fork.run("cat /tmp/kept; cat /proc/[0-9]*/comm")).stdout.count("sleep") == 0
            await fork.run("echo mine > a")
            assert await sandbox.get("a") == b"changed\n"
    if kind == "plain":
        os.unlink("/tmp/kept")


@pytest.mark.parametrize("kind", KINDS)
async def test_limits_hold_and_what_exceeds_them_is_killed(kind, monkeypatch, tmp_path):
    async with started(kind, monkeypatch, tmp_path) as starter, await starter.start() as sandbox:
        for seconds in deadlines():
            late = await sandbox.run("echo early; setsid sleep 600 & sleep 600", seconds=seconds)
            assert late.code is None
            if late.stdout:
                break
        assert late.stdout == "early\n"
        flood = await sandbox.run("head -c 100000 /dev/zero", output_bytes=1000)
        assert (len(flood.stdout), flood.cut) == (1000, True)
        if kind not in ("plain", *CONTAINERS):
            disk = await sandbox.run("head -c 20000000 /dev/zero > big")
            assert "No space left" in disk.stderr
            await sandbox.run("rm big")
        if kind in CONTAINERS:
            # The kernel kills what exceeds the memory of all.
            assert (
                await sandbox.run("head -c 900000000 /dev/zero | tail -c 900000000 | wc -c; exit 5")
            ).stdout == "0\n"
            assert (await sandbox.run("exec tail -c 900000000 /dev/zero")).code == 137
            many = await sandbox.run("for n in $(seq 64); do sleep 600 & done")
            assert "can't fork" in many.stderr
            # Its processes are all that there may be.
            assert (await sandbox.run(["cat"], stdin="there")).stdout == "there"
        else:
            memory = await sandbox.run(["python3", "-c", "bytearray(10**9)"])
            assert "MemoryError" in memory.stderr
            forks = "import os, time\nfor n in range(64):\n    if not os.fork(): time.sleep(600)"
            assert "BlockingIOError" in (await sandbox.run(["python3", "-c", forks])).stderr
        await sandbox.kill()
        assert (await sandbox.run("echo fine")).stdout == "fine\n"


@pytest.mark.parametrize("kind", KINDS)
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
        assert (await sandbox.run("true", cwd="none")).code == 127
        assert (await sandbox.run("echo a\0b")).code == 127
        assert (await sandbox.run("#" * 2**18)).code == 127
        with tarfile.open(fileobj=io.BytesIO(await sandbox.get(""))) as tar:
            names = {os.path.normpath(name) for name in tar.getnames()} - {"."}
            assert names == ({"file", "pipe"} if kind in CONTAINERS else {"file"})


@pytest.mark.parametrize("kind", KINDS)
async def test_orders_to_a_stopped_sandbox_fail_as_the_infrastructure(kind, monkeypatch, tmp_path):
    async with started(kind, monkeypatch, tmp_path) as starter:
        sandbox = await starter.start()
        await sandbox.stop()
        await sandbox.stop()
        with pytest.raises(SandboxError, match="stopped"):
            await sandbox.run("true")


@pytest.mark.parametrize("kind", ["process", *CONTAINERS])
async def test_a_cancelled_command_stops_the_sandbox(kind, monkeypatch, tmp_path):
    async with started(kind, monkeypatch, tmp_path) as starter, await starter.start() as sandbox:
        run = asyncio.create_task(sandbox.run("sleep 600"))
        await asyncio.sleep(0)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        with pytest.raises(SandboxError, match="stopped"):
            await sandbox.run("true")


@pytest.mark.parametrize("kind", ["process", "bubblewrap", *CONTAINERS])
async def test_a_sandbox_begins_with_its_folder_and_sees_what_is_visible(kind, monkeypatch, tmp_path):
    (tmp_path / "repository" / "src").mkdir(parents=True)
    (tmp_path / "repository" / "src" / "a.sh").write_text("echo a")
    (tmp_path / "shown").mkdir()
    (tmp_path / "shown" / "b").write_text("b")
    options = {"folder": str(tmp_path / "repository"), "visible": [str(tmp_path / "shown")]}
    async with started(kind, monkeypatch, tmp_path, **options) as starter, await starter.start() as sandbox:
        command = f"sh src/a.sh; cat {tmp_path}/shown/b; touch {tmp_path}/shown/c; ls {tmp_path}"
        result = await sandbox.run(command)
        assert result.stdout == "a\nbshown\n"
        assert "Read-only" in result.stderr
        await sandbox.run("rm -r src")
        # What is visible is no part of it.
        async with await starter.start(await sandbox.snapshot()) as fork:
            assert (await fork.run(f"ls; cat {tmp_path}/shown/b")).stdout == "b"
    assert (tmp_path / "repository" / "src" / "a.sh").exists()


def make_root(image):
    """A root folder with a shell and what it needs."""
    shell = shutil.which("sh")
    for path in (
        shell,
        *(word for word in subprocess.check_output(["ldd", shell], text=True).split() if word[0] == "/"),
    ):
        target = image / ("bin/sh" if path == shell else path[1:])
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    (image / "srv").mkdir()
    (image / "srv" / "here").write_text("of the image\n")


@pytest.mark.parametrize("kind", ["process", "apptainer"])
async def test_a_root_folder_is_an_image(kind, monkeypatch, tmp_path):
    image = str(tmp_path / "image")
    await asyncio.to_thread(make_root, tmp_path / "image")
    if kind == "apptainer":
        # A stand-in: it copies a root folder.
        program = tmp_path / "apptainer"
        program.write_text(
            f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nsleep 0.1; cp -r "${{4#docker-archive:}}" "$3"\n'
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        image = f"docker-archive:{image}"
        async with started(kind, monkeypatch, tmp_path, image="/nowhere") as starter:
            with pytest.raises(SandboxError, match="apptainer build of /nowhere: cp: cannot stat '/nowhere'"):
                await starter.start()
    async with started(kind, monkeypatch, tmp_path, image=image) as starter:
        for sandbox in await asyncio.gather(starter.start(), starter.start()):
            async with sandbox:
                assert (await sandbox.run("read x < /srv/here; echo $x; > /srv/x")).stdout == "of the image\n"
                assert (await sandbox.run(["python3"])).code == 127
    if kind == "apptainer":
        async with started(kind, monkeypatch, tmp_path, image=image) as starter, await starter.start():
            pass
        built = [call for call in (tmp_path / "calls").read_text().splitlines() if call.endswith(image)]
        assert len(built) == 1 and built[0].startswith("build --sandbox ")
        assert len([*(tmp_path / "cache" / "megasync" / "images").iterdir()]) == 1


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
        ({"visible": "/usr"}, "visible='/usr' of a sandbox must be a list of paths"),
        ({"visible": [3]}, "must be a list of paths"),
        ({"network": "no"}, "network='no' of a sandbox must be true or false"),
        ({"visible": ["/nowhere"]}, "must be an absolute path that exists"),
        ({"image": "/", "visible": ["/usr/share"]}, "the image has a folder of that name"),
        ({"kind": "remote", "url": "http://x", "key": "k", "network": True}, "are those of its server"),
    ],
)
def test_a_wrong_option_is_refused(options, problem, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=problem):
        starter_of(options)


OPTIONS = {
    **{"kind": "process", "image": None, "folder": None, "visible": ["/usr"], "network": False, "url": None},
    "limits": {"cpu_seconds": 4, "wall_seconds": 10.0, "memory_mb": 512, "disk_mb": 64, "files": 9, "processes": 64},
}


@pytest.mark.parametrize("seeds", SEEDS)
def test_any_options_are_taken_or_refused(seeds):
    starter_of(OPTIONS)
    assert try_mutations(starter_of, OPTIONS, seeds, ConfigError)


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
    for name in CONTAINERS:
        (tmp_path / name).write_text(FAKE.format(place=tmp_path))
        (tmp_path / name).chmod(0o755)
    (tmp_path / "held").write_text(f"{512 * 2**20} 32")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


@pytest.mark.parametrize("kind", CONTAINERS)
async def test_containers_are_driven_by_command_lines(kind, fake, monkeypatch):
    (fake / "content").mkdir()
    (fake / "content" / "a").write_text("there\n")
    options = {"image": "--privileged", "visible": ["/usr"], "folder": str(fake / "content")}
    async with started(kind, monkeypatch, fake, **options) as starter, await starter.start() as sandbox:
        assert (await sandbox.run("cat a; echo $WORD; exit 3", env={"WORD": "word"})).stdout == "there\nword\n"
        await sandbox.put({"b": b"put"})
        assert await sandbox.get("b") == b"put"
    started_with = (fake / "calls").read_text().splitlines()[0]
    assert started_with.startswith("run --interactive --rm --name megasync-")
    assert "--network none --memory 512m --pids-limit 32 " in started_with
    assert " --volume /usr:/usr:ro --user 0 --entrypoint /bin/sh -- --privileged -c " in started_with


@pytest.mark.parametrize(
    ("held", "lost"),
    [
        ("max max", "memory_mb=512, processes=32"),
        # As rootless Podman answers with control groups v1: the limits of the machine.
        ("9223372036854771712 max", "memory_mb=512, processes=32"),
        (f"{512 * 2**20} 96365", "processes=32"),
    ],
)
async def test_a_container_without_the_limits_that_were_asked_for_is_refused(held, lost, fake, monkeypatch):
    (fake / "held").write_text(held)
    async with started("podman", monkeypatch, fake, image="a") as starter:
        with pytest.raises(ConfigError, match=f"podman starts containers here without the limits {lost}.*Delegate"):
            await starter.start()


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ("no daemon at the socket", "docker starts no container of python:3.12: no daemon at the socket$"),
        (
            "crun: the requested cgroup controller `memory` is not available",
            "not available. The kernel's control groups",
        ),
    ],
)
async def test_a_container_that_does_not_start_says_why(said, problem, fake, monkeypatch):
    (fake / "docker").write_text(f"#!/bin/sh\necho '{said}' >&2; exit 125\n")
    async with started("docker", monkeypatch, fake, image="python:3.12") as starter:
        with pytest.raises(SandboxError, match=problem):
            await starter.start()


def test_a_list_of_changes_is_read_as_names():
    listed = "C /srv\nA /srv/a b\nD /srv/c\nA /srv/two\nlines\nC /etc/hosts\nA /shown/x\nA /showns\n"
    expected = (b"./srv\0./srv/a b\0./showns\0", b"./srv/c\0")
    assert containers._changes(listed.removesuffix("\n"), ("/etc/hosts", "/shown")) == expected
    assert containers._changes("", ()) == (b"", b"")
    assert containers._removals(containers._one_archive(b"", b"")) == (b"", b"")
    # What was made anew is cleared first.
    made = archive_of({"srv/c": b""}) + archive_of({"srv/d": b""})
    first, last = containers._removals(containers._one_archive(made, b"./srv/c\0./srv/e\0"))
    assert first == b"./srv/c\0./srv/d\0./.sandbox-deleted\0./srv/c\0" and last == b"./srv/e\0./.sandbox-deleted\0"


@pytest.mark.parametrize("kind", CONTAINERS)
async def test_a_fork_lacks_what_was_deleted_and_replaced_in_the_image(kind, monkeypatch, tmp_path):
    async with started(kind, monkeypatch, tmp_path) as starter, await starter.start() as sandbox:
        made = "rm /bin/wget; rm -r /srv/folder; echo file > /srv/folder; rm -r /srv/other; mkdir /srv/other"
        await sandbox.run(f"{made}; echo 1 > '/srv/other/a\nb'; echo 2 > '/srv/other/c\\nd'; chown 5 /srv/folder")
        async with await starter.start(await sandbox.snapshot()) as fork:
            seen = await fork.run("ls /bin/wget; cat /srv/folder /srv/other/*; ls /srv/other; stat -c %u /srv/folder")
            assert seen.stdout == "file\n2\nc\\nd\n5\n"
            # A fork of the fork, with archives that are longer than one command.
            await fork.run("cd /srv/other; for n in $(seq 1200); do : > $(printf %0120d $n); done")
            async with await starter.start(await fork.snapshot()) as last:
                assert (await last.run("ls /srv/other | wc -l; ls /bin/wget /.sandbox*")).stdout == "1201\n"


@pytest.mark.parametrize("kind", CONTAINERS)
async def test_programs_are_the_user_of_the_image_and_may_write_what_is_put(kind, monkeypatch, tmp_path):
    made = await asyncio.to_thread(image, kind, "1000:1000")
    async with started(kind, monkeypatch, tmp_path, image=made) as starter, await starter.start() as sandbox:
        await sandbox.put({"a": b"mine\n"}, "/tests/b")
        assert (await sandbox.run("id -u; cat a; echo yours >> a; > /root", cwd="/tests/b")).stdout == "1000\nmine\n"
        assert await sandbox.get("/tests/b/a") == b"mine\nyours\n"
        await sandbox.run("sleep 600 & echo kept > '/work/c\\nd'")
        await sandbox.kill()
        assert "sleep" not in (await sandbox.run("ps")).stdout
        async with await starter.start(await sandbox.snapshot()) as fork:
            kept = await fork.run("cat /work/c*; echo more >> /tests/b/a; cat /tests/b/a")
            assert kept.stdout == "kept\nmine\nyours\nmore\n"


@pytest.mark.parametrize("kind", CONTAINERS)
async def test_a_container_that_is_removed_fails_as_the_infrastructure(kind, monkeypatch, tmp_path):
    async with started(kind, monkeypatch, tmp_path) as starter:
        for before in (True, False):
            sandbox = await starter.start()
            run = asyncio.create_task(sandbox.run("sleep 600")) if not before else None
            if run is not None:
                while "sleep" not in await output(kind, "top", sandbox._name):
                    await asyncio.sleep(0.05)
            await output(kind, "rm", "--force", sandbox._name)
            with pytest.raises(SandboxError):
                await (run or sandbox.run("exit 125"))
            with pytest.raises(SandboxError, match="stopped"):
                await sandbox.run("true")


@pytest.mark.parametrize("kind", CONTAINERS)
async def test_what_programs_do_to_the_shell_is_theirs(kind, monkeypatch, tmp_path):
    async with started(kind, monkeypatch, tmp_path) as starter:
        for order in (
            "rm /bin/sh",
            "rm /bin/sh; echo '#!/bin/false' > /bin/sh; chmod +x /bin/sh",
            "kill -9 -1; kill -9 1; kill -1 1",
        ):
            async with await starter.start() as sandbox:
                await sandbox.run(order)
                assert (await sandbox.run("true")).code == (0 if "kill" in order else 127)


@pytest.mark.parametrize("kind", CONTAINERS)
async def test_programs_cannot_keep_an_order_from_the_first_process(kind, monkeypatch, tmp_path):
    async with started(kind, monkeypatch, tmp_path) as starter, await starter.start() as sandbox:
        # They answer it themselves, or flood its answers.
        await sandbox.run("for n in $(seq 8); do (exec cat /proc/1/fd/0 > /proc/1/fd/1) & done; yes > /proc/1/fd/1 &")
        await sandbox.kill()
        seen = (await sandbox.run("ps")).stdout
        # Zombies, which the first process reaps once its answers are read, are in brackets.
        assert "PID" in seen and "cat /proc" not in seen and " yes\n" not in seen


@pytest.mark.parametrize("kind", CONTAINERS)
async def test_many_containers_start_at_once_and_leave_nothing(kind, monkeypatch, tmp_path):
    async with started(kind, monkeypatch, tmp_path) as starter:

        async def once(number):
            async with await starter.start() as sandbox:
                assert (await sandbox.run(f"sleep 600 & echo {number}")).stdout == f"{number}\n"
                return sandbox._name

        names = await asyncio.gather(*map(once, range(20)))
        listed = await output(kind, "ps", "--all", "--format", "{{.Names}}")
        assert len({*names}) == 20 and not {*names} & {*listed.split()}
        # A name that is taken ends nobody else's.
        monkeypatch.setattr("secrets.token_hex", lambda _: f"of-{os.getpid()}")
        async with await starter.start() as sandbox:
            with pytest.raises(SandboxError, match="already in use"):
                await starter.start()
            assert (await sandbox.run("echo fine")).stdout == "fine\n"


OWNER = """
import asyncio
from megasync.sandboxes.kinds import starter_of

async def main():
    starter = starter_of({"kind": %r, "image": %r, "limits": {"memory_mb": 64}})
    sandboxes = [await starter.start() for _ in range(2)]
    print(*(sandbox._name for sandbox in sandboxes), flush=True)
    await sandboxes[0].run("trap '' TERM; while :; do sleep 600; done")

asyncio.run(main())
"""


@pytest.mark.parametrize("kind", CONTAINERS)
@pytest.mark.parametrize("clients", [False, True], ids=["owner", "owner and clients"])
async def test_the_death_of_the_owner_removes_its_containers(clients, kind):
    script = OWNER % (kind, await asyncio.to_thread(image, kind))
    owner = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=subprocess.PIPE)
    names = (await owner.stdout.readline()).decode().split()
    assert len(names) == 2
    while "sleep" not in await output(kind, "top", names[0]):
        await asyncio.sleep(0.05)
    for process in family(owner.pid) if clients else family(owner.pid)[:1]:
        process.kill()
    await owner.wait()
    async with asyncio.timeout(300):
        while {*names} & {*(await output(kind, "ps", "--all", "--format", "{{.Names}}")).split()}:
            await asyncio.sleep(0.05)


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
    async with asyncio.timeout(300):
        await until(lambda: leased.sandbox._ending is not None)
    with pytest.raises(SandboxError, match="or the sandbox was stopped"):
        await sandbox.run("true")
    await sandbox.stop()
    await client.close()
    await server.close()
