"""Model folders with byte-level tokenizers and chat templates of several kinds, and a fleet that talks."""

import asyncio
import json
import re

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from megatron_dapo.data.prompts import Prompt
from rollout.generation import FinishReason, Generation

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
KEEPING = """{% for message in messages %}{% if message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
STRIPPING = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == 'assistant' and not loop.last and '</think>' in message.content %}{{
 message.content.split('</think>')[-1].lstrip('\\n') }}{% else %}{{ message.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
OPENING = STRIPPING.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")
NO_TOOLS = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}"
NO_TOOLS += KEEPING

ENVIRONMENTS = '''
import json, os, time
from reward.environment import End, Observation
from reward.verdict import VerifierError

def guess(episode):
    number, goal = int(episode.response), int(episode.ground_truth)
    return End(accuracy=True) if number == goal else Observation("higher" if number < goal else "lower", reward=-0.25)

def falters(episode):
    if episode.response == "seven":
        raise ValueError("no number")
    if len(episode.turns) < 3:
        return Observation("on", state=len(episode.turns))
    return End(accuracy=True, extracted=json.dumps([episode.state, *(turn.failed for turn in episode.turns)]))


def counts(episode):
    """Says what it was given: every turn of it."""
    seen = episode.state or []
    turns = [[turn.response, turn.observation, turn.role, list(turn.token_ids)] for turn in episode.turns]
    if len(seen) != len(turns) - 1:
        raise ValueError(f"{len(seen)} states for {len(turns)} turns")
    if len(turns) == 3:
        return End(accuracy=False, reward=0.5, extracted=json.dumps(turns), rule="counted")
    return Observation(f"turn {len(turns)}", state=[*seen, len(turns)], role="tool")

def calculator(episode):
    if "<tool_call>" not in episode.response:
        return None
    return Observation(str(eval(episode.response.split("<tool_call>")[1].split("</tool_call>")[0])), role="tool")

def never(episode): return Observation("again", reward=1.0)
def away(episode): raise VerifierError("no such table")
def waits(episode):
    while not os.path.exists(episode.ground_truth): time.sleep(0.01)
    return End(accuracy=len(episode.turns) > 1) if len(episode.turns) > 1 else Observation("go on", state=["kept"])
'''


def save_model(folder, template):
    """A model's folder, as far as the tokenizer goes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "n"), ("h", "i"), ("hi", "g"), ("hig", "h"), ("high", "e")]
    tokens = [*alphabet, *("".join(pair) for pair in merges)]
    backend = Tokenizer(models.BPE({token: at for at, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    backend.add_tokens([AddedToken("</tool_call>", special=False)])
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    ends = [backend.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>")]
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"vocab_size": 300, "eos_token_id": ends}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def prompt_of(text, said, *, answer="7", environment=None, chat=True, verifier="robust"):
    """A prompt as `read_prompts` makes it."""
    whole = said
    if chat:
        messages = [{"role": "user", "content": said}]
        whole = text.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = np.array(text.tokenizer.encode(whole, add_special_tokens=False), np.int32)
    about = {"place": "f:1", "source": "f", "verifier": verifier, "environment": environment, "chat": chat}
    return Prompt(text=whole, answer=answer, ids=ids, **about)


class Talker:
    """A fleet whose model says `speak(what stands before, sample)`, a token at a time, and stops where it is told."""

    def __init__(self, text, speak, *, version=3, chunk=None):
        self.text, self.speak, self.version, self.chunk = text, speak, version, chunk
        self.asked, self.drawn, self.going = [], {}, asyncio.Event()
        self.going.set()

    async def generate(self, request):
        self.asked.append(request)
        tokenizer = self.text.tokenizer
        begun = request.begun
        ids, by = ([], []) if begun is None else (begun.token_ids.tolist(), begun.weight_versions.tolist())
        reason = None if begun is None or begun.finish_reason is FinishReason.ABORT else begun.finish_reason
        sample = int(re.search(r"\d+(?=(-t\d+)?\.$)", request.request_id)[0])
        said = self.speak(tokenizer.decode(request.prompt_ids), sample)
        planned = tokenizer.encode(said, add_special_tokens=False)
        assert planned[: len(ids)] == ids, "it does not go on from what it had drawn"
        stops = {*request.sampling.stop_token_ids, *self.text.stop_token_ids}
        while reason is None:
            if self.chunk is not None and len(ids) % self.chunk == 0:
                await asyncio.sleep(0)
                await self.going.wait()
            ids.append(planned[len(ids)])
            by.append(self.version)
            if len(ids) == request.sampling.max_new_tokens:
                reason = FinishReason.LENGTH
            elif ids[-1] in stops:
                reason = FinishReason.STOP
            self.drawn[request.request_id] = self._generation(request, ids, by, reason or FinishReason.ABORT)
        self.drawn.pop(request.request_id, None)
        return self._generation(request, ids, by, reason)

    def so_far(self, request_id):
        return self.drawn.get(request_id)

    def _routing(self, request, drawn, reason):
        """A row for each token but the last, once a call is complete: its place, and the version that told it."""
        known = request.begun.routing if request.begun is not None else None
        if request.routing is None or reason is FinishReason.ABORT:
            return known
        known = np.zeros((0, 1, 2), np.uint8) if known is None else known
        places = np.arange(len(known), request.prompt_ids.size + drawn - 1)
        rows = np.stack([places, 200 + self.version % 50 + 0 * places], axis=-1)[:, None].astype(np.uint8)
        return np.concatenate([known, rows])

    def _generation(self, request, ids, by, reason):
        places = request.prompt_ids.size + np.arange(len(ids))
        return Generation(
            request_id=request.request_id,
            token_ids=np.array(ids, np.int32),
            log_probs=(-places / 1000).astype(np.float32),  # tells at which place of the sequence it was drawn
            weight_versions=np.array(by, np.int32),
            finish_reason=reason,
            routing=self._routing(request, len(ids), reason),
        )
