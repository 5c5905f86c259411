"""A checkpoint's manifest: names its algorithm, reads those of before, and finds one changed byte by either."""

import hashlib
import json
from pathlib import Path

import pytest
import xxhash

from megatron_dapo.actor.checkpoint.checkpoint_files import (
    MANIFEST_FILE,
    check_whole,
    digest_of,
    put_in_place,
    read_manifest,
)
from megatron_dapo.actor.step_data import CheckpointDamagedError

CONTENT = bytes(range(256)) * 5000
"""More than a piece that is read at a time."""


def earlier(folder: Path) -> None:
    """A folder with the manifest that has no algorithm."""
    folder.mkdir()
    (folder / "a.distcp").write_bytes(CONTENT)
    (folder / MANIFEST_FILE).write_text(json.dumps({"a.distcp": hashlib.sha256(CONTENT).hexdigest()}))


def present(folder: Path) -> None:
    aside = folder.with_name("aside")
    aside.mkdir()
    (aside / "a.distcp").write_bytes(CONTENT)
    put_in_place(aside, folder, {"a.distcp": digest_of(aside / "a.distcp")})


def test_what_is_written_names_its_algorithm(tmp_path):
    present(tmp_path / "step")
    assert json.loads((tmp_path / "step" / MANIFEST_FILE).read_text()) == {
        "algorithm": "xxh3-128",
        "files": {"a.distcp": xxhash.xxh3_128(CONTENT).hexdigest()},
    }


@pytest.mark.parametrize(("write", "algorithm"), [(present, "xxh3-128"), (earlier, "sha256")])
def test_one_changed_bit_is_found_by_either_algorithm(tmp_path, write, algorithm):
    folder = tmp_path / "step"
    write(folder)
    check_whole(folder)
    assert read_manifest(folder)[0] == algorithm
    changed = bytearray(CONTENT)
    changed[777_777] ^= 16
    (folder / "a.distcp").write_bytes(changed)
    with pytest.raises(CheckpointDamagedError, match=rf"a.distcp is damaged: its {algorithm} is not that of manifest"):
        check_whole(folder)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is damaged"),
        ("[]", "names no files"),
        ("{}", "names no files"),
        ('{"algorithm": "xxh3-128"}', "names no files"),
        ('{"algorithm": "xxh3-128", "files": {}}', "names no files"),
        ('{"algorithm": "crc9", "files": {"a.distcp": "0"}}', "checksums are 'crc9'; known are xxh3-128, sha256"),
        ('{"algorithm": ["sha256"], "files": {"a.distcp": "0"}}', "known are"),
        ('{"algorithn": "xxh3-128", "files": {"a.distcp": "0"}}', "algorithn is missing"),
    ],
)
def test_a_manifest_that_cannot_be_right_is_refused(tmp_path, text, words):
    earlier(tmp_path / "step")
    (tmp_path / "step" / MANIFEST_FILE).write_text(text)
    with pytest.raises(CheckpointDamagedError, match=words):
        check_whole(tmp_path / "step")
