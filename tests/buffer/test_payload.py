import os
import pickle
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megasync.buffer import payload, segments
from megasync.buffer.payload import (
    EncodedGroup,
    LeasedGroup,
    StoredBody,
    decode,
    decode_partial,
    encode,
    encode_partial,
    in_memory,
)
from megasync.buffer.segments import SegmentWriter, load, load_trajectories, segments_in
from megasync.errors import DataError
from megasync.trajectory import ANSWER, SUPPORT, SUPPORT_SIZES, Call, Group, Line, Partial, Support, Trajectory, Turn

IDS = st.integers(0, 2**31 - 1)
LOGPROBS = st.floats(-1e3, 0, width=32)
VERSIONS = st.integers(0, 3)
TURNS = (Turn(0, 3, ANSWER, calls=(Call("f", "{}"),)), Turn(3, 8, "tool", "f"), Turn(8, 30, ANSWER))
DTYPES = ["<f4", "<f8", "<i2", "|u1", "<i8"]


@st.composite
def trajectories(draw):
    tokens = draw(st.integers(0, 30))

    def per_token(values):
        return draw(st.lists(values, min_size=tokens, max_size=tokens))

    arrays = {
        name: np.array(per_token(st.integers(0, 100)), dtype).reshape(tokens)
        for name, dtype in draw(st.dictionaries(st.text(max_size=3), st.sampled_from(DTYPES), max_size=3)).items()
    }
    if draw(st.booleans()):
        arrays["experts"] = np.arange(tokens * 6, dtype=np.uint8).reshape(2, 3, tokens).transpose(2, 0, 1)
    if draw(st.booleans()):
        sizes = per_token(st.integers(0, 2))
        arrays |= {SUPPORT_SIZES: np.array(sizes, np.int32), SUPPORT: np.arange(sum(sizes), dtype=np.int32)}
    return Trajectory(
        draw(st.sampled_from([[1], [1, 2], [3] * 7])),
        per_token(IDS),
        per_token(st.sampled_from([0, 1])),
        per_token(LOGPROBS),
        per_token(VERSIONS),
        draw(st.sampled_from(["stop", "length"])),
        reward=draw(st.none() | st.floats(allow_nan=False, allow_infinity=False)),
        metrics=draw(st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False), max_size=2)),
        arrays=arrays,
        turns=draw(st.sampled_from([(), TURNS])),
        sample=draw(st.none() | st.integers(0, 3)),
        line=draw(st.sampled_from([None, Line("sub-agent", "new", 1, None, 3, 7), Line("final", "", 2, 0, 4, 9)])),
    )


GROUPS = st.builds(
    Group,
    st.text(max_size=8),
    st.lists(trajectories(), max_size=5),
    st.integers(1, 2),
    st.none() | st.floats(0, 1),
    st.dictionaries(st.text(max_size=3), st.floats(0, 1), max_size=2),
)


@pytest.mark.parametrize("copied", [0, payload.COPIED_TOKENS])
@given(GROUPS, st.sampled_from([4, 5]))
def test_a_decoded_group_equals_the_one_that_was_encoded(copied, group, protocol):
    with mock.patch.object(payload, "COPIED_TOKENS", copied):
        encoded = encode(group)
    assert encoded.body == encode(group).body
    encoded = pickle.loads(pickle.dumps(encoded, protocol))
    assert decode(encoded.header, encoded.body) == group and encoded.uid == group.uid


@given(GROUPS, st.data())
def test_some_trajectories_of_a_group_are_those_of_the_whole_group(group, data):
    places = data.draw(st.lists(st.integers(0, max(len(group.trajectories) - 1, 0)), unique=True))
    places = places if group.trajectories else []
    assert load_trajectories(in_memory(group), places) == [group.trajectories[place] for place in places]


def test_a_trajectory_is_read_from_a_segment_without_the_rest_of_its_group(tmp_path, monkeypatch):
    encoded = encode(Group("a", [Trajectory([1, 2], [3] * n, [1] * n, [-1.0] * n, [0] * n) for n in (100, 10, 200)]))
    writer = SegmentWriter(tmp_path)
    writer.append([b"another group"])
    leased = LeasedGroup(encoded.header, writer.append(encoded.pieces))
    writer.close()
    read = []
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, into, at: read.append(len(into[0])) or preadv(file, into, at))
    (found,) = load_trajectories(leased, [1])
    assert found.response_ids.tolist() == [3] * 10
    assert sum(read) == 8 + encoded.header.trajectories[1].size < 200
    segment = Path(leased.body.path)
    damaged = bytearray(segment.read_bytes())
    damaged[leased.body.offset + encoded.header.trajectories[1].at] ^= 1
    segment.write_bytes(damaged)
    assert load_trajectories(leased, [0, 2])[0].response_ids.tolist() == [3] * 100
    with pytest.raises(DataError, match="group a cannot be read: the trajectory at byte .* checksum"):
        load_trajectories(leased, [1])


@settings(max_examples=20)
@given(GROUPS, st.integers(1, 9), st.integers(10, 90))
def test_a_write_that_the_system_cuts_short_goes_on(tmp_path_factory, group, most_pieces, most_bytes):
    def pwritev(file, pieces, at):
        return os.pwrite(file, b"".join(pieces)[:most_bytes], at)

    encoded = encode(group)
    writer = SegmentWriter(tmp_path_factory.mktemp("segments"))
    with mock.patch.object(segments, "MOST_PIECES", most_pieces), mock.patch.object(os, "pwritev", pwritev):
        places = [writer.append(encoded.pieces) for _ in range(2)]
    writer.close()
    assert [load(LeasedGroup(encoded.header, place)) for place in places] == [group] * 2


@given(GROUPS, VERSIONS)
def test_a_header_says_what_the_trajectories_say(group, least):
    header = encode(group).header
    for described, trajectory in zip(header.trajectories, group.trajectories, strict=True):
        trained = [v for v, keep in zip(trajectory.versions, trajectory.loss_mask, strict=True) if keep]
        assert dict(described.trained) == {version: trained.count(version) for version in sorted(set(trained))}
        assert described.trained_tokens == len(trained) and described.oldest_version == trajectory.oldest_version
        offsets = [at for at, keep in enumerate(trajectory.loss_mask) if keep]
        assert described.response_inputs == (offsets[-1] if offsets else 0)
        masked = described.masked(least)
        assert masked.trained_tokens == sum(version >= least for version in trained)
    assert header.oldest_version == group.oldest_version
    masked = header.of(trajectory.masked(least) for trajectory in header.trajectories)
    assert decode(masked, encode(group).body) == replace(
        group, trajectories=[t.masked(least) for t in group.trajectories]
    )
    same = {(one.prompt_at == other.prompt_at) for one in header.trajectories for other in header.trajectories}
    equal = {
        np.array_equal(one.prompt_ids, other.prompt_ids) for one in group.trajectories for other in group.trajectories
    }
    assert same == equal, "equal prompts are there once"


def test_a_token_takes_about_eight_bytes_and_decoding_copies_none():
    tokens = 20_000
    answer = Trajectory([1] * 500, range(tokens), [1] * tokens, [-0.5] * tokens, [3] * tokens, reward=1.0)
    encoded = encode(Group("0:0", [answer] * 8))
    assert len(encoded.head) + len(encoded.body) < 8.1 * 8 * tokens
    assert any(piece is answer.response_ids for piece in encoded.pieces), "it is in memory once until it is written"
    body = np.frombuffer(encoded.body, np.uint8)
    decoded = decode(encoded.header, body)
    for trajectory in decoded.trajectories:
        for array in (trajectory.prompt_ids, trajectory.response_ids, trajectory.logprobs):
            assert np.shares_memory(array, body) and not array.flags.writeable


@given(GROUPS, st.data())
def test_a_body_that_was_cut_or_changed_is_not_decoded_to_something_else(group, data):
    encoded = encode(group)
    body = bytearray(encoded.body)
    assume(body)
    at = data.draw(st.integers(0, len(body) - 1))
    if data.draw(st.booleans()):
        del body[at:]
    else:
        body[at] ^= data.draw(st.integers(1, 255))
    try:
        # Padding is of nothing.
        assert decode(encoded.header, body) == group
        assert at < len(body) and not any(within(at, t) for t in encoded.header.trajectories)
    except ValueError as error:
        assert "does not match its checksum" in str(error)


def within(at, header):
    parts = (header.prompt_at, 4 * header.prompt_tokens), (header.at, header.size)
    return any(first <= at < first + size for first, size in parts)


@pytest.mark.parametrize(
    "strange", [{"metrics": {"m": object()}}, {"arrays": {"words": np.array(["a"])}}, {"metrics": {1j: 1.0}}]
)
def test_what_cannot_be_recorded_is_refused_by_the_name_of_its_group(strange):
    answer = Trajectory([1], [1], [1], [-0.5], [0], reward=1.0, **strange)
    with pytest.raises(DataError, match="group 0:7 holds"):
        encode(Group("0:7", [answer]))


def test_turns_add_nothing_to_what_the_buffer_reads():
    tokens = 3000
    turns = [Turn(n, n + 1, "tool", "search", ()) for n in range(tokens)]
    plain, noted = (
        encode(Group("0:7", [Trajectory([1], [5] * tokens, [1] * tokens, [-0.5] * tokens, [0] * tokens, turns=given)]))
        for given in ((), turns)
    )
    assert len(noted.head) - len(plain.head) < 10 and len(noted.body) - len(plain.body) > tokens
    assert decode(noted.header, noted.body).trajectories[0].turns == tuple(turns)


def test_arrays_of_another_length_are_refused():
    with pytest.raises(ValueError, match="values has 2 entries for 1 response tokens"):
        Trajectory([1], [1], [1], [-0.5], [0], arrays={"values": np.zeros(2)})


@given(st.lists(st.tuples(IDS, LOGPROBS, VERSIONS), max_size=20), st.text(max_size=5))
def test_a_partial_response_survives_encoding(tokens, text):
    ids, logprobs, versions = ([token[at] for token in tokens] for at in range(3))
    partial = Partial("digest", ids, logprobs, versions, "stop", text)
    encoded = encode_partial(partial)
    assert decode_partial(encoded.data) == partial and encoded.newest_version == max(versions, default=0)


@pytest.mark.parametrize("support", [[[3, 9], [4], [5, 1, 2]], [[3], [4], [5]], [[], [], []]])
def test_a_partial_response_keeps_its_supports(support):
    partial = Partial("digest", [3, 4, 5], [-0.5] * 3, [0, 0, 1], "stop", "text", Support.of(support))
    assert decode_partial(encode_partial(partial).data) == partial


def test_a_damaged_partial_response_is_noticed():
    data = encode_partial(Partial("digest", [1, 2], [-0.5, -0.5], [0, 0])).data
    with pytest.raises(ValueError, match="does not match its checksum"):
        decode_partial(data[:-1] + b"\7")


def test_an_encoded_group_travels_without_its_decoded_header(group):
    encoded = group("a", 0, 0)
    assert isinstance(encoded, EncodedGroup) and encoded.header is encoded.header
    assert "header" not in vars(pickle.loads(pickle.dumps(encoded)))


@pytest.mark.parametrize(
    "name", ["2.seg", "²²²²²²²².seg", "00000009.seg.bak", "00000009 (copy).seg", "000000009.seg", "x.seg"]
)
def test_names_that_are_no_segments_are_not_counted(tmp_path, name):
    for file in (name, "00000004.seg", "driver-100000000.seg", "worker-1-00000004.seg", "worker-10-00000002.seg"):
        (tmp_path / file).touch()
    found = [(segment.writer, segment.number) for segment in segments_in(tmp_path)]
    assert found == [("driver", 100_000_000), ("worker-1", 4), ("worker-10", 2)]
    place = SegmentWriter(tmp_path, "worker-1").append([b"body"])
    assert place == StoredBody(str(tmp_path / "worker-1-00000005.seg"), 0)
