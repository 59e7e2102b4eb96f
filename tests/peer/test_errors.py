"""Expected errors are their fields: between processes, and in what is shown."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest

import averaging.errors
import averaging.live.states.fetcher
import averaging.live.streams.buffers
import peer.errors
from dht.errors import ExpectedError, PeerUnreachable


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
