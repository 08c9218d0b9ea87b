"""``fleet.yaml``, validated.

Every field states its unit in its name or its description; the reference in ``docs/`` is generated
from these models. :func:`load_fleet` refuses a wrong file with file, line, field and what was expected.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticKnownError

from dynamo_snapshot.config_source import Location, Source, Unreadable, parse
from dynamo_snapshot.config_wording import sentence
from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason

ETCD_ENV = "ETCD_ENDPOINTS"
NATS_ENV = "NATS_SERVER"
"""Dynamo's own variables for its servers."""

PLACEHOLDERS = ("{model_path}", "{model_name}", "{namespace}")
"""What is filled into a worker's command."""
_PLACEHOLDER = re.compile(r"(?<![${])\{[A-Za-z_][A-Za-z0-9_]*\}(?!\})")
"""A name in braces. A shell's ${NAME} and a template's {{name}} are the command's own, as is JSON."""

MOST = 2**53
"""No number may be larger: beyond it not every reader's numbers are exact."""


def _number(value: Any, kind: Literal["int_type", "float_type"] = "float_type") -> Any:
    """Refuses what pydantic would take for a number: true is no 1, and text is none."""
    if isinstance(value, (bool, str, bytes)):
        raise PydanticKnownError(kind)
    if isinstance(value, (int, float)) and value > MOST:
        if value == math.inf:
            raise PydanticKnownError("finite_number")
        raise PydanticKnownError("less_than_equal", {"le": MOST})
    return value


def _integer(value: Any) -> Any:
    return _number(value, "int_type")


Seconds = Annotated[float, Field(gt=0)]
Port = Annotated[int, BeforeValidator(_integer), Field(ge=1, le=65535)]
NAME_PATTERN = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"
Name = Annotated[str, Field(pattern=NAME_PATTERN)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _of_its_kind(cls, value: Any, field: ValidationInfo) -> Any:
        kinds = _kinds(cls.model_fields[field.field_name or ""].annotation)
        if bool in kinds and not isinstance(value, bool):
            raise PydanticKnownError("bool_type")
        return _number(value) if float in kinds else _integer(value) if int in kinds else value


def _kinds(annotation: Any) -> set[type]:
    """The types that a value of ``annotation`` may itself be of; none of what it may hold."""
    if get_origin(annotation) in (Annotated, Union, UnionType):
        return set().union(*map(_kinds, get_args(annotation)))
    return {annotation} if isinstance(annotation, type) else set()


class Role(StrEnum):
    """What a pool's workers do; the planner's *decode* also stands for aggregated workers."""

    DECODE = "decode"
    PREFILL = "prefill"


class Model(Section):
    name: str = Field(min_length=1, description="The name that requests use.")
    path: Path = Field(description="The model's folder; relative paths start at fleet.yaml's folder.")


class CapturePolicy(StrEnum):
    FIRST_WORKER = "first-worker"
    NEVER = "never"


class SnapshotPolicy(Section):
    capture: CapturePolicy = Field(
        CapturePolicy.FIRST_WORKER,
        description="first-worker: capture the first worker of a compatibility key, and again when the key changes.",
    )
    minimum_gain_s: float = Field(
        1.0,
        ge=0,
        description="Capture only where a restore is expected to beat a cold start by this many seconds.",
    )
    keep: int = Field(3, ge=1, description="How many snapshots of a pool to keep; the newest stay.")
    keep_for_s: Seconds | None = Field(None, description="Remove snapshots older than this, unless in use.")
    keep_bytes: int | None = Field(None, gt=0, description="Remove the oldest until all fit, unless in use.")
    quarantine_after: int = Field(
        2, ge=1, description="Failed restores in a row after which a snapshot is not used any more."
    )


class OrderDeadlines(Section):
    """How long the fleet gives one order before it gives it up, in seconds."""

    cold_start_s: Seconds = 600
    restore_s: Seconds = 60
    capture_s: Seconds = 300
    wake_s: Seconds = Field(30, description="A parked replica's way to serving; parking itself has restore_s.")
    prefetch_s: Seconds = 120
    drain_s: Seconds = 60
    kill_s: Seconds = 10


class Worker(Section):
    command: tuple[str, ...] = Field(
        min_length=1,
        description=f"What a cold start runs. {', '.join(PLACEHOLDERS[:-1])} and {PLACEHOLDERS[-1]} are filled in.",
    )
    environment: dict[str, str] = Field(default_factory=dict, description="Set beside the fleet's own variables.")
    memory_limit_bytes: int | None = Field(None, gt=0, description="The replica's cgroup limit, where the host allows.")
    gpus: int = Field(
        0, ge=0, description="GPUs that each worker gets, by CUDA_VISIBLE_DEVICES; 0: none are assigned to it."
    )
    boot_timeout_s: Seconds = Field(600, description="A cold start that takes longer is killed.")
    drain_timeout_s: Seconds = Field(30, description="What is in flight when a worker drains gets this long.")

    @field_validator("command")
    @classmethod
    def _placeholders(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for found in (name for word in value for name in _PLACEHOLDER.findall(word)):
            if found not in PLACEHOLDERS:
                raise ValueError(f"nothing is known to fill in for {found}; there are {', '.join(PLACEHOLDERS)}")
        return value


class Pool(Section):
    role: Role = Field(Role.DECODE, description="decode also stands for aggregated workers, which do both.")
    component: str = Field("backend", description="The Dynamo component its workers register as.")
    endpoint: str = Field("generate", description="The Dynamo endpoint its workers serve.")
    worker: Worker
    min_replicas: int = Field(1, ge=0, description="The target never goes below.")
    max_replicas: int = Field(8, ge=1, description="The target never goes above.")
    parked: int = Field(
        0,
        ge=0,
        le=64,
        description="Replicas kept parked beside those that serve: restored, out of discovery, on a GPU without their "
        "weights, and woken first when more are needed. Each takes host memory. A planner's hint may say otherwise.",
    )
    gpu_cost: float = Field(
        1.0,
        ge=0.001,
        description="What a GPU of this pool's type costs, beside those that planner.miss_cost_s counts in.",
    )
    snapshot: SnapshotPolicy = Field(default_factory=SnapshotPolicy)
    deadlines: OrderDeadlines = Field(default_factory=OrderDeadlines)
    max_attempts: int = Field(
        3, ge=1, description="Orders in a row that may fail for one replica before it is reported unachievable."
    )

    @model_validator(mode="after")
    def _bounds(self) -> Pool:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas ({self.min_replicas}) is above max_replicas ({self.max_replicas})")
        return self


class PhaseDeadlines(Section):
    """How long one phase of the agent's pipelines may take, in seconds; then it is killed."""

    default_s: Seconds = 30
    dump_s: Seconds = 120
    restore_s: Seconds = 60
    digest_s: Seconds = 300


class Gpu(Section):
    """What the agent does with this host's GPUs; of no effect where there is no NVIDIA driver."""

    enabled: bool = Field(True, description="false: no CUDA helper, no loader; CUDA processes cannot be captured.")
    replicas_per_gpu: int = Field(
        1, ge=1, description="Replicas that may be on one GPU at once, those on their way too."
    )
    lock_timeout_s: Seconds = Field(10, description="How long GPU work in flight may hold up a capture.")
    drop_zero_pages: bool = Field(True, description="Take zero pages out of a GPU worker's image before it is kept.")
    loader: bool = Field(
        True, description="Keep one weight loader per GPU, with a CUDA context; else workers load by themselves."
    )
    loader_lanes: int = Field(
        14,
        ge=1,
        description="A loader's threads that read and copy, at most; beside CRIU only as many as weights need "
        "to be there as soon as the process.",
    )
    loader_buffers: int = Field(3, ge=1, description="Pinned buffers of 16 MiB that each of these threads has.")
    loader_reading: Literal["auto", "page_cache", "direct"] = Field(
        "auto", description="auto: from the page cache if that holds the segments, else past it, with O_DIRECT."
    )
    pinned_segment_bytes: int = Field(
        0, ge=0, description="Host memory, in bytes, that a loader may pin to keep segments at hand."
    )


class Agent(Section):
    """Relative paths start at fleet.yaml's folder."""

    runtime_dir: Path = Field(Path("/run/dynamo-snapshot"), description="Houses, journal and bus of this host.")
    store_dir: Path = Field(Path("/var/lib/dynamo-snapshot/snapshots"), description="Published snapshots.")
    criu: Path | None = Field(None, description="The criu to run; else DYNAMO_SNAPSHOT_CRIU, the installed one, PATH.")
    max_concurrent_restores: int = Field(4, ge=1, description="Restores that may run at once on this host.")
    max_replicas: int = Field(64, ge=1, description="Replicas this host takes.")
    standby_houses: int = Field(
        0, ge=0, description="Houses made ahead, of some MiB each, so that a restore need not wait for the making."
    )
    minimum_free_bytes: int = Field(1 << 30, ge=0, description="Space that a capture must leave free in store_dir.")
    rpc_ports: tuple[Port, Port] = Field((20000, 29999), description="First and last TCP port for workers.")
    release_after_s: Seconds = Field(
        60, description="A worker that is ready-for-snapshot this long without a capture order goes on without one."
    )
    scrub_interval_s: Seconds = Field(3600, description="How often published snapshots are digested again.")
    deadlines: PhaseDeadlines = Field(default_factory=PhaseDeadlines)
    gpu: Gpu = Field(default_factory=Gpu)

    @field_validator("rpc_ports")
    @classmethod
    def _ordered(cls, value: tuple[int, int]) -> tuple[int, int]:
        if value[0] > value[1]:
            raise ValueError(f"the first port ({value[0]}) is above the last ({value[1]})")
        return value


class Servers(Section):
    etcd: str = Field("embedded", description="'embedded': started and stopped by `up`; otherwise a URL.")
    nats: str = Field("embedded", description="'embedded': started and stopped by `up`; otherwise a URL.")

    @field_validator("etcd", "nats")
    @classmethod
    def _url(cls, value: str, field: ValidationInfo) -> str:
        scheme, example = {"etcd": ("https?", "http://127.0.0.1:2379"), "nats": ("nats", "nats://127.0.0.1:4222")}[
            field.field_name or ""
        ]
        if value != "embedded" and not re.match(rf"^{scheme}://[^/\s]+:[0-9]{{1,5}}$", value):
            raise ValueError(f"expected 'embedded' or a URL with its port, such as {example}")
        return value

    def etcd_url(self, environment: Mapping[str, str]) -> str | None:
        """Where etcd is: the URL here, else the first of ``ETCD_ENDPOINTS``; None: nobody says."""
        return _server_url(self.etcd, environment, ETCD_ENV)

    def nats_url(self, environment: Mapping[str, str]) -> str | None:
        """Where NATS is: the URL here, else ``NATS_SERVER``; None: nobody says."""
        return _server_url(self.nats, environment, NATS_ENV)


class Frontend(Section):
    host: str = "127.0.0.1"
    port: Port = 8000
    router_mode: Literal["round-robin", "random", "kv", "least-loaded"] = "round-robin"
    migration_limit: int = Field(3, ge=0, description="How often a request may move to another worker.")


class ScalingPolicy(StrEnum):
    SNAPSHOT = "snapshot"
    DYNAMO_THROUGHPUT = "dynamo-throughput"
    DYNAMO_LATENCY = "dynamo-latency"


class Hints(StrEnum):
    NONE = "none"
    PREFETCH = "prefetch"
    PARK = "park"


class Planner(Section):
    policy: ScalingPolicy = Field(
        ScalingPolicy.SNAPSHOT,
        description="snapshot: this project's. dynamo-throughput, dynamo-latency: the load scaling built into Dynamo's "
        "planner with that optimization target, every 5 s, and none of the settings below but advisory.",
    )
    tick_s: float = Field(1.0, ge=0.05, le=60, description="Seconds between two decisions.")
    target_requests_per_replica: float = Field(
        4.0, gt=0, description="Queued and running requests that one replica should carry."
    )
    ttft_objective_s: Seconds | None = Field(
        None,
        description="Within it a request is to get its first token: sizes then follow predicted misses, and "
        "target_requests_per_replica only until the engines' speed is known.",
    )
    itl_objective_s: Seconds | None = Field(None, description="Within it the next token is to follow.")
    miss_cost_s: float = Field(
        10.0, ge=0, description="GPU-seconds that one request outside its objective is worth: higher keeps more ready."
    )
    scale_down_after_s: Seconds | None = Field(
        None, description="Lower need must be confirmed for this long; none: 4 with a ttft_objective_s, 20 without."
    )
    headroom_replicas: int = Field(0, ge=0, description="Replicas kept beyond the need.")
    gpu_budget: int | None = Field(
        None,
        ge=1,
        description="GPUs that all pools' targets together may take, each replica its worker's `gpus`, which every "
        "pool then has to set; none: only max_replicas bounds a pool.",
    )
    hints: Hints = Field(
        Hints.NONE,
        description="What is had ready for what may come but is not worth a replica that serves. prefetch: snapshots "
        "in nodes' memory. park: that, and parked replicas. Both need a ttft_objective_s.",
    )
    parked_most: int = Field(
        2,
        ge=0,
        le=64,
        description="With hints: park, a pool's parked replicas at the most; its own `parked` is the least.",
    )
    advisory: bool = Field(False, description="Decide and log, but change nothing.")

    @model_validator(mode="after")
    def _predicts(self) -> Planner:
        if self.hints is not Hints.NONE and self.ttft_objective_s is None:
            raise ValueError(f"hints: {self.hints} needs a ttft_objective_s: without one nothing is predicted")
        return self

    @model_validator(mode="after")
    def _keeps_budget(self) -> Planner:
        if self.gpu_budget is not None and self.policy is not ScalingPolicy.SNAPSHOT:
            raise ValueError(f"policy: {self.policy} keeps no gpu_budget: remove it, or take policy: snapshot")
        return self


class Metrics(Section):
    """Prometheus metrics of the controller and the agent; frontend and workers have Dynamo's own."""

    host: str = Field("127.0.0.1", description="The address on which they are read.")
    controller_port: int = Field(0, ge=0, le=65535, description="The controller's, at /metrics; 0: none.")
    agent_port: int = Field(0, ge=0, le=65535, description="The agent's, at /metrics; 0: none.")


class Fleet(Section):
    """A fleet on one host."""

    name: Name = "fleet"
    namespace: str = Field("dynamo", pattern=r"^[a-z0-9_-]+$", description="The Dynamo namespace.")
    model: Model
    pools: dict[Name, Pool] = Field(min_length=1)
    agent: Agent = Field(default_factory=Agent)
    servers: Servers = Field(default_factory=Servers)
    frontend: Frontend = Field(default_factory=Frontend)
    planner: Planner = Field(default_factory=Planner)
    metrics: Metrics = Field(default_factory=Metrics)
    lease_ttl_s: int = Field(10, ge=2, description="TTL of a worker's discovery lease.")

    @field_validator("pools")
    @classmethod
    def _roles(cls, value: dict[str, Pool]) -> dict[str, Pool]:
        roles = [pool.role for pool in value.values()]
        if Role.DECODE not in roles:
            raise ValueError("no pool has role decode, and prefill workers alone answer no request")
        for role in set(roles):
            if roles.count(role) > 1:
                raise ValueError(f"{roles.count(role)} pools have role {role}; the planner knows one pool a role")
        return value

    @field_validator("planner")
    @classmethod
    def _payable(cls, value: Planner, fields: ValidationInfo) -> Planner:
        pools: dict[str, Pool] | None = fields.data.get("pools")  # not there where they are wrong themselves
        if value.gpu_budget is not None and pools is not None:
            _require_payable(value.gpu_budget, pools)
        return value


def _require_payable(gpu_budget: int, pools: Mapping[str, Pool]) -> None:
    # A worker that is assigned none, by default, may be one that takes whatever GPU it finds.
    untold = [f"pools.{name}.worker.gpus" for name, pool in pools.items() if "gpus" not in pool.worker.model_fields_set]
    if untold:
        raise ValueError(
            f"gpu_budget counts each worker's gpus, and some are not told: set {', '.join(untold)}, "
            "to 0 where none is used"
        )
    cost = {name: pool.worker.gpus for name, pool in pools.items()}
    if not any(cost.values()):
        raise ValueError("gpu_budget bounds nothing, as worker.gpus of every pool is 0: remove it; max_replicas bounds")
    least = sum(pool.min_replicas * cost[name] for name, pool in pools.items())
    if gpu_budget < least:
        raise ValueError(
            f"gpu_budget ({gpu_budget}) is below the {least} GPUs that the pools' min_replicas take: "
            "raise it, or lower a min_replicas"
        )
    for name, pool in pools.items():
        if pool.min_replicas == 0 and gpu_budget < least + cost[name]:
            raise ValueError(
                f"gpu_budget ({gpu_budget}) is below the {least + cost[name]} GPUs that the pools' min_replicas and a "
                f"first replica of {name} take: raise it, or {name} never has one"
            )


def _server_url(configured: str, environment: Mapping[str, str], variable: str) -> str | None:
    # An embedded server has a port that only its starter knows; it sets Dynamo's own variable.
    return environment.get(variable, "").split(",")[0] or None if configured == "embedded" else configured


def load_fleet(path: Path) -> Fleet:
    """Reads and validates ``path``.

    Raises:
        SnapshotError: ``configuration_invalid``, with file, line, field and what was expected.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise _invalid(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise _invalid(f"{path}: not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}") from error
    try:
        source = parse(text)
    except Unreadable as error:
        where = "" if error.line is None else f":{error.line}"
        raise _invalid(f"{path}{where}: {error.problem}") from error
    if not isinstance(source.data, dict):
        raise _invalid(f"{path}:1: expected a mapping with at least 'model' and 'pools'")
    try:
        fleet = Fleet.model_validate(source.data)
    except ValidationError as error:
        raise _invalid("\n".join(_problems(path, source, error))) from error
    folder, agent = path.absolute().parent, fleet.agent
    # One spelling, whichever way leads to the file: processes are found again by the runtime folder's.
    paths = {name: (folder / getattr(agent, name)).resolve() for name in ("runtime_dir", "store_dir")}
    if agent.criu is not None:
        paths["criu"] = folder / agent.criu
    return fleet.model_copy(
        update={
            "model": fleet.model.model_copy(update={"path": (folder / fleet.model.path).resolve()}),
            "agent": agent.model_copy(update=paths),
        }
    )


def _invalid(message: str) -> SnapshotError:
    return SnapshotError(
        Reason.CONFIGURATION_INVALID, message, "docs/fleet-reference.md lists every field with its unit and default."
    )


def _problems(path: Path, source: Source, error: ValidationError) -> Iterator[str]:
    problems = error.errors()
    # A list is also called too short where its entries are wrong, and so do not count.
    entries = {problem["loc"][:-1] for problem in problems}
    for problem in problems:
        if problem["type"] == "too_short" and problem["loc"] in entries:
            continue
        location = tuple(part for part in problem["loc"] if part != "[key]")  # the key itself is what is wrong
        field = ".".join(str(part) for part in location) or "(top level)"
        known = _fields_at(location[:-1]) if location else ()
        yield f"{path}:{source.line_of(location)}: {field}: {sentence(problem, known)}"


def _fields_at(location: Location) -> tuple[str, ...]:
    """The fields that the section at ``location`` may have; none where there is no section."""
    kind: Any = Fleet
    for part in location:
        section = isinstance(kind, type) and issubclass(kind, Section)
        kind = kind.model_fields[part].annotation if section and part in kind.model_fields else get_args(kind)[-1:]
        kind = kind[0] if isinstance(kind, tuple) and kind else kind
    return tuple(kind.model_fields) if isinstance(kind, type) and issubclass(kind, Section) else ()
