from dht.membership.replicas import KEYS_MAX, KNOWN_FOR_S, Holders


def test_those_who_had_records_are_asked_in_turns() -> None:
    holders: Holders[str] = Holders()
    holders.found("key", ["anna", "boris", "clara"], now=0.0)
    asked = [holders.next("key", now=1.0) for _ in range(6)]
    assert asked == ["anna", "boris", "clara"] * 2


def test_a_key_that_was_empty_or_never_searched_for_has_to_be_searched_for() -> None:
    holders: Holders[str] = Holders()
    assert holders.next("key", now=0.0) is None
    holders.found("key", ["anna"], now=0.0)
    holders.found("key", [], now=1.0)
    assert holders.next("key", now=1.0) is None


def test_a_holder_that_has_nothing_left_is_not_asked_again() -> None:
    holders: Holders[str] = Holders()
    holders.found("key", ["anna", "boris"], now=0.0)
    holders.lost("key", "anna")
    holders.lost("key", "nobody")
    holders.lost("other key", "boris")
    assert [holders.next("key", now=1.0) for _ in range(2)] == ["boris", "boris"]
    holders.lost("key", "boris")
    assert holders.next("key", now=1.0) is None


def test_a_search_is_due_again_after_a_while() -> None:
    holders: Holders[str] = Holders()
    holders.found("key", ["anna"], now=0.0)
    assert holders.next("key", now=KNOWN_FOR_S - 0.1) == "anna"
    assert holders.next("key", now=KNOWN_FOR_S) is None


def test_all_that_a_search_found_are_known_until_it_is_due_again() -> None:
    holders: Holders[str] = Holders()
    assert holders.all("key", now=0.0) == ()
    holders.found("key", ["boris", "anna"], now=0.0)
    assert holders.all("key", now=KNOWN_FOR_S - 0.1) == ("boris", "anna")
    assert holders.all("key", now=KNOWN_FOR_S) == ()


def test_the_keys_remembered_are_bounded_and_the_oldest_makes_room() -> None:
    holders: Holders[int] = Holders()
    for number in range(KEYS_MAX + 1):
        holders.found(str(number), [number], now=0.0)
    assert holders.next("0", now=0.0) is None
    assert holders.next("1", now=0.0) == 1
    assert holders.next(str(KEYS_MAX), now=0.0) == KEYS_MAX
