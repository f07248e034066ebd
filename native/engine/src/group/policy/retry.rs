//! What becomes of a slice that failed: another try here, one on another transport, or the end.
//!
//! TENT §3.4.1 retries on other pairs of NICs for a limited number of times, §3.4.2 on other
//! transports. Here the deadline bounds both, and a transfer whose only rail is down for a moment
//! may wait for it. Whether a slice may be sent twice at all, so that nothing is counted twice
//! (IC-3), isn't asked here: only slices without a count come here, and those whose count is known
//! not to have arrived.

use std::time::Duration;

use crate::time::Time;

/// Tries of one slice altogether, and on one transport.
pub const TRIES: u32 = 8;
pub const TRIES_HERE: u32 = 4;

/// Why a slice failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// An error of the link, or silence.
    Rail,
    /// The peer's answer, which another rail would repeat: out of bounds, stale, not allowed.
    Refusal,
}

/// What is known when a slice has failed.
#[derive(Clone, Copy, Debug)]
pub struct Failed {
    pub cause: Cause,
    /// Tries so far, this one included: altogether, and on the transport in use.
    pub tries: u32,
    pub tries_here: u32,
    pub deadline: Time,
    /// How long another try is expected to take.
    pub expected: Duration,
    /// Rails of this transport that may be used now.
    pub rails: usize,
    /// When one of those that may not is to be tried again; `NEVER` if none is.
    pub returns: Time,
    /// Transports that also reach the peer and that the user allows (RS-2).
    pub transports: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Once more on this transport, on a rail that may be used.
    Here,
    /// On the next transport.
    Elsewhere,
    /// On this transport, at this time.
    Later(Time),
    GiveUp(Why),
}

/// Why there is no further try.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    Refused,
    /// No further try would be through by the deadline.
    NoTime,
    /// The budget is spent.
    Tries,
    /// Nothing reaches the peer, nor will.
    NoWay,
}

/// Decides. Every chain of failures ends: each try but the first costs one of [`TRIES`].
pub fn next(now: Time, failed: Failed) -> Next {
    let in_time = |start: Time| {
        let end = start.after(failed.expected);
        start < failed.deadline && (end <= failed.deadline || failed.deadline == Time::NEVER)
    };
    if failed.cause == Cause::Refusal {
        return Next::GiveUp(Why::Refused);
    }
    if failed.tries >= TRIES {
        return Next::GiveUp(Why::Tries);
    }
    if !in_time(now) {
        return Next::GiveUp(Why::NoTime);
    }
    let here = failed.tries_here < TRIES_HERE;
    if here && failed.rails > 0 {
        return Next::Here;
    }
    if failed.transports > 0 {
        return Next::Elsewhere;
    }
    if !here {
        return Next::GiveUp(Why::Tries);
    }
    match failed.returns {
        Time::NEVER => Next::GiveUp(Why::NoWay),
        at if in_time(at.max(now)) => Next::Later(at.max(now)),
        _ => Next::GiveUp(Why::NoTime),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SOON: Time = Time(150);

    const FIRST: Failed = Failed {
        cause: Cause::Rail,
        tries: 1,
        tries_here: 1,
        deadline: Time(200),
        expected: Duration::from_nanos(10),
        rails: 2,
        returns: Time::NEVER,
        transports: 1,
    };

    #[test]
    fn rails_first_then_transports_then_patience() {
        let none = Failed { rails: 0, transports: 0, ..FIRST };
        #[rustfmt::skip]
        let table = [
            ("another rail", FIRST, Next::Here),
            ("no other transport", Failed { transports: 0, ..FIRST }, Next::Here),
            ("no other rail", Failed { rails: 0, ..FIRST }, Next::Elsewhere),
            ("enough tries here", Failed { tries: 4, tries_here: 4, ..FIRST }, Next::Elsewhere),
            ("fresh on the next transport", Failed { tries: 5, tries_here: 1, ..FIRST }, Next::Here),
            ("before waiting", Failed { rails: 0, returns: SOON, ..FIRST }, Next::Elsewhere),
            ("its rail comes back", Failed { returns: SOON, ..none }, Next::Later(SOON)),
            ("its rail is due", Failed { returns: Time(3), ..none }, Next::Later(Time(100))),
            ("too late for it", Failed { returns: Time(191), ..none }, Next::GiveUp(Why::NoTime)),
            ("just in time", Failed { returns: Time(190), ..none }, Next::Later(Time(190))),
            ("nothing left", none, Next::GiveUp(Why::NoWay)),
            ("enough tries, nothing else", Failed { tries_here: 4, transports: 0, ..FIRST }, Next::GiveUp(Why::Tries)),
            ("enough tries altogether", Failed { tries: 8, ..FIRST }, Next::GiveUp(Why::Tries)),
            ("refused", Failed { cause: Cause::Refusal, ..FIRST }, Next::GiveUp(Why::Refused)),
            ("no time", Failed { expected: Duration::from_nanos(101), ..FIRST }, Next::GiveUp(Why::NoTime)),
            ("just time", Failed { expected: Duration::from_nanos(100), ..FIRST }, Next::Here),
            ("past", Failed { deadline: Time(100), expected: Duration::ZERO, ..FIRST }, Next::GiveUp(Why::NoTime)),
            ("no deadline", Failed { deadline: Time::NEVER, expected: Duration::MAX, ..FIRST }, Next::Here),
        ];
        for (name, failed, expected) in table {
            assert_eq!(next(Time(100), failed), expected, "{name}");
        }
    }

    proptest! {
        /// Whatever happens, a slice that always fails ends within its budget and its deadline.
        #[test]
        fn every_chain_of_failures_ends(
            world in prop::collection::vec((0usize..3, 0usize..3, prop::option::of(0u64..300), 0u64..60), 9),
            deadline in prop_oneof![0u64..500, Just(u64::MAX)], expected in 0u64..50,
        ) {
            let deadline = Time(deadline);
            let (mut now, mut tries, mut tries_here) = (Time(0), 0, 0);
            let mut ended = false;
            for (rails, transports, returns, took) in world {
                tries += 1;
                tries_here += 1;
                now = Time(now.0 + took);
                let returns = returns.map_or(Time::NEVER, |t| Time(now.0 + t));
                let expected = Duration::from_nanos(expected);
                let cause = Cause::Rail;
                let step = next(now, Failed {
                    cause, tries, tries_here, deadline, expected, rails, returns, transports,
                });
                prop_assert!(tries_here <= TRIES_HERE);
                match step {
                    Next::Here => prop_assert!(rails > 0 && now < deadline),
                    Next::Elsewhere => {
                        prop_assert!(transports > 0 && now < deadline);
                        tries_here = 0;
                    }
                    Next::Later(at) => {
                        prop_assert!(at >= now && at < deadline);
                        now = at;
                    }
                    Next::GiveUp(_) => {
                        ended = true;
                        break;
                    }
                }
            }
            prop_assert!(ended, "nine tries and no end");
        }
    }
}
