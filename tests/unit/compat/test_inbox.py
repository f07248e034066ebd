"""Unread notifications are kept up to a bound."""

from __future__ import annotations

import logging

import pytest

from fabric_ray.compat.inbox import Inbox


@pytest.mark.parametrize(("most", "most_bytes"), [(2, 100), (100, 20)], ids=["count", "bytes"])
def test_notifications_beyond_the_bound_are_dropped_and_logged_once(
    most: int, most_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    inbox = Inbox[int](logging.getLogger("inbox"), most=most, most_bytes=most_bytes)
    for round_ in (1, 2):
        for said in range(5):
            inbox.add(said, 10)
        assert inbox.take() == [0, 1]
        assert caplog.text.count("are dropped") == round_
    assert inbox.take() == []
