"""The deployment that speaks HTTP, and finds a decoder for each request."""

import asyncio
import contextlib
import logging
import os
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import Any

import msgspec
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from fabric_ray.runtime.causes import cause_of
from fabric_ray.serve import openai
from fabric_ray.serve.bodies import BodyReader
from fabric_ray.serve.config import ServeArgs
from fabric_ray.serve.errors import (
    BadRequest,
    Busy,
    DecoderLost,
    NoPrefill,
    NotFound,
    ServeError,
)
from fabric_ray.serve.everyone import all_say
from fabric_ray.serve.instance import tokenizer
from fabric_ray.serve.wire import Emitted, Event, Failed, Finished, Generate

logger = logging.getLogger("ray.serve")

_ASK_ALL = 5.0
"""Seconds that replicas have to say how they are."""

Handler = Callable[[Request], Awaitable[Response]]


class Router:
    """A replica of routers.

    Args:
        args: of the deployment.
        decode: handle of the decode deployment.
        prefill: handle of the prefill deployment, for its stats.
    """

    def __init__(
        self,
        args: ServeArgs,
        decode: "DeploymentHandle[Any]",
        prefill: "DeploymentHandle[Any]",
    ) -> None:
        self._args = args
        self._tokenizer = tokenizer(args)
        self._decode, self._prefill = decode, prefill
        self._open = 0
        self._bodies = BodyReader(
            max_bytes=args.router.max_body,
            max_open=args.router.max_requests,
            timeout=args.router.body_timeout,
        )
        self._counts = {"requests": 0, "turned_away": 0, "retries": 0, "failed": 0}
        self._name = f"router-{serve.get_replica_context().replica_id.unique_id}"
        self._paths: dict[tuple[str, str], Handler] = {
            ("POST", "/v1/completions"): self._completions,
            ("GET", "/v1/models"): self._models,
            ("GET", "/health"): self._health,
            ("GET", "/stats"): self._stats,
        }

    async def __call__(self, request: Request) -> Response:
        path = request.scope["path"].removeprefix(request.scope.get("root_path", "")) or "/"
        try:
            handler = self._paths.get((request.method, path))
            if handler is None:
                raise _unknown(request.method, path, self._paths)
            return await handler(request)
        except ServeError as error:
            return self._refusal(error)

    async def _completions(self, request: Request) -> Response:
        self._counts["requests"] += 1
        self._require_slot()
        body = openai.parse(await self._bodies.read(request))
        self._require_slot()
        asked = openai.asked(body, self._args, self._tokenizer, id=f"cmpl-{uuid.uuid4().hex}")
        answer = openai.Answer(body, asked, model=self._args.model_id)
        events = self._events(asked)
        try:
            # Nothing is said before it is known whether the request can be carried out.
            first = await anext(events)
            if isinstance(first, Failed):
                raise first.error()
            if isinstance(first, Finished) and not body.stream:
                return JSONResponse(answer.whole(first))
        except BaseException:
            await events.aclose()
            raise
        spoken = self._spoken(answer, first, events)
        return StreamingResponse(spoken, media_type="text/event-stream")

    @property
    def _full(self) -> bool:
        return self._open >= self._args.router.max_requests

    def _require_slot(self) -> None:
        if self._full:
            self._counts["turned_away"] += 1
            raise Busy(f"{self._open} requests are open here; try again later")

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """A request is open."""
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1

    async def _spoken(
        self, answer: openai.Answer, first: Event, events: AsyncGenerator[Event, None]
    ) -> AsyncGenerator[bytes, None]:
        async with contextlib.aclosing(events):
            event = first
            while True:
                if isinstance(event, Emitted):
                    yield answer.chunk(event)
                elif isinstance(event, Finished):
                    yield answer.last(event)
                    return
                else:
                    yield openai.error_data(event.error())
                    return
                event = await anext(events)

    async def _events(self, request: Generate) -> AsyncGenerator[Event, None]:
        """What comes of a request, from as many decoders as it takes to get a first token."""
        with self._counted():
            for left in reversed(range(self._args.router.attempts)):
                said = False
                async with contextlib.aclosing(self._asked(request)) as events:
                    async for event in events:
                        if (
                            isinstance(event, Failed)
                            and not said
                            and left
                            and _elsewhere(event, request)
                        ):
                            self._counts["retries"] += 1
                            logger.warning("%s is tried again: %s", request.id, event.message)
                            # By load this time: whoever held its prefix couldn't do it.
                            request = _without_blocks(request)
                            break
                        said = True
                        self._counts["failed"] += isinstance(event, Failed)
                        yield event
                        if not isinstance(event, Emitted):
                            return

    async def _asked(self, request: Generate) -> AsyncGenerator[Event, None]:
        """What one decoder says; the last event is :class:`Finished` or :class:`Failed`."""
        response: Any = self._decode.options(stream=True).generate.remote(request)
        over = False
        try:
            async for event in response:
                over = not isinstance(event, Emitted)
                yield event
                if over:
                    return
            cause = "its stream ended early"
        except BackPressureError as error:
            yield Failed.of(Busy(f"all decoders are busy ({error}); try again later"))
            return
        except (RayError, RayServeException) as error:
            cause = f"{type(error).__name__}: {cause_of(error)}"
        finally:
            if not over:
                response.cancel()
        over = True
        lost = DecoderLost(f"the decoder of this request is gone ({cause}); ask again")
        yield Failed.of(lost)

    async def _models(self, request: Request) -> Response:
        model = {"id": self._args.model_id, "object": "model", "owned_by": "fabric-ray"}
        return JSONResponse({"object": "list", "data": [{**model, "created": 0}]})

    async def _health(self, request: Request) -> Response:
        """Whether a request can be taken: a slot is free, a decoder and a prefiller answer."""
        if self._full:
            text = f"all {self._open} slots of this router are taken; see router.max_requests"
            return JSONResponse({"status": "busy", "cause": text}, status_code=503)
        roles = {replica["role"] for replica in (await self.stats())["replicas"]}
        missing = sorted({"decode", "prefill"} - roles)
        if missing:
            text = f"no replica of {' and '.join(missing)} answers; look at serve status"
            return JSONResponse({"status": "unavailable", "cause": text}, status_code=503)
        return JSONResponse({"status": "ok"})

    async def _stats(self, request: Request) -> Response:
        return JSONResponse(await self.stats())

    async def stats(self) -> dict[str, Any]:
        """Of all replicas that answer, this one's included."""
        mine = {
            "role": "router",
            "replica": self._name,
            "pid": os.getpid(),
            "open": self._open,
            "reading": self._bodies.open,
            "body_timeouts": self._bodies.timed_out,
        }
        theirs = await asyncio.gather(
            *(
                all_say(handle, "stats", timeout=_ASK_ALL)
                for handle in (self._prefill, self._decode)
            )
        )
        return {"replicas": [{**mine, **self._counts}, *theirs[0], *theirs[1]]}

    def _refusal(self, error: ServeError) -> Response:
        wait = {"Retry-After": str(self._args.router.retry_after)}
        headers = wait if error.status in (429, 503) else {}
        return JSONResponse(openai.error_body(error), status_code=error.status, headers=headers)


def _elsewhere(event: Failed, request: Generate) -> bool:
    """Whether another decoder may be asked. Prefillers are the same for all decoders; where all are
    busy, asking more of them makes it worse."""
    error = event.error()
    if isinstance(error, Busy):
        return bool(request.blocks)  # it went where its prefix is, not where there is room
    return error.retryable and not isinstance(error, NoPrefill)


def _without_blocks(request: Generate) -> Generate:
    return msgspec.structs.replace(request, blocks=())


def _unknown(method: str, path: str, paths: dict[tuple[str, str], Handler]) -> ServeError:
    methods = [known for known, other in paths if other == path]
    if methods:
        return BadRequest(f"{path} takes {' and '.join(methods)}, not {method}")
    known = ", ".join(f"{method} {path}" for method, path in paths)
    return NotFound(f"there is no {path} here; use one of {known}")
