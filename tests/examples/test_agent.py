"""The search agent's rules; the client and the search are fakes."""

from types import SimpleNamespace

import pytest
from deepresearch.agent import Rules, SearchAgent
from deepresearch.http_pool import RequestRefused, ServiceFailed
from deepresearch.prompts import UNMARKED
from trajectories import trajectory

from megasync.errors import ContextLengthExceeded
from megasync.failures import is_infrastructure
from megasync.rollout.tools import ToolCall

SAMPLE = {"prompt": "Where was Ada born?", "answers": ["Torilaholm", "the town of Torilaholm"]}


def search(query, **more):
    return ToolCall("1", "search", {"query": query, **more})


class FakeReply(SimpleNamespace):
    def trajectories(self, reward, metrics):
        return [trajectory(self.content, reward, metrics=metrics)]


class FakeClient:
    """Answers by turns: a text, a call, a list of calls, a number of malformed calls, or an error."""

    def __init__(self, *turns):
        self.turns, self.asked = list(turns), []

    async def chat(self, messages, tools):
        self.asked.append(list(messages))
        self.tools = [tool.name for tool in tools]
        turn = self.turns.pop(0)
        if isinstance(turn, Exception):
            raise turn
        calls = [turn] if isinstance(turn, ToolCall) else turn if isinstance(turn, list) else []
        content = turn if isinstance(turn, str) else ""
        answer = {"role": "assistant", "content": content}
        malformed = turn if isinstance(turn, int) else 0
        return FakeReply(content=content, messages=[*messages, answer], tool_calls=calls, malformed_calls=malformed)

    def shown(self, turn):
        """What was added before this turn (the first is 0), after the assistant's message."""
        before = len(self.asked[turn - 1]) + 1
        return [message["content"] for message in self.asked[turn][before:]]


class FakeRetriever:
    def __init__(self, error=None):
        self.queries, self.error = [], error

    async def retrieve(self, query, top_k):
        self.queries.append((query, top_k))
        if self.error:
            raise self.error
        return [{"document": f"d{n}", "title": f"T{n}", "text": f"about {query}."} for n in range(top_k)]

    async def document(self, document_id):
        if self.error:
            raise self.error
        return {"title": document_id.upper(), "text": "All of it."}


class FakeRefiner:
    def __init__(self, error=None):
        self.error = error

    async def refine(self, query, passages):
        if self.error:
            raise self.error
        return f"{len(passages)} passages about {query}"


async def play(*turns, refiner=None, down=None, **rules):
    client, retriever = FakeClient(*turns), FakeRetriever(down)
    (episode,) = await SearchAgent(retriever, refiner, Rules(**rules)).rollout(client, SAMPLE)
    return client, retriever, episode, {name.removeprefix("agent/"): value for name, value in episode.metrics.items()}


async def test_search_read_answer():
    client, retriever, episode, found = await play(search("Ada"), "<answer>Torilaholm</answer>", top_k=2)
    assert retriever.queries == [("Ada", 2)]
    assert client.shown(1) == ["T0: about Ada.\nT1: about Ada."]
    assert client.asked[0][-1] == {"role": "user", "content": SAMPLE["prompt"]}
    assert client.tools == ["search"]
    assert episode.reward == 1.0
    assert (found["searches"], found["answered"], found["em"], found["f1"]) == (1.0, 1.0, 1.0, 1.0)
    assert (found["duplicates"], found["malformed"], found["turn_limit"]) == (0.0, 0.0, 0.0)


async def test_a_partially_right_answer_scores_its_f1():
    _, _, episode, found = await play("<answer>in Torilaholm</answer>")
    assert (found["em"], found["answered"], found["searches"]) == (0.0, 1.0, 0.0)
    assert episode.reward == pytest.approx(2 / 3)


async def test_a_repeated_search_is_reported_and_penalised():
    turns = [search("Ada"), [search(" ADA "), search("Bea")], "<answer>Torilaholm</answer>"]
    client, retriever, episode, found = await play(*turns, duplicate_penalty=0.25, top_k=1)
    assert [query for query, _ in retriever.queries] == ["Ada", "Bea"]
    note, fresh = client.shown(2)
    assert note == "You made this call before: search {'query': ' ADA '}. Read its result above, or ask something else."
    assert fresh == "T0: about Bea."
    assert (found["duplicates"], found["searches"], episode.reward) == (1.0, 2.0, 0.75)


@pytest.mark.parametrize(
    ("turn", "shown"),
    [
        (2, "2 tool calls could not be parsed"),
        (search("x", depth=3), "depth"),
        (ToolCall("1", "search", None, "{broken"), "not a JSON object: {broken"),
        (ToolCall("1", "find", {}), "there is no tool 'find'. Known tools: search."),
        ("Torilaholm, I think.", UNMARKED),
    ],
)
async def test_an_unreadable_call_is_reported_and_penalised(turn, shown):
    client, retriever, episode, found = await play(turn, "<answer>Torilaholm</answer>", malformed_penalty=0.1)
    assert shown in client.shown(1)[0]
    count = 2.0 if turn == 2 else 1.0
    assert (found["malformed"], found["searches"], found["unmarked"]) == (count, 0.0, float(isinstance(turn, str)))
    assert episode.reward == pytest.approx(1 - 0.1 * count)
    assert retriever.queries == []


async def test_the_same_search_twice_in_one_answer_is_a_duplicate_too():
    client, retriever, _, found = await play([search("Ada"), search("Ada")], "<answer>x</answer>", top_k=1)
    assert (retriever.queries, found["duplicates"]) == ([("Ada", 1)], 1.0)
    assert len(client.shown(1)) == 2


async def test_unreadable_calls_are_not_duplicates():
    broken = ToolCall("1", "search", None, "{")
    _, _, _, found = await play(broken, broken, "<answer>x</answer>")
    assert (found["malformed"], found["duplicates"]) == (2.0, 0.0)


async def test_turns_are_limited_and_a_missing_answer_scores_zero():
    _, retriever, episode, found = await play(search("a"), search("b"), search("c"), max_turns=3)
    assert [query for query, _ in retriever.queries] == ["a", "b"], "no turn is left to read the last result"
    assert (found["turn_limit"], found["answered"], episode.reward) == (1.0, 0.0, 0.0)


async def test_a_full_context_ends_the_sample_with_its_tokens_so_far():
    _, _, episode, found = await play(search("a"), ContextLengthExceeded("full"))
    assert (found["context_full"], found["answered"], episode.reward) == (1.0, 0.0, 0.0)
    with pytest.raises(ContextLengthExceeded):
        await play(ContextLengthExceeded("full"))


async def test_searches_are_refined_or_shown_whole_if_that_fails():
    client, *_ = await play(search("Ada"), "<answer>x</answer>", refiner=FakeRefiner())
    assert client.shown(1) == ["2 passages about Ada"]
    client, *_ = await play(search("Ada"), "<answer>x</answer>", refiner=FakeRefiner(ServiceFailed("all down")))
    assert client.shown(1) == ["T0: about Ada.\nT1: about Ada."]


@pytest.mark.parametrize("call", [search("Ada"), ToolCall("1", "open_document", {"document_id": "d1"})])
async def test_an_outage_is_an_infrastructure_failure_and_not_an_observation(call):
    with pytest.raises(ServiceFailed, match="all down") as raised:
        await play(call, "<answer>x</answer>", down=ServiceFailed("all down"), may_open=True)
    assert is_infrastructure(raised.value)


async def test_a_refusal_by_the_retriever_is_an_observation():
    client, *_ = await play(search("Ada"), "<answer>x</answer>", down=RequestRefused("status 422: too long"))
    assert client.shown(1) == ["Error: RequestRefused: status 422: too long"]


async def test_documents_can_be_opened_if_the_rules_allow_it():
    opened = ToolCall("1", "open_document", {"document_id": "d1"})
    client, *_ = await play(search("Ada"), opened, "<answer>x</answer>", may_open=True, refiner=FakeRefiner())
    assert client.tools == ["search", "open_document"]
    assert client.shown(1) == ["2 passages about Ada\nDocuments: d0, d1"]
    assert client.shown(2) == ["D1: All of it."]
    assert "open_document" in client.asked[0][0]["content"]
