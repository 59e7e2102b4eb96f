import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multiaddr import Multiaddr

from dht.errors import KeyFileError
from dht.identity import (
    REMEMBERED_MAX_BYTES,
    Identity,
    PeerId,
    parse_peer_id,
    peer_id_of,
    public_key_of,
    verify,
)

ANNA = Identity.from_seed(b"a" * 32)
BORIS = Identity.from_seed(b"b" * 32)


def test_a_peer_id_is_the_one_libp2p_computes() -> None:
    # The example of libp2p's specification of peer ids (Ed25519, private key in hex).
    key = bytes.fromhex(
        "080112407e0830617c4a7de83925dfb2694556b12936c477a0e1feb2e148ec9da60fee7d"
        "1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e"
    )
    identity = Identity.from_bytes(key)

    assert identity.to_bytes() == key
    assert identity.public_key == key[36:]
    # What py-multiaddr accepts as /p2p, and gives back in binary, is the same identity multihash.
    address = Multiaddr(f"/p2p/{identity.peer_id}")
    assert address.to_bytes().endswith(b"\x00\x24\x08\x01\x12\x20" + identity.public_key)
    assert identity.peer_id.startswith("12D3KooW")


def test_the_same_seed_gives_the_same_identity() -> None:
    assert Identity.from_seed(b"a" * 32).peer_id == ANNA.peer_id != BORIS.peer_id


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_seed_of_another_size_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"{size} bytes"):
        Identity.from_seed(bytes(size))


@given(st.binary(min_size=32, max_size=32))
def test_a_peer_id_gives_its_public_key_back(public_key: bytes) -> None:
    assert public_key_of(peer_id_of(public_key)) == public_key


@given(st.binary(max_size=200))
def test_only_the_signer_of_a_message_verifies(message: bytes) -> None:
    signature = ANNA.sign(message)

    assert verify(ANNA.peer_id, message, signature)
    assert not verify(BORIS.peer_id, message, signature)
    assert not verify(ANNA.peer_id, message + b"!", signature)
    assert not verify(ANNA.peer_id, message, signature[:-1])


@pytest.mark.parametrize("length", [20, REMEMBERED_MAX_BYTES, REMEMBERED_MAX_BYTES + 1])
def test_a_remembered_signature_holds_for_its_message_and_its_signer_alone(length: int) -> None:
    message = bytes(length)
    signature = ANNA.sign(message)
    changed = message[:-1] + b"!"
    for _ in range(2):
        assert not verify(ANNA.peer_id, changed, signature)
        assert not verify(BORIS.peer_id, message, signature)
        assert not verify(ANNA.peer_id, message, BORIS.sign(message))
        assert verify(ANNA.peer_id, message, signature)
        assert verify(ANNA.peer_id, memoryview(message), signature)  # type: ignore[arg-type]


@given(st.text(max_size=100), st.binary(max_size=80))
def test_any_text_as_peer_id_is_refused_and_never_crashes(text: str, signature: bytes) -> None:
    assert not verify(PeerId(text), b"message", signature)
    with pytest.raises(ValueError):
        parse_peer_id(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1",
        "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",  # RSA: the key is not inside
        "1" + ANNA.peer_id,
        ANNA.peer_id + "1",
        ANNA.peer_id[:-1],
        ANNA.peer_id + "\n",  # the package would read it: one peer would have several ids
        ANNA.peer_id.replace("o", "0", 1),
        "1" * 1_000_000,
    ],
)
def test_an_id_that_embeds_no_ed25519_key_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="peer id"):
        parse_peer_id(text)


def test_a_key_file_is_created_private_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "identity.key"

    created = Identity.load_or_create(path)
    loaded = Identity.load_or_create(str(path))

    assert loaded.peer_id == created.peer_id
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["identity.key"], "a file is left"


def test_a_strict_umask_does_not_matter(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        Identity.load_or_create(tmp_path / "key")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o601])
def test_a_key_file_open_to_others_is_refused_with_the_cure(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "key"
    Identity.load_or_create(path)
    path.chmod(mode)

    with pytest.raises(KeyFileError, match="chmod 600") as caught:
        Identity.load_or_create(path)
    assert caught.value.problem == "exposed"
    assert stat.S_IMODE(path.stat().st_mode) == mode, "the file is left as it is"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        ANNA.to_bytes()[:-1],
        ANNA.to_bytes() + b"\0",
        b"\x08\x00" + ANNA.to_bytes()[2:],
        ANNA.to_bytes()[:36] + BORIS.to_bytes()[36:],
        b"x" * 100_000,
    ],
)
def test_a_damaged_key_file_is_reported_and_never_overwritten(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    path.chmod(0o600)

    with pytest.raises(KeyFileError, match=r"damaged.*backup") as caught:
        Identity.load_or_create(path)
    assert caught.value.problem == "damaged"
    assert path.read_bytes() == content


@given(st.binary(max_size=200))
def test_any_bytes_as_key_file_give_a_value_error_or_a_key(data: bytes) -> None:
    try:
        identity = Identity.from_bytes(data)
    except ValueError:
        return
    assert identity.to_bytes() == data


def test_a_folder_in_place_of_the_key_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match="cannot be read") as caught:
        Identity.load_or_create(tmp_path)
    assert caught.value.problem == "unreadable"


def test_a_place_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(KeyFileError, match="cannot be written") as caught:
        Identity.load_or_create(tmp_path / "file" / "key")
    assert caught.value.problem == "unwritable"
    assert "free some space, or choose a folder" in str(caught.value)


def test_a_dangling_link_is_reported_and_not_filled(tmp_path: Path) -> None:
    (tmp_path / "key").symlink_to(tmp_path / "nowhere")
    with pytest.raises(KeyFileError):
        Identity.load_or_create(tmp_path / "key")
    assert not (tmp_path / "nowhere").exists()


def test_two_processes_that_create_the_file_at_once_end_with_one_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "key"
    link = os.link

    def link_second(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "link", link)
        Identity.load_or_create(path)  # the other process, in the gap before our link
        link(source, target)

    monkeypatch.setattr(os, "link", link_second)
    ours = Identity.load_or_create(path)

    assert ours.peer_id == Identity.load_or_create(path).peer_id
    assert [entry.name for entry in tmp_path.iterdir()] == ["key"]
