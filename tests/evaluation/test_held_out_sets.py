"""Which held-out sets there are, what they ask, and who scores them."""

from __future__ import annotations

import json

import pytest
from tiny_models import byte_tokenizer

from megasync.config import load_config
from megasync.data import Renderer
from megasync.data.match import match_answer
from megasync.errors import ConfigError
from megasync.evaluation.held_out import held_out_sets
from megasync.rewards.scoring import Scoring

TOKENIZER = byte_tokenizer()


def always(completions, **columns):
    return [0.25 for _ in completions]


@pytest.fixture
def build(tmp_path):
    """The sets of a configuration with `sets`; `data.eval` is three rows of copied digits."""
    plain = tmp_path / "plain.jsonl"
    plain.write_text("".join(json.dumps({"prompt": f"p{n}"}) + "\n" for n in range(4)))

    def sets(*overrides, only=(), verifier=None, reward=None, own_rows=None, scores_itself=False):
        values = {
            "model": {"path": "m"},
            "data": {"eval": {"kind": "digits", "source": "copy", "size": 3, "options": {"length": 2}}},
            "eval": {"samples": 3, "sampling": {"top_p": 0.9}},
        }
        config = load_config(values, [override.format(plain=plain) for override in overrides])
        renderer = Renderer(TOKENIZER, config.data.prompt, len(TOKENIZER))
        return held_out_sets(config, renderer, Scoring(config, reward), verifier, own_rows, only, scores_itself)

    return sets


PLAIN = "eval.sets.plain.data={{kind: jsonl, source: {plain}}}"
DIGITS = "eval.sets.more.data={{kind: digits, source: increment, size: 8, options: {{length: 2}}}}"


def named(sets):
    return {each.name: each for each in sets}


async def scored(held_out):
    from trajectories import trajectory

    (found,) = await held_out.rewards.score([trajectory("nonsense")], held_out.prompts[0].columns)
    return found.reward


def test_unset_options_of_a_held_out_set_default_to_the_eval_section_and_training(build):
    sets = named(build(DIGITS, "eval.repeats=2", "eval.temperatures=[0,1]", "eval.sets.more.sampling.max_new_tokens=9"))
    assert list(sets) == ["", "more"]
    assert (sets[""].repeats, sets[""].temperatures, sets[""].sampling) == (2, (0.0, 1.0), {"top_p": 0.9})
    assert sets["more"].sampling == {"top_p": 0.9, "max_new_tokens": 9}
    assert len(sets["more"].prompts) == 3
    own = named(build(DIGITS, "eval.sets.more.samples=5", "eval.sets.more.temperatures=[0.5]"))["more"]
    assert (len(own.prompts), own.temperatures, own.repeats) == (5, (0.5,), 1)


async def test_set_rewards_take_precedence_over_the_run_reward_and_the_verifier(build):
    sets = named(build(PLAIN, DIGITS, "eval.sets.plain.reward=math", reward=always))
    assert await scored(sets[""]) == await scored(sets["more"]) == 0.25
    assert sets["more"].rewards is sets[""].rewards, "one runner, and so one set of worker processes"
    assert sets["plain"].rewards is not sets[""].rewards
    digits = named(build(PLAIN, DIGITS, verifier=always))
    assert await scored(digits["more"]) == 0.0, "its task's own verifier"
    assert await scored(digits["plain"]) == 0.25, "the training set's, as its rows bring none"


def test_a_held_out_set_without_a_reward_is_refused_by_name(build):
    with pytest.raises(ConfigError, match=r"held-out set 'plain'.*eval.sets.plain.reward"):
        build(PLAIN)
    assert len(build(PLAIN, scores_itself=True)) == 2


def test_held_out_sets_are_selected_by_name(build):
    assert [each.name for each in build(DIGITS, only=["more"])] == ["more"]
    assert [each.name for each in build(DIGITS, only=["eval"])] == [""]
    with pytest.raises(ConfigError, match="unknown held-out set 'mores'; known sets: eval, more"):
        build(DIGITS, only=["mores"])


def test_rows_passed_from_python_form_the_unnamed_set(build):
    (found,) = build("data.eval=null", own_rows=[{"prompt": "a"}, {"prompt": "b"}], verifier=always)
    assert (found.name, [prompt.columns["prompt"] for prompt in found.prompts]) == ("", ["a", "b"])


def test_rows_from_python_with_an_answer_have_the_default_reward(build):
    (found,) = build("data.eval=null", own_rows=[{"prompt": "a", "answer": "1"}])
    assert found.verifier is match_answer
    with pytest.raises(ConfigError, match='the column "answer" is empty in all 1 rows.*data.columns'):
        build("data.eval=null", own_rows=[{"prompt": "a", "answer": None}])


def test_the_columns_of_the_configuration_apply_to_held_out_rows(build):
    (found,) = build("data.eval=null", "data.columns={{prompt: q, answer: s}}", own_rows=[{"q": "a", "s": "1"}])
    assert found.prompts[0].columns == {"q": "a", "s": "1", "prompt": "a", "answer": "1"}


def test_configured_reward_models_are_refused_if_python_passes_a_reward(build):
    with pytest.raises(ConfigError, match=r"reward= from Python.*reward_models \(judge\)"):
        build("reward_models.judge={{kind: generative, path: m}}", reward=always)
