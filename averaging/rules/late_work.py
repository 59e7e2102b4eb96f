"""How long the displacement of late work is: of work that missed the round it was meant for.

A learner keeps such work and offers it again with its next steps, so the displacement is that of
several cycles. Merged ``whole`` it makes the outer step longer: where a third of the contributions
miss each round, a merge moves theta about twice as far as one to which everybody came, and momentum
has gone on meanwhile. With ``per_cycle`` its sender uploads the mean of its cycles, which counts by
all its tokens (``averaging.rules.weights``): an outer step then stays as long as a cycle, as in
FedNova (arXiv 2007.07481). The work is merged as a whole in both cases, and its tokens count.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

LateWork: TypeAlias = Literal["whole", "per_cycle"]


def uploaded_share(rule: LateWork, *, staleness: int) -> float:
    """Return the factor on a displacement that is uploaded.

    ``staleness``: versions between the one at which the work began and the one it is offered to.
    """
    return 1.0 / (1 + staleness) if rule == "per_cycle" else 1.0
