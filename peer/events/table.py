"""The table of events: every name that is emitted, its fields, its sentence, and who gets it.

An event is emitted as a literal name with fields: by the machine of a round (``Note``), the
averager, presence (``PresenceEvent``), the station, the agent, and the training process. A
sentence leaves out its subject, which is the peer that the event happened to.
``tests/peer/events/test_table.py`` compares this table with the source in both directions;
``python -m docs.site.reference`` writes the documentation.

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
from peer.status import FIGURES

OPENED = "log"
"""The event that every file of an event log begins with."""

COMMON = {"at": "Unix time", "event": "text"}
"""Fields of every line of an event log."""


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

TYPES: Mapping[str, str] = {
    field: kind
    for kind, fields in {
        "int": "addresses ballot bans contributors exit_code fragment from_version "
        "group in_flight live members number parted_at peers pid promised promises restarts "
        "missed missing port protocol rounds schema since slice slices step steps "
        "version with_me",
        "text": "codec codec_down how kind left_out link model name ours outcome phase reason role "
        "run run_name stage text theirs url",
        "s": "encoded_s lasts_s merged_s offset_s restart_in_s seconds silent_s "
        "time_s took_s waited_s",
        "bool": "contained contributed finished in_doubt merged mine reachable rebased stopped "
        "void",
        "peer id": "by leader peer signer source to",
        "bytes": "needed_bytes received_bytes received_line_bytes sent_bytes",
        "float": "dispersion loss",
        "path": "directory path",
        "0 to 1": "done weight",
        "tokens": "tokens",
        "hex": "lineage round",
        "ints": "versions",
        "floats": "weights",
    }.items()
    for field in fields.split()
}
"""Type or unit of a field, unless a row says otherwise after a colon."""


@dataclass(frozen=True, slots=True)
class Event:
    """One row: an event by its name."""

    name: str
    fields: Mapping[str, str]
    """Type or unit of every field that the event may have. Most emissions have a part of them."""
    sentence: Sentence | None
    """``None``: its name and fields say it all."""
    audience: Audience
    on_screen: Sentence | None = None
    """Sentence of the screen, where it differs."""
    offer: Sentence | None = None
    """Result of this peer's own offer, for the line about it on the screen."""


def _row(
    audience: Audience,
    name: str,
    fields: str,
    sentence: Sentence | None,
    *,
    on_screen: Sentence | None = None,
    offer: Sentence | None = None,
) -> Event:
    """``fields``: names, each with ``:type`` where that differs from ``TYPES``."""
    pairs = [each.partition(":") for each in fields.split(", ") if each]
    types = {field: kind or TYPES[field] for field, _, kind in pairs}
    return Event(name, types, sentence, audience, on_screen, offer)


def _rows(
    audience: Audience, common: str, rows: Mapping[str, tuple[str, Sentence]]
) -> Iterator[Event]:
    """Rows with one audience and some ``common`` fields."""
    for name, (fields, sentence) in rows.items():
        yield _row(audience, name, ", ".join(filter(None, (common, fields))), sentence)


def _plain(audience: Audience, rows: Mapping[str, str]) -> Iterator[Event]:
    """Rows of a fragment without a sentence: no screen shows these events, only their fields are in
    stories."""
    for name, fields in rows.items():
        yield _row(audience, name, f"fragment, {fields}", None)


_COURSE_OF_A_ROUND = _plain(
    COURSE,
    {
        "gathering": "group",
        "joining": "leader",
        "came_when_called": "leader",
        "told_closed": "peer",
        "redirected": "by, to",
        "handed_over": "to, waited_s",
        "closed": "members, live, kind, reason, waited_s, protocol",
        "entered": "members, slices, kind",
        "sealed": "ballot, contributors, reason",
        "learned_seal": "contributors, mine",
        "applying": "contributors, mine",
        "finished": "version, contained, kind, took_s",
        "caught_up": "version",
    },
)

_LOG_ONLY = _plain(
    Audience.LOG,
    {
        "idle": "reason",
        "redirect": "peer, to",
        "told_behind": "peer",
        "heard_finished": "peer",
    },
)

_REST_OF_A_ROUND = _rows(
    ROUND,
    "fragment",
    {
        "found": ("peers:peer ids", "called peers that came into sight: {peers}"),
        "withdrawn": ("peer", "{peer} withdrew its join"),
        "strange_join": ("peer, reason", "refused the join of {peer}: {reason}"),
        "unproven_join": (
            "peer, version",
            "refused the join of {peer}: too few have signed its version {version}",
        ),
        "asks_for_signatures": (
            "peers:int",
            "asks {peers} members of its last round to sign the version that they made",
        ),
        "implausible": ("peer, reason", "did not believe {peer}: {reason}"),
        "turned_away": ("by, reason", "{by} refused its join: {reason}"),
        "next_leader": ("leader", "turned to {leader}, the next leader in rank"),
        "changed_leader": ("to", "turned to {to}, which leads instead"),
        "declined": ("leader, reason", "declined the commit of {leader}: {reason}"),
        "upload_outlying": (
            "round, peer, slice, reason",
            "left slice {slice} of {peer} out: {reason}",
        ),
        "withheld": ("peer, reason", "waited in vain for {peer}: {reason}"),
        "overstated": ("peer, reason", "does not believe {peer}, which leads: {reason}"),
        "took_slice": ("slice", "reduces slice {slice} in the place of a reducer that is gone"),
        "follows": ("ballot", "follows the leader of ballot {ballot}"),
        "ballot_started": ("ballot", "started ballot {ballot}"),
        "ballot_gathers": ("ballot", "leads ballot {ballot}; no seal was accepted before"),
        "ballot_continues_seal": (
            "ballot, void",
            "leads ballot {ballot} and proposes the seal that was accepted before",
        ),
        "outbid": ("ballot, promised", "ended ballot {ballot}: ballot {promised} was promised"),
        "ballot_too_early": (
            "ballot",
            "ended ballot {ballot}: most voters still follow the leader before it",
        ),
        "false_vote": ("peer", "did not count a vote of {peer}: its signature is not of this seal"),
        "false_promise": ("peer", "did not count a promise of {peer}: it has not signed it"),
        "forswearing": (
            "ballot, slices",
            "asks the members to forswear the round: merged slices lost: {slices}",
        ),
        "forsworn_void": ("ballot", "ended the round: a majority forswore it"),
        "no_majority_left": ("ballot, reason", "ended the round: {reason}"),
        "sealed_void": ("ballot, contributors, reason", "sealed the round as void: {reason}"),
        "skipped": ("in_flight", "skipped fragment {fragment}: rounds under way: {in_flight}"),
        "line_needs": ("level:text, reason", "its line needs {level}: {reason}"),
        "level": (
            "before:text, level:text",
            "merges fragment {fragment} with {level} from now on; it was {before}",
        ),
        "takes_part": ("every:int, reason", "takes part in one version of {every}: {reason}"),
        "stale": ("versions:int", "its work began {versions} versions ago, which is too long"),
        "closed_ranks": (
            "version",
            "version {version} has used the run's tokens; the last rounds include all peers",
        ),
        "folded": ("version", "alone: version {version} of fragment {fragment} is its own work"),
        "lacks_version": (
            "version",
            "makes no version alone: it lacks version {version} of fragment {fragment}",
        ),
        "behind": (
            "source, version",
            "is behind: {source} has version {version} of fragment {fragment}",
        ),
        "rebase": (
            "source, mine:tokens, theirs:tokens",
            "takes the state of {source}: {theirs} tokens merged there since the two parted, "
            "{mine} here",
        ),
        "melded": ("dispersion", "averaged the members' states, {dispersion:.3g} apart"),
        "regained": ("tokens", "offers {tokens} tokens again, which the state that it took lacks"),
        "in_doubt": ("reason", "does not know yet whether its work was merged: {reason}"),
        "settled": ("reason", "its work was not merged: {reason}"),
        "presumed": ("reason", "counts its work as merged: {reason}"),
        "doubt_told": ("merged", "a newer state shows whether its work is merged: {merged}"),
        "bits_differ": (
            "peers:peer ids",
            "a minority differs in fragment {fragment}: {peers}",
        ),
        "gave_way": ("version", "took the majority's state of fragment {fragment}"),
        "give_way_failed": (
            "reason",
            "could not take the majority's state of fragment {fragment}: {reason}",
        ),
    },
)

_PROBLEMS_OF_A_ROUND = _rows(
    ROUND | Audience.TROUBLE,
    "fragment",
    {
        "no_quorum": ("reason", "gave the round up: {reason}"),
        "leader_silent": ("leader, phase", "the leader {leader} does not answer"),
        "passed_over": ("leader, reason", "passed the leader {leader} over: {reason}"),
        "too_late": ("leader", "joined too late: {leader} had closed the roster"),
        "upload_failed": ("slice, to, reason", "could not send slice {slice} to {to}: {reason}"),
        "not_taken": ("slice, by, reason", "{by} did not take its slice {slice}: {reason}"),
        "reassigned": ("slice, to, reason, phase", "gave slice {slice} to {to}: {reason}"),
        "took_over": ("ballot, stage", "leads the round in the place of a leader that is gone"),
        "ballot_without_majority": (
            "ballot, promises",
            "ended ballot {ballot}: {promises} promises are no majority",
        ),
        "gave_up": ("reason, in_doubt", "gave up: {reason}"),
        "void": ("reason", "the round ended without a version: {reason}"),
        "fetch_waits": ("reason", "waits for a peer that can send it a first state: {reason}"),
        "replay_failed": ("reason", "could not replay merges of fragment {fragment}: {reason}"),
        "written_off": ("tokens, reason", "wrote {tokens} tokens off: {reason}"),
    },
)

_SHOWN_PROBLEMS_OF_A_ROUND = _rows(
    ROUND | Audience.SCREEN | Audience.TROUBLE,
    "fragment",
    {
        "catch_up_failed": ("reason", "could not catch up with fragment {fragment}: {reason}"),
        "fetch_failed": ("reason", "{reason}; trying again"),
        "discarded": ("reason", "discarded its work: {reason}"),
        "not_finite": ("reason", "kept its work out: it has values that are not finite ({reason})"),
        "stays_apart": (
            "peer, mine:tokens, theirs:tokens",
            "stays apart from the side of {peer}, with {theirs} tokens since the two parted and "
            "{mine} here: too few peers that count here have signed its version of fragment "
            "{fragment}",
        ),
        "work_lost": ("tokens, reason", sentences.work_lost),
    },
)

_ROUNDS = (
    _row(
        ROUND | Audience.SCREEN | Audience.TROUBLE,
        "diverged",
        "fragment, majority:peer ids, with_me",
        "has other bits of fragment {fragment} than a majority ({majority}), and takes theirs: "
        "the memory, the disk or the processor of its machine may be faulty",
        on_screen="other bits of fragment {fragment} than most peers have: the memory, the disk "
        "or the processor of this machine may be faulty; taking theirs",
    ),
    _row(
        PROBLEM | Audience.NAMED,
        "convicted",
        "peer, reason, proof:hex",
        "banned {peer} for good: it is proved that it {reason}",
    ),
    _row(
        ROUND | Audience.NAMED,
        "audit_refused",
        "fragment, peer, reason, strikes:float",
        "could not audit a merge, because of {peer}: {reason} (strikes: {strikes:.1f})",
    ),
    _row(
        PEER | Audience.NAMED,
        "spot_check_passed",
        "fragment, peer, before:float, after:float, seconds, received_bytes",
        "checked a contribution of {peer}: it changes the loss on that peer's own data "
        "from {before:.4g} to {after:.4g}",
    ),
    _row(
        PROBLEM | Audience.NAMED,
        "spot_check_failed",
        "fragment, peer, before:float, after:float, seconds, received_bytes, strikes:float",
        "a contribution of {peer} did not lower the loss on that peer's own data: from "
        "{before:.4g} to {after:.4g} (strikes: {strikes:.1f}; with 3 its uploads are refused here)",
    ),
    _row(
        PEER | Audience.NAMED,
        "spot_check_evaded",
        "fragment, peer, reason, strikes:float",
        "could not check a contribution of {peer}: {reason} (strikes: {strikes:.1f})",
    ),
    _row(
        ROUND | Audience.NAMED,
        "struck",
        "fragment, peer, reason, strikes:float",
        "counts this against {peer}: {reason} (strikes: {strikes:.1f})",
    ),
    _row(
        PEER | Audience.NAMED,
        "proof_refused",
        "peer, reason",
        "refused a proof that {peer} named: {reason}",
    ),
    _row(
        PROBLEM | Audience.NAMED,
        "proof_not_kept",
        "peer, reason",
        "could not write the proof against {peer}, which is banned until a restart: {reason}",
    ),
    _row(
        ROUND | Audience.SCREEN | Audience.TROUBLE | Audience.NAMED,
        "founded_apart",
        "fragment, peer, name, mine:tokens, theirs:tokens",
        "the run was founded twice: the history of {peer} has other first weights",
        on_screen="the run was founded twice: the history of {name} has other first weights "
        "({theirs} tokens there, {mine} here); the two are not averaged, and the one with more "
        "tokens goes on",
    ),
    _row(
        PROBLEM | Audience.NAMED,
        "went_over",
        "peer, name, tokens, theirs:tokens",
        "went over to the history of {peer}, which was founded apart",
        on_screen="went over to the history of {name}, which was founded apart and has {theirs} "
        "tokens; the own one, with {tokens} tokens, is given up (discarded: apart)",
    ),
    _row(
        ROUND | Audience.SCREEN,
        "alone",
        "fragment, text",
        "nobody else trains here now; training goes on alone",
    ),
    _row(
        ROUND | Audience.SCREEN | Audience.METRICS | Audience.LAB,
        "round",
        "fragment, round, kind, version, outcome, reason, leader, members:peer ids, "
        "contributors:peer ids, marks:[incarnation; mark; steps; tokens] by peer id, lineage, "
        "parents:list of hex, weights, left_out:reason by peer id, codec, codec_down, seconds, "
        "encoded_s, merged_s, sent_bytes, received_bytes, received_line_bytes, "
        "sent_for:bytes by purpose, contributed, "
        "delegates:peer id by peer id, received_from:bytes by peer id, weight, time_s",
        sentences.round_in_story,
        on_screen=sentences.round_on_screen,
        offer=sentences.offer_in_round,
    ),
    _row(
        Audience.SCREEN,
        "round_missed",
        "fragment, version, members, contributors, contributed, reason, seconds, weight, left_out",
        "fragment {fragment}: round missed, work kept ({reason})",
        offer="fragment {fragment} not merged: {reason}; kept for the next round",
    ),
    _row(
        Audience.RUN,
        "not_merged",
        "fragment, reason",
        "fragment {fragment} not merged: {reason}",
        offer="fragment {fragment} not merged: {reason}; kept for the next round",
    ),
    _row(
        ROUND | Audience.TROUBLE | Audience.NAMED,
        "refused",
        "fragment, peer, kind, reason",
        "refused {peer} ({kind}): {reason}",
    ),
    _row(
        ROUND | Audience.SCREEN | Audience.TROUBLE | Audience.NAMED,
        "not_a_commit",
        "fragment, peer, reason",
        "could not read a commit of {peer}, so its rounds come to nothing here: {reason}",
    ),
    _row(
        ROUND | Audience.TROUBLE | Audience.NAMED,
        "upload_refused",
        "fragment, peer, slice, reason",
        "refused slice {slice} of {peer}: {reason}",
    ),
    _row(
        ROUND | Audience.TROUBLE | Audience.NAMED,
        "not_proposed",
        "fragment, round, peer, reason",
        "left the contribution of {peer} out of a round that it led: {reason}",
    ),
    _row(
        ROUND | Audience.TROUBLE | Audience.NAMED,
        "declined_by",
        "fragment, peer, reason",
        "{peer} declined the commit: {reason}",
    ),
    _row(
        ROUND | Audience.SCREEN,
        "state_adopted",
        "fragment, version, how, from_version, missed, rebased, parted_at, seconds",
        sentences.state_adopted,
    ),
    _row(
        ROUND | Audience.SCREEN,
        "kept",
        "fragment, version, since",
        "kept what its trainer has of version {version} of fragment {fragment}, "
        "which nobody else has",
    ),
    _row(
        ROUND | Audience.RUN,
        "state_fetched",
        "fragment, version",
        "downloaded fragment {fragment} at version {version}",
    ),
    _row(
        Audience.RUN,
        "adopted",
        "fragment, version",
        "trains on from version {version} of fragment {fragment}",
    ),
)

_OTHER_PEERS = (
    _row(SHOWN | Audience.NAMED, "peer_joined", "peer, name, run, text", sentences.peer_joined),
    _row(SHOWN | Audience.NAMED, "peer_left", "peer, name, run, text", sentences.peer_left),
    _row(PROBLEM | Audience.NAMED, "peer_lost", "peer, name, run, text", sentences.peer_lost),
    _row(PEER, "other_run", "peer, ours, theirs, text", "{text}"),
    _row(
        PEER | Audience.NAMED,
        "link_lost",
        "peer, reason",
        "lost the connection to {peer}: {reason}",
    ),
    _row(PEER | Audience.RUN, "connected", "peer, name, text", "{text}"),
    _row(SHOWN, "reachability", "reachable, text", "{text}", on_screen=sentences.reachability),
    *_rows(
        SHOWN,
        "text",
        {
            "hello_refused": ("peer, name, ours, theirs", "{text}"),
            "identity_in_use": ("", "{text}"),
            "outdated": ("", "{text}"),
            "directive": (
                "signer, number, bans, banned:peer ids with spaces, expires_at:Unix time",
                "{text}",
            ),
            "invite_ends": ("expires_at:Unix time", "{text}"),
            "not_admitted": ("", "{text}"),
            "rolled_back": (
                "number, versions, missing, seconds",
                "went back to versions {versions}, as directive {number} of the run's owner says",
            ),
            "frozen_differs": (
                "peer, name, parameters:text",
                "{name} trains with other frozen parameters than this peer: {parameters}",
            ),
            "same_batches": (
                "peer, name, how:text",
                "trains on the same batches as {name} ({how}), so that the work of one adds "
                "nothing to that of the other: call run.seed(SEED) before the loop, take batches "
                "from run.data(dataset), or give the Trainer another seed at each peer",
            ),
            "cache_unreadable": ("path", "{text}"),
            "cache_unwritable": ("path", "{text}"),
        },
    ),
    *_rows(
        PROBLEM,
        "text",
        {
            "nobody_answered": ("addresses", "{text}"),
            "nobody_reduces": ("peers", "{text}"),
            "clock_off": ("offset_s, peers", "{text}"),
        },
    ),
)

_THIS_PEER = (
    _row(Audience.LOG, OPENED, "schema, peer, name, role, run, run_name", "opened the event log"),
    _row(Audience.LOG, "checkpoint", "path, versions", "saved a checkpoint in {path}"),
    _row(
        SHOWN,
        "phase",
        "name, text, done",
        "{name}: {text}",
        on_screen=sentences.phase_on_screen,
    ),
    _row(
        SHOWN | Audience.METRICS,
        "measured",
        "version, tokens, loss, peer",
        sentences.measured_by,
        on_screen=sentences.measured,
    ),
    _row(
        PEER,
        "jump_measured",
        "before:float, after:float, reason, fragments:ints, versions",
        "took versions {versions} of fragments {fragments} from others: {reason}",
    ),
    _row(
        PROBLEM,
        "jump_refused",
        "before:float, after:float, reason, fragments:ints, versions, back_to:ints",
        "went back to versions {back_to} of fragments {fragments}, from versions {versions} that "
        "it had taken from others: {reason}",
    ),
    _row(
        PROBLEM,
        "jump_allowed",
        "before:float, after:float, reason, fragments:ints, versions",
        "goes on with versions {versions} of fragments {fragments}: {reason}",
    ),
    *_rows(
        PEER | Audience.RUN,
        "",
        {
            "agent_started": ("pid, restarts", "started"),
            "agent_ended": ("reason, finished", "ended: {reason}"),
            "codecs_compiled": ("took_s", "uses compiled codecs, ready after {took_s:.1f} s"),
            "founded": ("fragments:int", "founded the run"),
            "ended_here": ("reason", "stays and serves the run's final state: {reason}"),
            "last_round": ("versions, peers", "makes the last rounds with {peers} other peers"),
        },
    ),
    *_rows(
        SHOWN,
        "",
        {
            "resumed": ("text", sentences.resumed),
            "trainer_steps_again": ("silent_s", "makes steps again"),
            "handing_over": ("tokens, seconds", sentences.handing_over),
            "last_offers": ("merged, alone:bool, tokens, seconds", sentences.last_offers),
            "state_place": ("text", "{text}"),
            "drain_cut_short": ("in_flight", "left with rounds under way: {in_flight}"),
            "exported": ("path, versions, model", "wrote {path}, model {model}"),
            "export_failed": ("text", "could not write the model: {text}"),
            "published": (
                "model, path, tokens",
                "published {path}: {tokens} tokens, model {model}",
            ),
            "publish_failed": ("text", "could not publish the model: {text}"),
            "pushed": ("url", "uploaded the model: {url}"),
            "page_not_served": ("text", "{text}"),
            "codecs_not_compiled": (
                "reason",
                "uses the slower codecs, which are as exact: {reason}",
            ),
            "loop_mistake": ("kind, text", "{text}"),
            "compiled": ("seconds", "trains with compiled code, which took {seconds:.0f} s"),
            "compile_failed": ("reason", "trains without compiling: {reason}"),
            "way_found": ("text", "goes on with {text}: the fastest way found on this machine"),
            "micro_batch_reduced": ("text", "ran out of memory and goes on with {text}"),
            "not_measured": (
                "",
                "leaves the held-out loss to other peers: not even one sequence fits into the "
                "memory that training leaves; training goes on",
            ),
            "port_taken": (
                "port",
                "another program uses port {port}, where this peer listened before: "
                "links from before no longer lead to it, `shoal status` prints the new one",
            ),
            "left_apart": (
                "text, versions, model",
                "the run ended with several models; this peer's is {model}, others differ: {text}",
            ),
        },
    ),
    *_rows(
        PROBLEM,
        "",
        {
            "paused": ("reason", "resting: {reason}; no work is lost"),
            "trainer_rests": ("silent_s", "makes no steps now; other peers do not wait for it"),
            "given_up": ("tokens", sentences.given_up),
            "checkpoint_failed": ("text", "could not save a checkpoint: {text}"),
            "disk_full": ("text, needed_bytes", "{text}"),
            "state_in_memory": ("reason", "the run's state has to be in memory: {reason}"),
        },
    ),
)

_TRAINING_PROCESS = (
    *_rows(
        Audience.SCREEN,
        "",
        {
            "link": ("link, limit:text, by_program:bool", sentences.link_on_screen),
            "link_limited": ("text", "{text}"),
            "page": ("url", sentences.page),
            "joins_here": (
                "peers, directory",
                "joins the peer of this run that runs on this machine already, in {directory}",
            ),
            "run_page": ("url", sentences.run_page),
            "over": ("reason, finished", "{reason}"),
            "agent_died": (
                "exit_code, restart_in_s",
                "the agent ended with code {exit_code}; a new one starts in {restart_in_s:.1f} s, "
                "training goes on",
            ),
            "compiling": ("", "compiles the model for this device while it trains"),
            "compiler_awaited": (
                "text",
                "waits for the compiler, which cannot be interrupted: {text}",
            ),
            "logits_at_once": (
                "",
                "computes all logits of a micro-batch at once: this model has more than a head "
                "after its hidden states",
            ),
            "optimizer_restored": (
                "step",
                "restored the optimizer as it was at step {step} of its last start; "
                "steps are counted anew",
            ),
            "optimizer_not_restored": ("reason", "the optimizer starts afresh: {reason}"),
        },
    ),
    *_rows(
        Audience.RUN,
        ", ".join(["peer", *(f"{name}:{figure.unit}" for name, figure in FIGURES.items())]),
        {
            "progress": ("", "step {steps}, loss {loss}"),
            "done": ("finished, stopped, directory", "ended at step {steps}, loss {loss}"),
        },
    ),
)

_LAB = _rows(
    Audience.LAB,
    "",
    {
        "start": ("peer, time_s", "{peer} started"),
        "crash": ("peer, peers, lasts_s, time_s", "crashed"),
        "leave": ("peer, peers, lasts_s, time_s", "left in order"),
        "return": ("peer, time_s", "{peer} returned after a crash"),
        "pause": ("peers, lasts_s, time_s", "{peers} peers were paused"),
        "partition": ("peers, lasts_s, time_s", "{peers} peers were cut off from the others"),
        "heal": ("time_s", "the partition ended"),
        "join": ("peers, lasts_s, time_s", "{peers} peers joined"),
        "order": ("peers, lasts_s, time_s", "{peers} peers heard an order of the run's owner"),
    },
)

TABLE: Mapping[str, Event] = {
    row.name: row
    for rows in (
        _THIS_PEER,
        _TRAINING_PROCESS,
        _OTHER_PEERS,
        _ROUNDS,
        _COURSE_OF_A_ROUND,
        _SHOWN_PROBLEMS_OF_A_ROUND,
        _PROBLEMS_OF_A_ROUND,
        _REST_OF_A_ROUND,
        _LOG_ONLY,
        _LAB,
    )
    for row in rows
}


_WARNINGS = """
agent_died cache_unreadable cache_unwritable catch_up_failed checkpoint_failed clock_off
codecs_not_compiled compile_failed convicted discarded disk_full diverged drain_cut_short
export_failed founded_apart frozen_differs given_up hello_refused identity_in_use invite_ends
jump_allowed jump_refused left_apart link_limited loop_mistake nobody_reduces not_a_commit
not_admitted not_finite not_measured optimizer_not_restored outdated page_not_served port_taken
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
    return names.within(_unknown(event) if text is None else text)


def on_screen(event: Fields) -> str | None:
    """The sentence on the screen of a peer's own part; ``None`` for what only programs get."""
    row = TABLE.get(event["event"])
    if row is None:
        return _unknown(event)
    if not row.audience & Audience.SCREEN:
        return None
    text = worded(row.on_screen or row.sentence, event)
    if text is None:
        text = _unknown(event)
    section = row.name.replace("_", "-")
    return f"{text} (shoal docs {section})" if row.name in EXPLAINED else text


def own_offer(event: Fields) -> str | None:
    """The result of this peer's own offer, with the reason; ``None`` for other events."""
    row = TABLE.get(event["event"])
    return None if row is None or row.offer is None else worded(row.offer, event)


def _unknown(event: Fields) -> str:
    """An event of another version of Shoal: its ``text``, or its name and fields."""
    if isinstance(event.get("text"), str):
        return str(event["text"])
    fields = [f"{key} {value}" for key, value in event.items() if key not in {*COMMON, "run"}]
    return ", ".join([event["event"].replace("_", " "), *fields])
