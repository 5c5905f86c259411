"""Makes the quickstart's tokenizer: sentencepiece BPE, each digit a token of its own, bytes for what it never saw.

    python examples/quickstart/make_tokenizer.py examples/quickstart/base

The folder gets Hugging Face files, which AutoTokenizer, SGLang and others load without sentencepiece.
"""

import itertools
import json
import random
import string
import sys
import tempfile
from pathlib import Path

import sentencepiece
from transformers import LlamaTokenizer, PreTrainedTokenizerFast
from transformers.utils import logging

from task import Split, problems, rambling

PIECES = 512
CONTEXT_LENGTH = 128
SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
# Tokens in every context, so that "Answer:" begins with the same token whatever stands before it.
ALWAYS_WHOLE = ["\n", "Answer:"]
# A prompt is the text and a line break: the instruction stands in the data files, as in those of the paper.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] + '\n' }}{% endfor %}"


def make_tokenizer(folder: Path, *, seed: int = 0, examples: int = 4000) -> PreTrainedTokenizerFast:
    """Trains the tokenizer on texts of the warm start and writes it to `folder`; the same seed gives the same files."""
    rng = random.Random(seed)
    # Every ASCII character once: an ordinary sentence then costs a token a letter, and bytes only beyond ASCII.
    texts = list(string.digits + string.ascii_letters + string.punctuation)
    for problem in itertools.islice(problems(Split.WARM_START, seed=seed), examples):
        response, _ = rambling(problem, rng, repeat=0.1, longest=20)
        texts += f"{problem.prompt}\n{response}".split("\n")
    with tempfile.TemporaryDirectory() as scratch:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_prefix=f"{scratch}/tokenizer",
            model_type="bpe",
            vocab_size=PIECES,
            character_coverage=1.0,
            split_digits=True,
            split_by_unicode_script=False,
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            user_defined_symbols=ALWAYS_WHOLE,
            **{"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3},
            **{name.replace("token", "piece"): piece for name, piece in SPECIAL.items()},
            minloglevel=2,
        )
        settings = SPECIAL | {
            "tokenizer_class": "LlamaTokenizer",
            "add_bos_token": False,
            "add_prefix_space": False,
            "legacy": False,
            "clean_up_tokenization_spaces": False,
        }
        Path(scratch, "tokenizer_config.json").write_text(json.dumps(settings))
        verbosity = logging.get_verbosity()
        logging.set_verbosity_error()
        converted = LlamaTokenizer.from_pretrained(scratch)
        logging.set_verbosity(verbosity)
    # The plain class: beside some config.json AutoTokenizer would otherwise rebuild the tokenizer by its own rules.
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=converted.backend_tokenizer,
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT_LENGTH,
        **SPECIAL,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    # The name that every release of transformers knows.
    config = folder / "tokenizer_config.json"
    settings = json.loads(config.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    config.write_text(json.dumps(settings, indent=2) + "\n")
    return tokenizer


if __name__ == "__main__":
    print(f"{len(make_tokenizer(Path(sys.argv[1])))} tokens written to {sys.argv[1]}")
