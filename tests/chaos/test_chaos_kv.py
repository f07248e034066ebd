"""A short run of chaos with requests for KV pages, and what its judge notices."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.chaos.draw import Fault
from tests.chaos.kv.decode import Came
from tests.chaos.kv.draw import MOST_TOKENS, TIMEOUT, Ask, KvRound, Side, draw, sides
from tests.chaos.kv.judge import judge
from tests.chaos.kv.memory import Memory, states
from tests.chaos.kv.world import KvWorld
from tests.chaos.world import Summary

# A seed whose first rounds have a bit of everything.
SEED, ROUNDS = 1, 12


def test_requests_for_pages_end_right_or_with_a_cause_in_chaos() -> None:
    """RS-1, IC-2, IC-4, MR-1: right words or an error, and no page that is taken at the end."""

    def play(transport: str) -> Summary:
        return KvWorld(SEED, transport).play(0, ROUNDS)

    with ThreadPoolExecutor(2) as pool:
        for summary in pool.map(play, ["tcp", "shm"]):
            assert not summary.broken, "\n".join(summary.broken)
            assert summary.rounds == ROUNDS
            assert summary.results["ok"] > 0
            assert summary.results["PullCancelled"] > 0


def test_a_round_of_requests_follows_from_its_number_and_the_seed() -> None:
    rounds = [draw(seed, "tcp", number, 16) for seed in (1, 2) for number in range(60)]
    assert rounds == [draw(seed, "tcp", number, 16) for seed in (1, 2) for number in range(60)]
    kinds = {f.kind for r in rounds for f in r.faults}
    assert kinds == {"kill", "freeze", "sleep", "reset"}
    assert all(f.victim in (1, 3) for r in rounds for f in r.faults if f.kind == "kill")
    asks = [ask for r in rounds for ask in r.asks]
    assert all(a.have % 16 == 0 and a.have < a.tokens <= MOST_TOKENS for a in asks)
    assert any(a.cancel is not None for a in asks)
    assert any(a.hasty for a in asks)
    assert any(a.fails is not None for a in asks)


ASK = Ask(7, ("test",), 0, 2, 5, 0, 0, 0.0, TIMEOUT, None, 5, 0.0, None)
CANCELLED, HASTY, FAILING = (
    Ask(7, ("test",), 0, 2, 5, 0, 0, 0.0, timeout, cancel, 5, 0.0, fails)
    for timeout, cancel, fails in ((TIMEOUT, 0.1, None), (0.1, None, None), (TIMEOUT, None, 0))
)


@pytest.mark.parametrize(
    ("ask", "came", "disturbed", "found"),
    [
        (ASK, Came(7, None), False, None),
        (ASK, Came(7, None, "", ("IC-2: 3 words",)), False, "IC-2"),
        (ASK, Came(7, "hang"), True, "IC-4"),
        (ASK, Came(7, "PrefillerLost", "it died"), True, None),
        (ASK, Came(7, "PrefillerLost", ""), True, "IC-4"),
        (ASK, Came(7, "PrefillerLost", "it died"), False, "error"),
        (ASK, Came(7, "PullCancelled", "here"), True, "error"),
        (ASK, Came(7, "ValueError", "?"), True, "error"),
        (ASK, Came(7, "PullTimeout", "late"), False, "error"),
        (CANCELLED, Came(7, "PullCancelled", "here"), False, None),
        (HASTY, Came(7, "PullTimeout", "late"), False, None),
        (FAILING, Came(7, "PrefillFailed", f"no: {FAILING.reason}"), False, None),
        (FAILING, Came(7, "PrefillFailed", "no"), False, "error"),
        (FAILING, Came(7, None), True, "RS-1"),
    ],
)
def test_a_judge_notices_how_requests_end(
    ask: Ask, came: Came, disturbed: bool, found: str | None
) -> None:
    stage = KvRound(0, (Fault("kill", 3, 0.0),) if disturbed else (), (ask,))
    wrong, results = judge(stage, {0: [came]}, disturbed=disturbed)
    said = [what.split(": ")[1] for what in wrong]
    assert said == ([found] if found else [])
    assert sum(results.values()) == 1
    assert judge(stage, {0: []}, disturbed=disturbed)[0] == ["IC-4: d0 says nothing of [7]"]


@pytest.mark.parametrize("side", [Side(1, 16, False), Side(2, 4, True)])
def test_free_pages_that_change_and_wrong_words_are_noticed(side: Side) -> None:
    memory = Memory("m", "shm", side)
    try:
        found = memory.take(50)
        assert found is not None
        pages, slot, wrong = found
        assert wrong == []
        words = states(("a",), 50)
        for layer in range(len(words)):
            memory.write(pages, layer, words, 0, 13)
            memory.write(pages, layer, words, 13, 50)
        assert memory.differs(pages, words) is None
        assert memory.differs(pages, states(("b",), 50)) is not None
        assert memory.differs(pages[::-1], words) is not None
        assert "leak" in memory.look()[0]
        memory.give(pages, slot)
        assert memory.look() == []
        memory.write(pages, 2, words, 49, 50)
        memory.tail(slot)[0] = 1
        assert [what.split(":")[0] for what in memory.look()] == ["MR-1"] * (side.ranks + 1)
    finally:
        memory.close()


def test_caches_are_made_as_the_seed_says() -> None:
    made = {sides(seed, "tcp", 0) for seed in range(40)}
    assert len({decode.page_tokens for decode, _ in made}) == 4
    assert {decode.ranks < prefill.ranks for decode, prefill in made} == {True, False}
