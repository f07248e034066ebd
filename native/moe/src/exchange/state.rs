//! The state of an exchange, and the effects of events on it.
//!
//! A rank's dispatch, to one peer: its routes go when the peer's memory is open; the first rows go
//! to the private slot there as soon as they are packed; further ones go where the peer's slot
//! offer says. The peer sends offers in the order of routes, as far as its shared buffer has room,
//! and again when rows were handed out. When a rank has handed out all rows and its own have left,
//! it opens its memory to all ranks: answers may come, and the routes of the next exchange.
//!
//! Only the owner of memory decides what goes where, so ranks needn't agree on the membership.

use std::sync::Arc;

use super::{
    act::{Act, Load, Piece},
    blocks::{grant_words, read_grant, read_routes, routes_words},
    device::Device,
    link::{Answer, Chunk, In, Link, Lot, Ours, Out, Stage, Wire},
    waits::Until,
    Inner,
};
use crate::{
    memory::Memory,
    phase::Phase,
    routes::{Placing, Routes},
    shape::Shape,
};

/// A rank that was given up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lost {
    pub rank: u32,
    /// What was under way with it.
    pub stage: Stage,
    pub cause: String,
}

/// How far this rank is with its answers.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cursor {
    /// Ranks that were answered, counted from the one behind this.
    pub ranks: u32,
    /// Rows of the next one that were.
    pub rows: u64,
    /// The next free row of the shared buffer.
    pub place: u64,
}

#[derive(Debug)]
pub struct State {
    pub shape: Shape,
    pub memory: Memory,
    pub rank: u32,
    /// What the caller waits for.
    pub awaited: Option<Until>,
    /// By rank; `None` for absent ranks.
    pub links: Vec<Option<Link>>,
    /// Ranks that have joined since the exchange began; they take part from the next one on.
    pub newcomers: Vec<Option<Link>>,
    /// Access that was made for ranks that haven't joined yet.
    pub ours: Vec<Option<Ours>>,
    pub lost: Vec<Lost>,
    /// Ranks whose access is being revoked and that may still write here; one entry per region.
    pub revoking: Vec<u32>,
    /// Writes that failed, and may still read what they were to send.
    pub unsettled: u32,
    pub phase: Phase,
    /// Of this exchange among all ranks: all count the same, but for those that come anew, who are
    /// told. 0 until then.
    pub number: u32,
    pub routes: Arc<Routes>,
    pub placing: Option<Arc<Placing>>,
    /// Writes under way that read this rank's own rows.
    pub rows_out: u32,
    /// Writes under way that read the shared buffer, and those that wait for their turn.
    pub answers_out: u32,
    /// Peers know that our memory may be written.
    pub fenced: bool,
    pub cursor: Cursor,
    /// Sources that wait for a grant, in order, and the next free row.
    pub waiting: Vec<u32>,
    pub next_place: u64,
    /// A beat is under way.
    pub beating: bool,
    /// The exchange was closed.
    pub left: bool,
    /// All calls are done, and other ranks may leave: that is no failure to report.
    pub parting: bool,
    /// Only the exchange itself is left, until other ranks have what was handed in.
    pub lingers: Option<Arc<Inner>>,
    /// The device, if one executes the exchange in place of the caller.
    pub device: Option<Device>,
    lives: u64,
}

impl State {
    pub fn new(shape: Shape, memory: Memory, rank: u32) -> Self {
        let ranks = shape.ranks as usize;
        Self {
            shape,
            memory,
            rank,
            awaited: None,
            links: (0..ranks).map(|_| None).collect(),
            newcomers: (0..ranks).map(|_| None).collect(),
            ours: (0..ranks).map(|_| None).collect(),
            lost: Vec::new(),
            revoking: Vec::new(),
            unsettled: 0,
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
            beating: false,
            left: false,
            parting: false,
            lingers: None,
            device: None,
            lives: 0,
        }
    }

    /// A number that no link of this rank has had.
    pub fn new_life(&mut self) -> u64 {
        self.lives += 1;
        self.lives
    }

    /// Those that take part in this exchange.
    pub fn here(&self) -> impl Iterator<Item = &Link> {
        self.links.iter().flatten()
    }

    /// Whether a rank takes part in this exchange, or will in the next one.
    pub fn knows(&self, rank: u32) -> bool {
        let rank = rank as usize;
        [&self.links, &self.newcomers].iter().any(|all| all.get(rank).is_some_and(Option::is_some))
    }

    pub fn link(&mut self, rank: u32) -> Option<&mut Link> {
        self.links.get_mut(rank as usize).and_then(Option::as_mut)
    }

    /// Whether the wire is that of who is there now.
    pub fn is_current(&self, wire: &Wire) -> bool {
        let link = self.links.get(wire.rank as usize).and_then(Option::as_ref);
        link.is_some_and(|l| l.wire.life == wire.life)
    }

    /// The others, from the one behind this rank on, so that not all begin with the same one.
    pub fn others(&self) -> impl Iterator<Item = u32> {
        let (rank, ranks) = (self.rank, self.shape.ranks);
        (1..ranks).map(move |i| (rank + i) % ranks)
    }

    /// A new exchange begins.
    pub fn begin(&mut self, routes: Arc<Routes>, acts: &mut Vec<Act>) {
        self.phase = Phase::Dispatched;
        self.routes = routes;
        self.placing = None;
        self.fenced = false;
        self.waiting.clear();
        self.next_place = 0;
        self.cursor = Cursor::default();
        self.start_pulse(acts);
        let private = self.shape.private_rows();
        for (link, newcomer) in self.links.iter_mut().zip(&mut self.newcomers) {
            *link = newcomer.take().or(link.take());
        }
        // Routes go to each, and routes, a grant and a fence come.
        acts.reserve(4 * self.links.len());
        let knows_no_rank = self.here().all(|l| l.exchanges == 0);
        self.number = if knows_no_rank { 0 } else { self.number.checked_add(1).unwrap_or(1) };
        for rank in self.others() {
            let routes = Arc::clone(&self.routes);
            let Some(link) = self.link(rank) else { continue };
            link.exchanges = link.exchanges.wrapping_add(1);
            let (rows, first) = (routes.rows_to(rank), routes.first_to(rank));
            link.out = Out { rows, first, combines: link.combines, ..Out::default() };
            link.inward = In::default();
            acts.push(link.expect(Stage::Routes, 1));
            if rows > private {
                acts.push(link.expect(Stage::Grant, 1));
            }
            acts.extend(link.await_fence());
            self.flush(rank, acts);
        }
    }

    /// The rows for a peer lie ready.
    pub fn packed(&mut self, rank: u32, acts: &mut Vec<Act>) {
        if let Some(link) = self.link(rank) {
            link.out.packed = true;
            self.flush(rank, acts);
        }
    }

    /// This rank's answers begin, and those to its own rows are waited for.
    pub fn begin_answers(&mut self, acts: &mut Vec<Act>) {
        self.phase = Phase::Answering;
        self.start_pulse(acts);
        let room = self.shape.shared_rows();
        for link in self.links.iter_mut().flatten() {
            link.combines = link.combines.wrapping_add(1);
        }
        for link in self.here().filter(|l| l.out.rows > 0) {
            // As many writes as the buffer that answers leave from makes of them.
            acts.push(link.expect(Stage::Answers, link.out.rows.div_ceil(room) as u32));
        }
    }

    /// All rows were handed out. What peers have to say before they can be answered is heard in the
    /// order in which they are answered: if all ranks began with the same one, the others' ports
    /// would be idle meanwhile.
    pub fn collected(&mut self, acts: &mut Vec<Act>) {
        self.phase = Phase::Collected;
        for rank in self.others() {
            if let Some(link) = self.link(rank).filter(|l| l.out.routed) {
                acts.extend(link.await_fence());
            }
        }
        self.go_on(acts);
    }

    /// The answers to rows of a peer lie ready.
    pub fn answer(&mut self, rank: u32, answer: Answer, acts: &mut Vec<Act>) {
        if let Some(link) = self.link(rank) {
            link.out.answers.push_back(answer);
            self.answers_out += 1;
            self.flush(rank, acts);
        }
    }

    /// Sends whatever can be sent to a peer.
    fn flush(&mut self, rank: u32, acts: &mut Vec<Act>) {
        let (memory, shape, me) = (self.memory, self.shape, self.rank);
        let (routes, all) = (Arc::clone(&self.routes), self.number);
        let collected = self.phase != Phase::Dispatched;
        let Some(link) = self.link(rank) else { return };
        let mut rows_out = 0;
        if link.open && !link.out.routed {
            let (dst, len) = memory.routes(me);
            let piece = Piece { src: memory.routes_out(rank), dst, len, counts: Stage::Routes };
            let counts = routes.counts_to(&shape, rank);
            let number = (link.exchanges, link.out.combines);
            let words = routes_words(number, all, link.out.first, counts);
            acts.push(link.tell(words, piece));
            (link.open, link.out.routed) = (false, true);
            if collected {
                acts.extend(link.await_fence());
            }
        }
        if link.out.routed && link.out.packed {
            let stride = shape.row_stride();
            let mut send = |link: &mut Link, dst: u64, rows: u64| {
                if link.out.stored && link.out.sent == 0 {
                    // The device has stored them.
                    acts.push(link.count(Stage::Rows));
                    link.out.sent += rows;
                    return;
                }
                let src = memory.own(link.out.first + link.out.sent);
                let piece = Piece { src, dst, len: rows * stride, counts: Stage::Rows };
                acts.push(Act::Write { wire: Arc::clone(&link.wire), piece, load: Load::Rows });
                link.out.sent += rows;
                link.flying += 1;
                rows_out += 1;
            };
            let private = link.out.rows.min(shape.private_rows());
            if link.out.sent == 0 && private > 0 {
                send(link, memory.private(me, 0), private);
            }
            if let Some((place, rows)) = link.out.grant.take() {
                send(link, memory.shared(place), rows);
                if link.out.sent < link.out.rows {
                    acts.push(link.expect(Stage::Grant, 1));
                }
            }
        }
        for answer in link.out.answers.drain(..if link.open { link.out.answers.len() } else { 0 }) {
            let dst = memory.own_back(link.inward.first + answer.first);
            let (src, len) = (memory.shared_back(answer.place), answer.rows * shape.back_stride());
            let piece = Piece { src, dst, len, counts: Stage::Answers };
            acts.push(Act::Write { wire: Arc::clone(&link.wire), piece, load: Load::Answers });
            link.flying += 1;
        }
        self.rows_out += rows_out;
    }

    /// What a peer sent has come. `words` are those of its block, for routes and grants. To be
    /// followed by [`State::go_on`].
    ///
    /// # Errors
    /// What is wrong with the block.
    pub fn came(
        &mut self,
        rank: u32,
        stage: Stage,
        words: &[u32],
        acts: &mut Vec<Act>,
    ) -> Result<(), String> {
        let (shape, memory, number) = (self.shape, self.memory, self.number);
        let Some(link) = self.link(rank) else { return Ok(()) };
        link.activity.came = true;
        match stage {
            Stage::Routes => {
                let block = read_routes(&shape, (link.exchanges, link.combines), words)?;
                let number = agree(number, block.number, link.exchanges == 1)?;
                (link.inward.rows, link.inward.first) = (block.rows, block.first);
                link.inward.counts = Some(block.counts);
                let private = shape.private_rows().min(link.inward.rows);
                if private > 0 {
                    let place = memory.private(rank, 0);
                    link.inward.chunks.push_back(Chunk { first: 0, rows: private, place });
                    (link.inward.granted, link.inward.due) = (private, 1);
                    acts.push(link.expect(Stage::Rows, 1));
                }
                if link.inward.rows > private {
                    self.waiting.push(rank);
                }
                self.number = number;
            }
            Stage::Rows => link.inward.due -= 1,
            Stage::Grant => {
                // The rows of the private slot may still wait to be packed.
                let private = link.out.rows.min(shape.private_rows());
                let left = link.out.rows - link.out.sent.max(private);
                let (place, rows) = read_grant(&shape, link.exchanges, left, words)?;
                link.out.grant = Some((place, rows));
                self.flush(rank, acts);
            }
            Stage::Fence => {
                (link.open, link.awaits_fence) = (true, false);
                self.flush(rank, acts);
            }
            Stage::Answers => link.out.answered = true,
            Stage::Waits => {}
        }
        Ok(())
    }

    /// A write of ours has ended. If it failed, the memory that it reads is not free yet. To be
    /// followed by [`State::go_on`].
    pub fn written(&mut self, wire: &Wire, load: Load, well: bool, acts: &mut Vec<Act>) {
        let link = self.link(wire.rank).filter(|l| l.wire.life == wire.life);
        match (load, link) {
            (Load::Word, Some(link)) => return link.activity.telling = false,
            (Load::Word, None) => return,
            (Load::Rows | Load::Answers, Some(link)) => link.flying -= 1,
            (Load::Control, Some(link)) => link.telling -= 1,
            (_, None) => {}
        }
        if !well {
            self.unsettled += 1;
            self.start_pulse(acts);
        }
        match load {
            Load::Rows => self.rows_out -= 1,
            Load::Answers => self.answers_out -= 1,
            Load::Control | Load::Word => {}
        }
    }

    /// What follows for all from something that has happened to one.
    pub fn go_on(&mut self, acts: &mut Vec<Act>) {
        // The shared buffer has room again when nothing in it is needed and no lost rank can write
        // to it. Rows that a device hands out are needed, even if their sender has left since.
        let is_used = || {
            self.here().any(|l| !l.inward.chunks.is_empty())
                || self.device.as_ref().is_some_and(Device::hands_out)
                || !self.holds(Until::Quiet)
        };
        if !self.waiting.is_empty() && !is_used() {
            self.next_place = 0;
        }
        self.grant(acts);
        if !self.fenced && self.phase != Phase::Dispatched && self.rows_left() {
            self.fenced = true;
            for link in self.links.iter_mut().flatten() {
                acts.push(link.count(Stage::Fence));
            }
        }
    }

    /// Gives sources a place in the shared buffer, once no answers of ours have to leave it.
    fn grant(&mut self, acts: &mut Vec<Act>) {
        // What failed may still be read (MR-1).
        if self.answers_out + self.unsettled > 0 || self.phase != Phase::Dispatched {
            return;
        }
        let (room, memory, me) = (self.shape.shared_rows(), self.memory, self.rank);
        while let Some(rank) = self.waiting.first().copied() {
            let place = self.next_place;
            let Some(link) = self.link(rank) else { return };
            let rows = (link.inward.rows - link.inward.granted).min(room - place);
            if rows == 0 {
                return;
            }
            let first = link.inward.granted;
            link.inward.chunks.push_back(Chunk { first, rows, place: memory.shared(place) });
            link.inward.granted += rows;
            link.inward.due += 1;
            let (dst, len) = memory.grant(me);
            acts.push(link.expect(Stage::Rows, 1));
            let words = grant_words(link.exchanges, place, rows);
            let piece = Piece { src: memory.grant_out(rank), dst, len, counts: Stage::Grant };
            acts.push(link.tell(words, piece));
            if link.inward.granted == link.inward.rows {
                self.waiting.remove(0);
            }
            self.next_place += rows;
        }
    }

    /// The first chunks of a rank's rows were handed out; others may have been granted meanwhile.
    pub fn handed_out(&mut self, lot: &Lot, acts: &mut Vec<Act>) {
        if let Some(link) = self.link(lot.source).filter(|l| l.wire.life == lot.life) {
            let done = link.inward.chunks.drain(..lot.chunks.len());
            link.inward.collected += done.map(|c| c.rows).sum::<u64>();
        }
        self.go_on(acts);
    }

    /// Gives a rank up: nothing of it is waited for any more, and its access ends.
    pub fn lose(&mut self, rank: u32, stage: Stage, cause: String, acts: &mut Vec<Act>) {
        let take = |all: &mut Vec<Option<Link>>| all.get_mut(rank as usize)?.take();
        let Some(link) = take(&mut self.links).or_else(|| take(&mut self.newcomers)) else {
            return;
        };
        match self.parting {
            true => tracing::debug!(rank, %cause, "a rank has left"),
            false => tracing::warn!(rank, %cause, "a rank was given up"),
        }
        self.answers_out -= link.out.answers.len() as u32;
        self.waiting.retain(|waits| *waits != rank);
        self.revoke(rank, &link.wire.ours, acts);
        self.lost.push(Lost { rank, stage, cause });
        self.go_on(acts);
    }

    /// Takes back what a rank could write.
    pub fn revoke(&mut self, rank: u32, ours: &Ours, acts: &mut Vec<Act>) {
        self.start_pulse(acts);
        for memory in ours.memory() {
            self.revoking.push(rank);
            acts.push(Act::Revoke { rank, memory });
        }
    }
}

/// The number of the exchange among all ranks, of what this rank thinks it is and what another one
/// says. One that comes anew has none, and takes what the first other says: then all must say the
/// same, or rows of one exchange would meet those of another (RS-1).
///
/// # Errors
/// That they differ.
fn agree(ours: u32, theirs: u32, first: bool) -> Result<u32, String> {
    match (ours, theirs) {
        (0, any) => Ok(any),
        (known, 0) if first => Ok(known),
        (known, same) if known == same => Ok(known),
        _ => Err(format!(
            "it is in exchange {theirs} of all ranks, and this one in {ours}; have all ranks admit a new process \
             between the same two exchanges"
        )),
    }
}
