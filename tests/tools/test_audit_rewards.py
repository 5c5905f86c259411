"""The audit of saved responses."""

import json

import pytest

from tools.audit_rewards import EXIT_AGREE, EXIT_DISAGREE, EXIT_USAGE, main


def line(response, ground_truth="42", **more):
    return json.dumps({"response": response, "ground_truth": ground_truth} | more) + "\n"


@pytest.fixture
def run(tmp_path):
    def write(*lines):
        folder = tmp_path / "run"
        folder.mkdir(exist_ok=True)
        (folder / "samples.jsonl").write_text("".join(lines))
        return str(folder)

    return write


def test_rows_on_which_the_rules_disagree_are_listed(run, capsys):
    folder = run(
        line("Answer: 42", verifier="robust", accuracy=True, rollout_step=1),
        line("so | it is\n**Answer:** 42.", verifier="robust", accuracy=True, rollout_step=2),
        line("Answer: 42", verifier="exact", accuracy=False, rollout_step=3),
        line("Answer: B", "B", verifier="choice", accuracy=True, rollout_step=4),
        line("Answer: B", "Bern", verifier="choice", accuracy=False, rollout_step=5),
        line("Answer: 42", verifier="robust + 0.2 * choice", accuracy=False, rollout_step=6),
        line("Answer: B", "B", verifier="choice + 0.2 * robust", accuracy=True, rollout_step=7),
    )
    assert main([folder]) == EXIT_DISAGREE
    page = capsys.readouterr().out
    assert page.startswith("7 responses, 4 to look at; ")
    assert "| exact: right | 3 | 0 |" in page
    assert "| exact: wrong | 1 | 0 |" in page
    rows = [row for row in page.splitlines() if row.startswith("| samples")]
    assert [row.split(" | ")[0:3] for row in rows] == [
        ["| samples.jsonl:2", "2", "rules differ"],
        ["| samples.jsonl:3", "3", "exact changed"],
        ["| samples.jsonl:5", "5", "no verdict"],
        ["| samples.jsonl:6", "6", "robust changed"],
    ]
    assert "robust: right (integer, '42')" in rows[0]
    assert "so \\| it is **Answer:** 42." in rows[0]
    assert main([folder, "--limit", "1"]) == EXIT_DISAGREE
    assert "3 more rows" in capsys.readouterr().out


def test_what_an_environment_judged_is_counted_and_not_judged_by_a_verifier(run, capsys):
    game = {"environment": "guess:step", "verifier": "none", "accuracy": True, "rollout_step": 1}
    tool = {"environment": "python", "verifier": "robust", "judged_by": "verifier", "accuracy": True}
    folder = run(line("7", **game, judged_by="environment"), line("Answer: 42", **tool), line("Answer: 41", **tool))
    assert main([folder]) == EXIT_DISAGREE
    page = capsys.readouterr().out
    assert page.startswith("3 responses, 1 to look at; robust changed: 1; judged by an environment, and not again: 1")
    assert "samples.jsonl:3" in page
    assert "samples.jsonl:1" not in page
    assert main([folder, "--all"]) == EXIT_DISAGREE


@pytest.mark.parametrize("name", [5, ["robust"], {"a": 1}])
def test_a_verifier_that_is_no_text_is_named(run, capsys, name):
    assert main([run(line("Answer: 42", verifier=name))]) == EXIT_USAGE
    assert "samples.jsonl:1: verifier = " in capsys.readouterr().err


def test_agreement_is_exit_code_0(run, tmp_path, capsys):
    file = tmp_path / "rollouts.jsonl"
    file.write_text(line("Answer: 42") + json.dumps({"response": "Answer: 41", "answer": "42"}))
    assert main([str(file), "--all"]) == EXIT_AGREE
    assert "| exact: right | 1 | 0 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "holds no responses"),
        ("{broken", "samples.jsonl:1: no JSON"),
        ('{"response": "Answer: 1"}', 'samples.jsonl:1: holds no "response" as a text and "ground_truth"'),
        ("[" * 5000, "samples.jsonl:1: no JSON"),
        (line("x", accuracy="no"), "samples.jsonl:1: accuracy = 'no'"),
        (line("x", ground_truth=None), 'holds no "response"'),
        (line("x", verifier="robst"), "did you mean 'robust'"),
        (line("x", verifier="os:system"), "may not choose code to run"),
    ],
)
def test_what_cannot_be_audited_is_named(run, capsys, content, reason):
    assert main([run(content)]) == EXIT_USAGE
    assert reason in capsys.readouterr().err


def test_a_run_that_is_not_there_is_named_with_what_to_give(tmp_path, capsys):
    assert main([str(tmp_path / "nope")]) == EXIT_USAGE
    assert "nope: No such file or directory; give a run directory, or a JSON lines file" in capsys.readouterr().err


def test_a_ground_truth_may_be_a_number_or_an_object(run, capsys):
    said = "```json\n[1]\n```"
    assert main([run(line("Answer: 42", 42), line(said, {"equals": [1]}, verifier="json")), "--all"]) == EXIT_AGREE
    assert "json: right" in capsys.readouterr().out
