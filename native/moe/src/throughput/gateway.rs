//! A lane of this node at its gateway: forwards tokens to the ranks of the node that need them,
//! sums the ranks' answers in rank order, and sends back one sum per token.

mod sums;

use std::collections::VecDeque;

use super::{
    commands::Commands,
    context::{bits, by, Arrivals, Context, StopCause},
    grid::Family,
    jobs::{Call, Job, PendingJobs},
    reader::Reader,
    received::Received,
    ring::Outbound,
    ring_pool::RingPool,
    slots::{read_head, Kind, Preamble},
};

/// Source of the tokens.
#[derive(Debug)]
enum Input {
    /// This rank is the source: its own tokens that go to ranks of its node, and its preamble.
    Own {
        tokens: Vec<u32>,
        preamble: Preamble,
    },
    Ring(Reader),
}

/// Destination of the node's sums.
#[derive(Debug)]
enum Output {
    /// This rank is the source.
    Own,
    Ring {
        ring: Outbound,
        outbox: u64,
    },
}

/// Tokens that are being summed.
#[derive(Debug)]
struct Summing {
    tokens: usize,
    /// Offsets of the sums until they are sent.
    from: Vec<u64>,
    /// By place on the node, what was read of its ring.
    read: Vec<u64>,
}

/// Slots that were forwarded, and when they may be given back.
#[derive(Debug)]
struct Forwarded {
    up_to: u64,
    /// Slots of each rank's ring to give back, as an end index.
    cleared: Vec<u64>,
    /// Number of jobs for this rank's rows that must have ended.
    takes: u64,
    /// Whether they are the last of their exchange. The next exchange may have begun when they are
    /// given back.
    last: bool,
}

#[derive(Debug)]
pub struct Gateway {
    channel: u32,
    pub node: u32,
    input: Input,
    rows: Option<Preamble>,
    /// Of each token that was forwarded: its number, and the ranks of this node that it went to.
    records: Vec<(u32, u64)>,
    /// By place on the node; `None` for this rank.
    targets: Vec<Option<Outbound>>,
    forwarded: VecDeque<Forwarded>,
    /// Jobs that copy to this rank's rows. `takes`: jobs begun; `taken`: jobs ended.
    taking: PendingJobs<()>,
    takes: u64,
    taken: u64,
    /// Tokens of the lane for this rank. `received_summed`: how many of them are summed.
    received: Received,
    received_summed: usize,
    /// By place on the node, answers of the ranks there.
    answers: Vec<Option<Reader>>,
    output: Output,
    /// Tokens of which the answers are being summed, or are.
    summed: usize,
    summing: PendingJobs<Summing>,
    /// Tokens of which they are.
    made: usize,
}

impl Gateway {
    pub fn new(ctx: &Context, pool: &mut RingPool, channel: u32, node: u32) -> Self {
        let grid = ctx.grid;
        let (source, is_first) = (grid.at(node, grid.local()), ctx.is_first_era());
        let others = |family: Family| {
            (0..grid.per_node).map(move |local| {
                let partner = grid.at(grid.node(), local);
                (local != grid.local()).then_some((family, partner))
            })
        };
        let (input, output) = match node == grid.node() {
            true => (Input::Own { tokens: Vec::new(), preamble: Preamble::default() }, Output::Own),
            false => {
                let from = ctx.inbound(channel, Family::RailOut, node, source);
                let back = ctx.outbound(channel, Family::RailBack, node, source);
                let outbox = ctx.outbox(channel, Family::RailBack, node, source);
                let from = pool.inbound(from, is_first);
                (Input::Ring(from), Output::Ring { ring: pool.outbound(back), outbox })
            }
        };
        Self {
            channel,
            node,
            input,
            rows: None,
            records: Vec::new(),
            targets: others(Family::NodeOut)
                .map(|o| o.map(|(f, p)| pool.outbound(ctx.outbound(channel, f, node, p))))
                .collect(),
            forwarded: VecDeque::new(),
            taking: PendingJobs::default(),
            takes: 0,
            taken: 0,
            received: Received::default(),
            received_summed: 0,
            answers: others(Family::NodeBack)
                .map(|o| o.map(|(f, p)| pool.inbound(ctx.inbound(channel, f, node, p), is_first)))
                .collect(),
            output,
            summed: 0,
            summing: PendingJobs::default(),
            made: 0,
        }
    }

    pub fn return_rings(self, pool: &mut RingPool) {
        self.targets.into_iter().flatten().for_each(|ring| pool.put(ring));
        self.answers.into_iter().flatten().for_each(|ring| pool.put_back(ring));
        if let Input::Ring(reader) = self.input {
            pool.put_back(reader);
        }
        if let Output::Ring { ring, .. } = self.output {
            pool.put(ring);
        }
    }

    /// `own`: this rank's tokens for its node and their preamble.
    pub fn begin(&mut self, own: Option<(Vec<u32>, Preamble)>) {
        if let (Input::Own { tokens, preamble }, Some(own)) = (&mut self.input, own) {
            (*tokens, *preamble) = own;
        }
        self.rows = None;
        self.records.clear();
        self.received.clear();
        self.received_summed = 0;
        (self.summed, self.made) = (0, 0);
    }

    pub fn source(&self, ctx: &Context) -> u32 {
        ctx.grid.at(self.node, ctx.grid.local())
    }

    /// Whether this rank is the source.
    pub fn is_own(&self) -> bool {
        matches!(self.input, Input::Own { .. })
    }

    /// All tokens have been read.
    fn is_read(&self) -> bool {
        self.rows.as_ref().is_some_and(|p| self.records.len() == p.rows as usize)
    }

    pub fn is_done(&self) -> bool {
        self.is_read() && self.taking.is_empty()
    }

    pub fn is_summed(&self) -> bool {
        self.made == self.records.len()
    }

    pub fn begun(&self) -> bool {
        !self.received.tokens.is_empty()
    }

    /// The ranks from which tokens of the lane, or room for them, are awaited.
    pub fn suspects_of_tokens(&self, ctx: &Context) -> Vec<u32> {
        if self.is_read() {
            return Vec::new();
        }
        let Input::Ring(reader) = &self.input else { return self.full().collect() };
        if !reader.awaits_slot(ctx) {
            return self.full().collect();
        }
        let partner = reader.ring.layout.partner;
        if self.forwarded.is_empty() {
            return vec![partner];
        }
        let uncleared = self.targets.iter().flatten().filter(|t| !t.is_cleared(t.sent));
        uncleared.map(|t| t.layout.partner).chain([partner]).collect()
    }

    /// Ranks of this node whose rings are full.
    fn full(&self) -> impl Iterator<Item = u32> + '_ {
        self.targets
            .iter()
            .flatten()
            .filter(|ring| ring.room() == 0)
            .map(|ring| ring.layout.partner)
    }

    /// The ranks from which answers, or room for their sums, are awaited.
    pub fn suspects_of_answers(&self, ctx: &Context) -> Vec<u32> {
        let Some((_, mask)) = self.records.get(self.summed) else { return Vec::new() };
        let missing = |local: &u32| {
            let ring = self.answers[*local as usize].as_ref();
            ring.is_some_and(|r| r.ready(ctx).is_ok_and(|n| n == 0))
        };
        let missing = bits(*mask).filter(missing);
        let mut all: Vec<u32> = missing.map(|local| ctx.grid.at(ctx.grid.node(), local)).collect();
        if let Output::Ring { ring, .. } = &self.output {
            all.extend((ring.room() == 0).then_some(ring.layout.partner));
        }
        all
    }

    /// The rings that it sends over.
    pub fn outbound(&self) -> impl Iterator<Item = &Outbound> {
        let back = match &self.output {
            Output::Own => None,
            Output::Ring { ring, .. } => Some(ring),
        };
        self.targets.iter().flatten().chain(back)
    }

    /// This rank's own tokens that go to ranks of its node, and of how many of them the sums are
    /// made.
    pub fn own_sums(&self) -> (&[u32], usize) {
        match &self.input {
            Input::Own { tokens, .. } => (tokens, self.made),
            Input::Ring(_) => (&[], 0),
        }
    }

    /// Forwards what has come, as far as those that it is for have room.
    pub fn step(
        &mut self,
        ctx: &Context,
        commands: &mut Commands,
        arrivals: &mut Arrivals,
        call: &mut Call<'_, '_, '_>,
    ) -> Result<bool, StopCause> {
        let mut moved = false;
        for ring in self.targets.iter_mut().flatten() {
            moved |= ring.update(&ctx.words, commands).map_err(by(ring.layout.partner))?;
        }
        if let Input::Ring(reader) = &mut self.input {
            moved |= reader.skip_earlier(ctx, commands, call)?;
        }
        if self.rows.is_none() {
            moved |= self.forward_preamble(ctx, commands, arrivals, call)?;
        }
        while self.rows.is_some() && self.forward(ctx, commands, arrivals, call)? {
            moved = true;
        }
        while self.taking.done(call, ctx.exchange)?.is_some() {
            self.taken += 1;
            moved = true;
        }
        Ok(moved | self.give_back(ctx, commands))
    }

    fn forward_preamble(
        &mut self,
        ctx: &Context,
        commands: &mut Commands,
        arrivals: &mut Arrivals,
        call: &mut Call<'_, '_, '_>,
    ) -> Result<bool, StopCause> {
        if self.targets.iter().flatten().any(|ring| ring.room() == 0) {
            return Ok(false);
        }
        let (place, preamble) = match &mut self.input {
            Input::Own { preamble, .. } => {
                (ctx.layout.preamble(self.channel, self.node), preamble.clone())
            }
            Input::Ring(reader) => {
                let nbytes = ctx.spec.preamble();
                if reader.look(ctx, call, nbytes, 1)? == 0 {
                    return Ok(false);
                }
                let (place, bytes) = reader.slot(0, nbytes);
                let preamble = Preamble::read(&ctx.spec, ctx.exchange, bytes);
                let found = (place, preamble.map_err(by(reader.ring.layout.partner))?);
                reader.advance(1, nbytes);
                found
            }
        };
        for ring in self.targets.iter_mut().flatten() {
            ring.send(&[place], commands);
            ring.preambles += 1;
        }
        let experts = ctx.spec.shape.local_experts() as usize;
        let local = ctx.grid.local() as usize;
        let counts = &preamble.counts[local * experts..(local + 1) * experts];
        arrivals.announce(self.channel, self.source(ctx), counts);
        self.rows = Some(preamble);
        self.went_on();
        Ok(true)
    }

    /// Everything that was read has been sent on to all its ranks.
    fn went_on(&mut self) {
        let last = self.is_read();
        let Input::Ring(Reader { ring, .. }) = &self.input else { return };
        let cleared = self.targets.iter().map(|t| t.as_ref().map_or(0, |t| t.sent)).collect();
        let takes = self.takes;
        self.forwarded.push_back(Forwarded { up_to: ring.taken, cleared, takes, last });
    }

    /// Forwards up to a chunk of tokens; whether there was one.
    fn forward(
        &mut self,
        ctx: &Context,
        commands: &mut Commands,
        arrivals: &mut Arrivals,
        call: &mut Call<'_, '_, '_>,
    ) -> Result<bool, StopCause> {
        let rows = self.rows.as_ref().map_or(0, |p| p.rows as usize);
        let (left, meta) = (rows - self.records.len(), ctx.spec.meta());
        let ready = match &mut self.input {
            Input::Own { .. } => left,
            Input::Ring(reader) => reader.look(ctx, call, meta, left as u64)? as usize,
        };
        let n = ready.min(left).min(ctx.spec.chunk as usize);
        let mut onward: Vec<Vec<u64>> = vec![Vec::new(); self.targets.len()];
        let (source, own) = (self.source(ctx), ctx.grid.local());
        let takes_rows = call.io.takes_rows() && call.may_begin();
        let (mut taken, mut tokens, mut rows) = (0, Vec::new(), Vec::new());
        while taken < n {
            let (place, bytes) = match &self.input {
                Input::Own { tokens, .. } => ctx.own(tokens[self.records.len()]),
                Input::Ring(reader) => reader.slot(taken as u64, meta),
            };
            let token = read_head(bytes, Kind::Token, ctx.exchange).map_err(by(source))?;
            let mask = ctx.targets(bytes);
            if mask == 0 || self.records.last().is_some_and(|(last, _)| *last >= token) {
                let cause = format!("it sent token {token} out of order, or to no rank here");
                return Err(by(source)(cause));
            }
            let has_room = |local: u32| match &self.targets[local as usize] {
                Some(ring) => ring.room() > onward[local as usize].len() as u64,
                None => takes_rows,
            };
            if !bits(mask).all(has_room) {
                break;
            }
            if mask >> own & 1 == 1 {
                let lane = (self.channel, source);
                let n = self.received.take(ctx, arrivals, lane, bytes, &mut rows);
                tokens.push((place, n.map_err(by(source))?));
            }
            for local in bits(mask).filter(|local| *local != own) {
                onward[local as usize].push(place);
            }
            self.records.push((token, mask));
            taken += 1;
        }
        if let Input::Ring(reader) = &mut self.input {
            reader.advance(taken as u64, meta);
        }
        for (ring, from) in self.targets.iter_mut().zip(onward) {
            if let Some(ring) = ring.as_mut().filter(|_| !from.is_empty()) {
                ring.send(&from, commands);
            }
        }
        if !tokens.is_empty() {
            self.takes += 1;
            self.taking.begin(call, ctx.exchange, Job::Take { tokens, rows }, ());
        }
        if taken > 0 {
            self.went_on();
            self.check_counts(ctx, arrivals)?;
        }
        Ok(taken > 0)
    }

    /// Checks the counts of an ended lane: each rank of the node got the announced tokens, and this
    /// rank the announced rows (RS-1).
    fn check_counts(&self, ctx: &Context, arrivals: &Arrivals) -> Result<(), StopCause> {
        let Some(preamble) = self.rows.as_ref().filter(|_| self.is_read()) else { return Ok(()) };
        for (local, want) in preamble.rows_to.iter().enumerate() {
            let got = self.records.iter().filter(|(_, mask)| mask >> local & 1 == 1).count();
            if got != *want as usize {
                let cause = format!(
                    "it announced {want} tokens for rank {local} of a node, and sent {got}"
                );
                return Err(by(self.source(ctx))(cause));
            }
        }
        let source = self.source(ctx);
        arrivals.check_complete(self.channel, source).map_err(by(source))
    }

    /// Returns slots that nothing reads any more (MR-1).
    fn give_back(&mut self, ctx: &Context, commands: &mut Commands) -> bool {
        let Input::Ring(Reader { ring, .. }) = &mut self.input else { return false };
        let mut moved = false;
        while let Some(front) = self.forwarded.front().filter(|f| f.takes <= self.taken) {
            let mut rings = self.targets.iter().zip(&front.cleared);
            if !rings.all(|(r, up_to)| r.as_ref().is_none_or(|r| r.is_cleared(*up_to))) {
                break;
            }
            ring.credit(front.up_to, ctx.spec.chunk, front.last, commands);
            self.forwarded.pop_front();
            moved = true;
        }
        moved
    }
}
