"""A short run of chaos, and what its judges notice."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from fabric_ray.errors import WeightSyncError
from tests.chaos import judge, weights
from tests.chaos.draw import Fault, Piece, Round, draw
from tests.chaos.pattern import differs, mixes, pattern
from tests.chaos.reports import Ended, content
from tests.chaos.world import Summary, World

# A seed whose first rounds have a bit of everything.
SEED, ROUNDS = 1, 8


def test_no_promise_breaks_in_chaos() -> None:
    def play(transport: str) -> Summary:
        return World(SEED, transport).play(0, ROUNDS)

    with ThreadPoolExecutor(2) as pool:
        for summary in pool.map(play, ["tcp", "shm"]):
            assert not summary.broken, "\n".join(summary.broken)
            assert summary.rounds == ROUNDS
            assert summary.results["write: ok"] > 0
            assert summary.results["push: ok"] > 0


def test_a_round_follows_from_its_number_and_the_seed() -> None:
    rounds = [draw(seed, "tcp", number) for seed in (1, 2) for number in range(50)]
    assert rounds == [draw(seed, "tcp", number) for seed in (1, 2) for number in range(50)]
    kinds = {f.kind for r in rounds for f in r.faults}
    assert kinds == {"kill", "freeze", "sleep", "reset", "spill", "no_room"}
    assert all(f.victim != 0 for r in rounds for f in r.faults if f.kind == "kill")


def test_bytes_name_their_writer_and_version() -> None:
    wanted = pattern(1000, 7, "tcp", 3, 0, 1)
    assert differs(wanted.copy(), wanted) is None
    for other in (pattern(1000, 7, "tcp", 4, 0, 1), pattern(1000, 7, "tcp", 3, 2, 1)):
        assert "bytes are wrong" in str(differs(other, wanted))
    torn = np.where(np.arange(1000) < 400, wanted, 9).astype(np.uint8)
    assert mixes(torn, np.full(1, 9, np.uint8), wanted) is None
    torn[700] ^= 1
    assert "1 of 1000 bytes are of no write, from 700" in str(
        mixes(torn, np.full(1, 9, np.uint8), wanted)
    )


PIECE = Piece(0, "pages", 1, 2, 512, 4, 0, 0.0, 1.0, (True, True))
MESSAGE = Piece(1, "message", 1, 2, 8, 1, None, 0.0, 1.0, (True, True))


def stage(*faults: Fault) -> Round:
    return Round(0, ("test",), "transfers", faults, (PIECE, MESSAGE))


def ended(id_: int, error: str | None = None, after: float = 0.1) -> Ended:
    return Ended(id_, error, "", 10.0, 10.0 + after)


def found(
    round_: Round,
    *sent: Ended,
    count: int = 4,
    messages: int = 1,
    killed: dict[int, float] | None = None,
) -> list[str]:
    """The names of the promises that a judge finds broken."""
    texts = [content(round_, MESSAGE)] * messages
    said = judge.Said(
        {1: (list(sent), []), 2: ([], [])},
        {2: ([], ({0: count}, texts, 0))},
        killed or {},
    )
    return [what.split(":")[0] for what in judge.judge(round_, said)[0]]


def test_a_judge_notices_what_is_broken() -> None:
    fine = ended(0), ended(1)
    kill, freeze = Fault("kill", 2, 0.0), Fault("freeze", 2, 0.0, 0.1)
    assert found(stage(), *fine) == []
    assert found(stage(), *fine, count=5) == ["IC-3"]
    assert found(stage(), *fine, count=3) == ["IC-4"]
    assert found(stage(), *fine, messages=2) == ["IC-3"]
    assert found(stage(), *fine, messages=0) == ["IC-3"]
    assert found(stage(), ended(0, "PeerLost"), ended(1)) == ["error"]
    assert found(stage(kill), ended(0, "PeerLost"), ended(1), killed={2: 10.0}) == []
    assert found(stage(kill), ended(0, "Stale"), ended(1), killed={2: 10.0}) == ["error"]
    assert found(stage(freeze), ended(0, "TransferTimeout", 1.1), ended(1), count=0) == []
    assert found(stage(freeze), ended(0, "TransferTimeout", 3.0), ended(1)) == ["IC-4"]
    assert found(stage(), ended(0, "hang"), ended(1)) == ["IC-4"]
    late = ended(0, "PeerLost", 3.5)
    assert found(stage(kill), late, ended(1), killed={2: 10.0}) == ["IC-4", "RS-4"]


def test_a_judge_notices_mixed_versions() -> None:
    def breaks(error: Any, reached: int, *versions: int | None, in_place: bool = False) -> bool:
        pushed = weights.Pushed(error, 5, 4, reached, 0.0, 1.0, in_place)
        held = {r: weights.Held(v, False, ()) for r, v in zip((2, 3), versions, strict=True)}
        faults = (Fault("kill", 3, 0.0),) if error else ()
        return bool(list(weights.judge(stage(*faults), pushed, held, {})))

    def failed(who: str) -> WeightSyncError:
        return WeightSyncError("no", version=5, failed={who: "died"})

    assert not breaks(None, 5, 5, 5)
    assert breaks(None, 5, 5, 4)
    assert breaks(None, 5, 5, None)
    assert breaks(None, 4, 4, 4)
    assert not breaks(failed("rollout 1"), 4, 4, 4)
    assert not breaks(failed("rollout 1"), 5, 5, 4)
    assert breaks(failed("rollout 0"), 5, 5, 4)
    assert breaks(failed("rollout 1"), 4, 3, 4)
