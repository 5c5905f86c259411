"""The tokenizer of the examples' tiny models: a token a character, and a token for each word that an example names.

What is no ASCII character is one unknown token. The chat template only ever appends: a rendered conversation begins
with the rendering of each shorter one, which is what episodes of several turns need.
"""

import string
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ message['content'] + '</s>' }}"
    "{% else %}{{ message['content'] + '\n' }}{% endif %}{% endfor %}"
)


def make_tokenizer(folder: Path, words: list[str], *, ends: tuple[str, ...] = (), context: int) -> None:
    """Writes Hugging Face files to `folder`.

    Args:
        words: taught as one token each. A word is a run of letters and digits.
        ends: texts that are one token wherever they stand, such as the end of a tool call; kept when text is decoded.
        context: tokens that the model can see.
    """
    characters = ["\n", *string.digits, *string.ascii_letters, *string.punctuation, " "]
    vocabulary = [*SPECIAL.values(), *characters, *(word for word in words if len(word) > 1)]
    ids = {token: place for place, token in enumerate(dict.fromkeys(vocabulary))}
    tokenizer = Tokenizer(WordLevel(ids, unk_token=SPECIAL["unk_token"]))
    # A run of letters or digits is one token if it is known as a word; several otherwise.
    known = "|".join(sorted((word for word in words if len(word) > 1), key=len, reverse=True))
    pattern = rf"\b(?:{known})\b|[\s\S]" if known else r"[\s\S]"
    tokenizer.pre_tokenizer = Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken(end, normalized=False, special=False) for end in ends])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, model_max_length=context, **SPECIAL
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
