"""Fetching a run file in a process of its own."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from multiaddr import Multiaddr

from dht.identity import Identity, PeerId
from dht.presence.intake import Misfit
from peer.errors import RunNotFound
from peer.joining import fetch
from peer.joining.link import ask_peers, parse_link
from tests.processes import Processes, descendants, described, still_running

RUN = "ab" * 32
PEER = Identity.from_seed(bytes(32)).peer_id
ASK = """
import sys
from peer.joining.link import ask_peers
from peer.joining.link import parse_link
ask_peers(parse_link(sys.argv[1]))
"""


def test_a_link_without_seeds_is_refused() -> None:
    with pytest.raises(RunNotFound, match="no seed"):
        ask_peers(parse_link(f"shoal://{RUN}"))


def test_an_invalid_link_is_an_error_of_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert fetch.main(["shoal://"]) == 3
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert fetch.main([]) == 2


def modules_imported_by(module: str) -> set[str]:
    script = f"import sys, {module}; print(*sorted(sys.modules))"
    shown = subprocess.run(
        [sys.executable, "-P", "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    return set(shown.stdout.split())


def test_fetching_imports_neither_the_agent_nor_torch() -> None:
    modules = modules_imported_by("peer.joining.fetch")
    assert "dht.libp2p.hivemind_host" in modules
    assert not modules & {"torch", "peer.agent", "averaging", "aiohttp", "rich"}


def test_asking_from_a_trainer_imports_no_network() -> None:
    """Every trainer imports this, and its network is in another process."""
    modules = modules_imported_by("peer.joining.link")
    assert not modules & {"hivemind", "dht.libp2p.lane.lane", "dht.presence", "uvloop"}


def test_the_fetching_process_ends_when_its_parent_is_killed(
    processes: Processes,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes calls, and never says a word
        port = silent.getsockname()[1]
        peer = Identity.generate().peer_id
        link = f"shoal://{RUN}?seed=/ip4/127.0.0.1/tcp/{port}/p2p/{peer}"
        asking = processes.python("-c", ASK, link)
        deadline = time.monotonic() + 60
        while len(descendants(asking.pid)) < 2:  # the fetching process, and its daemon
            assert asking.poll() is None, processes.output_of(asking)
            assert time.monotonic() < deadline
            time.sleep(0.05)
        children = processes.kill_hard(asking)
        left = still_running(children, timeout_s=20.0)
        assert not left, described(left)


def test_seeds_that_are_all_in_another_run_are_not_waited_for() -> None:
    seeds = [Identity.generate().peer_id for _ in range(2)]
    text = "&".join(f"seed=/ip4/127.0.0.1/tcp/1/p2p/{peer}" for peer in seeds)
    link = parse_link(f"shoal://{RUN}?{text}")
    other = Misfit("run", RUN, "cd" * 32)
    stranger = Identity.generate().peer_id

    def check(
        misfits: dict[PeerId, Misfit], hosts: tuple[Multiaddr, ...] = (), waited_s: float = 60.0
    ) -> None:
        met = SimpleNamespace(misfits=misfits, bootstrap_seeds=hosts)
        fetch.check_seeds_run(link, met, waited_s=waited_s)  # type: ignore[arg-type]

    check({})
    check({seeds[0]: other, stranger: other})
    both = dict.fromkeys(seeds, other)
    check(both, waited_s=3.9)
    check({}, link.seeds)  # bootstrap peers alone are no proof: a member may still come
    for misfits, hosts in ((both, ()), ({seeds[0]: other}, link.seeds[1:])):
        with pytest.raises(RunNotFound, match=r"cdcdcdcdcdcdcdcd.*link was copied"):
            check(misfits, hosts, waited_s=4.0)


def test_who_waits_for_a_run_file_is_told_why_from_the_third_second_on() -> None:
    """A link to a peer that is gone was 71 s of silence."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    link = parse_link(f"shoal://{RUN}?seed=/ip4/127.0.0.1/tcp/{port}/p2p/{PEER}")
    told: list[str] = []

    class Enough(Exception):
        pass

    def tell(reason: str) -> None:
        told.append(reason)
        raise Enough

    with pytest.raises(Enough):
        ask_peers(link, tell)
    (reason,) = told
    assert "no bootstrap address answered" in reason and "connection refused" in reason


def test_several_bootstrap_hosts_and_a_peer_of_another_run_are_each_told() -> None:
    seeds = [Identity.generate().peer_id for _ in range(3)]
    text = "&".join(f"seed=/ip4/127.0.0.1/tcp/1/p2p/{peer}" for peer in seeds)
    link = parse_link(f"shoal://{RUN}?{text}")
    misfits = {seeds[0]: Misfit("run", RUN, "cd" * 32)}

    def said(live: tuple[str, ...], hosts: tuple[Multiaddr, ...] = link.seeds[1:]) -> str:
        table = SimpleNamespace(live=lambda now: live)
        met = SimpleNamespace(misfits=misfits, bootstrap_seeds=hosts, table=table)
        return fetch.who_answered(link, met, now=0.0)  # type: ignore[arg-type]

    assert said(()) == (
        f"{seeds[0]} takes part in another run, cdcdcdcdcdcdcdcd...; 2 bootstrap hosts answered, "
        "no peer of this run is known to them; check the run id in the link"
    )
    assert said((), ()) == f"{seeds[0]} takes part in another run, cdcdcdcdcdcdcdcd..."
    assert said(("a member",)) == ""  # the run file may still come from it
