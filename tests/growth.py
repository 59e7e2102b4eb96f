"""Finds containers that grow: measures every container that an object leads to, by its path.

A path names attributes and ``[*]`` for elements, such as ``averager._works[*].exchanges``. The
sizes of all containers with one path are added up. What a function closes over and the local
variables of running tasks belong to it, too.
"""

from __future__ import annotations

import asyncio
import functools
import types
from array import array
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np

LEAVES = (str, bytes, int, float, complex, type, types.ModuleType, Enum, np.dtype, type(None))
CONTAINERS = (dict, list, tuple, set, frozenset, deque, array, bytearray)

Sizes = Mapping[str, int]


def sizes(roots: Mapping[str, Any], *, beyond: Collection[Any] = ()) -> Sizes:
    """Number of elements in all containers, arrays among them, by their path.

    ``beyond``: objects at which the search ends, because they belong to somebody else.
    """
    found: Counter[str] = Counter()
    seen = {id(each) for each in beyond}
    waiting = deque(roots.items())
    kept: list[Any] = []
    """The objects that were made on the way: an id is unique only as long as its object lives."""
    while waiting:
        path, it = waiting.popleft()
        if isinstance(it, LEAVES) or id(it) in seen:
            continue
        seen.add(id(it))
        kept.append(it)
        if isinstance(it, np.ndarray):
            found[path] += it.size
        elif isinstance(it, CONTAINERS):
            found[path] += len(it)
        waiting.extend((f"{path}{step}", each) for step, each in _children(it))
    return dict(found)


def growing(
    series: Sequence[Sizes],
    *,
    each_of: int,
    allowed: Mapping[str, int] = types.MappingProxyType({}),
) -> dict[str, tuple[float, float]]:
    """The paths whose containers are larger at the end than at the beginning, with both sizes.

    The least size of the last third is compared with the largest one of the first, so that what
    goes up and down is not growth. ``each_of``: number of objects measured; a quarter and two
    elements more at each of them are not growth. ``allowed``: bounds of containers that are not
    full yet, for each object, by the end of their path. Of what is in these the average is
    compared.
    """
    third = max(1, len(series) // 3)
    found: dict[str, tuple[float, float]] = {}
    for path in sorted(set().union(*series)):
        around = _not_full(path, allowed)
        if around == path:
            after = float(min(each.get(path, 0) for each in series[-third:]))
            if after > allowed[next(end for end in allowed if path.endswith(end))] * each_of:
                found[path] = (0.0, after)
            continue
        counts = [
            each.get(path, 0) / (max(1, each.get(around, 0)) if around else each_of)
            for each in series
        ]
        before, after = max(counts[:third]), min(counts[-third:])
        if after > 1.25 * before + 2:
            found[path] = (before, after)
    return found


def _not_full(path: str, allowed: Mapping[str, int]) -> str:
    """The container that may grow, if ``path`` is that one or in it; else empty."""
    for end in allowed:
        if (begin := path.find(end)) >= 0:
            return path[: begin + len(end)]
    return ""


def _children(it: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(it, dict):
        for key, value in list(it.items()):
            yield "{*}", key
            yield "[*]", value
    elif isinstance(it, (list, tuple, set, frozenset, deque)):
        names = getattr(it, "_fields", None)
        for index, each in enumerate(list(it)):
            yield f".{names[index]}" if names else "[*]", each
    elif isinstance(it, types.FunctionType):
        for name, cell in zip(it.__code__.co_freevars, it.__closure__ or (), strict=True):
            if cell.cell_contents is not it:
                yield f"<{name}>", cell.cell_contents
    elif isinstance(it, types.MethodType):
        yield "", it.__self__
    elif isinstance(it, functools.partial):
        yield "<partial>", (it.func, it.args, it.keywords)
    elif isinstance(it, asyncio.Task):
        yield from _locals(it.get_coro())
    elif isinstance(it, types.CoroutineType):
        yield from _locals(it)
    if isinstance(it, (types.FunctionType, types.CoroutineType, np.ndarray)):
        return
    for name, value in getattr(it, "__dict__", {}).items():
        yield f".{name}", value
    for kind in type(it).__mro__:
        for name in _slots(kind):
            if (value := getattr(it, name, None)) is not None:
                yield f".{name}", value


@functools.lru_cache(maxsize=4096)
def _slots(kind: type) -> tuple[str, ...]:
    """Attributes that a class keeps without a dictionary."""
    if kind.__module__ in ("builtins", "collections", "_asyncio"):
        return ()
    return tuple(
        name
        for name, each in vars(kind).items()
        if isinstance(each, types.MemberDescriptorType) and name not in ("__dict__", "__weakref__")
    )


def _locals(coroutine: Any) -> Iterator[tuple[str, Any]]:
    """The local variables of a suspended coroutine, and of those that it waits for."""
    while isinstance(coroutine, types.CoroutineType):
        if coroutine.cr_frame is None:
            return
        for name, value in coroutine.cr_frame.f_locals.items():
            yield f"<{coroutine.__qualname__}>.{name}", value
        coroutine = coroutine.cr_await
