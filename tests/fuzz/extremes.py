"""Strategies for the most extreme values that a message type allows."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from msgspec import inspect

SHOWN = (
    *("", " ", "W", "\u00e9", "a\u0301", "\u3164"),
    *("\ud55c", "\U0001f600", "\ufffd", "{}%s", "<b>", "[red]"),
)
"""Texts that a terminal shows, some in two columns, and some that may be taken for markup."""

LENGTH_MAX = 4000
ITEMS_MAX = 6
INTEGERS = (0, 1, 2**53, 2**53 + 1, 2**62 - 1, 2**62, 2**63 - 1)
FLOATS = (0.0, -0.0, 5e-324, 1e-300, 1.0, 2.0**53, 1e9, 1e18, 1e300)


def extremes(kind: Any, **given: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Values of a message type, as msgspec checks it: its bounds, and texts that are hard to show.

    ``given``: the fields that have further rules.
    """
    made = inspect.type_info(kind)
    assert isinstance(made, inspect.StructType)
    fields = {each.name: _of(each.type) for each in made.fields}
    return st.builds(kind, **(fields | given))


def _of(kind: Any) -> st.SearchStrategy[Any]:
    match kind:
        case inspect.IntType(ge=least, gt=above, le=most, lt=below):
            low = least if least is not None else -(2**63) if above is None else above + 1
            high = most if most is not None else 2**64 - 1 if below is None else below - 1
            bounds = [low, high, *(each for each in INTEGERS if low <= each <= high)]
            return st.sampled_from(bounds)
        case inspect.FloatType(ge=least, le=most):
            floor, ceiling = (-1e308 if least is None else least), (1e308 if most is None else most)
            signed = (*FLOATS, *(-each for each in FLOATS))
            inside = [each for each in signed if floor <= each <= ceiling]
            return st.sampled_from([float(floor), float(ceiling), *inside])
        case inspect.StrType(max_length=most, min_length=least):
            length = min(LENGTH_MAX, LENGTH_MAX if most is None else most)
            texts = [*SHOWN, *((text * length)[:length] for text in SHOWN)]
            fit = [text for text in texts if (least or 0) <= len(text) <= length]
            return st.sampled_from(fit)
        case inspect.BytesType(max_length=most, min_length=least):
            length = min(LENGTH_MAX, LENGTH_MAX if most is None else most)
            return st.sampled_from([bytes(least or 0), b"\xff" * length])
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.LiteralType(values=values):
            return st.sampled_from(list(values))
        case inspect.UnionType(types=types):
            return st.one_of([_of(each) for each in types])
        case inspect.TupleType(item_types=items):
            return st.tuples(*(_of(each) for each in items))
        case inspect.VarTupleType(item_type=item, max_length=most):
            count = min(ITEMS_MAX, ITEMS_MAX if most is None else most)
            return st.lists(_of(item), max_size=count).map(tuple)
        case inspect.DictType(key_type=key, value_type=value, max_length=most):
            count = min(ITEMS_MAX, ITEMS_MAX if most is None else most)
            return st.dictionaries(_of(key), _of(value), max_size=count)
        case inspect.StructType(cls=cls, fields=fields):
            return st.builds(cls, **{each.name: _of(each.type) for each in fields})
    raise NotImplementedError(f"{kind} has no strategy yet")
