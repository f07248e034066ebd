"""What must hold after a round of requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from tests.chaos.kv.decode import Came
from tests.chaos.kv.draw import Ask, KvRound

# What processes that die or stand still may do to a request that was not to be given up.
_DISTURBED = {"PrefillerLost", "PullTimeout", "PrefillFailed", "PullRefused", "Stale"}
# What may become of the first word to a prefiller that is dead already.
_UNMET = {"PeerLost", "Unreachable", "Refused", "TransferTimeout", "HandshakeError"}


def judge(
    stage: KvRound, came: Mapping[int, Sequence[Came]], *, disturbed: bool
) -> tuple[list[str], Counter[str]]:
    """What a round broke, and what came of its requests.

    Args:
        stage: what was to be done.
        came: what decoders said that lived to say it.
        disturbed: whether anything went wrong in this round, or in the one before.
    """
    wrong: list[str] = []
    results: Counter[str] = Counter()
    for decoder, all_ in came.items():
        asked = {ask.id: ask for ask in stage.asks if ask.decoder == decoder}
        if missing := set(asked) - {each.id for each in all_}:
            wrong.append(f"IC-4: d{decoder} says nothing of {sorted(missing)}")
        for each in all_:
            results[each.error or "ok"] += 1
            wrong += [f"d{decoder} request {each.id}: {what}" for what in each.wrong]
            if what := _end(asked[each.id], each, disturbed):
                wrong.append(f"d{decoder} request {each.id}: {what}")
    return wrong, results


def _end(ask: Ask, came: Came, disturbed: bool) -> str | None:
    """What is wrong with the end of a request."""
    told = f"{came.error}: {came.text}"
    if came.error == "hang":
        return f"IC-4: it never ended, {came.text}"
    if came.error is None:
        return "RS-1: its engine gave up and its pages are ready" if ask.fails is not None else None
    if not came.text.strip():
        return f"IC-4: {came.error} without a cause"
    allowed = set()
    if ask.cancel is not None:
        allowed.add("PullCancelled")
    if ask.hasty:
        allowed.add("PullTimeout")
    if ask.fails is not None and ask.reason in came.text:
        allowed.add("PrefillFailed")
    if disturbed:
        allowed |= _DISTURBED | _UNMET
    return None if came.error in allowed else f"error: {told}"
