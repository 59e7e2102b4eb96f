"""Settings after the owner's amendments."""

from __future__ import annotations

from datetime import UTC, datetime

from dht.membership.orders import NONE, Amendment, Attested, End, Orders, Value, amended
from peer.rules.amendments import AMENDABLE, effective, objection, past, spent
from peer.run_file.sections import RunFile

RUN = RunFile()


def changing(version: int = 30, **settings: Value) -> Orders:
    named = {name.replace("__", "."): value for name, value in settings.items()}
    return Orders(amendments=amended(NONE, version, named))


def test_a_setting_changes_from_its_version_on_and_no_other_does() -> None:
    orders = changing(inner__learning_rate=5e-4, outer__steps_per_cycle=12)
    assert effective(RUN, orders, 29) is RUN
    after = effective(RUN, orders, 30)
    assert (after.inner.learning_rate, after.outer.steps_per_cycle) == (5e-4, 12)
    assert after.outer.codec == RUN.outer.codec
    assert after.end == RUN.end
    assert effective(RUN, NONE, 10**6) is RUN


def test_every_amendable_setting_exists_and_may_change() -> None:
    values: dict[str, Value] = {
        "end.date": "2030-01-01T00:00:00Z",
        "end.tokens": 5_000_000,
        "inner.learning_rate": 0.1,
        "limits.step_tokens_max": 10_000,
        "outer.codec": "int8",
        "outer.codec_down": "int8",
        "outer.codec_up": "int8",
        "outer.steps_per_cycle": 7,
    }
    assert values.keys() == set(AMENDABLE)
    for name, value in values.items():
        orders = Orders(amendments=amended(NONE, 1, {name: value}))
        assert objection(RUN, orders) is None, name
        assert effective(RUN, orders, 1) != RUN


def test_a_date_or_budget_that_is_over_already_is_told_from_one_to_come() -> None:
    """A mistyped year ended a run, and no version of it comes back from its end."""
    now = datetime(2026, 11, 26, 12, tzinfo=UTC)

    def told(name: str, value: Value) -> str:
        return past({name: value}, now) or spent(RUN, {name: value}, 5_000_000) or ""

    assert told("end.date", "2026-11-26T12:00:00Z") == (
        "end.date is 2026-11-26T12:00:00Z, which is past"
    )
    assert told("end.tokens", 5_000_000) == (
        "end.tokens is 5000000, and 5000000 tokens are merged already"
    )
    assert not told("end.date", "2026-11-26T12:00:01Z")
    assert not told("end.tokens", 5_000_001)
    assert not told("end.tokens", "unlimited")
    assert not told("inner.learning_rate", 0.1)
    assert not told("end.date", "soon"), "the rule that it breaks is told instead"


def test_a_setting_that_is_not_in_the_list_or_breaks_a_rule_is_refused_with_the_reason() -> None:
    assert "outer.fragments cannot be amended" in (
        objection(RUN, changing(outer__fragments=3)) or ""
    )
    assert "learning_rate is -1.0" in (objection(RUN, changing(inner__learning_rate=-1.0)) or "")
    assert "learning_rate is 'fast'" in (
        objection(RUN, changing(inner__learning_rate="fast")) or ""
    )
    assert objection(RUN, changing(outer__codec="int8")) is None
    assert "codec" in (objection(RUN, changing(outer__codec="int5")) or "")
    assert "warmup_tokens" in (objection(RUN, changing(end__tokens=10)) or "")


def test_an_end_at_a_moment_is_the_runs_date() -> None:
    orders = Orders(end=End(at=1_800_000_000))
    assert objection(RUN, orders) is None
    assert effective(RUN, orders, 0).end.date == datetime.fromtimestamp(1_800_000_000, UTC)
    assert effective(RUN, Orders(end=End(version=9)), 0) is RUN


def test_orders_about_more_fragments_than_the_run_has_are_refused() -> None:
    orders = Orders(attested=(Attested(1, bytes(32), bytes(32)),) * 9)
    assert "at most 8 fragments" in (objection(RUN, orders) or "")
    assert objection(RUN, Orders(attested=orders.attested[:8])) is None


def test_an_amendment_of_a_later_version_is_checked_with_those_before_it() -> None:
    orders = Orders(
        amendments=(
            Amendment(10, (("end.tokens", 2_000_000),)),
            Amendment(20, (("end.tokens", 1),)),
        )
    )
    assert "warmup_tokens" in (objection(RUN, orders) or "")
