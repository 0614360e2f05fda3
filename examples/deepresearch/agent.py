"""The search agent: the model searches, reads what was found, and gives its answer in <answer>...</answer>.

    agent = SearchAgent(RetrieveClient([url]), RefineClient([url]), Rules(max_turns=4))
    megasync.AsyncTrainer(config, rollout=agent.rollout, ...)

A sample ends with the first marked answer, or when turns or context are used up. Its reward is the answer's F1 (0
without an answer), less a penalty for each call that was made before, and for each turn or call that cannot be read.
While no retriever answers there are no samples: the ServiceFailed of a search goes through to megasync, which tries
again.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deepresearch.clients import RefineClient, RetrieveClient, as_text
from deepresearch.http_pool import RequestRefused, ServiceFailed
from deepresearch.prompts import OPEN_RULE, SOLVED, SYSTEM, UNMARKED
from deepresearch.scoring import exact_match, f1, marked_answer
from megasync.errors import ContextLengthExceeded
from megasync.rollout.generation import Reply
from megasync.rollout.tools import Toolbox, ToolCall, as_tool
from megasync.trajectory import Trajectory

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rules:
    """`top_k` is the number of passages that a search shows; `may_open` gives the second tool, open_document."""

    max_turns: int = 4
    top_k: int = 2
    may_open: bool = False
    duplicate_penalty: float = 0.1
    malformed_penalty: float = 0.1


class SearchAgent:
    """Without a refine client the model reads the passages themselves, as it does where refining fails."""

    def __init__(self, retriever: RetrieveClient, refiner: RefineClient | None = None, rules: Rules = Rules()) -> None:
        self._retriever = retriever
        self._refiner = refiner
        self._rules = rules
        self._tools = [as_tool(self.search), *([as_tool(self.open_document)] if rules.may_open else [])]
        self._system = SYSTEM + (OPEN_RULE if rules.may_open else "")
        # Searches that were shown as they were found, because no refine service answered.
        self.unrefined = 0

    async def search(self, query: str) -> str:
        """Searches the encyclopaedia.

        Args:
            query: what to look for, in a few words
        """
        found = await self._retriever.retrieve(query, self._rules.top_k)
        text = await self._refined(query, found) if found else "Nothing was found."
        if self._rules.may_open:
            text += "\nDocuments: " + ", ".join(dict.fromkeys(passage["document"] for passage in found))
        return text

    async def _refined(self, query: str, passages: Sequence[dict[str, Any]]) -> str:
        if self._refiner is not None:
            try:
                return await self._refiner.refine(query, passages)
            except (ServiceFailed, RequestRefused) as error:
                self.unrefined += 1
                log.warning("a search is shown unrefined: %s", error)
        return as_text(passages)

    async def open_document(self, document_id: str) -> str:
        """Shows a whole document.

        Args:
            document_id: one of the names that a search listed under Documents
        """
        document = await self._retriever.document(document_id)
        return f"{document['title']}: {document['text']}"

    async def rollout(self, client: Any, sample: dict[str, Any]) -> list[Trajectory]:
        """The workflow. `sample` has the question as `prompt`, and `answers`, of which each is right."""
        toolbox = Toolbox(self._tools)
        counts: Counter[str] = Counter()
        seen: set[str] = set()
        messages = [
            {"role": "system", "content": self._system},
            *SOLVED,
            {"role": "user", "content": sample["prompt"]},
        ]
        reply, answer = None, None
        for turn in range(self._rules.max_turns):
            try:
                reply = await client.chat(messages, tools=self._tools)
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
        told = toolbox.counts
        counts["malformed"] = told["malformed"] + told["unknown"] + counts["unmarked"]
        # Calls that were run. Those that not even the parser could read never became calls.
        counts["searches"] = told["calls"] - told["unknown"] - (told["malformed"] - counts["unread"])
        scores = self._scores(answer, sample["answers"], counts)
        return reply.trajectories(scores["agent/reward"], scores)

    def _scores(self, answer: str | None, truths: Sequence[str], counts: Counter[str]) -> dict[str, float]:
        """The reward and the metrics of one sample."""
        scores = {"f1": 0.0, "em": 0.0, "answered": float(answer is not None)}
        if answer is not None:
            scores |= {"f1": f1(answer, truths), "em": exact_match(answer, truths)}
        rules = self._rules
        penalty = rules.duplicate_penalty * counts["duplicates"] + rules.malformed_penalty * counts["malformed"]
        scores["reward"] = scores["f1"] - penalty
        kinds = ("searches", "duplicates", "malformed", "unmarked", "turn_limit", "context_full")
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
    return [_told(call) for call in repeated] + await toolbox.run(fresh, reply.malformed_calls)


def _is_new(call: ToolCall, seen: set[str]) -> bool:
    """False for the same call again, also in other letters and spaces. A call that cannot be read is never the same."""
    if call.arguments is None:
        return True
    key = f"{call.name} {sorted((name, ' '.join(str(v).casefold().split())) for name, v in call.arguments.items())}"
    if key in seen:
        return False
    seen.add(key)
    return True


def _told(call: ToolCall) -> dict[str, Any]:
    text = f"You made this call before: {call.name} {call.arguments}. Read its result above, or ask something else."
    return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text}
