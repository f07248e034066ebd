//! Limits log lines that strangers can cause: one line per cause and interval, with a count of the
//! lines left out.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use crate::domain::DomainError;

const INTERVAL: Duration = Duration::from_secs(10);
/// Causes with a line of their own per interval; further causes share one. A stranger may choose
/// their text.
const MAX_CAUSES: usize = 16;

#[derive(Debug)]
struct Cause {
    logged: Instant,
    left_out: u64,
}

/// The log limit of one listener or domain.
#[derive(Debug, Default)]
pub(crate) struct LogLimit(HashMap<String, Cause>);

impl LogLimit {
    /// Whether to write this line; if so, how many lines of its cause were left out since the last
    /// one.
    fn admit(&mut self, now: Instant, cause: &str) -> Option<u64> {
        let over = |c: &Cause| now.saturating_duration_since(c.logged) >= INTERVAL;
        if !self.0.contains_key(cause) && self.0.len() >= MAX_CAUSES {
            self.0.retain(|_, c| !over(c));
        }
        let known = self.0.contains_key(cause) || self.0.len() < MAX_CAUSES;
        let cause = if known { cause } else { "" };
        match self.0.get_mut(cause) {
            Some(c) if !over(c) => {
                c.left_out += 1;
                None
            }
            Some(c) => {
                c.logged = now;
                Some(std::mem::take(&mut c.left_out))
            }
            None => {
                self.0.insert(cause.to_owned(), Cause { logged: now, left_out: 0 });
                Some(0)
            }
        }
    }

    /// Logs a connection that ended before its peer was proven, at info level if the peer only
    /// left.
    pub fn unproven(&mut self, peer: &str, cause: &DomainError) {
        let text = cause.to_string();
        let Some(left_out) = self.admit(Instant::now(), &text) else { return };
        let left_out = (left_out > 0).then_some(left_out);
        match cause {
            DomainError::LinkDown(_) | DomainError::Gone(_) => {
                tracing::info!(%peer, error = %text, left_out, "a connection ended before its peer was proven");
            }
            _ => {
                tracing::warn!(%peer, error = %text, left_out, "a connection ended before its peer was proven")
            }
        }
    }

    /// Warns of a fault that strangers can cause.
    pub fn warn(&mut self, what: &'static str, error: &dyn std::fmt::Display) {
        if let Some(left_out) = self.admit(Instant::now(), what) {
            let left_out = (left_out > 0).then_some(left_out);
            tracing::warn!(%error, left_out, "{what}");
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_flood_of_one_cause_is_a_line_per_interval_with_a_count() {
        let (mut limit, start) = (LogLimit::default(), Instant::now());
        let lines: Vec<u64> = (0..50_000)
            .filter_map(|i| limit.admit(start + Duration::from_millis(i), "junk"))
            .collect();
        assert_eq!(lines, [0, 9_999, 9_999, 9_999, 9_999]);
        assert_eq!(limit.admit(start, "another"), Some(0), "causes are limited separately");
    }

    #[test]
    fn causes_that_a_stranger_makes_up_share_a_line() {
        let (mut limit, start) = (LogLimit::default(), Instant::now());
        let flood = |limit: &mut LogLimit, at| {
            (0..1000).filter_map(|i| limit.admit(at, &format!("cause {i}"))).count()
        };
        assert_eq!(flood(&mut limit, start), MAX_CAUSES + 1);
        assert!(flood(&mut limit, start + INTERVAL) <= 2 * MAX_CAUSES);
        assert!(limit.0.len() <= MAX_CAUSES + 1, "causes are kept forever");
    }
}
