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


def tokens(response: PartialResponse | Partial) -> list[int]:
    return list(response.token_ids)


UIDS, SAMPLES, TURNS = st.sampled_from(["0:0", "0:1"]), st.integers(0, 1), st.integers(0, 1)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), UIDS, SAMPLES, TURNS, st.sampled_from("ab"), st.integers(0, 2), st.booleans()),
        st.tuples(st.just("sample fails"), UIDS, SAMPLES),
        st.tuples(st.just("group ends"), UIDS),
        st.tuples(st.just("save")),
        st.tuples(st.just("another life")),
    ),
    max_size=25,
)


@given(STEPS)
def test_a_request_continues_its_response_and_what_changed_since_the_last_save_is_unsaved(steps):
    """Against a dictionary of (digest, tokens, finish) by (uid, sample, turn), and what of it is saved."""
    partials, responses, saved = PartialResponses(), {}, {}
    for number, (what, *where) in enumerate(steps):
        if what == "begin":
            *key, digest, count, ends = where
            known = responses.get(tuple(key), ("",))
            if known[0] != digest:
                saved.pop(tuple(key), None)
            _, ids, finish = known if known[0] == digest else ("", (), "abort")
            response = partials.sample(*key[:2]).begin(key[2], digest)
            assert (tuple(response.token_ids), response.finish_reason) == (ids, finish)
            if finish == "abort":
                grow(response, [number] * count)
                response.finish_reason = finish = "stop" if ends else "abort"
                ids += (number,) * count
            responses[tuple(key)] = (digest, ids, finish)
        elif what == "sample fails":
            partials.sample(*where).forget_finished()
            for key in [key for key, each in responses.items() if key[:2] == tuple(where) and each[2] == "stop"]:
                del responses[key]
        elif what == "group ends":
            partials.forget(*where)
            responses = {key: each for key, each in responses.items() if key[0] != where[0]}
        else:
            nothing = ("", (), "abort")
            changed = {key for key, each in responses.items() if saved.get(key, nothing)[1:] != each[1:]}
            pieces = {key: partial for piece in partials.unsaved() for key, partial in piece.items()}
            # A response that was begun again is another one, also if it has as many tokens as the saved one.
            assert changed <= pieces.keys() <= responses.keys()
            for key, p in pieces.items():
                assert (p.request_digest, tuple(p.token_ids), p.finish_reason) == responses[key]
            saved |= {key: responses[key] for key in pieces}
            assert list(partials.unsaved()) == []
        if what == "another life":
            partials, responses = PartialResponses(), {key: saved[key] for key in responses if key in saved}
            for (uid, *key), (digest, ids, finish) in responses.items():
                partial = Partial(digest, ids, [-0.5] * len(ids), [1] * len(ids), finish)
                partials.restore(uid, {tuple(key): partial})
            assert list(partials.unsaved()) == []


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
    assert list(partials.unsaved()) == []


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
