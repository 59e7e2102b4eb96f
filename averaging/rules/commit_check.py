"""Checks of a commit against the run's settings, before a member takes part.

A commit says how its round merges, so that all members do the same. A member also holds it against
the run's settings and against its own join: a leader that lies, or that is of another release, must
not change the numbers, lose work or hold anybody up. (An unknown codec in a commit once ended the
averager.)
"""

from __future__ import annotations

from collections.abc import Callable

from averaging.messages import Commit, Entry, Join
from averaging.numbers.merge import rule_names
from averaging.rules.deadlines import longest
from averaging.rules.policy import RoundPolicy
from averaging.rules.quorum import ALL


def objection(
    commit: Commit,
    policy: RoundPolicy,
    *,
    codecs: tuple[str, ...],
    encoded_bytes: Callable[[str], int],
) -> str | None:
    """Return the reason why a commit breaks the run's settings; ``None`` if it does not."""
    displacement = commit.displacement_codec
    if commit.melds:
        states = commit.codec.partition("/")[2]
        wanted = policy.mixing.codec(displacement)
        if commit.codec != wanted:
            return f"it sends states as {states!r}; the run melds with {wanted!r}"
    used = displacement, commit.codec_down or displacement
    for name in used:
        if name not in codecs:
            return f"I lack its codec {name!r}; I have {', '.join(codecs)}"
    levels = policy.levels
    if commit.level >= len(levels):
        return f"its level is {commit.level}; the run has {len(levels)}"
    level = levels[commit.level]
    wanted_codecs = level.codec, level.codec_down
    if used not in (wanted_codecs, ("f32", "f32")):  # f32: a member lacks the run's
        return f"its codecs are {' and '.join(used)}; the run's are {' and '.join(wanted_codecs)}"
    if commit.merge not in rule_names():
        return f"I lack its merge rule {commit.merge!r}; I have {', '.join(rule_names())}"
    theirs = commit.merge, commit.eta, commit.mu
    ours = policy.merge, policy.eta_of(len(commit.members)), policy.mu
    if theirs != ours:
        return f"it merges by {theirs}, the run by {ours}"
    most = policy.batch_tokens_max
    if most is not None and commit.batch_tokens_max > most:
        return (
            f"it accepts batches of {commit.batch_tokens_max} tokens; the run allows {most} at most"
        )
    voters = len(commit.voters)
    needed = voters if policy.quorum.required == ALL else min(2, voters)
    if commit.contributors_min < needed:
        return f"it merges {commit.contributors_min} contributions; the run needs {needed} at least"
    size = max(map(encoded_bytes, commit.codecs))
    limit = longest(policy, encoded_bytes=size, commit=commit)
    if commit.upload_s > limit.upload_s or commit.round_s > limit.round_s:
        return (
            f"it takes up to {commit.round_s:g} s, {commit.upload_s:g} s of it for uploads; "
            f"{limit.round_s:g} s and {limit.upload_s:g} s are the most that I accept"
        )
    return None


def misquoted(entry: Entry, join: Join) -> str | None:
    """Return how a roster misquotes a member's join; ``None`` if it does not.

    A mark that was changed would lose the member's work, or have it merged a second time.
    """
    tokens = entry.tokens if entry.claimed_tokens is None else entry.claimed_tokens
    said = {
        "mark": (entry.mark, join.mark),
        "steps": (entry.steps, join.steps),
        "tokens": (tokens, join.tokens),
        "base_version": (entry.base_version, join.base_version),
        "staleness": (entry.staleness, join.staleness),
        "reachable": (entry.reachable, join.reachable),
        "level": (entry.level, join.level),
    }
    for name, (theirs, mine) in said.items():
        if theirs != mine:
            return f"it gives my {name} as {theirs}; it is {mine}"
    return None
