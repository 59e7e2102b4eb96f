"""Becomes a program that may open no UDP socket: ``confinement.py OWNER PROGRAM ARGUMENT...``.

``hivemind_daemon`` starts the libp2p daemon through this file. The daemon speaks the QUIC of 2023,
whose known flaws nobody mends, and dials ``quic-v1`` addresses that strangers name, whatever its
flags say. So the kernel refuses it every socket that is neither TCP, nor Unix, nor netlink (by
which it learns its own addresses), and a few calls by which it could reach into other processes.
The kernel also kills it with the thread that started it. Linux only, and the filter on two
processors only; elsewhere, or where a container forbids filters, the program starts without it,
after a line that begins with ``UNCONFINED``.

The daemon ignores SIGTERM. Slurm, systemd and others send it to all processes of a job, and a peer
that is asked to leave hands its work over by the daemon. Go would handle the signal whatever its
parent did, so the filter lets that call succeed and do nothing.

It starts within 25 ms under ``python -I -S``, as it imports nothing but small modules of the
standard library, and nothing of Shoal.
"""

import ctypes
import os
import signal
import struct
import sys

UNCONFINED = "unconfined: "

EPERM, EACCES = 1, 13

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_FILTER_MODE, _SIGKILL = 2, 9

_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK = 1, 2, 10, 16
_SOCK_STREAM, _SOCK_KIND_MASK = 1, 0xF

_LOAD, _AND, _IF_EQUAL, _IF_AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _SECOND_ARGUMENT = 0, 4, 16, 24
"""Offsets in ``struct seccomp_data``; of an argument, its lower half (little endian)."""

_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000
_NEXT, _ALLOWED, _NO_SOCKET, _NO_CALL, _NO_EFFECT = 0, -4, -3, -2, -1
"""The place to go on: the next instruction, or one of the last four, counted from the end."""

_OTHER_ABI = 0x40000000
"""Numbers from here on are calls of x32, another way to the same calls of x86-64."""

MACHINES = {
    # Architecture; socket; rt_sigaction; ptrace, process_vm_readv, process_vm_writev,
    # io_uring_setup (whose queues would open sockets past the filter).
    "x86_64": (0xC000003E, 41, 13, (101, 310, 311, 425)),
    "aarch64": (0xC00000B7, 198, 134, (117, 270, 271, 425)),
}


def program(machine: str) -> list[tuple[int, int, int, int]]:
    """The filter for the kernel: operation, distance if true and if false, operand."""
    architecture, socket, handle_signal, never = MACHINES[machine]
    lines = [
        (_LOAD, _NEXT, _NEXT, _ARCHITECTURE),
        (_IF_EQUAL, _NEXT, _NO_CALL, architecture),
        (_LOAD, _NEXT, _NEXT, _NUMBER),
        (_IF_AT_LEAST, _NO_CALL, _NEXT, _OTHER_ABI),
        *((_IF_EQUAL, _NO_CALL, _NEXT, number) for number in never),
        (_IF_EQUAL, _NEXT, 2, handle_signal),
        (_LOAD, _NEXT, _NEXT, _FIRST_ARGUMENT),
        (_IF_EQUAL, _NO_EFFECT, _ALLOWED, signal.SIGTERM),
        (_IF_EQUAL, _NEXT, _ALLOWED, socket),
        (_LOAD, _NEXT, _NEXT, _FIRST_ARGUMENT),
        (_IF_EQUAL, _ALLOWED, _NEXT, _AF_UNIX),
        (_IF_EQUAL, _ALLOWED, _NEXT, _AF_NETLINK),
        (_IF_EQUAL, 1, _NEXT, _AF_INET),
        (_IF_EQUAL, _NEXT, _NO_SOCKET, _AF_INET6),
        (_LOAD, _NEXT, _NEXT, _SECOND_ARGUMENT),
        (_AND, _NEXT, _NEXT, _SOCK_KIND_MASK),
        (_IF_EQUAL, _ALLOWED, _NO_SOCKET, _SOCK_STREAM),
        (_RETURN, _NEXT, _NEXT, _ALLOW),
        (_RETURN, _NEXT, _NEXT, _REFUSE | EACCES),
        (_RETURN, _NEXT, _NEXT, _REFUSE | EPERM),
        (_RETURN, _NEXT, _NEXT, _REFUSE),  # without an error: the call returns 0
    ]

    def distance(to: int, here: int) -> int:
        return to if to >= 0 else len(lines) + to - here - 1

    return [
        (operation, distance(yes, here), distance(no, here), operand)
        for here, (operation, yes, no, operand) in enumerate(lines)
    ]


def confine(machine: str) -> None:
    """Install the filter for this process and all that it becomes. Raises ``OSError``."""
    code = b"".join(struct.pack("=HBBI", *line) for line in program(machine))
    lines = ctypes.create_string_buffer(code, len(code))
    whole = ctypes.create_string_buffer(struct.pack("@HP", len(code) // 8, ctypes.addressof(lines)))
    # Without it only root may install a filter; no program that gains rights is ever started.
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_SECCOMP, _FILTER_MODE, whole)


def _prctl(option: int, value: int, more: object = 0) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(
        option, ctypes.c_ulong(value), more or ctypes.c_ulong(0), *[ctypes.c_ulong(0)] * 2
    ):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def main() -> None:
    owner, *command = sys.argv[1:]
    _prctl(_PR_SET_PDEATHSIG, _SIGKILL)
    if os.getppid() != int(owner):
        sys.exit("its owner ended meanwhile")
    machine = os.uname().machine
    try:
        if machine not in MACHINES:
            raise OSError(f"no filter is known for {machine}")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        confine(machine)
    except OSError as error:
        os.write(1, f"{UNCONFINED}{error}\n".encode())
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
