//! Silence of peers, judged by the time in which this process could have received.

use std::time::Duration;

use crate::time::Time;

/// The time at which a domain last looked for what its peers have sent.
///
/// A process that runs looks four times per peer timeout, because it sends heartbeats as often. On
/// a starved host no thread of it may run for seconds, and its peers' heartbeats wait in the
/// kernel. Such a gap counts as one interval of silence, so a peer is lost only after several looks
/// that found nothing (RS-4).
#[derive(Debug, Default)]
pub(crate) struct Attendance {
    looked_at: Time,
}

impl Attendance {
    /// Records a look; returns the time since the last one that is no evidence of a peer's silence.
    pub fn missed(&mut self, now: Time, peer_timeout: Duration) -> Duration {
        let gap = now.since(std::mem::replace(&mut self.looked_at, now));
        gap.saturating_sub(peer_timeout / 4)
    }

    /// When to look again while an answer is waited for, so that no time is missed by sleeping.
    pub fn next_look(&self, peer_timeout: Duration) -> Time {
        self.looked_at.after(peer_timeout / 4)
    }
}

/// The start of a peer's silence, moved by the time that was missed.
pub(crate) fn excuse(received_at: Time, missed: Duration, now: Time) -> Time {
    received_at.after(missed).min(now)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(2);

    /// Seconds after which a peer that sends nothing is lost, with looks at these intervals.
    fn lost_after(interval: Duration) -> f64 {
        let (mut attendance, start) = (Attendance { looked_at: Time(7) }, Time(7));
        let (mut now, mut received_at) = (start, start);
        loop {
            now = now.after(interval);
            received_at = excuse(received_at, attendance.missed(now, TIMEOUT), now);
            if now >= received_at.after(TIMEOUT) {
                return now.since(start).as_secs_f64();
            }
        }
    }

    #[test]
    fn rs_4_only_time_in_which_a_peer_could_be_heard_counts() {
        assert_eq!(lost_after(TIMEOUT / 4), 2.0);
        assert_eq!(lost_after(TIMEOUT / 100), 2.0);
        assert_eq!(lost_after(TIMEOUT * 3), 24.0, "four looks that found nothing");
    }
}
