"""Packages that come with an extra of this one, imported where they are needed."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from peer.errors import ExtraMissing


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
