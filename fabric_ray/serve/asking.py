"""A prompt asked of prefillers, one after the other, until its pages are there."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

import msgspec

from fabric_ray import observe
from fabric_ray.errors import FabricError
from fabric_ray.inference.protocols import Tail
from fabric_ray.kvcache import Decoder, Pull
from fabric_ray.serve.clock import Clock
from fabric_ray.serve.config import DecodeArgs
from fabric_ray.serve.errors import BadRequest, Busy, NoPrefill, ServeError
from fabric_ray.serve.instance import Instance
from fabric_ray.serve.prefillers import AllLost, Offered, Prefillers
from fabric_ray.serve.seats import Seat
from fabric_ray.serve.verdicts import Reluctance, Verdict, verdict
from fabric_ray.serve.wire import Generate, Prompt

logger = logging.getLogger(__name__)

_PAUSE = 0.1
"""Seconds before prefillers that were busy, or couldn't be found, are asked once more."""

_QUIET = 1.0
"""Seconds in which a failed attempt should have shown that it writes no more."""

_BESIDE = 512
"""Bytes of a request beside its prompt, its page tables and its counters, with room to spare."""

_RANK = 64
"""The most bytes that one rank's counter takes in a request."""

_ENTRY = 5
"""The most bytes that one page takes in a request."""


class _Attempts:
    """What one request has tried, and what came of it."""

    def __init__(self) -> None:
        self.causes: list[str] = []
        self.busy = 0
        self.tried: dict[str, int] = {}

    def failed(self, who: str, error: Exception, found: Verdict) -> None:
        self.causes.append(f"{who}: {error}")
        self.busy += found is Verdict.BUSY
        self.tried[who] = self._reluctance(who, found)

    def _reluctance(self, who: str, found: Verdict) -> Reluctance:
        if found is Verdict.SLOW:
            return Reluctance.MISSED
        # Once more it is asked whether it is back.
        again = found is Verdict.LOST and who in self.tried
        return Reluctance.LOST if again else Reluctance.TRIED

    def error(self) -> ServeError:
        """Why the request ends."""
        told = "; ".join(self.causes)
        if self.causes and self.busy == len(self.causes):
            return Busy(f"all prefillers that were asked are busy ({told}); try again later")
        return NoPrefill(f"no prefiller computed the prompt: {told}")


class Asking:
    """Gets prompts computed for one decoder.

    Args:
        instance: pages and tails that prefillers write to.
        decoder: which asks.
        prefillers: who may be asked.
        args: attempts and deadlines.
    """

    def __init__(
        self, instance: Instance, decoder: Decoder, prefillers: Prefillers, args: DecodeArgs
    ) -> None:
        self._instance, self._decoder, self._prefillers = instance, decoder, prefillers
        self._args = args
        self.retries = 0
        """Attempts after a first one."""

    async def tail(self, request: Generate, seat: Seat, clock: Clock) -> Tail:
        """The prompt's tail, once its pages are there (IC-2): from the first prefiller that can do
        it. Nothing of a failed attempt is read, and none begins before the last one's writes are
        over, or with pages that they can't reach (MR-1).

        Raises:
            BadRequest: no prefiller has room for the prompt; the text has the limit.
            Busy: all that were asked have too much to do.
            NoPrefill: it came from none; the text tells what became of each attempt.
        """
        attempts = _Attempts()
        for left in reversed(range(self._args.prefill_attempts)):
            self.retries += bool(attempts.causes)
            found = await self._attempt(request, seat, clock, attempts)
            if isinstance(found, Tail):
                return found
            if found is Verdict.HERE or not left:
                break
            if not await self._quiet(seat):
                # It hangs, and may go on to write one day: others get other pages.
                try:
                    await seat.renew(timeout=self._args.queue_timeout)
                except Busy as error:
                    attempts.causes.append(f"no pages for another attempt: {error}")
                    break
        raise attempts.error()

    async def _attempt(
        self, request: Generate, seat: Seat, clock: Clock, attempts: _Attempts
    ) -> Tail | Verdict:
        """Asks one prefiller."""
        try:
            offered = await self._prefillers.choose(
                tried=attempts.tried, timeout=self._args.prefill_timeout
            )
        except TimeoutError as error:
            attempts.causes.append(str(error))
            return Verdict.HERE
        except AllLost as error:
            attempts.causes.append(str(error))
            return Verdict.HERE
        except ServeError as error:
            attempts.causes.append(str(error))
            await asyncio.sleep(_PAUSE)
            return Verdict.FAILED
        clock.attempts += 1
        self._prefillers.begin(offered)
        try:
            if attempts.busy and offered.replica in attempts.tried:
                await asyncio.sleep(_PAUSE * attempts.busy)
            return await self._pulled(request, seat, clock, offered)
        except ServeError:
            raise
        except (FabricError, OSError) as error:
            return self._failed(offered, error, attempts)
        finally:
            self._prefillers.end(offered)

    def _failed(self, offered: Offered, error: Exception, attempts: _Attempts) -> Verdict:
        found = verdict(error)
        if found is Verdict.TOO_LONG:
            raise BadRequest(f"{offered.replica}: {error}", param="prompt") from error
        attempts.failed(offered.replica, error, found)
        if found is Verdict.LOST:
            self._prefillers.lost(offered, str(error))
        elif found is Verdict.SLOW:
            self._prefillers.slow(offered)
        elif found in (Verdict.BUSY, Verdict.FAILED):
            self._prefillers.answered(offered)
        return found

    async def _pulled(self, request: Generate, seat: Seat, clock: Clock, offered: Offered) -> Tail:
        number = await self._prefillers.meet(offered)
        clock.asked = time.monotonic()
        pull = self.pull(request, seat, number)
        seat.expect(pull)
        await pull.ready()
        self._prefillers.answered(offered)
        clock.ready = time.monotonic()
        clock.cached = seat.prefix
        clock.prefill_queue, clock.prefill = self._instance.read_times(seat.slot)
        tail = self._instance.engine.read_tail(self._instance.tail(seat.slot))
        seat.arrived()
        logger.debug("%s: %d tokens came from %s", request.id, len(request.tokens), offered.replica)
        return tail

    def pull(self, request: Generate, seat: Seat, prefiller: int) -> Pull:
        """Asks a prefiller that has been met for what the seat lacks of a prompt.

        Raises:
            BadRequest: the prompt makes a longer message than prefillers take.
            Stale: the prefiller has been given up.
        """
        tokens = len(request.tokens)
        tables = [
            table[: -(-tokens // group.page_tokens)]
            for group, table in zip(self._instance.pools.groups, seat.tables.tables, strict=True)
        ]
        payload = msgspec.msgpack.encode(Prompt(request.id, request.tokens))
        nbytes = len(payload) + _ENTRY * sum(map(len, tables))
        nbytes += _RANK * len(self._instance.ranks) + _BESIDE
        most = self._instance.terms.max_message
        if nbytes > most:
            raise BadRequest(
                f"a prompt of {tokens} tokens takes up to {nbytes} bytes as a message, and "
                f"terms.max_message is {most}; shorten the prompt",
                param="prompt",
            )
        with observe.span(request.id):
            return self._decoder.pull(
                prefiller,
                tokens=tokens,
                have=seat.prefix,
                tables=tables,
                tail_slot=seat.slot,
                payload=payload,
                timeout=self._args.prefill_timeout,
                salt=hash(request.id) & 0xFFFF_FFFF,
            )

    async def _quiet(self, seat: Seat) -> bool:
        """Whether the seat's memory may be given to another prefiller: what was asked before writes
        no more (MR-1)."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(seat.quiet(), _QUIET)
        return seat.is_quiet
