//! One peer of an exchange: what goes there, and what comes from there.

use std::{
    collections::VecDeque,
    fmt,
    sync::{Arc, OnceLock},
};

use fabric_engine::{api::CounterRef, Aperture, Counter, Peer, Region, RemoteRegion, Stay};

use super::{
    act::{Act, Load, Piece},
    heartbeat::PeerActivity,
};

/// Counters of each pair of ranks.
pub const STAGES: usize = 6;

/// What one rank hears from another, each on a counter of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// How many rows come for each expert.
    Routes,
    /// The rows.
    Rows,
    /// Where the rows go that don't fit into the private slot.
    Grant,
    /// That its part of the memory may be written again: it has read what came, and sent what lay
    /// there.
    Fence,
    /// The experts' answers.
    Answers,
    /// That it waits for another rank: only a count, which is polled.
    Waits,
}

impl Stage {
    pub const ALL: [Self; STAGES] =
        [Self::Routes, Self::Rows, Self::Grant, Self::Fence, Self::Answers, Self::Waits];

    /// Whether what is written lies among the rows, and not among the blocks.
    pub fn is_rows(self) -> bool {
        matches!(self, Self::Rows | Self::Answers)
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Routes => "its routes",
            Self::Rows => "its rows",
            Self::Grant => "its grant of room for rows",
            Self::Fence => "its word that its memory may be written again",
            Self::Answers => "its experts' answers",
            Self::Waits => "its word that it waits for another rank",
        })
    }
}

/// The memory that a peer may use. It is revoked with the link.
#[derive(Debug)]
pub struct Ours {
    pub control: Region,
    pub rows: Region,
    pub counters: [Counter; STAGES],
}

impl Ours {
    /// All that the peer can write.
    pub fn memory(&self) -> [Region; 2] {
        [self.control.clone(), self.rows.clone()]
    }
}

/// The regions of a peer. A rank that joins again has new ones (MR-2).
#[derive(Debug)]
pub struct Wire {
    pub rank: u32,
    pub life: u64,
    pub peer: Peer,
    pub control: RemoteRegion,
    pub rows: RemoteRegion,
    pub counters: [CounterRef; STAGES],
    pub ours: Ours,
    /// Where this rank's device stores to the peer's rows itself, or why it doesn't; nothing until
    /// that is known.
    pub stores: OnceLock<Result<Arc<Aperture>, String>>,
}

/// Rows of a source that have come, or will, and aren't handed out yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// The first, counted among the source's rows, and how many.
    pub first: u64,
    pub rows: u64,
    /// Where they begin, bytes.
    pub place: u64,
}

/// Rows of a source that are being handed out.
#[derive(Debug)]
pub struct Lot {
    pub source: u32,
    pub life: u64,
    pub chunks: Vec<Chunk>,
}

/// A peer that is there.
#[derive(Debug)]
pub struct Link {
    pub wire: Arc<Wire>,
    /// Exchanges with it so far, and those of them with answers: all ranks leave combine out, or
    /// none.
    pub exchanges: u32,
    pub combines: u32,
    /// It has said that its memory may be written, and nothing was written since.
    pub open: bool,
    pub awaits_fence: bool,
    /// Rows and answers to it that are under way.
    pub flying: u32,
    /// Blocks and counts to it that are.
    pub telling: u32,
    pub activity: PeerActivity,
    pub out: Out,
    pub inward: In,
    /// Rows to it so far, and those of them that this rank's device stored.
    pub rows_out: u64,
    pub rows_stored: u64,
}

/// What goes to a peer in one exchange.
#[derive(Debug, Default)]
pub struct Out {
    pub rows: u64,
    pub first: u64,
    /// Exchanges with answers when this one began; its routes may leave later.
    pub combines: u32,
    /// Its rows lie ready to be sent.
    pub packed: bool,
    pub routed: bool,
    /// Rows already sent.
    pub sent: u64,
    /// Where further ones go, and how many.
    pub grant: Option<(u64, u64)>,
    /// Its answers have come.
    pub answered: bool,
    /// Answers to rows of its lie ready.
    pub answers: VecDeque<Answer>,
    /// The device stores the rows for the private slot itself.
    pub stored: bool,
}

/// Answers on their way to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// In the shared buffer.
    pub place: u64,
    /// Counted among the rows that the peer sent.
    pub first: u64,
    pub rows: u64,
}

/// What comes from a peer in one exchange.
#[derive(Debug, Default)]
pub struct In {
    /// Rows for each of our experts, once known.
    pub counts: Option<Vec<u32>>,
    pub rows: u64,
    /// Where answers go among its rows.
    pub first: u64,
    /// Rows that have a place.
    pub granted: u64,
    /// Chunks whose counts are still to come. One count doesn't say which chunk it is for: they
    /// have arrived when all have been counted.
    pub due: u32,
    pub chunks: VecDeque<Chunk>,
    /// Rows that were handed out.
    pub collected: u64,
}

impl Link {
    pub fn new(wire: Wire) -> Self {
        Self {
            wire: Arc::new(wire),
            exchanges: 0,
            combines: 0,
            open: true,
            awaits_fence: false,
            flying: 0,
            telling: 0,
            activity: PeerActivity::default(),
            out: Out::default(),
            inward: In::default(),
            rows_out: 0,
            rows_stored: 0,
        }
    }

    /// Rows have come that were not handed out: all of them, for none is read before it was counted
    /// (IC-2).
    pub fn has_rows(&self) -> bool {
        self.inward.due == 0 && !self.inward.chunks.is_empty()
    }

    /// Those.
    pub fn lot(&self) -> Option<Lot> {
        let chunks = || self.inward.chunks.iter().copied().collect();
        let (source, life) = (self.wire.rank, self.wire.life);
        self.has_rows().then(|| Lot { source, life, chunks: chunks() })
    }

    /// Begins to store to its rows, if the device can and may.
    pub fn enter(&self) -> Option<Stay> {
        self.wire.stores.get()?.as_ref().ok()?.enter()
    }

    pub fn count(&mut self, stage: Stage) -> Act {
        self.telling += 1;
        let (wire, piece) = (Arc::clone(&self.wire), Piece::count(stage));
        Act::Write { wire, piece, load: Load::Control }
    }

    pub fn tell(&mut self, words: Vec<u32>, piece: Piece) -> Act {
        self.telling += 1;
        Act::Tell { wire: Arc::clone(&self.wire), words, piece }
    }

    pub fn expect(&self, stage: Stage, n: u32) -> Act {
        Act::Expect { wire: Arc::clone(&self.wire), stage, n }
    }

    /// Waits for the peer's fence, unless that has come or is waited for already.
    pub fn await_fence(&mut self) -> Option<Act> {
        let waits = !self.open && !self.awaits_fence;
        self.awaits_fence |= waits;
        waits.then(|| self.expect(Stage::Fence, 1))
    }
}
