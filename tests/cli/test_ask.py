"""`megatron-dapo ask`: which prompt a model gets, and what is refused."""

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dapo.actor.weights.hf_files import WeightsError
from megatron_dapo.cli.ask import ask, by_server
from megatron_dapo.cli.command_line import model_config, run_config
from megatron_dapo.config import ConfigError, dump_config
from megatron_dapo.data.prompts import render
from megatron_dapo.data.tokenizer import load_text_tools
from rollout.generation import GenerationRequest, SamplingParams
from tests.processes import ROOT

BASE = ROOT / "examples" / "quickstart" / "base"
PROBLEM = "Solve step by step. Last line: Answer: N.\nZoe has 16 cards. Zoe loses 5. Zoe wins 2 more. How many now?"


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("", "the prompt is empty"),
        ("1 + \udcff?", "not in UTF-8"),
        (PROBLEM * 9, r"the prompt has \d+ tokens: model.context_length = 128"),
    ],
)
def test_a_prompt_that_nobody_can_answer_is_refused_in_words(prompt, said):
    with pytest.raises(ConfigError, match=said):
        ask(str(BASE), prompt, 8, 0.0)


def test_an_answer_ends_where_the_context_does(monkeypatch):
    asked = list[GenerationRequest]()
    monkeypatch.setattr("megatron_dapo.cli.ask._by_transformers", lambda *about: asked.append(about[-1]))
    ask(str(BASE), PROBLEM, 4000)
    (one,) = asked
    assert len(one.prompt_ids) + one.sampling.max_new_tokens == 128


def test_a_folder_without_a_model_is_refused_in_words(tmp_path):
    with pytest.raises(ConfigError, match="give the folder of a model"):
        ask(str(tmp_path), "1 + 1?")


def test_a_model_without_weights_is_refused_in_words(tmp_path):
    shutil.copytree(BASE, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors*"))
    with pytest.raises(WeightsError, match="model"):
        ask(str(tmp_path / "model"), "1 + 1?")


def test_the_models_chat_template_surrounds_the_prompt(capsys):
    ask(str(BASE), PROBLEM)
    answer = capsys.readouterr().out
    assert "Answer: " in answer
    ask(str(BASE), PROBLEM + "\n", template="plain")  # as the template ends it
    assert capsys.readouterr().out == answer
    ask(str(BASE), PROBLEM, 3)
    assert len(capsys.readouterr().out) < len(answer)


def test_the_models_own_settings_of_generation_change_nothing_as_in_a_server(tmp_path, capsys):
    ask(str(BASE), PROBLEM)
    answer = capsys.readouterr().out
    shutil.copytree(BASE, tmp_path / "model")
    settings = {"repetition_penalty": 9.0, "no_repeat_ngram_size": 1, "do_sample": True, "top_k": 1}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(settings))
    ask(str(tmp_path / "model"), PROBLEM)
    assert capsys.readouterr().out == answer


def test_the_answer_is_printed_and_nothing_but_it_is_shown():
    command = [sys.executable, "-m", "megatron_dapo.cli.main", "ask", str(BASE), PROBLEM]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=120)
    assert "Answer: " in done.stdout
    assert "Loading" not in done.stderr


def test_a_model_alone_gets_what_its_files_say_and_one_of_a_run_that_runs_config(tmp_path):
    alone = model_config(BASE, ["evaluation.samples=3"])
    assert (alone.model.context_length, alone.rollout.max_new_tokens, alone.longest_prompt) == (128, 64, 64)
    assert (alone.model.dtype, alone.data.template, alone.evaluation.samples) == ("float32", "chat", 3)
    shutil.copytree(BASE, tmp_path / "model")
    (tmp_path / "config.yaml").write_text(dump_config(model_config(BASE, ['data.template="Q: {prompt}"'])))
    own = model_config(tmp_path / "model")
    assert (own.data.template, own.model.path) == ("Q: {prompt}", str(tmp_path / "model"))
    (tmp_path / "model" / "chat_template.jinja").unlink()
    (tmp_path / "config.yaml").unlink()
    assert model_config(tmp_path / "model").data.template == "plain"


def test_paths_of_a_run_are_those_of_the_folder_that_it_began_in(tmp_path, monkeypatch):
    began = tmp_path / "began"
    shutil.copytree(BASE, began / "base")
    for name in ("a", "b"):
        (began / f"{name}.jsonl").write_text(json.dumps({"prompt": PROBLEM, "answer": "2"}) + "\n")
    keys = ["data.mixture=[{path: a.jsonl}, {path: b.jsonl, weight: 2}]", "evaluation.path=a.jsonl"]
    run = tmp_path / "run"
    run.mkdir()
    (run / "manifest.json").write_text(json.dumps({"folder": str(began)}))
    monkeypatch.chdir(began)
    (run / "config.yaml").write_text(dump_config(model_config(Path("base"), ["data.path=null", *keys])))
    there = run_config(run)
    assert [source.path for source in there.data.mixture] == ["a.jsonl", "b.jsonl"]
    monkeypatch.chdir(tmp_path)
    moved = run_config(run)
    assert [source.path for source in moved.data.mixture] == [str(began / "a.jsonl"), str(began / "b.jsonl")]
    assert [source.weight for source in moved.data.mixture] == [1.0, 2.0]
    assert (moved.model.path, moved.evaluation.path) == (str(began / "base"), str(began / "a.jsonl"))


def test_a_run_is_asked_by_its_model_and_whose_settings_hold_is_said(tmp_path, capsys):
    shutil.copytree(BASE, tmp_path / "model")
    (tmp_path / "config.yaml").write_text(dump_config(model_config(BASE)))
    ask(str(tmp_path), PROBLEM)
    said = capsys.readouterr()
    assert "Answer: " in said.out
    assert said.err.splitlines()[0] == f"settings of {tmp_path / 'config.yaml'}"
    model_config(BASE)
    assert capsys.readouterr().err == ""


def test_a_run_that_has_no_model_yet_says_so(tmp_path):
    (tmp_path / "config.yaml").write_text(dump_config(model_config(BASE)))
    with pytest.raises(ConfigError, match="writes its model at its end"):
        ask(str(tmp_path), PROBLEM)


@pytest.mark.slow
def test_a_server_answers_as_transformers_does(capsys):
    ask(str(BASE), PROBLEM)
    config, text = model_config(BASE, ["rollout.kv_cache_tokens=4096"]), load_text_tools(BASE)
    _, ids = render(PROBLEM, "chat", text.tokenizer)
    sampling = SamplingParams(max_new_tokens=64, temperature=0.0, stop_token_ids=text.stop_token_ids)
    request = GenerationRequest(request_id="a.", group_id="a", prompt_ids=ids, sampling=sampling, seed=0)
    assert asyncio.run(by_server(config, text, request)) == capsys.readouterr().out.removesuffix("\n")
