//! The low-latency exchange of one rank with all others: tokens to experts, and answers back.

mod actions;
mod admission;
pub(crate) mod blocks;
mod command_thread;
mod conditions;
mod departure;
mod device;
mod direct_stores;
mod heartbeat;
mod link;
mod outcomes;
mod rows;
mod state;
mod wait_times;

use std::{
    fmt,
    sync::{
        atomic::{AtomicU64, Ordering::Relaxed},
        Arc,
    },
    time::{Duration, Instant},
};

use fabric_engine::{
    locks::{Condvar, Mutex, MutexGuard},
    Counter, EngineError, Region, Result, TransferEngine,
};

use self::{command_thread::CommandThread, conditions::Condition, state::ExchangeState};
pub use self::{
    link::{MessageKind, MESSAGE_KINDS},
    state::LostPeer,
};
use crate::{
    checks,
    kernels::{Float, Part, PartMut},
    memory::Memory,
    phase::Phase,
    routes::{Order, Routes, RowPlacement},
    shape::Shape,
};

/// The default timeout.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Bytes that are packed before they are sent. Smaller batches cost more requests; larger ones
/// leave the link idle meanwhile.
const BATCH_NBYTES: u64 = 16 << 10;

/// Placement of the rows of a dispatch.
pub type Dispatched = Arc<RowPlacement>;

/// One rank of an exchange (fabric-lib §6).
///
/// Calls are made in the order `dispatch_send`, `dispatch_recv`, `combine_send`, `combine_recv`, by
/// one thread at a time. Combine may be left out if all ranks leave it out. Bytes move between
/// calls.
pub struct AllToAll {
    inner: Arc<Inner>,
    /// Held during a call.
    caller: Mutex<()>,
    /// Executes the commands of a device.
    command_thread: Mutex<Option<CommandThread>>,
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
    /// Holds the blocks.
    control: Region,
    rows: Region,
    /// Counts nothing: expectations on it time out at the next heartbeat.
    heartbeat_counter: Counter,
    state: Mutex<ExchangeState>,
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
    /// [`EngineError::Invalid`] for an invalid shape, or a rank out of range.
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
                "got {} bytes for rows, expected {}",
                rows.len(),
                memory.rows_nbytes()
            )));
        }
        let control = engine.alloc(memory.control_nbytes())?;
        let heartbeat_counter = engine.counter()?;
        let inner = Inner {
            engine,
            shape,
            memory,
            rank,
            control,
            rows,
            heartbeat_counter,
            state: Mutex::new(ExchangeState::new(shape, memory, rank)),
            changed: Condvar::new(),
            timeout: AtomicU64::new(TIMEOUT.as_nanos() as u64),
        };
        Ok(Self {
            inner: Arc::new(inner),
            caller: Mutex::new(()),
            command_thread: Mutex::new(None),
        })
    }

    pub fn shape(&self) -> &Shape {
        &self.inner.shape
    }

    pub fn memory(&self) -> &Memory {
        &self.inner.memory
    }

    /// Sets the timeout. A rank that neither sends awaited data nor waits for another rank for this
    /// long is given up. No wait exceeds twelve timeouts. Use one timeout on all ranks: a longer
    /// one sends heartbeats too rarely for the others.
    pub fn set_timeout(&self, timeout: Duration) {
        self.inner.timeout.store(checks::nanos(timeout), Relaxed);
    }

    /// Whether no write of a lost rank can land any more, and no write to one reads memory (MR-1).
    /// Until then, calls that use the same memory wait.
    pub fn is_quiesced(&self) -> bool {
        self.inner.state.lock().holds(Condition::Quiesced)
    }

    /// Whether `dispatch_send` would not have to wait.
    pub fn may_dispatch(&self) -> bool {
        self.inner.state.lock().holds(Condition::MayDispatch)
    }

    /// Sends tokens to the ranks of their experts. `parts` make up a row; `indices` are the experts
    /// of each token.
    ///
    /// Returns when the tokens have been copied; they move in the background.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] for tokens that don't fit the shape, before anything is sent, or in
    /// another phase.
    pub fn dispatch_send(&self, parts: &[Part<'_>], indices: &[i64]) -> Result<()> {
        let inner = &self.inner;
        let _caller = self.enter()?;
        let routes = Arc::new(Routes::new(&inner.shape, indices)?);
        inner.shape.check_tokens(parts, routes.tokens)?;
        let mut state = inner.state.lock();
        if matches!(state.phase, Phase::Dispatched | Phase::Answering | Phase::Answered) {
            return Err(state.phase.refuse("dispatch_send"));
        }
        inner.wait(&mut state, Condition::MayDispatch)?;
        let mut actions = Vec::new();
        state.begin(Arc::clone(&routes), &mut actions);
        let others: Vec<u32> = state.others().collect();
        drop(state);
        inner.run(actions);
        let (mut packed, mut nbytes) = (Vec::with_capacity(others.len() + 1), 0);
        let mut sent = Ok(());
        for rank in others.into_iter().chain([inner.rank]) {
            sent = inner.pack(parts, &routes, rank);
            if sent.is_err() {
                break;
            }
            packed.push(rank);
            nbytes += routes.rows_to(rank) * inner.shape.row_stride();
            if nbytes >= BATCH_NBYTES {
                inner.packed(packed.drain(..));
                nbytes = 0;
            }
        }
        // Also after an error: these rows are packed.
        inner.packed(packed.drain(..));
        sent
    }

    /// Number and placement of the arriving rows; `None` until every rank's routes have arrived.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] in another phase, or if an expert gets more rows than `order` has
    /// room for.
    pub fn arriving(&self, order: Order) -> Result<Option<Dispatched>> {
        let _caller = self.enter()?;
        self.inner.place(order)
    }

    /// As [`AllToAll::arriving`], waiting for the routes.
    pub fn wait_arriving(&self, order: Order) -> Result<Dispatched> {
        let _caller = self.enter()?;
        self.inner.state.lock().wait_times.begin();
        loop {
            if let Some(placing) = self.inner.place(order)? {
                return Ok(placing);
            }
            self.inner.wait(&mut self.inner.state.lock(), Condition::Routes)?;
        }
    }

    /// Copies newly arrived rows to `out`, which has the same parts of a row as in `dispatch_send`;
    /// true when those were the last. Rows of a rank that was lost meanwhile are zeros.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] for buffers that are too small, or in another phase.
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
            self.inner.wait(&mut self.inner.state.lock(), Condition::Rows)?;
        }
    }

    /// Sends the answers to all rows, in the order in which `dispatch_recv` put the rows.
    ///
    /// Returns when they have been copied; waits if the shared buffer is smaller than all of them.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] for answers that don't fit the shape, or in another phase.
    pub fn combine_send(&self, answers: Part<'_>) -> Result<()> {
        let _caller = self.enter()?;
        while !self.inner.answer(answers)? {
            self.inner.wait(&mut self.inner.state.lock(), Condition::AnswersSent)?;
        }
        Ok(())
    }

    /// As [`AllToAll::combine_send`], without waiting: true when all answers were sent.
    pub fn combine_some(&self, answers: Part<'_>) -> Result<bool> {
        let _caller = self.enter()?;
        self.inner.answer(answers)
    }

    /// How long the last receiving call waited for each rank: from its beginning to the rank's last
    /// message.
    pub fn wait_times(&self) -> Vec<Duration> {
        self.inner.state.lock().wait_times.by_rank().to_vec()
    }

    /// Whether all answers have arrived.
    pub fn answered(&self) -> bool {
        let state = self.inner.state.lock();
        state.phase == Phase::Answered && state.holds(Condition::Answers)
    }

    /// Copies single answers, `topk` rows for each of this rank's tokens: zeros for index -1, and
    /// for lost ranks. Call it before [`AllToAll::combine_recv`]; the gradient of a weight needs
    /// it.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] for buffers that are too small, or in another phase.
    pub fn combine_answers(&self, out: &mut PartMut<'_>) -> Result<()> {
        let _caller = self.enter()?;
        let inner = &self.inner;
        let mut state = inner.state.lock();
        if state.phase != Phase::Answered {
            return Err(state.phase.refuse("combine_answers"));
        }
        inner.shape.check_answer_buffer(out, state.routes.row_of.len() as u64)?;
        state.wait_times.begin();
        inner.wait(&mut state, Condition::Answers)?;
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
    /// [`EngineError::Invalid`] for weights or a buffer that don't fit, or in another phase.
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
        state.wait_times.begin();
        inner.wait(&mut state, Condition::Answers)?;
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
            let text = "a device executes this exchange; make another one for the host";
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

    /// Records that the rows for these ranks are packed, and sends them.
    fn packed(self: &Arc<Self>, ranks: impl Iterator<Item = u32>) {
        let mut actions = Vec::new();
        let mut state = self.state.lock();
        actions.reserve(ranks.size_hint().0);
        ranks.for_each(|rank| state.packed(rank, &mut actions));
        drop(state);
        self.run(actions);
    }

    /// Computes the placement of rows, once every rank's routes are known.
    fn place(&self, order: Order) -> Result<Option<Dispatched>> {
        let mut state = self.state.lock();
        if state.phase != Phase::Dispatched {
            return Err(state.phase.refuse("dispatch_recv"));
        }
        let begun = state.here().any(|l| l.inbound.collected > 0);
        if let Some(placing) = state.placing.as_ref().filter(|p| p.order == order || begun) {
            if placing.order != order {
                let text = "rows are being handed out in another order; go on with that";
                return Err(EngineError::Invalid(text.into()));
            }
            return Ok(Some(Arc::clone(placing)));
        }
        if !state.holds(Condition::Routes) {
            return Ok(None);
        }
        let placing = RowPlacement::new(self.shape.local_experts(), state.incoming(), order)?;
        let placing = Arc::new(placing);
        state.placing = Some(Arc::clone(&placing));
        Ok(Some(placing))
    }

    /// Waits for a condition. Awaited messages have deadlines of their own.
    ///
    /// # Errors
    /// [`EngineError::NotQuiesced`] if memory of a lost rank is not quiesced within the timeout
    /// (MR-1).
    fn wait(
        self: &Arc<Self>,
        state: &mut MutexGuard<'_, ExchangeState>,
        condition: Condition,
    ) -> Result<()> {
        if state.holds(condition) {
            return Ok(());
        }
        state.awaited.push(condition);
        let waited = self.wait_awaited(state, condition);
        state.end_wait(condition);
        waited
    }

    /// As [`Inner::wait`], for a condition in `ExchangeState::awaited`.
    fn wait_awaited(
        self: &Arc<Self>,
        state: &mut MutexGuard<'_, ExchangeState>,
        condition: Condition,
    ) -> Result<()> {
        let mut actions = Vec::new();
        state.start_heartbeat(&mut actions);
        MutexGuard::unlocked(state, || self.run(actions));
        let mut blocked_since = None;
        while !state.holds(condition) {
            if !state.blocked_on_quiesce(condition) {
                blocked_since = None;
                // A rank may be lost meanwhile, so check again.
                self.changed.wait_for(state, self.timeout());
                continue;
            }
            let deadline = *blocked_since.get_or_insert_with(Instant::now) + self.timeout();
            if self.changed.wait_until(state, deadline).timed_out() && !state.holds(condition) {
                return Err(EngineError::NotQuiesced {
                    what: "memory that is shared with a lost rank".into(),
                    after: self.timeout(),
                    cause: format!(
                        "ranks {:?} may still access it, and {} failed writes may still read it",
                        state.revoking, state.failed_in_flight
                    ),
                });
            }
        }
        Ok(())
    }
}
