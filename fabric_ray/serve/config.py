"""Configuration of a deployment: :class:`ServeArgs`, from Python, YAML or the command line."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from typing_extensions import Self

from fabric_ray.engine import EngineConfig
from fabric_ray.errors import InvalidArgument
from fabric_ray.inference.spec import MAX_PAGE_TOKENS, MAX_PAGES, Buffers, CacheDType, Order


class _Args(BaseModel):
    # What a field was given may be a token that stands in the wrong place.
    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True
    )


class CacheArgs(_Args):
    """A paged cache. Prefillers and decoders may differ in all but the dtype."""

    page_tokens: int = Field(default=16, ge=1, le=MAX_PAGE_TOKENS)
    """Tokens per page."""

    pages: int = Field(default=512, ge=1, le=MAX_PAGES)
    """Pages of each group of layers."""

    window_pages: int | None = Field(default=None, ge=1, le=MAX_PAGES)
    """Pages of each group with a sliding window; ``pages`` by default."""

    order: Order = "heads_first"
    """Order of pages, heads and tokens in memory."""

    buffers: Buffers = "one"
    """One buffer, one for keys and one for values, or one for each layer."""

    dtype: CacheDType | None = None
    """The model's by default."""


class TermsArgs(_Args):
    """Heartbeats and limits between prefillers and decoders."""

    beat: float = Field(default=0.5, ge=0.001, le=3600)
    """Heartbeat interval, in seconds."""

    silence: float = Field(default=5.0, gt=0, le=1e6)
    """Heartbeat timeout, in seconds. A silent peer's reservations are released after it."""

    max_message: int = Field(default=4 << 20, ge=4096, le=1 << 28)
    """Most bytes of one request; each token of a prompt takes up to five."""

    @model_validator(mode="after")
    def _two_beats(self) -> Self:
        if self.silence < 2 * self.beat:
            raise ValueError(
                f"silence: got {self.silence} s, expected at least two beats of {self.beat} s"
            )
        return self


class PrefillArgs(_Args):
    """Replicas that compute prompts."""

    tp: int = Field(default=1, ge=1, le=1024)
    """Tensor-parallel ranks of a replica, all in its process."""

    cache: CacheArgs = CacheArgs()

    chunk_tokens: int = Field(default=256, ge=1, le=1 << 20)
    """Tokens of one pass; the next pass computes a chunk of another prompt, if there is one."""

    max_running: int = Field(default=8, ge=1, le=4096)
    """Most prompts that are computed or sent at the same time."""

    max_queue: int = Field(default=64, ge=0, le=1 << 20)
    """Most queued prompts; further ones are refused, and their decoders ask another replica."""

    stuck_after: float = Field(default=120.0, gt=0)
    """Seconds that one pass may take before the replica counts as unhealthy."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Of its deployment: ``num_replicas``, ``autoscaling_config``, ``ray_actor_options``..."""


class DecodeArgs(_Args):
    """Replicas that generate tokens."""

    tp: int = Field(default=1, ge=1, le=1024)
    """Tensor-parallel ranks of a replica, all in its process."""

    cache: CacheArgs = CacheArgs()

    max_running: int = Field(default=32, ge=1, le=4096)
    """Most requests that have pages at the same time; also the largest batch."""

    max_queue: int = Field(default=64, ge=0, le=1 << 20)
    """Most requests that wait for pages; further ones fail as busy."""

    queue_timeout: float = Field(default=30.0, gt=0)
    """Seconds that a request may wait for pages."""

    prefill_timeout: float = Field(default=30.0, gt=0)
    """Seconds that one prefiller has for a prompt."""

    prefill_attempts: int = Field(default=4, ge=1, le=100)
    """Prefillers that are tried in turn for one prompt before the request fails."""

    avoid_lost: float = Field(default=15.0, ge=0)
    """Seconds for which a lost prefiller is avoided. Where all are lost, one prompt at a time
    probes them; the others fail with the cause of each loss."""

    stuck_after: float = Field(default=120.0, gt=0)
    """Seconds that one step may take before the replica counts as unhealthy."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Of its deployment: ``num_replicas``, ``autoscaling_config``, ``ray_actor_options``..."""


class RouterArgs(_Args):
    """Replicas that serve HTTP."""

    default_max_tokens: int = Field(default=16, ge=1)
    """``max_tokens`` of a completion that doesn't set it; 16 is OpenAI's default."""

    default_chat_tokens: int = Field(default=1024, ge=1)
    """The same of a chat, less where a decoder's pages have less room beside the prompt."""

    max_tokens: int = Field(default=4096, ge=1, le=1 << 24)
    """The largest ``max_tokens`` of a request."""

    max_requests: int = Field(default=256, ge=1, le=1 << 20)
    """Most open requests of a replica; further ones get status 429."""

    max_body: int = Field(default=16 << 20, ge=1024, le=1 << 30)
    """Most bytes of a body; longer ones get status 413. A prompt of token ids takes up to seven
    bytes for each."""

    body_timeout: float = Field(default=30.0, gt=0)
    """Seconds from a request's headers to the end of its body; later ones get status 408. A body
    that is being read holds no request slot."""

    retry_after: int = Field(default=1, ge=0, le=3600)
    """Seconds in the ``Retry-After`` header of a refusal."""

    attempts: int = Field(default=3, ge=1, le=100)
    """Decoders that are tried for one request until its client has a token."""

    prefix_blocks: int = Field(default=64, ge=0, le=1 << 16)
    """Leading blocks of a prompt that decide its decoder; 0 routes by load alone."""

    prefix_slack: int = Field(default=4, ge=0)
    """How many requests more than the least loaded decoder one may have and still be preferred for
    its prefix."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Of its deployment: ``num_replicas``, ``autoscaling_config``, ``ray_actor_options``..."""


class ServeArgs(_Args):
    """A disaggregated deployment."""

    model: str = "tiny-llama"
    """A directory with ``config.json`` and safetensors, or a small model's name: ``tiny-llama``,
    ``tiny-qwen3``, ``tiny-qwen3-moe``, ``tiny-mla``, ``tiny-hybrid``."""

    seed: int = 0
    """Of the weights of a small model."""

    revision: str | None = None
    """Names the weights of a directory; a digest of the files by default."""

    engine: str | None = Field(default=None, pattern=r"^[\w.]+:\w+$")
    """``module:factory`` of an :class:`~fabric_ray.serve.EngineFactory` of your own, which makes
    the engines of prefillers and decoders; ``model`` is what the factory makes of it then. The
    reference engine by default."""

    chat_template: str | None = None
    """A file with a Jinja template for ``/v1/chat/completions``; the checkpoint's by default."""

    name: str | None = None
    """What clients call the model; the last part of ``model`` by default."""

    dtype: CacheDType | None = None
    """Of weights and activations; the checkpoint's by default."""

    prefill: PrefillArgs = PrefillArgs()
    decode: DecodeArgs = DecodeArgs()
    router: RouterArgs = RouterArgs()
    terms: TermsArgs = TermsArgs()

    fabric: EngineConfig = EngineConfig(name="fabric-ray-serve")
    """Transfer engines of prefillers and decoders: transports, ``require``, NICs... The token and
    the address are Ray's by default."""

    torch_threads: int | None = Field(default=None, ge=1, le=1024)
    """Threads that torch computes with in each replica; torch's choice by default."""

    @field_validator("model")
    @classmethod
    def _not_empty(cls, value: str) -> str:
        if not value.strip():
            raise ValueError("name a directory, or a small model such as tiny-llama")
        return value

    def revealed(self) -> dict[str, Any]:
        """The fields that were set as plain values, the token of ``fabric`` among them: what
        another process builds the application from. Dumps leave the token out.

        Raises:
            InvalidArgument: the token isn't text, which plain values must be.
        """
        fields = self.model_dump(mode="json", exclude_unset=True)
        if self.fabric.token is not None and "fabric" in fields:
            try:
                fields["fabric"]["token"] = self.fabric.token.decode()
            except UnicodeDecodeError:
                raise InvalidArgument(
                    "fabric.token is not UTF-8, and the arguments of an application are plain "
                    "text; give its hex digits, or set FABRIC_RAY_TOKEN in the replicas"
                ) from None
        return fields

    @property
    def model_id(self) -> str:
        """What clients call the model."""
        return self.name or Path(self.model).name

    @classmethod
    def from_file(cls, path: Path | str) -> Self:
        """From a YAML file that holds these fields.

        Raises:
            ValidationError: fields that there aren't, or values that they can't have.
        """
        import yaml  # type: ignore[import-untyped]

        return cls.model_validate(yaml.safe_load(Path(path).read_text()) or {})
