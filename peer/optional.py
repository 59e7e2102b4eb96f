"""Parts that an installation may lack: ``peer.extras``, and packages of its ``pip`` extras.

The core names modules of ``peer.extras`` to these functions alone, and where they are needed. So it
is imported, and takes part in a run, without them.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from peer.errors import ExtraMissing, PartMissing


def extra(module: str) -> Any:
    """A module by its name in ``peer.extras``. Raises ``PartMissing`` where it is left out."""
    for there in extras(module):
        return there
    raise PartMissing(module)


def extras(*modules: str) -> list[Any]:
    """Those of the modules that are there."""
    there = []
    for module in modules:
        name = f"peer.extras.{module}"
        try:
            there.append(importlib.import_module(name))
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # of a package that the module imports
    return there


def needed(module: str, what: str, *, extra: str = "hf") -> Any:
    """A module of such a package, which ``what`` needs. Raises ``ExtraMissing``."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ExtraMissing(what, module.partition(".")[0], extra) from error


def check_installed(package: str, what: str, *, extra: str = "hf") -> None:
    """Raise ``ExtraMissing`` if the package is not there. It is not imported."""
    if importlib.util.find_spec(package) is None:
        raise ExtraMissing(what, package, extra)


def hub_errors() -> tuple[type[Exception], ...]:
    """Errors of requests to the hub of Hugging Face, whose package is installed.

    A server that cannot be reached is an error of its HTTP library, which is another one in every
    other release and derives neither from ``OSError`` nor from an error of the package. Its base
    class is one of ``HfHubHTTPError``.
    """
    errors = needed("huggingface_hub.errors", "the hub")
    return (OSError, ValueError, RuntimeError, *errors.HfHubHTTPError.__bases__)
