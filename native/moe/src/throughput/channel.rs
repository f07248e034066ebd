//! The lanes of one channel on one rank.

use std::{collections::VecDeque, ops::Range};

use super::{
    commands::Commands,
    context::{Arrivals, Context, StopCause},
    gateway::Gateway,
    jobs::{Call, Job, PendingJobs, Sum, SumTarget, SumTerm},
    machine::Traffic,
    node_receiver::NodeReceiver,
    rail_sender::RailSender,
    ring_pool::RingPool,
    slots::Preamble,
};
use crate::routes::Routes;

/// All lanes of one channel.
#[derive(Debug)]
pub struct Channel {
    number: u32,
    pub commands: Commands,
    rail_senders: Vec<RailSender>,
    gateways: Vec<Gateway>,
    node_receivers: Vec<NodeReceiver>,
    /// The rings of lanes that exist only in another era.
    pool: RingPool,
    /// Preambles, in the order of nodes, that are not in their slots yet.
    preambles: VecDeque<(u64, Vec<u8>)>,
    /// This rank's tokens of the channel that are not in their slots yet.
    to_pack: Range<u32>,
    packing: PendingJobs<()>,
    /// This rank's tokens of the channel that have no sums yet.
    part: Range<u32>,
    /// By node, the index of its next token.
    next: Vec<usize>,
    /// Jobs that sum the sums of nodes: for each sender, the slots read and whether they were the
    /// last.
    summing: PendingJobs<Vec<(u64, bool)>>,
    /// The drain after which this rank's tokens may be replaced.
    pub settled: Option<u64>,
}

impl Channel {
    /// A channel without lanes.
    pub fn new(number: u32, commands: Commands) -> Self {
        Self {
            number,
            commands,
            rail_senders: Vec::new(),
            gateways: Vec::new(),
            node_receivers: Vec::new(),
            pool: RingPool::default(),
            preambles: VecDeque::new(),
            to_pack: 0..0,
            packing: PendingJobs::default(),
            part: 0..0,
            next: Vec::new(),
            summing: PendingJobs::default(),
            settled: None,
        }
    }

    /// Drops its lanes and their work. The sources of their commands are in use until these have
    /// ended (MR-1).
    pub fn abandon(&mut self) {
        self.rail_senders.drain(..).for_each(|sender| sender.return_rings(&mut self.pool));
        self.gateways.drain(..).for_each(|gateway| gateway.return_rings(&mut self.pool));
        self.node_receivers.drain(..).for_each(|receiver| receiver.return_rings(&mut self.pool));
        self.preambles.clear();
        (self.to_pack, self.part) = (0..0, 0..0);
        (self.packing, self.summing) = (PendingJobs::default(), PendingJobs::default());
        self.settled = Some(self.commands.drain());
    }

    /// A rank's next incarnation begins, with new rings.
    pub fn forget(&mut self, ctx: &Context, rank: u32) {
        self.pool.forget(rank, |other| ctx.is_near(other));
    }

    /// Makes the lanes of an era, if it has this channel. All that was sent in earlier ones is
    /// over.
    pub fn rebuild(&mut self, ctx: &Context) {
        self.pool.give_back(&ctx.here, &mut self.commands);
        if self.number >= ctx.spec.channels {
            return;
        }
        let (grid, number, pool) = (ctx.grid, self.number, &mut self.pool);
        let others = ctx.nodes().filter(|n| *n != grid.node());
        self.rail_senders = others.map(|node| RailSender::new(ctx, pool, number, node)).collect();
        self.gateways = ctx.nodes().map(|node| Gateway::new(ctx, pool, number, node)).collect();
        let forwarded = (0..grid.ranks).filter(|s| grid.local_of(*s) != grid.local());
        self.node_receivers =
            forwarded.map(|source| NodeReceiver::new(ctx, pool, number, source)).collect();
        self.next = vec![0; grid.nodes() as usize];
    }

    /// A new exchange: which of this rank's tokens go to which node. What is for ranks that aren't
    /// here goes nowhere.
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
            for (k, named) in experts.iter().enumerate() {
                // An expert that a token names twice gets one row, whose answer counts for both.
                let Some(expert) =
                    u32::try_from(*named).ok().filter(|_| !experts[..k].contains(named))
                else {
                    continue;
                };
                let rank = ctx.spec.shape.rank_of(expert);
                if !ctx.here[rank as usize] {
                    continue;
                }
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
        for node in ctx.nodes() {
            let place = ctx.layout.preamble(self.number, node);
            self.preambles.push_back((place, preambles[node as usize].to_bytes(ctx.exchange)));
        }
        for sender in &mut self.rail_senders {
            sender.begin(std::mem::take(&mut lists[sender.node as usize]));
        }
        for gateway in &mut self.gateways {
            let node = gateway.node as usize;
            let own = || (std::mem::take(&mut lists[node]), std::mem::take(&mut preambles[node]));
            let own = (gateway.node == ctx.grid.node()).then(own);
            gateway.begin(own);
        }
        self.node_receivers.iter_mut().for_each(NodeReceiver::begin);
    }

    /// Puts this rank's tokens where they are sent from; whether there was anything to do.
    pub fn pack(&mut self, ctx: &Context, call: &mut Call<'_, '_, '_>) -> Result<bool, StopCause> {
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
    ) -> Result<bool, StopCause> {
        let mut moved = self.pack(ctx, call)?;
        let packed = self.is_packed();
        for sender in self.rail_senders.iter_mut().filter(|_| packed) {
            moved |= sender.step(ctx, &mut self.commands)?;
        }
        for gateway in self.gateways.iter_mut().filter(|g| packed || !g.is_own()) {
            moved |= gateway.step(ctx, &mut self.commands, arrivals, call)?;
        }
        for receiver in &mut self.node_receivers {
            moved |= receiver.step(ctx, &mut self.commands, arrivals, call)?;
        }
        Ok(moved)
    }

    /// Does what can be done about answers; whether that was anything.
    pub fn combine(
        &mut self,
        ctx: &Context,
        call: &mut Call<'_, '_, '_>,
    ) -> Result<bool, StopCause> {
        let mut moved = false;
        for sender in &mut self.rail_senders {
            moved |= sender.sums.skip_earlier(ctx, &mut self.commands, call)?;
        }
        for receiver in &mut self.node_receivers {
            moved |= receiver.answer(ctx, &mut self.commands, call)?;
        }
        for gateway in &mut self.gateways {
            moved |= gateway.sum(ctx, &mut self.commands, call)?;
        }
        while call.may_begin() && self.sum_some(ctx, call)? {
            moved = true;
        }
        while let Some((read, _)) = self.summing.done(call, ctx.exchange)? {
            for (sender, (up_to, last)) in self.rail_senders.iter_mut().zip(read) {
                sender.sums.ring.credit(up_to, ctx.spec.chunk, last, &mut self.commands);
            }
            moved = true;
        }
        Ok(moved)
    }

    /// Has the nodes' sums of up to a chunk of tokens summed; whether there was one of which all
    /// are there (RS-1).
    fn sum_some(&mut self, ctx: &Context, call: &mut Call<'_, '_, '_>) -> Result<bool, StopCause> {
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
        let read = |sender: &RailSender| {
            let last = self.next[sender.node as usize] == sender.tokens().len();
            (sender.sums.ring.taken, last)
        };
        let read = self.rail_senders.iter().map(read).collect();
        self.summing.begin(
            call,
            ctx.exchange,
            Job::Sum { to: SumTarget::Total, sums, terms },
            read,
        );
        Ok(true)
    }

    /// Whether a token, all of whose predecessors have theirs, has the sums of all nodes that it
    /// went to.
    fn has_all_sums(&self, ctx: &Context, token: u32) -> Result<bool, StopCause> {
        let own = ctx.grid.node() as usize;
        let (tokens, made) = self.own_sums();
        if tokens.get(self.next[own]) == Some(&token) && self.next[own] >= made {
            return Ok(false);
        }
        for sender in &self.rail_senders {
            let goes = sender.tokens().get(self.next[sender.node as usize]) == Some(&token);
            if goes && sender.sums.ready(ctx)? == 0 {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The sums of a token, in the order of nodes.
    fn gather_sums(&mut self, ctx: &Context, token: u32, terms: &mut Vec<SumTerm>) {
        let own = ctx.grid.node();
        let mut rail_senders = self.rail_senders.iter_mut().peekable();
        for node in ctx.nodes() {
            let next = &mut self.next[node as usize];
            if node == own {
                let of_own = self.gateways.iter().find(|g| g.is_own());
                if of_own.is_some_and(|g| g.own_sums().0.get(*next) == Some(&token)) {
                    terms.push(SumTerm::Node);
                    *next += 1;
                }
                continue;
            }
            let Some(sender) = rail_senders.next_if(|sender| sender.node == node) else { continue };
            if sender.tokens().get(*next) == Some(&token) {
                let ring = &mut sender.sums.ring;
                terms.push(SumTerm::Slot { at: ring.next(0), from: ring.layout.partner });
                ring.taken += 1;
                *next += 1;
            }
        }
    }

    /// This rank's own tokens that go to ranks of its node, and of how many of them the sums are
    /// made.
    fn own_sums(&self) -> (&[u32], usize) {
        self.gateways.iter().find(|g| g.is_own()).map_or((&[], 0), Gateway::own_sums)
    }

    pub fn has_begun(&self) -> bool {
        self.gateways.iter().any(Gateway::begun)
            || self.node_receivers.iter().any(NodeReceiver::begun)
    }

    /// Whether all tokens have arrived, and all forwarded tokens are sent.
    pub fn is_dispatched(&self) -> bool {
        self.is_packed()
            && self.rail_senders.iter().all(RailSender::is_done)
            && self.gateways.iter().all(Gateway::is_done)
            && self.node_receivers.iter().all(NodeReceiver::is_done)
            && self.commands.is_flushed()
    }

    /// Answers aren't needed any more.
    pub fn is_answered(&self) -> bool {
        self.gateways.iter().all(Gateway::is_summed)
            && self.node_receivers.iter().all(NodeReceiver::is_answered)
            && self.commands.is_flushed()
    }

    pub fn is_summed(&self) -> bool {
        self.part.is_empty() && self.summing.is_empty() && self.commands.is_flushed()
    }

    /// Whether this rank's tokens, and what was sent from them, may be replaced.
    pub fn is_settled(&self) -> bool {
        self.settled.is_none_or(|drain| self.commands.is_complete(drain))
    }

    /// Adds what was sent.
    pub fn count(&self, ctx: &Context, all: &mut Traffic) {
        let near = |rank: u32| ctx.is_near(rank);
        self.pool.count(&near, all);
        let of_rails = self.rail_senders.iter().map(|f| &f.ring);
        let of_gateways = self.gateways.iter().flat_map(Gateway::outbound);
        let of_receivers = self.node_receivers.iter().map(NodeReceiver::outbound);
        of_rails.chain(of_gateways).chain(of_receivers).for_each(|ring| ring.count(&near, all));
    }

    /// The ranks from which tokens, or room for them, are awaited.
    pub fn suspects_of_tokens(&self, ctx: &Context) -> Vec<u32> {
        let gateways = self.gateways.iter();
        let mut all: Vec<u32> = gateways.flat_map(|g| g.suspects_of_tokens(ctx)).collect();
        all.extend(self.node_receivers.iter().filter_map(|r| r.suspect_of_tokens(ctx)));
        all.extend(
            self.rail_senders.iter().filter(|f| !f.is_done()).map(|f| f.ring.layout.partner),
        );
        all
    }

    /// The ranks from which answers, or room for them, are awaited.
    pub fn suspects_of_answers(&self, ctx: &Context) -> Vec<u32> {
        let gateways = self.gateways.iter().filter(|g| !g.is_summed());
        let mut all: Vec<u32> = gateways.flat_map(|g| g.suspects_of_answers(ctx)).collect();
        all.extend(self.node_receivers.iter().filter_map(|r| r.suspect_of_answers(ctx)));
        if !self.part.is_empty() {
            let awaited = |f: &&RailSender| {
                self.next[f.node as usize] < f.tokens().len() && f.sums.awaits_slot(ctx)
            };
            all.extend(
                self.rail_senders.iter().filter(awaited).map(|f| f.sums.ring.layout.partner),
            );
        }
        all
    }
}
