"""Why a worker failed or was refused: stable codes, each with what it means and what to do.

The agent passes them on as they are. A code that the domain model has too means the same there.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class HookReason(StrEnum):
    """Stable codes, the same in ``worker-state.json``, logs, exit messages and status."""

    BOOT_FAILED = "boot_failed"
    QUIESCE_FAILED = "quiesce_failed"
    PAUSE_UNSUPPORTED = "pause_unsupported"
    IO_URING_OPEN = "io_uring_open"
    OUTSIDE_SOCKET = "outside_socket"
    RUNTIME_THREAD = "runtime_thread"
    UNREOPENABLE_FILE = "unreopenable_file"
    RESTORE_CONTEXT_MISSING = "restore_context_missing"
    RESTORE_CONTEXT_CORRUPT = "restore_context_corrupt"
    INCARNATION_MISMATCH = "incarnation_mismatch"
    CHILD_SILENT = "child_silent"
    RESUME_FAILED = "resume_failed"
    SELF_TEST_FAILED = "self_test_failed"
    REGISTRATION_FAILED = "registration_failed"
    SERVER_UNREACHABLE = "server_unreachable"
    LEASE_LOST = "lease_lost"
    ENDPOINT_ENDED = "endpoint_ended"
    DRAIN_TIMED_OUT = "drain_timed_out"
    SYMBOLS_MISSING = "symbols_missing"
    COMMAND_INVALID = "command_invalid"
    CUDA_MISSING = "cuda_missing"
    GPU_OUT_OF_MEMORY = "gpu_out_of_memory"
    LOADER_DIED = "loader_died"
    WEIGHTS_CORRUPT = "weights_corrupt"
    WEIGHTS_LOAD_FAILED = "weights_load_failed"
    INTERNAL_ERROR = "internal_error"


class Explanation(NamedTuple):
    meaning: str
    remedy: str


EXPLANATIONS: dict[HookReason, Explanation] = {
    HookReason.BOOT_FAILED: Explanation(
        "The engine did not come up.", "The message and the worker's log name the engine's own error."
    ),
    HookReason.QUIESCE_FAILED: Explanation(
        "The engine could not give up what must not be captured.",
        "Mend the engine's quiesce; the worker ends, for an engine half quiesced cannot serve.",
    ),
    HookReason.PAUSE_UNSUPPORTED: Explanation(
        "The engine, in this version or as it was started, has no call that gives its GPU memory up.",
        "Nothing was given up: the worker serves, without a capture. The message says what the engine lacks.",
    ),
    HookReason.IO_URING_OPEN: Explanation(
        "The worker holds an io_uring, which CRIU cannot dump.",
        "Start it through the hooks, which block io_uring before the engine starts, or set kernel.io_uring_disabled=2.",
    ),
    HookReason.OUTSIDE_SOCKET: Explanation(
        "The worker holds an inet socket whose peer is outside its own process tree, or that others can reach.",
        "Close the connection in the engine's quiesce, or open it only after the restore.",
    ),
    HookReason.RUNTIME_THREAD: Explanation(
        "A Dynamo runtime is already running in the worker.",
        "Create the DistributedRuntime only after restore-complete.",
    ),
    HookReason.UNREOPENABLE_FILE: Explanation(
        "The worker holds a file that cannot be opened again at a restore.",
        "Close it in the engine's quiesce; open logs inside the replica's mount namespace; start without a terminal.",
    ),
    HookReason.RESTORE_CONTEXT_MISSING: Explanation(
        "restore-complete stands in the control directory, but restore-context.json does not.",
        "Whoever restores writes the context first.",
    ),
    HookReason.RESTORE_CONTEXT_CORRUPT: Explanation(
        "restore-context.json is not the object it has to be.",
        'Write {"env": {NAME: string or null}, "incarnation": string} in one rename.',
    ),
    HookReason.INCARNATION_MISMATCH: Explanation(
        "restore-complete, or wake, and restore-context.json name different incarnations.",
        "One of them is stale: restore into an empty control directory.",
    ),
    HookReason.CHILD_SILENT: Explanation(
        "A child process did not take over the new identity in time.",
        "See whether the child still runs and follows its link.",
    ),
    HookReason.RESUME_FAILED: Explanation(
        "The engine could not take back what it gave up at quiesce.", "The message names the engine's own error."
    ),
    HookReason.SELF_TEST_FAILED: Explanation(
        "The engine gave a wrong answer, or none, before registration; it was never routed to.",
        "If it repeats with one snapshot, that snapshot is bad: capture anew.",
    ),
    HookReason.REGISTRATION_FAILED: Explanation(
        "The worker did not appear in discovery in time.", "See whether etcd and NATS are reachable and not overloaded."
    ),
    HookReason.SERVER_UNREACHABLE: Explanation(
        "The runtime could not be opened: etcd or NATS does not answer.",
        "Check ETCD_ENDPOINTS and NATS_SERVER in the restore context.",
    ),
    HookReason.LEASE_LOST: Explanation(
        "The worker's lease in discovery ended while it ran; it left in order instead of serving unseen.",
        "Start it again. Frequent losses: raise the lease's TTL or give the host more CPU.",
    ),
    HookReason.ENDPOINT_ENDED: Explanation(
        "The endpoint stopped serving although nobody asked for it.", "The worker's log names the runtime's error."
    ),
    HookReason.DRAIN_TIMED_OUT: Explanation(
        "Requests were still in flight when the drain's time was over.", "Raise the pool's drain timeout."
    ),
    HookReason.SYMBOLS_MISSING: Explanation(
        "The module to run, or the Dynamo it runs on, lacks names that the hooks have to wrap.",
        "Install the engine and a Dynamo release that the hooks know.",
    ),
    HookReason.COMMAND_INVALID: Explanation(
        "The command after -- is not one that can run in this process.",
        "Give it as: python -m MODULE [ARGUMENT ...], for this very Python.",
    ),
    HookReason.CUDA_MISSING: Explanation(
        "The NVIDIA driver's library or its Python bindings (cuda-python) cannot be loaded here.",
        "Install `cuda-bindings` beside the engine.",
    ),
    HookReason.GPU_OUT_OF_MEMORY: Explanation(
        "The GPU has no room for the weights.", "Drain or park a replica there. The message has the figures."
    ),
    HookReason.LOADER_DIED: Explanation(
        "The node's weight loader ended before it had handed the weights over.",
        "Nothing: the worker loads them itself, only slower.",
    ),
    HookReason.WEIGHTS_CORRUPT: Explanation(
        "A weight segment is missing, truncated, or does not have its digest.",
        "Remove the snapshots that use it; the next cold start writes it anew.",
    ),
    HookReason.WEIGHTS_LOAD_FAILED: Explanation(
        "Weights could not be brought onto the GPU.", "The message has the read's or the driver's error."
    ),
    HookReason.INTERNAL_ERROR: Explanation("A bug, reported with its text.", "Report it with the worker's log."),
}


class HookError(Exception):
    """A failure with a reason; ``message`` names the thing and the cause, without a full stop."""

    def __init__(self, reason: HookReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message

    def __str__(self) -> str:
        return f"{self.message} [{self.reason}]. {EXPLANATIONS[self.reason].remedy}"
