"""What a kill leaves of a file that grows by lines."""

import pytest

from megatron_dapo.storage.durable import drop_torn_line


@pytest.mark.parametrize(
    ("left", "kept"),
    [
        (b"", b""),
        (b"a\nb\n", b"a\nb\n"),
        (b"a\nb", b"a\n"),
        (b"a", b""),
        (b"a\n\0\0\0", b"a\n"),
        (b"a\n" + b"x" * 70000, b"a\n"),
    ],
    ids=["empty", "whole", "torn", "torn first line", "zeros of a power cut", "long"],
)
def test_whole_lines_stay(tmp_path, left, kept):
    file = tmp_path / "lines"
    file.write_bytes(left)
    drop_torn_line(file)
    assert file.read_bytes() == kept


def test_no_file_is_left_alone(tmp_path):
    drop_torn_line(tmp_path / "lines")
    assert not (tmp_path / "lines").exists()
