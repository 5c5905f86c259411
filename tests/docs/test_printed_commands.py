"""What README and guide print for a laptop, run as it stands there: in a fresh clone, after a small demo, and from
another folder."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

from megatron_dapo.cli.exit_codes import ExitCode
from rollout.server.engine import free_port
from tests.docs.documents import ROOT, blocks, inline_code

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CONFIG, RUN = "examples/quickstart/dapo.yaml", "runs/quickstart"
SMALL = ("run.rollout_steps=2", "evaluation.limit=4", "evaluation.forbidden_start=null")
SHORTER = {
    "train": ("run.dir=runs/again", *SMALL),
    "eval": ("evaluation.limit=4",),
    "slurm": ("--gpus-per-node=0", "--cpus-per-node=2"),
}
"""Words behind a command of README: what its list leaves out, or what makes it short."""

WITH_CONFIG = {"diff": ("paper",), "preview": (), "doctor": (), "slurm": ()}
"""Verbs that README names without their arguments -> those behind the config."""


def own(*words: str, folder: Path, clone: Path) -> subprocess.CompletedProcess[str]:
    """The clone's `megatron-dapo`, or a tool as `-m NAME`."""
    module = words[1:] if words[0] == "-m" else ("megatron_dapo.cli.main", *words)
    environment = os.environ | {"PYTHONPATH": str(clone), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", *module], cwd=folder, env=environment, capture_output=True, text=True, timeout=400
    )


def well(*words: str, folder: Path, clone: Path, code: int = 0) -> str:
    done = own(*words, folder=folder, clone=clone)
    assert done.returncode == code, f"{shlex.join(words)}\n{done.stdout}{done.stderr}"
    return done.stdout


def readme_commands() -> dict[str, list[str]]:
    """Verb of `megatron-dapo` -> its words in README's list, without placeholders."""
    section = (ROOT / "README.md").read_text().partition("## Commands")[2].partition("## ")[0]
    found: dict[str, list[str]] = {}
    for text in inline_code(section):
        words = shlex.split(re.sub(r"\[.*?\]", "", text))
        words = words[1:] if words and words[0] == "megatron-dapo" else words
        if words and re.fullmatch("[a-z]+", words[0]) and words[0] not in ("source", "python"):
            found[words[0]] = [{"CONFIG.yaml": CONFIG, "RUN": RUN}.get(word, word) for word in words]
    return found


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """A fresh clone in which the demo has run."""
    folder = tmp_path_factory.mktemp("fresh") / "megatron dapo"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], check=True)
    well("train", CONFIG, *SMALL, "monitor.timeline_every=1", f"run.dir={RUN}", folder=folder, clone=folder)
    return folder


def test_the_readmes_commands(clone):
    commands = readme_commands()
    assert len(commands) >= 11
    for verb, words in commands.items():
        given = [*words, CONFIG, *WITH_CONFIG[verb]] if words == [verb] else words
        well(*given, *SHORTER.get(verb, ()), folder=clone, clone=clone)
    well("-m", "tools.certify", CONFIG, "--layouts", "1", folder=clone, clone=clone)


def test_a_run_is_looked_at_from_any_folder(clone, tmp_path):
    run = str(clone / RUN)
    for words in (("status", run), ("report", run), ("diff", run, "paper"), ("ask", run, "1 + 1?")):
        well(*words, folder=tmp_path, clone=clone)
    well("eval", run, "evaluation.limit=2", folder=tmp_path, clone=clone)
    well("-m", "tools.bisect", run, folder=tmp_path, clone=clone)
    for tool in ("audit_rewards", "profile_throughput"):
        done = own("-m", f"tools.{tool}", run, folder=tmp_path, clone=clone)
        assert done.returncode in (0, 1), done.stderr  # 1: responses to look at
        assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == [], "results lie in the run"


def test_the_guides_own_problems(clone):
    page = (ROOT / "docs" / "guide.md").read_text()
    section = page.partition("## Your own problems")[2].partition("\n## ")[0]
    (config,) = [block.body for block in blocks(section) if block.info == "yaml"]
    (row,) = [text for text in inline_code(section) if text.startswith("{")]
    (clone / "mine.yaml").write_text(config)
    rows = [row.replace("7", str(7 + each)).replace('"11"', f'"{11 + each}"') for each in range(40)]
    (clone / "mine.jsonl").write_text("".join(f"{line}\n" for line in rows))
    (prepare,) = [text for text in inline_code(section) if text.startswith("python")]
    well(*shlex.split(prepare)[1:], folder=clone, clone=clone)
    for text in ("preview mine.yaml", "train mine.yaml", "report runs/mine"):
        assert re.search(rf"`(megatron-dapo )?{text}`", section), f"{text} is not printed there"
        short = ("run.rollout_steps=1",) if text.startswith("train") else ()
        well(*text.split(), *short, folder=clone, clone=clone)


def test_what_the_guide_prints_for_a_cluster_and_needs_none(clone):
    """Plans, scripts and checks of recipes, on a machine that sees neither model nor nodes."""
    page = re.sub(r"\\\n\s*", " ", (ROOT / "docs" / "guide.md").read_text())
    lines = [line.partition("  # ")[0] for block in blocks(page) if not block.info for line in block.body.splitlines()]
    lines = [line for line in lines if re.match("megatron-dapo (plan|slurm|check|diff) ", line)]
    assert len(lines) >= 4
    for line in lines:
        words = shlex.split(line)[1:]
        if "--calibration" not in words:  # a file that a run on GPUs gives
            words = [word.replace("/shared/runs", str(clone / "shared")) for word in words]
            well(*words, folder=clone, clone=clone, code=ExitCode.FINISHED)


def test_a_model_alone_and_a_runs_model_are_evaluated(clone, tmp_path):
    problems, few = str(clone / "examples" / "quickstart" / "data" / "heldout.jsonl"), "evaluation.limit=2"
    base = str(clone / "examples" / "quickstart" / "base")
    well("eval", base, "--data", problems, few, "evaluation.samples=2", folder=tmp_path, clone=clone)
    assert (tmp_path / "evaluations" / "base" / "result.json").is_file()
    well("eval", str(clone / RUN / "model"), few, "evaluation.samples=2", folder=tmp_path, clone=clone)
    assert (clone / RUN / "evaluations" / "model" / "result.json").is_file()


def posted(url: str, content: dict[str, Any], server: subprocess.Popen[bytes]) -> dict[str, Any]:
    """The JSON that a server answers once it listens."""
    request = Request(url, json.dumps(content).encode(), {"Content-Type": "application/json"})
    deadline = time.monotonic() + 200
    while True:
        try:
            return json.load(urlopen(request, timeout=60))
        except URLError:
            if server.poll() is not None or time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def test_a_trained_model_is_served_as_the_guide_says(clone, tmp_path):
    section = (ROOT / "docs" / "guide.md").read_text().partition("## 10.")[2]
    (line,) = [line for line in section.splitlines() if line.startswith("python -m rollout.server")]
    (on_a_cpu,) = [text for text in inline_code(section) if text.startswith("--device cpu")]
    printed = shlex.split(line.partition("  # ")[0])[1:]
    words = [str(clone / RUN / "model") if word == "exported/step_100" else word for word in printed]
    port = free_port("127.0.0.1")
    command = [sys.executable, *words, *shlex.split(on_a_cpu), "--port", str(port)]
    asked = {"prompt": "Tom has 7 pens. Tom buys 4 more. How many now?\n", "max_tokens": 30, "temperature": 0}
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(command, cwd=tmp_path, env=os.environ, stdout=log, stderr=log)
    try:
        answer = posted(f"http://127.0.0.1:{port}/v1/completions", asked | {"model": "any"}, server)
    finally:
        server.terminate()
        server.wait(60)
    assert answer["choices"][0]["text"]
