"""A sound supervised run is accepted; `refused.jsonl` has those that cannot work."""

from megasync.preflight.check import check_supervised

ROWS = "sft.train={kind: digits, source: copy}"


def test_a_sound_configuration_is_accepted(make):
    check_supervised(make(ROWS, "sft.answer_template=' {answer}'"))
