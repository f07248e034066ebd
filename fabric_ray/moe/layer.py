"""A layer of experts: in one place, or on the ranks of an exchange."""

from __future__ import annotations

import hashlib
import operator
import time
from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor

from fabric_ray.errors import InvalidArgument
from fabric_ray.models.stored import plain_dtype
from fabric_ray.moe.arithmetic import FIXED, Arithmetic, RowInvariantMath, check_no_gradient
from fabric_ray.moe.passes import Exchange, carrier, pass_over


class MoeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and routing of a layer.

    Raises:
        InvalidArgument: sizes that don't go together.
    """

    hidden: int = 64
    experts: int = 8
    topk: int = 2
    intermediate: int = 32
    """Width of each expert."""
    shared_intermediate: int = 0
    """Width of the expert that sees every token; 0 for none."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """Over all experts (Qwen3-MoE), or of each by itself (DeepSeek-V3, section 2.1.2)."""
    normalise: bool = True
    """Whether the weights of the chosen experts are scaled to sum to 1."""
    scale: float = 1.0
    """By which weights are multiplied after that."""
    groups: int = 1
    """Experts are chosen from the ``kept_groups`` best of so many groups (DeepSeek-V3): those
    whose two best experts have the highest scores together."""
    kept_groups: int = 1
    bias: bool = False
    """Whether the router has a bias that only chooses (DeepSeek-V3, section 2.1.2)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights and activations; routes are computed in float32."""

    def __post_init__(self) -> None:
        for name in ("hidden", "experts", "topk", "intermediate", "groups", "kept_groups"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"{name} is {getattr(self, name)}; give at least 1")
        if self.shared_intermediate < 0:
            raise InvalidArgument(
                f"shared_intermediate is {self.shared_intermediate}; give 0 for no shared expert"
            )
        if self.score not in ("softmax", "sigmoid") or self.dtype not in ("float32", "bfloat16"):
            raise InvalidArgument(
                f"score {self.score!r} in {self.dtype!r}; use softmax or sigmoid, in float32 or "
                "bfloat16"
            )
        if self.experts % self.groups or self.kept_groups > self.groups:
            raise InvalidArgument(
                f"{self.kept_groups} of {self.groups} groups of {self.experts} experts; groups are "
                "equally large, and no more are kept than there are"
            )
        if self.topk > self.kept_groups * (self.experts // self.groups):
            raise InvalidArgument(
                f"topk is {self.topk}, and the groups that are kept have fewer experts; keep more "
                "groups or lower topk"
            )

    @property
    def torch_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found


@dataclass(frozen=True)
class MoeWeights:
    """What a layer is made of; in one place of all experts, on a rank of those that it hosts."""

    router: Tensor
    """float32 ``[experts, hidden]``."""
    bias: Tensor | None
    """float32 ``[experts]``."""
    w13: Tensor
    """``[experts here, 2 * intermediate, hidden]``: gate above up."""
    w2: Tensor
    """``[experts here, hidden, intermediate]``."""
    shared_w13: Tensor | None
    shared_w2: Tensor | None

    @classmethod
    def random(
        cls, config: MoeConfig, *, seed: int, name: str = "moe", experts: range | None = None
    ) -> MoeWeights:
        """Weights from a seed: an expert's are the same wherever it is hosted.

        Args:
            config: of the layer.
            seed: of all layers.
            name: of this one.
            experts: that are hosted here; all by default.
        """
        c, dtype = config, config.torch_dtype
        here = range(c.experts) if experts is None else experts

        def drawn(part: str, *shape: int) -> Tensor:
            return random_tensor(f"{name}.{part}", shape, seed=seed)

        def stacked(part: str, *shape: int) -> Tensor:
            return torch.stack([drawn(f"experts.{e}.{part}", *shape).to(dtype) for e in here])

        shared = c.shared_intermediate
        return cls(
            router=drawn("router", c.experts, c.hidden),
            bias=drawn("bias", c.experts) * 0.1 if c.bias else None,
            w13=stacked("w13", 2 * c.intermediate, c.hidden),
            w2=stacked("w2", c.hidden, c.intermediate),
            shared_w13=drawn("shared.w13", 2 * shared, c.hidden).to(dtype) if shared else None,
            shared_w2=drawn("shared.w2", c.hidden, shared).to(dtype) if shared else None,
        )

    def to(self, device: torch.device | str) -> MoeWeights:
        """The same on a device."""
        here: dict[str, Tensor | None] = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {n: None if w is None else w.to(device) for n, w in here.items()}
        return MoeWeights(**moved)


def random_tensor(name: str, shape: tuple[int, ...], *, seed: int) -> Tensor:
    """float32 numbers with variance ``1 / shape[-1]``, which the name and the seed decide."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    scale: float = shape[-1] ** -0.5
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") * scale


def route(
    logits: Tensor, config: MoeConfig, bias: Tensor | None = None, by: Arithmetic = FIXED
) -> tuple[Tensor, Tensor]:
    """The experts of each token and their weights, best first; of equals the lower number.

    Args:
        logits: float32 ``[tokens, experts]``.
        config: of the layer.
        bias: float32 ``[experts]``, added for the choice and not to the weights.
        by: what it is computed with.

    Returns:
        int64 and float32, ``[tokens, topk]`` both.
    """
    scores = by.softmax(logits) if config.score == "softmax" else by.sigmoid(logits)
    preferred = scores if bias is None else scores + bias
    if config.groups > 1:
        size = config.experts // config.groups
        grouped = preferred.view(len(preferred), config.groups, size)
        best = grouped.sort(dim=-1, descending=True).values[..., :2]
        order = by.total(best).sort(dim=-1, descending=True, stable=True).indices
        left = torch.ones(grouped.shape[:-1], dtype=torch.bool, device=logits.device)
        left.scatter_(-1, order[:, : config.kept_groups], False)
        preferred = grouped.masked_fill(left[..., None], float("-inf")).flatten(-2)
    chosen = preferred.sort(dim=-1, descending=True, stable=True).indices[:, : config.topk]
    weights = scores.gather(-1, chosen)
    if config.normalise:
        weights = weights / (by.total(weights)[:, None] + 1e-20)
    return chosen.contiguous(), (weights * config.scale).contiguous()


@dataclass
class Traffic:
    """What a rank has sent and computed: sums and differences are made field by field.

    Of a pass in a CUDA graph, rows and bytes are counted at each replay, exchanges and seconds
    once, when it is captured.
    """

    exchanges: int = 0
    rows: int = 0
    """That its experts computed."""
    dispatched_nbytes: int = 0
    """Of tokens that went to other ranks, once for each expert there; on a device also of those
    whose ranks are left out. The high-throughput mode sends fewer
    (:attr:`~fabric_ray.moe.ThroughputAllToAll.traffic`)."""
    combined_nbytes: int = 0
    """Of answers that went to other ranks, likewise."""
    dispatch_seconds: float = 0.0
    """In ``dispatch_send`` and ``dispatch_recv``, waiting for slower ranks included; on a device
    what it takes to launch them."""
    combine_seconds: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*map(operator.add, _values(self), _values(other)))

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(*map(operator.sub, _values(self), _values(other)))


def _values(of: Traffic | MoeWeights) -> list[Any]:
    return [getattr(of, field.name) for field in fields(of)]


class MoeLayer:
    """A router, experts, and if there is one a shared expert (DeepSeekMoE, section 3).

    The sum over a token's experts is made in float32 in the order of their weights, of answers that
    were rounded to the layer's dtype: what :class:`AllToAll` does.

    Args:
        config: of the layer.
        weights: of all its experts.
        arithmetic: :data:`~fabric_ray.moe.arithmetic.FIXED` for the bits of
            :class:`ParallelMoeLayer`.
    """

    def __init__(
        self, config: MoeConfig, weights: MoeWeights, *, arithmetic: Arithmetic = FIXED
    ) -> None:
        self.config, self.weights, self.arithmetic = config, weights, arithmetic
        self._check(config.experts)

    def forward(self, x: Tensor, *, left_out: Collection[int] = ()) -> Tensor:
        """``[tokens, hidden]`` to the same.

        Args:
            x: of the layer's dtype.
            left_out: experts that answer nothing; other weights stay as they are.
        """
        chosen, weights = self._route(x)
        answers = x.new_zeros(*chosen.shape, self.config.hidden)
        for expert in {*chosen.flatten().tolist()} - {*left_out}:
            token, place = (chosen == expert).nonzero(as_tuple=True)
            answers[token, place] = self._expert(expert, x[token])
        sums = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for k in range(self.config.topk):
            sums = sums + weights[:, k, None] * answers[:, k].float()
        return self._with_shared(sums, self._shared(x))

    def _check(self, experts: int) -> None:
        c, w = self.config, self.weights
        wanted = {
            "router": (c.experts, c.hidden),
            "w13": (experts, 2 * c.intermediate, c.hidden),
            "w2": (experts, c.hidden, c.intermediate),
        }
        for name, shape in wanted.items():
            if (found := tuple(getattr(w, name).shape)) != shape:
                raise InvalidArgument(f"{name} is {found}; give {shape}")
        for name in (field.name for field in fields(w)):
            held = getattr(w, name)
            # RS-1: arithmetic widens its operands, and would take values without their scales.
            if held is not None and not plain_dtype(held.dtype):
                raise InvalidArgument(
                    f"{name} is {held.dtype}, expected plain floats; dequantise it with its scales"
                )
        if (w.shared_w13 is not None) != bool(c.shared_intermediate) or c.bias != (
            w.bias is not None
        ):
            raise InvalidArgument("give a shared expert and a bias where the layer has them")

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.arithmetic.linear(x.float(), self.weights.router)
        return route(logits, self.config, self.weights.bias, self.arithmetic)

    def _expert(self, here: int, x: Tensor) -> Tensor:
        return swiglu(x, self.weights.w13[here], self.weights.w2[here], self.arithmetic)

    def _shared(self, x: Tensor) -> Tensor | None:
        w13, w2 = self.weights.shared_w13, self.weights.shared_w2
        return None if w13 is None or w2 is None else swiglu(x, w13, w2, self.arithmetic)

    def _with_shared(self, sums: Tensor, shared: Tensor | None) -> Tensor:
        sums = sums if shared is None else sums + shared.float()
        return sums.to(self.config.torch_dtype)


class ParallelMoeLayer(MoeLayer):
    """The same on one rank of an exchange; the shared expert runs while tokens are on their way.

    With :data:`~fabric_ray.moe.arithmetic.FIXED` its bits are those of :class:`MoeLayer`, for any
    number of ranks and however tokens are divided among them. Once a rank is lost or masked, passes
    raise ``PeerLost``. With ``shrink`` and an ``AllToAll`` they leave that rank's experts out:
    :attr:`AllToAll.lost` names it. On a device the pass after the loss raises.

    Through a ``ThroughputAllToAll`` sums are made on the way: they differ from those of one place
    by rounding (:func:`~fabric_ray.moe.bounds.layer_bound`). Through a
    :class:`~fabric_ray.moe.autograd.Differentiable`, of either mode, gradients flow;
    :data:`~fabric_ray.moe.arithmetic.FIXED` has none, so give ``FAST``.

    Where kernels make the exchange (``AllToAll(device=...)``), nothing waits for the device: each
    expert computes as many rows as it could get, and a pass can be captured into a CUDA graph.
    Call :meth:`AllToAll.check` before relying on what came of it.

    Args:
        config: of the layer.
        weights: of the experts that the rank hosts, ``exchange.local_experts``, where the
            exchange's tokens lie.
        exchange: of the layer's sizes and dtype, ``parts`` none; layers may share one.
        arithmetic: as for :class:`MoeLayer`.
        max_tokens: that the exchange takes at a time.
        shrink: go on without the experts of lost ranks, through an ``AllToAll``.
    """

    def __init__(
        self,
        config: MoeConfig,
        weights: MoeWeights,
        exchange: Exchange,
        *,
        max_tokens: int,
        arithmetic: Arithmetic = FIXED,
        shrink: bool = False,
    ) -> None:
        self.exchange, self.max_tokens, self.shrink = exchange, max_tokens, shrink
        self._carrier = carrier(exchange)
        self._spent = Traffic()
        self._counted = torch.zeros(3, dtype=torch.int64, device=exchange.device)
        super().__init__(config, weights, arithmetic=arithmetic)

    @property
    def traffic(self) -> Traffic:
        """Since the layer was made; a device is waited for."""
        computed, received, sent = self._counted.tolist()
        row = self.config.hidden * self.config.torch_dtype.itemsize
        counted = Traffic(
            rows=computed, dispatched_nbytes=sent * row, combined_nbytes=received * row
        )
        return self._spent + counted

    def forward(self, x: Tensor, *, left_out: Collection[int] = (), rounds: int = 1) -> Tensor:
        """``[tokens, hidden]`` to the same. All ranks call it together.

        Args:
            x: this rank's tokens; none are fine.
            left_out: none: which experts are left out follows from the ranks that are there.
            rounds: exchanges, on all ranks the same: as many as the rank with most tokens needs.

        Raises:
            InvalidArgument: more tokens than the rounds take, or gradients that there are none of;
                nothing was sent.
            PeerLost: a rank was lost, then or before.
        """
        if left_out:
            raise InvalidArgument("ranks that are lost leave experts out; mask() one instead")
        if len(x) > rounds * self.max_tokens:
            raise InvalidArgument(
                f"{len(x)} tokens don't go into {rounds} rounds of {self.max_tokens}; give more "
                "rounds on every rank"
            )
        if isinstance(self.arithmetic, RowInvariantMath):
            check_no_gradient(x, *_values(self.weights))
        parts = [x[i * self.max_tokens :][: self.max_tokens] for i in range(rounds)]
        return torch.cat([self._exchanged(part) for part in parts])

    def _check(self, experts: int) -> None:
        super()._check(len(self.exchange.local_experts))
        if self.weights.w13.device != self.exchange.device:
            raise InvalidArgument(
                f"weights lie on {self.weights.w13.device}, tokens on {self.exchange.device}; "
                "move the weights there"
            )

    def _exchanged(self, x: Tensor) -> Tensor:
        chosen, weights = self._route(x)
        ways = pass_over(self.exchange, shrink=self.shrink)
        away = self._away(chosen)
        begin = time.perf_counter()
        ways.send(x, chosen, weights)
        dispatching = time.perf_counter() - begin
        shared = self._shared(x)
        # Where it isn't known how many rows come there is room for all, and all are computed; for
        # gradients it is waited for.
        many = self._carrier.ranks * self.max_tokens
        stride = many if ways.strides and self._carrier.asynchronous else None
        begin = time.perf_counter()
        got = ways.receive(stride)
        dispatching += time.perf_counter() - begin
        answers = torch.empty(got.x.shape, dtype=self.config.torch_dtype, device=x.device)
        for here in range(self._each):
            of = got.of(here) if stride is None else slice(here * stride, (here + 1) * stride)
            answers[of] = self._expert(here, got.x[of])
        begin = time.perf_counter()
        sums = ways.combine(answers)
        combining = time.perf_counter() - begin
        self._spent += Traffic(1, dispatch_seconds=dispatching, combine_seconds=combining)
        computed, own = got.counts.sum(), (chosen // self._each == self._carrier.rank).sum()
        computed = computed.to(own.device)
        self._counted += torch.stack([computed, computed - own, away])
        return self._with_shared(sums, shared)

    @property
    def _each(self) -> int:
        """Experts of a rank."""
        return len(self.exchange.local_experts)

    def _away(self, chosen: Tensor) -> Tensor:
        """How many rows go to other ranks."""
        there = chosen // self._each
        away = there != self._carrier.rank
        if not self._carrier.asynchronous:
            present = torch.tensor(self._carrier.present, dtype=torch.bool, device=there.device)
            away &= present[there]
        return away.sum()


def swiglu(x: Tensor, w13: Tensor, w2: Tensor, by: Arithmetic) -> Tensor:
    """``w2 (silu(w1 x) * w3 x)``, ``w1`` above ``w3``."""
    gate, up = by.linear(x, w13).chunk(2, dim=-1)
    return by.linear(by.silu(gate) * up, w2)
