//! Exactly-once delivery of frames over connections that may break.
//!
//! A provider's report of delivery can't be trusted. `ofi_rxm` drops `FI_DELIVERY_COMPLETE` of
//! messages and reports completion once the message is in a socket's buffer. If that connection
//! breaks, for example over a refused write, the message is lost without an error. So the sender
//! keeps each frame until the receiver has confirmed its number, and sends it again after a
//! timeout.
//!
//! Every frame carries confirmations. A frame with a body is confirmed within [`CONFIRM_WITHIN`],
//! if necessary by a heartbeat. A heartbeat is confirmed by the next frame only, so that
//! confirmations do not answer each other.

use std::{collections::VecDeque, time::Duration};

use crate::{
    time::Time,
    transport::nic::frame::{self, Body},
};

/// Window of frame numbers: from the oldest unconfirmed frame on, no more are sent.
pub(super) const SPAN: u32 = 128;
/// Time until a frame is confirmed.
pub(super) const CONFIRM_WITHIN: Duration = Duration::from_millis(20);
/// Time until an unconfirmed frame is sent again; doubled each time.
const RETRY: Duration = Duration::from_millis(100);
const MAX_DOUBLINGS: u32 = 4;
/// The same for a frame that is known or likely to be lost.
const RETRY_SOON: Duration = Duration::from_millis(1);

/// Whether a frame has a body.
fn has_body(bytes: &[u8]) -> bool {
    !matches!(frame::decode(bytes), Ok((_, Body::Heartbeat)))
}

/// The set of frames that have arrived.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ReceivedFrames {
    /// All before this number.
    next: u32,
    /// One bit for each number from `next` on.
    beyond: u128,
}

impl ReceivedFrames {
    pub const BYTES: usize = 20;

    /// Enters a frame; whether it is new, or `None` if its number exceeds the window.
    pub fn insert(&mut self, number: u32) -> Option<bool> {
        if self.has(number) {
            return Some(false);
        }
        let ahead = number.wrapping_sub(self.next);
        if ahead >= SPAN {
            return None;
        }
        self.beyond |= 1 << ahead;
        let n = self.beyond.trailing_ones();
        self.next = self.next.wrapping_add(n);
        self.beyond = self.beyond.checked_shr(n).unwrap_or(0);
        Some(true)
    }

    fn has(&self, number: u32) -> bool {
        let ahead = number.wrapping_sub(self.next);
        ahead > u32::MAX / 2 || (ahead < SPAN && self.beyond & (1 << ahead) != 0)
    }

    /// Whether a later frame than this one has arrived.
    fn is_past(&self, number: u32) -> bool {
        let newest = self.next.wrapping_add(SPAN - self.beyond.leading_zeros());
        newest.wrapping_sub(number).wrapping_sub(2) <= u32::MAX / 2
    }

    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..4].copy_from_slice(&self.next.to_le_bytes());
        bytes[4..].copy_from_slice(&self.beyond.to_le_bytes());
        bytes
    }

    pub fn decode(bytes: [u8; Self::BYTES]) -> Self {
        let [a, b, c, d, beyond @ ..] = bytes;
        Self { next: u32::from_le_bytes([a, b, c, d]), beyond: u128::from_le_bytes(beyond) }
    }
}

struct Frame {
    number: u32,
    bytes: Vec<u8>,
    has_body: bool,
    /// Whether the provider holds it.
    in_flight: bool,
    /// When to send it again.
    due: Time,
    /// When the provider completed it.
    completed_at: Time,
    tries: u32,
}

impl Frame {
    fn retry_timeout(&self) -> Duration {
        RETRY * (1 << self.tries.min(MAX_DOUBLINGS))
    }

    /// When to send it again. If the window is full, heartbeats are repeated too: two sides with
    /// windows full of heartbeats would otherwise be silent forever.
    fn due_at(&self, has_room: bool) -> Time {
        match self.due == Time::NEVER && !self.in_flight && !has_room {
            true => self.completed_at.after(self.retry_timeout()),
            false => self.due,
        }
    }
}

/// Unconfirmed frames in the order of their numbers.
#[derive(Default)]
pub(super) struct UnconfirmedFrames {
    next: u32,
    frames: VecDeque<Frame>,
}

impl UnconfirmedFrames {
    /// Whether the window has room for another frame.
    #[inline]
    pub fn has_room(&self) -> bool {
        self.frames.front().is_none_or(|f| self.next.wrapping_sub(f.number) < SPAN)
    }

    /// Keeps a new frame; returns its number.
    pub fn enter(&mut self, bytes: &[u8]) -> u32 {
        let number = self.next;
        self.next = number.wrapping_add(1);
        self.frames.push_back(Frame {
            number,
            bytes: bytes.to_vec(),
            has_body: has_body(bytes),
            in_flight: true,
            due: Time::NEVER,
            completed_at: Time::NEVER,
            tries: 0,
        });
        number
    }

    /// The provider has completed a frame, successfully or not.
    pub fn on_completed(&mut self, now: Time, number: u32, well: bool) {
        let Some(frame) = self.frames.iter_mut().find(|f| f.number == number) else { return };
        (frame.in_flight, frame.completed_at) = (false, now);
        frame.due = match well {
            true if frame.has_body => now.after(frame.retry_timeout()),
            true => Time::NEVER,
            false => now.after(RETRY_SOON),
        };
    }

    /// Handles the receiver's confirmations.
    pub fn on_confirmed(&mut self, now: Time, by: &ReceivedFrames) {
        self.frames.retain(|f| !by.has(f.number));
        // Only a later frame's arrival shows that a heartbeat may be lost.
        let quiet = |f: &&mut Frame| !f.in_flight && f.due == Time::NEVER && by.is_past(f.number);
        self.frames.iter_mut().filter(quiet).for_each(|f| f.due = now.after(f.retry_timeout()));
    }

    /// A connection may have broken: unconfirmed frames are sent again soon.
    pub fn expedite(&mut self, now: Time) {
        let soon = now.after(RETRY_SOON);
        self.frames.iter_mut().filter(|f| !f.in_flight).for_each(|f| f.due = f.due.min(soon));
    }

    /// When the next frame must be sent again.
    pub fn next_due(&self) -> Time {
        let has_room = self.has_room();
        self.frames.iter().map(|f| f.due_at(has_room)).fold(Time::NEVER, Time::min)
    }

    /// Writes a due frame to `out`; returns its number and length.
    pub fn take_due(&mut self, now: Time, out: &mut [u8]) -> Option<(u32, usize)> {
        let has_room = self.has_room();
        let frame = self.frames.iter_mut().find(|f| f.due_at(has_room) <= now)?;
        (frame.in_flight, frame.due, frame.tries) = (true, Time::NEVER, frame.tries + 1);
        let n = frame.bytes.len();
        out[..n].copy_from_slice(&frame.bytes);
        Some((frame.number, n))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::transport::nic::frame::Header;

    fn bytes(body: &Body<'_>) -> Vec<u8> {
        let mut out = [0; 64];
        let n = frame::encode(&Header::default(), body, &mut out);
        out[..n].to_vec()
    }

    #[test]
    fn a_repeated_frame_is_new_once() {
        let mut seen = ReceivedFrames::default();
        for n in [0, 2, 1, 5, 100, 3] {
            assert_eq!((seen.insert(n), seen.insert(n)), (Some(true), Some(false)), "{n}");
        }
        assert_eq!((seen.insert(4), seen.next), (Some(true), 6));
        assert_eq!((seen.insert(6 + SPAN), seen.insert(6 + SPAN - 1)), (None, Some(true)));
        assert_eq!(
            (seen.insert(u32::MAX), ReceivedFrames::decode(seen.encode())),
            (Some(false), seen)
        );
        assert!(seen.is_past(6) && seen.is_past(132) && !seen.is_past(133));
        assert!(!ReceivedFrames::default().is_past(0));
    }

    #[test]
    fn numbers_of_frames_wrap() {
        let mut seen = ReceivedFrames { next: u32::MAX - 1, ..ReceivedFrames::default() };
        for n in [u32::MAX, 1, 0, u32::MAX - 1] {
            assert_eq!((seen.insert(n), seen.insert(n)), (Some(true), Some(false)), "{n}");
        }
        assert_eq!(seen, ReceivedFrames { next: 2, beyond: 0 });
    }

    #[test]
    fn a_frame_is_kept_until_confirmed_although_the_provider_reports_delivery() {
        let (mut unconfirmed, mut out) = (UnconfirmedFrames::default(), [0; 64]);
        let fence = bytes(&Body::Fence(7));
        let number = unconfirmed.enter(&fence);
        assert_eq!(unconfirmed.next_due(), Time::NEVER);
        unconfirmed.on_completed(Time(0), number, true);
        let due = Time(0).after(RETRY);
        assert_eq!(
            (unconfirmed.next_due(), unconfirmed.take_due(Time(due.0 - 1), &mut out)),
            (due, None)
        );
        assert_eq!(unconfirmed.take_due(due, &mut out), Some((number, fence.len())));
        assert_eq!(out[..fence.len()], fence);
        // It is under way again, and its timeout doubles.
        assert_eq!(unconfirmed.next_due(), Time::NEVER);
        unconfirmed.on_completed(due, number, true);
        assert_eq!(unconfirmed.next_due(), due.after(2 * RETRY));
        let mut seen = ReceivedFrames::default();
        seen.insert(number);
        unconfirmed.on_confirmed(due, &seen);
        assert_eq!((unconfirmed.next_due(), unconfirmed.frames.len()), (Time::NEVER, 0));
    }

    #[test]
    fn a_heartbeat_is_repeated_only_after_a_later_frame_arrived() {
        let mut unconfirmed = UnconfirmedFrames::default();
        let numbers = [(); 2].map(|()| unconfirmed.enter(&bytes(&Body::Heartbeat)));
        numbers.iter().for_each(|n| unconfirmed.on_completed(Time(0), *n, true));
        assert_eq!(unconfirmed.next_due(), Time::NEVER);
        let mut seen = ReceivedFrames::default();
        unconfirmed.on_confirmed(Time(5), &seen);
        assert_eq!(unconfirmed.next_due(), Time::NEVER);
        seen.insert(numbers[1]);
        unconfirmed.on_confirmed(Time(5), &seen);
        assert_eq!(unconfirmed.next_due(), Time(5).after(RETRY));
        unconfirmed.expedite(Time(5));
        assert_eq!(unconfirmed.next_due(), Time(5).after(RETRY_SOON));
    }

    #[test]
    fn heartbeats_are_repeated_when_the_window_is_full() {
        let mut unconfirmed = UnconfirmedFrames::default();
        let mut numbers = Vec::new();
        while unconfirmed.has_room() {
            numbers.push(unconfirmed.enter(&bytes(&Body::Heartbeat)));
        }
        assert_eq!(numbers.len() as u32, SPAN);
        numbers.iter().for_each(|n| unconfirmed.on_completed(Time(0), *n, true));
        assert_eq!(unconfirmed.next_due(), Time(0).after(RETRY));
        let mut out = [0; 64];
        assert_eq!(
            unconfirmed.take_due(Time(0).after(RETRY), &mut out).map(|a| a.0),
            Some(numbers[0])
        );
    }

    /// One side, and the frames that it has received.
    #[derive(Default)]
    struct End {
        unconfirmed: UnconfirmedFrames,
        received: ReceivedFrames,
        got: Vec<u32>,
    }

    proptest! {
        /// The network loses, doubles and delays frames; the provider reports delivery all the
        /// same.
        #[test]
        fn every_frame_arrives_once_over_lossy_connections(
            seed: u64,
            lost in 0.0..0.5f64,
            n in 1usize..400,
        ) {
            let mut rng = fastrand::Rng::with_seed(seed);
            let mut ends = [End::default(), End::default()];
            // Receiver, number, confirmations, frame.
            let mut wire: Vec<(usize, u32, ReceivedFrames, Vec<u8>)> = Vec::new();
            let (mut now, mut made, mut out) = (Time(0), [0; 2], [0; 64]);
            let mut rounds = 0;
            while ends.iter().any(|e| e.got.len() < n) {
                rounds += 1;
                prop_assert!(rounds < 100_000, "some never come");
                now = now.after(Duration::from_millis(5));
                for from in 0..2 {
                    let end = &mut ends[from];
                    let mut going = Vec::new();
                    while let Some((number, n)) = end.unconfirmed.take_due(now, &mut out) {
                        going.push((number, out[..n].to_vec()));
                    }
                    while made[from] < n && end.unconfirmed.has_room() && rng.u8(..4) > 0 {
                        let frame = bytes(&Body::Fence(made[from] as u32));
                        made[from] += 1;
                        going.push((end.unconfirmed.enter(&frame), frame));
                    }
                    // A heartbeat carries the confirmations.
                    if going.is_empty() && end.unconfirmed.has_room() {
                        let frame = bytes(&Body::Heartbeat);
                        going.push((end.unconfirmed.enter(&frame), frame));
                    }
                    for (number, frame) in going {
                        end.unconfirmed.on_completed(now, number, rng.u8(..8) > 0);
                        let copies = if rng.f64() < lost { 0 } else { 1 + u8::from(rng.u8(..8) == 0) };
                        for _ in 0..copies {
                            wire.push((1 - from, number, end.received, frame.clone()));
                        }
                    }
                }
                rng.shuffle(&mut wire);
                for _ in 0..rng.usize(..=wire.len()) {
                    let Some((to, number, confirms, frame)) = wire.pop() else { break };
                    let end = &mut ends[to];
                    end.unconfirmed.on_confirmed(now, &confirms);
                    let new = end.received.insert(number);
                    prop_assert!(new.is_some(), "further ahead than the other side may be");
                    if new == Some(true) {
                        if let Ok((_, Body::Fence(f))) = frame::decode(&frame) {
                            end.got.push(f);
                        }
                    }
                }
            }
            for end in &mut ends {
                end.got.sort_unstable();
                prop_assert_eq!(&end.got, &(0..n as u32).collect::<Vec<_>>());
            }
        }
    }
}
