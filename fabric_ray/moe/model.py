"""A small transformer with experts: in one place, or with experts on the ranks of an exchange."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

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

    def check_tokens(self, tokens: Sequence[int], more: int = 0) -> None:
        """Raises InvalidArgument for what the model can't read, with ``more`` tokens behind it."""
        if not tokens:
            raise InvalidArgument("a sequence has no tokens; give at least 1")
        if len(tokens) + more > self.positions:
            raise InvalidArgument(
                f"a sequence of {len(tokens) + more} tokens, and the model has "
                f"{self.positions} positions; shorten it"
            )
        wrong = [t for t in tokens if not 0 <= t < self.vocab]
        if wrong:
            raise InvalidArgument(f"token {wrong[0]} is none of {self.vocab}")


def generate(
    config: MoeModelConfig,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    read: Callable[[list[list[int]]], list[Tensor]],
) -> list[list[int]]:
    """The likeliest ``max_tokens`` tokens behind each prompt, of equals the lower one.

    Args:
        config: of the model.
        prompts: sequences.
        max_tokens: of each answer.
        read: returns the logits of the last tokens of sequences. Each token is computed from the
            whole sequence: this is a reference, without a cache.

    Raises:
        InvalidArgument: tokens that the model can't read, or more than it has positions for.
    """
    if max_tokens < 1:
        raise InvalidArgument(f"max_tokens is {max_tokens}; give at least 1")
    for prompt in prompts:
        config.check_tokens(prompt, max_tokens - 1)
    sequences = [list(prompt) for prompt in prompts]
    for _ in range(max_tokens):
        for tokens, rows in zip(sequences, read(sequences), strict=True):
            tokens.append(int(rows[-1].cpu().numpy().argmax()))
    return [tokens[len(prompt) :] for tokens, prompt in zip(sequences, prompts, strict=True)]


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
        c, hidden, dtype = config, config.moe.hidden, config.moe.torch_dtype

        def drawn(name: str, *shape: int, scale: float = 1.0) -> Tensor:
            return (random_tensor(name, shape, seed=seed) * scale).to(self.device, dtype)

        def ones() -> Tensor:
            return torch.ones(hidden, dtype=dtype, device=self.device)

        self._weights = {
            # As large as what is added to it.
            "embedding": drawn("embedding", c.vocab, hidden, scale=math.sqrt(hidden)),
            "head": drawn("head", c.vocab, hidden),
            "norm": ones(),
        }
        self._layers: list[MoeLayer] = []
        for number in range(c.layers):
            block = f"layers.{number}."
            self._weights |= {
                f"{block}attention_norm": ones(),
                f"{block}qkv": drawn(
                    f"{block}qkv", (c.heads + 2 * c.kv_heads) * c.head_dim, hidden
                ),
                f"{block}out": drawn(f"{block}out", hidden, c.heads * c.head_dim),
                f"{block}moe_norm": ones(),
            }
            self._layers.append(self._experts(f"{block}moe", seed))
        self._cos, self._sin = (t.to(self.device) for t in _rotation(config))

    def _experts(self, name: str, seed: int) -> MoeLayer:
        moe, exchange, arithmetic = self.config.moe, self.exchange, self._arithmetic
        here = None if exchange is None else exchange.local_experts
        weights = MoeWeights.random(moe, seed=seed, name=name, experts=here).to(self.device)
        if exchange is None:
            return MoeLayer(moe, weights, arithmetic=arithmetic)
        return ParallelMoeLayer(
            moe,
            weights,
            exchange,
            max_tokens=self._max_tokens,
            arithmetic=arithmetic,
            shrink=self._shrink,
        )

    def parameters(self) -> dict[str, Tensor]:
        """The model's tensors by name, for training: those of the experts here end in
        ``experts.w13`` and ``experts.w2``, and all others are on every rank, where their gradients
        are to be added up. Training takes ``deterministic=False``."""
        found: dict[str, Tensor | None] = {**self._weights}
        for number, layer in enumerate(self._layers):
            w, block = layer.weights, f"layers.{number}."
            found |= {f"{block}router": w.router}
            found |= {f"{block}experts.w13": w.w13, f"{block}experts.w2": w.w2}
            found |= {f"{block}shared.w13": w.shared_w13, f"{block}shared.w2": w.shared_w2}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    @property
    def traffic(self) -> Traffic:
        """Of all layers, since the model was made."""
        layers = [one.traffic for one in self._layers if isinstance(one, ParallelMoeLayer)]
        return sum(layers, Traffic())

    def forward(
        self,
        sequences: Sequence[Sequence[int]],
        *,
        last: bool = False,
        left_out: Collection[int] = (),
        rounds: int = 1,
    ) -> list[Tensor]:
        """Logits of each sequence, float32 ``[tokens, vocab]``, on :attr:`device`. Where kernels
        make the exchange, :meth:`AllToAll.check` says whether they can be relied on.

        Args:
            sequences: the tokens of each.
            last: only those of the last token of each, ``[1, vocab]``.
            left_out: experts that answer nothing; of a model in one place only.
            rounds: exchanges in each layer, as for :meth:`ParallelMoeLayer.forward`.

        Raises:
            InvalidArgument: tokens that the model can't read; nothing was computed.
        """
        c, by, w = self.config, self._arithmetic, self._weights
        for tokens in sequences:
            c.check_tokens(tokens)
        lengths = [len(tokens) for tokens in sequences]
        x = w["embedding"][self._there([t for tokens in sequences for t in tokens])]
        positions = self._there([position for n in lengths for position in range(n)])
        angles = self._cos[positions][:, None], self._sin[positions][:, None]
        for number, layer in enumerate(self._layers):
            x = x + self._attention(f"layers.{number}.", x, lengths, angles)
            normed = by.rms_norm(x, w[f"layers.{number}.moe_norm"], c.eps)
            if isinstance(layer, ParallelMoeLayer):
                x = x + layer.forward(normed, left_out=left_out, rounds=rounds)
            else:
                x = x + layer.forward(normed, left_out=left_out)
        if last:
            ends = self._there(lengths).cumsum(0) - 1
            x, lengths = x[ends], [1] * len(lengths)
        logits = by.linear(by.rms_norm(x, w["norm"], c.eps), w["head"]).float()
        return list(torch.split(logits, lengths)) if lengths else []

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        *,
        left_out: Collection[int] = (),
        rounds: int = 1,
    ) -> list[list[int]]:
        """As :func:`generate`. Ranks of an exchange call it together, with the same ``max_tokens``
        and as many ``rounds`` as prompts with their answers need.

        Raises:
            InvalidArgument: tokens that the model can't read, or more than it has positions for.
        """

        def read(sequences: list[list[int]]) -> list[Tensor]:
            logits = self.forward(sequences, last=True, left_out=left_out, rounds=rounds)
            if self.exchange is not None:
                self.exchange.check()
            return logits

        return generate(self.config, prompts, max_tokens, read)

    def _there(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self.device)

    def _attention(
        self, block: str, x: Tensor, lengths: list[int], angles: tuple[Tensor, Tensor]
    ) -> Tensor:
        c, by, w = self.config, self._arithmetic, self._weights
        qkv = by.linear(by.rms_norm(x, w[f"{block}attention_norm"], c.eps), w[f"{block}qkv"])
        heads = qkv.view(len(qkv), c.heads + 2 * c.kv_heads, c.head_dim)
        q, k, v = torch.split(heads, [c.heads, c.kv_heads, c.kv_heads], dim=1)
        q, k = _rotated(q, *angles), _rotated(k, *angles)
        mixed = [x.new_empty(0, c.heads * c.head_dim)]
        if lengths:
            parts = (torch.split(t, lengths) for t in (q, k, v))
            mixed += [by.attend(*part) for part in zip(*parts, strict=True)]
        return by.linear(torch.cat(mixed), w[f"{block}out"])


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
