//! A decoder and its user, which checks each event when it arrives.

use std::{collections::BTreeMap, ops::Range, sync::Arc, time::Duration};

use fabric_engine::{locks::Mutex, EngineError, Region, TransferEngine};
use fabric_kvcache::{Decoder, Event, LocalRank, Pull, Terms};

use super::{faulty_delivery::FaultyDelivery, judge::Judge};
use crate::{
    cache::{Cache, Shape},
    world::{tail_of, Cut, SLOTS, TAIL},
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PullState {
    Waiting,
    Ready,
    Failed,
    Released,
}

struct TrackedPull {
    content: u64,
    tokens: u64,
    /// Tokens that must be right: all, or the last ones of a window.
    seen: Range<u64>,
    table: Vec<u32>,
    slot: u32,
    at: PullState,
    deadline: u64,
    prefiller: usize,
    /// When its prefiller died.
    died: Option<u64>,
}

/// What the decoder's user knows.
struct UserState {
    caches: Vec<Cache>,
    tail: Region,
    window: Option<u32>,
    asked: BTreeMap<u64, TrackedPull>,
    /// What was told before the call that asked returned.
    early: Vec<(u64, Event)>,
    pages: Vec<u32>,
    slots: Vec<u32>,
    ready: u32,
    failed: u32,
    /// What it asks for is changed on the way: what its memory has is its own affair.
    liar: bool,
}

pub struct Decoding {
    pub engines: Vec<Arc<TransferEngine>>,
    pub decoder: Option<Arc<Decoder>>,
    pub dead: bool,
    /// The sessions with each prefiller, the present one last.
    pub sessions: Vec<Vec<u64>>,
    cut: Cut,
    user: Arc<Mutex<UserState>>,
    judge: Arc<Judge>,
}

/// Some time for a loss to be found out, beside the deadline: messages and time-outs of the
/// engine's.
const SLACK: u64 = 200_000_000;

impl UserState {
    fn fill(&self, pages: &[u32]) {
        for cache in &self.caches {
            for (at, len) in cache.pages(pages) {
                cache.region.put(at, &vec![0; len as usize]).unwrap();
            }
        }
    }

    /// Nothing has landed since the pages were filled.
    fn untouched(&self, pages: &[u32]) -> Result<(), String> {
        for (rank, cache) in self.caches.iter().enumerate() {
            for (at, len) in cache.pages(pages) {
                let bytes = cache.region.get(at, len).unwrap();
                if let Some(i) = bytes.iter().position(|b| *b != 0) {
                    let page = pages.iter().find(|p| cache.pages(&[**p]).contains(&(at, len)));
                    return Err(format!("rank {rank}, page {page:?}: byte {i} was written to"));
                }
            }
        }
        Ok(())
    }

    fn slot_untouched(&self, slot: u32) -> Result<(), String> {
        let bytes = self.tail.get(u64::from(slot) * TAIL, TAIL).unwrap();
        match bytes.iter().any(|b| *b != 0) {
            true => Err(format!("slot {slot} was written to")),
            false => Ok(()),
        }
    }

    fn right(&self, tracked: &TrackedPull) -> Result<(), String> {
        for cache in &self.caches {
            cache.holds(tracked.content, tracked.seen.clone(), &tracked.table)?;
        }
        let tail = self.tail.get(u64::from(tracked.slot) * TAIL, TAIL).unwrap();
        (tail == tail_of(tracked.content)).then_some(()).ok_or_else(|| "the tail is wrong".into())
    }

    fn told(&mut self, seq: u64, event: Event, judge: &Judge) {
        let Some(mut tracked) = self.asked.remove(&seq) else {
            return self.early.push((seq, event));
        };
        match (tracked.at, &event) {
            (PullState::Waiting, Event::Ready) => {
                if let (false, Err(what)) = (self.liar, self.right(&tracked)) {
                    judge.wrong("IC-2", format_args!("request {seq} is ready, but {what}"));
                }
                tracked.at = PullState::Ready;
                self.ready += 1;
            }
            (PullState::Waiting, Event::Failed(cause)) => {
                let by = tracked.died.map_or(u64::MAX, |died| died + 4_000_000_000);
                if judge.now() > by.min(tracked.deadline) + SLACK {
                    let what = format!("request {seq} ends late: {cause}");
                    judge.wrong("RS-4", what);
                }
                tracked.at = PullState::Failed;
                self.failed += 1;
            }
            (PullState::Ready | PullState::Failed, Event::Released) => {
                tracked.at = PullState::Released;
                // The next owner fills them; what lands from now on is found.
                let pages = tracked.pages(self.caches[0].layout.groups[0].page_tokens);
                self.fill(&pages);
                self.tail.put(u64::from(tracked.slot) * TAIL, &[0; TAIL as usize]).unwrap();
                self.pages.extend(pages);
                self.slots.push(tracked.slot);
            }
            (at, event) => {
                judge.wrong("events", format_args!("request {seq} is {at:?} and told {event:?}"));
            }
        }
        self.asked.insert(seq, tracked);
    }
}

impl TrackedPull {
    /// The pages that are its own.
    fn pages(&self, page_tokens: u32) -> Vec<u32> {
        self.table[(self.seen.start / u64::from(page_tokens)) as usize..].to_vec()
    }
}

impl Decoding {
    pub fn new(
        engines: Vec<Arc<TransferEngine>>,
        (shape, cut, terms): (&Shape, Cut, Terms),
        judge: &Arc<Judge>,
        delivery: &Arc<FaultyDelivery>,
    ) -> Self {
        let count = engines.len() as u32;
        let tail = engines[0].alloc(TAIL * u64::from(SLOTS)).unwrap();
        tail.put(0, &vec![0; tail.len() as usize]).unwrap();
        let layout = |rank: u32| shape.layout(rank, count, cut.page_tokens, cut.pages);
        let cache = |(rank, e): (usize, &Arc<TransferEngine>)| Cache::new(e, layout(rank as u32));
        let caches: Vec<Cache> = engines.iter().enumerate().map(|c| cache(c).unwrap()).collect();
        let local = engines.iter().zip(&caches).enumerate().map(|(rank, (engine, cache))| {
            let (engine, buffers) = (Arc::clone(engine), vec![cache.region.clone()]);
            LocalRank {
                rank: rank as u32,
                engine,
                buffers,
                tail: (rank == 0).then(|| tail.clone()),
            }
        });
        let layouts = caches.iter().map(|c| c.layout.clone()).collect();
        let local: Vec<LocalRank> = local.collect();
        let user = Arc::new(Mutex::new(UserState {
            caches,
            tail,
            window: shape.window,
            asked: BTreeMap::new(),
            early: Vec::new(),
            pages: (0..cut.pages).collect(),
            slots: (0..SLOTS).collect(),
            ready: 0,
            failed: 0,
            liar: false,
        }));
        user.lock().fill(&(0..cut.pages).collect::<Vec<_>>());
        let (theirs, judge_) = (Arc::clone(&user), Arc::clone(judge));
        let decoder = Decoder::new("decoder", layouts, local, terms, move |seq, event| {
            theirs.lock().told(seq, event, &judge_);
        });
        let decoder = Arc::new(decoder.unwrap());
        let weak = Arc::downgrade(&decoder);
        delivery.between(
            &engines[0],
            Arc::new(move |from, bytes| {
                if let Some(decoder) = weak.upgrade() {
                    decoder.on_message(from, bytes);
                }
            }),
        );
        let (judge, decoder) = (Arc::clone(judge), Some(decoder));
        Self { engines, decoder, dead: false, sessions: Vec::new(), cut, user, judge }
    }

    pub fn lies(&self) {
        self.user.lock().liar = true;
    }

    pub fn is_liar(&self) -> bool {
        self.user.lock().liar
    }

    /// Asks a prefiller for something, if there is room.
    pub fn ask(&self, prefiller: usize, session: u64, content: u64, rng: &mut fastrand::Rng) {
        let Some(decoder) = &self.decoder else { return };
        let page = u64::from(self.cut.page_tokens);
        let (ask, tracked) = {
            let mut user = self.user.lock();
            if user.slots.is_empty() {
                return;
            }
            let most = (u64::from(self.cut.pages) / 2 * page).min(24);
            let tokens = rng.u64(1..=most);
            let whole = (tokens - 1) / page;
            let have = if rng.bool() { 0 } else { rng.u64(..=whole) * page };
            let from = user.window.map_or(0, |w| tokens.saturating_sub(u64::from(w)));
            let first = from / page;
            let count = (tokens.div_ceil(page) - first) as usize;
            if user.pages.len() < count {
                return;
            }
            rng.shuffle(&mut user.pages);
            let left = user.pages.len() - count;
            let own = user.pages.split_off(left);
            let at = rng.usize(..user.slots.len());
            let slot = user.slots.swap_remove(at);
            let since = user.untouched(&own).and_then(|()| user.slot_untouched(slot));
            if let (false, Err(what)) = (user.liar, since) {
                self.judge.wrong("MR-1", format_args!("before request of {content}: {what}"));
            }
            // Entries before the window may be anything.
            let mut table: Vec<u32> = (0..first).map(|_| rng.u32(..)).collect();
            table.extend(own);
            if have > from {
                for cache in &user.caches {
                    for layer in 0..cache.layout.groups[0].layers.len() {
                        cache.compute(content, layer, from..have, &table);
                    }
                }
            }
            let timeout = match rng.u8(..4) {
                0 => rng.u64(..100_000_000),
                _ => rng.u64(500_000_000..3_000_000_000),
            };
            let ask = Pull {
                tokens,
                have,
                salt: rng.u64(..8),
                tables: vec![table.clone()],
                tail_slot: slot,
                payload: content.to_le_bytes().to_vec(),
                timeout: Duration::from_nanos(timeout),
                ..Pull::default()
            };
            let deadline = self.judge.now() + timeout;
            let (at, seen, died) = (PullState::Waiting, from..tokens, None);
            let tracked =
                TrackedPull { content, tokens, seen, table, slot, at, deadline, prefiller, died };
            (ask, tracked)
        };
        let asked = decoder.request(session, ask);
        let mut user = self.user.lock();
        match asked {
            Ok(seq) => {
                user.asked.insert(seq, tracked);
                let early = std::mem::take(&mut user.early);
                early.into_iter().for_each(|(seq, event)| user.told(seq, event, &self.judge));
            }
            Err(error) => {
                let gone = matches!(error, EngineError::Stale { .. } | EngineError::Closed);
                if !gone {
                    self.judge
                        .wrong("request", format_args!("of {} tokens: {error}", tracked.tokens));
                }
                let pages = tracked.pages(self.cut.page_tokens);
                user.fill(&pages);
                user.pages.extend(pages);
                user.slots.push(tracked.slot);
            }
        }
    }

    /// Any request that isn't released.
    pub fn any(&self, rng: &mut fastrand::Rng) -> Option<u64> {
        let user = self.user.lock();
        let open: Vec<u64> = user
            .asked
            .iter()
            .filter(|(_, a)| a.at != PullState::Released)
            .map(|(s, _)| *s)
            .collect();
        (!open.is_empty()).then(|| open[rng.usize(..open.len())])
    }

    /// A prefiller is dead: what was asked of it ends soon.
    pub fn on_prefiller_lost(&self, prefiller: usize) {
        let now = self.judge.now();
        let mut user = self.user.lock();
        let theirs = user.asked.values_mut().filter(|a| a.prefiller == prefiller);
        theirs.for_each(|a| a.died = Some(a.died.unwrap_or(now)));
    }

    pub fn is_over(&self) -> bool {
        self.user.lock().asked.values().all(|a| a.at == PullState::Released)
    }

    /// Requests that ended well, and others.
    pub fn outcome(&self) -> (u32, u32) {
        let user = self.user.lock();
        (user.ready, user.failed)
    }

    /// After all sessions have ended: no state of a session is left.
    pub fn check_parted(&self) {
        let left = self.decoder.as_ref().map_or(0, |d| d.prefillers());
        if left > 0 {
            self.judge.wrong("leak", format_args!("a closed decoder keeps {left} prefillers"));
        }
    }

    /// When all is over: everything was told, nothing was kept, and nothing landed late.
    pub fn check(&self) {
        let user = self.user.lock();
        if !user.early.is_empty() {
            self.judge.wrong("events", format_args!("of no request: {:?}", user.early));
        }
        for (seq, tracked) in &user.asked {
            if tracked.at != PullState::Released {
                let open = self.decoder.as_ref().map(|d| d.open());
                let what = format!("request {seq} is {:?} for ever, open: {open:?}", tracked.at);
                self.judge.wrong("MR-1", what);
            }
        }
        if self.decoder.as_ref().is_some_and(|d| d.open() > 0) {
            self.judge.wrong("leak", "a decoder has open requests");
        }
        let late = user
            .untouched(&user.pages)
            .and_then(|()| user.slots.iter().try_for_each(|slot| user.slot_untouched(*slot)));
        if let (false, Err(what)) = (user.liar, late) {
            self.judge.wrong("MR-1", format_args!("after release: {what}"));
        }
    }
}
