"""Decisions of the guard: who has worked enough to count, who lies, and how that is proved.

**Probation** (``probation``): in a run that anybody may join, newcomers work before they count.

**Audits**: finding a member that lies in the arithmetic, and proving it to everybody.

Merging is bit-exact, so any peer that has the uploads of a slice can merge them again and compare.
For that each peer signs what it makes of a slice (``averaging.history.claims``): a member the
upload that it sends, a site's delegate the bundle, a reducer the merged slice with the uploads that
went in. After a round each member draws a few pieces of slices (``selection``), fetches their
uploads from those who sent them, and merges them anew. If the bits differ, the signed claims and
the bytes are a **proof** (``proofs``): anybody can check it alone, without trusting the auditor.
Two different statements of one peer about one thing are a proof as well; ``witness`` notices them.

A proof bans its author. A failure that proves nothing, such as bytes that do not come, costs
standing at the peer that waited for them, and fades (``averaging.rules.reputation``): a crash or a
slow line looks the same. The worth of a contribution cannot be proved either: ``spot_checks``
compares losses on its author's data, where the run asks for it; ``averaging.history.readings`` name
the place there.

**The loss gate** (``loss_gate``): which states a peer takes without having seen what made them, and
whether it goes back from them because its loss has risen.

In: claims, commits and bytes of other peers. Out: what to audit, proofs, and verdicts. Nothing here
sends, stores or waits, and no verdict is taken over from another peer.
"""
