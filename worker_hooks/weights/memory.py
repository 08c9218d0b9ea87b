"""Device memory that can be unmapped and mapped again at the same address: what arenas and loaders need of a device.

:class:`worker_hooks.weights.cuda_memory.CudaMemory` is a GPU; :class:`worker_hooks.weights.host_memory.HostMemory`
is the same on host memory, for machines without one.
"""

from __future__ import annotations

from typing import NewType, Protocol

Handle = NewType("Handle", int)
"""Names physical memory; it lives until it is released *and* unmapped everywhere, in every process."""


class Pinned(Protocol):
    """Host memory that a device copies from at full speed."""

    view: memoryview
    address: int

    def free(self) -> None:
        """Gives it back; nothing may be copying from it."""


class Lane(Protocol):
    """Pinned buffers and a queue of copies, for one thread at a time."""

    buffers: list[memoryview]
    """Writable, page-aligned, all of one size."""

    def enter(self) -> None:
        """To be called in the thread that uses the lane, before anything else."""

    def to_device(self, address: int, buffer: int, count: int) -> None:
        """Queues a copy of the first ``count`` bytes of buffer number ``buffer`` to device ``address``."""

    def from_pinned(self, address: int, pinned: int, count: int) -> None:
        """Queues a copy of ``count`` bytes from pinned host memory at address ``pinned`` to device ``address``."""

    def to_host(self, buffer: int, address: int, count: int) -> None:
        """Queues a copy from device ``address`` into a buffer."""

    def wait(self, buffer: int) -> None:
        """Returns when the last copy queued with that buffer is done; at once if there was none."""

    def drain(self) -> None:
        """Returns when every queued copy is done."""

    def close(self) -> None:
        """Waits for its copies and gives the buffers back."""


class DeviceMemory(Protocol):
    """One device's physical memory and its address space in this process. Errors are ``HookError``."""

    device: int
    granularity: int
    """Sizes and addresses are multiples of this."""

    def enter(self) -> None:
        """To be called in each thread that uses the device, before anything else."""

    def free_bytes(self) -> int: ...

    def reserve(self, size: int) -> int:
        """Returns the start of ``size`` bytes of addresses that nothing else will get."""

    def give_back(self, address: int, size: int) -> None:
        """Ends a reservation."""

    def create(self, size: int) -> Handle:
        """Returns new physical memory that other processes can be given; raises ``gpu_out_of_memory``."""

    def release(self, handle: Handle) -> None: ...

    def map(self, address: int, size: int, handle: Handle) -> None:
        """Puts the whole of ``handle`` at reserved addresses, readable and writable."""

    def unmap(self, address: int, size: int) -> None:
        """Takes memory away from its addresses, which stay reserved; nothing may be using it."""

    def export(self, handle: Handle) -> int:
        """Returns a file descriptor that stands for the memory; the caller closes it."""

    def take(self, descriptor: int) -> Handle:
        """Returns the memory that another process exported; ``descriptor`` stays the caller's."""

    def pin(self, size: int) -> Pinned:
        """Returns pinned host memory; slow (seconds for some GiB)."""

    def lane(self, buffers: int, buffer_bytes: int) -> Lane: ...


def rounded(size: int, granularity: int) -> int:
    """Returns ``size`` rounded up to a multiple of ``granularity``."""
    return -(-size // granularity) * granularity
