//! One rank of a high-throughput exchange, without a thread and without a clock: its *device*. The
//! owner of a clock calls [`Machine::step`]; the machine sends by commands in the FIFOs of a proxy.

mod checks;
mod losses;
mod results;

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use fabric_engine::{EngineError, Region, Result, Time};
use fabric_proxy::{fifo::Pusher, raw::AtomicWords};

use super::{
    channel::Channel,
    commands::Commands,
    context::{Arrivals, Context, Io, KernelIo, StopCause},
    jobs::{Call, Jobs, Worker},
    layout::Layout,
    membership::{Member, Membership},
    signals::Signals,
    slots::{first_exchange, head, next_exchange, put_experts, Kind},
    spec::Spec,
    workers::CpuWorker,
};
use crate::{checks::check_rank, kernels::Part, phase::Phase, routes::Routes};
use losses::{LastIncarnation, PendingMask};
pub use losses::{Losses, LostRank};

/// Timeouts after which a rank is given up even if all ranks are in calls.
const MAX_TIMEOUTS: u32 = 8;
/// Timeouts after which a rank whose jobs don't complete gives itself up: earlier than ranks that
/// began to wait before it would name a rank that merely waits, too (RS-4).
const OWN_TIMEOUTS: u32 = MAX_TIMEOUTS / 2;

/// Maximum duration of a rank's own jobs.
pub fn own_job_timeout(timeout: Duration) -> Duration {
    timeout.saturating_mul(OWN_TIMEOUTS)
}

/// Rows that a rank has sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Own tokens to other nodes.
    pub rail_tokens: u64,
    /// Tokens to ranks of its node.
    pub node_tokens: u64,
    /// Answers to ranks of its node.
    pub node_answers: u64,
    /// Sums to other nodes.
    pub rail_sums: u64,
}

impl Traffic {
    pub(super) fn add(&mut self, other: &Self) {
        self.rail_tokens += other.rail_tokens;
        self.node_tokens += other.node_tokens;
        self.node_answers += other.node_answers;
        self.rail_sums += other.rail_sums;
    }
}

/// One rank of an exchange.
#[derive(Debug)]
pub struct Machine {
    ctx: Context,
    /// The parameters that all ranks share.
    spec: Spec,
    member: Member,
    membership: Membership,
    channels: Vec<Channel>,
    signals: Signals,
    phase: Phase,
    tokens: u32,
    /// Ranks with experts of this rank's tokens that aren't here.
    left_out: Vec<u32>,
    arrivals: Arrivals,
    jobs: Jobs,
    losses: Arc<Losses>,
    /// Losses that no call has reported yet.
    unreported_losses: Vec<LostRank>,
    /// The losses that the last failed call reported.
    reported_losses: Vec<LostRank>,
    /// The membership has changed since lanes were made, and there are none.
    is_abandoned: bool,
    /// Ranks that the proxy will drop soon.
    to_mask: Vec<PendingMask>,
    /// Ranks that have continued without a rank whose loss this rank has not heard of yet.
    overtaken_by: Option<u32>,
    /// Ranks that are gone, and why. A rank may leave after its part is done.
    gone: Vec<(u32, String)>,
    /// By rank, its last incarnation here, if any.
    last: Vec<Option<LastIncarnation>>,
    /// Time of the last progress.
    quiet_since: Option<Time>,
}

impl Machine {
    /// `region` is this rank's part of symmetric memory, `words` its atomic words, `pushers` one
    /// FIFO per channel and one more. No other thread pushes into them, before or after.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] for a spec that can't be, or too little of either.
    pub fn new(
        spec: Spec,
        member: Member,
        region: Region,
        words: AtomicWords,
        pushers: Vec<Pusher>,
    ) -> Result<Self> {
        let worker = Box::new(CpuWorker::new(spec, region.clone()));
        Self::with_worker(spec, member, &region, words, pushers, worker)
    }

    /// As [`Machine::new`], with rows wherever the worker reaches them.
    ///
    /// # Errors
    /// As [`Machine::new`].
    pub fn with_worker(
        spec: Spec,
        member: Member,
        region: &Region,
        words: AtomicWords,
        mut pushers: Vec<Pusher>,
        worker: Box<dyn Worker>,
    ) -> Result<Self> {
        let layout = Layout::new(spec)?;
        let (rank, ranks) = (member.rank, spec.shape.ranks);
        check_rank(rank, ranks)?;
        if region.len() < layout.nbytes()
            || (words.len() as u64) < spec.words()
            || pushers.len() != spec.channels as usize + 1
        {
            return Err(EngineError::Invalid(format!(
                "{} bytes, {} words and {} FIFOs are too few: give {}, {} and {}",
                region.len(),
                words.len(),
                pushers.len(),
                layout.nbytes(),
                spec.words(),
                spec.channels + 1
            )));
        }
        let signals = pushers.pop().map(|pusher| Signals::new(pusher, spec.shape.ranks));
        let signals = signals.ok_or(EngineError::Closed)?;
        let grid = spec.grid(rank);
        let membership = Membership::new(member, ranks);
        let (here, metas) = (membership.here(), Vec::new());
        let has_joined = vec![false; ranks as usize];
        let ctx =
            Context { spec, grid, here, has_joined, layout, words, exchange: 0, era: 0, metas };
        let channel = |(i, pusher)| Channel::new(i as u32, Commands::new(pusher));
        let channels = pushers.into_iter().enumerate().map(channel).collect();
        Ok(Self {
            arrivals: Arrivals::default(),
            ctx,
            spec,
            member,
            membership,
            channels,
            signals,
            phase: Phase::Idle,
            tokens: 0,
            left_out: Vec::new(),
            jobs: Jobs::new(worker),
            losses: Arc::default(),
            unreported_losses: Vec::new(),
            reported_losses: Vec::new(),
            is_abandoned: true,
            to_mask: Vec::new(),
            overtaken_by: None,
            gone: Vec::new(),
            last: (0..ranks).map(|_| None).collect(),
            quiet_since: None,
        })
    }

    pub fn spec(&self) -> &Spec {
        &self.spec
    }

    pub fn layout(&self) -> &Layout {
        &self.ctx.layout
    }

    /// Whether [`Machine::begin`] would be taken: this rank is [quiet](Machine::is_quiet), and all
    /// others have admitted it. Before, what it writes could meet what its last incarnation wrote
    /// (MR-1).
    pub fn may_begin(&self) -> bool {
        self.is_quiet() && self.not_joined().next().is_none()
    }

    /// The ranks that are here and that have yet to admit this one.
    fn not_joined(&self) -> impl Iterator<Item = u32> + '_ {
        let ranks = (0..self.spec.shape.ranks).filter(|rank| *rank != self.member.rank);
        ranks.filter(|r| self.ctx.here[*r as usize] && !self.ctx.has_joined[*r as usize])
    }

    /// Whether the last exchange's tokens have left, and what was under way when a rank was lost is
    /// over.
    pub fn is_quiet(&self) -> bool {
        matches!(self.phase, Phase::Idle | Phase::Collected)
            && !self.jobs.are_under_way()
            && self.to_mask.is_empty()
            && self.channels.iter().all(Channel::is_settled)
    }

    /// Takes this rank's tokens: `parts` make up a row, `indices` are the experts of each token,
    /// `weights` 32-bit floats, one for each expert. Phase on with the parts until they are
    /// [packed](Machine::is_packed).
    ///
    /// # Errors
    /// [`EngineError::Invalid`] for tokens that don't fit the shape, or out of turn.
    pub fn begin(
        &mut self,
        parts: &[Part<'_>],
        indices: &[i64],
        weights: Option<Part<'_>>,
    ) -> Result<()> {
        self.check_may_dispatch("dispatch_send")?;
        let routes = self.check_tokens(parts, indices, weights)?;
        self.start(&mut Io::Tokens(parts), &routes, indices, weights)
    }

    /// As [`Machine::begin`], with parts that kernels were told of.
    ///
    /// # Errors
    /// As [`Machine::begin`].
    pub fn begin_on_kernels(&mut self, indices: &[i64], weights: Option<Part<'_>>) -> Result<()> {
        self.check_may_dispatch("dispatch_send")?;
        let routes = self.check_routes(indices, weights)?;
        self.start(&mut Io::Kernels(KernelIo::Tokens), &routes, indices, weights)
    }

    fn start(
        &mut self,
        io: &mut Io<'_, '_>,
        routes: &Routes,
        indices: &[i64],
        weights: Option<Part<'_>>,
    ) -> Result<()> {
        if !self.may_begin() {
            let text = "the tokens of the last exchange are still on their way, or a rank has yet to admit this one; step on";
            return Err(EngineError::Invalid(text.into()));
        }
        match self.is_abandoned {
            true => self.rebuild()?,
            false => self.ctx.exchange = next_exchange(self.ctx.exchange),
        }
        self.tokens = routes.tokens;
        self.left_out = self.missing_for(indices);
        self.arrivals = Arrivals::new(&self.ctx);
        self.write_metas(indices, weights);
        self.phase = Phase::Dispatched;
        let call = &mut Call { jobs: &mut self.jobs, io };
        for channel in self.channels.iter_mut().take(self.ctx.spec.channels as usize) {
            channel.begin(&self.ctx, routes, indices);
            if let Err(stop) = channel.pack(&self.ctx, call) {
                return Err(self.stop(stop));
            }
        }
        Ok(())
    }

    /// Makes the lanes of the present ranks. If a rank is missing, no rank forwards: the grid is
    /// flat.
    fn rebuild(&mut self) -> Result<()> {
        let era = self.membership.era();
        if era >= 1 << 15 {
            let text = "ranks came and went too often for one exchange; make another";
            return Err(EngineError::Invalid(text.into()));
        }
        let ctx = &mut self.ctx;
        let is_flat = !self.membership.are_all_here() && self.spec.ranks_per_node > 1;
        (ctx.spec, ctx.grid) = match is_flat {
            true => (self.spec.flat(), ctx.grid.flat()),
            false => (self.spec, ctx.grid.whole()),
        };
        (ctx.era, ctx.exchange) = (era, first_exchange(era, is_flat));
        self.channels.iter_mut().for_each(|channel| channel.rebuild(&self.ctx));
        self.is_abandoned = false;
        Ok(())
    }

    /// Ranks with experts among these that aren't here.
    fn missing_for(&self, indices: &[i64]) -> Vec<u32> {
        let experts = indices.iter().filter_map(|e| u32::try_from(*e).ok());
        let ranks = experts.map(|e| self.spec.shape.rank_of(e));
        let missing = ranks.filter(|rank| !self.ctx.here[*rank as usize]);
        missing.collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// Ranks that aren't here, and that experts of the tokens of the last exchange are on: their
    /// answers are missing in its sums.
    pub fn left_out(&self) -> &[u32] {
        &self.left_out
    }

    fn write_metas(&mut self, indices: &[i64], weights: Option<Part<'_>>) {
        let topk = self.ctx.spec.shape.topk as usize;
        let mut metas = std::mem::take(&mut self.ctx.metas);
        metas.clear();
        for token in 0..self.tokens {
            let row = weights.map(|w| w.row(token as usize));
            let weight = |k: usize| match row.and_then(|r| r.get(4 * k..4 * k + 4)) {
                Some(bytes) => f32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
                None => 1.0,
            };
            metas.extend(head(Kind::Token, self.ctx.exchange, token));
            put_experts(&mut metas, &indices[token as usize * topk..][..topk], weight);
        }
        self.ctx.metas = metas;
    }

    /// Whether this rank's tokens have been copied.
    pub fn is_packed(&self) -> bool {
        self.channels.iter().all(Channel::is_packed)
    }

    /// Does all work that is possible now; returns whether there was any. After `timeout` without
    /// progress, gives up awaited ranks that have been in no call for that long. A rank in a call
    /// waits for another rank, and gives up the rank that it waits for itself.
    ///
    /// # Errors
    /// [`EngineError::PeerLost`]: a rank was given up, here or by others.
    pub fn step(&mut self, now: Time, timeout: Duration, io: &mut Io<'_, '_>) -> Result<bool> {
        self.process_signals()?;
        let moved = match self.go_on(io) {
            Ok(moved) => moved,
            Err(StopCause::Ahead { rank }) => {
                self.overtaken_by = Some(rank);
                true
            }
            Err(stop) => return Err(self.stop(stop)),
        };
        self.signals.beat(&self.ctx, now, timeout);
        self.signals.commands.flush().map_err(|_| EngineError::Closed)?;
        if moved {
            self.quiet_since = None;
            return Ok(true);
        }
        let suspects = self.suspects();
        let is_gone = |(rank, _): &&(u32, String)| suspects.contains(rank);
        if let Some((rank, cause)) = self.gone.iter().find(is_gone).cloned() {
            self.fail(rank, cause);
            self.check()?;
        }
        let since = *self.quiet_since.get_or_insert(now);
        let quiet = now.since(since);
        if self.jobs.are_under_way() {
            // Other ranks wait for this rank until its rows are processed.
            if quiet >= own_job_timeout(timeout) {
                let rank = self.ctx.grid.rank;
                self.fail(rank, format!("its device did nothing within {quiet:?}"));
                self.check()?;
            }
            return Ok(false);
        }
        let late = |rank: &u32| {
            // Cyclic waits end, too (RS-4).
            quiet >= timeout.saturating_mul(MAX_TIMEOUTS)
                || self.signals.is_silent(*rank, now, timeout)
        };
        if quiet >= timeout {
            if let Some(rank) = suspects.into_iter().find(late) {
                let cause = match self.phase {
                    Phase::Idle | Phase::Collected => "admit this rank",
                    Phase::Dispatched => "do its part in moving tokens",
                    _ => "do its part in moving answers",
                };
                self.fail(rank, format!("it did not {cause} within {quiet:?}"));
                self.check()?;
            }
        }
        Ok(false)
    }

    /// The caller was elsewhere: the time does not count against any rank.
    pub fn resume(&mut self) {
        self.quiet_since = None;
    }

    fn go_on(&mut self, io: &mut Io<'_, '_>) -> Result<bool, StopCause> {
        let mut moved = false;
        if self.is_abandoned || self.overtaken_by.is_some() {
            moved |= self.is_abandoned && self.jobs.discard(io);
            return Ok(moved | self.flush()?);
        }
        self.jobs.go_on(io);
        let call = &mut Call { jobs: &mut self.jobs, io };
        for channel in &mut self.channels {
            moved |= channel.dispatch(&self.ctx, &mut self.arrivals, call)?;
            if matches!(self.phase, Phase::Answering | Phase::Answered) {
                moved |= channel.combine(&self.ctx, call)?;
            }
            moved |= channel.commands.flush().map_err(|_| EngineError::Closed)?;
        }
        Ok(moved)
    }

    /// Hands commands over as far as the FIFOs have room; whether there were any.
    ///
    /// # Errors
    /// [`EngineError::Closed`].
    pub(super) fn flush(&mut self) -> Result<bool> {
        let of_channels = self.channels.iter_mut().map(|c| &mut c.commands);
        let mut moved = false;
        for commands in of_channels.chain([&mut self.signals.commands]) {
            moved |= commands.flush().map_err(|_| EngineError::Closed)?;
        }
        Ok(moved)
    }

    /// The ranks from which something is awaited.
    fn suspects(&self) -> Vec<u32> {
        let ctx = &self.ctx;
        if let Some(rank) = self.overtaken_by {
            return vec![rank];
        }
        let of = |c: &Channel| match self.phase {
            Phase::Dispatched => c.suspects_of_tokens(ctx),
            Phase::Answering | Phase::Answered => c.suspects_of_answers(ctx),
            Phase::Idle | Phase::Collected => Vec::new(),
        };
        match self.phase {
            Phase::Idle | Phase::Collected => self.not_joined().collect(),
            _ => self.channels.iter().flat_map(of).collect(),
        }
    }

    /// Traffic of this rank in all exchanges so far.
    pub fn traffic(&self) -> Traffic {
        let mut all = Traffic::default();
        self.channels.iter().for_each(|c| c.count(&self.ctx, &mut all));
        all
    }

    /// Whether jobs are under way: what the caller gave for them is in use. None begin while the
    /// machine rests.
    pub fn is_at_work(&self) -> bool {
        self.jobs.are_under_way()
    }

    pub fn set_resting(&mut self, resting: bool) {
        self.jobs.resting = resting;
    }

    /// The worker has stopped.
    pub(super) fn abort(&mut self) {
        self.jobs.abort();
    }

    /// Nothing will be sent any more; whether all that was has arrived.
    pub fn has_left(&mut self) -> bool {
        let of_channels = self.channels.iter_mut().map(|c| &mut c.commands);
        let all = of_channels.chain([&mut self.signals.commands]);
        all.map(Commands::has_left).fold(true, |all, one| all & one)
    }

    fn stop(&mut self, stop: StopCause) -> EngineError {
        match stop {
            StopCause::Engine(error) => error,
            StopCause::Ahead { .. } => EngineError::Closed,
            StopCause::Peer { rank, cause } => {
                let cause =
                    format!("it broke the protocol: {cause}; run the same version everywhere");
                self.fail(rank, cause);
                self.check().err().unwrap_or(EngineError::Closed)
            }
        }
    }
}
