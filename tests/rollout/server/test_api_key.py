"""Key files: made for their owner alone, refused where others can read them, never shown."""

import dataclasses
import pickle
import stat

import pytest

from rollout.errors import KeyFileError
from rollout.server.server_command import Secret, new_key, read_key


def test_a_new_key_is_its_owners_alone_and_new_each_time(tmp_path):
    file = tmp_path / "key"
    new_key(file)
    first = read_key(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    new_key(file)
    assert read_key(file) != first
    assert len(first) > 30


@pytest.mark.parametrize(
    ("content", "mode", "problem"),
    [("secret", 0o640, "chmod 600"), ("", 0o600, "one API key"), ("two words", 0o600, "one API key")],
)
def test_a_key_file_that_cannot_be_used_is_named(tmp_path, content, mode, problem):
    file = tmp_path / "key"
    file.write_text(content)
    file.chmod(mode)
    with pytest.raises(KeyFileError, match=problem) as caught:
        read_key(file)
    assert str(file) in str(caught.value)
    with pytest.raises(KeyFileError, match="no API key"):
        read_key(tmp_path / "missing")


def test_a_key_does_not_show_itself_in_settings_but_works_as_text():
    @dataclasses.dataclass
    class Settings:
        api_key: str

    key = Secret("abc")
    assert "abc" not in repr(Settings(key))
    assert f"Bearer {key}" == "Bearer abc"
    assert pickle.loads(pickle.dumps(key)) == "abc"
