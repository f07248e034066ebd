"""Prefillers and decoders of a deployment in one process, on real engines and transfers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from fabric_ray.inference.engine import TorchEngine
from fabric_ray.inference.generate import GenerationRequest, Generator
from fabric_ray.inference.sampling import Sampling
from fabric_ray.serve.completions import Completions
from fabric_ray.serve.config import ServeArgs
from fabric_ray.serve.engines import Role
from fabric_ray.serve.instance import Instance, load_model, tokenizer
from fabric_ray.serve.messages import Event, Generate
from fabric_ray.serve.prefill_loop import PrefillLoop
from fabric_ray.serve.prefillers import PrefillerOffer, least_loaded

FABRIC = {"token": "serve-tests", "bind": "127.0.0.1"}


class Listed:
    """Prefillers by name, as many as there are just now."""

    def __init__(self) -> None:
        self.offers: dict[str, bytes] = {}

    async def choose(self, *, avoid: Mapping[str, int], load: Mapping[str, int]) -> PrefillerOffer:
        loads = {name: float(load.get(name, 0)) for name in self.offers}
        name = least_loaded(loads, avoid=avoid)[0]
        return PrefillerOffer(name, self.offers[name])


class World:
    """One decoder and some prefillers."""

    def __init__(self, args: ServeArgs) -> None:
        self.args, self.listed = args, Listed()
        self.prefill: dict[str, PrefillLoop] = {}
        self._instances: list[Instance] = []
        self._serving: list[asyncio.Task[None]] = []
        decode = self._instance("d0", "decode")
        self.decode = Completions(
            decode, args.decode, discovery=self.listed, tokenizer=tokenizer(args)
        )

    def _instance(self, name: str, role: Role, args: ServeArgs | None = None) -> Instance:
        made = Instance(args or self.args, role, name=name)
        self._instances.append(made)
        return made

    def add_prefiller(
        self,
        name: str,
        change: Callable[[Instance], None] = lambda _: None,
        args: ServeArgs | None = None,
    ) -> PrefillLoop:
        instance = self._instance(name, "prefill", args)
        change(instance)
        loop = self.prefill[name] = PrefillLoop(instance, self.args.prefill)
        self._serving.append(asyncio.create_task(loop.serve()))
        self.listed.offers[name] = loop.offer
        return loop

    async def ask(self, request: Generate) -> Event:
        """The last event."""
        last: Event | None = None
        async for event in self.decode.generate(request):
            last = event
        assert last is not None
        return last

    async def idle(self) -> None:
        """Returns when no page and no slot is taken anywhere; fails if that doesn't come."""
        for _ in range(400):
            every = [self.decode.stats(), *(loop.stats() for loop in self.prefill.values())]
            if all(s["idle"] and s.get("taken_slots", 0) == 0 for s in every):
                assert all(s.get("free_slots", 0) == s["slots"] for s in every[1:]), every
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"something is still taken: {every}")

    async def close(self) -> None:
        await asyncio.to_thread(self.decode.close)
        for loop in self.prefill.values():
            await asyncio.to_thread(loop.close)
        await asyncio.gather(*self._serving)
        for instance in self._instances:
            instance.close()


@asynccontextmanager
async def world(prefillers: Sequence[str] = ("p0",), **fields: Any) -> AsyncIterator[World]:
    args = ServeArgs.model_validate({"torch_threads": 1, "fabric": FABRIC, **fields})
    made = World(args)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(made.close)
        for name in prefillers:
            made.add_prefiller(name)
        yield made


def prompts(count: int, *, seed: int, most: int = 90) -> list[tuple[int, ...]]:
    draw = random.Random(seed)
    return [tuple(draw.randrange(256) for _ in range(draw.randint(1, most))) for _ in range(count)]


def request(number: int, prompt: tuple[int, ...], max_tokens: int = 8, **fields: Any) -> Generate:
    temperature = 0.9 if number % 2 else 0.0
    return Generate(f"r{number}", prompt, max_tokens, temperature, seed=number, **fields)


def expected(args: ServeArgs, requests: Sequence[Generate]) -> list[tuple[int, ...]]:
    """What one engine says that does both halves."""
    plain = Generator(TorchEngine(load_model(args, tp=1)))
    stop = tokenizer(args).stop
    asked = [
        GenerationRequest(r.tokens, r.max_tokens, Sampling(r.temperature, r.top_p, r.seed), stop)
        for r in requests
    ]
    return [tuple(tokens) for tokens in plain.run(asked)]


class Around:
    """An engine with a change."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)
