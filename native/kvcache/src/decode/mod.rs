//! The decoder: requests the pages of a prompt from prefillers, and reports when they have arrived,
//! when they never will, and when they may be reused.

mod messages;
mod state;
#[cfg(test)]
mod tests;

use std::{
    collections::BTreeMap,
    sync::{Arc, Weak},
};

use fabric_engine::{
    api::{CounterRef, EngineId, Span},
    locks::Mutex,
    Counter, EngineError, Handle, Peer, Region, Result,
};

use self::state::{
    DecoderState, PendingPull, Phase, PrefillerInfo, PrefillerProcess, ProcessState, Session,
    SessionPhase,
};
use crate::{
    events::Events,
    layout::{CacheGroup, CacheLayout},
    pairing::Pairing,
    parts::Parts,
    terms::{check_local, common_groups, Cause, LocalRank, Terms},
    wire::{Grant, Hello, Message, Offer, PageTable, Request},
};

/// Events of a request. `Ready` or `Failed` comes once, then `Released` once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// All pages and the tail have arrived (IC-2).
    Ready,
    /// The pages will not arrive; they must neither be read nor reused yet.
    Failed(Cause),
    /// Nothing that the prefiller wrote can land any more: the pages may be reused (MR-1).
    Released,
}

/// A pull: one request of a decoder for a prompt's pages.
#[derive(Clone, Debug, Default)]
pub struct Pull {
    /// Tokens of the prompt.
    pub tokens: u64,
    /// Number of leading tokens that the decoder has, in whole pages.
    pub have: u64,
    /// Selects among replicas of prefill ranks; any number.
    pub salt: u64,
    /// The pages for all tokens, in their order, for each group of the layout.
    pub tables: Vec<Vec<u32>>,
    pub tail_slot: u32,
    /// Opaque data for the engine behind the prefiller.
    pub payload: Vec<u8>,
    /// Timeout in seconds; after it the request fails with [`Cause::TimedOut`].
    pub timeout: std::time::Duration,
    /// The request's name in flight records.
    pub span: Span,
}

/// A decoder instance's process.
pub struct Decoder {
    inner: Arc<Inner>,
}

impl std::fmt::Debug for Decoder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = self.inner.state.lock();
        write!(f, "Decoder({}, {} requests)", self.inner.name, state.pulls.len())
    }
}

struct Inner {
    name: String,
    layouts: Vec<CacheLayout>,
    local: Vec<LocalRank>,
    terms: Terms,
    /// The groups, with the pages that every local rank has.
    groups: Vec<CacheGroup>,
    state: Mutex<DecoderState>,
    events: Arc<Events<Event>>,
    parts: Parts,
}

impl Decoder {
    /// `layouts` are those of all ranks of the instance, `local` the ranks of this process. The
    /// first of them takes messages: its engine's receive pool is opened here.
    ///
    /// Callback threads of an engine call `on_event` with a request's number and event.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] if layouts, ranks and regions don't fit together.
    pub fn new(
        name: &str,
        layouts: Vec<CacheLayout>,
        local: Vec<LocalRank>,
        terms: Terms,
        on_event: impl Fn(u64, Event) + Send + Sync + 'static,
    ) -> Result<Self> {
        check_local(&layouts, &local, &terms)?;
        let events = Arc::new(Events::new(on_event));
        let state = Mutex::new(DecoderState {
            sessions: BTreeMap::new(),
            pulls: BTreeMap::new(),
            events: Arc::clone(&events),
            next_seq: 0,
            closed: false,
        });
        let name = name.to_owned();
        let groups = common_groups(&layouts, local.iter().map(|r| r.rank));
        let parts = Parts::new(&terms);
        let inner = Arc::new(Inner { name, groups, layouts, local, terms, state, events, parts });
        let weak = Arc::downgrade(&inner);
        inner.control().receive(inner.terms.max_message, Terms::MESSAGES, move |delivery| {
            if let Some(inner) = weak.upgrade() {
                inner.on_message(delivery.from(), delivery.message());
            }
        })?;
        Ok(Self { inner })
    }

    /// Handles a message of a prefiller, for callers that opened the receive pool of the first
    /// rank's engine themselves. A message that is no prefiller's is ignored, with a warning.
    pub fn on_message(&self, from: EngineId, message: &[u8]) {
        self.inner.on_message(from, message);
    }

    /// Registers a prefiller; returns its number for [`Decoder::request`]. The local memory is
    /// registered once more for it, so that its access can be revoked alone.
    ///
    /// # Errors
    /// [`EngineError::Handshake`] if its pages don't fit the local ones; the text lists all
    /// differences.
    pub fn connect(&self, offer: &Offer) -> Result<u64> {
        let inner = &self.inner;
        let unlike = |cause: String| EngineError::Handshake { peer: offer.name.clone(), cause };
        let pairing =
            Pairing::new(&offer.layouts, &inner.layouts).map_err(|e| unlike(e.to_string()))?;
        if offer.tail_nbytes != inner.terms.tail_nbytes {
            return Err(unlike(format!(
                "it sends tails of {} bytes, decoder {} takes {}; give both the same model and settings",
                offer.tail_nbytes, inner.name, inner.terms.tail_nbytes
            )));
        }
        let mut writers = Vec::new();
        for rank in &inner.local {
            let mut peers: Vec<Option<Peer>> = vec![None; offer.layouts.len()];
            for (number, address) in offer.ends.iter().flat_map(|e| &e.ranks) {
                if let Some(peer) = peers.get_mut(*number as usize) {
                    *peer = Some(rank.engine.peer(address)?);
                }
            }
            writers.push(peers.into_iter().flatten().collect());
        }
        let mut processes = Vec::new();
        for end in &offer.ends {
            let peer = inner.control().peer(&end.address)?;
            processes.push(PrefillerProcess { peer, incarnation: None, silent: 0 });
        }
        let mut regions = Vec::new();
        let mut grants = Vec::new();
        for (i, rank) in inner.local.iter().enumerate() {
            let mut again = |region: &Region| -> Result<_> {
                let region = rank.engine.register_again(region)?;
                let descriptor = region.descriptor();
                regions.push(region);
                Ok(descriptor)
            };
            let buffers = rank.buffers.iter().map(&mut again).collect::<Result<_>>()?;
            let tail = rank.tail.as_ref().filter(|_| i == 0).map(&mut again).transpose()?;
            grants.push(Grant { rank: rank.rank, buffers, tail });
        }
        let info = PrefillerInfo {
            name: offer.name.clone(),
            pairing,
            max_message: offer.max_message,
            writers,
        };
        let mut actions = Vec::new();
        let number = {
            let mut state = inner.state.lock();
            if state.closed {
                return Err(EngineError::Closed);
            }
            let number = inner.control().number();
            let hello = Message::Hello(Box::new(Hello {
                session: number,
                name: inner.name.clone(),
                address: inner.control().address().clone(),
                layouts: inner.layouts.clone(),
                grants,
                tail_nbytes: inner.terms.tail_nbytes,
                beat_ms: inner.terms.beat.as_millis() as u32,
            }))
            .to_bytes();
            if hello.len() as u64 > offer.max_message {
                return Err(EngineError::Invalid(format!(
                    "decoder {} presents itself with {} bytes, prefiller {} takes messages of {}; raise \
                     max_message there",
                    inner.name,
                    hello.len(),
                    offer.name,
                    offer.max_message
                )));
            }
            let session = Session {
                info: Arc::new(info),
                processes,
                grants: regions,
                phase: SessionPhase::Greeting,
                early: Vec::new(),
                leases: Vec::new(),
                revoked: false,
            };
            for process in 0..session.processes.len() {
                actions.extend(session.send(number, process, hello.clone(), None));
            }
            state.sessions.insert(number, session);
            number
        };
        inner.run(actions);
        inner.schedule_beat(number);
        Ok(number)
    }

    /// Requests pages from a prefiller; returns the request's number. [`Event`]s report its
    /// progress.
    ///
    /// # Errors
    /// Errors of the request itself, before anything is sent: tables that don't fit the tokens, a
    /// page out of range, a message that is too long. [`EngineError::Stale`] if the prefiller has
    /// been given up.
    pub fn request(&self, prefiller: u64, pull: Pull) -> Result<u64> {
        let inner = &self.inner;
        let info = {
            let state = inner.state.lock();
            if state.closed {
                return Err(EngineError::Closed);
            }
            let session = state.sessions.get(&prefiller);
            let Some(session) = session.filter(|m| !matches!(m.phase, SessionPhase::Lost(_)))
            else {
                return Err(given_up(prefiller));
            };
            Arc::clone(&session.info)
        };
        inner.check(&pull)?;
        let mut counters: Vec<Counter> = Vec::new();
        let mut expectations: Vec<Handle> = Vec::new();
        for (i, rank) in inner.local.iter().enumerate() {
            let counter = rank.engine.counter()?;
            let pages = info
                .pairing
                .expected(rank.rank as usize, pull.salt, pull.have..pull.tokens)
                .map_err(|e| EngineError::Invalid(e.to_string()))?;
            let tail = u64::from(i == 0 && inner.terms.tail_nbytes > 0);
            let sources = info.pairing.sources(rank.rank as usize, pull.salt);
            let sources = sources.map_err(|e| EngineError::Invalid(e.to_string()))?;
            let mut writers: Vec<Peer> =
                sources.iter().filter_map(|s| info.writers[i].get(*s).cloned()).collect();
            if tail > 0 && !sources.contains(&0) {
                writers.extend(info.writers[i].first().cloned());
            }
            let expected = u32::try_from(pages + tail).map_err(|_| {
                EngineError::Invalid(format!(
                    "{pages} pieces of pages; ask for fewer tokens at a time"
                ))
            })?;
            expectations.push(counter.expect_for(pull.span, expected, &writers, pull.timeout)?);
            counters.push(counter);
        }
        let references: Vec<CounterRef> = counters.iter().map(Counter::reference).collect();
        let mut actions = Vec::new();
        let waits = expectations.clone();
        let seq = {
            let mut state = inner.state.lock();
            let seq = state.next_seq;
            let request = Box::new(Request {
                seq,
                tokens: pull.tokens,
                have: pull.have,
                salt: pull.salt,
                tables: pull.tables.iter().map(|t| PageTable::of(t)).collect(),
                counters: references,
                tail_slot: pull.tail_slot,
                payload: pull.payload,
            });
            let message = Message::Request {
                session: prefiller,
                incarnation: u64::MAX,
                request: request.clone(),
            }
            .to_bytes();
            if message.len() as u64 > info.max_message {
                return Err(EngineError::Invalid(format!(
                    "a request of {} bytes, prefiller {} takes messages of {}; raise max_message there, or \
                     ask for less at a time",
                    message.len(),
                    info.name,
                    info.max_message
                )));
            }
            state.next_seq += 1;
            // The prefiller may have been given up and removed meanwhile.
            let Some(session) = state.sessions.get_mut(&prefiller) else {
                return Err(given_up(prefiller));
            };
            let mut processes = vec![ProcessState::NotRequested; session.processes.len()];
            let open = session.phase == SessionPhase::Open;
            if open {
                for (process, at) in processes.iter_mut().enumerate() {
                    actions.extend(session.send_request(prefiller, process, &request));
                    *at = ProcessState::Requested { unknown: 0 };
                }
            } else {
                session.early.push(seq);
            }
            let missing = expectations.len();
            let early = (!open).then_some(request);
            let phase = Phase::Waiting;
            let pending = PendingPull {
                session: prefiller,
                early,
                counters,
                expectations,
                missing,
                phase,
                processes,
                lingers: 0,
            };
            state.pulls.insert(seq, pending);
            // Given up, but not removed yet.
            let lost = |m: &Session| matches!(m.phase, SessionPhase::Lost(_));
            if state.sessions.get(&prefiller).is_some_and(lost) {
                let cause = state.cause_of_loss(prefiller);
                state.fail(seq, cause, &mut actions);
            }
            seq
        };
        for wait in waits {
            let weak = Arc::downgrade(inner);
            wait.on_done(move |end| {
                if let Some(inner) = Weak::upgrade(&weak) {
                    inner.arrived(seq, end);
                }
            });
        }
        inner.run(actions);
        Ok(seq)
    }

    /// Cancels a request. [`Event::Failed`] follows unless it was ready or failed before;
    /// `Released` when the prefiller has confirmed that it writes no more. True if it is not told.
    pub fn cancel(&self, seq: u64) -> bool {
        let mut actions = Vec::new();
        let mut state = self.inner.state.lock();
        let unheard = state.is_unheard(seq);
        state.fail(seq, Cause::Cancelled, &mut actions);
        state.stop(seq, &mut actions);
        drop(state);
        self.inner.run(actions);
        unheard
    }

    /// Ends the session with a prefiller: its requests fail, and its access to local memory is
    /// revoked.
    pub fn disconnect(&self, prefiller: u64) {
        self.inner.disconnect(prefiller, "this decoder has left it");
    }

    /// Whether the prefiller accepts requests: it has not been given up.
    pub fn is_connected(&self, prefiller: u64) -> bool {
        let state = self.inner.state.lock();
        state.sessions.get(&prefiller).is_some_and(|m| !matches!(m.phase, SessionPhase::Lost(_)))
    }

    /// Requests whose pages aren't released.
    pub fn open(&self) -> usize {
        self.inner.state.lock().pulls.len()
    }

    /// Prefillers with a session, and given up ones whose access isn't revoked yet.
    pub fn prefillers(&self) -> usize {
        self.inner.state.lock().sessions.len()
    }

    /// Ends all sessions, as dropping it does. Events still come until all requests are released.
    pub fn close(&self) {
        let mut actions = Vec::new();
        {
            let mut state = self.inner.state.lock();
            state.closed = true;
            let sessions: Vec<u64> = state.sessions.keys().copied().collect();
            for session in sessions {
                state.lose(session, "this decoder is closed", true, &mut actions);
            }
        }
        self.inner.run(actions);
    }
}

impl Drop for Decoder {
    fn drop(&mut self) {
        self.close();
    }
}

impl Inner {
    fn control(&self) -> &Arc<fabric_engine::TransferEngine> {
        &self.local[0].engine
    }

    fn check(&self, pull: &Pull) -> Result<()> {
        let invalid = |what: String| Err(EngineError::Invalid(what));
        if pull.tokens == 0 || pull.have >= pull.tokens {
            return invalid(format!(
                "{} tokens of which {} are here: one at least must be computed",
                pull.tokens, pull.have
            ));
        }
        if pull.tables.len() != self.groups.len() {
            return invalid(format!(
                "{} page tables for {} groups of layers",
                pull.tables.len(),
                self.groups.len()
            ));
        }
        crate::table::entries(&self.groups, pull.tokens).or_else(|e| invalid(e).map(|()| 0))?;
        for (group, table) in self.groups.iter().zip(&pull.tables) {
            crate::table::check(group, pull.tokens, table)
                .or_else(|e| invalid(format!("group {}: {e}", group.name)))?;
            if !group.is_whole_pages(pull.have) {
                return invalid(format!(
                    "{} tokens are here, which isn't whole pages of {} tokens in group {}",
                    pull.have, group.page_tokens, group.name
                ));
            }
        }
        let tail = self.local[0].tail.as_ref().map_or(0, Region::len);
        let end = (u64::from(pull.tail_slot) + 1).checked_mul(self.terms.tail_nbytes);
        if end.is_none_or(|end| end > tail) {
            return invalid(format!("there is no slot {} for tails", pull.tail_slot));
        }
        Ok(())
    }

    /// Handles the end of one rank's expectation.
    fn arrived(self: &Arc<Self>, seq: u64, end: Result<()>) {
        let mut actions = Vec::new();
        {
            let mut state = self.state.lock();
            match end {
                Ok(()) => {
                    let pull = state.pulls.get_mut(&seq);
                    let Some(pull) = pull.filter(|t| t.phase == Phase::Waiting) else { return };
                    pull.missing -= 1;
                    if pull.missing > 0 {
                        return;
                    }
                    pull.phase = Phase::Ready;
                    state.events.push(seq, Event::Ready);
                    state.settle(seq, &mut actions);
                }
                Err(error) => {
                    let session = state.pulls.get(&seq).map(|t| t.session);
                    state.fail(seq, Cause::of(&error), &mut actions);
                    if let (Some(session), true) = (session, is_loss(&error)) {
                        state.lose(session, &error.to_string(), false, &mut actions);
                    }
                }
            }
        }
        self.run(actions);
    }

    fn disconnect(self: &Arc<Self>, prefiller: u64, why: &str) {
        let mut actions = Vec::new();
        self.state.lock().lose(prefiller, why, true, &mut actions);
        self.run(actions);
    }
}

fn given_up(prefiller: u64) -> EngineError {
    EngineError::Stale {
        what: format!("prefiller {prefiller}"),
        cause: "it has been given up".into(),
        remedy: "connect to it again, or ask another",
    }
}

/// Whether an error says that a peer is gone, and not only that one request failed.
fn is_loss(error: &EngineError) -> bool {
    matches!(
        error,
        EngineError::PeerLost { .. } | EngineError::Unreachable { .. } | EngineError::Stale { .. }
    )
}
