"""The control directory: file names, variables, and how both sides write and wait.

The names are NVIDIA Snapshot's public contract and ``dynamo.common.snapshot``'s; a test holds them
against the installed ``dynamo.common.snapshot.constants``. ``worker-state.json`` is this project's
own addition: what the worker's lifecycle says, for the agent to read.
"""

from __future__ import annotations

CONTROL_DIR_ENV = "SNAPSHOT_CONTROL_DIR"
"""Set: the worker is to become ready-for-snapshot and wait there."""
LEGACY_CONTROL_DIR_ENV = "DYN_SNAPSHOT_CONTROL_DIR"
"""The same under Dynamo's older name; both are always set together."""
STANDBY_ENV = "SNAPSHOT_RESTORE_STANDBY"
STATE_DIR_ENV = "DYNAMO_SNAPSHOT_STATE_DIR"
"""Where the worker keeps ``worker-state.json``: its control directory, set whether or not a capture is wanted."""

READY_FOR_SNAPSHOT = "ready-for-snapshot"
SNAPSHOT_COMPLETE = "snapshot-complete"
RESTORE_COMPLETE = "restore-complete"
RESTORE_CONTEXT = "restore-context.json"
WORKER_STATE = "worker-state.json"
