"""Runs that begin from a published model.

- ``published`` is the model as a run file names it, ``base_models`` has its verified files.
- ``lora`` adds adapters to it, ``adapter`` exports them as a folder of peft.
- ``begun`` writes the run file: ``shoal run new --base``. ``fetching`` fetches the model before a
  peer trains.
"""
