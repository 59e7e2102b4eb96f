"""Descriptors that forked children of this process do not share.

A forked child, such as a worker of torch's ``DataLoader``, has a copy of every descriptor, and may
outlive its parent. With a copy of the line to the agent the agent would not hear that the trainer
was killed; with a copy of the lock on a folder the folder would stay in use.
"""

from __future__ import annotations

import os
from functools import cache

_own: set[int] = set()


def keep_from_children(descriptor: int) -> None:
    """Let no child that is forked from now on share an open descriptor, until ``release``."""
    _watch_forks()
    _own.add(descriptor)


def release(descriptor: int) -> None:
    """Undo ``keep_from_children``: once it is closed another file may get its number."""
    _own.discard(descriptor)


@cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_let_go)


def _let_go() -> None:
    """Replace each descriptor by one of /dev/null, in a child.

    None is closed, since objects that were copied with it close it when they are freed.
    """
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for descriptor in _own:
        os.dup2(nothing, descriptor, inheritable=False)
    _own.clear()
    os.close(nothing)
