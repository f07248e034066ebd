//! The lanes of one channel at one rank.

use std::{collections::VecDeque, ops::Range};

use super::{
    commands::Commands,
    context::{by, Arrivals, Context, Stop},
    feed::Feed,
    gateway::Gateway,
    jobs::{Begun, Call, Job, Sum, Term, To},
    machine::Traffic,
    slots::Preamble,
    take::Take,
};
use crate::routes::Routes;

#[derive(Debug)]
pub struct Channel {
    number: u32,
    pub commands: Commands,
    feeds: Vec<Feed>,
    gateways: Vec<Gateway>,
    takes: Vec<Take>,
    /// Preambles, in the order of nodes, and this rank's tokens of the channel, as far as they have yet to be put where they
    /// are sent from.
    preambles: VecDeque<(u64, Vec<u8>)>,
    to_pack: Range<u32>,
    packing: Begun<()>,
    /// This rank's tokens of the channel, and how far their sums are.
    part: Range<u32>,
    /// Over the nodes, which of their tokens is next.
    next: Vec<usize>,
    /// Sums of nodes that are being summed: of each feed, what was read and whether that was the last.
    summing: Begun<Vec<(u64, bool)>>,
    /// When it is over, this rank's tokens may be replaced.
    pub settled: Option<u64>,
}

impl Channel {
    pub fn new(ctx: &Context, number: u32, commands: Commands) -> Self {
        let grid = ctx.grid;
        let others = (0..grid.nodes()).filter(|n| *n != grid.node());
        let forwarded = (0..grid.ranks).filter(|s| grid.local_of(*s) != grid.local());
        Self {
            number,
            commands,
            feeds: others.map(|node| Feed::new(ctx, number, node)).collect(),
            gateways: (0..grid.nodes()).map(|node| Gateway::new(ctx, number, node)).collect(),
            takes: forwarded.map(|source| Take::new(ctx, number, source)).collect(),
            preambles: VecDeque::new(),
            to_pack: 0..0,
            packing: Begun::default(),
            part: 0..0,
            next: vec![0; grid.nodes() as usize],
            summing: Begun::default(),
            settled: None,
        }
    }

    /// A new exchange: which of this rank's tokens go to which node.
    pub fn begin(&mut self, ctx: &Context, routes: &Routes, indices: &[i64]) {
        self.part = ctx.spec.part(self.number, routes.tokens);
        self.to_pack = self.part.clone();
        self.next.fill(0);
        self.settled = None;
        let (nodes, topk) = (ctx.grid.nodes() as usize, ctx.spec.shape.topk as usize);
        let mut lists = vec![Vec::new(); nodes];
        let preamble = Preamble {
            rows: 0,
            rows_to: vec![0; ctx.spec.ranks_per_node as usize],
            counts: vec![0; ctx.spec.node_experts() as usize],
        };
        let mut preambles = vec![preamble; nodes];
        let mut seen = vec![u32::MAX; ctx.grid.ranks as usize];
        for token in self.part.clone() {
            let experts = &indices[token as usize * topk..][..topk];
            for expert in experts.iter().filter_map(|e| u32::try_from(*e).ok()) {
                let rank = ctx.spec.shape.rank_of(expert);
                let node = ctx.grid.node_of(rank) as usize;
                let p = &mut preambles[node];
                p.counts[(expert % ctx.spec.node_experts()) as usize] += 1;
                if std::mem::replace(&mut seen[rank as usize], token) != token {
                    p.rows_to[ctx.grid.local_of(rank) as usize] += 1;
                }
                if lists[node].last() != Some(&token) {
                    lists[node].push(token);
                    p.rows += 1;
                }
            }
        }
        for (node, preamble) in preambles.iter().enumerate() {
            let place = ctx.layout.preamble(self.number, node as u32);
            self.preambles.push_back((place, preamble.to_bytes(ctx.exchange)));
        }
        for feed in &mut self.feeds {
            feed.begin(std::mem::take(&mut lists[feed.node as usize]));
        }
        for gateway in &mut self.gateways {
            let node = gateway.node as usize;
            let own = || (std::mem::take(&mut lists[node]), std::mem::take(&mut preambles[node]));
            let own = (gateway.node == ctx.grid.node()).then(own);
            gateway.begin(own);
        }
        self.takes.iter_mut().for_each(Take::begin);
    }

    /// Puts this rank's tokens where they are sent from; whether there was anything to do.
    pub fn pack(&mut self, ctx: &Context, call: &mut Call<'_, '_, '_>) -> Result<bool, Stop> {
        let mut moved = false;
        while call.may_begin() {
            let job = if let Some((to, bytes)) = self.preambles.pop_front() {
                Job::Put { to, bytes }
            } else if !self.to_pack.is_empty() && call.io.has_tokens() {
                let Range { start, end } = self.to_pack;
                let tokens = start..end.min(start.saturating_add(ctx.spec.chunk));
                self.to_pack.start = tokens.end;
                Job::Pack { first: start, metas: ctx.metas(tokens).to_vec() }
            } else {
                break;
            };
            self.packing.begin(call, ctx.exchange, job, ());
        }
        while self.packing.done(call, ctx.exchange)?.is_some() {
            moved = true;
        }
        Ok(moved)
    }

    /// Whether this rank's tokens lie where they are sent from.
    pub fn is_packed(&self) -> bool {
        self.preambles.is_empty() && self.to_pack.is_empty() && self.packing.is_empty()
    }

    /// Does what can be done about tokens; whether that was anything.
    pub fn dispatch(
        &mut self,
        ctx: &Context,
        arrivals: &mut Arrivals,
        call: &mut Call<'_, '_, '_>,
    ) -> Result<bool, Stop> {
        let mut moved = self.pack(ctx, call)?;
        let packed = self.is_packed();
        for feed in self.feeds.iter_mut().filter(|_| packed) {
            moved |= feed.step(ctx, &mut self.commands)?;
        }
        for gateway in self.gateways.iter_mut().filter(|g| packed || !g.is_own()) {
            moved |= gateway.step(ctx, &mut self.commands, arrivals, call)?;
        }
        for take in &mut self.takes {
            moved |= take.step(ctx, &mut self.commands, arrivals, call)?;
        }
        Ok(moved)
    }

    /// Does what can be done about answers; whether that was anything.
    pub fn combine(&mut self, ctx: &Context, call: &mut Call<'_, '_, '_>) -> Result<bool, Stop> {
        let mut moved = false;
        for take in &mut self.takes {
            moved |= take.answer(ctx, &mut self.commands, call)?;
        }
        for gateway in &mut self.gateways {
            moved |= gateway.sum(ctx, &mut self.commands, call)?;
        }
        while call.may_begin() && self.sum_some(ctx, call)? {
            moved = true;
        }
        while let Some((read, _)) = self.summing.done(call, ctx.exchange)? {
            for (feed, (up_to, last)) in self.feeds.iter_mut().zip(read) {
                feed.sums.credit(up_to, ctx.spec.chunk, last, &mut self.commands);
            }
            moved = true;
        }
        Ok(moved)
    }

    /// Has the nodes' sums of up to a chunk of tokens summed; whether there was one of which all are there (RS-1).
    fn sum_some(&mut self, ctx: &Context, call: &mut Call<'_, '_, '_>) -> Result<bool, Stop> {
        let (mut sums, mut terms) = (Vec::new(), Vec::new());
        while sums.len() < ctx.spec.chunk as usize && !self.part.is_empty() {
            let token = self.part.start;
            if !self.has_all_sums(ctx, token)? {
                break;
            }
            let before = terms.len();
            self.gather_sums(ctx, token, &mut terms);
            sums.push(Sum { at: 0, token, terms: (terms.len() - before) as u32 });
            self.part.start += 1;
        }
        if sums.is_empty() {
            return Ok(false);
        }
        let read = |feed: &Feed| {
            let last = self.next[feed.node as usize] == feed.tokens().len();
            (feed.sums.taken, last)
        };
        let read = self.feeds.iter().map(read).collect();
        self.summing.begin(call, ctx.exchange, Job::Sum { to: To::Total, sums, terms }, read);
        Ok(true)
    }

    /// Whether a token, all of whose predecessors have theirs, has the sums of all nodes that it went to.
    fn has_all_sums(&self, ctx: &Context, token: u32) -> Result<bool, Stop> {
        let own = ctx.grid.node() as usize;
        let (tokens, made) = self.gateways[own].own_sums();
        if tokens.get(self.next[own]) == Some(&token) && self.next[own] >= made {
            return Ok(false);
        }
        for feed in &self.feeds {
            let goes = feed.tokens().get(self.next[feed.node as usize]) == Some(&token);
            let source = by(feed.sums.place.partner);
            if goes && feed.sums.ready(&ctx.words).map_err(source)? == 0 {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The sums of a token, in the order of nodes.
    fn gather_sums(&mut self, ctx: &Context, token: u32, terms: &mut Vec<Term>) {
        let mut feeds = self.feeds.iter_mut();
        for node in 0..ctx.grid.nodes() {
            let next = &mut self.next[node as usize];
            if node == ctx.grid.node() {
                let (tokens, _) = self.gateways[node as usize].own_sums();
                if tokens.get(*next) == Some(&token) {
                    terms.push(Term::Node);
                    *next += 1;
                }
                continue;
            }
            let Some(feed) = feeds.next() else { break };
            if feed.tokens().get(*next) == Some(&token) {
                terms.push(Term::Slot { at: feed.sums.next(0), from: feed.sums.place.partner });
                feed.sums.taken += 1;
                *next += 1;
            }
        }
    }

    pub fn has_begun(&self) -> bool {
        self.gateways.iter().any(Gateway::begun) || self.takes.iter().any(Take::begun)
    }

    /// All that comes has come, and all that goes on has gone on.
    pub fn is_dispatched(&self) -> bool {
        self.is_packed()
            && self.feeds.iter().all(Feed::is_done)
            && self.gateways.iter().all(Gateway::is_done)
            && self.takes.iter().all(Take::is_done)
            && self.commands.is_flushed()
    }

    /// Answers aren't needed any more.
    pub fn is_answered(&self) -> bool {
        self.gateways.iter().all(Gateway::is_summed)
            && self.takes.iter().all(Take::is_answered)
            && self.commands.is_flushed()
    }

    pub fn is_summed(&self) -> bool {
        self.part.is_empty() && self.summing.is_empty() && self.commands.is_flushed()
    }

    /// Whether this rank's tokens, and what was sent from them, may be replaced.
    pub fn is_settled(&self) -> bool {
        self.settled.is_none_or(|drain| self.commands.is_complete(drain))
    }

    /// Adds what was sent in so many exchanges, but for one preamble in each.
    pub fn count(&self, exchanges: u32, all: &mut Traffic) {
        let rows = |slots: u64| slots.saturating_sub(exchanges.into());
        all.rail_tokens += self.feeds.iter().map(|f| rows(f.ring.sent)).sum::<u64>();
        for gateway in &self.gateways {
            all.node_tokens += gateway.forwarded_slots().map(rows).sum::<u64>();
            all.rail_sums += gateway.sent_sums();
        }
        all.node_answers += self.takes.iter().map(Take::sent_answers).sum::<u64>();
    }

    /// Whom tokens are awaited from, or room for them.
    pub fn suspects_of_tokens(&self, ctx: &Context) -> Vec<u32> {
        let gateways = self.gateways.iter().filter(|g| !g.is_done());
        let mut all: Vec<u32> = gateways.flat_map(|g| g.suspects_of_tokens(ctx)).collect();
        all.extend(self.takes.iter().filter(|t| !t.is_done()).map(Take::gateway));
        all.extend(self.feeds.iter().filter(|f| !f.is_done()).map(|f| f.ring.place.partner));
        all
    }

    /// Whom answers are awaited from, or room for them.
    pub fn suspects_of_answers(&self, ctx: &Context) -> Vec<u32> {
        let gateways = self.gateways.iter().filter(|g| !g.is_summed());
        let mut all: Vec<u32> = gateways.flat_map(|g| g.suspects_of_answers(ctx)).collect();
        all.extend(self.takes.iter().filter(|t| !t.is_answered()).map(Take::gateway));
        if !self.part.is_empty() {
            let awaited = |f: &&Feed| self.next[f.node as usize] < f.tokens().len();
            all.extend(self.feeds.iter().filter(awaited).map(|f| f.sums.place.partner));
        }
        all
    }
}
