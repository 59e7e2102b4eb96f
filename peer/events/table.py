"""The table of events: every name that is emitted, its sentence, and who gets it.

An event is emitted as a literal name with fields: by the machine of a round (``Note``), the
averager, presence (``PresenceEvent``), the station, the agent, and the training process. A
sentence leaves out its subject, which is the peer that the event happened to.
``tests/peer/events/test_table.py`` compares this table with the source in both directions;
``python -m docs.site.reference`` writes the documentation, with the fields that the source gives
each event.

To add an event, emit it and add a row. Names and the meaning of fields never change, because
logs of earlier versions are read, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Flag, auto

from peer.events import sentences
from peer.events.names import Names
from peer.events.sentences import Fields, Sentence, worded

OPENED = "log"
"""The event that every file of an event log begins with."""

COMMON = ("at", "event")
"""Fields of every line of an event log: a Unix time, and the name."""


class Audience(Flag):
    """The destinations of an event."""

    LOG = auto()
    """Appended to ``events.jsonl``."""
    RUN = auto()
    """Passed to the handlers of ``run.on``, and a line of ``--json``."""
    SCREEN = auto()
    """Like ``RUN``, and its sentence is shown by ``shoal join`` and ``shoal keep``."""
    ROUND = auto()
    """``shoal explain --round``."""
    PEER = auto()
    """``shoal explain --peer`` for the peer it happened to, and the list of events of its page."""
    NAMED = auto()
    """``shoal explain --peer`` for the peer in the field ``peer``."""
    TROUBLE = auto()
    """Counted in the summary of ``shoal explain``."""
    METRICS = auto()
    """Figures and curves of the page are taken from it."""
    LAB = auto()
    """Records of ``shoal simulate``."""


COURSE = Audience.LOG | Audience.ROUND
"""An ordinary step of a round."""
ROUND = COURSE | Audience.PEER
"""Any event of a fragment."""
PEER = Audience.LOG | Audience.PEER
"""Any event of the peer as a whole."""
SHOWN = PEER | Audience.SCREEN
PROBLEM = SHOWN | Audience.TROUBLE

REPORTED = Audience.RUN | Audience.SCREEN
"""Passed on by the agent to the training process."""


@dataclass(frozen=True, slots=True)
class Event:
    """One row: an event by its name."""

    name: str
    sentence: Sentence | None
    """``None``: its own text, or else its name and fields, says it all."""
    audience: Audience
    on_screen: Sentence | None = None
    """Sentence of the screen, where it differs."""
    offer: Sentence | None = None
    """Result of this peer's own offer, for the line about it on the screen."""


def _rows(
    audience: Audience, sentences: Mapping[str, Sentence], without: str = ""
) -> Iterator[Event]:
    """Rows with one audience; ``without``: names of those that have no sentence."""
    for name, sentence in {**dict.fromkeys(without.split()), **sentences}.items():
        yield Event(name, sentence, audience)


_ROWS = (
    *_rows(
        COURSE,
        {},
        "gathering joining came_when_called told_closed redirected handed_over closed "
        "entered sealed learned_seal applying finished caught_up",
    ),
    *_rows(
        Audience.LOG,
        {
            OPENED: "opened the event log",
            "checkpoint": "saved a checkpoint in {path}",
        },
        "idle redirect told_behind heard_finished",
    ),
    *_rows(
        ROUND,
        {
            "found": "called peers that came into sight: {peers}",
            "withdrawn": "{peer} withdrew its join",
            "strange_join": "refused the join of {peer}: {reason}",
            "unproven_join": (
                "refused the join of {peer}: too few have signed its version {version}"
            ),
            "asks_for_signatures": (
                "asks {peers} members of its last round to sign the version that they made"
            ),
            "implausible": "did not believe {peer}: {reason}",
            "turned_away": "{by} refused its join: {reason}",
            "next_leader": "turned to {leader}, the next leader in rank",
            "changed_leader": "turned to {to}, which leads instead",
            "declined": "declined the commit of {leader}: {reason}",
            "upload_outlying": "left slice {slice} of {peer} out: {reason}",
            "withheld": "waited in vain for {peer}: {reason}",
            "overstated": "does not believe {peer}, which leads: {reason}",
            "took_slice": "reduces slice {slice} in the place of a reducer that is gone",
            "follows": "follows the leader of ballot {ballot}",
            "ballot_started": "started ballot {ballot}",
            "ballot_gathers": "leads ballot {ballot}; no seal was accepted before",
            "ballot_continues_seal": (
                "leads ballot {ballot} and proposes the seal that was accepted before"
            ),
            "outbid": "ended ballot {ballot}: ballot {promised} was promised",
            "false_vote": "did not count a vote of {peer}: its signature is not of this seal",
            "false_promise": "did not count a promise of {peer}: it has not signed it",
            "forswearing": "asks the members to forswear the round: merged slices lost: {slices}",
            "forsworn_void": "ended the round: a majority forswore it",
            "no_majority_left": "ended the round: {reason}",
            "sealed_void": "sealed the round as void: {reason}",
            "skipped": "skipped fragment {fragment}: rounds under way: {in_flight}",
            "line_needs": "its line needs {level}: {reason}",
            "level": "merges fragment {fragment} with {level} from now on; it was {before}",
            "takes_part": "takes part in one version of {every}: {reason}",
            "stale": "its work began {versions} versions ago, which is too long",
            "closed_ranks": (
                "version {version} has used the run's tokens; the last rounds include all peers"
            ),
            "folded": "alone: version {version} of fragment {fragment} is its own work",
            "lacks_version": (
                "makes no version alone: it lacks version {version} of fragment {fragment}"
            ),
            "behind": "is behind: {source} has version {version} of fragment {fragment}",
            "rebase": (
                "takes the state of {source}: {theirs} tokens merged there since the two parted, "
                "{mine} here"
            ),
            "melded": "averaged the members' states, {dispersion:.3g} apart",
            "regained": "offers {tokens} tokens again, which the state that it took lacks",
            "in_doubt": "does not know yet whether its work was merged: {reason}",
            "settled": "its work was not merged: {reason}",
            "presumed": "counts its work as merged: {reason}",
            "doubt_told": "a newer state shows whether its work is merged: {merged}",
            "bits_differ": "a minority differs in fragment {fragment}: {peers}",
            "gave_way": "took the majority's state of fragment {fragment}",
            "give_way_failed": (
                "could not take the majority's state of fragment {fragment}: {reason}"
            ),
        },
    ),
    *_rows(
        ROUND | Audience.TROUBLE,
        {
            "no_quorum": "gave the round up: {reason}",
            "leader_silent": "the leader {leader} does not answer",
            "passed_over": "passed the leader {leader} over: {reason}",
            "too_late": "joined too late: {leader} had closed the roster",
            "upload_failed": "could not send slice {slice} to {to}: {reason}",
            "not_taken": "{by} did not take its slice {slice}: {reason}",
            "reassigned": "gave slice {slice} to {to}: {reason}",
            "took_over": "leads the round in the place of a leader that is gone",
            "ballot_without_majority": "ended ballot {ballot}: {promises} promises are no majority",
            "gave_up": "gave up: {reason}",
            "void": "the round ended without a version: {reason}",
            "fetch_waits": "waits for a peer that can send it a first state: {reason}",
            "replay_failed": "could not replay merges of fragment {fragment}: {reason}",
            "written_off": "wrote {tokens} tokens off: {reason}",
        },
    ),
    *_rows(
        ROUND | Audience.SCREEN | Audience.TROUBLE,
        {
            "catch_up_failed": "could not catch up with fragment {fragment}: {reason}",
            "fetch_failed": "{reason}; trying again",
            "discarded": "discarded its work: {reason}",
            "not_finite": "kept its work out: it has values that are not finite ({reason})",
            "stays_apart": (
                "stays apart from the side of {peer}, with {theirs} tokens since the two parted "
                "and {mine} here: too few peers that count here have signed its version of "
                "fragment "
                "{fragment}"
            ),
            "work_lost": sentences.work_lost,
        },
    ),
    *_rows(
        PROBLEM | Audience.NAMED,
        {
            "convicted": "banned {peer} for good: it is proved that it {reason}",
            "spot_check_failed": (
                "a contribution of {peer} did not lower the loss on that peer's own data: from "
                "{before:.4g} to {after:.4g} (strikes: {strikes:.1f}; with 3 its uploads are "
                "refused here)"
            ),
            "proof_not_kept": (
                "could not write the proof against {peer}, which is banned until a restart: "
                "{reason}"
            ),
            "peer_lost": sentences.peer_lost,
        },
    ),
    *_rows(
        ROUND | Audience.NAMED,
        {
            "audit_refused": (
                "could not audit a merge, because of {peer}: {reason} (strikes: {strikes:.1f})"
            ),
            "struck": "counts this against {peer}: {reason} (strikes: {strikes:.1f})",
        },
    ),
    *_rows(
        PEER | Audience.NAMED,
        {
            "spot_check_passed": (
                "checked a contribution of {peer}: it changes the loss on that peer's own data "
                "from {before:.4g} to {after:.4g}"
            ),
            "spot_check_evaded": (
                "could not check a contribution of {peer}: {reason} (strikes: {strikes:.1f})"
            ),
            "proof_refused": "refused a proof that {peer} named: {reason}",
            "link_lost": "lost the connection to {peer}: {reason}",
        },
    ),
    *_rows(
        ROUND | Audience.SCREEN,
        {
            "alone": "nobody else trains here now; training goes on alone",
            "state_adopted": sentences.state_adopted,
            "kept": (
                "kept what its trainer has of version {version} of fragment {fragment}, "
                "which nobody else has"
            ),
        },
    ),
    *_rows(
        ROUND | Audience.TROUBLE | Audience.NAMED,
        {
            "refused": "refused {peer} ({kind}): {reason}",
            "upload_refused": "refused slice {slice} of {peer}: {reason}",
            "not_proposed": "left the contribution of {peer} out of a round that it led: {reason}",
            "declined_by": "{peer} declined the commit: {reason}",
        },
    ),
    *_rows(
        ROUND | Audience.SCREEN | Audience.TROUBLE | Audience.NAMED,
        {
            "not_a_commit": (
                "could not read a commit of {peer}, so its rounds come to nothing here: {reason}"
            ),
        },
    ),
    *_rows(
        ROUND | Audience.RUN,
        {
            "state_fetched": "downloaded fragment {fragment} at version {version}",
        },
    ),
    *_rows(
        Audience.RUN,
        {
            "adopted": "trains on from version {version} of fragment {fragment}",
            "progress": "step {steps}, loss {loss}",
            "done": "ended at step {steps}, loss {loss}",
        },
    ),
    *_rows(
        SHOWN | Audience.NAMED,
        {
            "peer_joined": sentences.peer_joined,
            "peer_left": sentences.peer_left,
        },
    ),
    *_rows(
        PEER,
        {
            "jump_measured": (
                "took versions {versions} of fragments {fragments} from others: {reason}"
            ),
        },
        "other_run",
    ),
    *_rows(
        PEER | Audience.RUN,
        {
            "agent_started": "started",
            "agent_ended": "ended: {reason}",
            "codecs_compiled": "uses compiled codecs, ready after {took_s:.1f} s",
            "founded": "founded the run",
            "ended_here": "stays and serves the run's final state: {reason}",
            "last_round": "makes the last rounds with {peers} other peers",
        },
        "connected",
    ),
    *_rows(
        SHOWN,
        {
            "rolled_back": (
                "went back to versions {versions}, as directive {number} of the run's owner says"
            ),
            "frozen_differs": (
                "{name} trains with other frozen parameters than this peer: {parameters}"
            ),
            "same_batches": (
                "trains on the same batches as {name} ({how}), so that the work of one adds "
                "nothing to that of the other: call run.seed(SEED) before the loop, take batches "
                "from run.data(dataset), or give the Trainer another seed at each peer"
            ),
            "resumed": sentences.resumed,
            "trainer_steps_again": "makes steps again",
            "handing_over": sentences.handing_over,
            "last_offers": sentences.last_offers,
            "drain_cut_short": "left with rounds under way: {in_flight}",
            "exported": "wrote {path}, model {model}",
            "export_failed": "could not write the model: {text}",
            "published": "published {path}: {tokens} tokens, model {model}",
            "publish_failed": "could not publish the model: {text}",
            "pushed": "uploaded the model: {url}",
            "codecs_not_compiled": "uses the slower codecs, which are as exact: {reason}",
            "compiled": "trains with compiled code, which took {seconds:.0f} s",
            "compile_failed": "trains without compiling: {reason}",
            "way_found": "goes on with {text}: the fastest way found on this machine",
            "micro_batch_reduced": "ran out of memory and goes on with {text}",
            "not_measured": (
                "leaves the held-out loss to other peers: not even one sequence fits into the "
                "memory that training leaves; training goes on"
            ),
            "port_taken": (
                "another program uses port {port}, where this peer listened before: "
                "links from before no longer lead to it, `shoal status` prints the new one"
            ),
            "left_apart": (
                "the run ended with several models; this peer's is {model}, others differ: {text}"
            ),
        },
        "hello_refused identity_in_use directive invite_ends not_admitted "
        "cache_unreadable cache_unwritable state_place page_not_served loop_mistake",
    ),
    *_rows(
        PROBLEM,
        {
            "jump_refused": (
                "went back to versions {back_to} of fragments {fragments}, from versions "
                "{versions} that it had taken from others: {reason}"
            ),
            "jump_allowed": "goes on with versions {versions} of fragments {fragments}: {reason}",
            "paused": "resting: {reason}; no work is lost",
            "trainer_rests": "makes no steps now; other peers do not wait for it",
            "given_up": sentences.given_up,
            "checkpoint_failed": "could not save a checkpoint: {text}",
            "state_in_memory": "the run's state has to be in memory: {reason}",
        },
        "nobody_answered nobody_reduces clock_off disk_full",
    ),
    *_rows(
        Audience.SCREEN,
        {
            "link": sentences.link_on_screen,
            "page": sentences.page,
            "joins_here": (
                "joins the peer of this run that runs on this machine already, in {directory}"
            ),
            "run_page": sentences.run_page,
            "over": "{reason}",
            "agent_died": (
                "the agent ended with code {exit_code}; a new one starts in {restart_in_s:.1f} s, "
                "training goes on"
            ),
            "compiling": "compiles the model for this device while it trains",
            "compiler_awaited": "waits for the compiler, which cannot be interrupted: {text}",
            "logits_at_once": (
                "computes all logits of a micro-batch at once: this model has more than a head "
                "after its hidden states"
            ),
            "optimizer_restored": (
                "restored the optimizer as it was at step {step} of its last start; "
                "steps are counted anew"
            ),
            "optimizer_not_restored": "the optimizer starts afresh: {reason}",
        },
        "link_limited",
    ),
    *_rows(
        Audience.LAB,
        {
            "start": "{peer} started",
            "crash": "crashed",
            "leave": "left in order",
            "return": "{peer} returned after a crash",
            "pause": "{peers} peers were paused",
            "partition": "{peers} peers were cut off from the others",
            "heal": "the partition ended",
            "join": "{peers} peers joined",
            "order": "{peers} peers heard an order of the run's owner",
        },
    ),
    Event(
        "diverged",
        (
            "has other bits of fragment {fragment} than a majority ({majority}), and takes theirs: "
            "the memory, the disk or the processor of its machine may be faulty"
        ),
        ROUND | Audience.SCREEN | Audience.TROUBLE,
        on_screen="other bits of fragment {fragment} than most peers have: the memory, the disk "
        "or the processor of this machine may be faulty; taking theirs",
    ),
    Event(
        "founded_apart",
        "the run was founded twice: the history of {peer} has other first weights",
        ROUND | Audience.SCREEN | Audience.TROUBLE | Audience.NAMED,
        on_screen="the run was founded twice: the history of {name} has other first weights "
        "({theirs} tokens there, {mine} here); the two are not averaged, and the one with more "
        "tokens goes on",
    ),
    Event(
        "went_over",
        "went over to the history of {peer}, which was founded apart",
        PROBLEM | Audience.NAMED,
        on_screen="went over to the history of {name}, which was founded apart and has {theirs} "
        "tokens; the own one, with {tokens} tokens, is given up (discarded: apart)",
    ),
    Event(
        "round",
        sentences.round_in_story,
        ROUND | Audience.SCREEN | Audience.METRICS | Audience.LAB,
        on_screen=sentences.round_on_screen,
        offer=sentences.offer_in_round,
    ),
    Event(
        "round_missed",
        "fragment {fragment}: round missed, work kept ({reason})",
        Audience.SCREEN,
        offer="fragment {fragment} not merged: {reason}; kept for the next round",
    ),
    Event(
        "not_merged",
        "fragment {fragment} not merged: {reason}",
        Audience.RUN,
        offer="fragment {fragment} not merged: {reason}; kept for the next round",
    ),
    Event("reachability", "{text}", SHOWN, on_screen=sentences.reachability),
    Event("phase", "{name}: {text}", SHOWN, on_screen=sentences.phase_on_screen),
    Event(
        "measured", sentences.measured_by, SHOWN | Audience.METRICS, on_screen=sentences.measured
    ),
)

TABLE: Mapping[str, Event] = {row.name: row for row in _ROWS}

_WARNINGS = """
agent_died cache_unreadable cache_unwritable catch_up_failed checkpoint_failed clock_off
codecs_not_compiled compile_failed convicted discarded disk_full diverged drain_cut_short
export_failed founded_apart frozen_differs given_up hello_refused identity_in_use invite_ends
jump_allowed jump_refused left_apart link_limited loop_mistake nobody_reduces not_a_commit
not_admitted not_finite not_measured optimizer_not_restored page_not_served port_taken
proof_not_kept publish_failed same_batches spot_check_failed state_in_memory stays_apart
trainer_rests went_over work_lost
"""

EXPLAINED = frozenset(_WARNINGS.split())
"""Warnings: somebody may have to act. The screen names their section of the documents, which has
the name of the event with hyphens."""


def audience_of(name: str) -> Audience:
    """The audience of an event; events of other versions are part of every story."""
    return TABLE[name].audience if name in TABLE else ROUND | Audience.SCREEN


def in_story(event: Fields, names: Names) -> str:
    """The sentence of an event, with peers by name; the fields of an unknown event."""
    row = TABLE.get(event["event"])
    text = None if row is None else worded(row.sentence, event)
    return names.within(_as_it_is(event) if text is None else text)


def on_screen(event: Fields) -> str | None:
    """The sentence on the screen of a peer's own part; ``None`` for what only programs get."""
    row = TABLE.get(event["event"])
    if row is None:
        return _as_it_is(event)
    if not row.audience & Audience.SCREEN:
        return None
    text = worded(row.on_screen or row.sentence, event)
    if text is None:
        text = _as_it_is(event)
    section = row.name.replace("_", "-")
    return f"{text} (shoal docs {section})" if row.name in EXPLAINED else text


def own_offer(event: Fields) -> str | None:
    """The result of this peer's own offer, with the reason; ``None`` for other events."""
    row = TABLE.get(event["event"])
    return None if row is None or row.offer is None else worded(row.offer, event)


def _as_it_is(event: Fields) -> str:
    """An event without a sentence, or of another version: its ``text``, or its name and fields."""
    if isinstance(event.get("text"), str):
        return str(event["text"])
    fields = [f"{key} {value}" for key, value in event.items() if key not in {*COMMON, "run"}]
    return ", ".join([event["event"].replace("_", " "), *fields])
