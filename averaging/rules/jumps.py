"""Which new states are jumps: a peer takes them without having seen what made them.

Most versions are steps. A step is the merge of a round that this peer was in, or that it replays
from the merged bytes, and each moves a fragment about as far as the ones before. A state that is
taken over whole (to catch up, to give way, to go over to another founding) is always a jump, and so
is a step that moves a fragment further than steps usually do. Certificates say that enough peers
stand on such a state, and nothing about whether it is any good; the loss says that
(``averaging.rules.loss_gate``).
"""

from __future__ import annotations

from typing import Final

UNUSUAL_RATIO: Final = 5.0
"""Length of an unusual step, as a multiple of the usual one. The uploads of honest peers were at
most 4.6 times as long as usual (``averaging.rules.usual_norms``), and a merge is shorter than the
longest of its uploads."""


def is_unusual(moved: float, *, usual: float | None, steps: int = 1) -> bool:
    """True if ``steps`` merges moved a fragment further than is usual.

    ``usual``: how far one merge moves it; ``None``: that is not known yet, and nothing is unusual.
    """
    return usual is not None and not moved <= UNUSUAL_RATIO * usual * max(1, steps)
