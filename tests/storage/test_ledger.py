import resource
from contextlib import suppress

import pytest

from megatron_dapo.storage.ledger import Event, Ledger, LedgerError, effective_events, read_ledger
from tests.ledger_check import check_ledger


def record(ledger, *events, step=1):
    for event, prompt in events:
        ledger.record(event, prompt=prompt, rollout_step=step, weight_version=step - 1)


def test_events_are_appended_and_read_back(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    ledger.record(Event.DISPATCHED, prompt=0, rollout_step=1, weight_version=0)
    ledger.record(Event.FINISHED, prompt=0, rollout_step=1, weight_version=0, correct=3)
    ledger.close()
    again = Ledger(path)
    again.record(Event.TRAINED, prompt=0, rollout_step=1, weight_version=0)
    again.close()
    events = read_ledger(path)
    assert [event["event"] for event in events] == ["dispatched", "finished", "trained"]
    assert events[1]["correct"] == 3
    assert check_ledger(events) == {0: "trained"}


def test_a_disk_that_was_full_for_a_moment_leaves_no_hole(tmp_path):
    """A limit of the file's size stands for the disk: it takes a part of a flush, then refuses."""
    path = tmp_path / "ledger.jsonl"
    ledger, limits = Ledger(path), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_001, limits[1]))
    try:
        for prompt in range(1000):
            with suppress(OSError):
                record(ledger, (Event.DISPATCHED, prompt))
        for _ in range(2):
            with pytest.raises(OSError, match=r"ledger\.jsonl"):
                ledger.commit()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    record(ledger, (Event.RESUMED, None))
    ledger.close()
    assert [event["prompt"] for event in read_ledger(path)] == [*range(1000), None]


def test_a_torn_last_line_is_dropped_and_a_broken_one_in_the_middle_is_named(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    record(ledger, (Event.DISPATCHED, 0))
    ledger.close()
    with path.open("a") as file:
        file.write('{"event": "fini')
    assert len(read_ledger(path)) == 1
    Ledger(path).close()
    assert path.read_text().endswith("\n")
    whole = path.read_text()
    for wrong in ("nonsense", "[]", '{"prompt": 1}', "5"):
        path.write_text(f"{whole}{wrong}\n{whole}")
        with pytest.raises(LedgerError, match=r"ledger\.jsonl:2: not an event"):
            read_ledger(path)


def test_a_resume_voids_what_came_after_its_checkpoint(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    record(ledger, (Event.DISPATCHED, 0), (Event.FINISHED, 0), (Event.TRAINED, 0))
    ledger.record(Event.CHECKPOINT, rollout_step=1, weight_version=1)
    record(ledger, (Event.DISPATCHED, 1), (Event.FINISHED, 1), (Event.TRAINED, 1), step=2)
    ledger.record(Event.RESUMED, rollout_step=1, weight_version=1)
    record(ledger, (Event.DISPATCHED, 1), (Event.FINISHED, 1), (Event.FILTERED, 1), step=2)
    ledger.close()
    events = read_ledger(tmp_path / "ledger.jsonl")
    assert check_ledger(events) == {0: "trained", 1: "filtered"}
    assert len(effective_events(events)) == 7


def test_a_checkpoint_in_the_middle_of_a_step_voids_that_step():
    """A run that is asked to stop while it fills step 2 saves what stood after step 1."""
    events = [
        {"event": "dispatched", "prompt": 0, "rollout_step": 1},
        {"event": "finished", "prompt": 0, "rollout_step": 1},
        {"event": "trained", "prompt": 0, "rollout_step": 1},
        {"event": "dispatched", "prompt": 1, "rollout_step": 2},
        {"event": "finished", "prompt": 1, "rollout_step": 2},
        {"event": "checkpoint", "prompt": None, "rollout_step": 1},
        {"event": "resumed", "prompt": None, "rollout_step": 1},
        {"event": "dispatched", "prompt": 1, "rollout_step": 2},
    ]
    assert check_ledger(events) == {0: "trained", 1: "dispatched"}


def test_a_resume_without_a_checkpoint_starts_over():
    events = [
        {"event": "dispatched", "prompt": 0, "rollout_step": 1},
        {"event": "resumed", "prompt": None, "rollout_step": 0},
        {"event": "dispatched", "prompt": 0, "rollout_step": 1},
    ]
    assert check_ledger(events) == {0: "dispatched"}


@pytest.mark.parametrize(
    "events",
    [
        [("dispatched", 0), ("finished", 0), ("trained", 0), ("trained", 0)],
        [("dispatched", 0), ("trained", 0)],
        [("finished", 0)],
        [("dispatched", 0), ("finished", 0), ("trained", 0), ("dispatched", 0)],
        [("dispatched", 1)],
    ],
    ids=["trained twice", "never finished", "never dispatched", "dispatched after training", "skipped"],
)
def test_a_contradiction_is_found(events):
    with pytest.raises(LedgerError):
        check_ledger([{"event": event, "prompt": prompt, "rollout_step": 1} for event, prompt in events])


def test_a_full_disk_is_named_with_the_file(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger._file = open("/dev/full", "a")  # noqa: SIM115  (the device whose every write fails so)
    ledger.record(Event.DISPATCHED, prompt=0, rollout_step=1, weight_version=0)
    with pytest.raises(OSError, match=r"No space left on device: '.*ledger\.jsonl'"):
        ledger.commit()


@pytest.mark.parametrize("wrong", ["first", "middle", "last but one", "doubled", "exchanged"])
def test_a_line_that_is_lost_is_missed(wrong, tmp_path):
    """Also where another process went on with the ledger. What reads events sees no number."""
    path = tmp_path / "ledger.jsonl"
    for prompt in range(2):
        ledger = Ledger(path)
        record(ledger, (Event.DISPATCHED, prompt), (Event.FINISHED, prompt), (Event.TRAINED, prompt))
        ledger.close()
    assert set(read_ledger(path)[4]) == {"event", "prompt", "rollout_step", "weight_version"}
    lines = path.read_text().splitlines(keepends=True)
    changed = {
        "first": lines[1:],
        "middle": lines[:3] + lines[4:],
        "last but one": lines[:4] + lines[5:],
        "doubled": [*lines[:2], *lines[1:]],
        "exchanged": [lines[0], lines[2], lines[1], *lines[3:]],
    }
    path.write_text("".join(changed[wrong]))
    with pytest.raises(LedgerError, match=r"ledger\.jsonl:\d: was line \d when it was written: .* restore the file"):
        read_ledger(path, {Event.CHECKPOINT})


def test_a_ledger_of_before_the_numbers_is_gone_on_with(tmp_path):
    path = tmp_path / "ledger.jsonl"
    path.write_text('{"event": "dispatched", "prompt": 0, "rollout_step": 1, "weight_version": 0}\n')
    ledger = Ledger(path)
    record(ledger, (Event.FINISHED, 0), (Event.TRAINED, 0))
    ledger.close()
    assert check_ledger(read_ledger(path)) == {0: "trained"}
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    with pytest.raises(LedgerError, match="was line 2"):
        read_ledger(path)
