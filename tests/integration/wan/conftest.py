"""Skips tests of wide-area networks where namespaces cannot be made."""

from __future__ import annotations

from tests.swarms.namespaces import needs_namespaces as needs_namespaces
