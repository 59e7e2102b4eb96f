"""Ballots and seals of a commit: functions of the commit and of signed votes.

Ballot 0 is the leader's and needs no promises, because there is no lower one. Ballot
``1 + attempt * n + i`` belongs to the i-th of n voters.
"""

from __future__ import annotations

from collections.abc import Callable

from averaging.messages import Commit, Sealed, Void, vote, vow
from dht.identity import PeerId

VOID: tuple[int, ...] = ()
"""The seal of a round without contributors."""


def ballot_of(place: int, *, voters: int, above: int) -> int:
    """The lowest ballot of the voter at this place that is higher than ``above``."""
    attempt = max(0, (above - place) // voters)
    ballot = 1 + attempt * voters + place
    return ballot if ballot > above else ballot + voters


def owner_of(ballot: int, commit: Commit) -> PeerId:
    """The only peer that may use this ballot."""
    if ballot == 0:
        return commit.leader
    voters = commit.voters
    return commit.members[voters[(ballot - 1) % len(voters)]].peer


def is_chosen(
    commit: Commit, message: Sealed | Void, verify: Callable[[PeerId, bytes, bytes], bool]
) -> bool:
    """True if a message shows the votes of a majority of the voters for its seal.

    A void round that was forsworn shows the vows of a majority instead.
    """
    if isinstance(message, Sealed):
        said = vote(message.round, message.ballot, message.seal)
    elif message.forsworn:
        said = vow(message.round)
    else:
        said = vote(message.round, message.ballot, VOID)
    voted = {
        index
        for index, signature in message.votes
        if index in commit.voters and verify(commit.members[index].peer, said, signature)
    }
    return len(voted) >= commit.majority


def is_void(
    commit: Commit,
    message: Void,
    sender: PeerId,
    said_by: set[PeerId],
    verify: Callable[[PeerId, bytes, bytes], bool],
) -> bool:
    """True if a round is void: a majority's votes or vows, its leader or most voters say so.

    A leader can make its round void before a seal is chosen; after it a majority must have forsworn
    the round. Each voter has ballots of its own, so a later coordinator's word is a member's. Those
    that heard of it from a coordinator that is gone may say so; fewer than a majority would be half
    of a group of four, and work that they deny would be merged twice. ``said_by``: the peers that
    have said so, to which the sender is added.
    """
    if message.votes or message.forsworn:
        return is_chosen(commit, message, verify)
    if message.ballot == 0 and sender == commit.leader:
        return True
    if commit.index(sender) not in commit.voters:
        return False
    said_by.add(sender)
    return len(said_by) >= min(commit.majority, len(commit.voters) - 1)


def may_be_finished(message: Void) -> bool:
    """True if a member may have finished a round that is void by this message.

    It did so before a majority forswore the round; or the leader, or most voters, say to this peer
    that the round is void and have others seal it.
    """
    return message.forsworn or not message.votes


def is_possible(commit: Commit, seal: tuple[int, ...]) -> bool:
    """True if a round with this commit can have this seal."""
    if seal == VOID:
        return True
    in_order = seal == tuple(sorted(set(seal)))
    return in_order and seal[-1] < len(commit.members) and is_backed(commit, seal)


def is_backed(commit: Commit, seal: tuple[int, ...]) -> bool:
    """True if a seal has the work of a voter: that of others alone moves no state."""
    return not set(seal).isdisjoint(commit.voters)


def all_peers_of(commit: Commit, reducers: list[PeerId]) -> list[PeerId]:
    """Roster and reducers, each once, in the roster's order."""
    return list(
        dict.fromkeys([*(entry.peer for entry in commit.members), *reducers, commit.leader])
    )
