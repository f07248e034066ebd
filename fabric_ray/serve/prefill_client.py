"""Requests prompts from prefillers, one after the other, until the pages have arrived."""

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
from fabric_ray.serve.config import DecodeArgs
from fabric_ray.serve.errors import BadRequest, Busy, NoPrefill, ServeError
from fabric_ray.serve.failures import AvoidLevel, FailureKind, failure_kind
from fabric_ray.serve.instance import Instance
from fabric_ray.serve.kv_allocator import KvReservation
from fabric_ray.serve.messages import Generate, Prompt
from fabric_ray.serve.prefillers import AllPrefillersLost, PrefillerOffer, Prefillers
from fabric_ray.serve.request_clock import RequestClock

logger = logging.getLogger(__name__)

_PAUSE = 0.1
"""Seconds before the next request to prefillers that were busy, or couldn't be found."""

_QUIESCE_TIMEOUT = 1.0
"""Seconds in which a failed attempt should quiesce before it costs the request its pages."""

_FIXED_NBYTES = 512
"""Most bytes of a request without its prompt, page tables and counters."""

_RANK_NBYTES = 64
"""Most bytes of one rank's counter in a request."""

_PAGE_NBYTES = 5
"""Most bytes of one page number in a request."""


class _Attempts:
    """The failed attempts of one request."""

    def __init__(self) -> None:
        self.causes: list[str] = []
        self.busy = 0
        self.tried: dict[str, int] = {}

    def add(self, replica: str, error: Exception, kind: FailureKind) -> None:
        self.causes.append(f"{replica}: {error}")
        self.busy += kind is FailureKind.BUSY
        self.tried[replica] = self._avoid_level(replica, kind)

    def _avoid_level(self, replica: str, kind: FailureKind) -> AvoidLevel:
        if kind is FailureKind.SLOW:
            return AvoidLevel.MISSED
        # A lost replica may be asked once more whether it is back.
        again = kind is FailureKind.LOST and replica in self.tried
        return AvoidLevel.LOST if again else AvoidLevel.TRIED

    def error(self) -> ServeError:
        """The error with which the request ends."""
        causes = "; ".join(self.causes)
        if self.causes and self.busy == len(self.causes):
            return Busy(f"all prefillers are busy ({causes}); try again later")
        return NoPrefill(f"no prefiller computed the prompt: {causes}")


class PrefillClient:
    """Has the prompts of one decoder computed by prefillers.

    Args:
        instance: pages and tails that prefillers write to.
        decoder: sends the requests.
        prefillers: selects the prefiller for each attempt.
        args: attempts and deadlines.
    """

    def __init__(
        self, instance: Instance, decoder: Decoder, prefillers: Prefillers, args: DecodeArgs
    ) -> None:
        self._instance, self._decoder, self._prefillers = instance, decoder, prefillers
        self._args = args
        self.retries = 0
        """Attempts after a first one."""

    async def prefill(
        self, request: Generate, reservation: KvReservation, clock: RequestClock
    ) -> Tail:
        """Returns the prompt's tail once all its pages have arrived (IC-2).

        Nothing of a failed attempt is read. An attempt begins when the writes of the last one have
        quiesced, or with other pages (MR-1).

        Raises:
            BadRequest: no prefiller has enough pages for the prompt; the text has the limit.
            Busy: all prefillers are busy.
            NoPrefill: no prefiller computed it; the text has the cause of each attempt.
        """
        attempts = _Attempts()
        for left in reversed(range(self._args.prefill_attempts)):
            self.retries += bool(attempts.causes)
            result = await self._attempt(request, reservation, clock, attempts)
            if isinstance(result, Tail):
                return result
            if result is FailureKind.LOCAL or not left:
                break
            if not await self._quiesce(reservation):
                # The prefiller hangs and may still write: the next attempt gets other pages.
                try:
                    await reservation.replace(timeout=self._args.queue_timeout)
                except Busy as error:
                    attempts.causes.append(f"no pages for another attempt: {error}")
                    break
        raise attempts.error()

    async def _attempt(
        self,
        request: Generate,
        reservation: KvReservation,
        clock: RequestClock,
        attempts: _Attempts,
    ) -> Tail | FailureKind:
        """Asks one prefiller."""
        try:
            offer = await self._prefillers.choose(
                tried=attempts.tried, timeout=self._args.prefill_timeout
            )
        except (TimeoutError, AllPrefillersLost) as error:
            attempts.causes.append(str(error))
            return FailureKind.LOCAL
        except ServeError as error:
            attempts.causes.append(str(error))
            await asyncio.sleep(_PAUSE)
            return FailureKind.FAILED
        clock.attempts += 1
        self._prefillers.begin(offer)
        try:
            if attempts.busy and offer.replica in attempts.tried:
                await asyncio.sleep(_PAUSE * attempts.busy)
            return await self._fetch(request, reservation, clock, offer)
        except ServeError:
            raise
        except (FabricError, OSError) as error:
            return self._on_failure(offer, error, attempts)
        finally:
            self._prefillers.end(offer)

    def _on_failure(
        self, offer: PrefillerOffer, error: Exception, attempts: _Attempts
    ) -> FailureKind:
        kind = failure_kind(error)
        if kind is FailureKind.TOO_LONG:
            raise BadRequest(f"{offer.replica}: {error}", param="prompt") from error
        attempts.add(offer.replica, error, kind)
        if kind is FailureKind.LOST:
            self._prefillers.lost(offer, str(error))
        elif kind is FailureKind.SLOW:
            self._prefillers.slow(offer)
        elif kind in (FailureKind.BUSY, FailureKind.FAILED):
            self._prefillers.answered(offer)
        return kind

    async def _fetch(
        self,
        request: Generate,
        reservation: KvReservation,
        clock: RequestClock,
        offer: PrefillerOffer,
    ) -> Tail:
        prefiller = await self._prefillers.connect(offer)
        clock.asked = time.monotonic()
        pull = self.pull(request, reservation, prefiller)
        reservation.attach(pull)
        await pull.ready()
        self._prefillers.answered(offer)
        clock.ready = time.monotonic()
        clock.cached = reservation.prefix
        slot = reservation.slot
        clock.prefill_queue, clock.prefill = self._instance.read_times(slot)
        tail = self._instance.engine.read_tail(self._instance.tail(slot))
        reservation.on_pages_ready()
        logger.debug("%s: got %d tokens from %s", request.id, len(request.tokens), offer.replica)
        return tail

    def pull(self, request: Generate, reservation: KvReservation, prefiller: int) -> Pull:
        """Requests the tokens of a prompt that the reservation lacks from a connected prefiller.

        Raises:
            BadRequest: the request would exceed ``terms.max_message``.
            Stale: the session with the prefiller has ended.
        """
        tokens = len(request.tokens)
        tables = [
            table[: -(-tokens // group.page_tokens)]
            for group, table in zip(
                self._instance.pools.groups, reservation.tables.tables, strict=True
            )
        ]
        payload = msgspec.msgpack.encode(Prompt(request.id, request.tokens))
        nbytes = len(payload) + _PAGE_NBYTES * sum(map(len, tables))
        nbytes += _RANK_NBYTES * len(self._instance.ranks) + _FIXED_NBYTES
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
                have=reservation.prefix,
                tables=tables,
                tail_slot=reservation.slot,
                payload=payload,
                timeout=self._args.prefill_timeout,
                salt=hash(request.id) & 0xFFFF_FFFF,
            )

    async def _quiesce(self, reservation: KvReservation) -> bool:
        """Whether another prefiller may write to the memory: the last one can't any more (MR-1)."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(reservation.quiesced(), _QUIESCE_TIMEOUT)
        return reservation.is_quiesced
