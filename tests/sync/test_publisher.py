"""What is compared after a sync: those servers that it was for."""

from types import SimpleNamespace

from megasync.config.schema import SyncConfig
from megasync.errors import ServerError
from megasync.sync.attempt import SyncReport
from megasync.sync.publisher import Publisher


class FakeSync:
    """Brings the version to the servers that it has at the start; ``meanwhile`` happens before it is done."""

    def __init__(self):
        self.urls, self.meanwhile = [], lambda: None

    def add(self, server):
        self.urls.append(server.url)

    def remove(self, url):
        self.urls.remove(url)

    async def publish(self, version, only):
        reached = tuple(url for url in self.urls if only is None or url in only)
        self.meanwhile()
        return SyncReport(version, reached, 100, {"stage": 0.5})


def make_publisher(asked, dead=()):
    async def trainer(probes):
        return [[-1.0, -2.0] for _ in probes]

    async def server_logprobs(server, probe):
        asked.append(server.url)
        if server.url in dead:
            raise ServerError("it is gone")
        return [-1.0, -2.0]

    sync = FakeSync()
    publisher = Publisher(
        sync,
        config=SyncConfig(),
        dtype="float32",
        probes=[[1, 2, 3]],
        servers=[],
        trainer_logprobs=trainer,
        server_logprobs=server_logprobs,
    )
    return publisher, sync


def server(url):
    return SimpleNamespace(url=url)


async def test_a_server_that_comes_up_during_a_sync_is_not_compared_yet():
    asked = []
    publisher, sync = make_publisher(asked)
    publisher.add(server("a"))
    sync.meanwhile = lambda: publisher.add(server("late"))
    metrics = await publisher.publish(3)
    assert asked == ["a"]
    assert (metrics["sync/parity"], metrics["sync/version"], metrics["sync/stage_seconds"]) == (0.0, 3.0, 0.5)
    sync.meanwhile = lambda: None
    await publisher.publish(3, only=["late"])
    assert asked == ["a", "late"]


async def test_a_server_that_goes_or_does_not_answer_is_left_out():
    asked = []
    publisher, sync = make_publisher(asked, dead=("b",))
    for url in "abc":
        publisher.add(server(url))
    sync.meanwhile = lambda: publisher.remove("c")
    metrics = await publisher.publish(1)
    assert asked == ["a", "b"]
    assert metrics["sync/parity"] == 0.0
