//! What a prefiller and its decoders say to each other.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use fabric_engine::{api::EngineId, EngineError, Op, Peer, Submit};
use parking_lot::Mutex;

use super::{
    job::{Facts, Granted, Job, Key, Progress, Route},
    Asked, Inner, JobEvent, Meeting,
};
use crate::{
    pairing::Pairing,
    terms::Cause,
    timer::after,
    wire::{Hello, Message, Request, State as At},
};

/// Decoders beyond these are declined.
const MAX_MEETINGS: usize = 4096;

impl Inner {
    pub(super) fn say(self: &Arc<Self>, peer: &Peer, message: &Message) {
        let bytes = message.to_bytes();
        let op = Op::Send { peer, message: &bytes };
        // A message that is lost is asked for by the next beat, and a lost peer beats no more.
        let told = |result: Result<(), EngineError>| {
            if let Err(error) = result {
                tracing::debug!(%error, "a message to a decoder was not sent");
            }
        };
        match self.control().submit(&[op], Submit::default()) {
            Ok(handle) => handle.on_done(told),
            Err(error) => told(Err(error)),
        }
    }

    pub(super) fn hear(self: &Arc<Self>, from: EngineId, bytes: &[u8]) {
        let message = match Message::from_bytes(bytes) {
            Ok(message) => message,
            Err(error) => {
                tracing::warn!(%from, %error, "what a peer sent is no message of a decoder");
                return;
            }
        };
        let meeting = (from, message.meeting());
        match message {
            Message::Hello(hello) => self.greet(from, &hello),
            Message::Request { request, .. } => self.take(meeting, *request),
            Message::Cancel { seq, .. } => self.cancel(meeting, seq),
            Message::Beat { floor, open, .. } => self.beat(meeting, floor, &open),
            Message::Goodbye { why, .. } => self.part(meeting, &why, false),
            other => tracing::warn!(%from, ?other, "a decoder sent what only prefillers send"),
        }
    }

    fn greet(self: &Arc<Self>, from: EngineId, hello: &Hello) {
        if hello.address.id != from {
            tracing::warn!(%from, "a hello in the name of another engine");
            return;
        }
        let peer = match self.control().peer(&hello.address) {
            Ok(peer) => peer,
            Err(error) => return tracing::warn!(%from, %error, "a decoder can't be answered"),
        };
        let number = hello.meeting;
        let message = match self.facts(hello, peer.clone()) {
            Err(why) => Message::Declined { meeting: number, why },
            Ok(facts) => {
                let mut state = self.state.lock();
                if state.closed {
                    Message::Declined { meeting: number, why: "the prefiller is closed".into() }
                } else if state.meetings.len() >= MAX_MEETINGS {
                    let why = format!("the prefiller has {MAX_MEETINGS} decoders");
                    Message::Declined { meeting: number, why }
                } else {
                    // Said twice, a hello is welcome twice.
                    state.meetings.entry((from, number)).or_insert_with(|| Meeting {
                        facts: Arc::new(facts),
                        floor: 0,
                        jobs: BTreeMap::new(),
                        ended: BTreeMap::new(),
                        silent: 0,
                    });
                    Message::Welcome { meeting: number }
                }
            }
        };
        self.say(&peer, &message);
    }

    /// What a decoder says of itself, checked.
    fn facts(&self, hello: &Hello, peer: Peer) -> Result<Facts, String> {
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
            grants.push(Granted { rank: grant.rank as usize, owner, buffers, tail });
        }
        let groups = hello.layouts[grants[0].rank].groups.clone();
        Ok(Facts { name: hello.name.clone(), peer, pairing, groups, grants })
    }

    fn take(self: &Arc<Self>, meeting: (EngineId, u64), request: Request) {
        let seq = request.seq;
        let known = {
            let mut state = self.state.lock();
            let closed = state.closed;
            let Some(m) = state.meetings.get_mut(&meeting) else { return };
            // It was cancelled before it came, it came before, or it is of another time.
            if seq < m.floor || m.jobs.contains_key(&seq) || m.ended.contains_key(&seq) {
                return;
            }
            if closed {
                None
            } else {
                Some(Arc::clone(&m.facts))
            }
        };
        let Some(facts) = known else {
            return self.refuse(meeting, seq, "the prefiller is closed".into());
        };
        let asked = Asked {
            decoder: facts.name.clone(),
            tokens: request.tokens,
            have: request.have,
            payload: Vec::new(),
        };
        let (payload, job) = match self.job_of((meeting.0, meeting.1, seq), facts, request) {
            Ok(made) => made,
            Err(why) => return self.refuse(meeting, seq, why),
        };
        let id = {
            let mut state = self.state.lock();
            let id = state.next_job;
            state.next_job += 1;
            let Some(m) = state.meetings.get_mut(&meeting) else { return };
            if m.ended.contains_key(&seq) || m.jobs.insert(seq, id).is_some() {
                return;
            }
            state.jobs.insert(id, Arc::new(Job { id, ..job }));
            id
        };
        (self.on_event)(id, JobEvent::Asked(Asked { payload, ..asked }));
    }

    /// A job of a request, if what it says fits what was agreed on.
    fn job_of(
        &self,
        key: Key,
        facts: Arc<Facts>,
        request: Request,
    ) -> Result<(Vec<u8>, Job), String> {
        let (tokens, have) = (request.tokens, request.have);
        if tokens == 0 || have >= tokens {
            return Err(format!("{tokens} tokens of which it has {have}"));
        }
        if request.tables.len() != facts.groups.len() {
            return Err(format!(
                "{} page tables for {} groups of layers",
                request.tables.len(),
                facts.groups.len()
            ));
        }
        let mut there = Vec::new();
        for (group, table) in facts.groups.iter().zip(&request.tables) {
            let checked = table
                .pages(tokens.div_ceil(u64::from(group.page_tokens)))
                .and_then(|pages| crate::table::check(group, tokens, &pages).map(|()| pages))
                .map_err(|e| format!("group {}: {e}", group.name))?;
            if !have.is_multiple_of(u64::from(group.page_tokens)) {
                return Err(format!(
                    "it has {have} tokens, which isn't whole pages of {}",
                    group.name
                ));
            }
            there.push(checked);
        }
        if request.counters.len() != facts.grants.len() {
            return Err(format!(
                "{} counters for {} ranks",
                request.counters.len(),
                facts.grants.len()
            ));
        }
        if facts.grants.iter().zip(&request.counters).any(|(g, c)| g.owner != c.owner) {
            return Err("a counter is of another engine than the memory".into());
        }
        let room = facts.grants[0].tail.as_ref().map_or(0, fabric_engine::RemoteRegion::len);
        if (u64::from(request.tail_slot) + 1).saturating_mul(self.terms.tail_nbytes) > room {
            return Err(format!("it has no slot {} for tails", request.tail_slot));
        }
        let mut links = Vec::new();
        for (to, granted) in facts.grants.iter().enumerate() {
            for (from, rank) in self.local.iter().enumerate() {
                let link = facts
                    .pairing
                    .link(rank.rank as usize, granted.rank, request.salt)
                    .map_err(|e| e.to_string())?;
                if !link.is_empty() {
                    links.push(Route { link, from, to });
                }
            }
        }
        let cells = (0..facts.groups.len()).map(|g| facts.pairing.cells(g, have..tokens));
        let cells = cells.collect::<Result<Vec<_>, _>>().map_err(|e| e.to_string())?;
        let sent = self.steps.iter().map(|(group, _)| cells[*group].start).collect();
        let counters = request.counters.iter().map(fabric_engine::api::CounterRef::imm).collect();
        let state = Mutex::new(Progress { sent, ..Progress::default() });
        let tail_slot = request.tail_slot;
        let job =
            Job { id: 0, key, facts, tokens, there, tail_slot, cells, links, counters, state };
        Ok((request.payload, job))
    }

    fn refuse(self: &Arc<Self>, meeting: (EngineId, u64), seq: u64, why: String) {
        let peer = {
            let mut state = self.state.lock();
            let Some(m) = state.meetings.get_mut(&meeting) else { return };
            m.ended.insert(seq, At::Failed(why.clone()));
            m.facts.peer.clone()
        };
        let states = vec![(seq, At::Failed(why))];
        self.say(&peer, &Message::Status { meeting: meeting.1, states });
    }

    fn cancel(self: &Arc<Self>, meeting: (EngineId, u64), seq: u64) {
        let found = {
            let mut state = self.state.lock();
            let Some(m) = state.meetings.get_mut(&meeting) else { return };
            m.silent = 0;
            match m.jobs.get(&seq).copied() {
                Some(id) => Err(state.jobs.get(&id).cloned()),
                None => {
                    // The request may still come: it is over already.
                    let at = match seq < m.floor {
                        true => At::Cancelled,
                        false => m.ended.entry(seq).or_insert(At::Cancelled).clone(),
                    };
                    Ok((m.facts.peer.clone(), at))
                }
            }
        };
        match found {
            Ok((peer, at)) => {
                let message = Message::Status { meeting: meeting.1, states: vec![(seq, at)] };
                self.say(&peer, &message);
            }
            Err(Some(job)) => self.stop(&job, At::Cancelled, Some(Cause::Cancelled)),
            Err(None) => {}
        }
    }

    fn beat(self: &Arc<Self>, meeting: (EngineId, u64), floor: u64, open: &[u64]) {
        let (peer, states) = {
            let mut state = self.state.lock();
            let Some(m) = state.meetings.get_mut(&meeting) else { return };
            m.silent = 0;
            if floor > m.floor {
                m.floor = floor;
                m.ended = m.ended.split_off(&floor);
            }
            let at = |seq: &u64| match (m.jobs.contains_key(seq), m.ended.get(seq)) {
                (true, _) => At::Open,
                (false, Some(at)) => at.clone(),
                (false, None) => At::Unknown,
            };
            let states: Vec<(u64, At)> = open.iter().map(|seq| (*seq, at(seq))).collect();
            (m.facts.peer.clone(), states)
        };
        self.say(&peer, &Message::Status { meeting: meeting.1, states });
    }

    /// Ends a meeting, and all jobs of it.
    pub(super) fn part(self: &Arc<Self>, meeting: (EngineId, u64), why: &str, say: bool) {
        let (gone, jobs) = {
            let mut state = self.state.lock();
            let Some(gone) = state.meetings.remove(&meeting) else { return };
            let jobs = gone.jobs.values().filter_map(|id| state.jobs.get(id).cloned());
            let jobs: Vec<Arc<Job>> = jobs.collect();
            (gone, jobs)
        };
        let cause = Cause::Lost(format!("decoder {}: {why}", gone.facts.name));
        for job in jobs {
            self.stop(&job, At::Cancelled, Some(cause.clone()));
        }
        if say {
            let message = Message::Goodbye { meeting: meeting.1, why: why.to_owned() };
            self.say(&gone.facts.peer, &message);
        }
    }

    pub(super) fn tick_later(self: &Arc<Self>) {
        let weak = Arc::downgrade(self);
        let tick = move || {
            if let Some(inner) = weak.upgrade() {
                inner.tick();
                inner.tick_later();
            }
        };
        if let Err(error) = after(self.control(), self.terms.beat, tick) {
            tracing::debug!(%error, "no more ticks");
        }
    }

    /// Gives up decoders that haven't been heard for too long.
    fn tick(self: &Arc<Self>) {
        let limit = self.terms.silent_beats();
        let silent: Vec<(EngineId, u64)> = {
            let mut state = self.state.lock();
            state.meetings.values_mut().for_each(|m| m.silent += 1);
            let silent = state.meetings.iter().filter(|(_, m)| m.silent > limit);
            silent.map(|(key, _)| *key).collect()
        };
        for meeting in silent {
            self.part(meeting, "it has not been heard for too long", true);
        }
    }
}
