"""Our rounds against other systems' on this machine, every peer a process of its own."""
