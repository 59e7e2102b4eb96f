"""A swarm of real processes on this machine, with injected faults, and judged.

Input: scenarios and a seed. Output: verdicts on the promises of a run, as JSON and as text.

- ``run``: start here. Runs a control and every scenario, and summarises. ``report`` is the text.
- ``process_swarm``: starts, observes and ends the processes; ``members`` are its learners and
  bootstrap peers, ``workspace`` what they share, ``composition`` the run that they train.
- ``injection``: begins and ends faults on schedule; ``fault_actions`` carries them out, ``ambush``
  kills leaders in a given phase, ``proxy`` impairs links, ``workspace`` falsifies clocks.
- ``resizing``: starts and ends learners on a schedule (``tests.swarms.sizes``).
- ``attackers``: members that lie or spoil uploads, as ``director`` tells them to, and strangers.
- ``collect``: turns logs and checkpoints into evidence. ``judging`` (pure) plans and judges.
"""
