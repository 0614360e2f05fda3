"""Who reaches a Ray cluster that spans machines: what is on the chosen interface, and knows the token.

127.0.0.2 stands for that interface: loopback for the kernel, and an address like any other for Ray. Its patch is
`megasync_patches.ray_bind`.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from megasync_patches import ray_bind
from processes import family, listening
from waits import PATIENCE

from megasync.launch.node import ray_command
from megasync.serving.process import ManagedProcess, free_port

ADDRESS = "127.0.0.2"
# Ray's agent listens there for its own machine.
LOOPBACK = "127.0.0.1"
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a" * 64}
WRONG = TOKEN | {"RAY_AUTH_TOKEN": "b" * 64}
# Has a worker, says so, and stays until its input ends.
DRIVER = """
import sys
import ray
ray.init(address=sys.argv[1], log_to_driver=False)
assert ray.get(ray.remote(num_cpus=0)(lambda: 1).remote()) == 1
print("nodes", len(ray.nodes()), flush=True)
sys.stdin.read()
"""

pytestmark = [pytest.mark.real, pytest.mark.skipif(ray_bind.compiler() is None, reason="needs a C compiler")]


@contextmanager
def cluster(folder: Path, environment: dict[str, str]) -> Iterator[tuple[str, list[psutil.Process]]]:
    """A head, started as the launcher does, a driver and a worker: where the head is, and all of the processes."""
    port = free_port(ADDRESS)
    place = f"{ADDRESS}:{port}"
    # Paths of Unix sockets must be shorter than a test's folder may be.
    with tempfile.TemporaryDirectory(prefix="ray-") as short:
        env = os.environ | TOKEN | environment | {"RAY_TMPDIR": short}
        head = ManagedProcess(ray_command(ADDRESS, "", port, 1, ""), env, folder / "ray.log")
        head.start()
        driver = [sys.executable, "-c", DRIVER, place]
        try:
            asyncio.run(answers(place, head))
            with subprocess.Popen(driver, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as joined:
                assert joined.stdout.readline() == "nodes 1\n", head.tail()
                yield place, [*family(head.pid), *family(joined.pid)]
                joined.stdin.close()
        finally:
            asyncio.run(head.stop(30.0))


async def answers(place: str, head: ManagedProcess) -> None:
    host, _, port = place.partition(":")
    async with asyncio.timeout(PATIENCE):
        while True:
            assert head.alive(), head.tail()
            try:
                _, writer = await asyncio.open_connection(host, int(port))
            except OSError:
                await asyncio.sleep(0.1)
                continue
            writer.close()
            return


@pytest.fixture(scope="module")
def confined(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[psutil.Process]]]:
    with cluster(tmp_path_factory.mktemp("ray"), ray_bind.environment(ray_bind.library(), ADDRESS)) as made:
        yield made


def test_all_of_ray_listens_on_the_chosen_interface_and_loopback(confined) -> None:
    found = listening(confined[1])
    assert {address for address, _ in found} == {ADDRESS, LOOPBACK}, found
    assert {"gcs_server", "raylet"} <= {name for address, name in found if address == ADDRESS}


def test_unpatched_ray_listens_on_all_interfaces(tmp_path: Path) -> None:
    """When this fails, Ray does without the patch: delete that."""
    with cluster(tmp_path, {}) as (_, processes):
        everywhere = {name for address, name in listening(processes) if address == "::"}
    assert {"gcs_server", "raylet"} <= everywhere


def test_a_node_with_another_token_does_not_join_and_says_why(confined, tmp_path: Path) -> None:
    place, _ = confined
    words = ["--head", place, "--device", "cpu", "--devices", "1", "--log", str(tmp_path / "ray.log")]
    command = [sys.executable, "-m", "megasync.launch.node", "--folder", str(tmp_path), "--peer", LOOPBACK, "ray"]
    with subprocess.Popen([*command, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as node:
        node.stdin.write(json.dumps(WRONG) + "\n")
        node.stdin.flush()
        assert node.wait(PATIENCE) == 1
        said = node.stdout.read()
    assert "the Ray node exited" in said and "token" in said.lower()
    assert WRONG["RAY_AUTH_TOKEN"] not in said


def test_drivers_with_another_token_or_none_are_refused_with_the_reason(confined) -> None:
    place, _ = confined

    def doctor(token: dict[str, str]) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "megasync", "doctor", "--cluster", place]
        environment = os.environ | token
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE)

    with ThreadPoolExecutor() as threads:
        for done in threads.map(doctor, [WRONG, {"RAY_AUTH_MODE": "disabled"}]):
            assert done.returncode == 2, done.stdout
            assert f"no Ray cluster can be joined at {place}" in done.stderr
            assert "RAY_AUTH_TOKEN must be" in done.stderr
