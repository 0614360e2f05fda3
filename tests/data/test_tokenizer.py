"""A codec encodes and decodes as its tokenizer does, whatever the tokenizer was used for before."""

import random
from bisect import bisect_left

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from megasync.data.tokenizer import TextCodec

END = "<|end|>"


class Shouting(PreTrainedTokenizerFast):
    """Does more than its backend."""

    def _encode_plus(self, text, *args, **kwargs):
        return super()._encode_plus(text.upper(), *args, **kwargs)

    def _decode(self, *args, **kwargs):
        return super()._decode(*args, **kwargs) + "!"


def make(kind=PreTrainedTokenizerFast):
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator([__doc__ * 9, "the quick brown fox " * 9], trainer)
    backend.post_processor = processors.TemplateProcessing(single=f"$A {END}", special_tokens=[(END, 0)])
    return kind(tokenizer_object=backend, eos_token=END)


def texts():
    rng = random.Random(0)
    yield from ("a", " ", f"one{END}two", "  two  spaces , and . points ", "ü€ \U0001f600\n\n\t", "fox " * 400)
    for _ in range(30):
        yield "".join(rng.choice(["fox ", "quick", END, "é", "\n", " ,", "a" * 9]) for _ in range(rng.randrange(1, 30)))


def nothing(tokenizer):
    pass


def truncates(tokenizer):
    tokenizer("some text", truncation=True, max_length=2)


def pads(tokenizer):
    tokenizer.pad_token = END
    tokenizer("some text", padding="max_length", max_length=30)


def splits(tokenizer):
    tokenizer(f"some {END}", split_special_tokens=True)


@pytest.mark.parametrize("used", [nothing, truncates, pads, splits])
@pytest.mark.parametrize("kind", [PreTrainedTokenizerFast, Shouting])
def test_it_encodes_and_decodes_as_its_tokenizer(kind, used) -> None:
    codec, fresh, tokenizer = TextCodec(own := make(kind)), make(kind), make(kind)
    for text in texts():
        used(own)
        for special in (False, True):
            ids = list(fresh(text, add_special_tokens=special)["input_ids"])
            assert codec.encode(text, add_special_tokens=special) == ids
        assert codec.decode(ids) == tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def test_it_tells_where_tokens_begin() -> None:
    codec = TextCodec(make())
    for text in texts():
        ids, starts = codec.encode(text), codec.starts(text)
        assert starts is not None and len(starts) == len(ids) and starts == sorted(starts)
        for number in range(len(text) + 1):
            assert codec.decode(ids[: bisect_left(starts, number)]).startswith(text[:number])
    assert TextCodec(make(Shouting)).starts("text") is None


def test_only_a_plain_tokenizer_is_bypassed() -> None:
    assert TextCodec(make())._backend is not None
    assert TextCodec(make(Shouting))._backend is None
    assert TextCodec(object())._backend is None
