"""Which keys there are: from files of both kinds and from the environment; what is refused."""

import hashlib
import logging

import pytest

from aioserve.errors import ConfigError
from aioserve.server.access.keys import ENVIRONMENT, Keyring, read_keys

ANN, BEN = "sk-ann-0123456789", "sk-ben-0123456789"


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def written(path, text, mode=0o600):
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_a_yaml_file_names_keys_or_their_hashes_and_what_they_may(tmp_path):
    path = written(
        tmp_path / "keys.yaml",
        f"""
keys:
  - {{name: ann, key: {ANN}, admin: true}}
  - {{name: ben, sha256: {digest(BEN)}, max_requests: 2, tokens_per_minute: 600,
      most_urgent_priority: 0}}
""",
    )
    ring = Keyring(read_keys(path, {}))
    ann, ben = ring.find(ANN), ring.find(BEN)
    assert ann is not None
    assert (ann.name, ann.admin, ann.is_counted) == ("ann", True, False)
    assert ben is not None
    assert (ben.name, ben.admin, ben.max_requests, ben.tokens_per_minute) == ("ben", False, 2, 600)
    assert (ben.most_urgent_priority, ben.is_counted) == (0, True)
    assert ring.find("sk-ben") is None
    assert ring.find("") is None
    assert ring.find("\udcff\u2603") is None


def test_any_other_file_has_a_key_a_line_named_by_its_hash(tmp_path):
    path = written(tmp_path / "keys", f"# of the team\n{ANN}\n\n  {BEN}  \n")
    keys = read_keys(path, {})
    assert [key.name for key in keys] == [f"key-{digest(k)[:8]}" for k in (ANN, BEN)]
    assert ANN not in repr(keys)


def test_the_environments_keys_are_added_to_the_files(tmp_path):
    path = written(tmp_path / "keys", ANN)
    ring = Keyring(read_keys(path, {ENVIRONMENT: f"{BEN}, sk-carl-012345678"}))
    assert len(ring.keys) == 3
    assert ring.find("sk-carl-012345678") is not None
    assert not Keyring(read_keys(None, {}))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("keys", "", "has no key"),
        ("keys", "# nobody\n", "has no key"),
        ("keys", "two words of a secret", "line 1 of .* must be printable ASCII .* without spaces"),
        ("keys", f"{ANN}\n{ANN}", "'key-.*' is the name of two"),
        ("keys.yaml", "keys: []", "has no key"),
        ("keys.yaml", "keys: [{name: ann}]", "key 1 of .* must have either key or sha256"),
        ("keys.yaml", f"keys: [{{key: {ANN}, sha256: {digest(ANN)}}}]", "either key or sha256"),
        ("keys.yaml", f"keys: [{{key: {ANN}, limit: 5}}]", "unknown field `limit`"),
        ("keys.yaml", f"keys: [{{key: {ANN}, max_requests: 0}}]", "max_requests"),
        ("keys.yaml", f"keys: [{{key: {ANN}, name: a b}}]", "name"),
        ("keys.yaml", "keys: [{key: 5}]", "Expected `str"),
        (
            "keys.yaml",
            f"keys: [{{key: {ANN}, name: a}}, {{name: a, key: {BEN}}}]",
            "'a' is the name of two",
        ),
        (
            "keys.yaml",
            f"keys: [{{key: {ANN}, name: a}}, {{name: b, key: {ANN}}}]",
            "'b' is there twice",
        ),
        ("keys.yaml", f"[{ANN}]", "Expected `object`"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused_and_no_key_is_quoted(tmp_path, name, text, message):
    path = written(tmp_path / name, text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_keys(path, {})
    assert ANN not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_file_that_is_not_there_and_an_empty_variable_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read keys file .*: No such file"):
        read_keys(str(tmp_path / "keys"), {})
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not text in UTF-8"):
        read_keys(str(tmp_path / "binary"), {})
    with pytest.raises(ConfigError, match=f"key 1 of {ENVIRONMENT}"):
        read_keys(None, {ENVIRONMENT: ""})
    with pytest.raises(ConfigError, match=f"key 2 of {ENVIRONMENT}"):
        read_keys(None, {ENVIRONMENT: f"{ANN},"})


def test_who_else_can_read_the_file_and_what_can_be_guessed_is_warned_about(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        read_keys(written(tmp_path / "mine", ANN), {})
        assert not caplog.records
        read_keys(written(tmp_path / "ours", ANN, 0o644), {})
        assert "can be read or written by others (mode 644): chmod 600" in caplog.text
        read_keys(None, {ENVIRONMENT: "tiger"})
    assert f"key 1 of {ENVIRONMENT} has fewer than 16 characters" in caplog.text
    assert "tiger" not in caplog.text
