"""What is compared after a sync: those servers that it was for, on the same tokens."""

import math
from types import SimpleNamespace

import pytest

from megasync.config.schema import SyncConfig
from megasync.errors import ParityError, ServerError, ServerParityError
from megasync.serving.disaggregated_control import EngineScores
from megasync.sync.attempt import SyncReport
from megasync.sync.publisher import VersionPublisher, compare_logprobs


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


def make_publisher(asked, dead=(), wrong=(), engines=None):
    """`engines` has what the engines of a server with several compute, by its URL, or the error of asking them."""
    compared = {} if engines is None else engines

    async def trainer(probes):
        return [[-1.0, -2.0] for _ in probes]

    async def server_logprobs(server, probe):
        asked.append(server.url)
        if server.url in dead:
            raise ServerError("it is gone")
        return [-1.0, None] if server.url in wrong else [-1.0, -2.0]

    async def engine_logprobs(server, probe):
        if isinstance(found := compared.get(server.url, []), ServerError):
            raise found
        return found

    sync = FakeSync()
    publisher = VersionPublisher(
        sync,
        config=SyncConfig(),
        dtype="float32",
        probes=[[1, 2, 3]],
        servers=[],
        trainer_logprobs=trainer,
        server_logprobs=server_logprobs,
        engine_logprobs=engine_logprobs,
    )
    return publisher, sync


def server(url):
    return SimpleNamespace(url=url)


def engine(name, logprobs):
    """What an engine computes for tokens whose log-probs are -1 and -2."""
    return EngineScores(name, [-1.0, -2.0], logprobs)


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


async def test_a_server_that_alone_disagrees_is_named_and_the_version_is_published():
    publisher, _ = make_publisher([], wrong=("b",))
    for url in "abc":
        publisher.add(server(url))
    with pytest.raises(ServerParityError, match=r"b, version 4: .* differ by nan .*; 2 other servers agree") as found:
        await publisher.publish(4)
    assert list(found.value.reasons) == ["b"]
    assert found.value.metrics["sync/parity"] == 0.0
    assert (found.value.metrics["sync/parity_failures"], found.value.metrics["sync/version"]) == (1.0, 4.0)


async def test_when_all_servers_disagree_the_weights_are_wrong():
    wrong = set()
    publisher, _ = make_publisher([], wrong=wrong)
    for url in "ab":
        publisher.add(server(url))
    await publisher.publish(1)
    wrong |= {"a", "b"}
    with pytest.raises(ParityError, match="a, version 2") as error:
        await publisher.publish(2)
    assert not isinstance(error.value, ServerParityError)


async def test_a_joiner_is_judged_by_the_servers_that_agreed_before_it_came():
    publisher, _ = make_publisher([], wrong=("late",))
    publisher.add(server("a"))
    await publisher.publish(1)
    publisher.add(server("late"))
    with pytest.raises(ServerParityError):
        await publisher.publish(1, only=["late"])
    publisher.remove("a")
    with pytest.raises(ParityError, match="late, version 1"):
        await publisher.publish(1, only=["late"])


GOOD = [engine("decode engine of pair 0", [-1.0, -2.0]), engine("prefill engine of pair 0", [-1.0, -2.0])]
BAD = [*GOOD, engine("decode engine of pair 1", [-1.0, -5.0])]
OF_PAIR = "a, version 1, decode engine of pair 1: .* differ by 1.5 a token"


@pytest.mark.parametrize(
    ("engines", "wrong", "error", "words"),
    [
        ({"a": GOOD}, (), None, ""),
        ({"a": BAD}, (), ParityError, f"^{OF_PAIR}"),
        ({"a": BAD, "b": GOOD}, (), ServerParityError, f"{OF_PAIR}.*1 other servers agree"),
        # Engines that agree only with one another.
        ({"a": GOOD, "b": GOOD}, ("b",), ServerParityError, "^b, version 1: "),
        # Those that do not answer are left out, and agree with nobody.
        ({"a": GOOD, "b": ServerError("it is gone")}, (), None, ""),
        ({"a": BAD, "b": ServerError("it is gone")}, (), ParityError, f"^{OF_PAIR}"),
    ],
)
async def test_a_server_of_which_one_engine_differs_is_named_with_the_engine(engines, wrong, error, words):
    publisher, _ = make_publisher([], wrong=wrong, engines=engines)
    for url in engines:
        publisher.add(server(url))
    if error is None:
        metrics = await publisher.publish(1)
        assert (metrics["sync/parity"], metrics["sync/parity_failures"]) == (0.0, 0.0)
        return
    with pytest.raises(error, match=words) as caught:
        await publisher.publish(1)
    assert type(caught.value) is error


def test_the_mean_absolute_difference_comes_back():
    assert compare_logprobs([[-1.0, -2.0], [-3.0]], [[-1.25, -2.0], [-2.5]], 0.25, "server") == pytest.approx(0.25)


def test_too_large_a_difference_names_the_engine_the_worst_token_and_both_numbers():
    with pytest.raises(ParityError, match=r"http://a, version 7:.*prompt 1, token 2: trainer -1.*, server -4"):
        compare_logprobs([[-1.0], [-1.0, -1.0]], [[-1.0], [-1.5, -4.0]], 0.1, "http://a, version 7")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_that_are_not_finite_never_pass(bad):
    with pytest.raises(ParityError, match="token 1"):
        compare_logprobs([[-1.0, -1.0]], [[bad, -1.0]], 1e9, "server")


def test_different_lengths_and_nothing_to_compare_are_refused():
    with pytest.raises(ParityError, match="different tokens"):
        compare_logprobs([[-1.0]], [[-1.0, -1.0]], 1.0, "server")
    with pytest.raises(ParityError, match="no log-prob"):
        compare_logprobs([[]], [[]], 1.0, "server")
