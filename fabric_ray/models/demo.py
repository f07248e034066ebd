"""A model to show things with: of any size, awkward where real ones are."""

from __future__ import annotations

import math
from collections.abc import Iterator

from fabric_ray.models.config import ModelConfig, Moe
from fabric_ray.models.errors import InvalidConfig, UnsupportedModel
from fabric_ray.models.kinds import ARCHITECTURES, COMPUTED, Kind

DEMO_KINDS = tuple(kind for kind in COMPUTED if not ARCHITECTURES[kind].latent)
"""Kinds that :func:`demo_config` makes."""


def demo_config(
    *, parameters: float = 300e6, kind: Kind = "llama", tp: int = 2, ep: int = 1
) -> ModelConfig:
    """A model of about ``parameters`` parameters that ``tp`` ranks can share.

    The vocabulary is prime, so that shards are uneven and engines pad; there are few key/value
    heads, so that a ``tp`` above 2 replicates them. Experts, where there are any, begin at the
    second layer.

    Args:
        parameters: elements; at least some 100 thousand.
        kind: a ``model_type``.
        tp: ranks of an inference engine.
        ep: groups among them that own whole experts.

    Raises:
        UnsupportedModel: the kind is unknown.
        InvalidConfig: no model of about that size suits the ranks.
    """
    if kind not in DEMO_KINDS:
        raise UnsupportedModel(
            f"model type {kind!r} isn't supported; use one of {', '.join(DEMO_KINDS)}",
            model_type=kind,
        )
    best = None
    if tp >= 1 and ep >= 1 and tp % ep == 0:
        best = min(
            _candidates(parameters, kind, tp, ep),
            key=lambda c: abs(c.parameter_count / parameters - 1),
            default=None,
        )
    if best is None or not 0.75 < best.parameter_count / parameters < 1.33:
        raise InvalidConfig(
            f"no {kind} model of about {parameters:.0f} parameters suits tp={tp}, ep={ep}; give "
            "an ep that divides tp, and more parameters"
        )
    return best


def _candidates(parameters: float, kind: Kind, tp: int, ep: int) -> Iterator[ModelConfig]:
    vocab = 32_003 if parameters >= 100e6 else 4_001 if parameters >= 5e6 else 257
    head_dim = 64 if parameters >= 20e6 else 16
    kv_heads = tp if tp % 2 and tp > 1 else 2
    step = math.lcm(tp, kv_heads)
    for heads in range(step, max(step, 40) + 1, step):
        # As in Qwen3, whose attention is wider than the model.
        hidden = heads * head_dim // 2 if kind.startswith("qwen3") else heads * head_dim

        def sized(layers: int, heads: int = heads, hidden: int = hidden) -> ModelConfig:
            return ModelConfig(
                kind=kind,
                vocab=vocab,
                hidden=hidden,
                layers=layers,
                heads=heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                intermediate=_multiple(hidden * 8 / 3, 8 * tp),
                tied=kind == "qwen3",
                qk_norm=kind.startswith("qwen3"),
                qkv_bias=kind.startswith("qwen2"),
                moe=_moe(kind, hidden, tp, ep),
            )

        base = sized(2).parameter_count
        each = sized(3).parameter_count - base
        layers = 2 + round((parameters - base) / each)
        if 2 <= layers <= 2 * heads + 4:
            yield sized(layers)


def _moe(kind: Kind, hidden: int, tp: int, ep: int) -> Moe | None:
    if not kind.endswith("_moe"):
        return None
    return Moe(
        experts=max(12, ep),
        top_k=4,
        intermediate=_multiple(hidden / 2, 8 * tp),
        shared_intermediate=_multiple(hidden / 2, 8 * tp) if kind == "qwen2_moe" else 0,
        dense_layers=(0,),
    )


def _multiple(size: float, of: int) -> int:
    return math.ceil(size / of) * of
