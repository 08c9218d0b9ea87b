"""Host memory in the place of a GPU's: anonymous memory files, mapped at reserved addresses.

It keeps the same promises (same address after unmap and map, hand-over by descriptor, memory that
lives as long as anyone maps it), so everything above it runs where there is no GPU.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from dataclasses import dataclass

from worker_hooks.reasons import HookError, HookReason
from worker_hooks.weights.memory import Handle, Lane, Pinned

GRANULARITY = 2 << 20
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_RESERVED = (0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class HostMemory:
    """See :class:`worker_hooks.weights.memory.DeviceMemory`.

    Args:
        capacity: how much there is for :meth:`create`, in bytes.
    """

    device = 0
    granularity = GRANULARITY

    def __init__(self, capacity: int = 1 << 40) -> None:
        self._capacity = capacity
        self._held: dict[int, _Held] = {}
        """What this process holds, by inode."""
        self._mapped: dict[int, int] = {}
        """Inode by address."""
        self._lock = threading.Lock()

    def enter(self) -> None:
        pass

    def free_bytes(self) -> int:
        return self._capacity - sum(held.size for held in self._held.values())

    def reserve(self, size: int) -> int:
        # One granule more than asked for, of which the parts before and behind the aligned range are let go.
        start = _map(0, size + GRANULARITY, *_RESERVED, -1)
        address = -(-start // GRANULARITY) * GRANULARITY
        if address > start:
            _libc.munmap(start, address - start)
        _libc.munmap(address + size, start + GRANULARITY - address)
        return address

    def give_back(self, address: int, size: int) -> None:
        _libc.munmap(address, size)

    def create(self, size: int) -> Handle:
        with self._lock:
            if size > self.free_bytes():
                raise HookError(HookReason.GPU_OUT_OF_MEMORY, f"{size} bytes are wanted, {self.free_bytes()} are free")
            descriptor = os.memfd_create("weights", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, size)
            return self._hold(descriptor)

    def release(self, handle: Handle) -> None:
        with self._lock:
            self._let_go(os.fstat(handle).st_ino)
        os.close(handle)

    def map(self, address: int, size: int, handle: Handle) -> None:
        held = os.fstat(handle).st_size
        if held != size:
            raise HookError(
                HookReason.WEIGHTS_LOAD_FAILED, f"memory of {held} bytes cannot be mapped to {size} bytes of addresses"
            )
        _map(address, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, handle)
        with self._lock:
            self._mapped[address] = inode = os.fstat(handle).st_ino
            self._held[inode].uses += 1

    def unmap(self, address: int, size: int) -> None:
        protection, flags = _RESERVED
        _map(address, size, protection, flags | _MAP_FIXED, -1)
        with self._lock:
            self._let_go(self._mapped.pop(address))

    def export(self, handle: Handle) -> int:
        return os.dup(handle)

    def take(self, descriptor: int) -> Handle:
        with self._lock:
            return self._hold(os.dup(descriptor))

    def pin(self, size: int) -> Pinned:
        return _HostPinned(size)

    def lane(self, buffers: int, buffer_bytes: int) -> Lane:
        return _HostLane(buffers, buffer_bytes)

    def _hold(self, descriptor: int) -> Handle:
        status = os.fstat(descriptor)
        self._held.setdefault(status.st_ino, _Held(status.st_size)).uses += 1
        return Handle(descriptor)

    def _let_go(self, inode: int) -> None:
        held = self._held[inode]
        held.uses -= 1
        if not held.uses:
            del self._held[inode]


@dataclass(slots=True)
class _Held:
    """One memory file, as long as it is mapped or has a handle."""

    size: int
    uses: int = 0


class _HostPinned:
    def __init__(self, size: int) -> None:
        memory = mmap.mmap(-1, size)
        self.view = memoryview(memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))

    def free(self) -> None:
        self.view.release()


class _HostLane:
    """Copies at once, so there is never anything to wait for."""

    def __init__(self, buffers: int, buffer_bytes: int) -> None:
        self._maps = [mmap.mmap(-1, buffer_bytes) for _ in range(buffers)]
        self.buffers = [memoryview(memory) for memory in self._maps]
        self._addresses = [ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in self._maps]

    def enter(self) -> None:
        pass

    def to_device(self, address: int, buffer: int, count: int) -> None:
        ctypes.memmove(address, self._addresses[buffer], count)

    def from_pinned(self, address: int, pinned: int, count: int) -> None:
        ctypes.memmove(address, pinned, count)

    def to_host(self, buffer: int, address: int, count: int) -> None:
        ctypes.memmove(self._addresses[buffer], address, count)

    def wait(self, buffer: int) -> None:
        pass

    def drain(self) -> None:
        pass

    def close(self) -> None:
        for view in self.buffers:
            view.release()


def _map(address: int, size: int, protection: int, flags: int, descriptor: int) -> int:
    mapped = _libc.mmap(address, size, protection, flags, descriptor, 0)
    if mapped is None or mapped == _FAILED:
        raise HookError(
            HookReason.WEIGHTS_LOAD_FAILED, f"{size} bytes cannot be mapped: {os.strerror(ctypes.get_errno())}"
        )
    return int(mapped)
