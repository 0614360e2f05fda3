"""Generates tokens on the servers, through the router.

A generation survives interruptions. A request that was aborted, or whose server or router died, is sent again with the
tokens so far appended to the prompt and with the remaining budget. The log-probs and versions of all requests are kept.
With `stream_interval`, tokens of longer responses arrive while they are sampled, so a dead server costs at most that
many tokens per request. Transient failures are retried with exponential backoff until the generation's own deadline.
The caller's arguments are never changed, and all sampling parameters are always sent. No token id outside the
vocabulary leaves this module, because one would kill the server: `_checked` guarantees it. Answers are checked as
strictly (`answers`): an invalid answer is discarded, counted, and requested again.

With routing replay a response is complete when the routes of all its positions are known. Servers report them when a
request ends, so those of a request that was cut come from its continuation, which computes these positions again.

Requests are never aborted by id. Closing the connection, when the caller is cancelled or a deadline passes, ends the
request at its server, even if the router dies: at the next piece of a stream, otherwise within about a second.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import ssl
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, NoReturn, Protocol

import aiohttp
import numpy as np
import orjson
from aiohttp.abc import AbstractStreamWriter
from numpy.typing import NDArray

from megasync.concurrency.tasks import Backoff
from megasync.config import Config
from megasync.config.schema import ChatConfig, SamplingConfig
from megasync.errors import ContextLengthExceeded, DataError, InvalidAnswer, ServerError
from megasync.layout.routes import RouteFormat
from megasync.rollout.auxiliary import AuxiliaryModel
from megasync.rollout.chat import Chat, ToolLike
from megasync.rollout.conversation import Conversation, Generation, Reply
from megasync.rollout.inflight import QuarantineClient, Ticket
from megasync.rollout.partials import PartialResponse, request_digest
from megasync.rollout.reply_parser import ReplyParser
from megasync.rollout.tokens import Tokens
from megasync.serving.answers import (
    AnswerLimits,
    PromptQuestion,
    StreamedError,
    events,
    read_bounded,
    read_generated,
    read_prompt,
    read_scored,
    split_answers,
)
from megasync.serving.control import ServerControl
from megasync.serving.disaggregated_control import DisaggregatedControl, EngineScores
from megasync.serving.plugin_protocol import FLAT_TOP, ROUTES_FROM, ROUTING_KEY_HEADER, SEEDS, WITH_SUPPORT
from megasync.serving.router import STICKY_POLICIES
from megasync.trajectory.runs import IntArray

log = logging.getLogger(__name__)

# Transient statuses: no server is free or healthy, or a server died during the request (the router then answers 500).
_RETRIED = frozenset({429, 500, 502, 503, 504})
# The subset that means that the router sent the request to no server.
_NOT_SENT = frozenset({429, 503})
# Statuses of an invalid request.
_BAD_REQUEST = frozenset({400, 413, 422})
# Backoff after a failure, in seconds: the initial value, doubled for each consecutive failure, and the maximum.
_FAILURE_WAIT = (0.2, 5.0)
# Backoff after an abort without a token, in seconds: initial value, doubled likewise, and maximum. It keeps the client
# from polling a server that aborts everything in a tight loop.
_EMPTY_ABORT_WAIT = (0.01, 1.0)
# Timeout for closing the connections, in seconds.
_CLOSE_SECONDS = 5.0
# Number of invalid answers that are logged as warnings; later ones are logged at debug level.
_MAX_WARNINGS = 10
_BODY_SHOWN = 500
# Invalid answers, each from another server if there are several, after which a named adapter is at fault.
_ADAPTER_ANSWERS = 3
# Tokens that a decode engine samples to be compared with a prefill engine. The first one is the prefill engine's.
ENGINE_TOKENS = 8
# Maximum size of an error answer, in bytes.
_REFUSAL_BYTES = 1 << 20

# Sent with every request, in addition to the parameters of `SamplingConfig`.
_NEUTRAL = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "stop_token_ids": [],
    "ignore_eos": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "no_stop_trim": False,
}
# Any other value changes the sampling distribution, so that it is no longer the one that the trainer scores. It depends
# on earlier tokens or, with a minimum length that rules out the end, on the response's length.
_TRAINED = ("frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens")
# The trainer scores the distribution of these, at the configured values.
_CONFIGURED = ("temperature", "top_p", "top_k", "min_p")

# Maps the digest of a request (`request_digest`) to its partial response, which grows in place.
Keep = Callable[[str], PartialResponse]


class _TransientError(Exception):
    """A failure that is retried. `cut` is whether the death of a server may have caused it."""

    def __init__(self, message: str, cut: bool = True) -> None:
        super().__init__(message)
        self.cut = cut


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model as the client knows it. `context_length` is in tokens, prompt and response together.

    `tokenizer` is a Hugging Face tokenizer, needed only for `chat`; `stop_ids` are the tokens that end every response,
    which requests name.
    `routes` is the format of routes if trained responses need them.
    """

    vocab_size: int
    context_length: int
    tokenizer: Any = None
    stop_ids: Collection[int] = ()
    routes: RouteFormat | None = None


@dataclass(frozen=True, slots=True)
class RequestSettings:
    """How requests are sent. `timeout` is in seconds, per generation (`timeouts.request`).

    `stream_interval` is the servers' setting, in tokens; 0 if they were started without streaming.
    """

    sampling: SamplingConfig
    timeout: float
    stream_interval: int = 0
    chat: ChatConfig = field(default_factory=ChatConfig)
    # Whether the router sends requests with one routing key to one server.
    sticky: bool = False

    @classmethod
    def of(cls, config: Config) -> RequestSettings:
        rollout = config.rollout
        sticky = rollout.router_policy in STICKY_POLICIES
        return cls(rollout.sampling, config.timeouts.request, rollout.stream_interval, rollout.chat, sticky)


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a request goes that asks for certain weights, in place of the newest published ones.

    `server` is the URL of the server that answers, `adapter` the name of the adapter that any server answers with.

    Without both, the router chooses the server, which answers with what it holds.
    """

    server: str | None = None
    adapter: str | None = None


ANYWHERE = Destination()


class PinnedVersion(Protocol):
    """A version that stays served for as long as an evaluation takes."""

    @property
    def version(self) -> int: ...

    async def destination(self, number: int) -> Destination:
        """Where requests about prompt `number` go. Raises EvaluationAbandoned when nothing holds the version."""
        ...

    async def lost(self, destination: Destination) -> None:
        """Returns once the destination no longer holds the version."""


class _Shared:
    """The requests under way with one routing key and prompt."""

    def __init__(self, prompt: Tokens) -> None:
        self.prompt = prompt
        self.requests = 0
        # Whether a server has computed the prompt, and whether a request that may show it is under way.
        self.computed = False
        self.led = False
        self.changed = asyncio.Event()

    def tell(self, *, computed: bool) -> None:
        self.computed, self.led = self.computed or computed, False
        self.changed.set()


class SharedPrompts:
    """Lets one of several requests with the same routing key and prompt go ahead. For one event loop.

    The samples of a group begin with the same prompt at the same time. A server that takes several of them into one
    prefill computes the prompt for each, because none of them is in its cache yet. So the first one goes ahead, and the
    others are sent when it has its first token. That helps where a group's requests go to one server.

    Every wait ends with the first token or with the end of the request that goes ahead.
    """

    def __init__(self) -> None:
        self._shared: dict[str, _Shared] = {}

    @asynccontextmanager
    async def request(self, key: str, prompt: Tokens) -> AsyncIterator[Callable[[], None]]:
        """Entered when the request may be sent. Yields a function to be called when its first token has arrived."""
        shared = self._shared.setdefault(key, _Shared(prompt))
        if shared.prompt != prompt:
            # Another turn, or an agent with several prompts.
            yield lambda: None
            return
        shared.requests += 1
        leads = False
        try:
            while shared.led and not shared.computed:
                await shared.changed.wait()
            if not shared.computed:
                leads = shared.led = True
                shared.changed.clear()
            yield lambda: shared.tell(computed=True)
        finally:
            if leads and not shared.computed:
                shared.tell(computed=False)
            shared.requests -= 1
            if not shared.requests:
                del self._shared[key]


# An id, blanks and a comma. JSON allows blanks between a number and a comma.
_WIDTH = 8
# As wide as two ids, so that each id begins at a multiple of its width.
_BODY_BEGIN, _BODY_END = b'{ "input_ids": [', b"],"


class RequestBody(aiohttp.payload.Payload):
    """The JSON object `{"input_ids": [...], **rest}`, which becomes text only while it is sent.

    A request waits for its answer far longer than it takes to send. Its body must therefore not hold the text of its
    ids, 256 kB for 32k tokens, but only the ids, whose array belongs to the conversation. There is at least one.
    """

    def __init__(self, ids: Tokens, vocab_size: int, rest: dict[str, Any]) -> None:
        """Raises DataError for ids outside [0, vocab_size)."""
        super().__init__(ids, content_type="application/json")
        ids.check(vocab_size)
        self._ids = ids.array
        self._texts = _texts(vocab_size)
        self._rest = _BODY_END + orjson.dumps(rest)[1:]
        # The end takes the place of the last comma.
        self._length = self._size = len(_BODY_BEGIN) + _WIDTH * self._ids.size - 1 + len(self._rest)

    def text(self) -> bytearray:
        text = bytearray(self._length)
        text[: len(_BODY_BEGIN)] = _BODY_BEGIN
        # No id is out of bounds. With another mode, NumPy would write to a copy first, in case that one is.
        self._texts.take(self._ids, out=np.frombuffer(text, np.uint64, self._ids.size, len(_BODY_BEGIN)), mode="clip")
        text[-len(self._rest) :] = self._rest
        return text

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return self.text().decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        await writer.write(self.text())


@functools.lru_cache(maxsize=4)
def _texts(vocab_size: int) -> NDArray[np.uint64]:
    """The text of each id, as the bytes of one number, [vocab_size]: one look-up is faster than formatting digits."""
    if vocab_size > 10 ** (_WIDTH - 1):
        raise ValueError(f"a vocabulary of {vocab_size} ids, and at most {10 ** (_WIDTH - 1)} are supported")
    digits = np.arange(vocab_size).astype(f"S{_WIDTH}").view(np.uint8).reshape(vocab_size, _WIDTH)
    digits[digits == 0] = ord(" ")
    digits[:, -1] = ord(",")
    return digits.view(np.uint64)[:, 0]


@dataclass(slots=True)
class _Sending:
    """The common settings of one generation's requests, and the outcome of its attempts."""

    params: dict[str, Any]
    routing_key: str | None
    priority: int
    destination: Destination
    routes: RouteFormat | None
    # About the largest support of a token, if supports are requested; 0 otherwise.
    support: int
    # How many of the likeliest tokens are requested at each token, and what is requested about the prompt.
    top: int
    question: PromptQuestion | None
    # Whether a response that is cut begins again.
    whole: bool
    # The message of each failed attempt, and the number of those with an invalid answer.
    failures: list[str]
    ticket: Ticket
    deadline: asyncio.Timeout
    # Waits before the next attempt: after one that failed, and after one that was aborted without a token.
    failed: Backoff
    empty: Backoff
    invalid: int = 0


class RolloutClient:
    """Generates responses over one connection pool. Create one client per event loop.

    The pool opens with the first request; `close` closes it.
    """

    def __init__(
        self,
        router_url: str,
        servers: Sequence[ServerControl],
        model: ServedModel,
        settings: RequestSettings,
        *,
        api_key: str | None = None,
        trust: ssl.SSLContext | None = None,
        quarantine: QuarantineClient | None = None,
        on_invalid_answer: Callable[[], None] = lambda: None,
        auxiliary: Mapping[str, AuxiliaryModel] | None = None,
    ) -> None:
        """`servers` parse the answers of `chat`; `add_server` and `remove_server` change them.

        `api_key` authorises generation, if the servers require it; `trust` verifies a router that serves https.
        `quarantine` tracks prompts, by routing key, that may kill servers. `on_invalid_answer` is called for each
        invalid answer. `auxiliary` are the models that `ask` can name.
        """
        self.url = router_url.rstrip("/")
        self.servers = list(servers)
        self.vocab_size = model.vocab_size
        self.context_length = model.context_length
        self.tokenizer = model.tokenizer
        self._stop_ids = frozenset(model.stop_ids)
        self._routes = model.routes
        self._base = base_params(settings.sampling)
        self._timeout = settings.timeout
        self._interval = settings.stream_interval
        self._chat_config = settings.chat
        # The first token of a response that is not streamed comes with the last.
        self._shared = SharedPrompts() if settings.sticky and self._interval else None
        self._api_key = api_key
        self._trust = trust
        self._quarantine = quarantine or QuarantineClient()
        self._on_invalid_answer = on_invalid_answer
        self._auxiliary = dict(auxiliary or {})
        self._chat: Chat | None = None
        self._session: aiohttp.ClientSession | None = None
        self._invalid_answers = 0
        self._random = random.Random()
        # The published version, which every serving server holds at least, and the newest that any can hold.
        self._published: int | None = None
        self._newest: int | None = None

    def set_versions(self, published: int, newest: int) -> None:
        """Discards answers from now on whose tokens are of versions that no server can hold.

        Every serving server holds at least the `published` version, and none a newer one than the `newest`.
        """
        self._published, self._newest = published, newest

    def add_server(self, server: ServerControl) -> None:
        self.servers.append(server)

    def remove_server(self, url: str) -> None:
        self.servers = [server for server in self.servers if server.url != url]

    def metrics(self) -> dict[str, float]:
        return {"rollout/invalid_answers": float(self._invalid_answers)}

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        routing_key: str | None = None,
        seed: int | None = None,
        keep: Keep | None = None,
        watch: Callable[[IntArray], None] | None = None,
        trained: bool = False,
        priority: int = 0,
        adapter: str | None = None,
        server: str | None = None,
        top: int = 0,
        question: PromptQuestion | None = None,
        whole: bool = False,
        **sampling: Any,
    ) -> Generation:
        """Samples one response. `sampling` overrides configured parameters (temperature, max_new_tokens, stop, ...).

        With `seed`, a server started as deterministic returns the same tokens regardless of its load; other servers
        ignore it. `max_new_tokens` is reduced to the room in the context. A stop string that straddles an interruption
        is not detected. `keep` supplies the partial response of an earlier attempt and lets its caller see the response
        grow; a finished one is returned without a request. `watch` is called with all token ids so far whenever more
        arrive. A `trained` response must be sampled from the distribution that the trainer scores. A server begins
        the waiting requests with the lowest `priority` number first. `adapter` names one that the servers have, which
        answers in place of the policy. `server` is the URL of one that is asked in place of the router, although it
        may hold an older version than the published one.

        `top` requests as many of the likeliest tokens at each token, and `question` log-probs of the prompt; both are
        found in the response that `keep` supplies. A `whole` response, and one with a question, begins again where
        another one continues after an interruption. So no stop string straddles one.

        `prompt_ids` is a list of ids, an array, or `Tokens` such as `generation.tokens + [...]`, of which only the new
        ids are read.

        Raises DataError for ids outside the vocabulary, unknown parameters, parameters that a trained response may not
        have, and prompts that a server rejects; ContextLengthExceeded for a prompt that leaves no room; PoisonPrompt
        for a poison prompt; ServerError when the servers fail otherwise, or do not answer within `request_timeout`.
        """
        prompt, params = self._parameters(prompt_ids, sampling)
        if trained:
            check_trained(params, self._base)
            if adapter is not None:
                raise DataError(f"adapter={adapter!r} is not the policy, whose tokens are trained; leave it out")
        destination = Destination(server, adapter)
        parts = PartialResponse() if keep is None else keep(request_digest(prompt, params))
        parts.follow(prompt)
        # Deterministic servers use the same seed for every request that has none.
        params["sampling_seed"] = self._random.getrandbits(63) if seed is None else seed
        routes = self._routes if trained else None
        support = params["top_k"] if trained and truncates(params) else 0
        async with self._sending(
            *([parts], prompt, params, routing_key, priority, destination),
            *(routes, support, top, question, whole or question is not None, watch),
        ) as sending:
            await self._finish(parts, sending)
            while routes is not None and parts.tokens.routes is None:
                await self._fetch_routes(parts.tokens, sending)
        count = len(parts.texts)
        # A caller that receives this response again gets the same text.
        parts.texts = [self._text(parts, params)]
        text, kept = parts.texts[0], parts.support if support else None
        sampled = parts.tokens, parts.packed_logprobs, parts.spans
        return Generation(prompt, *sampled, parts.finish_reason, text, count, kept)

    async def begin_together(
        self,
        prompt_ids: Sequence[int],
        responses: Sequence[PartialResponse],
        seeds: Sequence[int | None],
        *,
        routing_key: str | None = None,
        adapter: str | None = None,
        top: int = 0,
        whole: bool = False,
        **sampling: Any,
    ) -> None:
        """Sends a request for several new responses to a prompt, each with a seed of its own, until it has an answer.

        A response that is not finished then is for `generate` to continue, which gets it from `keep`. Arguments and
        errors are those of `generate`; the servers need megasync's plugin, and each a single engine.
        """
        prompt, params = self._parameters(prompt_ids, sampling)
        drawn = [self._random.getrandbits(63) if seed is None else seed for seed in seeds]
        for parts in responses:
            parts.follow(prompt)
        with suppress(_TransientError):
            async with self._sending(
                *(responses, prompt, params, routing_key, 0, Destination(None, adapter)),
                *(None, 0, top, None, whole, None),
            ) as sending:
                while await self._attempt(responses, params, sending, drawn):
                    if any(map(len, responses)):
                        # The quarantine hears of it, and that the request has not completed.
                        await self._enter({}, sending)
                        raise _TransientError("the rest is left to `generate`")
                    await asyncio.sleep(sending.failed.next())
        stop_ids = frozenset(() if params["ignore_eos"] else params["stop_token_ids"])
        for parts in responses:
            ended = parts.finished or parts.finish_if_stopped(stop_ids, params["stop"], trim=not params["no_stop_trim"])
            if whole and not ended:
                parts.discard_request()

    @property
    def shares_prompts(self) -> bool:
        """Whether one of several requests for a prompt goes ahead (`SharedPrompts`)."""
        return self._shared is not None

    async def chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[ToolLike] = (),
        conversation: Conversation | None = None,
        **options: Any,
    ) -> Reply:
        """Generates the assistant's turn; it may call `tools`, which are functions or JSON schemas.

        Earlier turns of the `conversation` are sent as the tokens that were sampled (see `Conversation`). `options` are
        those of `generate`, and `must_call`, names of tools: the prompt then ends with the beginning of a call of one
        of them. Raises DataError without a tokenizer or a chat template, or when the template rejects the messages or
        begins no answer with a call, and what `generate` raises.
        """
        return await self._chats().answer(self.generate, conversation or Conversation(), messages, tools, **options)

    def count(self, messages: Sequence[dict[str, Any]], tools: Sequence[ToolLike], conversation: Conversation) -> int:
        """The number of tokens of the prompt that `chat` would send. Raises DataError as `chat`."""
        return self._chats().count(conversation, messages, tools)

    async def ask(self, model: str, messages: Sequence[dict[str, Any]], **sampling: Any) -> str:
        """The answer of one of `auxiliary_models` to chat messages; see `AuxiliaryModel.chat`.

        Raises DataError for a model that the configuration does not name.
        """
        if model not in self._auxiliary:
            names = ", ".join(self._auxiliary) or "none"
            raise DataError(f"there is no auxiliary model {model!r}; auxiliary_models has {names}")
        return await self._auxiliary[model].chat(messages, **sampling)

    @property
    def sets_reasoning_apart(self) -> bool:
        """Whether `chat` separates reasoning from answers. Raises DataError without a chat template."""
        return self._chats().sets_reasoning_apart

    async def score(self, server: ServerControl, input_ids: Sequence[int]) -> list[float]:
        """Scores each token but the first: its log-prob given the tokens before it, from `server`, at temperature 1.

        Raises DataError for fewer than two ids or ids outside the vocabulary, ServerError when the server fails, does
        not answer in time, or returns an invalid answer.
        """
        ids = self._checked(input_ids)
        if len(ids) < 2:
            raise DataError("score() needs at least two tokens: the first has no log-prob")
        # One token is sampled and discarded; the log-probs of the input come with it.
        body = self._scoring(ids[:], 1)
        answer = await server.post("/generate", body, timeout=self._timeout)
        try:
            return read_scored(answer, body["input_ids"])
        except InvalidAnswer as error:
            self._invalid_answers += 1
            raise InvalidAnswer(f"{server.url}/generate: {error}") from error

    async def engine_scores(self, server: ServerControl, input_ids: Sequence[int]) -> list[EngineScores]:
        """The log-probs of each engine of a server for the same tokens; nothing for a server of a single engine.

        In each pair of them, the decode engine samples a few tokens after ``input_ids``, and the prefill engine scores
        all of these. `score` asks only one prefill engine, and no decode engine. Raises as `score`.
        """
        if not isinstance(server, DisaggregatedControl):
            return []
        # With room for what is sampled.
        ids = self._checked(input_ids)[:][: self.context_length - ENGINE_TOKENS - 1]
        first: list[float] = []
        compared: list[EngineScores] = []
        for pair in range(server.pairs):
            answer = await server.generate_on(pair, self._scoring(ids, ENGINE_TOKENS), self._timeout)
            try:
                sampled = read_generated(orjson.dumps(answer), AnswerLimits(self.vocab_size, ENGINE_TOKENS))
                if not sampled.token_ids:
                    raise ServerError(f"{server.url}/generate: aborted before the first token")
                sequence = [*ids, *sampled.token_ids]
                answer = await server.generate_on(pair, self._scoring(sequence, 1), self._timeout)
                scores = read_scored(answer, sequence)
            except InvalidAnswer as error:
                self._invalid_answers += 1
                raise InvalidAnswer(f"{server.url}/generate: {error}") from error
            except StreamedError as error:
                raise ServerError(f"{server.url}/generate: {error}") from error
            prompt, response = scores[: len(ids) - 1], scores[len(ids) - 1 :]
            compared.append(EngineScores(f"decode engine of pair {pair}", response, list(sampled.logprobs)))
            first = first or prompt
            compared.append(EngineScores(f"prefill engine of pair {pair}", first, prompt))
        return compared

    def _scoring(self, ids: list[int], tokens: int) -> dict[str, Any]:
        """A request for the log-probs of ``ids`` at temperature 1, and for ``tokens`` more."""
        return {
            "input_ids": ids,
            "sampling_params": self._base
            | {"temperature": 1.0, "max_new_tokens": tokens, "stop": [], "stop_token_ids": [], "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": 0,
            # A cache of its own. The server's may have keys and values of older weights: of pause_mode=in_place.
            "extra_key": uuid.uuid4().hex,
        }

    async def close(self) -> None:
        """Closes the connections. The server controls are closed by their owner."""
        if self._session is not None:
            session, self._session = self._session, None
            try:
                async with asyncio.timeout(_CLOSE_SECONDS):
                    await session.close()
            except TimeoutError:
                log.warning("Connections to %s did not close within %g s, abandoning them", self.url, _CLOSE_SECONDS)

    def _parameters(self, prompt_ids: Sequence[int], sampling: dict[str, Any]) -> tuple[Tokens, dict[str, Any]]:
        """A prompt, and all sampling parameters but the seed. Raises as `generate`."""
        prompt = self._checked(prompt_ids)
        params = merge_params(self._base, sampling)
        budget = min(params["max_new_tokens"], self.context_length - len(prompt))
        if budget < 1:
            raise ContextLengthExceeded(
                f"a prompt of {len(prompt)} tokens leaves no room for a response in a context of {self.context_length}"
            )
        params["max_new_tokens"] = budget
        if not params["ignore_eos"]:
            # A server may not know all of them, such as the one with which a chat template ends a turn.
            params["stop_token_ids"] = sorted(self._stop_ids.union(params["stop_token_ids"]))
        return prompt, params

    @asynccontextmanager
    async def _sending(
        self,
        responses: Sequence[PartialResponse],
        prompt: Tokens,
        params: dict[str, Any],
        routing_key: str | None,
        priority: int,
        destination: Destination,
        routes: RouteFormat | None,
        support: int,
        top: int,
        question: PromptQuestion | None,
        whole: bool,
        watch: Callable[[IntArray], None] | None,
    ) -> AsyncIterator[_Sending]:
        """Tracks the requests for some responses to a prompt. Raises ServerError when the deadline passes."""
        failures: list[str] = []
        try:
            with self._quarantine.request(routing_key, prompt) as ticket:
                # Before the deadline, because the quarantine may hold back the request that goes ahead.
                async with (
                    self._turn(routing_key, prompt, responses[0]) as first_token,
                    asyncio.timeout(self._timeout) as deadline,
                ):
                    for parts in responses:
                        parts.watch = _first(first_token, watch)
                    failed, empty = Backoff(_FAILURE_WAIT, self._random), Backoff(_EMPTY_ABORT_WAIT, self._random)
                    yield _Sending(
                        *(params, routing_key, priority, destination, routes, support, top, question, whole, failures),
                        *(ticket, deadline, failed, empty),
                    )
        except TimeoutError:
            last = f"; the last of {len(failures)} failed attempts: {failures[-1]}" if failures else ""
            raise ServerError(
                f"no complete answer from {self.url} within {self._timeout:g} s (timeouts.request) for a prompt of "
                f"{len(prompt)} tokens and a budget of {params['max_new_tokens']}, after "
                f"{sum(map(len, responses))} tokens{last}"
            ) from None

    async def _finish(self, parts: PartialResponse, sending: _Sending) -> None:
        """Sends requests until the response is finished."""
        params, budget = sending.params, sending.params["max_new_tokens"]
        minimum = min(params["min_new_tokens"], budget)
        stop_ids = frozenset(() if params["ignore_eos"] else params["stop_token_ids"])
        while not parts.finished and (done := len(parts)) < budget:
            rest = {"max_new_tokens": budget - done, "min_new_tokens": max(0, minimum - done)}
            failed = await self._attempt([parts], params | rest, sending)
            if parts.finished or parts.finish_if_stopped(stop_ids, params["stop"], trim=not params["no_stop_trim"]):
                return
            if sending.whole:
                parts.discard_request()
            if len(parts) > done:
                sending.failed.reset()
                sending.empty.reset()
            else:
                await asyncio.sleep((sending.failed if failed else sending.empty).next())
        if not parts.finished:
            parts.finish_reason = "length"

    async def _fetch_routes(self, tokens: Tokens, sending: _Sending) -> None:
        """Asks for missing routes of tokens that are complete. One token is sampled and discarded."""
        probe = PartialResponse()
        probe.follow(tokens)
        failed = await self._attempt([probe], sending.params | {"max_new_tokens": 1, "min_new_tokens": 0}, sending)
        if tokens.routes is None:
            if not failed:
                sending.failures.append(
                    "the answer has no routes; start the server with --enable-return-routed-experts and megasync's "
                    "plugin, or set rollout.routing_replay=false"
                )
            await asyncio.sleep(sending.failed.next())

    async def _attempt(
        self,
        responses: Sequence[PartialResponse],
        params: dict[str, Any],
        sending: _Sending,
        seeds: Sequence[int] = (),
    ) -> bool:
        """Sends one request; returns whether it failed. Appends the message of a failure.

        It has one response, or several new ones with ``seeds`` of their own.
        """
        tokens = responses[0].tokens
        # A response of one piece has nothing to save, but other requests may wait for its first token.
        pieces = params["max_new_tokens"] > self._interval or (self._shared is not None and len(responses) == 1)
        body = {
            "input_ids": tokens,
            "sampling_params": params,
            "return_logprob": True,
            # Each piece would repeat what it says of the prompt.
            "stream": bool(self._interval) and pieces and sending.question is None,
            "priority": sending.priority,
        }
        labels = {} if sending.routes is None else {ROUTES_FROM: str(tokens.routed)}
        if seeds:
            labels[SEEDS] = ",".join(map(str, seeds))
        if sending.support:
            labels[WITH_SUPPORT] = "1"
        if sending.top:
            body["top_logprobs_num"] = sending.top
        if (question := sending.question) is not None:
            # The answer begins with the position before the first one that has a log-prob.
            body["logprob_start_len"] = question.first - 1
            if question.named:
                body["token_ids_logprob"] = list(question.named)
            if question.top:
                body["top_logprobs_num"] = question.top
                labels[FLAT_TOP] = "1"
        if labels:
            body["custom_labels"] = labels
        if sending.destination.adapter is not None:
            body["lora_path"] = sending.destination.adapter
        url = await self._enter(body, sending) or sending.destination.server or self.url
        try:
            await self._request(url, body, responses, sending)
        except _TransientError as failure:
            sending.failures.append(str(failure))
            if failure.cut:
                self._quarantine.cut(sending.ticket)
        except InvalidAnswer as failure:
            for parts in responses:
                parts.discard_request()
            sending.failures.append(f"invalid answer: {failure}")
            self._invalid_answers += 1
            self._on_invalid_answer()
            level = logging.WARNING if self._invalid_answers <= _MAX_WARNINGS else logging.DEBUG
            log.log(level, "Invalid answer from %s/generate, retrying: %s", self.url, failure)
            sending.invalid += 1
            if (adapter := sending.destination.adapter) is not None and sending.invalid >= _ADAPTER_ANSWERS:
                raise DataError(
                    f"{sending.invalid} answers with the adapter {adapter} were invalid: {failure!s:.100}; "
                    f"its weights may be too large to compute with: go back to an earlier checkpoint, and train with a "
                    f"smaller learning rate"
                ) from failure
        else:
            return False
        return True

    def _turn(
        self, key: str | None, prompt: Tokens, parts: PartialResponse
    ) -> AbstractAsyncContextManager[Callable[[], None] | None]:
        if self._shared is None or key is None or len(parts):
            return nullcontext()
        return self._shared.request(key, prompt)

    async def _enter(self, body: dict[str, Any], sending: _Sending) -> str | None:
        """Waits while the prompt is held back as a suspect, which pauses the deadline.

        Returns the URL of the server that the next request must go to, if that is prescribed.
        """
        if self._quarantine.clears(sending.ticket):
            return await self._quarantine.enter(sending.ticket, body)
        until, clock = sending.deadline.when(), asyncio.get_running_loop().time
        assert until is not None
        left = until - clock()
        sending.deadline.reschedule(None)
        url = await self._quarantine.enter(sending.ticket, body)
        sending.deadline.reschedule(clock() + left)
        return url

    async def _request(
        self,
        url: str,
        body: dict[str, Any],
        responses: Sequence[PartialResponse],
        sending: _Sending,
    ) -> None:
        """Sends one request and adds its tokens to the responses.

        Raises _TransientError, InvalidAnswer, and the errors of `_raise_refusal`.
        """
        ids, rest = body["input_ids"], {name: value for name, value in body.items() if name != "input_ids"}
        sampling = body["sampling_params"]
        budget = sampling["max_new_tokens"]
        # What answers at a destination may be older than the published version.
        published = self._published if sending.destination == ANYWHERE else None
        for parts in responses:
            parts.begin_request(budget, published)
        positions = len(ids) + budget - 1 - responses[0].first_requested
        limits = AnswerLimits(
            self.vocab_size,
            budget,
            sampling["stop"],
            lambda: self._newest,
            sending.routes,
            positions,
            sending.support,
            oldest=published or 0,
            adapter=sending.destination.adapter,
            top=sending.top,
            responses=len(responses),
        )
        most = limits.most_bytes + (0 if sending.question is None else sending.question.most_bytes(len(ids)))
        try:
            async with self._open().post(
                # A redirect would send the request elsewhere.
                url + "/generate",
                data=RequestBody(ids, self.vocab_size, rest),
                headers=_headers(sending.routing_key, sending.invalid),
                allow_redirects=False,
            ) as response:
                if response.status != 200:
                    text = (await read_bounded(response, _REFUSAL_BYTES))[:_BODY_SHOWN].decode("utf-8", "replace")
                    self._raise_refusal(response.status, text, len(ids))
                elif (encoding := response.headers.get("Content-Encoding", "identity")) != "identity":
                    raise InvalidAnswer(f"the answer has the encoding {encoding!r:.100}, which was not requested")
                elif body["stream"]:
                    await self._read_stream(response, responses, limits)
                else:
                    answers = split_answers(await read_bounded(response, most), limits)
                    for parts, raw in zip(responses, answers, strict=True):
                        if not parts.add(read_generated(raw, limits)):
                            raise InvalidAnswer("the answer has no finish_reason")
                        if sending.question is not None and parts.finished:
                            parts.scores = read_prompt(raw, sending.question, ids.array, limits)
        except StreamedError as error:
            self._raise_refusal(error.status, str(error), len(ids))
        except (aiohttp.ClientError, OSError) as error:
            # A request that could not connect reached no server.
            cut = not isinstance(error, aiohttp.ClientConnectorError)
            raise _TransientError(f"{type(error).__name__}: {error}", cut) from error

    async def _read_stream(
        self, response: aiohttp.ClientResponse, responses: Sequence[PartialResponse], limits: AnswerLimits
    ) -> None:
        open_responses = set(range(len(responses)))
        try:
            # Read to the end of the stream: a connection with unread data is not reused.
            async for event in events(response, limits.most_bytes):
                piece = read_generated(event, limits)
                if piece.number not in open_responses:
                    raise InvalidAnswer(f"the stream continues after the last piece: {event[:_BODY_SHOWN]!r}")
                if responses[piece.number].add(piece):
                    open_responses.discard(piece.number)
        except (aiohttp.ClientError, OSError):
            if open_responses:
                raise
        if open_responses:
            raise _TransientError("the stream ended before the request finished")

    def _raise_refusal(self, status: int | None, text: str, sent: int) -> NoReturn:
        failure = f"status {status}: {text}"
        if status in _RETRIED:
            raise _TransientError(failure, cut=status not in _NOT_SENT)
        error = DataError if status in _BAD_REQUEST else ServerError
        raise error(f"{self.url}/generate refused a prompt of {sent} tokens: {failure}")

    def _checked(self, ids: Sequence[int]) -> Tokens:
        """Raises DataError for no ids, and for other values than integers in [0, vocab_size)."""
        tokens = Tokens.of(ids)
        if not len(tokens):
            raise DataError("the prompt has no tokens")
        tokens.check(self.vocab_size)
        return tokens

    def _text(self, parts: PartialResponse, params: dict[str, Any]) -> str:
        if len(parts.texts) == 1 or self.tokenizer is None or params["stop"]:
            return "".join(parts.texts)
        # A character may be split between two requests, which the server decoded separately.
        return self.tokenizer.decode(parts.token_ids.tolist(), skip_special_tokens=params["skip_special_tokens"])

    def _chats(self) -> Chat:
        if self._chat is None:
            parser = ReplyParser(lambda: self.servers, self._timeout)
            self._chat = Chat(self.tokenizer, self._chat_config, parser)
        return self._chat

    def _open(self) -> aiohttp.ClientSession:
        # Created here and not in __init__, because a session belongs to the event loop that creates it.
        if self._session is None:
            headers = {"Content-Type": "application/json"}
            if self._api_key:
                headers["Authorization"] = f"Bearer {self._api_key}"
            self._session = aiohttp.ClientSession(
                headers=headers | {"Accept-Encoding": "identity"},
                # The rollouter limits concurrency; `generate` enforces the deadline.
                connector=aiohttp.TCPConnector(limit=0, ssl=self._trust or True),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0),
                cookie_jar=aiohttp.DummyCookieJar(),
                # No compression is requested, and a small compressed answer may expand to a huge one.
                auto_decompress=False,
            )
        return self._session


def _first(
    arrived: Callable[[], None] | None, watch: Callable[[IntArray], None] | None
) -> Callable[[IntArray], None] | None:
    """Calls both for new tokens: `arrived` without them."""
    if arrived is None:
        return watch

    def both(token_ids: IntArray) -> None:
        arrived()
        if watch is not None:
            watch(token_ids)

    return both


def _headers(routing_key: str | None, invalid: int) -> dict[str, str] | None:
    """The routing key pins requests to one server; after `invalid` answers the changed key picks another."""
    if routing_key is None:
        return None
    return {ROUTING_KEY_HEADER: f"{routing_key}#{invalid}" if invalid else routing_key}


def base_params(sampling: SamplingConfig) -> dict[str, Any]:
    """Return every sampling parameter with its value. `stop` is a copy."""
    return _NEUTRAL | {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "max_new_tokens": sampling.max_new_tokens,
        "stop": list(sampling.stop),
    }


def merge_params(base: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Merge into a new dictionary. Raises DataError for an unknown parameter or a value out of range."""
    for name in overrides:
        if name not in base:
            near = get_close_matches(name, base, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(sorted(base))}"
            raise DataError(f"{name!r} is not a sampling parameter{hint}")
    params = base | overrides
    # SGLang also accepts a single string.
    params["stop"] = [params["stop"]] if isinstance(params["stop"], str) else list(params["stop"] or ())
    if "" in params["stop"]:
        raise DataError("stop contains an empty text, which would end every response immediately; remove it")
    if not params["temperature"] >= 0:
        raise DataError(f"temperature must be 0 (greedy) or more, not {params['temperature']!r}")
    if not 0 < params["top_p"] <= 1:
        raise DataError(f"top_p must be in (0, 1], not {params['top_p']!r}")
    if params["top_k"] != -1 and params["top_k"] < 1:
        raise DataError(f"top_k must be -1 (all) or at least 1, not {params['top_k']!r}")
    if not 0 <= params["min_p"] <= 1:
        raise DataError(f"min_p must be in [0, 1], not {params['min_p']!r}")
    if params["max_new_tokens"] < 1:
        raise DataError(f"max_new_tokens must be at least 1, not {params['max_new_tokens']!r}")
    return params


def truncates(params: Mapping[str, Any]) -> bool:
    """Whether some tokens are never sampled, so that the trainer needs to know which remain (`trajectory.Support`)."""
    return params["top_k"] != -1 or params["top_p"] < 1 or params["min_p"] > 0


def check_trained(params: Mapping[str, Any], base: Mapping[str, Any]) -> None:
    """Check the parameters of a training rollout, with those of the configuration as ``base``.

    Raises DataError if they would sample from another distribution than the trainer scores.
    """
    for name in (*_CONFIGURED, *_TRAINED):
        value = base[name]
        if params[name] != value:
            why = f"rollout.sampling.{name}" if name in _CONFIGURED else "the full distribution"
            raise DataError(
                f"{name}={params[name]!r} is not allowed in a training rollout: the trainer scores tokens at {why}, "
                f"which is {name}={value!r}. Leave {name} out; evaluation may use other values (eval.sampling)"
            )
