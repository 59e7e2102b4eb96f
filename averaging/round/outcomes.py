"""How a round ended, as others say: which of their words count, and for how much."""

from __future__ import annotations

from collections.abc import Callable

from averaging.messages import Commit, Sealed, Void, vote, vow
from averaging.round.paxos import VOID
from dht.identity import PeerId


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
