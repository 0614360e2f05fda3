"""Only unfinished responses are kept, and only for the very prompt that they answer."""

from megasync.rollout.partials import Partials, prompt_digest
from megasync.rollout.parts import Parts


def grow(parts: Parts, *ids: int) -> None:
    parts.token_ids += ids
    parts.logprobs += [-0.5] * len(ids)
    parts.versions += [1] * len(ids)


def test_only_what_has_grown_since_the_last_save_is_unsaved():
    partials = Partials()
    first, second = (partials.sample("0:1", index).begin(0, [1, 2]) for index in (0, 1))
    assert partials.unsaved() == {}
    grow(first, 5, 6)
    assert [(key, p.token_ids) for key, p in partials.unsaved().items()] == [(("0:1", 0, 0), [5, 6])]
    assert partials.unsaved() == {}
    grow(first, 7)
    grow(second, 8)
    assert {key: p.token_ids for key, p in partials.unsaved().items()} == {("0:1", 0, 0): [5, 6, 7], ("0:1", 1, 0): [8]}


def test_a_copy_is_saved_not_the_growing_response():
    partials = Partials()
    parts = partials.sample("0:1", 0).begin(0, [1])
    grow(parts, 5)
    (saved,) = partials.unsaved().values()
    grow(parts, 6)
    assert (saved.token_ids, saved.prompt_digest) == ([5], prompt_digest([1]))


def test_a_finished_turn_is_not_continued():
    partials = Partials()
    sample = partials.sample("0:1", 0)
    grow(sample.begin(0, [1]), 5)
    sample.end(0)
    assert partials.unsaved() == {}
    assert sample.begin(0, [1]).token_ids == []


def test_an_attempt_goes_on_where_the_last_one_failed_if_it_asks_the_same():
    partials = Partials()
    grow(partials.sample("0:1", 0).begin(0, [1]), 5)
    assert partials.sample("0:1", 0).begin(0, [1]).token_ids == [5]
    assert partials.sample("0:1", 0).begin(0, [2]).token_ids == []
    assert partials.sample("0:1", 1).begin(0, [1]).token_ids == []


def test_what_was_saved_is_put_back_and_counts_as_saved():
    partials, later = Partials(), Partials()
    grow(partials.sample("0:1", 2).begin(1, [1]), 5, 6)
    saved = {(sample, turn): partial for (_, sample, turn), partial in partials.unsaved().items()}
    later.restore("0:1", saved)
    assert later.unsaved() == {}
    parts = later.sample("0:1", 2).begin(1, [1])
    assert (parts.token_ids, parts.logprobs, parts.versions) == ([5, 6], [-0.5, -0.5], [1, 1])
    grow(parts, 7)
    assert [p.token_ids for p in later.unsaved().values()] == [[5, 6, 7]]
    later.forget("0:1")
    assert later.sample("0:1", 2).begin(1, [1]).token_ids == []
