"""The rows and the warm starts of the calculator and of the programs. Nothing is trained."""

from __future__ import annotations

import inspect
import json
import re

import pytest
from calculator import train as calculator
from programs import train as programs
from warm_start import example, split_words

from megasync.config import load_config
from megasync.rewards import load_reward

CONVERSATIONS = {
    calculator.PIECES: [*map(calculator.solved, calculator.sums()[:4000])],
    programs.PIECES: [*map(programs.solved, programs.tasks()[:2000])],
}


@pytest.mark.parametrize(("pieces", "conversations"), CONVERSATIONS.items(), ids=["calculator", "programs"])
def test_the_model_knows_every_word_of_the_rows_and_prompts_have_room(pieces, conversations):
    """Text is read as it is written, and prompts are no longer than the configuration allows."""
    if pieces == calculator.PIECES:
        prompts, config = [calculator.row(terms)["prompt"] for terms in calculator.sums()[4000:]], calculator.CONFIG
    else:
        prompts, config = [programs.row(task)["prompt"] for task in programs.tasks()[2000:3000]], programs.CONFIG
    tokenizer, room = split_words(pieces, conversations), load_config(config).data.prompt.max_tokens
    for messages in (*conversations[:200], *prompts[::10]):
        made = example(tokenizer, messages)
        assert tokenizer.unk_token_id not in made.ids
        assert tokenizer.decode(made.ids) == tokenizer.apply_chat_template(messages, tokenize=False)
        # `example` lacks the token that begins the answer.
        assert len(messages) > 1 or len(made.ids) < room


def test_the_calls_of_a_solved_sum_give_its_results_and_its_answer_is_rewarded():
    tools = {"add": calculator.add, "subtract": calculator.subtract}
    for messages in CONVERSATIONS[calculator.PIECES][:200]:
        for call, result in zip(messages[1:-1:2], messages[2:-1:2], strict=True):
            made = json.loads(re.sub("</?tool_call>", "", call["content"]))
            assert str(tools[made["name"]](**made["arguments"])) == result["content"]
        assert eval(messages[0]["content"]) == int(messages[-1]["content"])
        right = messages[-1]["content"]
        assert calculator.reward([right, f"{right}0", ""], answer=[right] * 3) == [1.0, 0.0, 0.0]


def test_no_task_occurs_twice_so_that_none_is_both_held_out_and_trained():
    for texts in (["".join(terms) for terms in calculator.sums()], [text for text, _ in programs.tasks()]):
        assert len(set(texts)) == len(texts) >= 3000


@pytest.mark.processes
async def test_a_solution_passes_its_tests_and_another_program_does_not():
    reward = load_reward("code")
    for task in programs.tasks()[2000:2003]:
        right = programs.solved(task)[1]["content"]
        columns = {"tests": [programs.row(task)["tests"]] * 2}
        scores = reward([right, right.replace("return ", "return 1 + ")], **columns)
        assert (await scores if inspect.isawaitable(scores) else scores) == [1.0, 0.0]
