//! Jobs, their chunks, and the stages of a chunk.

use std::sync::Arc;

use smallvec::SmallVec;

use super::frames::Chunking;
use crate::{
    api::RegionKey,
    domain::{Count, Data, DomainError, LinkId, Token},
    memory::{
        device::{MemoryKind, PendingCopy, Pinned},
        RegionMemory,
    },
};

/// Marks tokens of staged transfers; no transfer has so many parts.
pub(super) const STAGED_PART: u32 = u32::MAX;

/// State of the peer's window.
#[derive(Debug, Default)]
pub(super) enum PeerWindow {
    #[default]
    Unknown,
    Requested,
    Open {
        key: RegionKey,
        free: Vec<u8>,
    },
}

/// Local staging memory.
#[derive(Debug)]
pub(super) struct StagingMemory {
    pub memory: Pinned,
    pub free: Vec<u8>,
}

/// One work request.
#[derive(Debug)]
pub(super) struct Job {
    pub link: LinkId,
    pub token: Token,
    pub data: Data,
    pub count: Option<Count>,
    pub write: bool,
    /// The local region, if it is staged.
    pub local: Option<Arc<RegionMemory>>,
    pub remote: bool,
    pub chunking: Chunking,
    pub next: u64,
    pub running: u32,
    pub error: Option<DomainError>,
}

/// The stages of a chunk, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Copy between local memory and the local slot.
    LocalCopy,
    /// Transfer between the ends.
    Transfer,
    /// Copy between the peer's slot and its region, by the peer.
    RemoteCopy,
    /// Count of a job whose chunks are all in place.
    Count,
}

#[derive(Debug)]
pub(super) enum ChunkState {
    /// To be started; possibly tried before without success.
    Ready,
    Copying(PendingCopy),
    /// Under way in the transport, or at the peer.
    Waiting,
}

/// A part of a job that fits a slot.
#[derive(Debug)]
pub(super) struct Chunk {
    pub job: usize,
    pub link: LinkId,
    pub serial: u32,
    pub data: Data,
    pub stages: SmallVec<[Stage; 3]>,
    pub at: usize,
    pub state: ChunkState,
    /// Counted with this chunk, which is the only one of its job.
    pub count: Option<Count>,
    pub local_slot: Option<u8>,
    pub remote_slot: Option<(RegionKey, u8)>,
}

impl Chunk {
    pub fn is_copying(&self) -> bool {
        matches!(self.state, ChunkState::Copying(_))
    }

    /// Whether its copy has ended or must be polled.
    pub fn needs_check(&self) -> bool {
        matches!(&self.state, ChunkState::Copying(copy) if copy.needs_check())
    }

    /// Waits until its copy touches no memory any more.
    pub fn quiesce(&self) {
        if let ChunkState::Copying(copy) = &self.state {
            copy.quiesce();
        }
    }

    pub fn stage(&self) -> Option<Stage> {
        self.stages.get(self.at).copied()
    }
}

/// The stages of a chunk, depending on whether local and remote memory are staged.
pub(super) fn stages(write: bool, local: bool, remote: bool) -> SmallVec<[Stage; 3]> {
    let mut stages: SmallVec<[Stage; 3]> = SmallVec::new();
    stages.extend(local.then_some(Stage::LocalCopy));
    stages.push(Stage::Transfer);
    stages.extend(remote.then_some(Stage::RemoteCopy));
    if !write {
        stages.reverse();
    }
    stages
}

impl Job {
    pub fn new(
        (link, token): (LinkId, Token),
        (data, count, write): (Data, Option<Count>, bool),
        local: Option<Arc<RegionMemory>>,
        remote: bool,
    ) -> Self {
        let chunking = Chunking::of(&data);
        let (next, running, error) = (0, 0, None);
        Self { link, token, data, count, write, local, remote, chunking, next, running, error }
    }

    pub fn is_over(&self) -> bool {
        self.running == 0 && (self.error.is_some() || self.next == self.chunking.chunks)
    }

    pub fn touches_device(&self) -> bool {
        let local = self.local.as_ref().is_some_and(|r| r.location.cuda().is_some());
        local || self.data.remote.memory_kind().is_device()
    }

    pub fn touches_file(&self) -> bool {
        let local = self.local.as_ref().is_some_and(|r| r.location.file().is_some());
        local || self.data.remote.memory_kind() == MemoryKind::File
    }
}

#[cfg(test)]
impl StagingMemory {
    pub fn idle(&self) -> usize {
        self.free.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_read_has_the_stages_of_a_write_in_reverse() {
        for (local, remote) in [(true, false), (false, true), (true, true)] {
            let mut write = stages(true, local, remote);
            assert_eq!(write.contains(&Stage::LocalCopy), local);
            assert_eq!(write.contains(&Stage::RemoteCopy), remote);
            write.reverse();
            assert_eq!(write, stages(false, local, remote));
        }
    }
}
