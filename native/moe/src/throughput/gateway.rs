//! A lane on this node, at its gateway: tokens go on to the ranks here that need them; the ranks' answers are summed in
//! the order of the ranks, and one sum for each token goes back.

use std::collections::VecDeque;

use super::{
    commands::Commands,
    context::{bits, by, Arrivals, Context, Io, Stop},
    grid::Family,
    received::Received,
    ring::{Inbound, Outbound},
    slots::{head, read_head, Kind, Preamble, HEAD},
};
use crate::kernels::{add, store};

/// Where the tokens come from.
#[derive(Debug)]
enum Input {
    /// This rank is the source: its own tokens that go to ranks of its node, and its preamble.
    Own {
        tokens: Vec<u32>,
        preamble: Preamble,
    },
    Ring(Inbound),
}

/// Where the node's sums go.
#[derive(Debug)]
enum Output {
    /// This rank is the source.
    Own,
    Ring {
        ring: Outbound,
        outbox: u64,
    },
}

/// Slots that were forwarded, and when they may be given back.
#[derive(Debug)]
struct Forwarded {
    up_to: u64,
    /// What each rank's ring must be cleared up to.
    cleared: Vec<u64>,
    /// They are the last of an exchange, which may not be the one that is under way when they are given back.
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
    /// What this rank itself has of the lane, and how many of those are summed.
    received: Received,
    received_summed: usize,
    /// By place on the node, answers of the ranks there.
    answers: Vec<Option<Inbound>>,
    output: Output,
    /// Tokens of which the answers are summed.
    summed: usize,
}

impl Gateway {
    pub fn new(ctx: &Context, channel: u32, node: u32) -> Self {
        let grid = ctx.grid;
        let source = grid.at(node, grid.local());
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
                (
                    Input::Ring(Inbound::new(from)),
                    Output::Ring { ring: Outbound::new(back), outbox },
                )
            }
        };
        Self {
            channel,
            node,
            input,
            rows: None,
            records: Vec::new(),
            targets: others(Family::NodeOut)
                .map(|o| o.map(|(f, p)| Outbound::new(ctx.outbound(channel, f, node, p))))
                .collect(),
            forwarded: VecDeque::new(),
            received: Received::default(),
            received_summed: 0,
            answers: others(Family::NodeBack)
                .map(|o| o.map(|(f, p)| Inbound::new(ctx.inbound(channel, f, node, p))))
                .collect(),
            output,
            summed: 0,
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
        self.summed = 0;
    }

    pub fn source(&self, ctx: &Context) -> u32 {
        ctx.grid.at(self.node, ctx.grid.local())
    }

    pub fn is_done(&self) -> bool {
        self.rows.as_ref().is_some_and(|p| self.records.len() == p.rows as usize)
    }

    pub fn is_summed(&self) -> bool {
        self.summed == self.records.len()
    }

    pub fn begun(&self) -> bool {
        !self.received.tokens.is_empty()
    }

    /// Whom tokens of the lane are awaited from, or room for them.
    pub fn suspects_of_tokens(&self, ctx: &Context) -> Vec<u32> {
        let Input::Ring(ring) = &self.input else { return self.full().collect() };
        match ring.ready(&ctx.words) {
            Ok(0) if self.forwarded.is_empty() => vec![ring.place.partner],
            Ok(0) => {
                let uncleared = self.targets.iter().flatten().filter(|t| !t.is_cleared(t.sent));
                uncleared.map(|t| t.place.partner).chain([ring.place.partner]).collect()
            }
            _ => self.full().collect(),
        }
    }

    /// Ranks of this node whose rings are full.
    fn full(&self) -> impl Iterator<Item = u32> + '_ {
        self.targets.iter().flatten().filter(|ring| ring.room() == 0).map(|ring| ring.place.partner)
    }

    /// Whom answers are awaited from, or room for their sums.
    pub fn suspects_of_answers(&self, ctx: &Context) -> Vec<u32> {
        let Some((_, mask)) = self.records.get(self.summed) else { return Vec::new() };
        let missing = |local: &u32| {
            let ring = self.answers[*local as usize].as_ref();
            ring.is_some_and(|r| r.ready(&ctx.words).is_ok_and(|n| n == 0))
        };
        let missing = bits(*mask).filter(missing);
        let mut all: Vec<u32> = missing.map(|local| ctx.grid.at(ctx.grid.node(), local)).collect();
        if let Output::Ring { ring, .. } = &self.output {
            all.extend((ring.room() == 0).then_some(ring.place.partner));
        }
        all
    }

    /// Slots that were ever sent to each rank of this node.
    pub fn forwarded_slots(&self) -> impl Iterator<Item = u64> + '_ {
        self.targets.iter().flatten().map(|ring| ring.sent)
    }

    pub fn sent_sums(&self) -> u64 {
        match &self.output {
            Output::Own => 0,
            Output::Ring { ring, .. } => ring.sent,
        }
    }

    /// This rank's own tokens that go to ranks of its node, and of how many of them the sums are made.
    pub fn own_sums(&self) -> (&[u32], usize) {
        match &self.input {
            Input::Own { tokens, .. } => (tokens, self.summed),
            Input::Ring(_) => (&[], 0),
        }
    }

    /// Forwards what has come, as far as those that it is for have room.
    pub fn step(
        &mut self,
        ctx: &Context,
        commands: &mut Commands,
        arrivals: &mut Arrivals,
        io: &mut Io<'_, '_>,
    ) -> Result<bool, Stop> {
        let mut moved = false;
        for ring in self.targets.iter_mut().flatten() {
            moved |= ring.update(&ctx.words, commands).map_err(by(ring.place.partner))?;
        }
        if self.rows.is_none() && self.ready(ctx)? > 0 {
            moved |= self.forward_preamble(ctx, commands, arrivals)?;
        }
        while self.rows.is_some() && self.forward(ctx, commands, arrivals, io)? {
            moved = true;
        }
        Ok(moved | self.give_back(ctx, commands))
    }

    /// Slots that can be read.
    fn ready(&self, ctx: &Context) -> Result<u64, Stop> {
        match &self.input {
            Input::Own { tokens, .. } => Ok(1 + (tokens.len() - self.records.len()) as u64),
            Input::Ring(ring) => ring.ready(&ctx.words).map_err(by(ring.place.partner)),
        }
    }

    fn forward_preamble(
        &mut self,
        ctx: &Context,
        commands: &mut Commands,
        arrivals: &mut Arrivals,
    ) -> Result<bool, Stop> {
        if self.targets.iter().flatten().any(|ring| ring.room() == 0) {
            return Ok(false);
        }
        let (place, preamble) = match &self.input {
            Input::Own { preamble, .. } => {
                (ctx.layout.preamble(self.channel, self.node), preamble.clone())
            }
            Input::Ring(ring) => {
                let read = |bytes: &[u8]| Preamble::read(&ctx.spec, ctx.exchange, bytes);
                let preamble = ctx.read(ring.next(0), ctx.spec.out_stride(), read)?;
                (ring.next(0), preamble.map_err(by(ring.place.partner))?)
            }
        };
        for ring in self.targets.iter_mut().flatten() {
            ring.send(&[place], commands);
        }
        let experts = ctx.spec.shape.local_experts() as usize;
        let local = ctx.grid.local() as usize;
        let counts = &preamble.counts[local * experts..(local + 1) * experts];
        arrivals.announce(self.channel, self.source(ctx), counts);
        self.rows = Some(preamble);
        self.taken(1);
        Ok(true)
    }

    /// Slots were read and sent on to all ranks that they are for.
    fn taken(&mut self, slots: u64) {
        let last = self.is_done();
        let Input::Ring(ring) = &mut self.input else { return };
        ring.taken += slots;
        let cleared = self.targets.iter().map(|t| t.as_ref().map_or(0, |t| t.sent)).collect();
        self.forwarded.push_back(Forwarded { up_to: ring.taken, cleared, last });
    }

    /// Forwards up to a chunk of tokens; whether there was one.
    fn forward(
        &mut self,
        ctx: &Context,
        commands: &mut Commands,
        arrivals: &mut Arrivals,
        io: &mut Io<'_, '_>,
    ) -> Result<bool, Stop> {
        let rows = self.rows.as_ref().map_or(0, |p| p.rows as usize);
        let ready = match &self.input {
            Input::Own { tokens, .. } => tokens.len() - self.records.len(),
            Input::Ring(_) => self.ready(ctx)? as usize,
        };
        let n = ready.min(rows - self.records.len()).min(ctx.spec.chunk as usize);
        let mut onward: Vec<Vec<u64>> = vec![Vec::new(); self.targets.len()];
        let (source, own) = (self.source(ctx), ctx.grid.local());
        let mut taken = 0;
        while taken < n {
            let place = match &self.input {
                Input::Own { tokens, .. } => ctx.layout.own(tokens[self.records.len()]),
                Input::Ring(ring) => ring.next(taken as u64),
            };
            let lane = (self.channel, source);
            let (targets, records) = (&self.targets, &mut self.records);
            let received = &mut self.received;
            let took = ctx.read(place, ctx.spec.out_stride(), |slot| {
                let token = read_head(slot, Kind::Token, ctx.exchange)?;
                let mask = ctx.targets(slot);
                if mask == 0 || records.last().is_some_and(|(last, _)| *last >= token) {
                    return Err(format!("it sent token {token} out of order, or to no rank here"));
                }
                let has_room = |local: u32| match &targets[local as usize] {
                    Some(ring) => ring.room() > onward[local as usize].len() as u64,
                    None => matches!(io, Io::Rows(_)),
                };
                if !bits(mask).all(has_room) {
                    return Ok(false);
                }
                if let Io::Rows(out) = io {
                    if mask >> own & 1 == 1 {
                        received.take(ctx, arrivals, lane, slot, out)?;
                    }
                }
                for local in bits(mask).filter(|local| *local != own) {
                    onward[local as usize].push(place);
                }
                records.push((token, mask));
                Ok(true)
            })?;
            if !took.map_err(by(source))? {
                break;
            }
            taken += 1;
        }
        for (ring, from) in self.targets.iter_mut().zip(onward) {
            if let Some(ring) = ring.as_mut().filter(|_| !from.is_empty()) {
                ring.send(&from, commands);
            }
        }
        if taken > 0 {
            self.taken(taken as u64);
            self.check_counts(ctx, arrivals)?;
        }
        Ok(taken > 0)
    }

    /// When a lane has ended: each rank here got as many tokens as the preamble said, and this one as many rows (RS-1).
    fn check_counts(&self, ctx: &Context, arrivals: &Arrivals) -> Result<(), Stop> {
        let Some(preamble) = self.rows.as_ref().filter(|_| self.is_done()) else { return Ok(()) };
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

    /// Gives slots back that nothing reads any more.
    fn give_back(&mut self, ctx: &Context, commands: &mut Commands) -> bool {
        let Input::Ring(input) = &mut self.input else { return false };
        let mut moved = false;
        while let Some(front) = self.forwarded.front() {
            let mut rings = self.targets.iter().zip(&front.cleared);
            if !rings.all(|(r, up_to)| r.as_ref().is_none_or(|r| r.is_cleared(*up_to))) {
                break;
            }
            input.credit(front.up_to, ctx.spec.chunk, front.last, commands);
            self.forwarded.pop_front();
            moved = true;
        }
        moved
    }

    /// Sums answers as far as they have come, and sends the sums; those of this rank's own tokens go to `own`, by token.
    pub fn sum(
        &mut self,
        ctx: &Context,
        commands: &mut Commands,
        io: &Io<'_, '_>,
        own: &mut [u8],
        sums: &mut [Vec<f32>; 2],
    ) -> Result<bool, Stop> {
        let mut moved = false;
        if let Output::Ring { ring, .. } = &mut self.output {
            moved = ring.update(&ctx.words, commands).map_err(by(ring.place.partner))?;
        }
        while !self.is_summed() {
            let n = self.summable(ctx, io)?;
            if n == 0 {
                break;
            }
            self.sum_some(ctx, commands, io, own, sums, n)?;
            moved = true;
        }
        Ok(moved)
    }

    /// How many tokens all have answered and there is room for, up to a chunk (RS-1).
    fn summable(&self, ctx: &Context, io: &Io<'_, '_>) -> Result<usize, Stop> {
        let most = match &self.output {
            Output::Own => ctx.spec.chunk as usize,
            Output::Ring { ring, .. } => (ring.room() as usize).min(ctx.spec.chunk as usize),
        };
        let mut left = Vec::with_capacity(self.answers.len());
        for ring in &self.answers {
            left.push(match ring {
                Some(ring) => ring.ready(&ctx.words).map_err(by(ring.place.partner))?,
                None if matches!(io, Io::Answers(_)) => u64::MAX,
                None => 0,
            });
        }
        let mut n = 0;
        for (_, mask) in self.records[self.summed..].iter().take(most) {
            if bits(*mask).any(|local| left[local as usize] == 0) {
                break;
            }
            bits(*mask).for_each(|local| left[local as usize] -= 1);
            n += 1;
        }
        Ok(n)
    }

    fn sum_some(
        &mut self,
        ctx: &Context,
        commands: &mut Commands,
        io: &Io<'_, '_>,
        own: &mut [u8],
        [total, one]: &mut [Vec<f32>; 2],
        n: usize,
    ) -> Result<(), Stop> {
        let (float, nbytes) = (ctx.spec.shape.back.float, ctx.spec.shape.back_nbytes() as usize);
        let mut bytes = vec![0; nbytes];
        let mut from = Vec::with_capacity(n);
        for i in self.summed..self.summed + n {
            let (token, mask) = self.records[i];
            total.fill(0.0);
            for local in bits(mask) {
                match (&mut self.answers[local as usize], io) {
                    (Some(ring), _) => {
                        let place = ring.next(0);
                        let added = ctx.read(place, ctx.spec.back_stride(), |slot| {
                            let said = read_head(slot, Kind::Answer, ctx.exchange)?;
                            if said != token {
                                return Err(format!("it answered to token {said}, not {token}"));
                            }
                            add(total, &slot[HEAD as usize..][..nbytes], float, 1.0, false);
                            Ok(())
                        })?;
                        added.map_err(by(ring.place.partner))?;
                        ring.taken += 1;
                        ring.credit(ring.taken, ctx.spec.chunk, false, commands);
                    }
                    (None, Io::Answers(answers)) => {
                        self.received.answer(ctx, self.received_summed, answers, one, &mut bytes);
                        self.received_summed += 1;
                        add(total, &bytes, float, 1.0, false);
                    }
                    (None, _) => unreachable!("nothing is summable without this rank's answers"),
                }
            }
            match &self.output {
                Output::Own => store(total, &mut own[token as usize * nbytes..][..nbytes], float),
                Output::Ring { ring, outbox } => {
                    store(total, &mut bytes, float);
                    let slot = (ring.sent + from.len() as u64) % ring.place.slots;
                    let at = outbox + slot * ring.place.stride;
                    ctx.region.put(at, &head(Kind::Sum, ctx.exchange, token))?;
                    ctx.region.put(at + HEAD, &bytes)?;
                    from.push(at);
                }
            }
        }
        self.summed += n;
        if let Output::Ring { ring, .. } = &mut self.output {
            ring.send(&from, commands);
        }
        if self.is_summed() {
            for ring in self.answers.iter_mut().flatten() {
                ring.credit(ring.taken, ctx.spec.chunk, true, commands);
            }
        }
        Ok(())
    }
}
