"""Runs that begin from a published model.

- ``base_models`` is the model as a run file names it, and its verified files.
- ``lora`` adds adapters to it. ``commands``: what commands do with it.
"""
