"""Requests over https that no redirect leads elsewhere than to https."""

from __future__ import annotations

import http.client
import re
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import IO, Any

from peer.errors import one_line

REDIRECTS_MAX = 5


class _HttpsOnly(urllib.request.HTTPRedirectHandler):
    """Follows redirects to https addresses only."""

    max_redirections = REDIRECTS_MAX

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: Any,
        newurl: str,
    ) -> urllib.request.Request | None:
        if not newurl.lower().startswith("https://"):
            raise urllib.error.URLError(f"it redirects to {newurl}, which is not https")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class _CheckedConnection(http.client.HTTPSConnection):
    """Sends a request only if the address that the host's name leads to is allowed."""

    def __init__(self, host: str, *, allowed: Callable[[str], bool], **named: Any) -> None:
        super().__init__(host, **named)
        self._allowed = allowed
        self._is_direct = True

    def set_tunnel(self, *args: Any, **named: Any) -> None:
        self._is_direct = False  # a proxy chooses the address
        super().set_tunnel(*args, **named)

    def connect(self) -> None:
        super().connect()
        address = str(self.sock.getpeername()[0])
        if self._is_direct and not self._allowed(address):
            self.close()
            raise urllib.error.URLError(
                f"{self.host} has the address {address}, which is not public"
            )


class _CheckedHttps(urllib.request.HTTPSHandler):
    def __init__(self, tls: ssl.SSLContext, allowed: Callable[[str], bool]) -> None:
        super().__init__(context=tls)
        self._tls = tls
        self._allowed = allowed

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        connection: Any = partial(_CheckedConnection, allowed=self._allowed)
        return self.do_open(connection, req, context=self._tls)


def reason_of(error: Exception) -> str:
    """The reason of a failed request, in words: without the numbers of the operating system."""
    reason = getattr(error, "reason", None) or error
    if isinstance(reason, socket.gaierror):
        return f"the name of the host is not known ({reason.strerror})"
    if isinstance(reason, ssl.SSLCertVerificationError):
        return f"the server's certificate is not trusted: {reason.verify_message}"
    if isinstance(reason, OSError) and reason.strerror:
        return reason.strerror
    return re.sub(r"^\[Errno -?\d+\] ", "", str(reason))  # of httpx, which keeps the text alone


@contextmanager
def answers_checked() -> Iterator[None]:
    """Raise ``OSError`` for an answer that is none of http, and for an address that is none.

    A redirect may name any. http.client and urllib have errors of several other kinds for these.
    """
    try:
        yield
    except OSError:  # one of them is a kind of both
        raise
    except (http.client.HTTPException, ValueError) as error:
        reason = f"the address or its server's answer is invalid: {one_line(error)}"
        raise urllib.error.URLError(reason) from error


def https_opener(
    tls: ssl.SSLContext | None = None, *, allowed: Callable[[str], bool] = lambda address: True
) -> urllib.request.OpenerDirector:
    """An opener. Its errors, and those of reading, are ``OSError`` in ``answers_checked``.

    ``tls`` is for tests and private certificate authorities. ``allowed``: whether a request may
    be sent to an address; it is not asked about the address of a proxy.
    """
    return urllib.request.build_opener(
        _CheckedHttps(tls or _public_authorities(), allowed), _HttpsOnly()
    )


@cache
def _public_authorities() -> ssl.SSLContext:
    """The system's certificate authorities; reading their hundreds of certificates takes 30 ms."""
    return ssl.create_default_context()
