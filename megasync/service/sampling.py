"""Samples of the fleet's servers, with adapters by their names.

The servers find adapters in a folder, the root, whose entries are named as the adapters are (`sglang.adapters`). Here
an adapter is offered by an entry in the root and withdrawn by removing it, so nothing has to be told to any server, and
the router may send a request anywhere. An entry has links to the files of the adapter, and their digests, by which a
server notices that it reads other bytes.

What a request asks of its prompt is answered by a request of its own, which also leaves the prompt in the server's
cache; the samples follow, `TOGETHER` in a request. Those that it leaves unfinished continue in requests of their own.
So do samples that follow a model, after each `FOLLOW_TOKENS`: with its newest adapter, which computes the tokens so far
again, or with the same one, which has them in the server's cache.

Log-probs of a prompt are those at temperature 1, and of sampled tokens those at the temperature that they were sampled
at, over the whole vocabulary.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from megasync.base.files import new_folder, remove_tree
from megasync.concurrency.tasks import gather_or_cancel
from megasync.errors import ContextLengthExceeded, DataError
from megasync.layout.shards import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from megasync.rollout.client import RolloutClient
from megasync.rollout.partials import PartialResponse
from megasync.rollout.tokens import Tokens
from megasync.rollout.workflow import request_seed
from megasync.service.interfaces import Newest, SampledTokens, Samples, Sampling, ServedModel, TopLogprobs
from megasync.serving.answers import PromptQuestion, PromptScores, TopTokens
from megasync.serving.plugin_protocol import ADAPTER_NAME, MANIFEST

# The largest number of likeliest tokens at a position.
MOST_TOP = 128
# Log-probs that one request may ask of its prompt or of its samples. A server sends some 30 bytes for each.
MOST_CELLS = 2**20

# Samples of one request to a server. More of them are spread over servers.
TOGETHER = 32
# Tokens after which a sample goes on with a newer adapter. Fewer of them would be fresher, and each newer adapter
# computes the tokens so far again.
FOLLOW_TOKENS = 1024
# Tokens of a prompt that are worth a wait for one server that has computed them.
LONG_PROMPT = 256


class FleetSampler:
    """The fleet as the service's `Sampler`.

    Args:
        client: stays its owner's to close.
        root: the folder in which the servers look for adapters (`ServedAdapters.root`).
        samples: the largest number of samples of one request.
        together: how many of these one request to a server has; 1 for servers of several engines.
        follow: the tokens of a sample after which it goes on with a newer adapter.
    """

    def __init__(
        self,
        client: RolloutClient,
        model: ServedModel,
        root: Path,
        samples: int = 256,
        together: int = TOGETHER,
        follow: int = FOLLOW_TOKENS,
    ) -> None:
        self._client = client
        self._model = model
        self._root = root.resolve()
        self._samples = samples
        self._together = together
        self._follow = follow

    async def offer(self, adapter: str, folder: Path) -> None:
        """Makes a PEFT folder available under the name, until `withdraw`; survives this process.

        Raises DataError for a name that is invalid or that another folder has, and for a folder without adapters.
        """
        if not ADAPTER_NAME.fullmatch(adapter):
            raise DataError(f"adapter {adapter!r:.300} must match {ADAPTER_NAME.pattern}")
        await asyncio.to_thread(_list, self._root / adapter, folder)

    async def withdraw(self, adapter: str) -> None:
        """Keeps servers from loading the adapter; those that hold it unload it when they need its place.

        Has no effect on an unknown one.
        """
        if ADAPTER_NAME.fullmatch(adapter):
            await asyncio.to_thread(_remove, self._root / adapter)

    async def sample(self, sampling: Sampling, adapter: str, newest: Newest | None = None) -> Samples:
        """Samples with an adapter, or with the base model if the name is empty.

        With ``newest``, samples go on with the adapter that it names whenever they have `FOLLOW_TOKENS` more tokens,
        unless a text may end them, which might straddle the cut.

        Raises DataError, before anything is sent, for what a client must change, and ServerError if no server answers
        within `timeouts.request`.
        """
        if adapter and not (ADAPTER_NAME.fullmatch(adapter) and (self._root / adapter).is_dir()):
            raise DataError(f"there is no adapter {adapter!r:.300}; it may have expired or been deleted")
        prompt = Tokens.of(sampling.prompt)
        prompt.check(self._model.vocab)
        asked = _Asked(sampling, len(prompt), self._model.vocab)
        tokens = self._tokens(sampling, len(prompt), asked.question is not None)
        if sampling.topk_sample_logprobs * tokens * sampling.samples > MOST_CELLS:
            raise DataError(
                f"topk_sample_logprobs={sampling.topk_sample_logprobs} of {sampling.samples} samples of up to {tokens} "
                f"tokens are more than {MOST_CELLS} log-probs; ask for fewer, or set a smaller max_tokens"
            )
        top = min(sampling.topk_sample_logprobs, self._model.vocab)
        options = _options(sampling, self._model.vocab)

        def with_adapter(name: str) -> dict[str, Any]:
            # Requests for the same prompt go to the server that has it in its cache.
            return options | {"adapter": name or None, "routing_key": prompt.digest(name.encode())}

        samples = [
            _Sample(adapter, None if sampling.seed is None else request_seed(sampling.seed, number))
            for number in range(sampling.samples)
        ]

        cut = tokens if newest is None or options["whole"] else min(tokens, self._follow)

        async def generate(sample: _Sample, **more: Any) -> None:
            """Finishes a sample, or brings it to the next cut."""
            settings = with_adapter(sample.adapter) | more
            await self._client.generate(prompt, keep=lambda _: sample.response, seed=sample.seed, **settings)

        async def finish(sample: _Sample, **more: Any) -> None:
            if not sample.response.finished:
                await generate(sample, max_new_tokens=cut, **more)
            while newest is not None and sample.response.finish_reason == "length" and len(sample.response) < tokens:
                sample.go_on(await newest())
                await generate(sample, max_new_tokens=min(tokens, len(sample.response) + cut), **more)

        async def generate_several(samples: list[_Sample], **more: Any) -> None:
            if len(samples) == 1:
                await finish(samples[0], **more)
                return
            responses, seeds = [each.response for each in samples], [each.seed for each in samples]
            settings: dict[str, Any] = with_adapter(adapter) | more | {"max_new_tokens": cut}
            await self._client.begin_together(prompt, responses, seeds, **settings)
            await gather_or_cancel(*(finish(each, **more) for each in samples))

        first = None
        if asked.question is not None:
            first = _Sample(adapter, samples[0].seed)
            await generate(first, question=asked.question, max_new_tokens=1)
        if first is not None and (sampling.samples, tokens, top) == (1, 1, 0):
            samples = [first]
        elif tokens:
            # The first goes ahead where the others can use what its server has computed.
            ahead = int(self._client.shares_prompts and first is None and len(prompt) >= LONG_PROMPT)
            begins = [*range(ahead), *range(ahead, sampling.samples, self._together)]
            await gather_or_cancel(
                *(generate_several(samples[begin:end], top=top) for begin, end in pairwise([*begins, sampling.samples]))
            )
        cached = (first or samples[0]).response.cached or 0
        scores = None if first is None else first.response.scores
        return asked.answer(scores, [sample.tokens() for sample in samples], cached)

    def _tokens(self, sampling: Sampling, prompt: int, scored: bool) -> int:
        """The largest number of tokens of a sample. Raises DataError."""
        if not 1 <= sampling.samples <= self._samples:
            raise DataError(f"num_samples must be in [1, {self._samples}], not {sampling.samples}")
        wanted, context = sampling.max_tokens, self._model.context
        if wanted is not None and wanted < 0:
            raise DataError(f"max_tokens must be 0 or more, not {wanted}")
        # Log-probs of a prompt come with a token.
        needed = max(1 if wanted is None or scored else 0, wanted or 0)
        if prompt + needed > context:
            raise ContextLengthExceeded(
                f"a prompt of {prompt} tokens and max_tokens={wanted} exceed the context of {context} tokens; shorten "
                f"the prompt, or set max_tokens to at most {max(0, context - prompt)}"
            )
        return context - prompt if wanted is None else wanted


class _Asked:
    """The log-probs that a request asks of its prompt, and their places in the answer. Too many are a DataError."""

    def __init__(self, sampling: Sampling, prompt: int, vocab: int) -> None:
        self._prompt, self._last = prompt, sampling.prompt_logprobs
        targets = sampling.target_prompt_logprobs
        self._targets = None if targets is None else np.asarray(targets)
        for name in ("topk_prompt_logprobs", "topk_sample_logprobs"):
            if not 0 <= (value := getattr(sampling, name)) <= MOST_TOP:
                raise DataError(f"{name} must be in [0, {MOST_TOP}], not {value}")
        if not 0 <= self._last <= prompt:
            raise DataError(f"log-probs of {self._last} positions were asked for, of a prompt of {prompt} tokens")
        self._top = min(sampling.topk_prompt_logprobs, vocab)
        named: tuple[int, ...] = ()
        # The first positions that each part asks about; what follows nothing has no log-prob.
        firsts = [max(1, prompt - (self._last or prompt))] if self._last or self._top else []
        if self._targets is not None:
            named = _named(self._targets, prompt, vocab)
            if named:
                firsts.append(1 + int((self._targets >= 0).any(axis=1).argmax()))
        self.question: PromptQuestion | None = None
        if firsts and (first := min(firsts)) < prompt:
            if (cells := (prompt - first) * (len(named) + self._top)) > MOST_CELLS:
                raise DataError(
                    f"{cells} log-probs were asked of {prompt - first} positions of the prompt, for {len(named)} "
                    f"distinct target ids and the top {self._top}; at most {MOST_CELLS} are computed, so ask for fewer "
                    f"ids or positions"
                )
            self.question = PromptQuestion(first, self._top, named)

    def answer(self, scores: PromptScores | None, samples: list[SampledTokens], cached: int) -> Samples:
        logprobs = top = targets = None
        question, last = self.question, self._last or self._prompt
        if self._last:
            logprobs = np.full(self._prompt, np.nan, np.float32)
        if self._top:
            shape = self._prompt, self._top
            top = TopLogprobs(np.zeros(shape, np.int64), np.full(shape, np.nan, np.float32))
        if self._targets is not None:
            targets = np.full(self._targets.shape, np.nan, np.float32)
        if question is not None and scores is not None:
            # Rows of the scores are positions from `question.first` on.
            begin = max(question.first, self._prompt - last)
            rows = slice(begin - question.first, None)
            if logprobs is not None:
                logprobs[begin:] = scores.logprobs[rows]
            if top is not None and scores.top is not None:
                top.ids[begin:], top.logprobs[begin:] = scores.top.ids[rows], scores.top.logprobs[rows]
            if targets is not None and self._targets is not None and scores.named is not None:
                at, target = np.nonzero(self._targets >= 0)
                columns = np.searchsorted(question.named, self._targets[at, target])
                targets[at, target] = scores.named[at + 1 - question.first, columns]
        return Samples(samples, logprobs, top, targets, cached)


def _named(targets: np.ndarray[Any, Any], prompt: int, vocab: int) -> tuple[int, ...]:
    """The distinct ids of target log-probs, in ascending order. Raises DataError."""
    if targets.ndim != 2 or len(targets) != prompt - 1 or targets.dtype.kind not in "iu":
        raise DataError(
            f"target_prompt_logprobs must be integers of the shape [{prompt - 1}, ids], one row for each token of the "
            f"prompt but the first, not {targets.dtype} of the shape {list(targets.shape)}"
        )
    ids = np.unique(targets)
    if ids.size and not -1 <= ids[0] <= ids[-1] < vocab:
        outside = ids[0] if ids[0] < -1 else ids[-1]
        raise DataError(f"target id {outside} is outside the vocabulary [0, {vocab}); -1 asks for nothing")
    return tuple(ids[ids >= 0].tolist())


def _options(sampling: Sampling, vocab: int) -> dict[str, Any]:
    """The sampling parameters of requests, all of them, and whether a sample that is cut begins again."""
    texts = [each for each in sampling.stop if isinstance(each, str)]
    ids = [each for each in sampling.stop if not isinstance(each, str)]
    if outside := [each for each in ids if not 0 <= each < vocab]:
        raise DataError(f"stop id {outside[0]} is outside the vocabulary [0, {vocab})")
    if not sampling.stop_at_eos and sampling.stop:
        raise DataError(f"stop={sampling.stop!r:.300} cannot end a sample that nothing may end")
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": 0.0,
        "stop": texts,
        "stop_token_ids": ids,
        "ignore_eos": not sampling.stop_at_eos,
        # A text might straddle the cut.
        "whole": bool(texts),
    }


@dataclass(slots=True)
class _Sample:
    """A sample while it grows, and the adapter of its next tokens."""

    adapter: str
    seed: int | None
    response: PartialResponse = field(default_factory=PartialResponse)
    # (adapter, first token, end) of the tokens before the last change of the adapter.
    _earlier: list[tuple[str, int, int]] = field(default_factory=list[tuple[str, int, int]])

    def go_on(self, adapter: str) -> None:
        """Continues the response, which has ended, with an adapter."""
        if adapter != self.adapter:
            self._earlier, self.adapter = self._versions(), adapter
        self.response.finish_reason = "abort"

    def tokens(self) -> SampledTokens:
        response = self.response
        return SampledTokens(
            response.token_ids.astype(np.int64),
            response.logprobs.copy(),
            response.finish_reason == "stop",
            self._versions(),
            None if response.top is None else _top_logprobs(response.top),
        )

    def _versions(self) -> list[tuple[str, int, int]]:
        """The server has said that the adapter sampled the tokens; `serving.answers` refuses any other answer."""
        start, end = self._earlier[-1][-1] if self._earlier else 0, len(self.response)
        return [*self._earlier, (self.adapter, start, end)] if end > start else self._earlier


def _top_logprobs(top: TopTokens) -> TopLogprobs:
    return TopLogprobs(top.ids.astype(np.int64), top.logprobs)


def _list(entry: Path, folder: Path) -> None:
    """Makes an entry of the root: links to the files of a PEFT folder, and the manifest that servers check."""
    files = [folder.resolve() / name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)]
    if missing := [file for file in files if not file.is_file()]:
        raise DataError(f"{folder} is not a PEFT folder: it has no {missing[0].name}")
    if entry.is_dir():
        if (listed := (entry / ADAPTER_CONFIG).resolve()) != files[0]:
            raise DataError(f"adapter {entry.name} is {listed.parent} and cannot become {folder}")
        return
    with new_folder(entry) as draft:
        for file in files:
            (draft / file.name).symlink_to(file)
        manifest = {"files": {file.name: _described(file) for file in files}}
        (draft / MANIFEST).write_text(json.dumps(manifest))


def _described(file: Path) -> dict[str, Any]:
    with file.open("rb") as opened:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(opened, "sha256").hexdigest()}


def _remove(entry: Path) -> None:
    with suppress(FileNotFoundError):
        remove_tree(entry)
