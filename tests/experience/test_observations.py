"""What stands between two turns, with real tokenizers and chat templates: tokens that only append."""

import io
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import sentencepiece
from tokenizers import Tokenizer, decoders, models, normalizers

from megatron_dapo.config import ConfigError, load_config
from megatron_dapo.data.tokenizer import load_text_tools
from megatron_dapo.experience.episodes import Play, appended, turn_rules
from reward.environment import Observation
from rollout.generation import FinishReason, Generation, GenerationRequest, SamplingParams
from tests.experience.chat_models import KEEPING, NO_TOOLS, OPENING, STRIPPING, prompt_of, save_model
from tests.processes import ROOT

QUICKSTART = ROOT / "examples" / "quickstart"


def tools(folder, template):
    return load_text_tools(save_model(folder, template))


def config(*overrides):
    longer = ("model.context_length=9999", "rollout.max_observation_tokens=100", "data.environment=a:b")
    return load_config(QUICKSTART / "dapo.yaml", [*longer, *overrides])


def rules(text, *overrides, chat=True):
    prompts = [prompt_of(text, "?", chat=chat), prompt_of(text, "?", environment="a:b", chat=chat)]
    return turn_rules(config(*overrides), text, prompts)


def test_a_template_that_keeps_earlier_turns_gives_the_text_between_them(tmp_path):
    text = tools(tmp_path, KEEPING)
    made = rules(text)
    assert made.between[True, "user"] == ("<|im_end|>\n<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n")
    assert made.between[True, "tool"][0].endswith("<|im_start|>user\n<tool_response>\n")
    end, other = (text.tokenizer.encode(mark, add_special_tokens=False)[0] for mark in ("<|im_end|>", "."))
    said, ids = made.fit(Observation("higher"), True, other)
    assert said == "higher"
    assert text.tokenizer.decode(ids) == "<|im_end|>\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n"
    assert made.fit(Observation("higher"), True, end) == (said, ids[1:]), "the end of the turn stands there already"


@pytest.mark.parametrize("template", [STRIPPING, OPENING])
def test_a_template_that_rewrites_earlier_turns_is_refused_with_what_to_do(tmp_path, template):
    text = tools(tmp_path, template)
    with pytest.raises(ConfigError, match=r"it changes earlier turns, as '<think>.*set data\.observation_template"):
        rules(text)
    own = "<|im_end|>\n<|im_start|>user\n{observation}<|im_end|>\n<|im_start|>assistant\n<think>\n"
    made = rules(text, f"data.observation_template={json.dumps(own)}")
    _, ids = made.fit(Observation("lower"), True, -1)
    assert text.tokenizer.decode(ids) == own.replace("{observation}", "lower")


def test_the_refusal_shows_the_text_between_turns_where_it_is_known(tmp_path):
    with pytest.raises(ConfigError) as error:
        rules(tools(tmp_path, STRIPPING))
    assert repr("<|im_end|>\n<|im_start|>user\n{observation}<|im_end|>\n<|im_start|>assistant\n") in str(error.value)


def test_a_role_that_the_template_does_not_know_is_the_users(tmp_path):
    made = rules(tools(tmp_path, NO_TOOLS))
    assert made.between[True, "tool"] == made.between[True, "user"]


def test_without_a_template_the_observation_stands_alone(tmp_path):
    text = tools(tmp_path, None)
    made = rules(text, chat=False)
    _, ids = made.fit(Observation(" never"), False, 5)
    assert text.tokenizer.decode(ids) == " never"
    assert made.fit(Observation(""), False, 5)[0] == "...", "an observation without tokens"
    chat = replace(prompt_of(text, "?", environment="a:b", chat=False), chat=True)
    chat = replace(prompt_of(text, "?", environment="a:b", chat=False), chat=True)
    with pytest.raises(ConfigError, match=r"data\.template = chat: .*it fails for role user"):
        turn_rules(config(), text, [chat])


def test_the_quickstarts_own_template_only_appends():
    text = load_text_tools(QUICKSTART / "base")
    assert appended(text.tokenizer, None, True, "user") == ("\n", "\n")
    assert rules(text).between[True, "tool"] == ("\n", "\n")


@pytest.mark.parametrize("limit", [75, 100, 333])
@pytest.mark.parametrize("said", ["x" * 5_000_000, "é漢" * 400, " " * 9000, "a\n" * 700, "high" * 3000, "\0" * 400])
def test_a_long_observation_loses_its_middle_and_never_passes_the_limit(tmp_path, said, limit):
    text = tools(tmp_path, KEEPING)
    made = rules(text, f"rollout.max_observation_tokens={limit}")
    read, ids = made.fit(Observation(said), True, -1)
    assert 0 < len(ids) <= limit
    before, after = made.between[True, "user"]
    assert text.tokenizer.decode(ids) == before + read + after
    assert read == "..." or "characters left out" in read
    assert limit == 75 or (read[0], read[-1]) == (said[0], said[-1])
    assert limit == 75 or len(ids) > 0.6 * limit


def test_what_leaves_no_room_and_a_mark_of_several_tokens_are_refused(tmp_path):
    text = tools(tmp_path, KEEPING)
    with pytest.raises(ConfigError, match=r"max_observation_tokens = 30: set at least"):
        rules(text, "rollout.max_observation_tokens=30")
    with pytest.raises(ConfigError, match=r"turn_end = '</answer>': it must be one token of the model's, and is 9"):
        rules(text, "rollout.turn_end=[</answer>]")
    (end,) = rules(text, "rollout.turn_end=[</tool_call>]").end_ids
    assert text.tokenizer.decode([end]) == "</tool_call>"
    assert turn_rules(config(), text, [prompt_of(text, "?")]) is None, "no prompt has an environment"


def test_keys_that_contradict_each_other_are_refused_by_name():
    def refused(*overrides):
        with pytest.raises(ConfigError) as error:
            load_config(QUICKSTART / "dapo.yaml", overrides)
        return str(error.value)

    assert "data.observation_template = {observation}: no prompt" in refused(
        "data.observation_template='{observation}'"
    )
    assert "rollout.turn_end = ('x',): no prompt has several turns" in refused("rollout.turn_end=[x]")
    assert "algorithm.turn_rewards = True: no prompt" in refused("algorithm.turn_rewards=true")
    assert "environment 'guess' is not known" in refused("data.environment=guess")
    small = refused("data.environment=a:b", "rollout.max_observation_tokens=9")
    assert "model.context_length = 128" in small
    assert "observations: 191 tokens" in small
    thinking = ("rollout.thinking_budget=9", "rollout.thinking_end=x")
    both = refused("evaluation.environment=a:b", "model.context_length=9999", *thinking)
    assert "rollout.thinking_budget = 9: is for one answer, not for turns (data.environment)" in both
    plain = load_config(QUICKSTART / "dapo.yaml")
    assert (plain.has_environments, plain.longest_continuation) == (False, 64)
    assert np.isclose(config("rollout.max_turns=3").longest_continuation, 64 + 2 * 100)


def test_a_flood_is_cut_before_the_tokenizer_sees_it(tmp_path):
    text = tools(tmp_path, KEEPING)
    made, seen = rules(text), []
    counted = SimpleNamespace(encode=lambda said, **keys: seen.append(len(said)) or text.tokenizer.encode(said, **keys))
    counting = replace(made, text=replace(text, tokenizer=counted))
    for said in ("word " * 40_000, "x" * 131_072):
        assert len(counting.fit(Observation(said), True, -1)[1]) > 60
    assert max(seen) < 5 * 100
    whole = "high " * 80
    assert counting.fit(Observation(whole), True, -1)[0] != whole, "too many tokens"
    assert counting.fit(Observation("high" * 64), True, -1)[0] == "high" * 64, "64 tokens of four characters each"


def sentencepiece_model(folder):
    """A byte-fallback BPE model as Llama 2's: a space before the first word, control tokens that have no text."""
    sentences = ["higher", "lower", "the number is seven", "print(12 * 3)", "You are right\n"] * 50
    with io.BytesIO() as trained:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences), model_writer=trained, model_type="bpe", vocab_size=330,
            byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
            control_symbols=["[CALL]"], hard_vocab_limit=False,
        )  # fmt: skip
        pieces = sentencepiece.SentencePieceProcessor(model_proto=trained.getvalue())
    vocabulary = {pieces.id_to_piece(at): at for at in range(pieces.vocab_size())}
    merges = {
        (left, piece[len(left) :]): rank
        for piece, rank in vocabulary.items()
        for left in (piece[:cut] for cut in range(1, len(piece)))
        if left in vocabulary and piece[len(left) :] in vocabulary and not piece.startswith(("<", "["))
    }
    backend = Tokenizer(
        models.BPE(vocabulary, sorted(merges, key=merges.__getitem__), byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>", "</s>", "[CALL]"])
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = {"vocab_size": len(vocabulary), "eos_token_id": backend.token_to_id("</s>")}
    (folder / "config.json").write_text(json.dumps(config))
    return pieces, load_text_tools(folder)


def test_a_sentencepiece_tokenizer_puts_no_space_between_a_turn_and_what_comes_back(tmp_path):
    pieces, text = sentencepiece_model(tmp_path / "model")
    for said in ("the number is seven", "higher\n"):
        assert text.tokenizer.encode(said, add_special_tokens=False) == pieces.encode(said), "as the library has it"
    (space,) = {pieces.encode("higher")[0]} - {*pieces.encode("lower")}
    assert pieces.id_to_piece(space).startswith("▁")
    made = rules(text, chat=False)
    drawn = text.tokenizer.encode("lower", add_special_tokens=False)
    for said in ("higher", "higher\nlower", " higher", "\nhigher", "漢", "12 * 3"):
        _, given = made.fit(Observation(said), False, -1)
        assert text.tokenizer.decode([*drawn, *given]) == "lower" + said
        assert pieces.decode([*drawn, *given]) == "lower" + said
    plain = tools(tmp_path / "bytes", KEEPING)
    for said in ("higher", " higher", "\n\nhigh", "a\n"):
        assert plain.ids_behind(said) == plain.tokenizer.encode(said, add_special_tokens=False), "nothing changes there"


def test_special_tokens_are_among_the_ids_that_an_environment_gets_and_not_in_its_text(tmp_path):
    _, text = sentencepiece_model(tmp_path / "model")
    call, end = (text.tokenizer.encode(mark, add_special_tokens=False)[-1] for mark in ("[CALL]", "</s>"))
    drawn = np.array([call, *text.ids_behind("higher"), end], np.int32)
    nothing = np.zeros(drawn.size, np.float32)
    turn = Generation(
        request_id="a", token_ids=drawn, log_probs=nothing, weight_versions=nothing.astype(np.int32),
        finish_reason=FinishReason.STOP,
    )  # fmt: skip
    prompt = prompt_of(text, "?", environment="a:b", chat=False)
    request = GenerationRequest(
        request_id="a", group_id="a", prompt_ids=prompt.ids, sampling=SamplingParams(max_new_tokens=99), seed=0
    )
    play = Play.of(prompt, request, rules(text, chat=False))
    play.newest = turn
    (seen,) = play.episode(text.decoder.decode(drawn, skip_special_tokens=True)).turns
    assert seen.response == "higher"
    assert (seen.token_ids[0], seen.token_ids[-1]) == (call, end)
