"""What a prefill or decode replica is made of: a model, an engine, memory that peers can reach."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fabric_ray.engine import Region, TransferEngine
from fabric_ray.errors import InvalidArgument
from fabric_ray.inference.engine import TorchEngine
from fabric_ray.inference.model import Model
from fabric_ray.inference.presets import TINY, tiny
from fabric_ray.inference.protocols import WholeEngine
from fabric_ray.inference.spec import CacheSpec
from fabric_ray.inference.tables import CachePools
from fabric_ray.inference.tokenizer import Tokenizer, load_tokenizer
from fabric_ray.kvcache import RankCache, Terms
from fabric_ray.models.checkpoint import Checkpoint
from fabric_ray.models.config import ModelConfig, check_computed
from fabric_ray.runtime.process import node_address
from fabric_ray.runtime.token import cluster_token
from fabric_ray.serve.chat import ChatTemplate, load_chat_template, model_max_length
from fabric_ray.serve.config import ServeArgs
from fabric_ray.serve.engines import Role, checked, load_factory
from fabric_ray.serve.errors import BadRequest
from fabric_ray.weights.families import target_containers

logger = logging.getLogger(__name__)

_ALIGNMENT = 64
_TIMES = 2
"""Beside what the engine hands over, a tail has two numbers of the prefiller: seconds that the
prompt waited, and seconds that it was computed."""


def model_config(args: ServeArgs) -> ModelConfig:
    """The configuration of the model that is served; weights aren't read.

    Raises:
        BadRequest: there is no such model.
        ModelError: the directory's files are damaged.
    """
    path = Path(args.model)
    if path.is_dir():
        return Checkpoint(path).config
    if args.model not in TINY and f"tiny-{args.model}" not in TINY:
        raise BadRequest(
            f"model {args.model!r} is neither a directory nor one of {', '.join(TINY)}; download "
            "it first, or use a small one",
            param="model",
        )
    return tiny(args.model)


def check_model(args: ServeArgs) -> None:
    """Raises what replicas would raise about the model later.

    Raises:
        BadRequest: there is no such model.
        InvalidArgument: the engine can't be imported, or the caches differ in their dtype.
        InferenceError: the chat template or ``tokenizer_config.json`` can't be read.
        ModelError: the directory's files are damaged, or models of this kind can't be computed.
        FamilyError: ``tp`` ranks can't share the model.
    """
    _check_cache_dtypes(args)
    if args.engine is None:
        config = model_config(args)
        check_computed(config)
        max_model_len(args)
        for tp in {args.prefill.tp, args.decode.tp}:
            target_containers(config, tp=tp, rank=0)
    else:
        load_factory(args.engine)
    chat_template(args)


def _check_cache_dtypes(args: ServeArgs) -> None:
    """Raises InvalidArgument if prefillers and decoders can't exchange pages: no transfer converts
    them."""
    prefill, decode = args.prefill.cache.dtype, args.decode.cache.dtype
    # What an engine of the user's takes by default is unknown here.
    default = None if args.engine is not None else args.dtype or model_config(args).dtype
    found = (prefill or default, decode or default)
    if None not in found and found[0] != found[1]:
        raise InvalidArgument(
            f"prefill.cache.dtype and decode.cache.dtype: got {found[0]} and {found[1]}, expected "
            "one dtype; set both to the same, or neither"
        )


def tokenizer(args: ServeArgs) -> Tokenizer:
    """The model's tokenizer; bytes for small models."""
    vocab = model_config(args).vocab if args.engine is None else None
    return load_tokenizer(_directory(args), vocab=vocab)


def chat_template(args: ServeArgs) -> ChatTemplate | None:
    """The model's chat template, if there is one."""
    return load_chat_template(_directory(args), file=args.chat_template)


def max_model_len(args: ServeArgs) -> int | None:
    """Most tokens of a request, prompt included: the model's ``max_position_embeddings``, or its
    tokenizer's ``model_max_length`` if that is less. ``None`` where neither is given, or the
    engine is the user's.

    Raises:
        InferenceError: ``tokenizer_config.json`` can't be read.
    """
    if args.engine is not None:
        return None
    limits = (model_config(args).max_positions, model_max_length(_directory(args)))
    return min((limit for limit in limits if limit is not None), default=None)


def _directory(args: ServeArgs) -> Path | None:
    path = Path(args.model)
    return path if path.is_dir() else None


def load_model(args: ServeArgs, *, tp: int) -> Model:
    """The weights of all ranks of a replica."""
    config, path = model_config(args), Path(args.model)
    if path.is_dir():
        return Model.load(path, tp=tp, dtype=args.dtype, revision=args.revision)
    return Model.random(config, seed=args.seed, tp=tp, dtype=args.dtype)


class Instance:
    """A replica's engine, with pages and tails in memory of transfer engines, one for each rank.

    Args:
        args: of the deployment.
        role: of the replica, which says how many ranks there are, how pages are laid out, and how
            many tails may be in use at the same time.
        name: for people and logs.

    Raises:
        InvalidArgument: the user's engine doesn't fit.
    """

    def __init__(self, args: ServeArgs, role: Role, *, name: str) -> None:
        side = args.prefill if role == "prefill" else args.decode
        tp, slots = side.tp, side.max_running
        if args.torch_threads is not None:
            torch.set_num_threads(args.torch_threads)
        self.name, self.slots = name, slots
        self.engines = [_transfer_engine(args, f"{name}-{rank}") for rank in range(tp)]
        buffers: list[list[Region]] = [[] for _ in range(tp)]

        def allocate(rank: int, nbytes: int) -> Tensor:
            region = self.engines[rank].alloc(nbytes)
            buffers[rank].append(region)
            return region.tensor(torch.uint8, (nbytes,))

        spec = CacheSpec(**side.cache.model_dump())
        self.engine: WholeEngine
        if args.engine is None:
            self.engine = TorchEngine(load_model(args, tp=tp), spec, allocate=allocate)
        else:
            made = load_factory(args.engine)(args, role=role, tp=tp, spec=spec, allocate=allocate)
            self.engine = checked(made, path=args.engine, role=role, tp=tp)
        self._times_at = -(-self.engine.tail.nbytes // 8) * 8
        end = self._times_at + 8 * _TIMES
        self.tail_nbytes = -(-end // _ALIGNMENT) * _ALIGNMENT
        tails = self.engines[0].alloc(self.tail_nbytes * slots)
        self._tails = tails.tensor(torch.uint8, (slots, self.tail_nbytes))
        self.ranks: Sequence[RankCache] = [
            RankCache(
                self.engines[rank],
                self.engine.layout(rank),
                self._regions(rank, buffers[rank]),
                tail=tails if rank == 0 else None,
            )
            for rank in range(tp)
        ]
        self.terms = Terms(
            beat=args.terms.beat,
            silence=args.terms.silence,
            max_message=args.terms.max_message,
            tail_nbytes=self.tail_nbytes,
        )
        self.pools = CachePools(self.engine.layout(0).groups)

    def _regions(self, rank: int, allocated: list[Region]) -> list[Region]:
        """A rank's pages: what the engine took from us, or memory of its own."""
        own = () if allocated else self.engine.buffers(rank)
        regions = allocated or [self.engines[rank].register(tensor) for tensor in own]
        sizes = [region.nbytes for region in regions]
        expected = list(self.engine.layout(rank).buffers)
        if sizes != expected:
            raise InvalidArgument(
                f"engine: rank {rank} has buffers of {sizes} bytes, and its layout has {expected}; "
                "call allocate once for each buffer in order, or not at all"
            )
        return regions

    def tail(self, slot: int) -> Tensor:
        """A slot's memory: uint8, ``[tail_nbytes]``."""
        return self._tails[slot]

    def write_times(self, slot: int, *, waited: float, computed: float) -> None:
        """Adds the prefiller's seconds to a tail."""
        memory = self._tails[slot, self._times_at : self._times_at + 8 * _TIMES]
        times = torch.tensor([waited, computed], dtype=torch.float64, device="cpu")
        memory.view(torch.float64).copy_(times)

    def read_times(self, slot: int) -> tuple[float, float]:
        """The seconds that the prompt waited, and was computed."""
        memory = self._tails[slot, self._times_at : self._times_at + 8 * _TIMES]
        waited, computed = memory.clone().view(torch.float64).tolist()
        return waited, computed

    def stats(self) -> dict[str, Any]:
        """How many pages are in which state."""
        pools = self.pools.pools
        return {
            "pages": sum(pool.total for pool in pools),
            "free_pages": sum(pool.free_pages for pool in pools),
            "cached_pages": sum(pool.idle_pages for pool in pools),
            "owned_pages": sum(pool.owned_pages for pool in pools),
            "held_pages": sum(pool.held_pages for pool in pools),
            "idle": self.pools.idle,
        }

    def close(self) -> None:
        for engine in self.engines:
            engine.close()


def _transfer_engine(args: ServeArgs, name: str) -> TransferEngine:
    """With the cluster's secret and the node's address, unless the user says otherwise."""
    chosen = args.fabric.revealed() | {"name": name[-128:]}
    if "token" not in chosen and not os.environ.get("FABRIC_RAY_TOKEN"):
        chosen["token"] = cluster_token()
    if "bind" not in chosen and not os.environ.get("FABRIC_RAY_BIND"):
        chosen["bind"] = (node_address(),)
    return TransferEngine(**chosen)
