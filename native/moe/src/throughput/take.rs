//! The tokens of a lane that a gateway of this node forwards here, and the answers that go back to it.

use super::{
    commands::Commands,
    context::{by, Arrivals, Context, Io, Stop},
    grid::Family,
    received::Received,
    ring::{Inbound, Outbound},
    slots::{head, Kind, Preamble},
};
use crate::kernels::PartMut;

#[derive(Debug)]
pub struct Take {
    channel: u32,
    pub source: u32,
    pub ring: Inbound,
    /// How many come, once known.
    rows: Option<u32>,
    received: Received,
    answers: Outbound,
    outbox: u64,
    answered: usize,
}

impl Take {
    pub fn new(ctx: &Context, channel: u32, source: u32) -> Self {
        let node = ctx.grid.node_of(source);
        let gateway = ctx.grid.at(ctx.grid.node(), ctx.grid.local_of(source));
        let back = ctx.outbound(channel, Family::NodeBack, node, gateway);
        Self {
            channel,
            source,
            ring: Inbound::new(ctx.inbound(channel, Family::NodeOut, node, gateway)),
            rows: None,
            received: Received::default(),
            answers: Outbound::new(back),
            outbox: ctx.outbox(channel, Family::NodeBack, node, gateway),
            answered: 0,
        }
    }

    pub fn begin(&mut self) {
        self.rows = None;
        self.received.clear();
        self.answered = 0;
    }

    pub fn gateway(&self) -> u32 {
        self.ring.place.partner
    }

    pub fn is_done(&self) -> bool {
        self.rows.is_some_and(|rows| self.received.tokens.len() == rows as usize)
    }

    pub fn is_answered(&self) -> bool {
        self.answered == self.received.tokens.len()
    }

    pub fn begun(&self) -> bool {
        !self.received.tokens.is_empty()
    }

    pub fn sent_answers(&self) -> u64 {
        self.answers.sent
    }

    /// Reads the preamble, and the tokens if there is room for their rows.
    pub fn step(
        &mut self,
        ctx: &Context,
        commands: &mut Commands,
        arrivals: &mut Arrivals,
        io: &mut Io<'_, '_>,
    ) -> Result<bool, Stop> {
        let before = self.ring.taken;
        if self.rows.is_none() && self.ready(ctx)? > 0 {
            self.read_preamble(ctx, arrivals)?;
        }
        if let (Some(rows), Io::Rows(out)) = (self.rows, io) {
            let left = u64::from(rows) - self.received.tokens.len() as u64;
            for _ in 0..self.ready(ctx)?.min(left) {
                self.read_token(ctx, arrivals, out)?;
                self.ring.credit(self.ring.taken, ctx.spec.chunk, false, commands);
            }
        }
        // All of it: a gateway gives back what it forwarded when everybody has read it, and would wait for those who
        // have less than a chunk (IC-4).
        self.ring.credit(self.ring.taken, ctx.spec.chunk, true, commands);
        Ok(self.ring.taken != before)
    }

    fn ready(&self, ctx: &Context) -> Result<u64, Stop> {
        self.ring.ready(&ctx.words).map_err(by(self.gateway()))
    }

    fn read_preamble(&mut self, ctx: &Context, arrivals: &mut Arrivals) -> Result<(), Stop> {
        let read = |bytes: &[u8]| Preamble::read(&ctx.spec, ctx.exchange, bytes);
        let preamble = ctx.read(self.ring.next(0), ctx.spec.out_stride(), read)?;
        let preamble = preamble.map_err(by(self.gateway()))?;
        let local = ctx.grid.local() as usize;
        let experts = ctx.spec.shape.local_experts() as usize;
        self.rows = Some(preamble.rows_to[local]);
        let counts = &preamble.counts[local * experts..(local + 1) * experts];
        arrivals.announce(self.channel, self.source, counts);
        self.ring.taken += 1;
        Ok(())
    }

    fn read_token(
        &mut self,
        ctx: &Context,
        arrivals: &mut Arrivals,
        out: &mut [PartMut<'_>],
    ) -> Result<(), Stop> {
        let (lane, place) = ((self.channel, self.source), self.ring.next(0));
        let taken = ctx.read(place, ctx.spec.out_stride(), |slot| {
            self.received.take(ctx, arrivals, lane, slot, out)
        })?;
        taken.map_err(by(self.gateway()))?;
        self.ring.taken += 1;
        match self.is_done() {
            true => arrivals.check_complete(self.channel, self.source).map_err(by(self.source)),
            false => Ok(()),
        }
    }

    /// Sends answers to the gateway, as far as there is room.
    pub fn answer(
        &mut self,
        ctx: &Context,
        commands: &mut Commands,
        io: &Io<'_, '_>,
        sum: &mut [f32],
    ) -> Result<bool, Stop> {
        let mut moved =
            self.answers.update(&ctx.words, commands).map_err(by(self.answers.place.partner))?;
        let Io::Answers(answers) = io else { return Ok(moved) };
        while !self.is_answered() {
            let left = self.received.tokens.len() - self.answered;
            let n = left.min(ctx.spec.chunk as usize);
            if (self.answers.room() as usize) < n {
                break;
            }
            let mut from = Vec::with_capacity(n);
            let mut bytes = vec![0; ctx.spec.shape.back_nbytes() as usize];
            for i in self.answered..self.answered + n {
                let place = self.answers.place;
                let slot = (self.answers.sent + from.len() as u64) % place.slots;
                let at = self.outbox + slot * place.stride;
                self.received.answer(ctx, i, answers, sum, &mut bytes);
                ctx.region.put(at, &head(Kind::Answer, ctx.exchange, self.received.tokens[i]))?;
                ctx.region.put(at + super::slots::HEAD, &bytes)?;
                from.push(at);
            }
            self.answers.send(&from, commands);
            self.answered += n;
            moved = true;
        }
        Ok(moved)
    }
}
