"""What is kept of responses: for the very request that they answer, and complete ones as complete."""

from array import array

from hypothesis import given
from hypothesis import strategies as st
from responses import grow

from megasync.rollout import partials as partials_module
from megasync.rollout.partials import PartialResponse, PartialResponses, request_digest
from megasync.rollout.tokens import Tokens
from megasync.serving.answers import Finish, GeneratedPiece
from megasync.trajectory import Partial


def unsaved(partials: PartialResponses) -> dict:
    """All pieces as one, each of them saved."""
    return {key: partial for piece in partials.unsaved() for key, partial in piece.items()}


def tokens(response: PartialResponse | Partial) -> list[int]:
    return list(response.token_ids)


def test_only_responses_changed_since_the_last_save_are_unsaved():
    partials = PartialResponses()
    first, second = (partials.sample("0:1", index).begin(0, "a") for index in (0, 1))
    assert unsaved(partials) == {}
    grow(first, [5, 6])
    assert [(key, tokens(p)) for key, p in unsaved(partials).items()] == [(("0:1", 0, 0), [5, 6])]
    assert unsaved(partials) == {}
    grow(first, [7])
    grow(second, [8])
    assert {key: tokens(p) for key, p in unsaved(partials).items()} == {("0:1", 0, 0): [5, 6, 7], ("0:1", 1, 0): [8]}
    # Its last piece brought no token.
    first.finish_reason = "length"
    assert [p.finish_reason for p in unsaved(partials).values()] == ["length"]


def test_a_replaced_response_is_unsaved_even_if_it_is_shorter():
    partials = PartialResponses()
    sample = partials.sample("0:1", 0)
    grow(sample.begin(0, "a"), [5, 6])
    unsaved(partials)
    grow(sample.begin(0, "b"), [7])
    assert [(p.request_digest, tokens(p)) for p in unsaved(partials).values()] == [("b", [7])]


def test_saving_takes_a_copy_of_the_unfinished_response():
    partials = PartialResponses()
    parts = partials.sample("0:1", 0).begin(0, "a")
    grow(parts, [5])
    (saved,) = unsaved(partials).values()
    grow(parts, [6])
    assert (tokens(saved), saved.request_digest, saved.finish_reason) == ([5], "a", "abort")


def test_a_finished_turn_is_reused_until_its_own_sample_fails():
    partials = PartialResponses()
    sample = partials.sample("0:1", 0)
    done, growing = sample.begin(0, "a"), sample.begin(1, "b")
    grow(done, [5])
    grow(growing, [6])
    done.finish_reason = "stop"
    other = partials.sample("0:1", 1).begin(0, "a")
    grow(other, [7])
    other.finish_reason = "stop"
    assert sample.begin(0, "a") is done
    sample.forget_finished()
    assert tokens(sample.begin(0, "a")) == []
    assert sample.begin(1, "b") is growing
    assert partials.sample("0:1", 1).begin(0, "a") is other


def test_an_attempt_with_the_same_request_continues_the_previous_partial_response():
    partials = PartialResponses()
    grow(partials.sample("0:1", 0).begin(0, "a"), [5])
    assert tokens(partials.sample("0:1", 0).begin(0, "a")) == [5]
    assert tokens(partials.sample("0:1", 0).begin(0, "b")) == []
    assert tokens(partials.sample("0:1", 1).begin(0, "a")) == []


def test_restored_responses_count_as_saved():
    partials, later = PartialResponses(), PartialResponses()
    growing, done = (partials.sample("0:1", 2).begin(turn, "a") for turn in (1, 0))
    grow(growing, [5, 6])
    grow(done, [9])
    done.finish_reason, done.texts = "stop", ["nine"]
    saved = {(sample, turn): partial for (_, sample, turn), partial in unsaved(partials).items()}
    later.restore("0:1", saved)
    assert unsaved(later) == {}
    parts = later.sample("0:1", 2).begin(1, "a")
    assert (tokens(parts), list(parts.logprobs), parts.versions, parts.finished) == (
        [5, 6],
        [-0.5, -0.5],
        [1, 1],
        False,
    )
    again = later.sample("0:1", 2).begin(0, "a")
    assert (tokens(again), again.finish_reason, again.texts) == ([9], "stop", ["nine"])
    grow(parts, [7])
    assert [tokens(p) for p in unsaved(later).values()] == [[5, 6, 7]]
    later.forget("0:1")
    assert tokens(later.sample("0:1", 2).begin(1, "a")) == []


def test_unsaved_responses_come_in_batches_and_a_failed_batch_is_repeated(monkeypatch):
    monkeypatch.setattr(partials_module, "BATCH_TOKENS", 4)
    partials = PartialResponses()
    for uid in range(4):
        for index in range(2):
            grow(partials.sample(f"0:{uid}", index).begin(0, "a"), range(2))
    pieces = partials.unsaved()
    assert list(next(pieces)) == [("0:0", 0, 0), ("0:0", 1, 0)]
    assert list(next(pieces)) == [("0:1", 0, 0), ("0:1", 1, 0)]
    # Saving the second one fails; meanwhile a group has ended, and another one grown.
    pieces.close()
    partials.forget("0:2")
    grow(partials.sample("0:3", 1).begin(0, "a"), [9, 9])
    sizes = [{key[0]: len(partial.token_ids) for key, partial in piece.items()} for piece in partials.unsaved()]
    assert sizes == [{"0:1": 2}, {"0:3": 4}]
    assert unsaved(partials) == {}


def test_groups_that_end_between_two_batches_are_skipped(monkeypatch):
    monkeypatch.setattr(partials_module, "BATCH_TOKENS", 1)
    partials = PartialResponses()
    for uid in range(3):
        grow(partials.sample(f"0:{uid}", 0).begin(0, "a"), [5])
    pieces = partials.unsaved()
    next(pieces)
    for uid in range(2):
        partials.forget(f"0:{uid}")
    grow(partials.sample("0:4", 0).begin(0, "a"), [5])
    assert [list(piece) for piece in pieces] == [[("0:2", 0, 0)]]
    assert list(unsaved(partials)) == [("0:4", 0, 0)]


def test_the_request_digest_depends_on_the_prompt_and_every_parameter():
    params = {"temperature": 1.0, "max_new_tokens": 8, "stop": ["x"]}
    changed = [{"temperature": 0.5}, {"max_new_tokens": 7}, {"stop": []}]
    prompt = Tokens.of([1, 2])
    digests = [request_digest(prompt, params), request_digest(prompt + [3], params)]
    digests += [request_digest(prompt, params | change) for change in changed]
    assert len(set(digests)) == 5
    assert request_digest(Tokens.of([1, 2]), dict(reversed(params.items()))) == digests[0]


# A request: pieces of (version at sending, tokens), and how it ends: by its last piece, with the server's report of
# versions, without one, or discarded.
PIECES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=3)
REQUESTS = st.lists(st.tuples(PIECES, st.sampled_from(["report", "cut", "discard"]), st.integers(0, 3)), max_size=6)


@given(REQUESTS, st.lists(st.integers(0, 9), min_size=1, max_size=4), st.booleans())
def test_pieces_add_up_as_in_plain_lists(requests, prompt, saved_between):
    response, before = PartialResponse(), Tokens.of(prompt)
    response.follow(before)
    ids, logprobs, versions = [], [], []
    for pieces, end, newest in requests:
        response.begin_request(100, published=0)
        new_ids, new_versions, earlier = [], [], 0
        for version, count in pieces:
            numbers = [len(ids) + len(new_ids) + n for n in range(count)]
            piece = GeneratedPiece(array("i", numbers), array("f", [-n / 8 for n in numbers]), "", None, version, [])
            response.add(piece)
            new_ids += numbers
            new_versions += [earlier] * count
            earlier = version
        if end == "report":
            spans = [(newest, 1), (newest + 1, len(new_ids) - 1)] if new_ids else []
            response.add(GeneratedPiece(array("i"), array("f"), "", Finish("abort"), -1, spans))
            new_versions = [newest] * min(1, len(new_ids)) + [newest + 1] * (len(new_ids) - 1)
        elif end == "discard":
            response.discard_request()
            new_ids, new_versions = [], []
        ids, versions, logprobs = ids + new_ids, versions + new_versions, logprobs + [-n / 8 for n in new_ids]
        if saved_between:
            response = PartialResponse.from_saved(response.snapshot("digest"))
            response.follow(before)
        assert (tokens(response), response.logprobs.tolist(), list(response.versions)) == (ids, logprobs, versions)
        assert (response.tokens, len(response)) == ([*prompt, *ids], len(ids))
