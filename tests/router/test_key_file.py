"""Faults of the file of API keys are reported by flag, file and line before anything starts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest

from deploy.config import load_config
from protocol.errors import ConfigError
from protocol.server_options import MAX_API_KEYS
from router.api_keys import KeyEntry, add_key, hash_of, read_key_file

GOOD = {"name": "a", "sha256": "0" * 64}


def write(path: Path, *entries: dict | str, mode: int = 0o600) -> str:
    lines = [entry if isinstance(entry, str) else json.dumps(entry) for entry in entries]
    path.write_text("\n".join(lines))
    path.chmod(mode)
    return str(path)


def refusal(path: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config({"api_key_file": path}, {})
    return str(caught.value)


def test_an_added_key_is_accepted_and_stored_as_a_hash(tmp_path):
    path = str(tmp_path / "keys")
    first = add_key(path, name="alice", requests_per_minute=60, priority=-1)
    second = add_key(path, name="bob", operator=True, tokens_per_minute=None)
    assert read_key_file(path) == [
        KeyEntry(name="alice", sha256=hash_of(first), requests_per_minute=60, priority=-1),
        KeyEntry(name="bob", sha256=hash_of(second), operator=True),
    ]
    text = Path(path).read_text()
    assert first not in text and second not in text and first != second
    assert len(first) > 40
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert load_config({"api_key_file": path}, {}).needs_api_key


def test_a_missing_line_end_is_added(tmp_path):
    path = write(tmp_path / "keys", GOOD)
    add_key(path, name="b")
    assert [entry.name for entry in read_key_file(path)] == ["a", "b"]


WRONG = {
    "no json": ("{", "line 2: Input data was truncated"),
    "no name": ({"sha256": "0" * 64}, "line 2: Object missing required field `name`"),
    "a number for a name": ({**GOOD, "name": "1"}, "line 2: Expected `str` matching regex"),
    "a line end in a name": ({**GOOD, "name": "b\n"}, "line 2: Expected `str` matching regex"),
    "the key itself": ({**GOOD, "sha256": "tandem-secret"}, "line 2: Expected `str` matching regex"),
    "no requests at all": ({**GOOD, "requests_per_minute": 0}, "line 2: Expected `int` >= 1"),
    "words": ({**GOOD, "tokens_per_minute": "many"}, "line 2: Expected `int | null`, got `str`"),
    "negative": ({**GOOD, "concurrent_requests": -1}, "line 2: Expected `int` >= 1"),
    "urgent beyond all bounds": ({**GOOD, "priority": -1001}, "line 2: Expected `int` >= -1000"),
    "unknown": ({**GOOD, "limit": 1}, "line 2: Object contains unknown field `limit`"),
    "the same name": ({**GOOD, "sha256": "1" * 64}, "the name a is there twice"),
    "the same key": ({**GOOD, "name": "b"}, "the sha256 000"),
}


@pytest.mark.parametrize(("entry", "said"), WRONG.values(), ids=WRONG)
def test_wrong_lines_are_named(tmp_path, entry, said):
    path = write(tmp_path / "keys", GOOD, entry)
    message = refusal(path)
    assert message.startswith(f"--api-key-file: {path}") and said in message


def test_unusable_files_are_named(tmp_path):
    path = str(tmp_path / "keys")
    assert refusal(path) == f"--api-key-file: cannot read {path}: No such file or directory"
    assert "Is a directory" in refusal(str(tmp_path)) or "is no file" in refusal(str(tmp_path))
    write(tmp_path / "keys", "")
    assert refusal(path) == f"--api-key-file: {path} has no key: `tandem key add` makes one"
    (tmp_path / "keys").write_bytes(b"\xff\xfe")
    assert "no UTF-8" in refusal(path)
    many = [{"name": f"k{i}", "sha256": f"{i:064x}"} for i in range(MAX_API_KEYS + 1)]
    write(tmp_path / "keys", *many)
    assert f"at most {MAX_API_KEYS} keys" in refusal(path)
    os.mkfifo(tmp_path / "pipe")
    assert "is no file" in refusal(str(tmp_path / "pipe"))


def test_a_file_that_others_may_read_is_refused(tmp_path):
    path = write(tmp_path / "keys", GOOD, mode=0o644)
    assert refusal(path).endswith(f"(mode 644): chmod 600 {path}")


def test_a_key_is_not_added_through_a_link(tmp_path):
    """Another user may have put the link there."""
    (tmp_path / "keys").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"--api-key-file: .* is a symbolic link"):
        add_key(str(tmp_path / "keys"), name="alice")
    assert not (tmp_path / "elsewhere").exists()


def test_adding_refuses_keys_that_could_not_be_read_back(tmp_path):
    path = str(tmp_path / "keys")
    add_key(path, name="alice")
    before = Path(path).read_text()
    for name, limits in {"alice": {}, "1": {}, "b": {"requests_per_minute": 0}}.items():
        with pytest.raises(ConfigError):
            add_key(path, name=name, **limits)
    with pytest.raises(ConfigError, match="cannot write"):
        add_key(str(tmp_path / "nowhere" / "keys"), name="b")
    assert Path(path).read_text() == before


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"name": ""}, "NAME: must be a string that matches .*, got ''"),
        (
            {"requests_per_minute": -1},
            "--requests-per-minute: must be an integer from 1 to 9223372036854775807, got -1",
        ),
        ({"priority": 1001}, "--priority: must be an integer from -1000 to 1000, got 1001"),
    ],
)
def test_invalid_properties_of_a_key_are_named(tmp_path, fields, said):
    with pytest.raises(ConfigError, match=f"^{said}"):
        add_key(str(tmp_path / "keys"), **{"name": "a", **fields})
    assert not (tmp_path / "keys").exists()


def test_the_documented_line_is_valid():
    line = msgspec.json.encode(KeyEntry(name="alice", sha256="0" * 64, requests_per_minute=60)).decode()
    assert line == '{"name":"alice","sha256":"' + "0" * 64 + '","requests_per_minute":60}'
