"""``shoal chaos``: a swarm of real processes on this machine, hurt on a schedule, and judged."""
