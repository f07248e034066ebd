//! One peer of an exchange: what goes there, and what comes from there.

use std::{
    collections::VecDeque,
    fmt,
    sync::{Arc, OnceLock},
};

use fabric_engine::{
    api::CounterRef, Counter, Peer, PeerMapping, Region, RemoteRegion, StoreGuard,
};

use super::{
    actions::{Action, RemoteWrite, WritePurpose},
    heartbeat::PeerActivity,
};
use crate::waiting_signals::{SignalCount, WaitingSignals};

/// Number of kinds, and of counters of a peer.
pub const MESSAGE_KINDS: usize = 7;

/// Kind of message between two ranks; each kind has its own counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessageKind {
    /// The number of rows for each expert.
    Routes,
    /// The rows.
    Rows,
    /// Memory for rows that exceed the private slot.
    SlotOffer,
    /// The sender has read what arrived and sent its own rows: its memory may be written again.
    Fence,
    /// The experts' answers.
    Answers,
    /// The sender waits for another rank. A count without bytes, which is polled.
    Waiting,
    /// The sender has given the receiver up. A count without bytes, which is polled.
    GivenUp,
}

impl MessageKind {
    pub const ALL: [Self; MESSAGE_KINDS] = [
        Self::Routes,
        Self::Rows,
        Self::SlotOffer,
        Self::Fence,
        Self::Answers,
        Self::Waiting,
        Self::GivenUp,
    ];

    /// Whether its bytes go to the rows, not to the blocks.
    pub fn is_rows(self) -> bool {
        matches!(self, Self::Rows | Self::Answers)
    }
}

impl fmt::Display for MessageKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Routes => "its routes",
            Self::Rows => "its rows",
            Self::SlotOffer => "its slot offer",
            Self::Fence => "its fence",
            Self::Answers => "its experts' answers",
            Self::Waiting => "its waiting signal",
            Self::GivenUp => "its notice of giving this rank up",
        })
    }
}

/// The memory and counters that a peer may write. They are revoked with the link.
#[derive(Debug)]
pub struct ExportedRegions {
    pub control: Region,
    pub rows: Region,
    pub counters: Arc<Counters>,
}

pub type Counters = [Counter; MESSAGE_KINDS];

impl SignalCount for Counters {
    fn signals(&self) -> u64 {
        self[MessageKind::Waiting as usize].arrived()
    }
}

impl ExportedRegions {
    pub fn memory(&self) -> [Region; 2] {
        [self.control.clone(), self.rows.clone()]
    }
}

/// The regions of a peer. A rank that joins again has new ones (MR-2).
#[derive(Debug)]
pub struct PeerEndpoint {
    pub rank: u32,
    /// Unique among all links of this rank.
    pub link_id: u64,
    pub peer: Peer,
    pub control: RemoteRegion,
    pub rows: RemoteRegion,
    pub counters: [CounterRef; MESSAGE_KINDS],
    pub exported: ExportedRegions,
    /// In all exchanges of the two engines.
    pub waiting: Arc<WaitingSignals>,
    /// Mapping of the peer's rows for this rank's device, or the reason why there is none.
    pub stores: OnceLock<Result<Arc<PeerMapping>, String>>,
}

/// Rows of a source that have arrived, or will, and aren't handed out yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Index of the first one among the source's rows.
    pub first: u64,
    pub rows: u64,
    /// Offset of the first one, bytes.
    pub place: u64,
}

/// Rows of a source that are being handed out.
#[derive(Debug)]
pub struct RowBatch {
    pub source: u32,
    pub link_id: u64,
    pub chunks: Vec<Chunk>,
}

/// A present peer.
#[derive(Debug)]
pub struct PeerLink {
    pub endpoint: Arc<PeerEndpoint>,
    /// Number of exchanges with it, and of those with answers: all ranks leave combine out, or
    /// none.
    pub exchanges: u32,
    pub combines: u32,
    /// Whether the peer's fence has arrived and nothing was written since.
    pub open: bool,
    pub awaits_fence: bool,
    /// Number of writes of rows and answers in flight.
    pub data_in_flight: u32,
    /// Number of writes of blocks and counts in flight.
    pub control_in_flight: u32,
    pub activity: PeerActivity,
    pub outbound: OutboundState,
    pub inbound: InboundState,
    /// Number of rows to it in all exchanges, and of those that this rank's device stored.
    pub rows_out: u64,
    pub rows_stored: u64,
}

/// The state of what goes to a peer in one exchange.
#[derive(Debug, Default)]
pub struct OutboundState {
    pub rows: u64,
    pub first: u64,
    /// `PeerLink::combines` when this exchange began; its routes may leave later.
    pub combines: u32,
    /// The rows are packed.
    pub packed: bool,
    pub routed: bool,
    /// Rows already sent.
    pub sent: u64,
    /// Place and number of the next rows in the peer's shared buffer.
    pub slot_offer: Option<(u64, u64)>,
    /// Whether the peer's answers have arrived.
    pub answered: bool,
    /// Answers to its rows that are ready to be sent.
    pub answers: VecDeque<Answer>,
    /// The device stores the rows for the private slot.
    pub stored: bool,
}

/// Answers on their way to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Index of the first one in the shared buffer.
    pub place: u64,
    /// Index of the first row among those that the peer sent.
    pub first: u64,
    pub rows: u64,
}

/// The state of what comes from a peer in one exchange.
#[derive(Debug, Default)]
pub struct InboundState {
    /// Rows for each of this rank's experts, once known.
    pub counts: Option<Vec<u32>>,
    pub rows: u64,
    /// Index of its first row for this rank; answers go there.
    pub first: u64,
    /// Number of rows that have a place here.
    pub offered: u64,
    /// Number of chunks that are not counted. A count doesn't name its chunk, so chunks have
    /// arrived when all are counted.
    pub due: u32,
    pub chunks: VecDeque<Chunk>,
    /// Number of rows that were handed out.
    pub collected: u64,
}

impl PeerLink {
    pub fn new(endpoint: PeerEndpoint) -> Self {
        let activity = PeerActivity::after(&endpoint.waiting);
        Self {
            endpoint: Arc::new(endpoint),
            exchanges: 0,
            combines: 0,
            open: true,
            awaits_fence: false,
            data_in_flight: 0,
            control_in_flight: 0,
            activity,
            outbound: OutboundState::default(),
            inbound: InboundState::default(),
            rows_out: 0,
            rows_stored: 0,
        }
    }

    /// Whether there are rows to hand out. None is read before all chunks are counted (IC-2).
    pub fn has_rows(&self) -> bool {
        self.inbound.due == 0 && !self.inbound.chunks.is_empty()
    }

    /// The rows to hand out.
    pub fn batch(&self) -> Option<RowBatch> {
        let chunks = || self.inbound.chunks.iter().copied().collect();
        let (source, link_id) = (self.endpoint.rank, self.endpoint.link_id);
        self.has_rows().then(|| RowBatch { source, link_id, chunks: chunks() })
    }

    /// Begins direct stores to its rows, if the device reaches them.
    pub fn begin_stores(&self) -> Option<StoreGuard> {
        self.endpoint.stores.get()?.as_ref().ok()?.begin_stores()
    }

    pub fn count(&mut self, kind: MessageKind) -> Action {
        self.control_in_flight += 1;
        let (endpoint, write) = (Arc::clone(&self.endpoint), RemoteWrite::count(kind));
        Action::Write { endpoint, write, purpose: WritePurpose::Control }
    }

    pub fn write_block(&mut self, words: Vec<u32>, write: RemoteWrite) -> Action {
        self.control_in_flight += 1;
        Action::WriteBlock { endpoint: Arc::clone(&self.endpoint), words, write }
    }

    pub fn expect(&self, kind: MessageKind, n: u32) -> Action {
        Action::Expect { endpoint: Arc::clone(&self.endpoint), kind, n }
    }

    /// Waits for the peer's fence, unless it has arrived or is awaited already.
    pub fn await_fence(&mut self) -> Option<Action> {
        let waits = !self.open && !self.awaits_fence;
        self.awaits_fence |= waits;
        waits.then(|| self.expect(MessageKind::Fence, 1))
    }
}
