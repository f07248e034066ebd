"""Sizes of buffers, and DeepEP's tuning object."""

from __future__ import annotations

from dataclasses import dataclass

from fabric_ray.errors import InvalidArgument

MAX_TOPK = 16
"""Most experts of a token in size hints; DeepEP's models have 8."""
PRIVATE_ROWS = 32

_PAGE = 4096
_ALIGN = 16
_BLOCK = 64
_AREAS = 7


def up(n: int, multiple: int) -> int:
    """The least multiple that isn't below ``n``."""
    return -(-n // multiple) * multiple


def exchange_nbytes(
    *, ranks: int, experts: int, topk: int, max_tokens: int, row_nbytes: int, answer_nbytes: int
) -> int:
    """An upper bound of the bytes of one rank's exchange, less than 32 KiB above them."""
    local = experts // ranks
    row, answer = up(row_nbytes, _ALIGN), up(answer_nbytes, _ALIGN)
    pair = max_tokens * min(topk, local)
    routes = 2 * ranks * (up((4 + local) * 4, _BLOCK) + _BLOCK)
    private = ranks * min(PRIVATE_ROWS, pair) * row
    places = ranks * pair + max_tokens * topk
    return routes + private + places * max(row, answer) + _AREAS * _PAGE


def low_latency_nbytes(max_tokens: int, hidden: int, ranks: int, experts: int) -> int:
    """Bytes of the two exchanges that low-latency calls alternate between, for bfloat16 tokens of
    up to :data:`MAX_TOPK` experts."""
    one = exchange_nbytes(
        ranks=ranks,
        experts=experts,
        topk=min(MAX_TOPK, experts),
        max_tokens=max_tokens,
        row_nbytes=hidden * 2 + 8,
        answer_nbytes=hidden * 2,
    )
    return 2 * one


@dataclass(frozen=True)
class Config:
    """DeepEP's tuning of normal calls. It only affects the size hints: there are no chunks here,
    and no SMs are used."""

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256
    """At least as many; raised to a multiple of what is sent at a time."""

    def __post_init__(self) -> None:
        sent = self.num_max_rdma_chunked_send_tokens
        if self.num_sms < 0:
            raise InvalidArgument(f"num_sms must be >= 0 SMs, got {self.num_sms}")
        if not 0 < self.num_max_nvl_chunked_send_tokens < self.num_max_nvl_chunked_recv_tokens:
            raise InvalidArgument(
                f"chunks over NVLink: {self.num_max_nvl_chunked_send_tokens} tokens are sent and "
                f"{self.num_max_nvl_chunked_recv_tokens} received; send at least 1, receive more"
            )
        received = up(self.num_max_rdma_chunked_recv_tokens, max(sent, 1))
        if sent < 1 or 2 * sent > received:
            raise InvalidArgument(
                f"chunks over RDMA: {sent} tokens are sent and {received} received; send at least "
                "1, receive at least twice as many"
            )
        object.__setattr__(self, "num_max_rdma_chunked_recv_tokens", received)

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes of an exchange with as many tokens as a received chunk."""
        return exchange_nbytes(
            ranks=num_ranks,
            experts=num_ranks,
            topk=min(MAX_TOPK, num_ranks),
            max_tokens=self.num_max_nvl_chunked_recv_tokens,
            row_nbytes=hidden_bytes,
            answer_nbytes=hidden_bytes,
        )

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """0: one buffer serves all links, and the other hint covers it."""
        return 0
