"""A supervised run that cannot work is refused with the key and the fix."""

import pytest

from megasync.errors import ConfigError
from megasync.preflight.check import check_supervised

ROWS = "sft.train={kind: digits, source: copy}"


def test_a_sound_configuration_is_accepted(make):
    check_supervised(make(ROWS, "sft.answer_template=' {answer}'"))


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ([], ["sft.train is not set"]),
        ([ROWS, "sft.answer_template='answer'"], ["sft.answer_template='answer'", "must have {answer}"]),
        ([ROWS, "sft.answer_template='{prompt} {answer}'"], ["'{prompt} {answer}'", "no other column"]),
        ([ROWS, "sft.answer_template='{answer'"], ["'{answer'", "not a valid format string"]),
        ([ROWS, "sft.rows_per_step=1", "trainer.data_parallel=2"], ["sft.rows_per_step=1", "data_parallel=2"]),
        ([ROWS, "trainer.minibatches=2"], ["trainer.minibatches=2", "set it to 1"]),
        ([ROWS, "data.prompt.examples=1"], ["data.prompt.examples=1", "set it to 0"]),
        ([ROWS, "sft.max_tokens=1000000"], ["sft.max_tokens=1000000", "max_position_embeddings"]),
    ],
)
def test_what_cannot_be_trained_is_refused(make, overrides, named):
    with pytest.raises(ConfigError) as refusal:
        check_supervised(make(*overrides))
    assert all(part in str(refusal.value) for part in named), refusal.value
