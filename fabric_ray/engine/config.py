"""How an engine is opened: explicit arguments, then ``FABRIC_RAY_*`` variables, then defaults."""

from __future__ import annotations

import os
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

TransportName = Literal["shm", "tcp"]

_ENVIRONMENT = {
    "name": "FABRIC_RAY_NAME",
    "transport": "FABRIC_RAY_TRANSPORT",
    "require": "FABRIC_RAY_REQUIRE",
    "token": "FABRIC_RAY_TOKEN",
    "spin": "FABRIC_RAY_SPIN",
    "copy_threads": "FABRIC_RAY_COPY_THREADS",
    "tcp_streams": "FABRIC_RAY_TCP_STREAMS",
}


class EngineConfig(BaseModel):
    """Every field has a default that suits a laptop and a cluster alike."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(default_factory=lambda: f"engine-{os.getpid()}", max_length=128)
    """For people and logs; two engines may share one."""

    transport: Literal["auto", "shm", "tcp"] = "auto"
    """``auto`` takes shared memory where a handshake proves that both are on one host, else tcp."""

    require: Literal["shm", "tcp", "rdma"] | None = None
    """A transport that must be usable, or the engine doesn't open."""

    token: bytes | None = None
    """Shared secret of the handshake. Without one, tcp listens on loopback only."""

    bind: tuple[str, ...] = ()
    """Local addresses that tcp listens on; all when empty and a token is set."""

    tcp_streams: int = Field(default=2, ge=1, le=15)
    """Connections for bulk to each peer, beside one for small frames."""

    spin: float | Literal["always"] = Field(default=50.0)
    """Microseconds that threads look for work before they sleep, or ``always``."""

    copy_threads: int | None = Field(default=None, ge=1, le=256)
    """Threads that may copy at once over shm; by default one per core, at most 4."""

    inline_bytes: int = Field(default=1 << 20, ge=0)
    """A submit call copies at most this many bytes before it returns."""

    peer_timeout: float = Field(default=2.0, gt=0)
    """Seconds of silence after which a tcp peer is lost."""

    op_timeout: float = Field(default=60.0, gt=0)
    """Seconds until transfers and expectations that name no deadline fail."""

    @field_validator("token", mode="before")
    @classmethod
    def _token_from_text(cls, value: object) -> object:
        return value.encode() if isinstance(value, str) else value

    @field_validator("spin")
    @classmethod
    def _spin_is_a_length(cls, value: float | str) -> float | str:
        if isinstance(value, float) and not 0 <= value <= 1e9:
            raise ValueError("spin must be between 0 and 1e9 microseconds, or 'always'")
        return value

    @classmethod
    def resolve(cls, config: EngineConfig | None, overrides: dict[str, object]) -> EngineConfig:
        """``overrides`` over ``config`` over the environment over the defaults."""
        values: dict[str, object] = {
            field: os.environ[variable]
            for field, variable in _ENVIRONMENT.items()
            if os.environ.get(variable)
        }
        if config is not None:
            values |= config.model_dump(exclude_unset=True)
        values |= overrides
        return cls.model_validate(values)

    @property
    def transports(self) -> list[str]:
        return ["shm", "tcp"] if self.transport == "auto" else [self.transport]
