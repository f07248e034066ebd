//! The lanes of one channel at one rank.

use super::{
    commands::Commands,
    context::{by, Arrivals, Context, Io, Stop},
    feed::Feed,
    gateway::Gateway,
    machine::Traffic,
    slots::{read_head, Kind, Preamble, HEAD},
    take::Take,
};
use crate::{kernels::add, routes::Routes};

#[derive(Debug)]
pub struct Channel {
    number: u32,
    pub commands: Commands,
    feeds: Vec<Feed>,
    gateways: Vec<Gateway>,
    takes: Vec<Take>,
    /// This rank's tokens of the channel, and how far their sums are.
    part: std::ops::Range<u32>,
    /// Over the nodes, which of their tokens is next.
    next: Vec<usize>,
    scratch: [Vec<f32>; 2],
    /// When it is over, this rank's tokens may be replaced.
    pub settled: Option<u64>,
}

/// Where a rank's own sums are made.
#[derive(Debug, Default)]
pub struct Sums {
    /// Of this node, as they would come from another: by token.
    pub of_node: Vec<u8>,
    /// Of all, elements of each token.
    pub total: Vec<f32>,
}

impl Channel {
    pub fn new(ctx: &Context, number: u32, commands: Commands) -> Self {
        let grid = ctx.grid;
        let others = (0..grid.nodes()).filter(|n| *n != grid.node());
        let forwarded = (0..grid.ranks).filter(|s| grid.local_of(*s) != grid.local());
        let wide = ctx.spec.shape.back.elements as usize;
        Self {
            number,
            commands,
            feeds: others.map(|node| Feed::new(ctx, number, node)).collect(),
            gateways: (0..grid.nodes()).map(|node| Gateway::new(ctx, number, node)).collect(),
            takes: forwarded.map(|source| Take::new(ctx, number, source)).collect(),
            part: 0..0,
            next: vec![0; grid.nodes() as usize],
            scratch: [vec![0.0; wide], vec![0.0; wide]],
            settled: None,
        }
    }

    /// A new exchange: which of this rank's tokens go to which node. Their preambles are written down.
    pub fn begin(&mut self, ctx: &Context, routes: &Routes, indices: &[i64]) -> Result<(), Stop> {
        self.part = ctx.spec.part(self.number, routes.tokens);
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
            ctx.region.put(place, &preamble.to_bytes(ctx.exchange))?;
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
        Ok(())
    }

    /// Does what can be done about tokens; whether that was anything.
    pub fn dispatch(
        &mut self,
        ctx: &Context,
        arrivals: &mut Arrivals,
        io: &mut Io<'_, '_>,
    ) -> Result<bool, Stop> {
        let mut moved = false;
        for feed in &mut self.feeds {
            moved |= feed.step(ctx, &mut self.commands)?;
        }
        for gateway in &mut self.gateways {
            moved |= gateway.step(ctx, &mut self.commands, arrivals, io)?;
        }
        for take in &mut self.takes {
            moved |= take.step(ctx, &mut self.commands, arrivals, io)?;
        }
        Ok(moved)
    }

    /// Does what can be done about answers; whether that was anything.
    pub fn combine(
        &mut self,
        ctx: &Context,
        io: &Io<'_, '_>,
        sums: &mut Sums,
    ) -> Result<bool, Stop> {
        let mut moved = false;
        for take in &mut self.takes {
            moved |= take.answer(ctx, &mut self.commands, io, &mut self.scratch[0])?;
        }
        for gateway in &mut self.gateways {
            let own = &mut sums.of_node;
            moved |= gateway.sum(ctx, &mut self.commands, io, own, &mut self.scratch)?;
        }
        while self.part.start < self.part.end && self.sum_one(ctx, sums)? {
            moved = true;
        }
        Ok(moved)
    }

    /// Sums up the nodes' sums of the next token, in their order, if all are there (RS-1).
    fn sum_one(&mut self, ctx: &Context, sums: &mut Sums) -> Result<bool, Stop> {
        let token = self.part.start;
        let grid = ctx.grid;
        let (own, made) = self.gateways[grid.node() as usize].own_sums();
        let has_own = own.get(self.next[grid.node() as usize]) == Some(&token);
        if has_own && self.next[grid.node() as usize] >= made {
            return Ok(false);
        }
        for feed in &self.feeds {
            let goes = feed.tokens().get(self.next[feed.node as usize]) == Some(&token);
            let source = by(feed.sums.place.partner);
            if goes && feed.sums.ready(&ctx.words).map_err(source)? == 0 {
                return Ok(false);
            }
        }
        let shape = ctx.spec.shape;
        let (wide, nbytes) = (shape.back.elements as usize, shape.back_nbytes() as usize);
        let total = &mut sums.total[token as usize * wide..][..wide];
        total.fill(0.0);
        let mut feeds = self.feeds.iter_mut();
        for node in 0..grid.nodes() {
            if node == grid.node() {
                if has_own {
                    let bytes = &sums.of_node[token as usize * nbytes..][..nbytes];
                    add(total, bytes, shape.back.float, 1.0, false);
                    self.next[node as usize] += 1;
                }
                continue;
            }
            let Some(feed) = feeds.next() else { break };
            if feed.tokens().get(self.next[node as usize]) != Some(&token) {
                continue;
            }
            let added = ctx.read(feed.sums.next(0), ctx.spec.back_stride(), |slot| {
                let said = read_head(slot, Kind::Sum, ctx.exchange)?;
                if said != token {
                    return Err(format!("it sent the sum of token {said}, not of {token}"));
                }
                add(total, &slot[HEAD as usize..][..nbytes], shape.back.float, 1.0, false);
                Ok(())
            })?;
            added.map_err(by(feed.sums.place.partner))?;
            feed.sums.taken += 1;
            self.next[node as usize] += 1;
            let last = self.next[node as usize] == feed.tokens().len();
            feed.sums.credit(feed.sums.taken, ctx.spec.chunk, last, &mut self.commands);
        }
        self.part.start += 1;
        Ok(true)
    }

    pub fn has_begun(&self) -> bool {
        self.gateways.iter().any(Gateway::begun) || self.takes.iter().any(Take::begun)
    }

    /// All that comes has come, and all that goes on has gone on.
    pub fn is_dispatched(&self) -> bool {
        self.feeds.iter().all(Feed::is_done)
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
        self.part.is_empty() && self.commands.is_flushed()
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
