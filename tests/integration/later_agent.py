"""An agent of a later version, which speaks only protocol versions 3 to 4."""

from __future__ import annotations

import sys
from dataclasses import replace
from unittest.mock import patch

from dht.presence.settings import PresenceSettings
from peer.agent import agent, network, policies
from peer.run_file.sections import RunFile


def later_settings(run: RunFile) -> PresenceSettings:
    return replace(policies.presence_settings(run), protocol_versions=(3, 4))


if __name__ == "__main__":
    with patch.object(network, "presence_settings", later_settings):
        raise SystemExit(agent.main(sys.argv[1:]))
