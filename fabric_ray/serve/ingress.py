"""The deployment that serves HTTP and sends each request to a decoder."""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import msgspec
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from fabric_ray.runtime.causes import cause_of
from fabric_ray.serve import answers, openai
from fabric_ray.serve.body_reader import BodyReader
from fabric_ray.serve.broadcast import broadcast
from fabric_ray.serve.config import ServeArgs
from fabric_ray.serve.errors import (
    BadRequest,
    Busy,
    DecoderLost,
    NoPrefill,
    NotFound,
    ServeError,
)
from fabric_ray.serve.instance import chat_template, max_model_len, tokenizer
from fabric_ray.serve.messages import Emitted, Event, Failed, Finished, Generate

logger = logging.getLogger("ray.serve")

_STATS_TIMEOUT = 5.0
"""Seconds for the statistics of all replicas."""

Handler = Callable[[Request], Awaitable[Response]]


class Router:
    """A replica of the router.

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
        self._tokenizer, self._template = tokenizer(args), chat_template(args)
        self._max_model_len = max_model_len(args)
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
            ("POST", "/v1/completions"): partial(self._answer, openai.CompletionBody),
            ("POST", "/v1/chat/completions"): partial(self._answer, openai.ChatBody),
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

    async def _answer(self, kind: type[openai.Body], request: Request) -> Response:
        self._counts["requests"] += 1
        self._require_slot()
        id = openai.request_id(request.headers.get("x-request-id"), kind)
        body = openai.parse(await self._bodies.read(request), kind)
        self._require_slot()
        generate = openai.generate_request(
            body,
            self._args,
            self._tokenizer,
            self._template,
            id=id,
            max_model_len=self._max_model_len,
        )
        answer = answers.Answer.of(body, generate, model=self._args.model_id)
        events = self._events(generate)
        try:
            # The first event decides the HTTP status.
            first = await anext(events)
            if isinstance(first, Failed):
                raise first.error()
            if isinstance(first, Finished) and not body.stream:
                return JSONResponse(answer.whole(first))
        except BaseException:
            await events.aclose()
            raise
        stream = self._stream(answer, first, events)
        return StreamingResponse(stream, media_type="text/event-stream")

    @property
    def _full(self) -> bool:
        return self._open >= self._args.router.max_requests

    def _require_slot(self) -> None:
        if self._full:
            self._counts["turned_away"] += 1
            raise Busy(f"{self._open} requests are open here; try again later")

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """Counts an open request."""
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1

    async def _stream(
        self, answer: answers.Answer, first: Event, events: AsyncGenerator[Event, None]
    ) -> AsyncGenerator[bytes, None]:
        async with contextlib.aclosing(events):
            event = first
            if opening := answer.opening():
                yield opening
            while True:
                if isinstance(event, Emitted):
                    yield answer.chunk(event)
                elif isinstance(event, Finished):
                    yield answer.last(event)
                    return
                else:
                    yield answers.error_data(event.error())
                    return
                event = await anext(events)

    async def _events(self, request: Generate) -> AsyncGenerator[Event, None]:
        """The events of a request. Other decoders are tried until one gives a first token."""
        with self._counted():
            for left in reversed(range(self._args.router.attempts)):
                started = False
                async with contextlib.aclosing(self._decoder_events(request)) as events:
                    async for event in events:
                        if (
                            isinstance(event, Failed)
                            and not started
                            and left
                            and _may_retry(event, request)
                        ):
                            self._counts["retries"] += 1
                            logger.warning("%s is tried again: %s", request.id, event.message)
                            # By load: the decoder with the prefix has failed.
                            request = msgspec.structs.replace(request, blocks=())
                            break
                        started = True
                        self._counts["failed"] += isinstance(event, Failed)
                        yield event
                        if not isinstance(event, Emitted):
                            return

    async def _decoder_events(self, request: Generate) -> AsyncGenerator[Event, None]:
        """The events of one decoder; the last one is :class:`Finished` or :class:`Failed`."""
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
        yield Failed.of(DecoderLost(f"the decoder was lost: {cause}; send the request again"))

    async def _models(self, request: Request) -> Response:
        model = {"id": self._args.model_id, "object": "model", "owned_by": "fabric-ray"}
        return JSONResponse({"object": "list", "data": [{**model, "created": 0}]})

    async def _health(self, request: Request) -> Response:
        """Succeeds if a slot is free, and a decoder and a prefiller answer."""
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
        """Statistics of this replica, and of all others that answer."""
        own = {
            "role": "router",
            "replica": self._name,
            "pid": os.getpid(),
            "open": self._open,
            "reading": self._bodies.open,
            "body_timeouts": self._bodies.timed_out,
        }
        prefill, decode = await asyncio.gather(
            *(
                broadcast(handle, "stats", timeout=_STATS_TIMEOUT)
                for handle in (self._prefill, self._decode)
            )
        )
        return {"replicas": [{**own, **self._counts}, *prefill, *decode]}

    def _refusal(self, error: ServeError) -> Response:
        wait = {"Retry-After": str(self._args.router.retry_after)}
        headers = wait if error.status in (429, 503) else {}
        return JSONResponse(answers.error_body(error), status_code=error.status, headers=headers)


def _may_retry(event: Failed, request: Generate) -> bool:
    """Whether another decoder may succeed. All decoders use the same prefillers, and retries while
    all are busy would add to their load."""
    error = event.error()
    if isinstance(error, Busy):
        return bool(request.blocks)  # It was routed by its prefix: another decoder may have room.
    return error.retryable and not isinstance(error, NoPrefill)


def _unknown(method: str, path: str, paths: dict[tuple[str, str], Handler]) -> ServeError:
    methods = [known for known, other in paths if other == path]
    if methods:
        return BadRequest(f"{path} takes {' and '.join(methods)}, not {method}")
    known = ", ".join(f"{method} {path}" for method, path in paths)
    return NotFound(f"there is no {path} here; use one of {known}")
