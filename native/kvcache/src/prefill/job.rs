//! One request at its prefiller.

use std::{
    collections::{BTreeMap, HashMap},
    ops::Range,
    sync::Arc,
};

use fabric_engine::{
    api::{EngineId, Imm},
    locks::Mutex,
    Handle, Peer, RemoteRegion,
};

use super::timeline::Timeline;
use crate::{
    pairing::{Link, Pairing, RequestError, Selection},
    wire::RequestState,
};

/// Identifies a request: the decoder's engine, its session, its number there.
pub(super) type RequestKey = (EngineId, u64, u64);

/// The constant facts of a decoder.
pub(super) struct DecoderInfo {
    pub name: String,
    /// The decoder's engine that receives messages.
    pub peer: Peer,
    /// The local number of the session; never reused.
    pub incarnation: u64,
    pub pairing: Pairing,
    pub groups: Vec<crate::layout::CacheGroup>,
    /// For each step of a pass, the layer in the pairing, unless the decoder lacks it.
    pub steps: Box<[Option<(usize, usize)>]>,
    pub grants: Vec<GrantedRank>,
}

/// The memory of one of the decoder's ranks.
pub(super) struct GrantedRank {
    pub rank: usize,
    pub owner: EngineId,
    /// By local rank, the imported buffers.
    pub buffers: Vec<Vec<RemoteRegion>>,
    /// Imported by the first local rank.
    pub tail: Option<RemoteRegion>,
}

pub(super) struct Job {
    pub id: u64,
    pub key: RequestKey,
    pub info: Arc<DecoderInfo>,
    pub tokens: u64,
    /// The decoder's pages.
    pub remote_pages: Vec<Vec<u32>>,
    pub tail_slot: u32,
    /// The cells of each group of the pairing to send.
    pub cells: Vec<Range<u64>>,
    /// The number of entries of the tables.
    pub entries: u64,
    pub payload_nbytes: u64,
    pub links: Vec<RankLink>,
    /// The counter of each of the decoder's grants.
    pub counters: Vec<Imm>,
    pub timeline: Arc<Timeline>,
    pub state: Mutex<Progress>,
}

/// A link from a local rank to a rank of the decoder.
pub(super) struct RankLink {
    pub link: Link,
    /// Index of the local rank.
    pub from: usize,
    /// Index of the grant.
    pub to: usize,
}

#[derive(Default)]
pub(super) struct Progress {
    /// The local pages, once the request is accepted.
    pub local_pages: Option<Arc<Vec<Vec<u32>>>>,
    /// For each step of a pass, the first cell that hasn't been sent.
    pub sent: Vec<u64>,
    /// The pages of the last sent cells, by link and group, because all layers of a pass send the
    /// same.
    pub selected: HashMap<(usize, usize), (Range<u64>, Arc<Selection>)>,
    pub tail: TailState,
    /// For each step of a pass, the number of undelivered writes.
    pub open: Vec<u32>,
    /// Writes that are not over, by number.
    pub under_way: BTreeMap<u64, PendingWrite>,
    pub next: u64,
    /// Writes on a broken link may still land (MR-1).
    pub unproven: bool,
    /// The final state, if nothing more is sent.
    pub stop: Option<RequestState>,
    pub over: bool,
}

/// A submitted write. It ends when its result is known and it touches no memory any more, in either
/// order.
pub(super) struct PendingWrite {
    pub handle: Handle,
    /// Step of the pass; `None` for the tail.
    pub step: Option<usize>,
    pub done: bool,
    pub quiesced: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum TailState {
    #[default]
    Pending,
    Sent,
}

impl Job {
    /// The final state, if nothing is left to do.
    pub fn ended(&self, progress: &Progress) -> Option<RequestState> {
        if progress.over || !progress.under_way.is_empty() {
            return None;
        }
        if let Some(at) = &progress.stop {
            return Some(at.clone());
        }
        let all = progress.sent.iter().zip(&self.info.steps);
        let is_sent = |(sent, step): (&u64, &Option<(usize, usize)>)| {
            step.is_none_or(|(group, _)| *sent >= self.cells[group].end)
        };
        let sent = progress.local_pages.is_some()
            && progress.tail == TailState::Sent
            && all.into_iter().all(is_sent);
        sent.then_some(RequestState::Done)
    }
}

impl Progress {
    /// Adds a write; returns it with its number.
    pub fn track(&mut self, handle: Handle, step: Option<usize>) -> (u64, Handle) {
        let number = self.next;
        self.next += 1;
        if let Some(step) = step {
            self.open[step] += 1;
        }
        let write = PendingWrite { handle: handle.clone(), step, done: false, quiesced: false };
        self.under_way.insert(number, write);
        (number, handle)
    }

    /// Records a delivered write; returns its step if it was the last write of it.
    pub fn delivered(&mut self, number: u64) -> Option<usize> {
        let step = self.under_way.get(&number)?.step?;
        self.open[step] -= 1;
        (self.open[step] == 0).then_some(step)
    }

    /// Records an event of a write; forgets the write once it has ended.
    pub fn update(&mut self, number: u64, update: impl FnOnce(&mut PendingWrite)) {
        let Some(write) = self.under_way.get_mut(&number) else { return };
        update(write);
        if write.done && write.quiesced {
            self.under_way.remove(&number);
        }
    }

    /// The pages of some cells on a route.
    pub fn select(
        &mut self,
        job: &Job,
        route: usize,
        group: usize,
        cells: &Range<u64>,
        local_pages: &[Vec<u32>],
    ) -> Result<Arc<Selection>, RequestError> {
        let known = self.selected.get(&(route, group)).filter(|(of, _)| of == cells);
        if let Some((_, selection)) = known {
            return Ok(Arc::clone(selection));
        }
        let link = &job.links[route].link;
        let (local, remote) = job.info.pairing.tables(group)?;
        let selection =
            link.select(group, cells.clone(), &local_pages[local], &job.remote_pages[remote])?;
        let selection = Arc::new(selection);
        self.selected.insert((route, group), (cells.clone(), Arc::clone(&selection)));
        Ok(selection)
    }
}
