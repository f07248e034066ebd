//! Frames between the two ends of a link: messages in fragments, what became of them, and credits.
//!
//! A frame goes only where a receive slot waits for it, so that the receiver is never "not ready":
//! - each frame tells how many frames of the other side have been heard (their slots are free
//!   again). Frames under way = sent − heard by the peer.
//! - fragments go while fewer than the peer's `slots` are under way, all others while fewer than
//!   `slots` + [`SPARE`] are. A side that hears nothing sends fewer than `SPARE` of those: one for
//!   each message it takes, one that returns credits, one heartbeat each quarter of the time after
//!   which it gives the peer up, a question, an answer, a farewell. So a frame that returns credits
//!   never waits for credits.
//! - credits alone are worth a frame only once half of the slots are owed: frames that only return
//!   credits don't chase each other.
//!
//! Nothing here relies on frames arriving in the order they were sent; messages are handed up in
//! that order all the same.

use std::{collections::VecDeque, sync::Arc};

use super::frame::{self, broken, taken_entry, Body, Header, FRAGMENT};
use crate::{
    api::RegionKey,
    domain::{Admit, DomainError, MessageRoom, Token},
};

/// Longest message, bytes.
pub(crate) const MAX_MESSAGE: usize = 64 << 10;
/// Messages that may be on their way in one direction.
pub(crate) const WINDOW: usize = 16;
/// Notes that wait for slots: more than the questions about one link can be.
const MOST_NOTES: usize = 1 << 11;
/// Receive slots besides those for fragments.
pub(crate) const SPARE: u32 = 2 * WINDOW as u32;

/// Where one side takes frames and immediates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Places {
    /// Bytes of a slot.
    pub slot_bytes: u32,
    /// Slots for fragments; [`SPARE`] more are there for the rest.
    pub slots: u32,
    /// Immediates that may come before credits are returned.
    pub imms: u32,
}

impl Places {
    /// What a peer says about itself: refused if nothing could be sent there.
    pub fn check(&self) -> Result<(), DomainError> {
        let sane = (256..=1 << 20).contains(&self.slot_bytes)
            && (2..=1 << 16).contains(&self.slots)
            && self.imms <= 1 << 20;
        match sane {
            true => Ok(()),
            false => Err(DomainError::Handshake(format!("impossible receive slots: {self:?}"))),
        }
    }

    fn payload(&self) -> usize {
        self.slot_bytes as usize - FRAGMENT
    }
}

/// What a frame asks of the transport.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Heard {
    /// The mail has dealt with it.
    Nothing,
    /// Why did our NIC refuse this access? Answer with [`Mail::answer`].
    Ask {
        key: RegionKey,
        offset: u64,
        len: u64,
    },
    /// The peer's answer to [`Mail::ask`].
    Verdict(DomainError),
    /// The peer has dropped the link.
    Bye {
        gone: bool,
        reason: String,
    },
    /// What the peer's group has to say.
    Note(Vec<u8>),
    /// Answer with [`Mail::fenced`] when nothing from before is under way any more.
    Fence(u32),
    Fenced(u32),
}

struct Outgoing {
    id: u32,
    token: Token,
    message: Arc<[u8]>,
    /// Bytes that have gone out; beyond the end when all fragments have.
    at: usize,
}

struct Incoming {
    bytes: Vec<u8>,
    /// One bit for each fragment.
    there: Vec<u64>,
    missing: usize,
}

enum Control {
    Ask { key: RegionKey, offset: u64, len: u64 },
    Verdict { stale: bool, reason: String },
    Bye { gone: bool, reason: String },
    Fence(u32),
    Fenced(u32),
}

/// One end of a link's mail.
pub(crate) struct Mail {
    own: Places,
    peer: Places,
    /// Our name for the link at the peer.
    link: u32,
    sent: u32,
    heard_by_peer: u32,
    heard: u32,
    heard_told: u32,
    imms_sent: u32,
    counted_by_peer: u32,
    counted: u32,
    counted_told: u32,
    out: VecDeque<Outgoing>,
    next_out: u32,
    /// From message `first_in` on.
    incoming: VecDeque<Option<Incoming>>,
    first_in: u32,
    taken: VecDeque<(u32, Option<u32>)>,
    controls: VecDeque<Control>,
    /// Frames between groups; as fragments, they go into the slots that are not spare.
    notes: VecDeque<Vec<u8>>,
    beat: bool,
    done: Vec<(Token, Result<(), DomainError>)>,
}

impl Mail {
    /// `link` goes into every frame.
    pub fn new(own: Places, peer: Places, link: u32) -> Self {
        Self {
            own,
            peer,
            link,
            sent: 0,
            heard_by_peer: 0,
            heard: 0,
            heard_told: 0,
            imms_sent: 0,
            counted_by_peer: 0,
            counted: 0,
            counted_told: 0,
            out: VecDeque::new(),
            next_out: 0,
            incoming: VecDeque::new(),
            first_in: 0,
            taken: VecDeque::new(),
            controls: VecDeque::new(),
            notes: VecDeque::new(),
            beat: false,
            done: Vec::new(),
        }
    }

    /// Begins to send a message; false if too many are on their way. The caller has checked its
    /// length against [`MAX_MESSAGE`].
    pub fn submit(&mut self, token: Token, message: &Arc<[u8]>) -> bool {
        let oldest = self.out.front().map_or(self.next_out, |o| o.id);
        if self.next_out.wrapping_sub(oldest) >= WINDOW as u32 {
            return false;
        }
        let id = self.next_out;
        self.next_out = id.wrapping_add(1);
        self.out.push_back(Outgoing { id, token, message: Arc::clone(message), at: 0 });
        true
    }

    /// Asks the peer why its NIC refused an access.
    pub fn ask(&mut self, key: RegionKey, offset: u64, len: u64) {
        self.controls.push_back(Control::Ask { key, offset, len });
    }

    /// Answers [`Heard::Ask`].
    pub fn answer(&mut self, why: &DomainError) {
        let stale = matches!(why, DomainError::Stale(_));
        // One question at a time is in order; more from a peer that floods us are left unanswered.
        if self.controls.len() < 4 {
            self.controls.push_back(Control::Verdict { stale, reason: why.to_string() });
        }
    }

    /// Asks the peer to tell when nothing of its own from before is under way any more. At most one
    /// question at a time, so that such frames never use up the spare slots.
    pub fn fence(&mut self, number: u32) {
        self.controls.push_back(Control::Fence(number));
    }

    /// Answers [`Heard::Fence`].
    pub fn fenced(&mut self, number: u32) {
        // The last answer holds for all questions before; a peer that floods us gets no more.
        self.controls.retain(|c| !matches!(c, Control::Fenced(_)));
        self.controls.push_back(Control::Fenced(number));
    }

    /// `gone` says that the whole engine has closed.
    pub fn bye(&mut self, gone: bool, reason: &str) {
        self.controls.push_back(Control::Bye { gone, reason: reason.to_owned() });
    }

    /// Forgotten if the peer asks for more than it listens to.
    pub fn note(&mut self, note: Vec<u8>) {
        if self.notes.len() < MOST_NOTES {
            self.notes.push_back(note);
        }
    }

    /// Shows life with the next frame, one that carries nothing if need be.
    pub fn beat(&mut self) {
        self.beat = true;
    }

    /// The receive slot of a frame that was heard is free again.
    #[inline]
    pub fn slot_freed(&mut self) {
        self.heard = self.heard.wrapping_add(1);
    }

    /// The places of `n` immediates are free again.
    #[inline]
    pub fn imms_freed(&mut self, n: u32) {
        self.counted = self.counted.wrapping_add(n);
    }

    /// Immediates that may be on their way at most.
    #[inline]
    pub fn imm_places(&self) -> u32 {
        self.peer.imms
    }

    /// Immediates that may be sent now.
    #[inline]
    pub fn imm_room(&self) -> u32 {
        self.peer.imms - self.imms_sent.wrapping_sub(self.counted_by_peer)
    }

    #[inline]
    pub fn imms_sent(&mut self, n: u32) {
        debug_assert!(n <= self.imm_room(), "an immediate that nobody waits for");
        self.imms_sent = self.imms_sent.wrapping_add(n);
    }

    fn under_way(&self) -> u32 {
        self.sent.wrapping_sub(self.heard_by_peer)
    }

    /// Whether credits are owed that the peer may be waiting for.
    #[inline]
    fn owes(&self) -> bool {
        let imms = self.counted.wrapping_sub(self.counted_told);
        self.heard.wrapping_sub(self.heard_told) >= self.own.slots.div_ceil(2)
            || (imms > 0 && imms >= self.own.imms / 4)
    }

    /// Whether a frame could go out now.
    #[inline]
    pub fn has_frame(&self) -> bool {
        let under_way = self.under_way();
        let small = self.beat || !self.controls.is_empty() || !self.taken.is_empty() || self.owes();
        (small && under_way < self.peer.slots + SPARE)
            || (under_way < self.peer.slots && (self.unsent().is_some() || !self.notes.is_empty()))
    }

    fn unsent(&self) -> Option<usize> {
        self.out.iter().position(|o| o.at <= o.message.len())
    }

    fn next_note(&mut self) -> Option<Vec<u8>> {
        let room = self.under_way() < self.peer.slots;
        room.then(|| self.notes.pop_front()).flatten()
    }

    /// Writes the next frame that may go out to `slot`, and returns its length.
    pub fn next_frame(&mut self, slot: &mut [u8]) -> Option<usize> {
        if !self.has_frame() {
            return None;
        }
        let room = slot.len().min(self.peer.slot_bytes as usize);
        let slot = &mut slot[..room];
        let header = Header { link: self.link, heard: self.heard, counted: self.counted };
        let payload = room - FRAGMENT;
        let n = if let Some(control) = self.controls.pop_front() {
            let cut = |s: &String| s.as_bytes()[..s.len().min(payload)].to_vec();
            match &control {
                Control::Ask { key, offset, len } => {
                    let body = Body::Ask { key: *key, offset: *offset, len: *len };
                    frame::encode(&header, &body, slot)
                }
                Control::Verdict { stale, reason } => {
                    let body = Body::Verdict { stale: *stale, reason: &cut(reason) };
                    frame::encode(&header, &body, slot)
                }
                Control::Fence(n) => frame::encode(&header, &Body::Fence(*n), slot),
                Control::Fenced(n) => frame::encode(&header, &Body::Fenced(*n), slot),
                Control::Bye { gone, reason } => {
                    let body = Body::Bye { gone: *gone, reason: &cut(reason) };
                    frame::encode(&header, &body, slot)
                }
            }
        } else if !self.taken.is_empty() {
            let n = self.taken.len().min(payload / 8);
            let list: Vec<u8> =
                self.taken.drain(..n).flat_map(|(m, limit)| taken_entry(m, limit)).collect();
            frame::encode(&header, &Body::Taken(&list), slot)
        } else if let Some(note) = self.next_note() {
            frame::encode(&header, &Body::Note(&note[..note.len().min(payload)]), slot)
        } else if let Some(i) = self.unsent().filter(|_| self.under_way() < self.peer.slots) {
            let o = &mut self.out[i];
            let piece = self.peer.payload().min(payload).min(o.message.len() - o.at);
            let body = Body::Fragment {
                message: o.id,
                total: o.message.len() as u32,
                offset: o.at as u32,
                bytes: &o.message[o.at..o.at + piece],
            };
            let n = frame::encode(&header, &body, slot);
            o.at += piece;
            if o.at == o.message.len() {
                o.at = usize::MAX;
            }
            n
        } else {
            frame::encode(&header, &Body::Alive, slot)
        };
        self.beat = false;
        self.sent = self.sent.wrapping_add(1);
        (self.heard_told, self.counted_told) = (self.heard, self.counted);
        Some(n)
    }

    /// Takes a frame. An error means that the peer breaks the rules: drop the link.
    pub fn hear(&mut self, bytes: &[u8]) -> Result<Heard, DomainError> {
        let (header, body) = frame::decode(bytes)?;
        let flown = self.under_way();
        catch_up(&mut self.heard_by_peer, header.heard, flown)?;
        let flown = self.imms_sent.wrapping_sub(self.counted_by_peer);
        catch_up(&mut self.counted_by_peer, header.counted, flown)?;
        match body {
            Body::Alive => {}
            Body::Fragment { message, total, offset, bytes } => {
                self.fragment(message, total as usize, offset as usize, bytes)?;
            }
            Body::Taken(list) => frame::taken(list).try_for_each(|(m, l)| self.was_taken(m, l))?,
            Body::Ask { key, offset, len } => return Ok(Heard::Ask { key, offset, len }),
            Body::Verdict { stale, reason } => {
                let reason = frame::words(reason);
                return Ok(Heard::Verdict(match stale {
                    true => DomainError::Stale(reason),
                    false => DomainError::Refused(reason),
                }));
            }
            Body::Bye { gone, reason } => {
                return Ok(Heard::Bye { gone, reason: frame::words(reason) });
            }
            Body::Note(note) => return Ok(Heard::Note(note.to_vec())),
            Body::Fence(n) => return Ok(Heard::Fence(n)),
            Body::Fenced(n) => return Ok(Heard::Fenced(n)),
            Body::Piece(_) => return Err(broken("a handshake inside a link")),
        }
        Ok(Heard::Nothing)
    }

    fn fragment(
        &mut self,
        message: u32,
        total: usize,
        offset: usize,
        bytes: &[u8],
    ) -> Result<(), DomainError> {
        let payload = self.own.payload();
        let place = message.wrapping_sub(self.first_in) as usize;
        let expected = total.saturating_sub(offset).min(payload);
        let in_order = total <= MAX_MESSAGE
            // What was taken is its sender's to repeat only once it has been told.
            && place.saturating_add(self.taken.len()) < WINDOW
            && offset.is_multiple_of(payload)
            && (offset < total || (total == 0 && offset == 0))
            && bytes.len() == expected;
        if !in_order {
            return Err(broken("a fragment of an impossible message"));
        }
        while self.incoming.len() <= place {
            self.incoming.push_back(None);
        }
        let fragments = total.div_ceil(payload).max(1);
        let m = self.incoming[place].get_or_insert_with(|| Incoming {
            bytes: vec![0; total],
            there: vec![0; fragments.div_ceil(64)],
            missing: fragments,
        });
        let (word, bit) = (offset / payload / 64, 1u64 << (offset / payload % 64));
        if m.bytes.len() != total || m.there[word] & bit != 0 {
            return Err(broken("a fragment that was there already"));
        }
        m.there[word] |= bit;
        m.missing -= 1;
        m.bytes[offset..offset + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn was_taken(&mut self, message: u32, limit: Option<u32>) -> Result<(), DomainError> {
        let at = self.out.iter().position(|o| o.id == message && o.at > o.message.len());
        let o = at.and_then(|i| self.out.remove(i));
        let o = o.ok_or_else(|| broken("it took a message that was not sent"))?;
        let result = limit.map_or(Ok(()), |limit| {
            Err(DomainError::Refused(format!(
                "the message of {} bytes is longer than the peer's receive buffers of {limit} bytes",
                o.message.len()
            )))
        });
        self.done.push((o.token, result));
        Ok(())
    }

    /// Hands up the next message that is whole and has room.
    pub fn take_message(&mut self, room: &dyn MessageRoom) -> Option<Box<[u8]>> {
        loop {
            let whole = matches!(self.incoming.front(), Some(Some(m)) if m.missing == 0);
            if !whole {
                return None;
            }
            let len = self.incoming.front()?.as_ref()?.bytes.len();
            let limit = match room.admit(len) {
                Admit::Wait => return None,
                Admit::Take => None,
                Admit::TooLong { limit } => Some(u32::try_from(limit).unwrap_or(u32::MAX)),
            };
            let m = self.incoming.pop_front()??;
            self.taken.push_back((self.first_in, limit));
            self.first_in = self.first_in.wrapping_add(1);
            if limit.is_none() {
                return Some(m.bytes.into());
            }
        }
    }

    /// Messages that wait for room.
    #[inline]
    pub fn holds_messages(&self) -> bool {
        matches!(self.incoming.front(), Some(Some(m)) if m.missing == 0)
    }

    /// Messages of ours that are over since the last call.
    pub fn finished(&mut self) -> impl Iterator<Item = (Token, Result<(), DomainError>)> + '_ {
        self.done.drain(..)
    }

    /// The messages that are under way: to be failed when the link is down.
    pub fn abandon(&mut self) -> Vec<Token> {
        std::mem::take(&mut self.out).into_iter().map(|o| o.token).collect()
    }
}

/// Moves a count that the peer tells forward, unless it is older news.
fn catch_up(known: &mut u32, told: u32, under_way: u32) -> Result<(), DomainError> {
    let more = told.wrapping_sub(*known);
    if more > u32::MAX / 2 {
        return Ok(());
    }
    if more > under_way {
        return Err(broken("it returns credits for what was not sent"));
    }
    *known = told;
    Ok(())
}

#[cfg(all(test, not(loom)))]
#[path = "mail_tests.rs"]
mod tests;
