"""The systemd unit of a bootstrap peer, and notifications to systemd.

Nothing is installed or started here: that is left to the administrator.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from peer.errors import PathError

STATE_FOLDER = "%S/shoal-bootstrap"
"""The data folder that systemd creates, usually /var/lib/shoal-bootstrap."""

HOMES = (Path("/home"), Path("/root"), Path("/run/user"))


class ServiceFileError(PathError):
    """The unit file cannot be written."""

    exit_code = 2

    def __str__(self) -> str:
        return (
            f"the unit cannot be written to {self.path}: {self.reason}; "
            "run this as root, or omit --service-file and redirect the output"
        )


class ServiceNotifier:
    """Sends states to systemd; does nothing if there is no notification socket."""

    def __init__(self, path: str | None) -> None:
        # "@" stands for the zero byte of an abstract socket (sd_notify(3)).
        self._path = f"\0{path[1:]}" if path and path.startswith("@") else path

    def say(self, state: str) -> None:
        if self._path:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel, suppress(OSError):
                channel.sendto(state.encode(), self._path)


def service_unit(
    python: Path, arguments: Sequence[str], *, identity_path: Path | None = None
) -> str:
    """A hardened systemd unit that runs ``shoal`` with these arguments as a dynamic user.

    A key outside the data folder is passed as a credential, as that user could not read it.
    """
    command = [str(python), "-P", "-m", "peer.cli", *arguments, "--data-dir", STATE_FOLDER]
    credential = ""
    if identity_path is not None:
        command += ["--identity", "%d/identity.key"]
        credential = f"LoadCredential=identity.key:{identity_path.absolute()}\n"
    return UNIT.format(
        command=" ".join(_word(word) for word in command),
        credential=credential,
        protect_home="read-only" if lies_in_a_home(python) else "yes",
    )


def lies_in_a_home(path: Path) -> bool:
    """``True`` if a file is in a home folder, which a dynamic user usually cannot read."""
    return any(path.is_relative_to(home) for home in HOMES)


def write_service(path: Path, unit: str) -> None:
    """Write the unit atomically. Raises ``ServiceFileError``."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(unit)
        temporary.chmod(0o644)
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise ServiceFileError(str(path), error.strerror or str(error)) from error


def _word(word: str) -> str:
    """Quote one word for ExecStart (systemd.service(5)); a leading ``%S/`` or ``%d/`` is ours."""
    specifier = word[:3] if word[:3] in ("%S/", "%d/") else ""
    rest = word[len(specifier) :].replace("\\", "\\\\").replace('"', '\\"')
    rest = rest.replace("$", "$$").replace("%", "%%")
    word = specifier + rest
    return f'"{word}"' if any(character in word for character in " \t\"';") else word


UNIT = """\
[Unit]
Description=Shoal bootstrap peer
Wants=network-online.target
After=network-online.target
StartLimitIntervalSec=0

[Service]
Type=notify
NotifyAccess=main
ExecStart={command}
{credential}Restart=always
RestartSec=2
WatchdogSec=60
TimeoutStopSec=20
KillMode=mixed
LimitNOFILE=65536

# A dynamic user, which exists while the service runs; its data is in /var/lib/shoal-bootstrap.
DynamicUser=yes
StateDirectory=shoal-bootstrap
StateDirectoryMode=0700
UMask=0077
Environment=PYTHONUNBUFFERED=1

# No access to the machine except the network and that folder.
NoNewPrivileges=yes
CapabilityBoundingSet=
AmbientCapabilities=
ProtectSystem=strict
ProtectHome={protect_home}
PrivateTmp=yes
PrivateDevices=yes
ProtectClock=yes
ProtectControlGroups=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
ProtectProc=invisible
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
RemoveIPC=yes
LockPersonality=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallErrorNumber=EPERM

[Install]
WantedBy=multi-user.target
"""
