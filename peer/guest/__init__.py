"""Enforcing the limits that the owner of a machine has set, while a peer runs.

    enforcement     ``Guest``: reads the limits, counts traffic, gives the verdict. Start here
    other_programs  the share of the processors that programs other than Shoal use
    accelerators    the same of NVIDIA's accelerators, time and memory, and their temperature
    machine         memory and disk, processors of a container, battery, temperature, the screen

In come ``limits.json`` in the peer's folder, the traffic of its two gates, and the clock; out go
reasons to rest, rates and sizes. The decisions themselves are pure, in
``peer.rules.limits``, and must stay there. An error of a file here costs a limit or a count, never
training.
"""
