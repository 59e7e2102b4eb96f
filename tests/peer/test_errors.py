"""Expected errors are their fields: between processes, and in what is shown."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import averaging.errors
import averaging.live.states.fetcher
import averaging.live.streams.buffers
import peer.errors
from dht.errors import ExpectedError, PeerUnreachable
from peer.errors import ExitCode, PeerError


def all_kinds(of: type[ExpectedError] = ExpectedError) -> Iterator[type[ExpectedError]]:
    for kind in of.__subclasses__():
        yield kind
        yield from all_kinds(kind)


def declared() -> list[type[ExpectedError]]:
    """The errors of all modules that are imported by now."""
    kinds = {kind for kind in all_kinds() if kind.__match_args__}
    return sorted(
        kinds - {peer.errors.ModelMismatch}, key=lambda kind: f"{kind.__module__} {kind.__name__}"
    )


def test_errors_survive_pickling_with_their_fields() -> None:
    for kind in declared():
        fields = {name: f"{name} of it" for name in kind.__match_args__}

        again = pickle.loads(pickle.dumps(kind(**fields)))  # noqa: S301

        assert type(again) is kind and again.args == tuple(fields.values())
        assert {name: getattr(again, name) for name in fields} == fields


def test_errors_of_all_packages_are_declared() -> None:
    found = {*declared()}
    assert {averaging.errors.NotFinite, averaging.live.states.fetcher.FetchFailed} < found
    assert {
        averaging.live.streams.buffers.Abandoned,
        PeerUnreachable,
        peer.errors.RunFileError,
    } < found


def test_an_error_is_read_by_its_fields_and_shown_as_a_sentence() -> None:
    error = PeerUnreachable("anna", "silent for 5 s")

    assert (error.peer, error.reason) == ("anna", "silent for 5 s")
    assert str(error) == "peer anna cannot be reached: silent for 5 s"


def test_a_message_that_names_no_field_is_refused_where_it_is_written() -> None:
    with pytest.raises(TypeError, match="more than its fields"):

        class Broken(ExpectedError):
            peer: str
            message = "{peer} is away: {reason}"


def test_the_document_says_of_each_exit_code_whether_to_start_again() -> None:
    text = (Path(__file__).parents[2] / "docs/reference/output.md").read_text(encoding="utf-8")
    told = re.findall(r"^\| (\d+) \| .* \| (yes|no) \|$", text, re.MULTILINE)
    assert {int(code): again == "no" for code, again in told} == {
        int(code): code.is_final for code in ExitCode
    }


def test_every_error_ends_a_command_with_one_of_the_exit_codes() -> None:
    for kind in all_kinds(PeerError):
        if isinstance(code := getattr(kind, "exit_code", None), int):  # else it is a field
            assert code in set(ExitCode), kind
