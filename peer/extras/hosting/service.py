"""The systemd unit of a bootstrap peer or a group, what starts a learner with its machine, and
notifications to systemd.

Nothing is installed or started here: that is left to the administrator.
"""

from __future__ import annotations

import plistlib
import socket
import stat
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from peer.errors import ExitCode, PathError

STATE_FOLDER = "%S/%N"
"""The data folder that systemd creates, by the name of the unit's file: usually
/var/lib/shoal-bootstrap. A second unit on one machine has another name, so another key."""

HOMES = (Path("/home"), Path("/root"), Path("/run/user"))
TEMPORARY = (Path("/tmp"), Path("/var/tmp"))
"""Folders in whose place the service has empty ones of its own (``PrivateTmp``)."""

INSTALL_FOR_ALL = (
    "install shoal where every user may read it: python3 -m venv /opt/shoal && "
    "/opt/shoal/bin/pip install ., in the folder of shoal's source"
)


class ServiceCannotRun(PathError):
    """The service could not use this installation."""

    exit_code = 2
    message = "the service could not run {path}: {reason}; " + INSTALL_FOR_ALL


class ServiceNotifier:
    """Sends states to systemd; does nothing if there is no notification socket."""

    def __init__(self, path: str | None) -> None:
        # "@" stands for the zero byte of an abstract socket (sd_notify(3)).
        self._path = f"\0{path[1:]}" if path and path.startswith("@") else path

    def say(self, state: str) -> None:
        if self._path:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel, suppress(OSError):
                channel.sendto(state.encode(), self._path)


def own_installation() -> tuple[Path, ...]:
    """The files that a service needs to run this installation: Python, libraries and Shoal."""
    python = Path(sys.executable).absolute()
    package = Path(__file__).resolve().parents[2]
    paths = (python, python.resolve(), Path(sys.prefix), Path(sys.base_prefix), package)
    return tuple(dict.fromkeys(paths))


def check_seen(paths: Iterable[Path]) -> None:
    """Check that a dynamic user sees and may read these files. Raises ``ServiceCannotRun``."""
    for path in paths:
        for folder in TEMPORARY:
            if path.is_relative_to(folder):
                reason = f"{folder} is another, empty folder for a service (PrivateTmp)"
                raise ServiceCannotRun(str(path), reason)
        for place in (*reversed(path.parents), path):
            with suppress(FileNotFoundError):
                wanted = stat.S_IROTH | stat.S_IXOTH if place == path else stat.S_IXOTH
                if place.stat().st_mode & wanted != wanted:
                    raise ServiceCannotRun(str(path), f"{place} is closed to other users")


def service_unit(
    python: Path,
    arguments: Sequence[str],
    *,
    description: str,
    stop_s: float,
    credentials: Mapping[str, Path] | None = None,
    installation: Iterable[Path] = (),
) -> str:
    """A hardened systemd unit that runs ``shoal`` with these arguments as a dynamic user.

    ``stop_s``: the time that it may take to stop; systemd kills it then.

    Files outside the data folder, which that user could not read, are passed as credentials: the
    arguments name them as ``%d/NAME``. Home folders are hidden unless Python or another path of the
    ``installation`` is in one.
    """
    command = [str(python), "-P", "-m", "peer.cli", *arguments, "--data-dir", STATE_FOLDER]
    passed = (credentials or {}).items()
    return UNIT.format(
        description=description,
        stop_s=stop_s,
        command=" ".join(_word(word) for word in command),
        credentials="".join(f"LoadCredential={name}:{path.absolute()}\n" for name, path in passed),
        protect_home="read-only" if any(map(lies_in_a_home, (python, *installation))) else "yes",
    )


def lies_in_a_home(path: Path) -> bool:
    """``True`` if a file is in a home folder, which ``ProtectHome`` hides."""
    return any(path.is_relative_to(home) for home in HOMES)


def _word(word: str) -> str:
    """Quote one word for ExecStart (systemd.service(5)); our specifiers stay as they are."""
    specifier = next((each for each in (STATE_FOLDER, "%d/") if word.startswith(each)), "")
    rest = word[len(specifier) :].replace("\\", "\\\\").replace('"', '\\"')
    rest = rest.replace("$", "$$").replace("%", "%%")
    word = specifier + rest
    return f'"{word}"' if any(character in word for character in " \t\"';") else word


UNIT = """\
[Unit]
Description={description}
Wants=network-online.target
After=network-online.target
StartLimitIntervalSec=0

[Service]
Type=notify
NotifyAccess=main
ExecStart={command}
{credentials}Restart=always
RestartSec=2
WatchdogSec=60
TimeoutStopSec={stop_s:.0f}
KillMode=mixed
LimitNOFILE=65536

# A dynamic user, which exists while the service runs; its data is in /var/lib, in a folder with
# the name of this file.
DynamicUser=yes
StateDirectory=%N
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


# --- learners ------------------------------------------------------------------------------------

STEP_S = 30.0
"""Time for the step under way, on top of the patience."""

LEARNER_STEPS = (
    "save it as ~/Library/LaunchAgents/org.shoal.learner.plist; next: launchctl bootstrap gui/$UID "
    "~/Library/LaunchAgents/org.shoal.learner.plist"
    if sys.platform == "darwin"
    else "save it as ~/.config/systemd/user/shoal-learner.service; next: systemctl --user "
    "enable --now shoal-learner; while you are logged out, too: loginctl enable-linger"
)


def learner_service(arguments: Sequence[str], *, patience_s: float) -> str:
    """A unit of the user's own systemd, or an agent of launchd on a Mac, that runs ``shoal``."""
    command = [str(Path(sys.executable).absolute()), "-P", "-m", "peer.cli", *arguments]
    make = _launch_agent if sys.platform == "darwin" else _user_unit
    return make(command, round(patience_s + STEP_S))


def _user_unit(command: Sequence[str], stop_s: int) -> str:
    final = (int(code) for code in ExitCode if code.is_final and code is not ExitCode.DONE)
    return USER_UNIT.format(
        command=" ".join(map(_word, command)),
        final=" ".join(map(str, final)),
        left=int(ExitCode.INTERRUPTED),
        stop_s=stop_s,
    )


def _launch_agent(command: Sequence[str], stop_s: int) -> str:
    """launchd knows no exit codes with which no start helps: it tries again, ten minutes later."""
    log = "/tmp/shoal-learner.log"
    return plistlib.dumps(
        {
            "Label": "org.shoal.learner",
            "ProgramArguments": list(command),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": 600,
            "ExitTimeOut": stop_s,
            "ProcessType": "Background",
            "StandardOutPath": log,
            "StandardErrorPath": log,
        },
        sort_keys=False,
    ).decode()


USER_UNIT = """\
[Unit]
Description=Shoal learner
StartLimitIntervalSec=0

[Service]
ExecStart={command}
Environment=PYTHONUNBUFFERED=1
Restart=on-failure
RestartSec=60
# Exit codes with which no start helps, and that of a peer that was asked to leave.
RestartPreventExitStatus={final}
SuccessExitStatus={left}
# More than the patience. Only the trainer gets the signal; it tells its agent.
TimeoutStopSec={stop_s}
KillMode=mixed
Nice=10
MemoryMax=75%
NoNewPrivileges=yes

[Install]
WantedBy=default.target
"""
