//! Jobs, the chunks they are cut into, and the stages of each.

use std::sync::Arc;

use smallvec::SmallVec;

use super::wire::Cut;
use crate::{
    api::RegionKey,
    domain::{Count, Data, DomainError, LinkId, Token},
    memory::{
        device::{Nature, Pinned, Ticket},
        RegionMemory,
    },
};

/// Marks our own tokens; no transfer has so many parts.
pub(super) const OWN: u32 = u32::MAX;

/// The peer's window, as far as we have it.
#[derive(Debug, Default)]
pub(super) enum Far {
    #[default]
    Unknown,
    Asked,
    Open {
        key: RegionKey,
        free: Vec<u8>,
    },
}

/// Staging memory of ours.
#[derive(Debug)]
pub(super) struct Own {
    pub memory: Pinned,
    pub free: Vec<u8>,
}

/// One work request of the group's.
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
    pub cut: Cut,
    pub next: u64,
    pub running: u32,
    pub error: Option<DomainError>,
}

/// What happens to a chunk, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Between local memory and our slot.
    Copy,
    /// Between us and the peer, by the transport.
    Wire,
    /// Between the peer's slot and its region, by the peer.
    Ask,
    /// The count of a job whose chunks are all in place.
    Count,
}

#[derive(Debug)]
pub(super) enum State {
    /// To be begun, or begun in vain for want of room.
    Ready,
    Copying(Ticket),
    /// On the wire, or asked of the peer.
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
    pub state: State,
    /// Counted along with this chunk, the only one of its job.
    pub count: Option<Count>,
    pub near: Option<u8>,
    pub far: Option<(RegionKey, u8)>,
}

impl Chunk {
    pub fn is_copying(&self) -> bool {
        matches!(self.state, State::Copying(_))
    }

    /// Whether its copy has ended, or ends without a sign.
    pub fn wants_a_look(&self) -> bool {
        matches!(&self.state, State::Copying(ticket) if ticket.wants_a_look())
    }

    /// Sees to it that its copy touches nothing any more.
    pub fn quiesce(&self) {
        if let State::Copying(ticket) = &self.state {
            ticket.quiesce();
        }
    }

    pub fn stage(&self) -> Option<Stage> {
        self.stages.get(self.at).copied()
    }
}

/// The stages of a chunk: local memory is staged, or remote memory is, or both.
pub(super) fn stages(write: bool, local: bool, remote: bool) -> SmallVec<[Stage; 3]> {
    let mut stages: SmallVec<[Stage; 3]> = SmallVec::new();
    stages.extend(local.then_some(Stage::Copy));
    stages.push(Stage::Wire);
    stages.extend(remote.then_some(Stage::Ask));
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
        let cut = Cut::of(&data);
        let (next, running, error) = (0, 0, None);
        Self { link, token, data, count, write, local, remote, cut, next, running, error }
    }

    pub fn is_over(&self) -> bool {
        self.running == 0 && (self.error.is_some() || self.next == self.cut.chunks)
    }

    pub fn touches_device(&self) -> bool {
        let local = self.local.as_ref().is_some_and(|r| r.location.cuda().is_some());
        local || self.data.remote.nature().is_device()
    }

    pub fn touches_file(&self) -> bool {
        let local = self.local.as_ref().is_some_and(|r| r.location.file().is_some());
        local || self.data.remote.nature() == Nature::File
    }
}

#[cfg(test)]
impl Own {
    pub fn idle(&self) -> usize {
        self.free.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_read_goes_through_the_stages_of_a_write_backwards() {
        for (local, remote) in [(true, false), (false, true), (true, true)] {
            let mut write = stages(true, local, remote);
            assert_eq!(write.contains(&Stage::Copy), local);
            assert_eq!(write.contains(&Stage::Ask), remote);
            write.reverse();
            assert_eq!(write, stages(false, local, remote));
        }
    }
}
