//! Which silence ends a link, and which does not.

use std::time::Duration;

use super::throttle_tests::{joined, End};
use crate::{api::EngineConfig, domain::Completion, time::Time};

fn timeout() -> Duration {
    EngineConfig::default().peer_timeout
}

/// Polls after `gap`; returns the cause of the link's end, if it ended.
fn poll_after(end: &mut End, now: &mut Time, gap: Duration) -> Option<String> {
    *now = now.after(gap);
    end.poll(now);
    end.poll(now);
    end.out.iter().find_map(|c| match c {
        Completion::LinkDown { cause, .. } => Some(cause.to_string()),
        _ => None,
    })
}

#[test]
fn rs_4_a_process_that_did_not_run_loses_no_peer_that_ran_as_little() {
    let (mut a, mut b, mut now) = joined();
    // Both run for one round in five timeouts. What one sends waits for the other's next round.
    for _ in 0..6 {
        assert_eq!(poll_after(&mut a, &mut now, timeout() * 5), None);
        assert_eq!(poll_after(&mut b, &mut now, Duration::ZERO), None);
    }
}

#[test]
fn rs_4_a_process_that_did_not_run_loses_no_peer_whose_heartbeat_is_late() {
    let (mut a, mut b, mut now) = joined();
    assert_eq!(poll_after(&mut a, &mut now, timeout() * 5), None, "nothing waits in the socket");
    assert_eq!(poll_after(&mut b, &mut now, Duration::ZERO), None);
    assert_eq!(poll_after(&mut a, &mut now, timeout() / 2), None);
}

#[test]
fn rs_4_a_silent_peer_is_lost_in_time_by_a_process_that_runs() {
    let (mut a, _b, mut now) = joined();
    for _ in 0..3 {
        assert_eq!(poll_after(&mut a, &mut now, timeout() / 4), None);
    }
    let cause = poll_after(&mut a, &mut now, timeout() / 4).expect("lost after the timeout");
    assert!(cause.contains("nothing received for 2s"), "{cause}");
}

#[test]
fn rs_4_a_silent_peer_is_lost_by_a_process_that_hardly_runs() {
    let (mut a, _b, mut now) = joined();
    let rounds = (1..10).find(|_| poll_after(&mut a, &mut now, timeout() * 5).is_some());
    assert_eq!(rounds, Some(4));
}
