"""A mapping that forgets its oldest entries."""

from __future__ import annotations

import pytest

from dht.bounded_mapping import BoundedMapping


def test_a_new_key_drops_the_oldest_and_a_known_one_drops_nothing() -> None:
    mapping: BoundedMapping[str, int] = BoundedMapping(2)
    mapping["a"], mapping["b"] = 1, 2
    mapping["a"] = 3
    assert dict(mapping) == {"a": 3, "b": 2}
    mapping["c"] = 4
    assert dict(mapping) == {"b": 2, "c": 4}


def test_no_way_of_setting_a_key_passes_the_limit() -> None:
    mapping: BoundedMapping[int, int] = BoundedMapping(2)
    assert [mapping.setdefault(key, 10 * key) for key in (1, 2, 1, 3)] == [10, 20, 10, 30]
    assert dict(mapping) == {2: 20, 3: 30}
    mapping.update({4: 40, 5: 50})
    assert dict(mapping) == {4: 40, 5: 50}
    mapping |= {6: 60}
    assert dict(mapping) == {5: 50, 6: 60}


def test_a_mapping_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="limit is 0"):
        BoundedMapping(0)
