"""What users configure of the KV connector: ``kv_connector_extra_config``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from typing_extensions import Self

from fabric_ray.errors import InvalidArgument
from fabric_ray.kvcache import Terms


class KvConnectorConfig(BaseModel):
    """Every field has a default; both ends of a transfer need the same :attr:`model` and beats
    that fit."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    model: str | None = None
    """What the pages are of; ends that differ in it refuse each other. By default the model's name
    and revision, as vLLM was given them: name it where the two ends load it from other paths."""

    timeout: float = Field(default=120.0, gt=0)
    """Seconds that a decoder waits for the pages of a request, prefill included."""

    lease: float = Field(default=60.0, gt=0)
    """Seconds that a prefiller keeps the pages of a finished request for a decoder that hasn't
    asked yet. Decoders renew the leases of requests in their queues, and need none once they have
    asked."""

    engine: dict[str, Any] = Field(default_factory=dict, repr=False, exclude=True)
    """Fields of :class:`fabric_ray.EngineConfig` for the engines of the workers. In no dump and no
    repr: a token may be among them."""

    offer_file: str | None = None
    """Where the scheduler of a prefiller leaves its offer, as text, for a deployment that tells
    decoders of it before there are requests. Ray Serve LLM's back end sets it."""

    terms: Terms = Field(default_factory=Terms)
    """What each end holds the other to; tails aren't used here."""

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Checks what vLLM was given.

        Raises:
            InvalidArgument: a field that there isn't, or with a value that it can't have.
        """
        try:
            config = cls.model_validate(dict(given))
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"])
            fields = [*cls.model_fields]
            if first["loc"][0] == "terms":
                fields = [f"terms.{name}" for name in Terms.model_fields if name != "tail_nbytes"]
            raise InvalidArgument(
                f"kv_connector_extra_config, field `{field}`: {first['msg'].lower()}; the fields "
                f"are {', '.join(fields)}"
            ) from None
        if config.terms.tail_nbytes:
            raise InvalidArgument(
                "kv_connector_extra_config, field `terms.tail_nbytes`: vLLM's decoders compute the "
                "last token again, so no tail is sent; leave it out"
            )
        return config
