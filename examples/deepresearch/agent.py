"""The search agent: the model searches, reads what was found, and gives its answer in <answer>...</answer>.

    rollout:
      workflow: deepresearch.agent:SearchAgent
      workflow_options: {retrievers: [http://127.0.0.1:8101], refiner: refiner, max_turns: 4}

A sample ends with the first marked answer, or when turns or context are used up. Its reward is the answer's F1 (0
without an answer), less a penalty for each call that was made before, and for each turn or call that cannot be read.
While no retriever or refiner answers there are no samples: the ServerError of a search goes through to megasync, which
tries again.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from deepresearch.prompts import NOTHING_FOUND, OPEN_RULE, SOLVED, SYSTEM, UNMARKED, as_text, refine_messages
from deepresearch.retrieve_client import RetrieveClient
from deepresearch.scoring import exact_match, f1, marked_answer
from megasync.errors import ContextLengthExceeded, DataError
from megasync.rollout.conversation import Reply
from megasync.rollout.tools import Tool, Toolbox, ToolCall, as_tool
from megasync.trajectory import Trajectory

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rules:
    """`top_k` is the number of passages that a search finds; `may_open` gives the second tool, open_document."""

    max_turns: int = 4
    top_k: int = 2
    may_open: bool = False
    duplicate_penalty: float = 0.1
    malformed_penalty: float = 0.1


async def search(query: str) -> str:
    """Searches the encyclopaedia.

    Args:
        query: what to look for, in a few words
    """
    raise NotImplementedError("SearchAgent answers it, for one sample")


async def open_document(document_id: str) -> str:
    """Shows a whole document.

    Args:
        document_id: one of the names that a search listed under Documents
    """
    raise NotImplementedError("SearchAgent answers it, for one sample")


class SearchAgent:
    """A workflow. Everything in it comes from the configuration, and connections open with the first search.

    So any process can make one: the run's own, or a rollout worker.
    """

    def __init__(
        self, retrievers: Sequence[str], refiner: str | None = None, instructions: bool = True, **rules: Any
    ) -> None:
        """Takes the options of the configuration.

        Args:
            retrievers: URLs of retrieval servers that do the same.
            refiner: which of `auxiliary_models` condenses what is found; without one the model reads it as it is.
            instructions: whether prompts explain the tools and show two solved questions. A model that was trained on
                the format needs neither.
            rules: fields of `Rules`.
        """
        self.retriever = RetrieveClient(retrievers)
        self._refiner = refiner
        self._rules = Rules(**rules)
        system = {"role": "system", "content": SYSTEM + (OPEN_RULE if self._rules.may_open else "")}
        self._opening = [system, *SOLVED] if instructions else []

    async def close(self) -> None:
        await self.retriever.close()

    async def __call__(self, client: Any, sample: dict[str, Any]) -> list[Trajectory]:
        """The workflow. `sample` has the question as `prompt`, and `answers`, of which each is right."""
        counts: Counter[str] = Counter()
        toolbox = Toolbox(self._tools(client, counts))
        seen: set[str] = set()
        messages = [*self._opening, {"role": "user", "content": sample["prompt"]}]
        reply, answer = None, None
        for turn in range(self._rules.max_turns):
            try:
                reply = await client.chat(messages, tools=toolbox.tools)
            except ContextLengthExceeded:
                if reply is None:
                    raise
                counts["context_full"] += 1
                break
            answer = marked_answer(reply.content)
            if answer is not None:
                break
            if turn == self._rules.max_turns - 1:
                counts["turn_limit"] += 1
                break
            messages = reply.messages + await _observations(reply, toolbox, seen, counts)
        assert reply is not None
        calls = toolbox.counts
        counts["malformed"] = calls["malformed"] + calls["unknown"] + counts["unmarked"]
        # Calls that were run. Those that not even the parser could read never became calls.
        counts["searches"] = calls["calls"] - calls["unknown"] - (calls["malformed"] - counts["unread"])
        scores = self._scores(answer, sample["answers"], counts)
        return reply.trajectories(scores["agent/reward"], scores)

    def _tools(self, client: Any, counts: Counter[str]) -> list[Tool]:
        """The tools of one sample, because the refiner is reached through the sample's client."""

        async def found(query: str) -> str:
            return await self._found(client, query, counts)

        tools = [replace(as_tool(search), function=found)]
        if self._rules.may_open:
            tools.append(replace(as_tool(open_document), function=self._document))
        return tools

    async def _document(self, document_id: str) -> str:
        document = await self.retriever.document(document_id)
        return f"{document['title']}: {document['text']}"

    async def _found(self, client: Any, query: str, counts: Counter[str]) -> str:
        """What the model is shown of a search."""
        passages = await self.retriever.retrieve(query, self._rules.top_k)
        if not passages:
            return NOTHING_FOUND
        text = as_text(passages)
        if self._refiner is not None:
            try:
                # A refiner that writes nothing has found nothing that bears on the query.
                text = await client.ask(self._refiner, refine_messages(query, passages)) or NOTHING_FOUND
            except DataError as error:
                # Too long for the refiner. An outage is a ServerError and ends the sample.
                log.debug("A search is shown unrefined: %s", error)
                counts["unrefined"] += 1
        if self._rules.may_open:
            text += "\nDocuments: " + ", ".join(dict.fromkeys(passage["document"] for passage in passages))
        return text

    def _scores(self, answer: str | None, truths: Sequence[str], counts: Counter[str]) -> dict[str, float]:
        """The reward and the metrics of one sample."""
        scores = {"f1": 0.0, "em": 0.0, "answered": float(answer is not None)}
        if answer is not None:
            scores |= {"f1": f1(answer, truths), "em": exact_match(answer, truths)}
        rules = self._rules
        penalty = rules.duplicate_penalty * counts["duplicates"] + rules.malformed_penalty * counts["malformed"]
        scores["reward"] = scores["f1"] - penalty
        kinds = ("searches", "duplicates", "malformed", "unmarked", "unrefined", "turn_limit", "context_full")
        return {f"agent/{name}": value for name, value in scores.items()} | {
            f"agent/{kind}": float(counts[kind]) for kind in kinds
        }


async def _observations(reply: Reply, toolbox: Toolbox, seen: set[str], counts: Counter[str]) -> list[dict[str, Any]]:
    """What the model is shown after an answer that is not its last: results of its calls, or what was wrong."""
    if not (reply.tool_calls or reply.malformed_calls):
        counts["unmarked"] += 1
        return [{"role": "user", "content": UNMARKED}]
    fresh, repeated = [], []
    for call in reply.tool_calls:
        (fresh if _is_new(call, seen) else repeated).append(call)
    counts["duplicates"] += len(repeated)
    counts["unread"] += reply.malformed_calls
    return [_repeated(call) for call in repeated] + await toolbox.run(fresh, reply.malformed_calls)


def _is_new(call: ToolCall, seen: set[str]) -> bool:
    """False for the same call again, also in other letters and spaces. A call that cannot be read is never the same."""
    if call.arguments is None:
        return True
    key = f"{call.name} {sorted((name, ' '.join(str(v).casefold().split())) for name, v in call.arguments.items())}"
    if key in seen:
        return False
    seen.add(key)
    return True


def _repeated(call: ToolCall) -> dict[str, Any]:
    text = f"You made this call before: {call.name} {call.arguments}. Read its result above, or ask something else."
    return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text}
