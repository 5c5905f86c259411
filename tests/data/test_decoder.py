"""The table of a byte-level tokenizer against the tokenizer's own `decode`."""

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from megatron_dapo.data.tokenizer import ByteLevelDecoder, decoder_of

TEXTS = ["Die Straße ist 12 km lang – naïve café ☕ 数学 и \t\n x² ≤ 3", "So x = 42, and 7 * 6 = 42.\n\nAnswer: 42"]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Trained on little text, so that most characters outside ASCII are several tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(TEXTS[1:], trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    backend.add_special_tokens(["<|endoftext|>", "<|im_end|>"])
    backend.add_tokens([AddedToken("<think more>", special=False), AddedToken("数", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")


@pytest.mark.parametrize("skip", [True, False])
def test_any_ids_give_the_tokenizers_text(tokenizer: PreTrainedTokenizerFast, skip: bool) -> None:
    decoder = decoder_of(tokenizer)
    assert isinstance(decoder, ByteLevelDecoder)
    random = np.random.default_rng(0)
    for length in (0, 1, 2, 3, 5, 8, *[40] * 500):  # whole words, halves of characters, special tokens, ids of none
        ids = random.integers(0, len(tokenizer) + 3, length).astype(np.int32)
        assert decoder.decode(ids, skip_special_tokens=skip) == tokenizer.decode(ids, skip_special_tokens=skip), ids


def test_text_comes_back(tokenizer: PreTrainedTokenizerFast) -> None:
    decoder = decoder_of(tokenizer)
    for text in TEXTS:
        ids = np.array([*tokenizer.encode(text), tokenizer.eos_token_id], np.int32)
        assert decoder.decode(ids, skip_special_tokens=True) == text
        assert decoder.decode(ids, skip_special_tokens=False) == text + "<|endoftext|>"


def test_a_part_of_an_array_is_its_own_text(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = np.array(tokenizer.encode(TEXTS[1]), np.int32)
    decoder = decoder_of(tokenizer)
    for part in (ids[3:9], ids[:0]):
        assert decoder.decode(part, skip_special_tokens=True) == tokenizer.decode(part, skip_special_tokens=True)


def test_other_tokenizers_decode_themselves() -> None:
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    words = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert decoder_of(words) is words
    backend.decoder = decoders.ByteLevel()
    tidy = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=True)
    assert decoder_of(tidy) is tidy
