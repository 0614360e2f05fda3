"""The 16 bits that a bfloat16 weight lacks of its float32 main weight."""

import struct

import torch
from hypothesis import given
from hypothesis import strategies as st

from megasync.trainer.optimizer import joined, remainders

VALUES = st.floats(width=32, min_value=-(2.0**99), max_value=2.0**99)


def bits_of(value):
    return struct.unpack("<I", struct.pack("<f", value))[0]


@given(values=st.lists(VALUES, min_size=1))
def test_a_weight_and_its_remainder_are_the_main_weight(values):
    wide = torch.tensor(values)
    weight = wide.bfloat16()
    actual = joined(weight, remainders(wide, weight))
    for value, other, short in zip(values, actual.tolist(), weight.tolist(), strict=True):
        down = bits_of(value) & 0xFFFF == 0x8000 and bits_of(short) < bits_of(value)
        assert bits_of(other) == bits_of(value) - down


def test_a_value_that_was_rounded_down_from_halfway_becomes_the_next_smaller_one():
    values = torch.tensor([0x3F808000, 0x3F818000, -0x407F8000], dtype=torch.int32).view(torch.float32)
    weight = values.bfloat16()
    assert weight.float().view(torch.int32).tolist() == [0x3F800000, 0x3F820000, -0x40800000]
    actual = joined(weight, remainders(values, weight))
    assert actual.view(torch.int32).tolist() == [0x3F807FFF, 0x3F818000, -0x407F8001]
    assert torch.equal(actual.bfloat16(), weight)


@given(weight=st.lists(VALUES, min_size=1), remainder=st.integers(-(2**15), 2**15 - 1))
def test_what_adam_has_split_is_split_again_the_same(weight, remainder):
    short = torch.tensor(weight).bfloat16()
    rest = torch.full(short.shape, remainder, dtype=torch.int16)
    # As Transformer Engine's Adam, which subtracts one from the bits of a weight that was rounded up.
    if remainder < 0 and (short.view(torch.int16) & 0x7FFF == 0).any():
        return
    assert torch.equal(remainders(joined(short, rest), short), rest)
