"""A small transformer with experts: in one place, or with experts on the ranks of an exchange."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from fabric_ray.errors import InvalidArgument
from fabric_ray.moe.arithmetic import FAST, FIXED
from fabric_ray.moe.layer import (
    MoeConfig,
    MoeLayer,
    MoeWeights,
    ParallelMoeLayer,
    Traffic,
    random_tensor,
)
from fabric_ray.moe.passes import Exchange


class MoeModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder-only transformer: RMSNorm, RoPE, grouped queries, experts in every layer.

    Raises:
        InvalidArgument: sizes that don't go together.
    """

    moe: MoeConfig = MoeConfig()
    """Its ``hidden`` and ``dtype`` are the model's."""
    vocab: int = 256
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    positions: int = 512
    """That a sequence may have."""
    rope_theta: float = 10_000.0
    eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("vocab", "layers", "heads", "kv_heads", "head_dim", "positions"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"{name} is {getattr(self, name)}; give at least 1")
        if self.heads % self.kv_heads or self.head_dim % 2:
            raise InvalidArgument(
                f"{self.heads} heads share {self.kv_heads} of width {self.head_dim}; give a "
                "multiple of kv_heads, and an even width"
            )

    def check_tokens(self, tokens: Sequence[int], start: int = 0) -> None:
        """Raises InvalidArgument for what the model can't read."""
        if not tokens:
            raise InvalidArgument("a sequence has no tokens; give at least 1")
        if start + len(tokens) > self.positions:
            raise InvalidArgument(
                f"a sequence of {start + len(tokens)} tokens, and the model has "
                f"{self.positions} positions; shorten it"
            )
        wrong = [t for t in tokens if not 0 <= t < self.vocab]
        if wrong:
            raise InvalidArgument(f"token {wrong[0]} is none of {self.vocab}")


class Cache:
    """Keys and values of the tokens of one sequence that were read."""

    def __init__(self, layers: int) -> None:
        self._kept: list[tuple[Tensor, Tensor] | None] = [None] * layers

    def __len__(self) -> int:
        last = self._kept[-1]
        return 0 if last is None else len(last[0])

    def extended(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Those of a layer with ``[tokens, kv heads, width]`` behind them."""
        before = self._kept[layer]
        if before is not None:
            k, v = torch.cat([before[0], k]), torch.cat([before[1], v])
        self._kept[layer] = (k, v)
        return k, v


@dataclass(frozen=True)
class _Block:
    """A layer's weights."""

    attention_norm: Tensor
    qkv: Tensor
    out: Tensor
    moe_norm: Tensor
    moe: MoeLayer


class MoeModel:
    """Random weights from a seed: attention and the rest everywhere, experts where the exchange has
    them.

    On the ranks of an exchange each reads sequences of its own (data parallel), and all call
    ``forward`` together.

    Args:
        config: of the model.
        seed: of its weights, which are the same for any number of ranks.
        exchange: this rank's, of the layers' sizes; all experts are here if ``None``. Gradients
            flow through a :class:`~fabric_ray.moe.autograd.Differentiable`.
        max_tokens: of the exchange.
        device: what it is computed on; the host if ``None``. With an exchange it is what the
            exchange's tokens lie on, and none is given.
        deterministic: with the bits of the model in one place, whatever is computed beside it
            (:mod:`fabric_ray.moe.arithmetic`); otherwise as fast as torch can.
        shrink: as for :class:`ParallelMoeLayer`.

    Raises:
        InvalidArgument: an exchange and a device.
    """

    def __init__(
        self,
        config: MoeModelConfig,
        *,
        seed: int = 0,
        exchange: Exchange | None = None,
        max_tokens: int = 0,
        device: torch.device | str | None = None,
        deterministic: bool = True,
        shrink: bool = False,
    ) -> None:
        if exchange is not None and device is not None:
            raise InvalidArgument(
                "a model computes where its exchange's tokens lie; leave device out"
            )
        self.config, self.exchange = config, exchange
        self.device = torch.device(device or "cpu") if exchange is None else exchange.device
        self._arithmetic = FIXED if deterministic else FAST
        self._max_tokens, self._shrink = max_tokens, shrink
        hidden, dtype = config.moe.hidden, config.moe.torch_dtype
        # As large as what is added to it.
        self._embedding = (
            random_tensor("embedding", (config.vocab, hidden), seed=seed) * math.sqrt(hidden)
        ).to(self.device, dtype)
        head = random_tensor("head", (config.vocab, hidden), seed=seed)
        self._head = head.to(self.device, dtype)
        self._norm = torch.ones(hidden, dtype=dtype, device=self.device)
        self._blocks = [self._block(layer, seed) for layer in range(config.layers)]
        self._cos, self._sin = (t.to(self.device) for t in _rotation(config))

    def _block(self, layer: int, seed: int) -> _Block:
        c, hidden, dtype = self.config, self.config.moe.hidden, self.config.moe.torch_dtype

        def drawn(part: str, *shape: int) -> Tensor:
            found = random_tensor(f"layers.{layer}.{part}", shape, seed=seed)
            return found.to(self.device, dtype)

        experts = None if self.exchange is None else self.exchange.local_experts
        weights = MoeWeights.random(c.moe, seed=seed, name=f"layers.{layer}.moe", experts=experts)
        weights = weights.to(self.device)
        if self.exchange is None:
            moe = MoeLayer(c.moe, weights, arithmetic=self._arithmetic)
        else:
            moe = ParallelMoeLayer(
                c.moe,
                weights,
                self.exchange,
                max_tokens=self._max_tokens,
                arithmetic=self._arithmetic,
                shrink=self._shrink,
            )
        return _Block(
            attention_norm=torch.ones_like(self._norm),
            qkv=drawn("qkv", (c.heads + 2 * c.kv_heads) * c.head_dim, hidden),
            out=drawn("out", hidden, c.heads * c.head_dim),
            moe_norm=torch.ones_like(self._norm),
            moe=moe,
        )

    def parameters(self) -> dict[str, Tensor]:
        """The model's tensors by name, for training: those of the experts here end in
        ``experts.w13`` and ``experts.w2``, and all others are on every rank, where their gradients
        are to be added up. Training takes ``deterministic=False``."""
        found = {"embedding": self._embedding, "head": self._head, "norm": self._norm}
        for number, block in enumerate(self._blocks):
            w = block.moe.weights
            of_block = {
                "attention_norm": block.attention_norm,
                "qkv": block.qkv,
                "out": block.out,
                "moe_norm": block.moe_norm,
                "router": w.router,
                "experts.w13": w.w13,
                "experts.w2": w.w2,
                "shared.w13": w.shared_w13,
                "shared.w2": w.shared_w2,
            }
            found |= {f"layers.{number}.{n}": t for n, t in of_block.items() if t is not None}
        return found

    @property
    def traffic(self) -> Traffic:
        """Of all layers, since the model was made."""
        layers = [b.moe.traffic for b in self._blocks if isinstance(b.moe, ParallelMoeLayer)]
        return sum(layers, Traffic())

    def forward(
        self,
        sequences: Sequence[Sequence[int]],
        *,
        caches: Sequence[Cache] | None = None,
        last: bool = False,
        left_out: Collection[int] = (),
        rounds: int = 1,
    ) -> list[Tensor]:
        """Logits of each sequence, float32 ``[tokens, vocab]``, on :attr:`device`. Where kernels
        make the exchange, :meth:`AllToAll.check` says whether they can be relied on.

        Args:
            sequences: the tokens of each that are to be read.
            caches: what was read of each before; extended by what is read now.
            last: only those of the last token of each, ``[1, vocab]``.
            left_out: experts that answer nothing; of a model in one place only.
            rounds: exchanges in each layer, as for :meth:`ParallelMoeLayer.forward`.

        Raises:
            InvalidArgument: tokens that the model can't read; nothing was computed.
        """
        c = self.config
        caches = [Cache(c.layers) for _ in sequences] if caches is None else caches
        if len(caches) != len(sequences):
            raise InvalidArgument(f"{len(caches)} caches for {len(sequences)} sequences")
        starts = [len(cache) for cache in caches]
        for tokens, start in zip(sequences, starts, strict=True):
            c.check_tokens(tokens, start)
        lengths = [len(tokens) for tokens in sequences]
        ids = self._there([t for tokens in sequences for t in tokens])
        places = [range(s, s + n) for s, n in zip(starts, lengths, strict=True)]
        positions = self._there([p for place in places for p in place])
        x = self._embedding[ids]
        for layer, block in enumerate(self._blocks):
            x = x + self._attention(layer, block, x, positions, lengths, caches)
            normed = self._arithmetic.rms_norm(x, block.moe_norm, c.eps)
            if isinstance(block.moe, ParallelMoeLayer):
                x = x + block.moe.forward(normed, left_out=left_out, rounds=rounds)
            else:
                x = x + block.moe.forward(normed, left_out=left_out)
        if last:
            ends = self._there(lengths).cumsum(0) - 1
            x, lengths = x[ends], [1] * len(lengths)
        x = self._arithmetic.rms_norm(x, self._norm, c.eps)
        logits = self._arithmetic.linear(x, self._head).float()
        return list(torch.split(logits, lengths)) if lengths else []

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        *,
        left_out: Collection[int] = (),
        rounds: int = 1,
    ) -> list[list[int]]:
        """The likeliest ``max_tokens`` tokens behind each prompt, one after the other.

        Ranks of an exchange call it together, with the same ``max_tokens``.

        Raises:
            InvalidArgument: tokens that the model can't read, or more than it has positions for.
        """
        if max_tokens < 1:
            raise InvalidArgument(f"max_tokens is {max_tokens}; give at least 1")
        for prompt in prompts:
            self.config.check_tokens(prompt)
            self.config.check_tokens(prompt[:1], len(prompt) + max_tokens - 2)
        caches = [Cache(self.config.layers) for _ in prompts]
        out: list[list[int]] = [[] for _ in prompts]
        unread = [list(prompt) for prompt in prompts]
        for _ in range(max_tokens):
            logits = self.forward(
                unread, caches=caches, last=True, left_out=left_out, rounds=rounds
            )
            if self.exchange is not None:
                self.exchange.check()
            unread = [[likeliest(rows[-1])] for rows in logits]
            for tokens, found in zip(out, unread, strict=True):
                tokens += found
        return out

    def _there(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self.device)

    def _attention(
        self,
        layer: int,
        block: _Block,
        x: Tensor,
        positions: Tensor,
        lengths: list[int],
        caches: Sequence[Cache],
    ) -> Tensor:
        c, by = self.config, self._arithmetic
        qkv = by.linear(by.rms_norm(x, block.attention_norm, c.eps), block.qkv)
        heads = qkv.view(len(qkv), c.heads + 2 * c.kv_heads, c.head_dim)
        q, k, v = torch.split(heads, [c.heads, c.kv_heads, c.kv_heads], dim=1)
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        mixed = [x.new_empty(0, c.heads * c.head_dim)]
        parts = [torch.split(t, lengths) for t in (q, k, v)] if lengths else [(), (), ()]
        for queries, keys, values, cache in zip(*parts, caches, strict=True):
            mixed.append(by.attend(queries, *cache.extended(layer, keys, values)))
        return by.linear(torch.cat(mixed), block.out)


def likeliest(logits: Tensor) -> int:
    """Of equals the lower token."""
    return int(logits.cpu().numpy().argmax())


def _rotation(config: MoeModelConfig) -> tuple[Tensor, Tensor]:
    """Cosines and sines, ``[positions, head_dim / 2]`` (RoFormer), each computed by itself."""
    half = config.head_dim // 2
    frequencies = [config.rope_theta ** (-i / half) for i in range(half)]
    angles = [[p * f for f in frequencies] for p in range(config.positions)]
    dtype = config.moe.torch_dtype
    cos = [[math.cos(a) for a in row] for row in angles]
    sin = [[math.sin(a) for a in row] for row in angles]
    # Rounded to float32 first, whatever the format of the model.
    both = torch.tensor([cos, sin], dtype=torch.float32, device="cpu").to(dtype)
    return both[0], both[1]


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
