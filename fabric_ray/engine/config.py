"""How an engine is opened: explicit arguments, then ``FABRIC_RAY_*`` variables, then defaults."""

from __future__ import annotations

import functools
import logging
import os
import reprlib
import socket
from difflib import get_close_matches
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from fabric_ray.errors import InvalidArgument

logger = logging.getLogger(__name__)

PortNumber = Annotated[int, Field(ge=1, le=65535)]
TransportName = Literal["cuda_ipc", "shm", "verbs", "libfabric", "tcp", "file"]

_MOST_BYTES = 1 << 62
_LONGEST_S = 1e9
# A peer speaks four times as often. Below this, being scheduled takes longer.
_SHORTEST_SILENCE_S = 0.01
_PREFIX = "FABRIC_RAY_"
# Variables that are read elsewhere than in an EngineConfig.
_OTHER_VARIABLES = tuple(
    _PREFIX + name
    for name in ("KERNEL_CACHE", "LIBFABRIC", "NVRTC", "OBSERVE", "RDT_POOL_BYTES", "RUN_DIR")
)
# Other names with the prefix are common: Kubernetes gives FABRIC_RAY_SERVICE_HOST to every pod
# beside a service called fabric-ray.
_MISSPELT_FROM = 0.75


def _default_name() -> str:
    # Each container has a process 1: by its id alone, all would be one series in a dashboard.
    return f"engine-{socket.gethostname()[:64]}-{os.getpid()}"


class _NoToken:
    """In place of a token that is neither text nor bytes."""

    def __repr__(self) -> str:
        return "<hidden>"


class EngineConfig(BaseModel):
    """Every field has a default that suits a laptop and a cluster alike.

    The environment may give any of them: ``FABRIC_RAY_`` and the field's name in capitals
    (``rail_rules`` is ``FABRIC_RAY_RAILS``).
    """

    # What a field was given may be a token under a name that there isn't.
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    name: str = Field(default_factory=_default_name, max_length=128)
    """For people, logs and labels of metrics; two engines may share one."""

    transport: Literal["auto"] | tuple[TransportName, ...] = "auto"
    """Allowed transports, the preferred first (one name, or several with commas between).

    ``auto`` takes shared memory where a handshake proves that both are on one host (``cuda_ipc``
    where both processes use CUDA before the engine opens, else ``shm``), else RDMA NICs (verbs,
    then libfabric), and tcp where one side has none. Two sides whose NICs can't speak to each
    other are an error unless ``tcp`` is named here. ``file`` alone makes an engine that reaches its
    own files and memory only; every other engine has it as well.
    """

    require: TransportName | Literal["rdma"] | None = None
    """A transport that must be usable, or the engine doesn't open."""

    token: bytes | None = Field(default=None, repr=False, exclude=True)
    """Shared secret of the handshake, 128 random bits at least. Without one, only processes of the
    same user on the same host are peers, and tcp listens on loopback only. It is in no dump and no
    repr: :meth:`revealed` has it."""

    bind: tuple[str, ...] = ()
    """Local addresses that tcp listens on. When empty and a token is set: those of this machine's
    interfaces, which peers are told, and loopback. ``0.0.0.0`` or ``::``: all there will be."""

    ports: tuple[PortNumber, PortNumber] | None = None
    """The first and the last port to listen at, for firewalls that must name them (``20000-20099``,
    or one number, in the environment); by default the kernel chooses. An engine takes one for tcp,
    the same at all addresses, and one for the side channel of each verbs NIC."""

    tcp_streams: int = Field(default=2, ge=1, le=15)
    """Connections for bulk to each peer, beside one for small frames. More of them fill bonds of
    links, and networks that limit each connection."""

    spin: float | Literal["always"] = Field(default=50.0)
    """Microseconds that threads look for work before they sleep, or ``always``."""

    copy_threads: int | None = Field(default=None, ge=1, le=256)
    """Threads that may copy at once over shm; by default one per core, at most 4."""

    inline_bytes: int = Field(default=1 << 20, ge=0, le=_MOST_BYTES)
    """A submit call copies at most this many bytes before it returns."""

    stage_foreign: bool = False
    """Memory that the engine didn't allocate is reached through windows that its owner copies
    from, not by the kernel (process_vm_writev): for processes that may not trace each other, such
    as those of two containers."""

    peer_timeout: float = Field(default=2.0, ge=_SHORTEST_SILENCE_S, le=_LONGEST_S)
    """Seconds of silence after which a peer over tcp or a NIC is lost, 0.01 at least. Time in which
    this process did not run does not count."""

    op_timeout: float = Field(default=60.0, gt=0, le=_LONGEST_S)
    """Seconds until transfers and expectations that name no deadline fail."""

    heal: bool = True
    """Lost links are replaced and what they carried is sent again; without it, it fails at once."""

    rail_window: int = Field(default=16 << 20, ge=64 << 10, le=_MOST_BYTES)
    """Bytes that may be under way on one NIC or tcp peer (five of the largest slices at least):
    what is urgent waits behind no more than that."""

    receive_window: int = Field(default=64 << 20, ge=64 << 10, le=_MOST_BYTES)
    """Bytes that may be on their way to this engine, divided among the peers that send it much."""

    records: int = Field(default=4096, ge=0, le=1 << 20)
    """How many transfers the flight recorder keeps, and as many arrivals; 0 turns it off."""

    nics: tuple[str, ...] = ()
    """NICs by name or glob (``mlx5_*``) in the order of the rails; by topology when empty."""

    max_rails: int = Field(default=4, ge=1, le=4)
    """At most this many NICs side by side."""

    spray: Literal["adaptive", "round_robin", "random"] = "adaptive"
    """Which NIC takes the next slice of a large write: the one that will be done with it first, or,
    for comparison, each in its turn or any."""

    gpu: str | None = None
    """PCI address of the GPU that the engine serves, for the choice of NICs."""

    rail_rules: str | None = None
    """Rules that override the topology, such as ``gpu0=mlx5_0,mlx5_1; exclude=mlx5_bond_*``."""

    gid_index: int | None = Field(default=None, ge=0, le=255)
    """RoCE GID; by default the best one found, which ``fabric-ray doctor`` explains."""

    pkey_index: int = Field(default=0, ge=0, le=65535)
    """InfiniBand partition."""

    service_level: int = Field(default=0, ge=0, le=15)
    """InfiniBand service level."""

    traffic_class: int = Field(default=0, ge=0, le=255)
    """RoCE traffic class: DSCP in the upper six bits."""

    libfabric_provider: str | None = None
    """A provider of libfabric (``efa``, ``tcp``, ``shm``, ``verbs;ofi_rxm``); efa by default."""

    @model_validator(mode="before")
    @classmethod
    def _token_from_text(cls, values: object) -> object:
        # Here and not at the field: errors of a field show what it was given.
        if isinstance(values, dict) and (token := values.get("token")) is not None:
            text = token.encode() if isinstance(token, str) else token
            return values | {"token": text if isinstance(text, bytes) else _NoToken()}
        return values

    @field_validator("transport", mode="before")
    @classmethod
    def _known_transports(cls, value: object) -> object:
        known = get_args(TransportName)
        for name in value if isinstance(value, tuple | list) else ():
            if isinstance(name, str) and name not in known:
                near = get_close_matches(name, known, n=1)
                advice = (
                    f"did you mean {near[0]!r}?"
                    if near
                    else f"name some of {', '.join(map(repr, known))}"
                )
                if name == "rdma":
                    advice = "leave transport at 'auto' and set require='rdma'"
                raise ValueError(f"unknown transport {name!r}; {advice}")
        return value

    @field_validator("transport", "nics", "bind", mode="before")
    @classmethod
    def _several_from_text(cls, value: object) -> object:
        if isinstance(value, str) and value != "auto":
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value

    @field_validator("ports", mode="before")
    @classmethod
    def _ports_from_text(cls, value: object) -> object:
        if isinstance(value, str):
            first, dash, last = (part.strip() for part in value.partition("-"))
            if not first.isdecimal() or (dash and not last.isdecimal()):
                raise ValueError("give one port, or the first and the last: 20000-20099")
            return first, last if dash else first
        return (value, value) if isinstance(value, int) else value

    @field_validator("ports")
    @classmethod
    def _ports_are_a_range(cls, value: tuple[int, int] | None) -> tuple[int, int] | None:
        if value is not None and value[0] > value[1]:
            raise ValueError("name the first port, then the last: 20000-20099")
        return value

    @field_validator("transport")
    @classmethod
    def _some_transport(cls, value: object) -> object:
        if value == ():
            raise ValueError("name at least one transport, or 'auto'")
        return value

    @field_validator("spin")
    @classmethod
    def _spin_is_a_length(cls, value: float | str) -> float | str:
        if isinstance(value, float) and not 0 <= value <= 1e9:
            raise ValueError("spin must be between 0 and 1e9 microseconds, or 'always'")
        return value

    @classmethod
    def resolve(cls, config: EngineConfig | None, overrides: dict[str, object]) -> EngineConfig:
        """``overrides`` over ``config`` over the environment over the defaults.

        Raises:
            InvalidArgument: a field that there isn't, or with a value that it can't have; named as
                it was given, the variable if it came from the environment.
        """
        if config is not None and not isinstance(config, EngineConfig):
            raise InvalidArgument(
                f"an engine is configured by an EngineConfig, not by a {type(config).__name__}; "
                "or name its fields: TransferEngine(transport='tcp')"
            )
        _warn_of_misspelt(frozenset(name for name in os.environ if name.startswith(_PREFIX)))
        given: dict[str, object] = dict(overrides)
        if config is not None:
            given = config.revealed() | given
        environment = {
            field: value
            for field in cls.model_fields
            if field not in given and (value := os.environ.get(_variable(field)))
        }
        try:
            return cls.model_validate(environment | given)
        except ValidationError as error:
            raise InvalidArgument(_complaint(error, environment | given, environment)) from None

    def revealed(self) -> dict[str, Any]:
        """The fields that were set, the token among them: what another process opens an engine
        with. Dumps leave the token out."""
        return {field: getattr(self, field) for field in self.model_fields_set}

    @property
    def transports(self) -> list[str]:
        """Those that were named, in order; none for ``auto``."""
        return [] if self.transport == "auto" else list(self.transport)

    @property
    def spin_us(self) -> int | None:
        """Microseconds that threads look for work; ``None`` for ``always``."""
        return None if self.spin == "always" else int(float(self.spin))


def _variable(field: str) -> str:
    return _PREFIX + ("RAILS" if field == "rail_rules" else field.upper())


@functools.cache  # once in a process
def _warn_of_misspelt(names: frozenset[str]) -> None:
    """Logs each of ``names`` that is not read and resembles one that is."""
    read = {_PREFIX + field.upper(): _variable(field) for field in EngineConfig.model_fields}
    read |= {name: name for name in (*read.values(), *_OTHER_VARIABLES)}
    for name in sorted(names - set(read.values())):
        if near := get_close_matches(name.removeprefix(_PREFIX), _words(read), 1, _MISSPELT_FROM):
            meant = read[_PREFIX + near[0]]
            logger.warning(
                "%s has no effect: there is no such variable; did you mean %s?", name, meant
            )


def _words(variables: dict[str, str]) -> list[str]:
    return [name.removeprefix(_PREFIX) for name in variables]


def _complaint(
    error: ValidationError, values: dict[str, object], environment: dict[str, str]
) -> str:
    """What is wrong with each field, one after the other."""
    causes: dict[str, list[str]] = {}
    # A token may have come under a name that there isn't.
    hidden = {"token"}
    for wrong in error.errors(include_url=False, include_context=False):
        field, cause = str(wrong["loc"][0]), wrong["msg"].removeprefix("Value error, ")
        if wrong["type"] == "extra_forbidden":
            hidden.add(field)
            near = get_close_matches(field, EngineConfig.model_fields, n=1)
            cause = f"there is no such option{''.join(f'; did you mean {n}?' for n in near)}"
        causes.setdefault(field, []).append(cause[0].lower() + cause[1:])
    return "; ".join(
        f"{_variable(field) if field in environment else field}"
        f"{'' if field in hidden else f'={reprlib.repr(values[field])}'}: "
        + ", or ".join(dict.fromkeys(said))
        for field, said in causes.items()
    )
