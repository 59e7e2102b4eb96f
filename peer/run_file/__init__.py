"""Run files: what is trained, on what, and how peers merge their work. Pure.

A run file is one TOML file. Its canonical form (sorted compact JSON; every setting is explicit,
except that those which the schema got later are left out at their default) hashes to the id of the
run. Peers take the settings from it and never type them. ``seeds``, the addresses through which the
run is found, is the only setting outside the hash, because it may change during the run.

In: the text of a run file, or the canonical form that another peer serves. Out: a ``RunFile``,
or a ``RunFileError`` that lists every fault with its line, the rule and the nearest valid name.

Start with ``sections`` and ``merging``, the declarations of all settings (``declaring`` is how one
is declared and checked); then ``reading``. ``contradictions`` checks their
combinations, ``hf_config`` the configuration of a transformers model; ``places`` are names of files
in a run file, and of the published model that a run begins from, ``forms`` are examples as text;
``writing`` prints a commented file, ``presets`` has settings for models of named sizes;
``schedule`` computes the learning rate.

Nothing here opens a file or a connection, reads the clock, or executes what a run file says: run
files come from strangers. A default never changes under the same ``SCHEMA``.
"""
