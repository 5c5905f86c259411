"""A checkpoint's manifest: names its algorithm, and finds one changed byte."""

import json
from pathlib import Path

import pytest
import xxhash

from megatron_dapo.actor.checkpoint.checkpoint_files import (
    MANIFEST_FILE,
    check_whole,
    digest_of,
    put_in_place,
)
from megatron_dapo.actor.step_data import CheckpointDamagedError

CONTENT = bytes(range(256)) * 5000
"""More than a piece that is read at a time."""


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


def test_one_changed_bit_is_found(tmp_path):
    folder = tmp_path / "step"
    present(folder)
    check_whole(folder)
    changed = bytearray(CONTENT)
    changed[777_777] ^= 16
    (folder / "a.distcp").write_bytes(changed)
    with pytest.raises(CheckpointDamagedError, match=r"a.distcp is damaged: its checksum is not that of manifest"):
        check_whole(folder)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is damaged"),
        ("[]", "is damaged"),
        ("{}", "is damaged"),
        ('{"algorithm": "xxh3-128"}', "is damaged"),
        ('{"algorithm": "xxh3-128", "files": 5}', "is damaged"),
        ('{"algorithm": "crc9", "files": {"a.distcp": "0"}}', "checksums are 'crc9', of another version"),
        ('{"algorithm": ["sha256"], "files": {"a.distcp": "0"}}', "of another version"),
        ('{"algorithn": "xxh3-128", "files": {"a.distcp": "0"}}', "is damaged"),
        ('{"algorithm": "xxh3-128", "files": {"b.distcp": "0"}}', "b.distcp is missing"),
    ],
)
def test_a_manifest_that_cannot_be_right_is_refused(tmp_path, text, words):
    present(tmp_path / "step")
    (tmp_path / "step" / MANIFEST_FILE).write_text(text)
    with pytest.raises(CheckpointDamagedError, match=words):
        check_whole(tmp_path / "step")
