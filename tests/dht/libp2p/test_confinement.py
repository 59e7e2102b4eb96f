"""The filter under which the daemon runs, instruction by instruction and in the kernel."""

from __future__ import annotations

import json
import os
import platform
import signal
import socket
import subprocess
import sys

import pytest

from dht.libp2p import confinement
from dht.libp2p.confinement import EACCES, EPERM, MACHINES, program

LOAD, AND, IF_EQUAL, IF_AT_LEAST, RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050000

NUMBERS = {
    # From the kernel's tables: asm/unistd_64.h, and asm-generic/unistd.h for aarch64.
    "x86_64": {
        "socket": 41,
        "rt_sigaction": 13,
        "connect": 42,
        "execve": 59,
        "ptrace": 101,
        "io_uring_setup": 425,
    },
    "aarch64": {
        "socket": 198,
        "rt_sigaction": 134,
        "connect": 203,
        "execve": 221,
        "ptrace": 117,
        "io_uring_setup": 425,
    },
}
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def decide(machine: str, number: int, *arguments: int, architecture: int | None = None) -> int:
    """The result of the program for a call, as the kernel would run it."""
    data = {0: number, 4: ARCHITECTURES[machine] if architecture is None else architecture}
    data |= {16 + 8 * at: argument for at, argument in enumerate(arguments)}
    loaded = at = 0
    lines = program(machine)
    while True:
        operation, yes, no, operand = lines[at]
        assert 0 <= yes < 256 and 0 <= no < 256
        at += 1
        if operation == RETURN:
            return operand
        if operation == LOAD:
            loaded = data[operand]
        elif operation == AND:
            loaded &= operand
        else:
            holds = loaded == operand if operation == IF_EQUAL else loaded >= operand
            assert operation in (IF_EQUAL, IF_AT_LEAST)
            at += yes if holds else no


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    ("family", "kind", "allowed"),
    [
        (socket.AF_INET, socket.SOCK_STREAM, True),
        (socket.AF_INET6, socket.SOCK_STREAM, True),
        (socket.AF_INET, socket.SOCK_STREAM | 0o2004000, True),  # CLOEXEC and NONBLOCK, as Go asks
        (socket.AF_INET, socket.SOCK_DGRAM, False),
        (socket.AF_INET6, socket.SOCK_DGRAM, False),
        (socket.AF_INET6, socket.SOCK_DGRAM | 0o2004000, False),
        (socket.AF_INET, socket.SOCK_RAW, False),
        (socket.AF_UNIX, socket.SOCK_STREAM, True),
        (16, socket.SOCK_RAW, True),  # netlink
        (17, socket.SOCK_RAW, False),  # packets
    ],
)
def test_only_sockets_of_tcp_unix_and_netlink_are_opened(
    machine: str, family: int, kind: int, allowed: bool
) -> None:
    found = decide(machine, NUMBERS[machine]["socket"], family, kind)
    assert found == (ALLOW if allowed else REFUSE | EACCES)


@pytest.mark.parametrize("machine", MACHINES)
def test_other_calls_pass_but_for_those_that_reach_other_processes_or_handle_sigterm(
    machine: str,
) -> None:
    of = NUMBERS[machine]
    assert decide(machine, of["connect"]) == decide(machine, of["execve"]) == ALLOW
    assert decide(machine, of["ptrace"]) == decide(machine, of["io_uring_setup"]) == REFUSE | EPERM
    # To handle SIGTERM succeeds, and does nothing; other signals are handled.
    assert decide(machine, of["rt_sigaction"], signal.SIGTERM) == REFUSE
    assert decide(machine, of["rt_sigaction"], signal.SIGINT) == ALLOW
    # The same call by another way into the kernel: of 32 bits, or x32.
    assert decide(machine, of["socket"], 2, 2, architecture=0x40000003) == REFUSE | EPERM
    assert decide(machine, of["socket"] | 0x40000000, 2, 2) == REFUSE | EPERM


TRY_SOCKETS = """
import json, os, socket
found = {}
for family in (socket.AF_INET, socket.AF_INET6):
    for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM):
        try:
            socket.socket(family, kind).close()
            found[f"{family.name} {kind.name}"] = 0
        except OSError as error:
            found[f"{family.name} {kind.name}"] = error.errno
print(json.dumps(found))
"""


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in MACHINES, reason="no filter here"
)
def test_a_confined_program_opens_no_udp_socket() -> None:
    confined = [sys.executable, "-I", "-S", confinement.__file__, str(os.getpid())]
    command = [*confined, sys.executable, "-c", TRY_SOCKETS]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    if done.stdout.startswith(confinement.UNCONFINED):
        pytest.skip(done.stdout)
    assert json.loads(done.stdout) == {
        "AF_INET SOCK_DGRAM": EACCES,
        "AF_INET6 SOCK_DGRAM": EACCES,
        "AF_INET SOCK_STREAM": 0,
        "AF_INET6 SOCK_STREAM": 0,
    }


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills children with a parent")
def test_a_program_whose_owner_has_ended_before_it_began_does_not_begin() -> None:
    """The kernel kills it only with an owner that ends afterwards."""
    command = [sys.executable, "-I", "-S", confinement.__file__, "1", "/bin/echo", "began"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
