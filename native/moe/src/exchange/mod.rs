//! The exchange of one rank with all others: tokens go out, tokens come in; answers go out, answers
//! come in.

mod act;
mod admission;
pub(crate) mod blocks;
mod device;
mod heard;
mod heartbeat;
mod link;
mod parting;
mod rows;
mod serve;
mod state;
mod stores;
mod waits;

use std::{
    fmt,
    sync::{
        atomic::{AtomicU64, Ordering::Relaxed},
        Arc,
    },
    time::{Duration, Instant},
};

use fabric_engine::{Counter, EngineError, Region, Result, TransferEngine};
use parking_lot::{Condvar, Mutex, MutexGuard};

pub use self::{
    link::{Stage, STAGES},
    state::Lost,
};
use self::{serve::Server, state::State, waits::Until};
use crate::{
    checks,
    kernels::{Float, Part, PartMut},
    memory::Memory,
    phase::Phase,
    routes::{Order, Placing, Routes},
    shape::Shape,
};

/// Until told otherwise.
const TIMEOUT: Duration = Duration::from_secs(30);
/// What has been copied leaves when it is so many bytes: a request costs as much as copying some
/// hundreds, and while these are copied the link may be idle.
const AT_ONE_GO: u64 = 16 << 10;

/// What a dispatch has brought.
pub type Dispatched = Arc<Placing>;

/// One rank of an exchange (fabric-lib §6).
///
/// Calls come in turns: `dispatch_send`, `dispatch_recv`, `combine_send`, `combine_recv`, from one
/// thread at a time; combine may be left out if all ranks do. What is between them runs while bytes
/// move.
pub struct AllToAll {
    inner: Arc<Inner>,
    /// One call at a time.
    caller: Mutex<()>,
    /// Hears what a device has done.
    server: Mutex<Option<Server>>,
}

impl fmt::Debug for AllToAll {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

pub(crate) struct Inner {
    engine: Arc<TransferEngine>,
    shape: Shape,
    memory: Memory,
    rank: u32,
    /// The blocks, which the host writes and reads.
    control: Region,
    /// The rows.
    rows: Region,
    /// Counts nothing: what is expected of it ends when a beat is over.
    pulse: Counter,
    state: Mutex<State>,
    changed: Condvar,
    /// Nanoseconds.
    timeout: AtomicU64,
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AllToAll(rank {} of {})", self.rank, self.shape.ranks)
    }
}

impl AllToAll {
    /// Allocates this rank's part of the memory.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] for a shape that can't be, or a rank that isn't one.
    pub fn new(engine: Arc<TransferEngine>, shape: Shape, rank: u32) -> Result<Self> {
        let rows = engine.alloc(Memory::new(shape)?.rows_nbytes())?;
        Self::over(engine, shape, rank, rows)
    }

    /// As [`AllToAll::new`], with rows in memory that was registered with the engine, of
    /// [`Memory::rows_nbytes`] bytes.
    ///
    /// # Errors
    /// As [`AllToAll::new`]; [`EngineError::Invalid`] for a region of another size.
    pub fn over(
        engine: Arc<TransferEngine>,
        shape: Shape,
        rank: u32,
        rows: Region,
    ) -> Result<Self> {
        let memory = Memory::new(shape)?;
        checks::check_rank(rank, shape.ranks)?;
        if rows.len() != memory.rows_nbytes() {
            return Err(EngineError::Invalid(format!(
                "{} bytes for rows; register {}",
                rows.len(),
                memory.rows_nbytes()
            )));
        }
        let control = engine.alloc(memory.control_nbytes())?;
        let pulse = engine.counter()?;
        let inner = Inner {
            engine,
            shape,
            memory,
            rank,
            control,
            rows,
            pulse,
            state: Mutex::new(State::new(shape, memory, rank)),
            changed: Condvar::new(),
            timeout: AtomicU64::new(TIMEOUT.as_nanos() as u64),
        };
        Ok(Self { inner: Arc::new(inner), caller: Mutex::new(()), server: Mutex::new(None) })
    }

    pub fn shape(&self) -> &Shape {
        &self.inner.shape
    }

    pub fn memory(&self) -> &Memory {
        &self.inner.memory
    }

    /// How long ranks may be apart: a rank that does not do its part for this long is given up. A
    /// rank that waits for another one signals so and is not given up in its place. No wait exceeds
    /// twelve times this. Use one timeout on all ranks: a longer one sends signals too rarely for
    /// the others.
    pub fn set_timeout(&self, timeout: Duration) {
        let nanos = timeout.as_nanos().min(u128::from(u64::MAX)) as u64;
        self.inner.timeout.store(nanos, Relaxed);
    }

    /// Whether nothing of lost ranks can land here any more, and nothing on its way to them is read
    /// (MR-1). Until then, what would use the same memory waits.
    pub fn quiet(&self) -> bool {
        self.inner.state.lock().holds(Until::Quiet)
    }

    /// Whether `dispatch_send` would not have to wait.
    pub fn may_dispatch(&self) -> bool {
        self.inner.state.lock().holds(Until::MayDispatch)
    }

    /// Sends tokens to the ranks of their experts. `parts` make up a row; `indices` are the experts
    /// of each token.
    ///
    /// Returns when the tokens have been copied; they move in the background.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] for tokens that don't fit the shape, before anything is sent, or
    /// out of turn.
    pub fn dispatch_send(&self, parts: &[Part<'_>], indices: &[i64]) -> Result<()> {
        let inner = &self.inner;
        let _caller = self.enter()?;
        let routes = Arc::new(Routes::new(&inner.shape, indices)?);
        inner.shape.check_tokens(parts, routes.tokens)?;
        let mut state = inner.state.lock();
        if matches!(state.phase, Phase::Dispatched | Phase::Answering | Phase::Answered) {
            return Err(state.phase.refuse("dispatch_send"));
        }
        inner.wait(&mut state, Until::MayDispatch)?;
        let mut acts = Vec::new();
        state.begin(Arc::clone(&routes), &mut acts);
        let others: Vec<u32> = state.others().collect();
        drop(state);
        inner.run(acts);
        let (mut packed, mut nbytes) = (Vec::with_capacity(others.len() + 1), 0);
        let mut sent = Ok(());
        for rank in others.into_iter().chain([inner.rank]) {
            sent = inner.pack(parts, &routes, rank);
            if sent.is_err() {
                break;
            }
            packed.push(rank);
            nbytes += routes.rows_to(rank) * inner.shape.row_stride();
            if nbytes >= AT_ONE_GO {
                inner.packed(packed.drain(..));
                nbytes = 0;
            }
        }
        // Whatever became of the others.
        inner.packed(packed.drain(..));
        sent
    }

    /// How many rows come, and where they will be; `None` until every rank's routes are here.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] out of turn, or if an expert gets more rows than `order` has room
    /// for.
    pub fn arriving(&self, order: Order) -> Result<Option<Dispatched>> {
        let _caller = self.enter()?;
        self.inner.place(order)
    }

    /// As [`AllToAll::arriving`], waiting for the routes.
    pub fn wait_arriving(&self, order: Order) -> Result<Dispatched> {
        let _caller = self.enter()?;
        loop {
            if let Some(placing) = self.inner.place(order)? {
                return Ok(placing);
            }
            self.inner.wait(&mut self.inner.state.lock(), Until::Routes)?;
        }
    }

    /// Hands out the rows that have come since; true when those were the last. `out` has the parts
    /// of a row, as `dispatch_send` was given them. Rows of a rank that was lost on the way are
    /// zeros.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] for room that doesn't suffice, or out of turn.
    pub fn collect(&self, out: &mut [PartMut<'_>]) -> Result<bool> {
        let _caller = self.enter()?;
        self.inner.collect(out)
    }

    /// As [`AllToAll::collect`], until all rows are handed out.
    pub fn dispatch_recv(&self, out: &mut [PartMut<'_>]) -> Result<Dispatched> {
        let _caller = self.enter()?;
        loop {
            if self.inner.collect(out)? {
                let state = self.inner.state.lock();
                return state.placing.clone().ok_or_else(|| state.phase.refuse("dispatch_recv"));
            }
            self.inner.wait(&mut self.inner.state.lock(), Until::Rows)?;
        }
    }

    /// Sends the answers to all rows, which lie where `dispatch_recv` put the rows.
    ///
    /// Returns when they have been copied; waits for room where the shared buffer is smaller than
    /// all of them.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] for answers that don't fit the shape, or out of turn.
    pub fn combine_send(&self, answers: Part<'_>) -> Result<()> {
        let _caller = self.enter()?;
        while !self.inner.answer(answers)? {
            self.inner.wait(&mut self.inner.state.lock(), Until::AnswersLeft)?;
        }
        Ok(())
    }

    /// As [`AllToAll::combine_send`], without waiting: true when all answers were sent.
    pub fn combine_some(&self, answers: Part<'_>) -> Result<bool> {
        let _caller = self.enter()?;
        self.inner.answer(answers)
    }

    /// Whether every answer has come.
    pub fn answered(&self) -> bool {
        let state = self.inner.state.lock();
        state.phase == Phase::Answered && state.holds(Until::Answers)
    }

    /// The answers one by one, `topk` rows for each of this rank's tokens: zeros where its index
    /// was -1, and from lost ranks. Before [`AllToAll::combine_recv`]; the gradient of a weight
    /// needs them.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] for room that doesn't suffice, or out of turn.
    pub fn combine_answers(&self, out: &mut PartMut<'_>) -> Result<()> {
        let _caller = self.enter()?;
        let inner = &self.inner;
        let mut state = inner.state.lock();
        if state.phase != Phase::Answered {
            return Err(state.phase.refuse("combine_answers"));
        }
        inner.shape.check_answer_buffer(out, state.routes.row_of.len() as u64)?;
        inner.wait(&mut state, Until::Answers)?;
        let routes = Arc::clone(&state.routes);
        let missing = state.missing();
        drop(state);
        inner.single(&routes, &missing, out)
    }

    /// For each of this rank's tokens the sum of its experts' answers, each times its weight:
    /// 32-bit floats, `topk` for each token. Returns the ranks whose answers are left out, since
    /// they were lost.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] for weights or room that don't fit, or out of turn.
    pub fn combine_recv(
        &self,
        weights: Option<Part<'_>>,
        out: &mut PartMut<'_>,
        float: Float,
    ) -> Result<Vec<u32>> {
        let _caller = self.enter()?;
        let inner = &self.inner;
        let mut state = inner.state.lock();
        if state.phase != Phase::Answered {
            return Err(state.phase.refuse("combine_recv"));
        }
        let tokens = state.routes.tokens;
        inner.shape.check_sums(out, float, tokens)?;
        inner.shape.check_weights(weights, tokens)?;
        inner.wait(&mut state, Until::Answers)?;
        let routes = Arc::clone(&state.routes);
        let missing = state.missing();
        let left_out = state.left_out(&missing);
        drop(state);
        inner.sum(&routes, &missing, weights, out, float)?;
        inner.state.lock().phase = Phase::Idle;
        Ok(left_out)
    }

    fn enter(&self) -> Result<MutexGuard<'_, ()>> {
        if self.inner.state.lock().device.is_some() {
            let text = "a device carries this exchange out; make another one for the host";
            return Err(EngineError::Invalid(text.into()));
        }
        self.alone()
    }

    fn alone(&self) -> Result<MutexGuard<'_, ()>> {
        checks::enter(&self.caller)
    }
}

impl Inner {
    pub(crate) fn timeout(&self) -> Duration {
        Duration::from_nanos(self.timeout.load(Relaxed))
    }

    /// The rows for these ranks lie ready.
    fn packed(self: &Arc<Self>, ranks: impl Iterator<Item = u32>) {
        let mut acts = Vec::new();
        let mut state = self.state.lock();
        acts.reserve(ranks.size_hint().0);
        ranks.for_each(|rank| state.packed(rank, &mut acts));
        drop(state);
        self.run(acts);
    }

    /// Where rows go, once every rank's routes are known.
    fn place(&self, order: Order) -> Result<Option<Dispatched>> {
        let mut state = self.state.lock();
        if state.phase != Phase::Dispatched {
            return Err(state.phase.refuse("dispatch_recv"));
        }
        let begun = state.here().any(|l| l.inward.collected > 0);
        if let Some(placing) = state.placing.as_ref().filter(|p| p.order == order || begun) {
            if placing.order != order {
                let text = "rows are being handed out in another order; go on with that";
                return Err(EngineError::Invalid(text.into()));
            }
            return Ok(Some(Arc::clone(placing)));
        }
        if !state.holds(Until::Routes) {
            return Ok(None);
        }
        let placing = Placing::new(self.shape.local_experts(), state.incoming(), order)?;
        let placing = Arc::new(placing);
        state.placing = Some(Arc::clone(&placing));
        Ok(Some(placing))
    }

    /// Waits for what comes, or is given up, by a deadline of its own.
    ///
    /// # Errors
    /// [`EngineError::NotQuiesced`] if memory is needed that a lost rank doesn't let go of in time
    /// (MR-1).
    fn wait(self: &Arc<Self>, state: &mut MutexGuard<'_, State>, until: Until) -> Result<()> {
        if !state.holds(until) {
            let mut acts = Vec::new();
            state.awaited = Some(until);
            state.start_pulse(&mut acts);
            MutexGuard::unlocked(state, || self.run(acts));
        }
        let mut hangs_since = None;
        while !state.holds(until) {
            state.awaited = Some(until);
            if !state.hangs_on_quiet(until) {
                hangs_since = None;
                // It may come to hang on a lost rank: look again.
                self.changed.wait_for(state, self.timeout());
                continue;
            }
            let deadline = *hangs_since.get_or_insert_with(Instant::now) + self.timeout();
            if self.changed.wait_until(state, deadline).timed_out() && !state.holds(until) {
                state.awaited = None;
                return Err(EngineError::NotQuiesced {
                    what: "memory that goes to a lost rank, or comes from it,".into(),
                    after: self.timeout(),
                    cause: format!(
                        "ranks {:?} have not let go of it, and {} writes that failed are under way",
                        state.revoking, state.unsettled
                    ),
                });
            }
        }
        state.awaited = None;
        Ok(())
    }
}
