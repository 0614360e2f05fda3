"""Evaluation of a pinned version: a score belongs to one version of the weights, or there is none."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from megasync.errors import EvaluationAbandoned, ServerError
from megasync.evaluation.evaluate import Answerer
from megasync.evaluation.held_out import HeldOutSet
from megasync.evaluation.periodic import PeriodicEvaluation
from megasync.rewards import RewardRunner
from megasync.rollout.client import Destination
from megasync.rollout.conversation import Generation
from megasync.rollout.workflow import single_turn
from megasync.trajectory import Prompt

VERSION = 3


class Servers:
    """A client and the version pinned on its servers. `versions` has the version that each server samples with."""

    def __init__(self, *urls):
        self.versions = dict.fromkeys(urls, VERSION)
        self.asked = Counter()
        self.adapters = set()
        self.over = {url: asyncio.Event() for url in urls}
        self.hangs, self.dies = set(), set()
        self.version = VERSION
        self.called = asyncio.Event()

    async def destination(self, number):
        left = [url for url, over in self.over.items() if not over.is_set()]
        if not left:
            raise EvaluationAbandoned("nothing holds version 3")
        return Destination(server=left[number % len(left)])

    async def lost(self, destination):
        await self.over[destination.server].wait()

    async def generate(self, prompt_ids, *, server=None, adapter=None, **options):
        self.asked[server] += 1
        self.adapters.add(adapter)
        self.called.set()
        if server in self.dies:
            self.over[server].set()
            raise ServerError("gone")
        if server in self.hangs:
            await self.over[server].wait()
            raise ServerError("gone")
        version = self.versions.get(server, VERSION)
        sampled = version if isinstance(version, list) else [version] * 2
        return Generation.of(list(prompt_ids), [5, 5], [-0.1] * 2, sampled, "stop", "a")


def evaluation(servers, count=4, workflow=single_turn, **options):
    prompts = [Prompt(str(number), [number], {"prompt": f"q{number}"}) for number in range(count)]
    held_out = HeldOutSet("", prompts, RewardRunner(lambda completions, **_: [1.0] * len(completions)), **options)
    return PeriodicEvaluation(Answerer(servers, workflow, [held_out]), [held_out], 2)


async def test_only_pinned_servers_are_asked_and_all_of_them_are():
    servers = Servers("a", "b")
    metrics = await evaluation(servers)(6, VERSION, servers)
    assert servers.asked == {"a": 2, "b": 2}
    assert (metrics["eval/score"], metrics["eval/version"], metrics["eval/exact_share"]) == (1.0, 3.0, 1.0)


@pytest.mark.parametrize("sampled", [[3, 4], [4, 4], [2, 3]])
async def test_an_answer_with_a_token_of_another_version_leaves_no_score(sampled):
    servers = Servers("a", "b")
    servers.versions["b"] = sampled
    with pytest.raises(EvaluationAbandoned, match=f"version {min({*sampled} - {3})}, but version 3 is evaluated"):
        await evaluation(servers)(6, VERSION, servers)


async def test_a_discarded_generation_of_another_version_counts_too():
    async def careless(client, sample):
        await client.generate([9], server="b")
        return await single_turn(client, sample)

    servers = Servers("a")
    servers.versions["b"] = 4
    with pytest.raises(EvaluationAbandoned):
        await evaluation(servers, workflow=careless)(6, VERSION, servers)


@pytest.mark.parametrize("loss", ["hangs", "dies"])
async def test_answers_of_a_lost_server_are_given_again_by_another_that_holds_the_version(loss):
    servers = Servers("a", "b")
    getattr(servers, loss).add("a")
    running = asyncio.create_task(evaluation(servers)(6, VERSION, servers))
    await servers.called.wait()
    servers.over["a"].set()
    metrics = await running
    assert (metrics["eval/score"], metrics["eval/failed"], metrics["eval/exact_share"]) == (1.0, 0.0, 1.0)


async def test_a_version_that_nothing_holds_leaves_no_score_and_nothing_running():
    servers = Servers("a")
    servers.hangs.add("a")
    running = asyncio.create_task(evaluation(servers)(6, VERSION, servers))
    await servers.called.wait()
    servers.over["a"].set()
    with pytest.raises(EvaluationAbandoned, match="nothing holds version 3"):
        await running
    assert {task.get_name() for task in asyncio.all_tasks()} == {asyncio.current_task().get_name()}


async def test_an_answer_that_fails_on_a_server_that_lives_is_a_wrong_one():
    async def workflow(client, sample):
        if sample["prompt_ids"] == [1]:
            raise ValueError("bad row")
        return await single_turn(client, sample)

    servers = Servers("a")
    metrics = await evaluation(servers, workflow=workflow)(6, VERSION, servers)
    assert (metrics["eval/score"], metrics["eval/failed"]) == (0.75, 1.0)


async def test_a_set_with_an_adapter_of_its_own_belongs_to_no_version():
    servers = Servers("a")
    servers.versions[None] = 7
    metrics = await evaluation(servers, adapter="eval-old")(6, VERSION, servers)
    assert servers.asked == {None: 4} and servers.adapters == {"eval-old"}
    assert metrics["eval/score"] == 1.0 and "eval/exact_share" not in metrics


async def test_without_a_pinned_version_the_share_of_the_version_is_measured():
    servers = Servers()
    servers.versions[None] = [3, 4]
    metrics = await evaluation(servers)(6, VERSION)
    assert (metrics["eval/score"], metrics["eval/exact_share"]) == (1.0, 0.5)
