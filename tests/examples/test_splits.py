"""No training question shares evidence or wording with a held-out one."""

from deepresearch.corpus import encyclopaedia
from deepresearch.scoring import normalise
from deepresearch.splits import SHARED_WORDS, decontaminated
from hypothesis import given
from hypothesis import strategies as st

DOCUMENTS = st.lists(st.sampled_from("abcdefgh"), max_size=3)
PROMPTS = st.lists(st.sampled_from(["one", "two", "three"]), min_size=1, max_size=20).map(" ".join)
ROWS = st.lists(st.fixed_dictionaries({"prompt": PROMPTS, "evidence": DOCUMENTS}), max_size=12)


def shares_words(one, other):
    """Whether they have SHARED_WORDS words in a row in common; shorter texts only as a whole."""
    first, second = normalise(one).split(), normalise(other).split()
    if min(len(first), len(second)) < SHARED_WORDS:
        return first == second
    runs = [first[at : at + SHARED_WORDS] for at in range(len(first) - SHARED_WORDS + 1)]
    return any(second[at : at + SHARED_WORDS] in runs for at in range(len(second) - SHARED_WORDS + 1))


@given(ROWS, st.integers(1, 4))
def test_nothing_is_shared_and_every_row_ends_in_one_place(rows, every):
    split = decontaminated(rows, every)
    assert len(split.train) + len(split.held_out) + split.removed.total() == len(rows)
    for trained in split.train:
        for held_out in split.held_out:
            assert not set(trained["evidence"]) & set(held_out["evidence"])
            assert not shares_words(trained["prompt"], held_out["prompt"])


def test_rows_may_say_where_they_belong():
    rows = [{"prompt": "a", "held_out": True}, {"prompt": "b", "held_out": False}, {"prompt": "A.", "held_out": False}]
    split = decontaminated(rows)
    assert (split.held_out, split.train, split.removed) == (rows[:1], rows[1:2], {"wording": 1})


def test_the_encyclopaedia_leaves_enough_to_train_and_to_measure():
    documents, questions = encyclopaedia(0)
    ids = {document.title: document.id for document in documents}
    split = decontaminated([question.row(ids) for question in questions])
    assert (len(split.train), len(split.held_out), dict(split.removed)) == (365, 145, {"evidence": 138})
    for part in (split.train, split.held_out):
        two = sum(len(row["evidence"]) == 2 for row in part)
        assert 0.3 < two / len(part) < 0.5
