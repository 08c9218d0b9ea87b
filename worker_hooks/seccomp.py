"""Blocks io_uring, which CRIU cannot dump, for this process and its children.

libuv (so uvloop, which every Dynamo worker uses) opens rings where it can and falls back to epoll
where the kernel has none; this filter makes the kernel look like that.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform

# Since Linux 5.1 a new call has one number on every ABI of these machines, so the filter need not ask which
# ABI a call came through; only x32 marks its calls with a bit, which is masked.
IO_URING_SETUP, IO_URING_ENTER, IO_URING_REGISTER = 425, 426, 427
_X32_BIT = 0x40000000

_SECCOMP_CALL = {"x86_64": 317, "aarch64": 277}
"""The number of seccomp(2) by ``platform.machine()``: the machines this filter was made for."""

_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_SET_MODE_FILTER = 1
_SECCOMP_FILTER_FLAG_TSYNC = 1
_SECCOMP_RET_ERRNO = 0x00050000
_SECCOMP_RET_ALLOW = 0x7FFF0000

_LOAD_WORD, _AND, _RETURN = 0x20, 0x54, 0x06
_JUMP_AT_LEAST, _JUMP_ABOVE = 0x35, 0x25
_NUMBER_OFFSET = 0  # in struct seccomp_data

PROGRAM = (
    (_LOAD_WORD, 0, 0, _NUMBER_OFFSET),
    (_AND, 0, 0, 0xFFFFFFFF & ~_X32_BIT),
    (_JUMP_AT_LEAST, 0, 2, IO_URING_SETUP),
    (_JUMP_ABOVE, 1, 0, IO_URING_REGISTER),
    (_RETURN, 0, 0, _SECCOMP_RET_ERRNO | errno.ENOSYS),
    (_RETURN, 0, 0, _SECCOMP_RET_ALLOW),
)
"""The filter: (code, jump if true, jump if false, k) of each instruction."""


class _Instruction(ctypes.Structure):
    _fields_ = [("code", ctypes.c_ushort), ("yes", ctypes.c_ubyte), ("no", ctypes.c_ubyte), ("k", ctypes.c_uint)]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.POINTER(_Instruction))]


def block_io_uring() -> None:
    """Installs the filter in every thread of this process; a second call changes nothing that shows.

    Raises:
        OSError: this machine or kernel has no way to do so; the message says what to do instead.
    """
    machine = platform.machine()
    if machine not in _SECCOMP_CALL:
        raise OSError(errno.ENOSYS, f"no filter for {machine}; block io_uring with kernel.io_uring_disabled=2 instead")
    instructions = (_Instruction * len(PROGRAM))(*(_Instruction(*step) for step in PROGRAM))
    libc = ctypes.CDLL(None, use_errno=True)
    # Without privilege a filter is only taken from a process that can gain none.
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        _fail("prctl(PR_SET_NO_NEW_PRIVS)")
    filter_ = _Program(len(PROGRAM), instructions)
    if libc.syscall(
        _SECCOMP_CALL[machine], _SECCOMP_SET_MODE_FILTER, _SECCOMP_FILTER_FLAG_TSYNC, ctypes.byref(filter_)
    ):
        _fail("seccomp(SECCOMP_SET_MODE_FILTER)")


def io_uring_blocked() -> bool:
    """Whether io_uring_setup answers that there is no such call."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall(IO_URING_SETUP, 0, None)
    return ctypes.get_errno() == errno.ENOSYS


def _fail(call: str) -> None:
    number = ctypes.get_errno()
    raise OSError(number, f"{call}: {os.strerror(number)}; block io_uring with kernel.io_uring_disabled=2 instead")
