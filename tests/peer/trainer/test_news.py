"""The trainer's record of its agent's messages."""

from __future__ import annotations

from peer.bridge.messages import Measure, Report
from peer.status import PeerStatus
from peer.trainer.news import News


def test_counters_never_run_backwards_when_an_agent_is_replaced_or_a_fork_given_up() -> None:
    news = News()

    def hear(rounds: int, tokens: int) -> tuple[int, int, int, int]:
        status = PeerStatus(rounds=rounds, bytes_sent=10 * rounds, global_tokens=tokens)
        news.hear(Report(status=status, scheduled_tokens=tokens + 5))
        report, status = news.report, news.report.status
        return status.rounds, status.bytes_sent, status.global_tokens, report.scheduled_tokens

    assert hear(7, 100) == (7, 70, 100, 105)
    assert hear(8, 60) == (8, 80, 100, 105)
    news.agent_died(-9, 0.5)
    assert hear(0, 0) == (8, 80, 100, 105)
    assert hear(3, 120) == (11, 110, 120, 125)
    news.agent_died(-9, 0.5)
    assert hear(1, 121) == (12, 120, 121, 126)


def test_a_question_of_the_gate_comes_first_and_replaces_no_other_request() -> None:
    news = News()
    for each in (Measure(1), Measure(0, gate=1), Measure(2), Measure(0, gate=2)):
        news.hear(each)
    assert [news.take_measure() for _ in range(3)] == [Measure(0, gate=2), Measure(2), None]


def test_tokens_fall_where_the_owner_of_the_run_takes_it_back() -> None:
    news = News()

    def hear(tokens: int, gone_back: int) -> int:
        news.hear(Report(scheduled_tokens=tokens, gone_back=gone_back))
        return news.report.scheduled_tokens

    assert hear(100, 0) == 100
    assert hear(40, 7) == 40
    assert hear(30, 7) == 40, "as on a lighter side of a fork"
    assert hear(50, 7) == 50
    assert hear(20, 9) == 20


def test_a_trainer_beside_keepers_only_is_alone() -> None:
    """Earlier, it was told that it exchanges nothing, and that its next merge was due, for ten
    minutes."""
    news = News()

    def hear(peers: int, *, others_train: bool) -> bool:
        news.hear(Report(status=PeerStatus(peers=peers), others_train=others_train))
        return news.is_alone

    assert news.is_alone
    assert hear(3, others_train=False)
    assert not hear(3, others_train=True)
    assert hear(1, others_train=True), "as an agent of an earlier release says"
