"""Required link speeds: against the reported figures, and against each other."""

from dataclasses import replace

import pytest

from peer.simulate.paper.bandwidth import (
    METHODS,
    Method,
    Setting,
    gbit_s,
    largest_model,
    what_helps,
)


def test_the_reported_fall_from_198_to_0_84_comes_out() -> None:
    assert gbit_s("data parallel", Setting()) == pytest.approx(198, rel=0.02)
    assert gbit_s("decoupled", Setting()) == pytest.approx(0.84, rel=0.01)


def test_a_link_of_exactly_the_needed_speed_trains_exactly_that_model() -> None:
    for method in METHODS:
        need = gbit_s(method, Setting())
        assert largest_model(method, Setting(), link_gbit_s=need) == pytest.approx(5e9)


def test_what_makes_a_link_enough_is_told_and_true() -> None:
    setting = Setting(parameters=1.2e9)
    told = what_helps(setting, link_gbit_s=0.02)
    assert told == (
        "-H 424 steps per cycle, or steps of 17.6 s with -H 24; int2/int4 in place of int4 needs "
        "75% of either; int2 in place of int4 needs 50% of either"
    )
    assert gbit_s("shoal", replace(setting, steps_per_cycle=424)) <= 0.02
    assert gbit_s("shoal", replace(setting, steps_per_cycle=423)) > 0.02


def test_fewer_bits_and_longer_cycles_need_less() -> None:
    for method in ("diloco", "streaming", "decoupled", "shoal"):
        assert gbit_s(method, Setting(codec="int4")) < gbit_s(method, Setting(codec="f16"))
        longer = Setting(steps_per_cycle=96, overlap_steps=2)
        assert gbit_s(method, longer) < gbit_s(method, Setting())


def test_a_codec_for_each_way_needs_the_mean_of_both_and_a_syncer_the_larger_one() -> None:
    def need(method: Method, codec: str) -> float:
        return gbit_s(method, Setting(codec=codec))

    for method in ("diloco", "streaming", "shoal"):
        both = (need(method, "int2") + need(method, "int4")) / 2
        assert need(method, "int2/int4") == pytest.approx(both)
    assert need("shoal", "int2/int4") == pytest.approx(0.75 * need("shoal", "int4"), rel=0.005)
    assert need("decoupled", "int2/int4") == need("decoupled", "int4")


def test_asynchronous_methods_need_the_same_link_at_any_utilisation() -> None:
    low, high = Setting(utilisation=0.5), Setting(utilisation=0.99)
    assert gbit_s("shoal", low) == gbit_s("shoal", high)
    assert gbit_s("diloco", low) < gbit_s("diloco", high)


@pytest.mark.parametrize("bad", [{"utilisation": 1.0}, {"codec": "zip"}, {"fragments": 0}])
def test_a_setting_out_of_range_is_refused_by_name(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        Setting(**bad)  # type: ignore[arg-type]
