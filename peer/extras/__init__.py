"""The optional parts of a peer: each room stands beside the core and may import it.

    bases        runs that begin from a published model, and adapters (LoRA) on it
    compiled     codecs as machine code, for large models
    credit       who contributed what
    curves       curves in TensorBoard, Weights & Biases and Kubeflow Trainer
    doctor       checks of this machine and its network
    experiments  ``shoal demo`` and ``simulate``
    explain      what happened, told from event logs
    export       the model of a run as files that other programs read
    hosting      bootstrap peers
    orders       what the owner of a run does: invites, bans, changes, attested states, rollbacks
    run_lists    lists of runs to choose from
    shards       token shards of text, for the author of a run
    site         exports for web servers while the run goes on, and the public page of the run
    use          continuing texts, measuring losses

A peer takes part in a run without this folder.
"""
