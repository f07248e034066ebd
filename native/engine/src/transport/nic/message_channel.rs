//! The frames of one link: messages in fragments, their results, and credits.
//!
//! A frame is sent only if a receive slot waits for it, so the receiver is never "not ready":
//! - Each frame returns credits: how many frames of the other side have free slots again. Frames
//!   under way = sent - credits returned.
//! - Fragments are sent while fewer than the peer's `slots` are under way, other frames while fewer
//!   than `slots` + [`SPARE`] are. Without credits a side sends fewer than `SPARE` of those: a
//!   result for each message, one frame of credits, one heartbeat per quarter of the peer timeout,
//!   a query, an answer, a close. So a frame that returns credits never waits for credits.
//! - A frame that only returns credits is sent once half of the slots are owed, so that two sides
//!   do not answer each other's credits forever.
//!
//! Frames may arrive in any order; messages are delivered in the order in which they were sent.

use std::{collections::VecDeque, sync::Arc};

use super::frame::{self, broken, result_entry, Body, Header, FRAGMENT_HEADER};
use crate::{
    api::RegionKey,
    domain::{Admit, DomainError, MessageRoom, Token},
};

/// Longest message, bytes.
pub(crate) const MAX_MESSAGE: usize = 64 << 10;
/// Messages that may be under way in one direction.
pub(crate) const WINDOW: usize = 16;
/// Group frames that wait for slots. A group sends fewer about one link.
const MAX_QUEUED_GROUP_FRAMES: usize = 1 << 11;
/// Receive slots for frames other than fragments.
pub(crate) const SPARE: u32 = 2 * WINDOW as u32;

/// Numbers of frames and immediates that one side can receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct ReceiveLimits {
    /// Bytes of a slot.
    pub slot_bytes: u32,
    /// Slots for fragments; [`SPARE`] more exist for other frames.
    pub slots: u32,
    /// Immediates that may arrive before credits are returned.
    pub imms: u32,
}

impl ReceiveLimits {
    /// Checks a peer's limits: an error if no message could be sent with them.
    pub fn check(&self) -> Result<(), DomainError> {
        let sane = (256..=1 << 20).contains(&self.slot_bytes)
            && (2..=1 << 16).contains(&self.slots)
            && self.imms <= 1 << 20;
        match sane {
            true => Ok(()),
            false => Err(DomainError::Handshake(format!("impossible receive limits: {self:?}"))),
        }
    }

    fn payload(&self) -> usize {
        self.slot_bytes as usize - FRAGMENT_HEADER
    }
}

/// The event of a frame that the transport handles.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum FrameEvent {
    /// Nothing: the channel has handled it.
    Handled,
    /// The peer asks why the local NIC refused this access. Answer with
    /// [`MessageChannel::answer_access`].
    AccessQuery {
        key: RegionKey,
        offset: u64,
        len: u64,
    },
    /// The peer's answer to [`MessageChannel::query_access`].
    AccessAnswer(DomainError),
    /// The peer has closed the link.
    Close {
        gone: bool,
        reason: String,
    },
    /// A frame of the peer's group.
    GroupFrame(Vec<u8>),
    /// Answer with [`MessageChannel::fenced`] once no earlier operation is under way.
    Fence(u32),
    Fenced(u32),
}

struct Outgoing {
    id: u32,
    token: Token,
    message: Arc<[u8]>,
    /// Bytes sent so far; `usize::MAX` once all fragments are sent.
    at: usize,
}

struct Incoming {
    bytes: Vec<u8>,
    /// One bit per fragment that has arrived.
    arrived: Vec<u64>,
    missing: usize,
}

enum Control {
    AccessQuery { key: RegionKey, offset: u64, len: u64 },
    AccessAnswer { stale: bool, reason: String },
    Close { gone: bool, reason: String },
    Fence(u32),
    Fenced(u32),
}

/// One end of a link's frames.
pub(crate) struct MessageChannel {
    own: ReceiveLimits,
    peer: ReceiveLimits,
    /// The peer's number of the link.
    link: u32,
    frames_sent: u32,
    frames_acked: u32,
    frame_credits: u32,
    frame_credits_sent: u32,
    imms_sent: u32,
    imms_acked: u32,
    imm_credits: u32,
    imm_credits_sent: u32,
    out: VecDeque<Outgoing>,
    next_out: u32,
    /// Messages from `first_in` on.
    incoming: VecDeque<Option<Incoming>>,
    first_in: u32,
    results: VecDeque<(u32, Option<u32>)>,
    controls: VecDeque<Control>,
    /// Frames between groups. Like fragments, they use the slots that are not spare.
    group_frames: VecDeque<Vec<u8>>,
    heartbeat: bool,
    done: Vec<(Token, Result<(), DomainError>)>,
}

impl MessageChannel {
    /// `link` is written into every frame.
    pub fn new(own: ReceiveLimits, peer: ReceiveLimits, link: u32) -> Self {
        Self {
            own,
            peer,
            link,
            frames_sent: 0,
            frames_acked: 0,
            frame_credits: 0,
            frame_credits_sent: 0,
            imms_sent: 0,
            imms_acked: 0,
            imm_credits: 0,
            imm_credits_sent: 0,
            out: VecDeque::new(),
            next_out: 0,
            incoming: VecDeque::new(),
            first_in: 0,
            results: VecDeque::new(),
            controls: VecDeque::new(),
            group_frames: VecDeque::new(),
            heartbeat: false,
            done: Vec::new(),
        }
    }

    /// Queues a message; false if [`WINDOW`] messages are under way. The caller has checked the
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
    pub fn query_access(&mut self, key: RegionKey, offset: u64, len: u64) {
        self.controls.push_back(Control::AccessQuery { key, offset, len });
    }

    /// Answers [`FrameEvent::AccessQuery`].
    pub fn answer_access(&mut self, why: &DomainError) {
        let stale = matches!(why, DomainError::Stale(_));
        // A correct peer asks one question at a time; further ones are not answered.
        if self.controls.len() < 4 {
            self.controls.push_back(Control::AccessAnswer { stale, reason: why.to_string() });
        }
    }

    /// Asks the peer to report when none of its earlier operations is under way. The caller has at
    /// most one fence open, so that fences never use up the spare slots.
    pub fn fence(&mut self, number: u32) {
        self.controls.push_back(Control::Fence(number));
    }

    /// Answers [`FrameEvent::Fence`].
    pub fn fenced(&mut self, number: u32) {
        // The last answer covers earlier fences; a peer that floods gets only that one.
        self.controls.retain(|c| !matches!(c, Control::Fenced(_)));
        self.controls.push_back(Control::Fenced(number));
    }

    /// Tells the peer that the link ends, or the whole engine (`gone`).
    pub fn close(&mut self, gone: bool, reason: &str) {
        self.controls.push_back(Control::Close { gone, reason: reason.to_owned() });
    }

    /// Sends a frame to the peer's group. It is dropped if too many wait.
    pub fn send_group_frame(&mut self, frame: Vec<u8>) {
        if self.group_frames.len() < MAX_QUEUED_GROUP_FRAMES {
            self.group_frames.push_back(frame);
        }
    }

    /// Sends a heartbeat unless another frame goes out first.
    pub fn heartbeat(&mut self) {
        self.heartbeat = true;
    }

    /// The receive slot of a frame is free again.
    #[inline]
    pub fn slot_freed(&mut self) {
        self.frame_credits = self.frame_credits.wrapping_add(1);
    }

    /// The receive requests of `n` immediates are free again.
    #[inline]
    pub fn imms_freed(&mut self, n: u32) {
        self.imm_credits = self.imm_credits.wrapping_add(n);
    }

    /// Immediates that may be under way at most.
    #[inline]
    pub fn imm_places(&self) -> u32 {
        self.peer.imms
    }

    /// Immediates that may be sent now.
    #[inline]
    pub fn imm_room(&self) -> u32 {
        self.peer.imms - self.imms_sent.wrapping_sub(self.imms_acked)
    }

    #[inline]
    pub fn imms_sent(&mut self, n: u32) {
        debug_assert!(n <= self.imm_room(), "more immediates than credits");
        self.imms_sent = self.imms_sent.wrapping_add(n);
    }

    fn under_way(&self) -> u32 {
        self.frames_sent.wrapping_sub(self.frames_acked)
    }

    /// Whether the peer may be waiting for credits.
    #[inline]
    fn owes_credits(&self) -> bool {
        let imms = self.imm_credits.wrapping_sub(self.imm_credits_sent);
        self.frame_credits.wrapping_sub(self.frame_credits_sent) >= self.own.slots.div_ceil(2)
            || (imms > 0 && imms >= self.own.imms / 4)
    }

    /// Whether a frame can be sent now.
    #[inline]
    pub fn has_frame(&self) -> bool {
        let under_way = self.under_way();
        let small = self.heartbeat
            || !self.controls.is_empty()
            || !self.results.is_empty()
            || self.owes_credits();
        (small && under_way < self.peer.slots + SPARE)
            || (under_way < self.peer.slots
                && (self.unsent().is_some() || !self.group_frames.is_empty()))
    }

    fn unsent(&self) -> Option<usize> {
        self.out.iter().position(|o| o.at <= o.message.len())
    }

    fn next_group_frame(&mut self) -> Option<Vec<u8>> {
        let room = self.under_way() < self.peer.slots;
        room.then(|| self.group_frames.pop_front()).flatten()
    }

    /// Writes the next frame to `slot` and returns its length.
    pub fn next_frame(&mut self, slot: &mut [u8]) -> Option<usize> {
        if !self.has_frame() {
            return None;
        }
        let room = slot.len().min(self.peer.slot_bytes as usize);
        let slot = &mut slot[..room];
        let header = Header {
            link: self.link,
            frame_credits: self.frame_credits,
            imm_credits: self.imm_credits,
        };
        let payload = room - FRAGMENT_HEADER;
        let n = if let Some(control) = self.controls.pop_front() {
            let cut = |s: &String| s.as_bytes()[..s.len().min(payload)].to_vec();
            match &control {
                Control::AccessQuery { key, offset, len } => {
                    let body = Body::AccessQuery { key: *key, offset: *offset, len: *len };
                    frame::encode(&header, &body, slot)
                }
                Control::AccessAnswer { stale, reason } => {
                    let body = Body::AccessAnswer { stale: *stale, reason: &cut(reason) };
                    frame::encode(&header, &body, slot)
                }
                Control::Fence(n) => frame::encode(&header, &Body::Fence(*n), slot),
                Control::Fenced(n) => frame::encode(&header, &Body::Fenced(*n), slot),
                Control::Close { gone, reason } => {
                    let body = Body::Close { gone: *gone, reason: &cut(reason) };
                    frame::encode(&header, &body, slot)
                }
            }
        } else if !self.results.is_empty() {
            let n = self.results.len().min(payload / 8);
            let list: Vec<u8> =
                self.results.drain(..n).flat_map(|(m, limit)| result_entry(m, limit)).collect();
            frame::encode(&header, &Body::Results(&list), slot)
        } else if let Some(bytes) = self.next_group_frame() {
            frame::encode(&header, &Body::GroupFrame(&bytes[..bytes.len().min(payload)]), slot)
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
            frame::encode(&header, &Body::Heartbeat, slot)
        };
        self.heartbeat = false;
        self.frames_sent = self.frames_sent.wrapping_add(1);
        (self.frame_credits_sent, self.imm_credits_sent) = (self.frame_credits, self.imm_credits);
        Some(n)
    }

    /// Handles a frame. On an error the peer has violated the protocol: drop the link.
    pub fn on_frame(&mut self, bytes: &[u8]) -> Result<FrameEvent, DomainError> {
        let (header, body) = frame::decode(bytes)?;
        let under_way = self.under_way();
        catch_up(&mut self.frames_acked, header.frame_credits, under_way)?;
        let under_way = self.imms_sent.wrapping_sub(self.imms_acked);
        catch_up(&mut self.imms_acked, header.imm_credits, under_way)?;
        match body {
            Body::Heartbeat => {}
            Body::Fragment { message, total, offset, bytes } => {
                self.fragment(message, total as usize, offset as usize, bytes)?;
            }
            Body::Results(list) => {
                frame::results(list).try_for_each(|(m, l)| self.on_result(m, l))?
            }
            Body::AccessQuery { key, offset, len } => {
                return Ok(FrameEvent::AccessQuery { key, offset, len })
            }
            Body::AccessAnswer { stale, reason } => {
                let reason = frame::printable(reason);
                return Ok(FrameEvent::AccessAnswer(match stale {
                    true => DomainError::Stale(reason),
                    false => DomainError::Refused(reason),
                }));
            }
            Body::Close { gone, reason } => {
                return Ok(FrameEvent::Close { gone, reason: frame::printable(reason) });
            }
            Body::GroupFrame(bytes) => return Ok(FrameEvent::GroupFrame(bytes.to_vec())),
            Body::Fence(n) => return Ok(FrameEvent::Fence(n)),
            Body::Fenced(n) => return Ok(FrameEvent::Fenced(n)),
            Body::HandshakeFragment(_) => {
                return Err(broken("a handshake fragment on an open link"))
            }
        }
        Ok(FrameEvent::Handled)
    }

    fn fragment(
        &mut self,
        message: u32,
        total: usize,
        offset: usize,
        bytes: &[u8],
    ) -> Result<(), DomainError> {
        let payload = self.own.payload();
        let index = message.wrapping_sub(self.first_in) as usize;
        let expected = total.saturating_sub(offset).min(payload);
        let in_order = total <= MAX_MESSAGE
            // A sender repeats a message number only after it has the result of the earlier one.
            && index.saturating_add(self.results.len()) < WINDOW
            && offset.is_multiple_of(payload)
            && (offset < total || (total == 0 && offset == 0))
            && bytes.len() == expected;
        if !in_order {
            return Err(broken("a fragment of an impossible message"));
        }
        while self.incoming.len() <= index {
            self.incoming.push_back(None);
        }
        let fragments = total.div_ceil(payload).max(1);
        let m = self.incoming[index].get_or_insert_with(|| Incoming {
            bytes: vec![0; total],
            arrived: vec![0; fragments.div_ceil(64)],
            missing: fragments,
        });
        let (word, bit) = (offset / payload / 64, 1u64 << (offset / payload % 64));
        if m.bytes.len() != total || m.arrived[word] & bit != 0 {
            return Err(broken("a fragment arrived twice"));
        }
        m.arrived[word] |= bit;
        m.missing -= 1;
        m.bytes[offset..offset + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn on_result(&mut self, message: u32, limit: Option<u32>) -> Result<(), DomainError> {
        let at = self.out.iter().position(|o| o.id == message && o.at > o.message.len());
        let o = at.and_then(|i| self.out.remove(i));
        let o = o.ok_or_else(|| broken("it reports the result of a message that was not sent"))?;
        let result = limit.map_or(Ok(()), |limit| {
            Err(DomainError::Refused(format!(
                "the message of {} bytes is longer than the peer's receive buffers of {limit} bytes",
                o.message.len()
            )))
        });
        self.done.push((o.token, result));
        Ok(())
    }

    /// Returns the next message that is complete and that `room` admits.
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
            self.results.push_back((self.first_in, limit));
            self.first_in = self.first_in.wrapping_add(1);
            if limit.is_none() {
                return Some(m.bytes.into());
            }
        }
    }

    /// Whether a complete message waits for room.
    #[inline]
    pub fn holds_messages(&self) -> bool {
        matches!(self.incoming.front(), Some(Some(m)) if m.missing == 0)
    }

    /// Local messages that have completed since the last call.
    pub fn finished(&mut self) -> impl Iterator<Item = (Token, Result<(), DomainError>)> + '_ {
        self.done.drain(..)
    }

    /// Removes the messages under way, to be failed when the link is down.
    pub fn abandon(&mut self) -> Vec<Token> {
        std::mem::take(&mut self.out).into_iter().map(|o| o.token).collect()
    }
}

/// Advances a count that the peer reports; an older report is ignored.
fn catch_up(known: &mut u32, reported: u32, under_way: u32) -> Result<(), DomainError> {
    let more = reported.wrapping_sub(*known);
    if more > u32::MAX / 2 {
        return Ok(());
    }
    if more > under_way {
        return Err(broken("it returns credits for frames that were not sent"));
    }
    *known = reported;
    Ok(())
}

#[cfg(all(test, not(loom)))]
#[path = "message_channel_tests.rs"]
mod tests;
