"""Turns become trajectories: what the server sampled is what is trained, token for token, once."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from fake_template import EOS, FakeTemplate

from megasync.errors import DataError
from megasync.rollout.conversation import ChatTurn, Conversation, Generation
from megasync.rollout.tokens import Tokens
from megasync.trajectory import ANSWER, TOKEN_REWARDS

USER = {"role": "user", "content": "q"}
TOOL = {"role": "tool", "content": "r"}


class Talk:
    """A conversation whose model writes a given text, one token per character, with a new version for each turn."""

    def __init__(self, template, **options):
        self.template, self.options = template, options
        self.conversation = Conversation()
        self.version = 0

    def say(self, messages, answer, *, tools=(), closed=True, calls=()):
        """The messages with the answer behind them, and its generation."""
        prompt = self.conversation.prompt(self.template, messages, tools, **self.options)
        ids = [ord(c) for c in answer + EOS * closed]
        self.version += 1
        logprobs = [-self.version - n / 1000 for n in range(len(ids))]
        versions = [self.version] * len(ids)
        raw = Generation.of(prompt.ids, ids, logprobs, versions, "stop" if closed else "length", answer)
        raw.added = prompt.added
        generation = self.conversation.record(raw)
        message = {"role": "assistant", "content": answer} | ({"tool_calls": list(calls)} if calls else {})
        return self.conversation.answered(self.template, prompt, generation, message), generation

    @property
    def counts(self):
        return (self.conversation.realigned, self.conversation.forked)


def counts(lines=1, **others):
    names = ("turns", "turns_realigned", "turns_forked", "lines_sub_agent", "lines_retry", "lines_compacted")
    return {"lines": float(lines), **{name: float(others.get(name, 0)) for name in names}}


def masked(trajectory, template):
    """The trajectory's response as text, what is not trained in lower case brackets."""
    text, before = "", 1
    for token, mask in zip(trajectory.response_ids, trajectory.loss_mask, strict=True):
        text += "|" * (mask != before) + template.decode([token])
        before = mask
    return text


def test_turns_are_one_trajectory_with_what_the_model_did_not_write_left_out_of_the_loss():
    talk = Talk(FakeTemplate())
    said, _ = talk.say([USER], "ab")
    _, last = talk.say([*said, TOOL], "cd")
    (trajectory,) = talk.conversation.trajectories(reward=1.0)
    assert talk.template.decode(trajectory.prompt_ids) == "<user>q$<assistant>"
    assert masked(trajectory, talk.template) == "ab$|<tool>r$<assistant>|cd$"
    assert [v for v, m in zip(trajectory.versions, trajectory.loss_mask, strict=True) if m] == [1, 1, 1, 2, 2, 2]
    assert {p for p, m in zip(trajectory.logprobs, trajectory.loss_mask, strict=True) if not m} == {0.0}
    assert trajectory.metrics == counts(turns=2)
    assert (trajectory.reward, trajectory.text) == (1.0, "cd")
    assert last.trajectory().response_ids.tolist() == trajectory.response_ids.tolist()


def test_an_answer_that_was_cut_is_closed_by_the_template():
    talk = Talk(FakeTemplate())
    said, _ = talk.say([USER], "ab", closed=False)
    talk.say([*said, TOOL], "c")
    (trajectory,) = talk.conversation.trajectories()
    assert masked(trajectory, talk.template) == "ab|$<tool>r$<assistant>|c$"


@pytest.mark.parametrize("closed", [True, False])
def test_another_form_of_the_answer_is_realigned(closed):
    talk = Talk(FakeTemplate(tidies=True))
    said, first = talk.say([USER], "a    b", closed=closed)
    said, second = talk.say([*said, TOOL], "c  d")
    talk.say([*said, TOOL], "e")
    assert second.parent is first
    assert talk.counts == (2, 0)
    (trajectory,) = talk.conversation.trajectories()
    closing = "$|" if closed else "|$"
    assert masked(trajectory, talk.template) == f"a    b{closing}<tool>r$<assistant>|c  d$|<tool>r$<assistant>|e$"


@pytest.mark.parametrize("ends_calls", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_tool_calls_in_another_form_are_realigned_behind_the_whole_answer(count, ends_calls):
    talk = Talk(FakeTemplate(tidies=True, ends_calls=ends_calls))
    call = {"id": "0", "type": "function", "function": {"name": "f", "arguments": {"x": {"y": 1}}}}
    written = 'f( x = {"y":1} )' * count
    prompt = talk.conversation.prompt(talk.template, [USER])
    ids = [ord(c) for c in written + EOS]
    generation = talk.conversation.record(Generation.of(prompt.ids, ids, [0.0] * len(ids), [0] * len(ids), "stop"))
    answer = {"role": "assistant", "content": "", "tool_calls": [call] * count}
    talk.conversation.answered(talk.template, prompt, generation, answer)
    following = talk.conversation.prompt(talk.template, [USER, answer, TOOL])
    assert talk.template.decode(following.ids) == f"<user>q$<assistant>{written}$<tool>r$<assistant>"
    assert talk.counts == (1, 0)


def test_a_template_that_forgets_reasoning_forks_and_both_parts_are_trained():
    talk = Talk(FakeTemplate(forgets=True))
    said, _ = talk.say([USER], "(hm)one")
    said, second = talk.say([*said, USER], "(so)two")
    assert talk.counts == (0, 1)
    assert second.parent is None
    assert talk.template.decode(second.prompt_ids) == "<user>q$<assistant>one$<user>q$<assistant>"
    first, last = talk.conversation.trajectories(reward=0.5, metrics={"m": 1.0})
    assert (masked(first, talk.template), masked(last, talk.template)) == ("(hm)one$", "(so)two$")
    assert (first.text, first.reward, first.metrics) == ("(so)two", 0.5, {})
    assert last.metrics == counts(turns=2, turns_forked=1, lines=2) | {"m": 1.0}


def test_a_rewriting_template_is_realigned_where_that_is_asked_for():
    talk = Talk(FakeTemplate(forgets=True), realign_rewritten=True)
    said, _ = talk.say([USER], "(hm)one")
    said, _ = talk.say([*said, USER], "(so)two")
    talk.say([*said, USER], "three")
    assert talk.counts == (2, 0)
    (trajectory,) = talk.conversation.trajectories()
    between = "$|<user>q$<assistant>|"
    assert masked(trajectory, talk.template) == f"(hm)one{between}(so)two{between}three$"


@pytest.mark.parametrize("realign", [False, True])
def test_edited_messages_fork(realign):
    talk = Talk(FakeTemplate(), realign_rewritten=realign)
    talk.say([USER], "one")
    _, second = talk.say([USER, {"role": "assistant", "content": "other"}, USER], "two")
    assert (second.parent, talk.counts) == (None, (0, 1))


@pytest.mark.parametrize("realign", [False, True])
def test_other_tools_fork(realign):
    talk = Talk(FakeTemplate(), realign_rewritten=realign)
    said, _ = talk.say([USER], "one", tools=[{"function": {"name": "f"}}])
    _, second = talk.say([*said, TOOL], "two", tools=[{"function": {"name": "g"}}])
    assert talk.template.decode(second.prompt_ids).startswith("[g]<user>")
    assert talk.counts == (0, 1)


@pytest.mark.parametrize("oddity", ["refuses", "hides_answers"])
def test_where_the_answer_cannot_be_found_the_conversation_forks(oddity):
    talk = Talk(FakeTemplate(tidies=True, **{oddity: True}))
    said, _ = talk.say([USER], "a  b")
    talk.say([*said, TOOL], "c")
    assert talk.counts == (0, 1)


def test_two_answers_to_the_same_messages_are_two_lines_and_no_fork():
    talk = Talk(FakeTemplate())
    said, _ = talk.say([USER], "one")
    talk.say([USER], "two")
    talk.say([*said, TOOL], "three")
    assert talk.counts == (0, 0)
    assert [masked(t, talk.template) for t in talk.conversation.trajectories()] == [
        "two$",
        "one$|<tool>r$<assistant>|three$",
    ]


DRAFT = "The draft has one long line that others may repeat."


def system(content):
    return {"role": "system", "content": content}


def user(content):
    return {"role": "user", "content": content}


def reviewed(say):
    """A reviewer is given an answer that nothing continues, and so is the next one."""
    say([system("lead"), user("write")], DRAFT)
    for part in ("style", "facts"):
        say([system("review"), user(f"{part} of: {DRAFT}")], "good")
    say([system("lead"), user("another text")], "done")


def titled(say):
    """Another agent begins, about the same message."""
    say([system("title"), user("task")], "A title")
    say([system("lead"), user("task")], "done")


def dated(say):
    """The end of a long system prompt changes."""
    said = say([system("x" * 300 + "Monday"), user("task")], "one")
    say([system("x" * 300 + "Tuesday"), *said[1:], user("more")], "two")


def forgotten(say):
    """The summary is short, so it may stand in any text."""
    said = say([system("lead"), user("task")], "one")
    said = say([*said, user("Summarise.")], "all fine")
    say([system("lead"), user("So far: all fine")], "done")


def same_calls(say):
    """Two agents answer alike; each goes on from its own answer with a changed one before it."""
    call = {"id": "0", "type": "function", "function": {"name": "f", "arguments": {}}}
    histories = [say([system("lead"), user(f"task {n}")], "", calls=[call]) for n in range(2)]
    for number, messages in enumerate(histories):
        say([messages[0], user(f"changed {number}"), *messages[2:], TOOL], "done")


@pytest.mark.parametrize(
    ("history", "lines"),
    [
        (reviewed, [("side", "new"), ("sub-agent", "new"), ("sub-agent", "new"), ("final", "new")]),
        (titled, [("sub-agent", "new"), ("final", "new")]),
        (dated, [("rewritten", "new"), ("final", "rewritten")]),
        (forgotten, [("side", "new"), ("final", "new")]),
        # Which of two equal answers was meant cannot be told; the latest one is taken.
        (same_calls, [("side", "new"), ("rewritten", "new"), ("side", "rewritten"), ("final", "rewritten")]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_lines_are_told_apart_by_their_prompts(history, lines):
    talk = Talk(FakeTemplate())
    history(lambda *given, **options: talk.say(*given, **options)[0])
    assert [(line.kind, line.origin) for _, line in talk.conversation.lines()] == lines


def test_lines_of_tokens_are_new_or_branches_or_retries():
    conversation = Conversation()

    def sample(prompt, *ids):
        return conversation.record(Generation.of(prompt, ids, [0.0] * len(ids), [0] * len(ids), "stop"))

    first = sample([1, 2], 3)
    sample([1, 2], 4)
    sample([*first.tokens, 5], 6)
    sample([*first.tokens, 7], 8)
    sample([9], 9)
    assert [(line.kind, line.origin, line.parent) for _, line in conversation.lines()] == [
        ("retry", "retry", 1), ("side", "new", None), ("side", "branch", 1), ("final", "new", None),
    ]  # fmt: skip


@pytest.mark.parametrize("agents", [1, 20])
def test_a_prompt_is_compared_only_with_what_it_may_continue(monkeypatch, agents):
    turns = 10
    talk, compared = Talk(FakeTemplate()), Counter()
    for name, kind in (("begins_with", Tokens), ("is_continued_by", ChatTurn)):
        real = getattr(kind, name)

        def counted(self, *others, real=real, name=name):
            compared[name] += 1
            return real(self, *others)

        monkeypatch.setattr(kind, name, counted)
    histories = [[user(f"task {number}")] for number in range(agents)]
    for _ in range(turns):
        histories = [[*talk.say(messages, f"{messages[0]}")[0], USER] for messages in histories]
    assert len(talk.conversation.lines()) == agents
    # The longest one; with several agents also the first answers of all of them, and its own.
    assert max(compared.values()) <= agents * turns * (1 if agents == 1 else agents + turns + 1)


def test_rewards_of_turns_are_at_their_last_tokens_and_sum_up_to_the_reward():
    talk = Talk(FakeTemplate())
    said, _ = talk.say([USER], "ab")
    said, _ = talk.say([*said, TOOL], "cd")
    (trajectory,) = talk.conversation.trajectories(turn_rewards=[0.25, 1.0])
    assert trajectory.reward == 1.25
    found = trajectory.arrays[TOKEN_REWARDS]
    ends = np.flatnonzero(~np.isnan(found))
    assert found[ends].tolist() == [0.25, 1.0] and ends[1] == len(found) - 1
    assert talk.template.decode(trajectory.response_ids[ends[0] : ends[0] + 1]) == EOS
    # Each line has the rewards of the turns that it trains.
    talk.say([USER, {"role": "user", "content": "again"}], "ef")
    first, second = talk.conversation.trajectories(3.0, turn_rewards=[0.25, 1.0, 0.5])
    assert (first.reward, second.reward) == (3.0, 3.0)
    assert [np.nansum(t.arrays[TOKEN_REWARDS]).item() for t in (first, second)] == [1.25, 0.5]
    with pytest.raises(DataError, match="got 1 rewards for 3 turns"):
        talk.conversation.trajectories(turn_rewards=[1.0])


def turns(trajectory, template):
    """Who said what."""
    return [
        (f"{turn.role} {turn.name}".strip(), template.decode(trajectory.response_ids[turn.start : turn.end]))
        for turn in trajectory.turns
    ]


class Callless(FakeTemplate):
    """Renders no tool calls, as SmolLM2's template."""

    def render(self, messages, tools=(), *, answer):
        return super().render([m | {"tool_calls": []} for m in messages], tools, answer=answer)


@pytest.mark.parametrize("tidies", [False, True], ids=["continued", "realigned"])
def test_turns_tell_who_said_what(tidies):
    talk = Talk(Callless(tidies=tidies))
    calls = [{"id": str(n), "type": "function", "function": {"name": f"f{n}", "arguments": {}}} for n in (0, 1)]
    said, _ = talk.say([USER], "a  b")
    said, _ = talk.say([*said, USER], "c", calls=calls)
    # Texts that the template itself writes do not confuse, and neither do blanks that it may trim.
    results = [
        {"role": "tool", "tool_call_id": "1", "content": "t\n"},
        {"role": "tool", "tool_call_id": "0", "name": "own", "content": "o"},
        {"role": "system", "content": "s"},
    ]
    talk.say([*said, *results], "d")
    (trajectory,) = talk.conversation.trajectories()
    assert turns(trajectory, talk.template)[:3] == [
        (ANSWER, "a  b$"), ("user", "<user>q$<assistant>"), (ANSWER, "c$"),
    ]  # fmt: skip
    assert turns(trajectory, talk.template)[3:] == [
        ("tool f1", "<tool>t"), ("tool own", "\n$<tool>o"), ("system", "$<system>s$<assistant>"), (ANSWER, "d$"),
    ]  # fmt: skip
    assert talk.counts == (2 * tidies, 0)


class Gathering(FakeTemplate):
    """Renders all results of tools at its end, as no template does."""

    def render(self, messages, tools=(), *, answer):
        tools_last = sorted(messages, key=lambda message: message["content"][:1] == "r")
        return super().render(tools_last, tools, answer=answer)


class Silent(FakeTemplate):
    """Does not tell where tokens begin."""

    def starts(self, text):
        return None


@pytest.mark.parametrize("template", [Silent(), Gathering()])
def test_messages_that_cannot_be_told_apart_are_one_turn(template):
    talk = Talk(template)
    said, _ = talk.say([USER], "a")
    talk.say([*said, TOOL | {"name": "f"}, TOOL | {"name": "g"}, USER], "b")
    (trajectory,) = talk.conversation.trajectories()
    assert [(turn.role, turn.name) for turn in trajectory.turns] == [(ANSWER, ""), ("tool, user", "f, g"), (ANSWER, "")]
    assert [turn.end for turn in trajectory.turns[:-1]] == [turn.start for turn in trajectory.turns[1:]]


def test_an_answer_that_another_trajectory_trains_is_still_an_answer():
    talk = Talk(FakeTemplate())
    said, _ = talk.say([USER], "one")
    talk.say([*said, TOOL], "two")
    talk.say([*said, USER], "three")
    _, second = talk.conversation.trajectories()
    assert masked(second, talk.template).startswith("|one$")
    assert [turn.role for turn in second.turns] == [ANSWER, "user", ANSWER]


def test_one_answer_without_a_call_needs_no_turns():
    talk = Talk(FakeTemplate())
    talk.say([USER], "one")
    (trajectory,) = talk.conversation.trajectories()
    assert trajectory.turns == ()


def test_trajectories_of_nothing_are_refused():
    with pytest.raises(DataError, match="before it generated anything"):
        Conversation().trajectories()
