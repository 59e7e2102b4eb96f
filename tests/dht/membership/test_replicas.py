from __future__ import annotations

from itertools import count

from dht.membership.replicas import ALIKE_MAX, apart


def first(word: str) -> str | None:
    return word[0] if word[0] != "-" else None


def last(word: str) -> str | None:
    return word[-1] if word[-1] != "-" else None


def test_few_nodes_that_have_the_same_come_among_the_first() -> None:
    assert ALIKE_MAX == 2
    assert apart(["ax", "ay", "az", "bx", "cy"], [first], count=4) == ["ax", "ay", "bx", "cy"]


def test_nodes_of_which_nothing_is_known_are_not_limited() -> None:
    assert apart(["-1", "-2", "-3", "ax"], [first], count=3) == ["-1", "-2", "-3"]


def test_where_there_are_no_others_all_are_taken_in_their_order() -> None:
    assert apart(["ax", "ay", "az", "bx"], [first], count=9) == ["ax", "ay", "bx", "az"]
    assert apart([], [first], count=3) == []
    assert apart(["ax", "ay", "az"], [], count=2) == ["ax", "ay"]


def test_the_last_rule_is_given_up_first() -> None:
    words = ["ax", "ay", "az", "bx", "cx", "dx"]
    # az breaks the first rule; cx and dx, the third and fourth with an x, the second.
    assert apart(words, [first, last], count=5) == ["ax", "ay", "bx", "cx", "dx"]
    assert apart(words, [first, last], count=6) == ["ax", "ay", "bx", "cx", "dx", "az"]


def test_no_more_nodes_are_looked_at_than_needed() -> None:
    numbers = count()
    assert apart(numbers, [lambda number: None], count=5) == [0, 1, 2, 3, 4]
    assert next(numbers) <= 6
