//! One rank of a high-throughput exchange, without a thread and without a clock: its *device*. What it does, it does in
//! [`Machine::step`], which whoever has a clock calls; what it sends are commands in the FIFOs of a proxy.

mod checks;

use std::{
    sync::{atomic::Ordering::Acquire, Arc, OnceLock},
    time::Duration,
};

use fabric_engine::{EngineError, Region, Result, Time};
use fabric_proxy::{fifo::Pusher, raw::AtomicWords};

use super::{
    channel::Channel,
    commands::Commands,
    context::{Arrivals, Context, Given, Io, Stop},
    jobs::{Call, Jobs, Worker},
    layout::Layout,
    signals::Signals,
    slots::{head, put_experts, Kind},
    spec::Spec,
    workers::Prompt,
};
use crate::{
    exchange::Dispatched,
    kernels::{store, Float, Part, PartMut},
    routes::{Order, Routes},
};

/// What the caller has done last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Idle,
    Dispatched,
    Collected,
    Answering,
    Answered,
}

/// Timeouts after which somebody is given up even if all are in calls.
const LAST: u32 = 8;
/// Timeouts after which a rank whose jobs don't get done gives itself up: well before those who began to wait sooner name
/// one that merely waits, too (RS-4).
const OWN: u32 = LAST / 2;

/// Why an exchange has ended for good.
#[derive(Clone, Debug)]
pub struct Broken {
    /// Who is to blame.
    pub rank: u32,
    pub cause: String,
}

/// Rows that a rank has sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Its tokens, to other nodes.
    pub rail_tokens: u64,
    /// Tokens to ranks of its node.
    pub node_tokens: u64,
    /// Answers to ranks of its node.
    pub node_answers: u64,
    /// Sums to other nodes.
    pub rail_sums: u64,
}

/// One rank of an exchange.
#[derive(Debug)]
pub struct Machine {
    ctx: Context,
    channels: Vec<Channel>,
    signals: Signals,
    step: Step,
    tokens: u32,
    arrivals: Arrivals,
    jobs: Jobs,
    broken: Arc<OnceLock<Broken>>,
    /// Ranks that are gone, and why. Who has done its part may leave.
    gone: Vec<(u32, String)>,
    /// Since when nothing has happened.
    quiet_since: Option<Time>,
}

impl Machine {
    /// `region` is this rank's part of symmetric memory, `words` its atomic words, `pushers` one FIFO for each channel and
    /// one more, which nobody else pushes into and nobody has pushed into.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] for a spec that can't be, or too little of either.
    pub fn new(
        spec: Spec,
        rank: u32,
        region: Region,
        words: AtomicWords,
        pushers: Vec<Pusher>,
    ) -> Result<Self> {
        let worker = Box::new(Prompt::new(spec, region.clone()));
        Self::with_worker(spec, rank, &region, words, pushers, worker)
    }

    /// As [`Machine::new`], with rows wherever the worker reaches them.
    ///
    /// # Errors
    /// As [`Machine::new`].
    pub fn with_worker(
        spec: Spec,
        rank: u32,
        region: &Region,
        words: AtomicWords,
        mut pushers: Vec<Pusher>,
        worker: Box<dyn Worker>,
    ) -> Result<Self> {
        let layout = Layout::new(spec)?;
        if rank >= spec.shape.ranks {
            return Err(EngineError::Invalid(format!(
                "rank {rank} is none of {}",
                spec.shape.ranks
            )));
        }
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
        let ctx = Context { spec, grid, layout, words, exchange: 0, metas: Vec::new() };
        let channel = |(i, pusher)| Channel::new(&ctx, i as u32, Commands::new(pusher));
        let channels = pushers.into_iter().enumerate().map(channel).collect();
        Ok(Self {
            arrivals: Arrivals::default(),
            ctx,
            channels,
            signals,
            step: Step::Idle,
            tokens: 0,
            jobs: Jobs::new(worker),
            broken: Arc::default(),
            gone: Vec::new(),
            quiet_since: None,
        })
    }

    pub fn spec(&self) -> &Spec {
        &self.ctx.spec
    }

    pub fn layout(&self) -> &Layout {
        &self.ctx.layout
    }

    /// Who has ended the exchange, if anybody.
    pub fn broken(&self) -> Option<&Broken> {
        self.broken.get()
    }

    /// The same, for whoever asks while a call is under way.
    pub(super) fn verdict(&self) -> Arc<OnceLock<Broken>> {
        Arc::clone(&self.broken)
    }

    /// Whether [`Machine::begin`] would be taken: the last exchange's tokens have left.
    pub fn may_begin(&self) -> bool {
        matches!(self.step, Step::Idle | Step::Collected)
            && self.channels.iter().all(Channel::is_settled)
    }

    /// Takes this rank's tokens: `parts` make up a row, `indices` are the experts of each token, `weights` 32-bit floats,
    /// one for each expert. Step on with the parts until they are [packed](Machine::is_packed).
    ///
    /// # Errors
    /// [`EngineError::Invalid`] for tokens that don't fit the shape, or out of turn.
    pub fn begin(
        &mut self,
        parts: &[Part<'_>],
        indices: &[i64],
        weights: Option<Part<'_>>,
    ) -> Result<()> {
        self.check_turn("dispatch_send")?;
        let routes = self.check_tokens(parts, indices, weights)?;
        self.start(&mut Io::Tokens(parts), &routes, indices, weights)
    }

    /// As [`Machine::begin`], with parts that kernels were told of.
    ///
    /// # Errors
    /// As [`Machine::begin`].
    pub fn begin_far(&mut self, indices: &[i64], weights: Option<Part<'_>>) -> Result<()> {
        self.check_turn("dispatch_send")?;
        let routes = self.check_routes(indices, weights)?;
        self.start(&mut Io::Far(Given::Tokens), &routes, indices, weights)
    }

    fn start(
        &mut self,
        io: &mut Io<'_, '_>,
        routes: &Routes,
        indices: &[i64],
        weights: Option<Part<'_>>,
    ) -> Result<()> {
        if !self.may_begin() {
            let text = "the tokens of the last exchange are still on their way; step on";
            return Err(EngineError::Invalid(text.into()));
        }
        self.ctx.exchange = self.ctx.exchange.wrapping_add(1);
        self.tokens = routes.tokens;
        self.arrivals = Arrivals::new(&self.ctx.spec);
        self.write_metas(indices, weights);
        self.step = Step::Dispatched;
        let call = &mut Call { jobs: &mut self.jobs, io };
        for channel in &mut self.channels {
            channel.begin(&self.ctx, routes, indices);
            if let Err(stop) = channel.pack(&self.ctx, call) {
                return Err(self.stop(stop));
            }
        }
        Ok(())
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

    /// Does what can be done now; whether that was anything. When nothing has happened for `timeout`, whoever is waited
    /// for and has been in no call for so long is given up. Who is waits for somebody else, who gives up whom he waits for.
    ///
    /// # Errors
    /// [`EngineError::PeerLost`]: somebody was given up, here or by others, and the exchange has ended for good.
    pub fn step(&mut self, now: Time, timeout: Duration, io: &mut Io<'_, '_>) -> Result<bool> {
        self.hear()?;
        let moved = match self.go_on(io) {
            Ok(moved) => moved,
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
            // Others wait for this rank, not it for them, until its rows have been seen to.
            if quiet >= timeout.saturating_mul(OWN) {
                let rank = self.ctx.grid.rank;
                self.fail(rank, format!("its device did nothing within {quiet:?}"));
                self.check()?;
            }
            return Ok(false);
        }
        let late = |rank: &u32| {
            // Whatever goes round in circles ends, too (RS-4).
            quiet >= timeout.saturating_mul(LAST) || self.signals.is_silent(*rank, now, timeout)
        };
        if quiet >= timeout {
            if let Some(rank) = suspects.into_iter().find(late) {
                let what = match self.step {
                    Step::Idle | Step::Dispatched => "tokens",
                    _ => "answers",
                };
                self.fail(
                    rank,
                    format!("it did not do its part in moving {what} within {quiet:?}"),
                );
                self.check()?;
            }
        }
        Ok(false)
    }

    /// The caller was elsewhere: what didn't happen meanwhile is nobody's fault.
    pub fn resume(&mut self) {
        self.quiet_since = None;
    }

    fn go_on(&mut self, io: &mut Io<'_, '_>) -> Result<bool, Stop> {
        let mut moved = false;
        self.jobs.go_on(io);
        let call = &mut Call { jobs: &mut self.jobs, io };
        for channel in &mut self.channels {
            if self.ctx.exchange > 0 {
                moved |= channel.dispatch(&self.ctx, &mut self.arrivals, call)?;
            }
            if matches!(self.step, Step::Answering | Step::Answered) {
                moved |= channel.combine(&self.ctx, call)?;
            }
            moved |= channel.commands.flush().map_err(|_| EngineError::Closed)?;
        }
        Ok(moved)
    }

    /// Whom something is awaited from.
    fn suspects(&self) -> Vec<u32> {
        let ctx = &self.ctx;
        let of = |c: &Channel| match self.step {
            Step::Dispatched => c.suspects_of_tokens(ctx),
            Step::Answering | Step::Answered => c.suspects_of_answers(ctx),
            Step::Idle | Step::Collected => Vec::new(),
        };
        self.channels.iter().flat_map(of).collect()
    }

    /// Where rows will be, once all lanes have said how many come.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] out of turn, or if an expert gets more rows than `order` has room for.
    pub fn arriving(&mut self, order: Order) -> Result<Option<Dispatched>> {
        self.check()?;
        if self.step != Step::Dispatched {
            return Err(self.out_of_turn("dispatch_recv"));
        }
        if !self.arrivals.are_known() {
            return Ok(None);
        }
        let begun = self.channels.iter().any(Channel::has_begun);
        self.arrivals.place(self.ctx.spec.shape.local_experts(), order, begun).map(Some)
    }

    /// Where rows are, once that was asked for.
    pub fn placing(&self) -> Option<Dispatched> {
        self.arrivals.placing().cloned()
    }

    /// What this rank has sent in all exchanges so far.
    pub fn traffic(&self) -> Traffic {
        let mut all = Traffic::default();
        self.channels.iter().for_each(|c| c.count(self.ctx.exchange, &mut all));
        all
    }

    /// Whether all rows have come, and all that pass through this rank have gone on; the next thing are answers then.
    pub fn is_collected(&mut self) -> bool {
        if self.step == Step::Dispatched && self.channels.iter().all(Channel::is_dispatched) {
            self.step = Step::Collected;
            for channel in &mut self.channels {
                channel.settled = Some(channel.commands.drain());
            }
        }
        self.step != Step::Dispatched
    }

    /// Answers come now. They lie where the rows were put.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] for answers that don't fit the shape, or out of turn.
    pub fn begin_answers(&mut self, answers: &Part<'_>) -> Result<()> {
        self.check_answers(answers)?;
        self.step = Step::Answering;
        Ok(())
    }

    /// As [`Machine::begin_answers`], of answers to so many rows, wherever they are.
    ///
    /// # Errors
    /// As [`Machine::begin_answers`].
    pub fn begin_far_answers(&mut self, rows: u64) -> Result<()> {
        self.check_far_answers(rows)?;
        self.step = Step::Answering;
        Ok(())
    }

    /// Whether nobody needs this rank's answers any more.
    pub fn is_answered(&mut self) -> bool {
        if self.step == Step::Answering && self.channels.iter().all(Channel::is_answered) {
            self.step = Step::Answered;
        }
        self.step != Step::Answering
    }

    /// Whether this rank's sums are made.
    pub fn is_summed(&self) -> bool {
        self.step == Step::Answered && self.channels.iter().all(Channel::is_summed)
    }

    /// Hands out the sums, which ends the exchange.
    ///
    /// # Errors
    /// As [`Machine::check_sums`].
    pub fn take_sums(&mut self, out: &mut PartMut<'_>, float: Float) -> Result<()> {
        self.check_sums(out, float)?;
        let wide = self.ctx.spec.shape.back.elements as usize;
        let sums = self.jobs.totals().chunks_exact(wide).take(self.tokens as usize);
        sums.enumerate().for_each(|(token, sum)| store(sum, out.row(token), float));
        self.step = Step::Idle;
        Ok(())
    }

    /// As [`Machine::take_sums`] of sums that lie where the worker put them: of how many tokens.
    ///
    /// # Errors
    /// [`EngineError::Invalid`], out of turn.
    pub fn take_far_sums(&mut self) -> Result<u32> {
        self.check_far_sums()?;
        self.step = Step::Idle;
        Ok(self.tokens)
    }

    /// Whether jobs are under way: what the caller gave for them is in use. None begin while the machine rests.
    pub fn is_at_work(&self) -> bool {
        self.jobs.are_under_way()
    }

    pub fn rest(&mut self, resting: bool) {
        self.jobs.resting = resting;
    }

    /// Nobody works for this rank any more.
    pub(super) fn abort(&mut self) {
        self.jobs.abort();
    }

    /// Gives a rank up. The exchange ends with it: who forwards, forwards for others. All are told whom it is about, so
    /// that they name the same one; that rank too, which may live.
    pub fn fail(&mut self, rank: u32, cause: String) {
        let mut news = false;
        let broken = self.broken.get_or_init(|| {
            news = true;
            Broken { rank, cause }
        });
        if !news {
            return;
        }
        tracing::warn!(rank, cause = %broken.cause, "a rank was given up");
        self.jobs.abort();
        self.signals.give_up(&self.ctx, rank);
        // What can't be told now is found out by the others themselves.
        let _ = self.signals.commands.flush();
    }

    /// Nothing will be sent any more; whether all that was has arrived.
    pub fn has_left(&mut self) -> bool {
        let broken = self.broken().is_some();
        let of_channels = self.channels.iter_mut().map(|c| &mut c.commands);
        // Tokens that will never be asked for needn't arrive.
        let of_channels = of_channels.filter(|_| !broken);
        let all = of_channels.chain([&mut self.signals.commands]);
        all.map(Commands::has_left).fold(true, |all, one| all & one)
    }

    /// A rank is gone. That ends the exchange once something is awaited of it.
    pub fn lose(&mut self, rank: u32, cause: String) {
        self.gone.push((rank, cause));
    }

    /// Whether somebody else has given up a rank.
    ///
    /// # Errors
    /// [`EngineError::PeerLost`] once the exchange has ended for good.
    pub fn hear(&mut self) -> Result<()> {
        let named = |rank: &u32| {
            let word = self.ctx.layout.given_up(*rank) as usize;
            self.ctx.words[word].load(Acquire) > 0
        };
        if let Some(rank) = (0..self.ctx.grid.ranks).find(named) {
            self.fail(rank, "another rank gave it up".into());
        }
        self.check()
    }

    fn stop(&mut self, stop: Stop) -> EngineError {
        match stop {
            Stop::Engine(error) => error,
            Stop::Peer { rank, cause } => {
                let cause =
                    format!("it broke the protocol: {cause}; run the same version everywhere");
                self.fail(rank, cause);
                self.check().err().unwrap_or(EngineError::Closed)
            }
        }
    }
}
