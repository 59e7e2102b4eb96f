"""Learners in Modal: functions with a volume, started again where Modal takes a machine away.

Change: GPU, HOURS, the source of the package. First: modal secret create shoal SHOAL_LINK='shoal://...'
modal run --detach modal_app.py --learners 4
"""

from __future__ import annotations

import os
import subprocess

import modal

GPU = "L4"
HOURS = 24
NO_START_HELPS = (2, 4)

app = modal.App("shoal-learners")
volume = modal.Volume.from_name("shoal", create_if_missing=True, version=2)


@app.function(
    image=modal.Image.debian_slim(python_version="3.12").pip_install("shoal"),
    gpu=GPU,
    volumes={"/data": volume},
    secrets=[modal.Secret.from_name("shoal")],
    timeout=HOURS * 3600,
    retries=modal.Retries(max_retries=10, initial_delay=10.0),
)
def learn(index: int) -> None:
    own = {"SHOAL_YES": "1", "SHOAL_DIRECTORY": f"/data/{index}", "SHOAL_PATIENCE": "25"}
    process = subprocess.Popen(["shoal", "join", "--plain"], env={**os.environ, **own})
    try:
        code = process.wait()
    except KeyboardInterrupt:  # Modal takes the machine away 30 s later
        process.terminate()
        process.wait()
        raise
    if code and code not in NO_START_HELPS:
        raise RuntimeError(f"exit code {code}: Modal is to start it again")


@app.local_entrypoint()
def main(learners: int = 2) -> None:
    list(learn.map(range(learners)))
