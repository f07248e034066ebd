//! Frames that come once each, whatever becomes of the connections below.
//!
//! A provider's word that a message was delivered can't be taken. `ofi_rxm` drops
//! `FI_DELIVERY_COMPLETE` of messages and says done when one is in a socket's buffer; if that
//! connection breaks, over a write that was refused, say, the message is gone and no error tells. So
//! whoever sends a frame keeps it until the other side has confirmed its number, and sends it again
//! if that takes long.
//!
//! Every frame confirms, sent again or not. What says something is confirmed within [`CONFIRM`] even
//! if there is nothing else to send. A frame that says nothing waits for the next one, so that
//! confirmations don't chase each other.

use std::{collections::VecDeque, time::Duration};

use crate::{
    time::Time,
    transport::nic::frame::{self, Body},
};

/// Numbers that may be under way: beyond the oldest frame that is not confirmed, no more are sent.
pub(super) const SPAN: u32 = 128;
/// What came is confirmed after so long at most.
pub(super) const CONFIRM: Duration = Duration::from_millis(20);
/// What is not confirmed after so long is sent again, and then ever more rarely.
const AGAIN: Duration = Duration::from_millis(100);
const MOST_DOUBLINGS: u32 = 4;
/// What is known, or likely, to be lost is sent again after so long.
const SOON: Duration = Duration::from_millis(1);

/// Whether a frame carries more than its header.
fn says_something(bytes: &[u8]) -> bool {
    !matches!(frame::decode(bytes), Ok((_, Body::Heartbeat)))
}

/// Which frames have come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Seen {
    /// All before this one.
    next: u32,
    /// One bit for each from `next` on.
    beyond: u128,
}

impl Seen {
    pub const BYTES: usize = 20;

    /// Whether a frame is new; `None` if its number is further ahead than any may be.
    pub fn take(&mut self, number: u32) -> Option<bool> {
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

    /// Whether a later frame has come than this one.
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
    says_something: bool,
    /// In the provider's hands.
    flies: bool,
    /// When it is to be sent again.
    due: Time,
    /// When the provider had done with it.
    landed: Time,
    tries: u32,
}

impl Frame {
    fn patience(&self) -> Duration {
        AGAIN * (1 << self.tries.min(MOST_DOUBLINGS))
    }

    /// When it is to be sent again. Where no further frame may be sent, what says nothing can't wait for a later one:
    /// two sides full of such frames would be silent for ever.
    fn wakes(&self, has_room: bool) -> Time {
        match self.due == Time::NEVER && !self.flies && !has_room {
            true => self.landed.after(self.patience()),
            false => self.due,
        }
    }
}

/// Frames of ours that the other side has not confirmed, in the order of their numbers.
#[derive(Default)]
pub(super) struct Sent {
    next: u32,
    frames: VecDeque<Frame>,
}

impl Sent {
    /// Whether a further frame may be sent.
    #[inline]
    pub fn has_room(&self) -> bool {
        self.frames.front().is_none_or(|f| self.next.wrapping_sub(f.number) < SPAN)
    }

    /// Keeps a frame that goes to the provider now; its number.
    pub fn enter(&mut self, bytes: &[u8]) -> u32 {
        let number = self.next;
        self.next = number.wrapping_add(1);
        self.frames.push_back(Frame {
            number,
            bytes: bytes.to_vec(),
            says_something: says_something(bytes),
            flies: true,
            due: Time::NEVER,
            landed: Time::NEVER,
            tries: 0,
        });
        number
    }

    /// The provider has done with a frame: it says that it was delivered, or that it wasn't.
    pub fn landed(&mut self, now: Time, number: u32, well: bool) {
        let Some(frame) = self.frames.iter_mut().find(|f| f.number == number) else { return };
        (frame.flies, frame.landed) = (false, now);
        frame.due = match well {
            true if frame.says_something => now.after(frame.patience()),
            true => Time::NEVER,
            false => now.after(SOON),
        };
    }

    /// The other side tells what has come.
    pub fn confirmed(&mut self, now: Time, by: &Seen) {
        self.frames.retain(|f| !by.has(f.number));
        // Of what says nothing, only that later ones came shows that it may be lost.
        let quiet = |f: &&mut Frame| !f.flies && f.due == Time::NEVER && by.is_past(f.number);
        self.frames.iter_mut().filter(quiet).for_each(|f| f.due = now.after(f.patience()));
    }

    /// A connection below has broken, or may have: what is not confirmed is sent again soon.
    pub fn hasten(&mut self, now: Time) {
        let soon = now.after(SOON);
        self.frames.iter_mut().filter(|f| !f.flies).for_each(|f| f.due = f.due.min(soon));
    }

    /// When a frame is to be sent again.
    pub fn next_due(&self) -> Time {
        let has_room = self.has_room();
        self.frames.iter().map(|f| f.wakes(has_room)).fold(Time::NEVER, Time::min)
    }

    /// Writes a frame that is to be sent again to `out`: its number, and its length.
    pub fn again(&mut self, now: Time, out: &mut [u8]) -> Option<(u32, usize)> {
        let has_room = self.has_room();
        let frame = self.frames.iter_mut().find(|f| f.wakes(has_room) <= now)?;
        (frame.flies, frame.due, frame.tries) = (true, Time::NEVER, frame.tries + 1);
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
    fn a_frame_that_is_sent_again_comes_once() {
        let mut seen = Seen::default();
        for n in [0, 2, 1, 5, 100, 3] {
            assert_eq!((seen.take(n), seen.take(n)), (Some(true), Some(false)), "{n}");
        }
        assert_eq!((seen.take(4), seen.next), (Some(true), 6));
        assert_eq!((seen.take(6 + SPAN), seen.take(6 + SPAN - 1)), (None, Some(true)));
        assert_eq!((seen.take(u32::MAX), Seen::decode(seen.encode())), (Some(false), seen));
        assert!(seen.is_past(6) && seen.is_past(132) && !seen.is_past(133));
        assert!(!Seen::default().is_past(0));
    }

    #[test]
    fn numbers_of_frames_wrap() {
        let mut seen = Seen { next: u32::MAX - 1, ..Seen::default() };
        for n in [u32::MAX, 1, 0, u32::MAX - 1] {
            assert_eq!((seen.take(n), seen.take(n)), (Some(true), Some(false)), "{n}");
        }
        assert_eq!(seen, Seen { next: 2, beyond: 0 });
    }

    #[test]
    fn a_frame_is_kept_until_it_is_confirmed_though_the_provider_says_delivered() {
        let (mut sent, mut out) = (Sent::default(), [0; 64]);
        let fence = bytes(&Body::Fence(7));
        let number = sent.enter(&fence);
        assert_eq!(sent.next_due(), Time::NEVER);
        sent.landed(Time(0), number, true);
        let due = Time(0).after(AGAIN);
        assert_eq!((sent.next_due(), sent.again(Time(due.0 - 1), &mut out)), (due, None));
        assert_eq!(sent.again(due, &mut out), Some((number, fence.len())));
        assert_eq!(out[..fence.len()], fence);
        // It is on its way again, and patience grows.
        assert_eq!(sent.next_due(), Time::NEVER);
        sent.landed(due, number, true);
        assert_eq!(sent.next_due(), due.after(2 * AGAIN));
        let mut seen = Seen::default();
        seen.take(number);
        sent.confirmed(due, &seen);
        assert_eq!((sent.next_due(), sent.frames.len()), (Time::NEVER, 0));
    }

    #[test]
    fn a_frame_that_says_nothing_waits_until_a_later_one_has_come() {
        let mut sent = Sent::default();
        let numbers = [(); 2].map(|()| sent.enter(&bytes(&Body::Heartbeat)));
        numbers.iter().for_each(|n| sent.landed(Time(0), *n, true));
        assert_eq!(sent.next_due(), Time::NEVER);
        let mut seen = Seen::default();
        sent.confirmed(Time(5), &seen);
        assert_eq!(sent.next_due(), Time::NEVER);
        seen.take(numbers[1]);
        sent.confirmed(Time(5), &seen);
        assert_eq!(sent.next_due(), Time(5).after(AGAIN));
        sent.hasten(Time(5));
        assert_eq!(sent.next_due(), Time(5).after(SOON));
    }

    #[test]
    fn frames_that_say_nothing_are_sent_again_where_no_more_may_follow() {
        let mut sent = Sent::default();
        let mut numbers = Vec::new();
        while sent.has_room() {
            numbers.push(sent.enter(&bytes(&Body::Heartbeat)));
        }
        assert_eq!(numbers.len() as u32, SPAN);
        numbers.iter().for_each(|n| sent.landed(Time(0), *n, true));
        assert_eq!(sent.next_due(), Time(0).after(AGAIN));
        let mut out = [0; 64];
        assert_eq!(sent.again(Time(0).after(AGAIN), &mut out).map(|a| a.0), Some(numbers[0]));
    }

    /// One side, and what it has got.
    #[derive(Default)]
    struct End {
        sent: Sent,
        seen: Seen,
        got: Vec<u32>,
    }

    proptest! {
        /// Frames are lost, doubled and late; the provider says delivered all the same.
        #[test]
        fn every_frame_comes_once_over_connections_that_lose_some(
            seed: u64,
            lost in 0.0..0.5f64,
            n in 1usize..400,
        ) {
            let mut rng = fastrand::Rng::with_seed(seed);
            let mut ends = [End::default(), End::default()];
            // To whom, the number, what it confirms, and what it says.
            let mut wire: Vec<(usize, u32, Seen, Vec<u8>)> = Vec::new();
            let (mut now, mut made, mut out) = (Time(0), [0; 2], [0; 64]);
            let mut rounds = 0;
            while ends.iter().any(|e| e.got.len() < n) {
                rounds += 1;
                prop_assert!(rounds < 100_000, "some never come");
                now = now.after(Duration::from_millis(5));
                for from in 0..2 {
                    let end = &mut ends[from];
                    let mut going = Vec::new();
                    while let Some((number, n)) = end.sent.again(now, &mut out) {
                        going.push((number, out[..n].to_vec()));
                    }
                    while made[from] < n && end.sent.has_room() && rng.u8(..4) > 0 {
                        let frame = bytes(&Body::Fence(made[from] as u32));
                        made[from] += 1;
                        going.push((end.sent.enter(&frame), frame));
                    }
                    // The other side's confirmations need somebody to carry them.
                    if going.is_empty() && end.sent.has_room() {
                        let frame = bytes(&Body::Heartbeat);
                        going.push((end.sent.enter(&frame), frame));
                    }
                    for (number, frame) in going {
                        end.sent.landed(now, number, rng.u8(..8) > 0);
                        let copies = if rng.f64() < lost { 0 } else { 1 + u8::from(rng.u8(..8) == 0) };
                        for _ in 0..copies {
                            wire.push((1 - from, number, end.seen, frame.clone()));
                        }
                    }
                }
                rng.shuffle(&mut wire);
                for _ in 0..rng.usize(..=wire.len()) {
                    let Some((to, number, confirms, frame)) = wire.pop() else { break };
                    let end = &mut ends[to];
                    end.sent.confirmed(now, &confirms);
                    let new = end.seen.take(number);
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
