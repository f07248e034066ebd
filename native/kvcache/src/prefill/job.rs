//! One request, as its prefiller works on it.

use std::{
    collections::{BTreeMap, HashMap},
    ops::Range,
    sync::Arc,
};

use fabric_engine::{
    api::{EngineId, Imm},
    Handle, Peer, RemoteRegion,
};
use parking_lot::Mutex;

use super::timeline::Timeline;
use crate::{
    pairing::{Link, Pairing, RequestError, Selection},
    wire::State as At,
};

/// Identifies a request: the decoder's engine, its session, its number there.
pub(super) type Key = (EngineId, u64, u64);

/// What doesn't change about a decoder.
pub(super) struct Facts {
    pub name: String,
    /// Its engine that takes messages, known to ours that sends them.
    pub peer: Peer,
    /// The local number of the session; never reused.
    pub incarnation: u64,
    pub pairing: Pairing,
    pub groups: Vec<crate::layout::CacheGroup>,
    pub grants: Vec<Granted>,
}

/// The memory of one of the decoder's ranks.
pub(super) struct Granted {
    pub rank: usize,
    pub owner: EngineId,
    /// As each of our local ranks names it.
    pub buffers: Vec<Vec<RemoteRegion>>,
    /// As our first rank names it.
    pub tail: Option<RemoteRegion>,
}

pub(super) struct Job {
    pub id: u64,
    pub key: Key,
    pub facts: Arc<Facts>,
    pub tokens: u64,
    /// The decoder's pages.
    pub there: Vec<Vec<u32>>,
    pub tail_slot: u32,
    /// The cells of each group that are to be sent in all.
    pub cells: Vec<Range<u64>>,
    /// How many entries the tables have.
    pub entries: u64,
    pub payload_nbytes: u64,
    pub links: Vec<Route>,
    /// Of each of the decoder's grants.
    pub counters: Vec<Imm>,
    pub timeline: Arc<Timeline>,
    pub state: Mutex<Progress>,
}

/// From one of our ranks to one of the decoder's.
pub(super) struct Route {
    pub link: Link,
    /// Which of our local ranks.
    pub from: usize,
    /// Index of the grant.
    pub to: usize,
}

#[derive(Default)]
pub(super) struct Progress {
    /// Our pages, once the engine behind has some.
    pub here: Option<Arc<Vec<Vec<u32>>>>,
    /// For each step of a pass, the first cell that hasn't been sent.
    pub sent: Vec<u64>,
    /// What the last cells that were sent meant in pages, by route and group: layers of a pass send
    /// the same.
    pub selected: HashMap<(usize, usize), (Range<u64>, Arc<Selection>)>,
    pub tail: Tail,
    /// For each step of a pass, writes that aren't delivered.
    pub open: Vec<u32>,
    /// Writes that aren't over, by a number.
    pub under_way: BTreeMap<u64, Write>,
    pub next: u64,
    /// Writes on a broken link may still land, as far as this end knows (MR-1).
    pub unproven: bool,
    /// Why nothing more is sent.
    pub stop: Option<At>,
    pub over: bool,
}

/// A submitted write. It has ended when its result is known and it touches no memory any more; the
/// two may come in either order.
pub(super) struct Write {
    pub handle: Handle,
    /// Of which step of a pass; `None` for the tail.
    pub step: Option<usize>,
    pub done: bool,
    pub quiet: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Tail {
    #[default]
    ToCome,
    Sent,
}

impl Job {
    /// How it ends, if nothing is left to do.
    pub fn ended(&self, progress: &Progress, groups_of_steps: &[(usize, usize)]) -> Option<At> {
        if progress.over || !progress.under_way.is_empty() {
            return None;
        }
        if let Some(at) = &progress.stop {
            return Some(at.clone());
        }
        let all = progress.sent.iter().zip(groups_of_steps);
        let sent = progress.here.is_some()
            && progress.tail == Tail::Sent
            && all.into_iter().all(|(sent, (group, _))| *sent >= self.cells[*group].end);
        sent.then_some(At::Done)
    }
}

impl Progress {
    /// Counts a write as under way; its number comes with it.
    pub fn track(&mut self, handle: Handle, step: Option<usize>) -> (u64, Handle) {
        let number = self.next;
        self.next += 1;
        if let Some(step) = step {
            self.open[step] += 1;
        }
        let write = Write { handle: handle.clone(), step, done: false, quiet: false };
        self.under_way.insert(number, write);
        (number, handle)
    }

    /// A write has ended well; the step of which nothing is on its way any more, if it is the last
    /// of one.
    pub fn delivered(&mut self, number: u64) -> Option<usize> {
        let step = self.under_way.get(&number)?.step?;
        self.open[step] -= 1;
        (self.open[step] == 0).then_some(step)
    }

    /// Notes what has come of a write.
    pub fn learn(&mut self, number: u64, learn: impl FnOnce(&mut Write)) {
        let Some(write) = self.under_way.get_mut(&number) else { return };
        learn(write);
        if write.done && write.quiet {
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
        here: &[Vec<u32>],
    ) -> Result<Arc<Selection>, RequestError> {
        let known = self.selected.get(&(route, group)).filter(|(of, _)| of == cells);
        if let Some((_, selection)) = known {
            return Ok(Arc::clone(selection));
        }
        let link = &job.links[route].link;
        let selection = link.select(group, cells.clone(), &here[group], &job.there[group])?;
        let selection = Arc::new(selection);
        self.selected.insert((route, group), (cells.clone(), Arc::clone(&selection)));
        Ok(selection)
    }
}
