"""The search agent's rules; the client and the search are fakes."""

from types import SimpleNamespace

import pytest
from deepresearch.agent import SearchAgent
from deepresearch.http_pool import RequestRefused, ServiceFailed
from deepresearch.prompts import NOTHING_FOUND, UNMARKED
from trajectories import trajectory

from megasync.base.importing import load_callable
from megasync.errors import ConfigError, ContextLengthExceeded, DataError, ServerError, is_infrastructure
from megasync.rollout.tools import ToolCall

SAMPLE = {"prompt": "Where was Ada born?", "answers": ["Torilaholm", "the town of Torilaholm"]}


def search(query, **more):
    return ToolCall("1", "search", {"query": query, **more})


class FakeReply(SimpleNamespace):
    def trajectories(self, reward, metrics):
        return [trajectory(self.content, reward, metrics=metrics)]


class FakeClient:
    """Answers by turns: a text, a call, a list of calls, a number of malformed calls, or an error."""

    def __init__(self, *turns, refined=None):
        self.turns, self.asked, self.refined = list(turns), [], refined

    async def ask(self, model, messages):
        assert model == "refiner"
        if isinstance(self.refined, Exception):
            raise self.refined
        return self.refined(messages[0]["content"])

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


async def play(*turns, refined=None, down=None, **options):
    client, retriever = FakeClient(*turns, refined=refined), FakeRetriever(down)
    agent = SearchAgent(["http://unused"], "refiner" if refined else None, **options)
    agent.retriever = retriever
    (episode,) = await agent(client, SAMPLE)
    return client, retriever, episode, {name.removeprefix("agent/"): value for name, value in episode.metrics.items()}


async def test_search_read_answer():
    client, retriever, episode, found = await play(search("Ada"), "<answer>Torilaholm</answer>", top_k=2)
    assert retriever.queries == [("Ada", 2)]
    assert client.shown(1) == ["- T0: about Ada.\n- T1: about Ada."]
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
    assert fresh == "- T0: about Bea."
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


def shortened(request):
    return f"notes on {request.count('about')} passages for {request.split('Query: ')[1].splitlines()[0]}"


async def test_searches_are_refined():
    client, _, _, found = await play(search(" Ada "), "<answer>x</answer>", refined=shortened)
    assert client.shown(1) == ["notes on 2 passages for Ada"]
    assert found["unrefined"] == 0.0


async def test_a_refiner_that_writes_nothing_found_nothing():
    client, *_ = await play(search("Ada"), "<answer>x</answer>", refined=lambda request: "")
    assert client.shown(1) == [NOTHING_FOUND]


async def test_what_is_too_long_for_the_refiner_is_shown_whole():
    client, _, _, found = await play(search("Ada"), "<answer>x</answer>", refined=DataError("too long"))
    assert client.shown(1) == ["- T0: about Ada.\n- T1: about Ada."]
    assert found["unrefined"] == 1.0


async def test_an_outage_of_the_refiner_is_an_infrastructure_failure():
    with pytest.raises(ServerError, match="no answer") as raised:
        await play(search("Ada"), "<answer>x</answer>", refined=ServerError("no answer"))
    assert is_infrastructure(raised.value)


async def test_a_model_that_knows_the_format_gets_no_instructions():
    client, *_ = await play("<answer>x</answer>", instructions=False)
    assert client.asked == [[{"role": "user", "content": SAMPLE["prompt"]}]]


async def test_the_configuration_makes_the_agent_and_closing_it_twice_is_fine():
    options = {"retrievers": ["http://a"], "refiner": "refiner", "max_turns": 2}
    agent = load_callable("deepresearch.agent:SearchAgent", options)
    await agent.close()
    await agent.close()
    with pytest.raises(ConfigError, match="does not accept its options .*max_turn"):
        load_callable("deepresearch.agent:SearchAgent", options | {"max_turn": 2})


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
    client, *_ = await play(search("Ada"), opened, "<answer>x</answer>", may_open=True, refined=shortened)
    assert client.tools == ["search", "open_document"]
    assert client.shown(1) == ["notes on 2 passages for Ada\nDocuments: d0, d1"]
    assert client.shown(2) == ["D1: All of it."]
    assert "open_document" in client.asked[0][0]["content"]
