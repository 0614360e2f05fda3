"""The fleet samples with adapters that servers load by name, and computes what Hugging Face does with them merged."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from clients import make_rollout_client
from random_adapters import write_peft
from real_servers import make_server, running
from transformers import AutoModelForCausalLM

from megasync.config.schema import SamplingConfig
from megasync.errors import DataError, ServerError
from megasync.layout.shards import ADAPTER_WEIGHTS
from megasync.service.interfaces import Sampling, ServedModel
from megasync.service.sampling import FleetSampler
from megasync.serving.control import ServerControl
from megasync.serving.server import ServedAdapters
from megasync.starters.digits import digits_tokenizer, write_digits

pytestmark = pytest.mark.real

CONTEXT, VOCAB, RANK, END = 256, 16, 8, 15
ATTENTION, MLP, UNEMBED = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj"), ("lm_head",)
# Name -> rank and projections.
ADAPTERS = {
    "all": (RANK, ATTENTION + MLP + UNEMBED),
    "small": (2, ATTENTION + MLP + UNEMBED),
    "attention": (4, ATTENTION),
    "mlp": (3, MLP),
    "unembed": (5, UNEMBED),
}
PROMPTS = [np.array([3, 1, 4, 1, 5, 9, 2, 6, 15, 5]), np.arange(15, 0, -1).repeat(3), np.array([7, 7, 9, 4])]
LOADED = 3
# Of float32 log-probs, after a few thousand products in another order.
NEAR = {"rtol": 0, "atol": 1e-4}


class Fleet:
    """Servers of one model, with one rank and with two, and what Hugging Face has with each adapter merged."""

    def __init__(self, base):
        self.base, self.root, model = base, base / "root", base / "model"
        write_digits(model)
        self.tokenizer = digits_tokenizer()
        self.merged = {"": AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()}
        for seed, (name, (rank, targets)) in enumerate(ADAPTERS.items()):
            self.merged[name] = write_peft(model, base / name, seed, rank, targets)
        served = ServedAdapters(RANK, ATTENTION + MLP + UNEMBED, most=2, root=self.root, most_loaded=LOADED)
        self.servers = [make_server(model, base / f"{ranks}.log", ranks, writes=True) for ranks in (1, 2)]
        for server in self.servers:
            rollout = replace(server.spec.rollout, stream_interval=4, context_length=CONTEXT)
            server.spec = replace(server.spec, adapters=served, rollout=rollout)

    async def sampler(self, url, **options):
        settings = {"sampling": SamplingConfig(), "timeout": 60.0, "stream_interval": 4} | options
        client = make_rollout_client(url, vocab_size=VOCAB, context_length=CONTEXT, **settings)
        made = FleetSampler(client, ServedModel("digits", CONTEXT, VOCAB, RANK), self.root)
        for name in ADAPTERS:
            await made.offer(name, self.base / name)
        return made, client

    def logprobs(self, adapter, ids, temperature=1.0):
        """[tokens - 1, vocabulary]"""
        with torch.no_grad():
            logits = self.merged[adapter](torch.tensor([ids.tolist()])).logits[0, :-1]
        return (logits / temperature).log_softmax(-1).numpy()

    def check(self, adapter, prompt, samples, temperature=1.0):
        for sample in samples:
            expected = self.logprobs(adapter, np.concatenate([prompt, sample.ids]), temperature)[len(prompt) - 1 :]
            np.testing.assert_allclose(sample.logprobs, expected[np.arange(len(sample.ids)), sample.ids], **NEAR)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    made = Fleet(tmp_path_factory.mktemp("fleet"))
    with running(made.servers):
        yield made


@pytest.fixture(params=[0, 1], ids=["one rank", "two ranks"])
async def sampler(fleet, request):
    fleet.url = fleet.servers[request.param].url
    made, client = await fleet.sampler(fleet.url)
    yield made
    await client.close()


async def loaded(url):
    async with ServerControl(url) as control:
        return {model["id"] for model in (await control.get("/v1/models"))["data"]} & ADAPTERS.keys()


async def test_adapters_are_loaded_by_concurrent_requests_and_mixed_in_batches(fleet, sampler):
    # More adapters than a batch or the server holds, of several ranks and projections, and the model without any.
    asked = [(name, prompt) for name in fleet.merged for prompt in PROMPTS]
    answers = await asyncio.gather(
        *(sampler.sample(Sampling(prompt, 2, 12, temperature=0.8, stop_at_eos=False), name) for name, prompt in asked)
    )
    for (name, prompt), answer in zip(asked, answers, strict=True):
        fleet.check(name, prompt, answer.samples, 0.8)
        assert all(sample.versions == [(name, 0, 12)] and not sample.stopped for sample in answer.samples)
    assert 0 < len(await loaded(fleet.url)) <= LOADED


@pytest.mark.parametrize("adapter", ["", "all", "unembed"])
async def test_log_probs_of_prompts_are_those_of_the_adapter(fleet, sampler, adapter):
    async def ask(prompt):
        targets = np.full((len(prompt) - 1, 3), -1)
        targets[2:, 0], targets[-1] = 4, (9, -1, 15)
        sampling = Sampling(prompt, 2, 5, 0.7, prompt_logprobs=len(prompt), topk_prompt_logprobs=4)
        asked = replace(sampling, topk_sample_logprobs=20, target_prompt_logprobs=targets)
        return targets, await sampler.sample(asked, adapter)

    # Together, so that one prefill computes different rows of several prompts.
    answers = await asyncio.gather(*map(ask, PROMPTS), sampler.sample(Sampling(PROMPTS[1], 4, 9), "small"))
    for prompt, (targets, answer) in zip(PROMPTS, answers[:-1], strict=True):
        expected = fleet.logprobs(adapter, prompt)
        at = np.arange(len(prompt) - 1)
        assert np.isnan(answer.prompt_logprobs[0]) and np.isnan(answer.prompt_topk.logprobs[0]).all()
        np.testing.assert_allclose(answer.prompt_logprobs[1:], expected[at, prompt[1:]], **NEAR)
        np.testing.assert_allclose(answer.prompt_topk.logprobs[1:], -np.sort(-expected)[:, :4], **NEAR)
        found = expected[at[:, None], answer.prompt_topk.ids[1:]]
        np.testing.assert_allclose(answer.prompt_topk.logprobs[1:], found, **NEAR)
        wanted = np.where(targets < 0, np.nan, expected[at[:, None], targets])
        np.testing.assert_allclose(answer.target_logprobs, wanted, **NEAR)
        fleet.check(adapter, prompt, answer.samples, 0.7)
        for sample in answer.samples:
            # As many as the vocabulary has.
            whole = fleet.logprobs(adapter, np.concatenate([prompt, sample.ids]), 0.7)[len(prompt) - 1 :]
            by_id = np.take_along_axis(sample.topk.logprobs, np.argsort(sample.topk.ids), axis=1)
            np.testing.assert_allclose(by_id, whole, **NEAR)


async def test_the_last_log_probs_of_a_prompt_leave_the_others_to_the_cache(fleet, sampler):
    # One request, as the client's `compute_logprobs` sends it.
    prompt = np.random.default_rng(1).integers(0, VOCAB - 1, 120)
    asked = Sampling(prompt, 1, 1, prompt_logprobs=7)
    first, second = [await sampler.sample(asked, "all") for _ in range(2)]
    expected = fleet.logprobs("all", prompt)[np.arange(119), prompt[1:]]
    for answer in (first, second):
        assert np.isnan(answer.prompt_logprobs[:-7]).all() and len(answer.samples[0].ids) == 1
        np.testing.assert_allclose(answer.prompt_logprobs[-7:], expected[-7:], **NEAR)
    # A few may be those with which other prompts begin.
    assert first.cached_prompt_tokens < 10 and 100 < second.cached_prompt_tokens <= 120 - 7 - 1
    # Nothing is shared with another adapter.
    assert (await sampler.sample(asked, "small")).cached_prompt_tokens < 10


async def test_stops_end_samples_and_are_part_of_them(fleet, sampler):
    greedy = Sampling(PROMPTS[0], 1, 40, temperature=0.0, stop_at_eos=False)
    (whole,) = (await sampler.sample(greedy, "all")).samples
    assert len(whole.ids) == 40 and not whole.stopped
    # One of the later tokens, or the first of its kind.
    stop = next(int(token) for token in whole.ids[3:] if token != END)
    end = whole.ids.tolist().index(stop) + 1
    by_id = replace(greedy, stop_at_eos=True, stop=[stop])
    by_text = replace(by_id, stop=[fleet.tokenizer.decode([stop])])
    for asked in (by_id, by_text):
        (sample,) = (await sampler.sample(asked, "all")).samples
        assert sample.ids.tolist() == whole.ids[: min(end, _ends(whole.ids))].tolist() and sample.stopped
    (short,) = (await sampler.sample(replace(greedy, stop_at_eos=True), "all")).samples
    assert len(short.ids) == min(40, _ends(whole.ids)) and short.stopped == (END in whole.ids)


def _ends(ids):
    """The length of a sample that the model's own end ends."""
    return ids.tolist().index(END) + 1 if END in ids else len(ids)


async def test_seeds_repeat_samples_whatever_else_is_in_the_batch(sampler):
    asked = Sampling(PROMPTS[1], 3, 20, seed=5, stop_at_eos=False)
    alone = await sampler.sample(asked, "mlp")
    others = [sampler.sample(Sampling(PROMPTS[0], 2, 25, seed=seed), "mlp") for seed in (6, 7)]
    again, *_ = await asyncio.gather(sampler.sample(asked, "mlp"), *others)
    ids = [sample.ids.tolist() for sample in alone.samples]
    assert [sample.ids.tolist() for sample in again.samples] == ids and len({*map(tuple, ids)}) == 3
    other = await sampler.sample(replace(asked, seed=8), "mlp")
    assert [sample.ids.tolist() for sample in other.samples] != ids


async def test_samples_go_on_with_the_newest_adapter_which_computes_all_before_it_again(fleet, sampler):
    sampler._follow = 6
    names = itertools.cycle(["all", "small", "mlp", "small"])

    async def newest():
        return next(names)

    answer = await sampler.sample(Sampling(PROMPTS[0], 3, 20, stop_at_eos=False), "all", newest)
    for sample in answer.samples:
        begins = [0, *(end for _, _, end in sample.versions)]
        assert begins[-1] == len(sample.ids) == 20 and {*begins[:-1]} <= {0, 6, 12, 18}
        assert len({name for name, _, _ in sample.versions}) > 1
        for name, start, end in sample.versions:
            expected = fleet.logprobs(name, np.concatenate([PROMPTS[0], sample.ids]))[len(PROMPTS[0]) - 1 :]
            at = np.arange(start, end)
            np.testing.assert_allclose(sample.logprobs[at], expected[at, sample.ids[at]], **NEAR)


async def test_damaged_adapters_are_refused_and_withdrawn_ones_unknown(fleet, tmp_path):
    url = fleet.servers[0].url
    sampler, client = await fleet.sampler(url, timeout=1.0)
    try:
        fleet.merged["damaged"] = write_peft(fleet.base / "model", tmp_path / "peft", 9)
        weights = (tmp_path / "peft" / ADAPTER_WEIGHTS).read_bytes()
        await sampler.offer("damaged", tmp_path / "peft")
        (tmp_path / "peft" / ADAPTER_WEIGHTS).write_bytes(weights[:-1] + b"\1")
        with pytest.raises(ServerError, match="has other bytes here"):
            await sampler.sample(Sampling(PROMPTS[0], 1, 3), "damaged")
        (tmp_path / "peft" / ADAPTER_WEIGHTS).write_bytes(weights)
        answer = await sampler.sample(Sampling(PROMPTS[0], 1, 3), "damaged")
        fleet.check("damaged", PROMPTS[0], answer.samples)
        await sampler.withdraw("damaged")
        with pytest.raises(DataError, match="there is no adapter 'damaged'"):
            await sampler.sample(Sampling(PROMPTS[0], 1, 3), "damaged")
    finally:
        await client.close()


async def test_a_server_that_starts_again_needs_nothing_from_the_driver(fleet):
    # The last test, because it changes the URL.
    server = fleet.servers[0]
    await server.stop(5)
    sampler, client = await fleet.sampler(await server.start(180))
    try:
        answer = await sampler.sample(Sampling(PROMPTS[2], 2, 8), "small")
        fleet.check("small", PROMPTS[2], answer.samples)
    finally:
        await client.close()
