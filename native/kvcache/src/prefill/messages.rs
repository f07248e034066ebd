//! Messages between a prefiller and its decoders.

use std::{
    collections::BTreeMap,
    sync::{atomic::Ordering::SeqCst, Arc},
    time::Duration,
};

use fabric_engine::{api::EngineId, locks::Mutex, EngineError, Op, Peer, Submit};

use super::{
    job::{DecoderInfo, GrantedRank, Job, Progress, RankLink, RequestKey},
    Inner, JobEvent, JobRequest, PrefillerState, Session, Timeline,
};
use crate::{
    pairing::Pairing,
    parts::cut,
    terms::{common_groups, Cause},
    wire::{reason, Hello, Message, RefusalReason, Request, RequestState, BEAT_NUMBERS},
};

const TOO_MANY_ENDED: &str = "it has not said that it knows how its requests ended";

/// Maximum number of decoders; further ones are declined.
const MAX_SESSIONS: usize = 4096;
/// Maximum number of sessions with one engine; further ones are declined.
const MAX_ENGINE_SESSIONS: usize = 64;
/// Maximum number of requests of one decoder; further ones are refused.
const MAX_JOBS: usize = 1 << 14;
/// Maximum number of unacknowledged ends of one decoder's requests; the session ends above it.
pub(super) const MAX_ENDED: usize = 1 << 16;
/// Maximum number of accepted requests among them; further ones are refused, which is kept as well.
pub(super) const MAX_ACCEPTED: usize = MAX_ENDED / 2;
/// Maximum number of page table entries of all jobs; requests beyond it are refused.
const MAX_ENTRIES: u64 = 1 << 26;
/// Number of unreceived answers after which a decoder's beats are no longer answered.
const MAX_ANSWERS: u32 = 1024;

impl PrefillerState {
    /// Why requests of a decoder are refused now, if they are. Other prefillers may have room.
    fn full(&self, of: &Session, payload_nbytes: u64, max_payloads: u64) -> Option<String> {
        if self.closed {
            return Some("the prefiller is closed".into());
        }
        if of.jobs.len() >= MAX_JOBS {
            let what = "requests of this decoder; ask for less at a time";
            return Some(format!("the prefiller has {MAX_JOBS} {what}"));
        }
        if of.remembers() >= MAX_ACCEPTED {
            return Some(format!(
                "{MAX_ACCEPTED} requests of this decoder are not over for it, or came after one that is not; ask another"
            ));
        }
        if self.entries >= MAX_ENTRIES {
            let what = "pages; ask another";
            return Some(format!("the requests that the prefiller has name {MAX_ENTRIES} {what}"));
        }
        if self.payloads.saturating_add(payload_nbytes) > max_payloads {
            return Some(format!(
                "the payloads of requests that the prefiller has would pass {max_payloads} bytes; ask another, or raise \
                 max_payloads there"
            ));
        }
        None
    }
}

impl Inner {
    pub(super) fn send(self: &Arc<Self>, peer: &Peer, message: &Message) {
        self.send_then(peer, message, || ());
    }

    /// As `send`; calls `taken` when the other end has the message or will never have it.
    fn send_then(&self, peer: &Peer, message: &Message, taken: impl FnOnce() + Send + 'static) {
        let bytes = message.to_bytes();
        let parts = cut(&bytes, self.control());
        let ops: Vec<Op<'_>> = parts.iter().map(|message| Op::Send { peer, message }).collect();
        // The next beat asks again for a lost message, and a lost peer sends no beats.
        let on_sent = |result: Result<(), EngineError>| {
            taken();
            if let Err(error) = result {
                tracing::debug!(%error, "a message to a decoder was not sent");
            }
        };
        match self.control().submit(&ops, Submit::default()) {
            Ok(handle) => handle.on_done(on_sent),
            Err(error) => on_sent(Err(error)),
        }
    }

    /// Sends the states of requests, in as many messages as needed.
    pub(super) fn send_states(
        self: &Arc<Self>,
        session: u64,
        info: &DecoderInfo,
        states: Vec<(u64, RequestState)>,
    ) {
        for message in Message::statuses(session, info.incarnation, states) {
            self.send(&info.peer, &message);
        }
    }

    pub(super) fn on_message(self: &Arc<Self>, from: EngineId, bytes: &[u8]) {
        let whole = self.parts.join(from, bytes, self.control().now());
        let message = whole.and_then(|w| w.map(|w| Message::from_bytes(&w)).transpose());
        let message = match message {
            Ok(None) => return,
            Ok(Some(message)) => message,
            Err(error) => {
                tracing::warn!(%from, %error, "what a peer sent is no message of a decoder");
                return;
            }
        };
        let session = (from, message.session());
        match message {
            Message::Hello(hello) => self.on_hello(from, &hello),
            Message::Request { incarnation, request, .. } => {
                self.on_request(session, incarnation, *request)
            }
            Message::Cancel { seq, .. } => self.on_cancel(session, seq),
            Message::Beat { floor, open, leases, .. } => {
                self.on_beat(session, floor, &open);
                self.on_renewal(session, &leases);
            }
            Message::Goodbye { why, .. } => self.end_session(session, &why, false),
            other => tracing::warn!(%from, ?other, "a decoder sent what only prefillers send"),
        }
    }

    fn on_hello(self: &Arc<Self>, from: EngineId, hello: &Hello) {
        if hello.address.id != from {
            tracing::warn!(%from, "a hello in the name of another engine");
            return;
        }
        let peer = match self.control().peer(&hello.address) {
            Ok(peer) => peer,
            Err(error) => return tracing::warn!(%from, %error, "a decoder can't be answered"),
        };
        let number = hello.session;
        let message = match self.open_session(from, hello, peer.clone()) {
            Err(why) => Message::Declined { session: number, why: reason(&why) },
            Ok(incarnation) => Message::Welcome { session: number, incarnation },
        };
        self.send(&peer, &message);
    }

    /// Registers a decoder; returns the number of its session.
    fn open_session(&self, from: EngineId, hello: &Hello, peer: Peer) -> Result<u64, String> {
        let key = (from, hello.session);
        {
            let state = self.state.lock();
            // A repeated hello gets the same answer.
            if let Some(session) = state.sessions.get(&key) {
                return Ok(session.info.incarnation);
            }
            if state.closed {
                return Err("the prefiller is closed".into());
            }
            if state.sessions.len() >= MAX_SESSIONS {
                return Err(format!("the prefiller has {MAX_SESSIONS} decoders"));
            }
            if state.sessions.range((from, 0)..=(from, u64::MAX)).count() >= MAX_ENGINE_SESSIONS {
                return Err(format!(
                    "the prefiller has met its engine {MAX_ENGINE_SESSIONS} times"
                ));
            }
        }
        let info = Arc::new(self.info(hello, peer)?);
        let mut state = self.state.lock();
        if state.closed {
            return Err("the prefiller is closed".into());
        }
        let session = state.sessions.entry(key).or_insert_with(|| Session {
            info,
            floor: 0,
            jobs: BTreeMap::new(),
            ended: BTreeMap::new(),
            silent: 0,
            answers: Arc::default(),
        });
        Ok(session.info.incarnation)
    }

    /// Checks a hello, and imports the decoder's memory.
    fn info(&self, hello: &Hello, peer: Peer) -> Result<DecoderInfo, String> {
        let beat = Duration::from_millis(hello.beat_ms.into());
        if beat * 2 > self.terms.silence {
            return Err(format!(
                "its beats are {beat:?} apart, and this prefiller gives up after {:?}: set both alike",
                self.terms.silence
            ));
        }
        if hello.tail_nbytes != self.terms.tail_nbytes {
            return Err(format!(
                "it takes tails of {} bytes, this prefiller sends {}",
                hello.tail_nbytes, self.terms.tail_nbytes
            ));
        }
        let pairing = Pairing::new(&self.layouts, &hello.layouts).map_err(|e| e.to_string())?;
        if hello.grants.is_empty() || hello.grants.windows(2).any(|w| w[0].rank >= w[1].rank) {
            return Err("its ranks are not given in rising order, each once".into());
        }
        let mut grants = Vec::new();
        for (i, grant) in hello.grants.iter().enumerate() {
            let layout = hello.layouts.get(grant.rank as usize);
            let layout =
                layout.ok_or_else(|| format!("it has no layout of rank {}", grant.rank))?;
            let lens: Vec<u64> = grant.buffers.iter().map(|d| d.len).collect();
            if lens != layout.buffers {
                return Err(format!(
                    "rank {} gives buffers of {lens:?} bytes, its layout says {:?}",
                    grant.rank, layout.buffers
                ));
            }
            let owner = grant.buffers.first().or(grant.tail.as_ref()).map(|d| d.owner.id);
            let owner = owner.ok_or_else(|| format!("rank {} gives no memory", grant.rank))?;
            if grant.buffers.iter().chain(&grant.tail).any(|d| d.owner.id != owner) {
                return Err(format!("rank {} gives memory of several engines", grant.rank));
            }
            let import = |rank: &crate::terms::LocalRank| {
                grant.buffers.iter().map(|d| rank.engine.import(d)).collect::<Result<Vec<_>, _>>()
            };
            let buffers = self.local.iter().map(import).collect::<Result<Vec<_>, _>>();
            let tail = grant.tail.as_ref().map(|d| self.control().import(d)).transpose();
            let (buffers, tail) =
                (buffers.map_err(|e| e.to_string())?, tail.map_err(|e| e.to_string())?);
            if i == 0
                && tail.as_ref().map_or(0, fabric_engine::RemoteRegion::len) < hello.tail_nbytes
            {
                return Err(format!("rank {} gives no room for a tail", grant.rank));
            }
            grants.push(GrantedRank { rank: grant.rank as usize, owner, buffers, tail });
        }
        let groups = common_groups(&hello.layouts, hello.grants.iter().map(|g| g.rank));
        let name = reason(&hello.name);
        let incarnation = self.control().number();
        let steps = self.steps.iter().map(|&(group, layer)| pairing.of_source(group, layer));
        let steps = steps.collect();
        Ok(DecoderInfo { name, peer, incarnation, pairing, groups, steps, grants })
    }

    fn on_request(self: &Arc<Self>, session: (EngineId, u64), incarnation: u64, request: Request) {
        let seq = request.seq;
        let payload_nbytes = request.payload.len() as u64;
        let known = {
            let state = self.state.lock();
            let Some(m) = state.sessions.get(&session) else { return };
            // Of another incarnation (MR-2), cancelled before it came, or it came before.
            if m.info.incarnation != incarnation || m.is_known(seq) {
                return;
            }
            match state.full(m, payload_nbytes, self.terms.max_payloads) {
                Some(why) => Err(why),
                None => Ok(Arc::clone(&m.info)),
            }
        };
        let info = match known {
            Ok(info) => info,
            Err(why) => return self.refuse(session, seq, &why, true),
        };
        let (decoder, tokens, have) = (info.name.clone(), request.tokens, request.have);
        let (payload, job) = match self.job_of((session.0, session.1, seq), info, request) {
            Ok(made) => made,
            Err(why) => return self.refuse(session, seq, &why, false),
        };
        let timeline = Arc::clone(&job.timeline);
        let asked = JobRequest { decoder, tokens, have, payload, timeline };
        {
            let mut state = self.state.lock();
            let id = state.next_job;
            state.next_job += 1;
            let Some(m) = state.sessions.get_mut(&session) else { return };
            if m.info.incarnation != incarnation || m.is_known(seq) {
                return;
            }
            m.jobs.insert(seq, id);
            state.entries += job.entries;
            state.payloads += job.payload_nbytes;
            state.jobs.insert(id, Arc::new(Job { id, ..job }));
            // Before another thread finds the job and ends it.
            self.events.push(id, JobEvent::Requested(asked));
        }
        self.events.report();
    }

    /// Makes the job of a request, if the request fits the session.
    fn job_of(
        &self,
        key: RequestKey,
        info: Arc<DecoderInfo>,
        request: Request,
    ) -> Result<(Vec<u8>, Job), String> {
        let (tokens, have) = (request.tokens, request.have);
        if tokens == 0 || have >= tokens {
            return Err(format!("{tokens} tokens of which it has {have}"));
        }
        if request.tables.len() != info.groups.len() {
            return Err(format!(
                "{} page tables for {} groups of layers",
                request.tables.len(),
                info.groups.len()
            ));
        }
        let entries = crate::table::entries(&info.groups, tokens)?;
        let mut remote_pages = Vec::new();
        for (group, table) in info.groups.iter().zip(&request.tables) {
            let checked = table
                .pages(group.pages_of(tokens))
                .and_then(|pages| crate::table::check(group, tokens, &pages).map(|()| pages))
                .map_err(|e| format!("group {}: {e}", group.name))?;
            if !group.is_whole_pages(have) {
                return Err(format!(
                    "it has {have} tokens, which isn't whole pages of {} tokens in group {}",
                    group.page_tokens, group.name
                ));
            }
            remote_pages.push(checked);
        }
        if request.counters.len() != info.grants.len() {
            return Err(format!(
                "{} counters for {} ranks",
                request.counters.len(),
                info.grants.len()
            ));
        }
        if info.grants.iter().zip(&request.counters).any(|(g, c)| g.owner != c.owner) {
            return Err("a counter is of another engine than the memory".into());
        }
        let room = info.grants[0].tail.as_ref().map_or(0, fabric_engine::RemoteRegion::len);
        if (u64::from(request.tail_slot) + 1).saturating_mul(self.terms.tail_nbytes) > room {
            return Err(format!("it has no slot {} for tails", request.tail_slot));
        }
        let mut links = Vec::new();
        for (to, granted) in info.grants.iter().enumerate() {
            for (from, rank) in self.local.iter().enumerate() {
                let link = info
                    .pairing
                    .link(rank.rank as usize, granted.rank, request.salt)
                    .map_err(|e| e.to_string())?;
                if !link.is_empty() {
                    links.push(RankLink { link, from, to });
                }
            }
        }
        let cells = (0..info.pairing.groups()).map(|g| info.pairing.cells(g, have..tokens));
        let cells = cells.collect::<Result<Vec<_>, _>>().map_err(|e| e.to_string())?;
        let start = |step: &Option<(usize, usize)>| step.map_or(0, |(group, _)| cells[group].start);
        let sent = info.steps.iter().map(start).collect();
        let counters = request.counters.iter().map(fabric_engine::api::CounterRef::imm).collect();
        let open = vec![0; self.steps.len()];
        let state = Mutex::new(Progress { sent, open, ..Progress::default() });
        let numbers = self.steps.iter().map(|(group, layer)| self.groups[*group].layers[*layer]);
        let timeline = Arc::new(Timeline::new(numbers));
        let tail_slot = request.tail_slot;
        let job = Job {
            id: 0,
            key,
            info,
            tokens,
            remote_pages,
            tail_slot,
            cells,
            entries,
            payload_nbytes: request.payload.len() as u64,
            links,
            counters,
            timeline,
            state,
        };
        Ok((request.payload, job))
    }

    /// Refuses a request. The refusal is kept like any other end, because the request may come
    /// again.
    fn refuse(self: &Arc<Self>, session: (EngineId, u64), seq: u64, why: &str, elsewhere: bool) {
        let at =
            RequestState::Refused { why: reason(why), elsewhere, reason: RefusalReason::Other };
        let info = {
            let mut state = self.state.lock();
            let Some(m) = state.sessions.get_mut(&session) else { return };
            if m.remembers() < MAX_ENDED {
                m.ended.insert(seq, at.clone());
                Some(Arc::clone(&m.info))
            } else {
                None
            }
        };
        match info {
            Some(info) => self.send_states(session.1, &info, vec![(seq, at)]),
            None => self.end_session(session, TOO_MANY_ENDED, true),
        }
    }

    fn on_cancel(self: &Arc<Self>, session: (EngineId, u64), seq: u64) {
        let found = {
            let mut state = self.state.lock();
            let Some(m) = state.sessions.get_mut(&session) else { return };
            m.silent = 0;
            match m.jobs.get(&seq).copied() {
                Some(id) => Err(state.jobs.get(&id).cloned()),
                // The request may still come: it is over already.
                None if seq < m.floor => Ok(Some((Arc::clone(&m.info), RequestState::Cancelled))),
                None if m.remembers() >= MAX_ENDED && !m.ended.contains_key(&seq) => Ok(None),
                None => {
                    let at = m.ended.entry(seq).or_insert(RequestState::Cancelled).clone();
                    Ok(Some((Arc::clone(&m.info), at)))
                }
            }
        };
        match found {
            Ok(Some((info, at))) => self.send_states(session.1, &info, vec![(seq, at)]),
            Ok(None) => self.end_session(session, TOO_MANY_ENDED, true),
            Err(Some(job)) => self.stop(&job, RequestState::Cancelled, Some(Cause::Cancelled)),
            Err(None) => {}
        }
    }

    fn on_beat(self: &Arc<Self>, session: (EngineId, u64), floor: u64, open: &[u64]) {
        let (info, answers, states, below) = {
            let mut guard = self.state.lock();
            let state = &mut *guard;
            let Some(m) = state.sessions.get_mut(&session) else { return };
            m.silent = 0;
            if floor > m.floor {
                m.floor = floor;
                m.ended = m.ended.split_off(&floor);
            }
            let at = |seq: &u64| match (m.jobs.contains_key(seq), m.ended.get(seq)) {
                (true, _) => RequestState::Open,
                (false, Some(at)) => at.clone(),
                (false, None) => RequestState::Unknown,
            };
            let states: Vec<(u64, RequestState)> = open.iter().map(|seq| (*seq, at(seq))).collect();
            let below = m.jobs.range(..m.floor).filter_map(|(_, id)| state.jobs.get(id).cloned());
            let below: Vec<Arc<Job>> = below.collect();
            (Arc::clone(&m.info), Arc::clone(&m.answers), states, below)
        };
        // An ended request that the decoder was never told of is not one of its requests: its
        // number was changed on the way, and no message would end it (MR-1).
        for job in below {
            self.stop(&job, RequestState::Cancelled, Some(Cause::Cancelled));
        }
        for message in Message::statuses(session.1, info.incarnation, states) {
            if answers.fetch_add(1, SeqCst) >= MAX_ANSWERS {
                answers.fetch_sub(1, SeqCst);
                return;
            }
            let answers = Arc::clone(&answers);
            self.send_then(&info.peer, &message, move || {
                answers.fetch_sub(1, SeqCst);
            });
        }
    }

    /// Reports leases that a decoder renews; more than a beat may carry are ignored.
    fn on_renewal(&self, session: (EngineId, u64), leases: &[u64]) {
        let leases = &leases[..leases.len().min(BEAT_NUMBERS)];
        if !leases.is_empty() && self.state.lock().sessions.contains_key(&session) {
            if let Some(report) = self.on_renewal.get() {
                report(leases);
            }
        }
    }

    /// Ends a session, and all jobs of it.
    pub(super) fn end_session(self: &Arc<Self>, session: (EngineId, u64), why: &str, say: bool) {
        let (gone, jobs) = {
            let mut state = self.state.lock();
            let Some(gone) = state.sessions.remove(&session) else { return };
            let jobs = gone.jobs.values().filter_map(|id| state.jobs.get(id).cloned());
            let jobs: Vec<Arc<Job>> = jobs.collect();
            (gone, jobs)
        };
        let cause = Cause::Lost(format!("decoder {}: {why}", gone.info.name));
        for job in jobs {
            self.stop(&job, RequestState::Cancelled, Some(cause.clone()));
        }
        if say {
            let message = Message::Goodbye { session: session.1, why: reason(why) };
            self.send(&gone.info.peer, &message);
        }
    }
}
