//! Actions that the state requests of the engine: executed without the state's lock, which the
//! engine's callbacks take.

use std::sync::{Arc, Weak};

use fabric_engine::{
    BatchObserver, EngineError, Expect, Local, Op, Outcome, Quiescence, Region, Remote, Submit,
};

use super::{
    link::{MessageKind, PeerEndpoint},
    Inner,
};

/// The purpose of a write, for waits until the memory that it reads is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WritePurpose {
    /// Rows for experts.
    Rows,
    /// Answers to rows.
    Answers,
    /// Blocks and counts.
    Control,
    /// That this rank waits for another, or has given the peer up. Its arrival is not required.
    Signal,
}

/// One write. Offsets are bytes, in the rows or in the blocks of both ranks, as the kind says. It
/// counts at the peer's counter for that kind.
#[derive(Clone, Copy, Debug)]
pub struct RemoteWrite {
    pub src: u64,
    pub dst: u64,
    pub len: u64,
    pub counts: MessageKind,
}

impl RemoteWrite {
    /// A count without bytes.
    pub fn count(counts: MessageKind) -> Self {
        Self { src: 0, dst: 0, len: 0, counts }
    }
}

#[derive(Debug)]
pub enum Action {
    /// Waits for `n` counts.
    Expect {
        endpoint: Arc<PeerEndpoint>,
        kind: MessageKind,
        n: u32,
    },
    Write {
        endpoint: Arc<PeerEndpoint>,
        write: RemoteWrite,
        purpose: WritePurpose,
    },
    /// Stores `words` at the start of the source range, then writes the range to the peer.
    WriteBlock {
        endpoint: Arc<PeerEndpoint>,
        words: Vec<u32>,
        write: RemoteWrite,
    },
    /// Revokes a peer's access to memory.
    Revoke {
        rank: u32,
        memory: Region,
    },
    /// Calls the state's heartbeat after one interval.
    ScheduleHeartbeat,
}

/// An engine operation whose outcome the state gets.
#[derive(Clone, Copy, Debug)]
pub enum Operation {
    Arrival(MessageKind),
    Write(WritePurpose, MessageKind),
}

impl Operation {
    /// Whether the memory that it reads is in use until it has ended.
    pub fn holds_source(self) -> bool {
        matches!(self, Self::Write(purpose, _) if purpose != WritePurpose::Signal)
    }
}

type PeerOperation = (Arc<PeerEndpoint>, Operation);

/// Operations for one call of the engine, and the arguments of each.
struct OperationBatch<T> {
    operations: Vec<PeerOperation>,
    arguments: Vec<T>,
}

impl<T> OperationBatch<T> {
    fn with_capacity(n: usize) -> Self {
        Self { operations: Vec::with_capacity(n), arguments: Vec::with_capacity(n) }
    }

    fn add(&mut self, endpoint: Arc<PeerEndpoint>, operation: Operation, arguments: T) {
        self.operations.push((endpoint, operation));
        self.arguments.push(arguments);
    }
}

/// Passes outcomes of a batch to the state.
struct OutcomeObserver {
    inner: Weak<Inner>,
    operations: Vec<PeerOperation>,
}

impl BatchObserver for OutcomeObserver {
    fn on_events(&self, events: Vec<(usize, Outcome)>) {
        let Some(inner) = self.inner.upgrade() else { return };
        inner.on_outcomes(events.into_iter().map(|(at, outcome)| {
            let (endpoint, operation) = &self.operations[at];
            (&**endpoint, *operation, outcome)
        }));
    }
}

impl Inner {
    /// Submits all writes in one call of the engine, and all expectations in another.
    pub(super) fn run(self: &Arc<Self>, actions: Vec<Action>) {
        if actions.is_empty() {
            return;
        }
        let n = actions.iter().filter(|action| matches!(action, Action::Expect { .. })).count();
        let mut writes = OperationBatch::with_capacity(actions.len() - n);
        let mut expected = OperationBatch::with_capacity(n);
        let mut revoked = Vec::new();
        for action in actions {
            match action {
                Action::Expect { endpoint, kind, n } => {
                    expected.add(endpoint, Operation::Arrival(kind), (kind, n))
                }
                Action::Write { endpoint, write, purpose } => {
                    writes.add(endpoint, Operation::Write(purpose, write.counts), write);
                }
                Action::WriteBlock { endpoint, words, write } => {
                    let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
                    let operation = Operation::Write(WritePurpose::Control, write.counts);
                    match self.control.put(write.src, &bytes) {
                        Ok(()) => writes.add(endpoint, operation, write),
                        Err(e) => self.on_refused(&[(endpoint, operation)], &e),
                    }
                }
                Action::ScheduleHeartbeat => self.schedule_heartbeat(),
                Action::Revoke { rank, memory } => revoked.push((rank, memory)),
            }
        }
        self.write(writes);
        // A rank is told that it was given up before its own writes fail.
        for (rank, memory) in revoked {
            self.revoke(rank, &memory);
        }
        self.expect(expected);
    }

    fn write(self: &Arc<Self>, batch: OperationBatch<RemoteWrite>) {
        let OperationBatch { operations, arguments } = batch;
        if operations.is_empty() {
            return;
        }
        let observer = Arc::new(OutcomeObserver { inner: Arc::downgrade(self), operations });
        let writes = observer.operations.iter().zip(&arguments);
        let ops: Vec<Op<'_>> = writes.map(|((peer, _), write)| self.op(peer, write)).collect();
        let options = Submit { timeout: Some(self.timeout()), ..Submit::default() };
        if let Err(e) = self.engine.submit_batch(&ops, options, observer.clone()) {
            self.on_refused(&observer.operations, &e);
        }
    }

    fn op<'a>(&'a self, endpoint: &'a PeerEndpoint, write: &RemoteWrite) -> Op<'a> {
        let (local, remote) = match write.counts.is_rows() && write.len > 0 {
            true => (&self.rows, &endpoint.rows),
            false => (&self.control, &endpoint.control),
        };
        Op::Write {
            src: Local { region: local, offset: write.src },
            dst: Remote { region: remote, offset: write.dst },
            len: write.len,
            imm: Some(endpoint.counters[write.counts as usize].imm()),
        }
    }

    fn expect(self: &Arc<Self>, batch: OperationBatch<(MessageKind, u32)>) {
        let OperationBatch { operations, arguments } = batch;
        if operations.is_empty() {
            return;
        }
        let observer = Arc::new(OutcomeObserver { inner: Arc::downgrade(self), operations });
        let mut all = Vec::with_capacity(arguments.len());
        for ((endpoint, _), (kind, n)) in observer.operations.iter().zip(arguments) {
            let counter = &endpoint.exported.counters[kind as usize];
            all.push(Expect { counter, n, writers: std::slice::from_ref(&endpoint.peer) });
        }
        if let Err(e) = self.engine.expect_batch(&all, self.max_wait(), observer.clone()) {
            self.on_refused(&observer.operations, &e);
        }
    }

    /// The engine has begun none of these operations.
    fn on_refused(self: &Arc<Self>, operations: &[PeerOperation], error: &EngineError) {
        self.on_outcomes(operations.iter().flat_map(|(endpoint, operation)| {
            let outcomes =
                [Outcome::Ended(Err(error.clone())), Outcome::Quiesced(Quiescence::Quiesced)];
            outcomes.map(|outcome| (&**endpoint, *operation, outcome))
        }));
    }

    fn revoke(self: &Arc<Self>, rank: u32, memory: &Region) {
        match memory.revoke() {
            Ok(handle) => {
                let weak = Arc::downgrade(self);
                handle.on_done(move |end| {
                    if let Some(inner) = weak.upgrade() {
                        inner.on_revoked(rank, end);
                    }
                });
            }
            Err(e) => self.on_revoked(rank, Err(e)),
        }
    }
}
