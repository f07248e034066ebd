//! The state of an exchange, and the effects of events on it.
//!
//! A dispatch to one peer: the routes leave when the peer's fence has arrived. The first rows go to
//! the private slot there as soon as they are packed; further ones go where the peer's slot offer
//! says. The peer sends offers in the order of routes, as far as its shared buffer has room, and
//! again when rows were handed out. When a rank has handed out all rows and its own have left, it
//! sends a fence to all ranks: they may write answers, and the routes of the next exchange.
//!
//! Only the owner of memory decides what goes where, so ranks need not agree on the membership.

use std::sync::Arc;

use super::{
    actions::{Action, RemoteWrite, WritePurpose},
    blocks::{agreed_number, read_routes, read_slot_offer, routes_words, slot_offer_words},
    conditions::Condition,
    device::Device,
    link::{
        Answer, Chunk, Counters, ExportedRegions, InboundState, MessageKind, OutboundState,
        PeerEndpoint, PeerLink, RowBatch,
    },
    wait_times::WaitTimes,
    Inner,
};
use crate::{
    memory::Memory,
    phase::Phase,
    routes::{Routes, RowPlacement},
    shape::Shape,
};

/// A rank that was given up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LostPeer {
    pub rank: u32,
    /// The message that was awaited from it, or sent to it.
    pub kind: MessageKind,
    pub cause: String,
}

/// The next answers to send.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cursor {
    /// Number of answered ranks, in the order of [`ExchangeState::others`].
    pub ranks: u32,
    /// Number of answered rows of the next rank.
    pub rows: u64,
    /// The next free row of the shared buffer.
    pub place: u64,
}

#[derive(Debug)]
pub struct ExchangeState {
    pub shape: Shape,
    pub memory: Memory,
    pub rank: u32,
    /// The conditions that calls wait for, one for each waiting call: `AllToAll::admit` may wait
    /// beside a call of the exchange.
    pub awaited: Vec<Condition>,
    /// By rank; `None` for absent ranks.
    pub links: Vec<Option<PeerLink>>,
    /// Ranks that have joined since the exchange began; they take part from the next one on.
    pub newcomers: Vec<Option<PeerLink>>,
    /// Regions that are exported to ranks which haven't joined yet.
    pub exported: Vec<Option<ExportedRegions>>,
    pub lost: Vec<LostPeer>,
    /// By rank, what a lost rank counted at: it may still tell that it has given this rank up.
    pub lost_counters: Vec<Option<Arc<Counters>>>,
    /// Ranks that may still write here until the revocation ends; one entry per region.
    pub revoking: Vec<u32>,
    /// Number of failed writes that may still read their source.
    pub failed_in_flight: u32,
    pub phase: Phase,
    /// The number of this exchange, equal on all ranks. A new process has 0 until a peer's routes
    /// name it.
    pub number: u32,
    pub routes: Arc<Routes>,
    pub placing: Option<Arc<RowPlacement>>,
    /// Number of writes in flight that read this rank's own rows.
    pub rows_out: u32,
    /// Number of writes in flight that read the shared buffer, and of queued ones.
    pub answers_out: u32,
    /// This rank has sent its fences.
    pub fenced: bool,
    pub cursor: Cursor,
    /// Sources that wait for a slot offer, in order.
    pub waiting: Vec<u32>,
    /// The next free row of the shared buffer.
    pub next_place: u64,
    pub wait_times: WaitTimes,
    /// A heartbeat is scheduled.
    pub heartbeat_scheduled: bool,
    /// The exchange was closed.
    pub left: bool,
    /// All calls are done, so a rank that leaves is not reported as lost.
    pub departures_expected: bool,
    /// A reference to itself, which keeps a dropped exchange alive until peers have everything.
    pub keep_alive: Option<Arc<Inner>>,
    /// The device that executes the exchange in place of the caller.
    pub device: Option<Device>,
    last_link_id: u64,
}

impl ExchangeState {
    pub fn new(shape: Shape, memory: Memory, rank: u32) -> Self {
        let ranks = shape.ranks as usize;
        Self {
            shape,
            memory,
            rank,
            awaited: Vec::new(),
            links: (0..ranks).map(|_| None).collect(),
            newcomers: (0..ranks).map(|_| None).collect(),
            exported: (0..ranks).map(|_| None).collect(),
            lost: Vec::new(),
            lost_counters: (0..ranks).map(|_| None).collect(),
            revoking: Vec::new(),
            failed_in_flight: 0,
            phase: Phase::Idle,
            number: 0,
            routes: Arc::default(),
            placing: None,
            rows_out: 0,
            answers_out: 0,
            fenced: true,
            cursor: Cursor::default(),
            waiting: Vec::new(),
            next_place: 0,
            wait_times: WaitTimes::default(),
            heartbeat_scheduled: false,
            left: false,
            departures_expected: false,
            keep_alive: None,
            device: None,
            last_link_id: 0,
        }
    }

    /// Whether an absent rank's slots are in use, so that its next process gets no access: its last
    /// process may still write there (MR-1), or the device reads its rows (RS-1).
    pub fn slots_in_use(&self, rank: u32) -> bool {
        self.revoking.contains(&rank)
            || self.device.as_ref().is_some_and(|device| device.hands_out_rows_of(rank))
    }

    /// Records that a call no longer waits for a condition.
    pub fn end_wait(&mut self, condition: Condition) {
        if let Some(at) = self.awaited.iter().position(|awaited| *awaited == condition) {
            self.awaited.swap_remove(at);
        }
    }

    /// An id that no other link of this rank has.
    pub fn new_link_id(&mut self) -> u64 {
        self.last_link_id += 1;
        self.last_link_id
    }

    /// The peers that take part in this exchange.
    pub fn here(&self) -> impl Iterator<Item = &PeerLink> {
        self.links.iter().flatten()
    }

    /// Whether a rank takes part in this exchange, or will in the next one.
    pub fn is_known(&self, rank: u32) -> bool {
        let rank = rank as usize;
        [&self.links, &self.newcomers].iter().any(|all| all.get(rank).is_some_and(Option::is_some))
    }

    /// Removes a rank's link, of this exchange or of the next one.
    pub fn take_link(&mut self, rank: u32) -> Option<PeerLink> {
        let take = |all: &mut Vec<Option<PeerLink>>| all.get_mut(rank as usize)?.take();
        let link = take(&mut self.links).or_else(|| take(&mut self.newcomers))?;
        self.answers_out -= link.outbound.answers.len() as u32;
        self.waiting.retain(|waits| *waits != rank);
        Some(link)
    }

    pub fn link(&mut self, rank: u32) -> Option<&mut PeerLink> {
        self.links.get_mut(rank as usize).and_then(Option::as_mut)
    }

    /// Whether the endpoint is that of a present peer.
    pub fn is_current(&self, endpoint: &PeerEndpoint) -> bool {
        let link = self.links.get(endpoint.rank as usize).and_then(Option::as_ref);
        link.is_some_and(|l| l.endpoint.link_id == endpoint.link_id)
    }

    /// All other ranks, from the one after this rank on, so that not all begin with the same one.
    pub fn others(&self) -> impl Iterator<Item = u32> {
        let (rank, ranks) = (self.rank, self.shape.ranks);
        (1..ranks).map(move |i| (rank + i) % ranks)
    }

    /// A new exchange begins.
    pub fn begin(&mut self, routes: Arc<Routes>, actions: &mut Vec<Action>) {
        self.phase = Phase::Dispatched;
        self.wait_times.reset(self.shape.ranks);
        self.routes = routes;
        self.placing = None;
        self.fenced = false;
        self.waiting.clear();
        self.next_place = 0;
        self.cursor = Cursor::default();
        self.start_heartbeat(actions);
        let private = self.shape.private_rows();
        for (link, newcomer) in self.links.iter_mut().zip(&mut self.newcomers) {
            *link = newcomer.take().or(link.take());
        }
        // To each peer the routes, and from it routes, a slot offer and a fence.
        actions.reserve(4 * self.links.len());
        let knows_no_rank = self.here().all(|l| l.exchanges == 0);
        self.number = if knows_no_rank { 0 } else { self.number.checked_add(1).unwrap_or(1) };
        for rank in self.others() {
            let routes = Arc::clone(&self.routes);
            let Some(link) = self.link(rank) else { continue };
            link.exchanges = link.exchanges.wrapping_add(1);
            let (rows, first) = (routes.rows_to(rank), routes.first_to(rank));
            link.outbound =
                OutboundState { rows, first, combines: link.combines, ..OutboundState::default() };
            link.inbound = InboundState::default();
            actions.push(link.expect(MessageKind::Routes, 1));
            if rows > private {
                actions.push(link.expect(MessageKind::SlotOffer, 1));
            }
            actions.extend(link.await_fence());
            self.flush(rank, actions);
        }
    }

    /// Records that the rows for a peer are packed.
    pub fn packed(&mut self, rank: u32, actions: &mut Vec<Action>) {
        if let Some(link) = self.link(rank) {
            link.outbound.packed = true;
            self.flush(rank, actions);
        }
    }

    /// Begins this rank's answers, and expects those to its own rows.
    pub fn begin_answers(&mut self, actions: &mut Vec<Action>) {
        self.phase = Phase::Answering;
        self.wait_times.reset(self.shape.ranks);
        self.start_heartbeat(actions);
        let room = self.shape.shared_rows();
        for link in self.links.iter_mut().flatten() {
            link.combines = link.combines.wrapping_add(1);
        }
        for link in self.here().filter(|l| l.outbound.rows > 0) {
            // The peer writes as many chunks of its shared buffer.
            actions
                .push(link.expect(MessageKind::Answers, link.outbound.rows.div_ceil(room) as u32));
        }
    }

    /// Records that all rows were handed out, and expects the peers' fences in the order in which
    /// they are answered. If all ranks began with the same one, other ports would be idle.
    pub fn collected(&mut self, actions: &mut Vec<Action>) {
        self.phase = Phase::Collected;
        for rank in self.others() {
            if let Some(link) = self.link(rank).filter(|l| l.outbound.routed) {
                actions.extend(link.await_fence());
            }
        }
        self.go_on(actions);
    }

    /// Queues answers to a peer and sends what can be sent.
    pub fn answer(&mut self, rank: u32, answer: Answer, actions: &mut Vec<Action>) {
        if let Some(link) = self.link(rank) {
            link.outbound.answers.push_back(answer);
            self.answers_out += 1;
            self.flush(rank, actions);
        }
    }

    /// Sends everything that can be sent to a peer now.
    fn flush(&mut self, rank: u32, actions: &mut Vec<Action>) {
        let (memory, shape, me) = (self.memory, self.shape, self.rank);
        let (routes, all) = (Arc::clone(&self.routes), self.number);
        let collected = self.phase != Phase::Dispatched;
        let Some(link) = self.link(rank) else { return };
        let mut rows_out = 0;
        if link.open && !link.outbound.routed {
            let (dst, len) = memory.routes(me);
            let write =
                RemoteWrite { src: memory.routes_out(rank), dst, len, counts: MessageKind::Routes };
            let counts = routes.counts_to(&shape, rank);
            let number = (link.exchanges, link.outbound.combines);
            let words = routes_words(number, all, link.outbound.first, counts);
            actions.push(link.write_block(words, write));
            (link.open, link.outbound.routed) = (false, true);
            if collected {
                actions.extend(link.await_fence());
            }
        }
        if link.outbound.routed && link.outbound.packed {
            let stride = shape.row_stride();
            let mut send = |link: &mut PeerLink, dst: u64, rows: u64| {
                if link.outbound.stored && link.outbound.sent == 0 {
                    // The device has stored the rows.
                    actions.push(link.count(MessageKind::Rows));
                    link.outbound.sent += rows;
                    return;
                }
                let src = memory.own(link.outbound.first + link.outbound.sent);
                let write = RemoteWrite { src, dst, len: rows * stride, counts: MessageKind::Rows };
                actions.push(Action::Write {
                    endpoint: Arc::clone(&link.endpoint),
                    write,
                    purpose: WritePurpose::Rows,
                });
                link.outbound.sent += rows;
                link.data_in_flight += 1;
                rows_out += 1;
            };
            let private = link.outbound.rows.min(shape.private_rows());
            if link.outbound.sent == 0 && private > 0 {
                send(link, memory.private(me, 0), private);
            }
            if let Some((place, rows)) = link.outbound.slot_offer.take() {
                send(link, memory.shared(place), rows);
                if link.outbound.sent < link.outbound.rows {
                    actions.push(link.expect(MessageKind::SlotOffer, 1));
                }
            }
        }
        for answer in
            link.outbound.answers.drain(..if link.open { link.outbound.answers.len() } else { 0 })
        {
            let dst = memory.own_back(link.inbound.first + answer.first);
            let (src, len) = (memory.shared_back(answer.place), answer.rows * shape.back_stride());
            let write = RemoteWrite { src, dst, len, counts: MessageKind::Answers };
            actions.push(Action::Write {
                endpoint: Arc::clone(&link.endpoint),
                write,
                purpose: WritePurpose::Answers,
            });
            link.data_in_flight += 1;
        }
        self.rows_out += rows_out;
    }

    /// Applies a message of a peer. `words` is its block, for routes and slot offers. Call
    /// [`ExchangeState::go_on`] after it.
    ///
    /// # Errors
    /// The block is invalid.
    pub fn on_message(
        &mut self,
        rank: u32,
        kind: MessageKind,
        words: &[u32],
        actions: &mut Vec<Action>,
    ) -> Result<(), String> {
        let (shape, memory, number) = (self.shape, self.memory, self.number);
        let Some(link) = self.link(rank) else { return Ok(()) };
        link.activity.data_arrived = true;
        match kind {
            MessageKind::Routes => {
                let block = read_routes(&shape, (link.exchanges, link.combines), words)?;
                let number = agreed_number(number, block.number, link.exchanges == 1)?;
                (link.inbound.rows, link.inbound.first) = (block.rows, block.first);
                link.inbound.counts = Some(block.counts);
                let private = shape.private_rows().min(link.inbound.rows);
                if private > 0 {
                    let place = memory.private(rank, 0);
                    link.inbound.chunks.push_back(Chunk { first: 0, rows: private, place });
                    (link.inbound.offered, link.inbound.due) = (private, 1);
                    actions.push(link.expect(MessageKind::Rows, 1));
                }
                if link.inbound.rows > private {
                    self.waiting.push(rank);
                }
                self.number = number;
            }
            MessageKind::Rows => link.inbound.due -= 1,
            MessageKind::SlotOffer => {
                // The rows for the private slot may not be packed yet.
                let private = link.outbound.rows.min(shape.private_rows());
                let left = link.outbound.rows - link.outbound.sent.max(private);
                let (place, rows) = read_slot_offer(&shape, link.exchanges, left, words)?;
                link.outbound.slot_offer = Some((place, rows));
                self.flush(rank, actions);
            }
            MessageKind::Fence => {
                (link.open, link.awaits_fence) = (true, false);
                self.flush(rank, actions);
            }
            MessageKind::Answers => link.outbound.answered = true,
            MessageKind::Waiting | MessageKind::GivenUp => {}
        }
        Ok(())
    }

    /// Applies the end of a write. The source of a failed write is not free yet. Call
    /// [`ExchangeState::go_on`] after it.
    pub fn written(
        &mut self,
        endpoint: &PeerEndpoint,
        purpose: WritePurpose,
        well: bool,
        actions: &mut Vec<Action>,
    ) {
        let link = self.link(endpoint.rank).filter(|l| l.endpoint.link_id == endpoint.link_id);
        match (purpose, link) {
            (WritePurpose::Signal, Some(link)) => return link.activity.signal_in_flight = false,
            (WritePurpose::Signal, None) => return,
            (WritePurpose::Rows | WritePurpose::Answers, Some(link)) => link.data_in_flight -= 1,
            (WritePurpose::Control, Some(link)) => link.control_in_flight -= 1,
            (_, None) => {}
        }
        if !well {
            self.failed_in_flight += 1;
            self.start_heartbeat(actions);
        }
        match purpose {
            WritePurpose::Rows => self.rows_out -= 1,
            WritePurpose::Answers => self.answers_out -= 1,
            WritePurpose::Control | WritePurpose::Signal => {}
        }
    }

    /// Applies the common effects of events: sends slot offers and fences.
    pub fn go_on(&mut self, actions: &mut Vec<Action>) {
        // The shared buffer is free when no row in it is needed and no lost rank can write to it.
        // A device needs the rows that it hands out, even if their sender has left since.
        let is_used = || {
            self.here().any(|l| !l.inbound.chunks.is_empty())
                || self.device.as_ref().is_some_and(Device::hands_out)
                || !self.holds(Condition::Quiesced)
        };
        if !self.waiting.is_empty() && !is_used() {
            self.next_place = 0;
        }
        self.offer_slots(actions);
        if !self.fenced && self.phase != Phase::Dispatched && self.rows_left() {
            self.fenced = true;
            for link in self.links.iter_mut().flatten() {
                actions.push(link.count(MessageKind::Fence));
            }
        }
    }

    /// Offers sources slots of the shared buffer, once no answers of this rank leave from it.
    fn offer_slots(&mut self, actions: &mut Vec<Action>) {
        // The source of a failed write may still be read (MR-1).
        if self.answers_out + self.failed_in_flight > 0 || self.phase != Phase::Dispatched {
            return;
        }
        let (room, memory, me) = (self.shape.shared_rows(), self.memory, self.rank);
        while let Some(rank) = self.waiting.first().copied() {
            let place = self.next_place;
            let Some(link) = self.link(rank) else { return };
            let rows = (link.inbound.rows - link.inbound.offered).min(room - place);
            if rows == 0 {
                return;
            }
            let first = link.inbound.offered;
            link.inbound.chunks.push_back(Chunk { first, rows, place: memory.shared(place) });
            link.inbound.offered += rows;
            link.inbound.due += 1;
            let (dst, len) = memory.slot_offer(me);
            actions.push(link.expect(MessageKind::Rows, 1));
            let words = slot_offer_words(link.exchanges, place, rows);
            let write = RemoteWrite {
                src: memory.slot_offer_out(rank),
                dst,
                len,
                counts: MessageKind::SlotOffer,
            };
            actions.push(link.write_block(words, write));
            if link.inbound.offered == link.inbound.rows {
                self.waiting.remove(0);
            }
            self.next_place += rows;
        }
    }

    /// Removes the chunks that were handed out; others may have arrived meanwhile.
    pub fn handed_out(&mut self, batch: &RowBatch, actions: &mut Vec<Action>) {
        if let Some(link) = self.link(batch.source).filter(|l| l.endpoint.link_id == batch.link_id)
        {
            let done = link.inbound.chunks.drain(..batch.chunks.len());
            link.inbound.collected += done.map(|c| c.rows).sum::<u64>();
        }
        self.go_on(actions);
    }
}
