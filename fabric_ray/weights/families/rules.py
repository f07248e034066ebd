"""The words of a family table: which parameters make a container, and how ranks share it.

Patterns are Hugging Face names in which ``{layer}`` and ``{expert}`` stand for a number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec

Unit = Literal["heads", "kv_heads", "column"]
"""What is never cut in two: an attention head, a key/value head, a single row or column."""


class Whole(msgspec.Struct, frozen=True):
    """Every rank holds all of it."""


class Split(msgspec.Struct, frozen=True):
    """Equal shares along a dimension, the first rank the first share.

    Key/value heads are fewer than ranks at times: then each head is held by as many neighbouring
    ranks as it takes.
    """

    dim: int
    unit: Unit = "column"
    chunks: int = 1
    """Equal parts that lie behind each other along the dimension and are shared each by itself: 2
    where a parameter is gate over up."""


class Vocab(msgspec.Struct, frozen=True):
    """Equal shares of the rows, behind which zeros are added until there is a multiple of
    ``multiple`` that the ranks can share."""

    multiple: int = 64


Cut = Whole | Split | Vocab


class Part(msgspec.Struct, frozen=True):
    """One parameter's place in a container."""

    parameter: str
    """Pattern of its name."""
    cut: Cut


class Rule(msgspec.Struct, frozen=True):
    """A container of an engine or a trainer, and the parameters it is made of.

    Several parts lie behind each other along dimension 0. Where parts name an ``{expert}``, the
    container stacks the experts that a rank owns along a new first dimension; if its own name has
    ``{expert}`` too (trainers only), each of them has a container instead.

    Several rules may use a parameter: the first that finds all it needs does. A model where none
    finds all is refused.
    """

    container: str
    """Pattern of its name."""
    parts: tuple[Part, ...]
    beside: str | None = None
    """Pattern of a parameter of another rule without which this one doesn't apply."""
    interleaved: bool = False
    """Whether parts lie behind each other once for each key/value head, not once in all."""

    @property
    def per_expert(self) -> bool:
        return any("{expert}" in part.parameter for part in self.parts)

    @property
    def needs(self) -> frozenset[str]:
        """Patterns of the parameters that it needs."""
        names = {part.parameter for part in self.parts}
        return frozenset(names | {self.beside} if self.beside else names)


class Derived(msgspec.Struct, frozen=True):
    """A tensor that an engine computes from containers of a rank, each time they are loaded."""

    name: str
    """Pattern of its name."""
    containers: tuple[str, ...]
    """Patterns of their names."""
    compute: Callable[..., Any]
    """From the model's configuration and this rank's containers to the tensor."""


class Family(msgspec.Struct, frozen=True):
    """How the models of one architecture are laid out."""

    name: str
    rules: tuple[Rule, ...]
    derived: tuple[Derived, ...] = ()
