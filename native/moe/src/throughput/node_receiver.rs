//! Receives the tokens of a lane that a gateway of this node forwards here, and returns the
//! answers.

use super::{
    commands::Commands,
    context::{by, Arrivals, Context, StopCause},
    grid::Family,
    jobs::{Call, Job, PendingJobs, Sum, SumTarget},
    reader::Reader,
    received::Received,
    ring::Outbound,
    ring_pool::RingPool,
    slots::Preamble,
};

/// The receiving end of one lane.
#[derive(Debug)]
pub struct NodeReceiver {
    channel: u32,
    pub source: u32,
    reader: Reader,
    /// The number of tokens, once known.
    rows: Option<u32>,
    received: Received,
    /// Jobs that copy tokens to rows, by the slot behind each.
    taking: PendingJobs<u64>,
    /// Slots before this one are free.
    taken: u64,
    answers: Outbound,
    outbox: u64,
    /// Tokens whose answers are computed or being computed.
    answered: usize,
    /// Jobs that compute answers, and where the answers lie until they are sent.
    answering: PendingJobs<Vec<u64>>,
}

impl NodeReceiver {
    pub fn new(ctx: &Context, pool: &mut RingPool, channel: u32, source: u32) -> Self {
        let node = ctx.grid.node_of(source);
        let gateway = ctx.grid.at(ctx.grid.node(), ctx.grid.local_of(source));
        let back = ctx.outbound(channel, Family::NodeBack, node, gateway);
        let reader = ctx.inbound(channel, Family::NodeOut, node, gateway);
        let reader = pool.inbound(reader, ctx.is_first_era());
        Self {
            channel,
            source,
            taken: reader.ring.taken,
            reader,
            rows: None,
            received: Received::default(),
            taking: PendingJobs::default(),
            answers: pool.outbound(back),
            outbox: ctx.outbox(channel, Family::NodeBack, node, gateway),
            answered: 0,
            answering: PendingJobs::default(),
        }
    }

    pub fn return_rings(self, pool: &mut RingPool) {
        pool.put_back(self.reader);
        pool.put(self.answers);
    }

    pub fn begin(&mut self) {
        self.rows = None;
        self.received.clear();
        self.answered = 0;
    }

    pub fn gateway(&self) -> u32 {
        self.reader.ring.layout.partner
    }

    /// Whether all tokens were read.
    fn is_read(&self) -> bool {
        self.rows.is_some_and(|rows| self.received.tokens.len() == rows as usize)
    }

    pub fn is_done(&self) -> bool {
        self.is_read() && self.taking.is_empty()
    }

    pub fn is_answered(&self) -> bool {
        self.answered == self.received.tokens.len() && self.answering.is_empty()
    }

    pub fn begun(&self) -> bool {
        !self.received.tokens.is_empty()
    }

    /// The gateway, if tokens are awaited from it.
    pub fn suspect_of_tokens(&self, ctx: &Context) -> Option<u32> {
        (!self.is_read() && self.reader.awaits_slot(ctx)).then(|| self.gateway())
    }

    /// The gateway, if room for answers is awaited from it.
    pub fn suspect_of_answers(&self, ctx: &Context) -> Option<u32> {
        let n = self.next_answers(ctx);
        (n > 0 && !self.has_room(n)).then(|| self.gateway())
    }

    /// The ring of answers.
    pub fn outbound(&self) -> &Outbound {
        &self.answers
    }

    /// Reads the preamble, and the tokens if there is room for their rows.
    pub fn step(
        &mut self,
        ctx: &Context,
        commands: &mut Commands,
        arrivals: &mut Arrivals,
        call: &mut Call<'_, '_, '_>,
    ) -> Result<bool, StopCause> {
        let before = (self.reader.ring.taken, self.taken);
        if self.reader.skip_earlier(ctx, commands, call)? {
            self.taken = self.reader.ring.taken;
        }
        if self.rows.is_none() {
            self.read_preamble(ctx, arrivals, call)?;
        }
        while self.rows.is_some() && self.read_tokens(ctx, arrivals, call)? {}
        while let Some((up_to, _)) = self.taking.done(call, ctx.exchange)? {
            self.taken = up_to;
            self.reader.ring.credit(self.taken, ctx.spec.chunk, false, commands);
        }
        // Returns all slots, also less than a chunk: a gateway frees forwarded slots when all ranks
        // have read them, and would wait for a rank that has less than a chunk (IC-4).
        self.reader.ring.credit(self.taken, ctx.spec.chunk, true, commands);
        Ok((self.reader.ring.taken, self.taken) != before)
    }

    fn read_preamble(
        &mut self,
        ctx: &Context,
        arrivals: &mut Arrivals,
        call: &mut Call<'_, '_, '_>,
    ) -> Result<(), StopCause> {
        let nbytes = ctx.spec.preamble();
        if self.reader.look(ctx, call, nbytes, 1)? == 0 {
            return Ok(());
        }
        let (_, bytes) = self.reader.slot(0, nbytes);
        let preamble = Preamble::read(&ctx.spec, ctx.exchange, bytes);
        let preamble = preamble.map_err(by(self.gateway()))?;
        let local = ctx.grid.local() as usize;
        let experts = ctx.spec.shape.local_experts() as usize;
        self.rows = Some(preamble.rows_to[local]);
        let counts = &preamble.counts[local * experts..(local + 1) * experts];
        arrivals.announce(self.channel, self.source, counts);
        self.reader.advance(1, nbytes);
        self.taken = self.reader.ring.taken;
        Ok(())
    }

    /// Reads up to a chunk of tokens; whether there was one.
    fn read_tokens(
        &mut self,
        ctx: &Context,
        arrivals: &mut Arrivals,
        call: &mut Call<'_, '_, '_>,
    ) -> Result<bool, StopCause> {
        let (meta, before) = (ctx.spec.meta(), self.received.tokens.len());
        let left = u64::from(self.rows.unwrap_or(0)) - before as u64;
        let n = self.reader.look(ctx, call, meta, left)?.min(ctx.spec.chunk.into());
        if n == 0 || !call.io.takes_rows() || !call.may_begin() {
            return Ok(false);
        }
        let (mut tokens, mut rows) = (Vec::with_capacity(n as usize), Vec::new());
        for i in 0..n {
            let (place, bytes) = self.reader.slot(i, meta);
            let lane = (self.channel, self.source);
            let taken = self.received.take(ctx, arrivals, lane, bytes, &mut rows);
            tokens.push((place, taken.map_err(by(self.gateway()))?));
        }
        self.reader.advance(n, meta);
        let up_to = self.reader.ring.taken;
        self.taking.begin(call, ctx.exchange, Job::Take { tokens, rows }, up_to);
        if self.is_read() {
            arrivals.check_complete(self.channel, self.source).map_err(by(self.source))?;
        }
        Ok(true)
    }

    /// Sends answers to the gateway while there is room.
    pub fn answer(
        &mut self,
        ctx: &Context,
        commands: &mut Commands,
        call: &mut Call<'_, '_, '_>,
    ) -> Result<bool, StopCause> {
        let mut moved =
            self.answers.update(&ctx.words, commands).map_err(by(self.answers.layout.partner))?;
        while call.io.has_answers() && call.may_begin() && self.make_answers(ctx, call) {
            moved = true;
        }
        while let Some((from, _)) = self.answering.done(call, ctx.exchange)? {
            self.answers.send(&from, commands);
            moved = true;
        }
        Ok(moved)
    }

    /// The number of answers that are computed next: up to a chunk.
    fn next_answers(&self, ctx: &Context) -> usize {
        (self.received.tokens.len() - self.answered).min(ctx.spec.chunk as usize)
    }

    /// Answers that are being computed.
    fn on_their_way(&self) -> usize {
        self.answering.iter().map(Vec::len).sum()
    }

    /// Whether the gateway has room for `n` more answers than are being computed.
    fn has_room(&self, n: usize) -> bool {
        self.answers.room() as usize >= self.on_their_way() + n
    }

    /// Begins to compute the answers to a chunk of tokens if there is room; whether there was.
    fn make_answers(&mut self, ctx: &Context, call: &mut Call<'_, '_, '_>) -> bool {
        let (n, made) = (self.next_answers(ctx), self.on_their_way());
        if n == 0 || !self.has_room(n) {
            return false;
        }
        let (place, mut terms) = (self.answers.layout, Vec::new());
        let sum = |i: usize| {
            let slot = (self.answers.sent + (made + i) as u64) % place.slots;
            let before = terms.len();
            terms.extend(self.received.terms(self.answered + i));
            let token = self.received.tokens[self.answered + i];
            let at = self.outbox + slot * place.stride;
            Sum { at, token, terms: (terms.len() - before) as u32 }
        };
        let sums: Vec<Sum> = (0..n).map(sum).collect();
        let from = sums.iter().map(|sum| sum.at).collect();
        self.answered += n;
        let job = Job::Sum { to: SumTarget::Answer, sums, terms };
        self.answering.begin(call, ctx.exchange, job, from);
        true
    }
}
