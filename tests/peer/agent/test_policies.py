"""Settings of averaging that follow from a run file."""

from __future__ import annotations

import pytest

from averaging.numbers.layout import Kind
from averaging.rules.due import DueTime
from averaging.rules.mixing import MixingPolicy
from averaging.rules.policy import ProbationPolicy
from peer.agent.policies import fixes_its_data, round_policy
from peer.run_file.merging import Outer
from peer.run_file.reading import parse
from peer.run_file.sections import RunFile
from tests.dht.membership.signers import OWNER as OWNER_KEY

OWNER = OWNER_KEY.peer_id


@pytest.mark.parametrize(("overlap_steps", "comes"), [(0, True), (2, False)])
def test_a_synchronous_peer_comes_whenever_it_is_called(overlap_steps: int, comes: bool) -> None:
    # Two that waited at two fragments, each with little work in the other's, waited for ever.
    run = RunFile(outer=Outer(steps_per_cycle=24, overlap_steps=overlap_steps))
    due = DueTime(round_policy(run, fragments=8).due, fragment=0, step=100)
    assert due.answers_call(101, 24) is comes
    assert due.answers_call(112, 24) is True
    assert due.answers_call(100, 24) is False


@pytest.mark.parametrize(
    ("settings", "rate"),
    [
        ("", 0.1),
        ("[policy]\nadmission = 'listed'\npeers = ['OWNER']", 0.01),
        ("[policy]\nadmission = 'listed'\npeers = ['OWNER']\naudit_rate = 0.2", 0.2),
        ("[policy]\naudit_rate = 0", 0.0),
    ],
)
def test_runs_whose_peers_are_let_in_audit_a_tenth_of_what_open_runs_do(
    settings: str, rate: float
) -> None:
    run = parse(settings.replace("OWNER", str(OWNER)))
    assert round_policy(run, fragments=8).audit_rate == rate


def test_a_swarm_of_several_groups_mixes_at_every_version_unless_the_run_says_otherwise() -> None:
    assert round_policy(RunFile(), fragments=8).mixing == MixingPolicy()

    smaller = parse("[mixing]\ntheta = 'f16'\nmomentum = 'int8'")
    mixing = round_policy(smaller, fragments=8).mixing
    assert mixing.codec("int4", mu=0.5) == "int4/f16/int8"
    assert mixing.codec("int4", mu=0.0) == "int4/f16"


def test_newcomers_are_on_probation_in_open_runs_alone() -> None:
    opened = parse("[policy]\nprobation_rounds = 8\nprobation_minutes = 2")
    assert round_policy(opened, fragments=8).probation == ProbationPolicy(rounds=8, seconds=120.0)
    assert round_policy(RunFile(), fragments=8).probation.rounds > 0

    listed = parse(f"[policy]\nadmission = 'listed'\npeers = ['{OWNER}']\nprobation_rounds = 8")
    assert round_policy(listed, fragments=8).probation == ProbationPolicy()


def test_each_way_has_its_codec_and_statistics_are_exact_both_ways() -> None:
    policy = round_policy(parse("[outer]\ncodec_up = 'int2'"), fragments=8)
    assert (policy.codecs, policy.feedback) == (("int2", "int4"), {"int2"})
    assert policy.feeds_back_merged
    muon = parse("[outer]\ncodec_up = 'int2'\n[inner]\noptimizer = 'muon'")
    assert not round_policy(muon, fragments=8).feeds_back_merged

    exact = policy.of_statistics()
    assert (exact.codecs, exact.feedback) == (("f32", "f32"), frozenset())


def test_a_run_says_how_long_late_work_is() -> None:
    assert round_policy(RunFile(), fragments=8).late_work == "whole"
    shortened = round_policy(parse("[outer]\nlate_work = 'per_cycle'"), fragments=8)
    assert shortened.late_work == "per_cycle"


def test_fragments_of_embeddings_and_head_alone_may_have_their_own_codecs() -> None:
    text = "[outer]\nsmaller_codecs = ['int2']\nsteps_per_cycle_max = 30\n"
    policy = round_policy(parse(f"{text}embedding_codecs = 'int8/int4'"), fragments=8)
    alone: tuple[set[Kind], ...] = ({"embedding"}, {"head"}, {"embedding", "head"})
    for kinds in alone:
        apart = policy.of_kinds(kinds)
        assert apart.codecs == ("int8", "int4")
        assert {(each.codec, each.codec_down) for each in apart.levels} == {("int8", "int4")}
        assert [each.cycle_steps for each in apart.levels] == [
            each.cycle_steps for each in policy.levels
        ]
    assert policy.of_kinds({"embedding", "vector"}) is policy
    assert policy.of_kinds({"matrix"}) is policy
    assert policy.of_kinds({"statistic"}).codecs == ("f32", "f32")

    same = round_policy(parse(text), fragments=8)
    assert same.of_kinds({"embedding"}) is same


HASHED = f"#sha256={'0' * 64}"


@pytest.mark.parametrize(
    ("data", "fixed"),
    [
        ("recipe = 'python_stdlib'", False),
        ("recipe = 'text'\nfiles = ['a.txt']", False),
        (f"recipe = 'files'\n[[data.sources]]\nfiles = ['a.txt{HASHED}']", True),
        ("recipe = 'files'\n[[data.sources]]\nfiles = ['a.txt']", False),
        (
            f"recipe = 'files'\n[[data.sources]]\nfiles = ['a.txt{HASHED}']\n"
            "[[data.sources]]\nfiles = ['b.txt']",
            False,
        ),
        (f"recipe = 'hf'\ndataset = 'a/b'\nrevision = '{'0' * 40}'", True),
    ],
)
def test_some_recipes_fix_every_byte_that_learners_read(data: str, fixed: bool) -> None:
    """No learner is blamed for reading something else where two machines may."""
    assert fixes_its_data(parse(f"[data]\n{data}")) is fixed


def test_spot_checks_are_off_unless_the_run_asks_for_them() -> None:
    assert round_policy(RunFile(), fragments=8).spot_checks == 0.0
    asked = parse("[policy]\nspot_checks = 1.5")
    assert round_policy(asked, fragments=8).spot_checks == 1.5
