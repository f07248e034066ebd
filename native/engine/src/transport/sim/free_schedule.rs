//! A network in which nothing has a time: the caller chooses the next event, so every order of
//! events can be tested, not only those that delays produce.
//!
//! An engine is a state machine, so its state follows from the events that it has seen, in order.
//! The hashes of these histories are the state of the whole: two runs with equal hashes continue
//! alike.

use std::collections::BTreeMap;

use super::{
    node::{LinkEnd, Port},
    wire::{Event, Route, World},
};
use crate::{
    api::EngineId,
    domain::{DomainError, LinkId},
};

/// One possible next event, named by its index among those of its kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NextEvent {
    /// A delivery arrives, or an end learns of an event.
    Event(usize),
    /// One end of a link is lost. The other end learns of it later, or already knows.
    Loss(usize),
}

struct PendingEvent {
    id: u64,
    route: Option<Route>,
    event: Event,
}

/// Hash of the events that one engine has seen, and number of those it has sent.
#[derive(Default)]
struct History {
    seen: u64,
    sent: u64,
}

#[derive(Default)]
pub(crate) struct FreeSchedule {
    pending: Vec<PendingEvent>,
    histories: BTreeMap<EngineId, History>,
    /// Id of the current event.
    happening: u64,
}

impl FreeSchedule {
    /// Adds an event that `by` has sent.
    pub fn add(&mut self, by: EngineId, route: Option<Route>, event: Event) {
        let history = self.histories.entry(by).or_default();
        history.sent += 1;
        let id = mix(history.seen, history.sent);
        self.pending.push(PendingEvent { id, route, event });
    }

    /// A hash of what all engines have seen.
    pub fn seen(&self, start: u64) -> u64 {
        self.histories.values().map(|h| h.seen).fold(start, mix)
    }

    /// An engine sees an event.
    pub fn record_seen(&mut self, engine: EngineId, what: u64) {
        let history = self.histories.entry(engine).or_default();
        history.seen = mix(history.seen, what);
    }

    /// A name for the link that comes up now; equal in runs with equal histories.
    pub fn name(&self) -> u64 {
        self.happening | 1
    }

    /// Indices of pending events that no other event must precede.
    fn ready(&self, ordered: bool) -> Vec<usize> {
        let direction = |p: &PendingEvent| p.route.map(|w| (w.name, w.from));
        let is_group_frame = |p: &PendingEvent| matches!(p.event, Event::GroupFrame { .. });
        let behind = |a: &PendingEvent, b: &PendingEvent| {
            direction(a).is_some()
                && direction(a) == direction(b)
                && (ordered || is_group_frame(a) && is_group_frame(b))
        };
        let free = |i: &usize| {
            let p = &self.pending[*i];
            !self.pending[..*i].iter().any(|q| behind(q, p))
        };
        (0..self.pending.len()).filter(free).collect()
    }
}

pub(crate) fn mix(a: u64, b: u64) -> u64 {
    let word = (a.rotate_left(23) ^ b).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (word ^ word >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) ^ word >> 32
}

pub(crate) fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(bytes.len() as u64, |h, b| mix(h, u64::from(*b)))
}

impl Event {
    /// The link end at which it arrives; for a connect `Err` with the acceptor's NIC.
    fn end(&self) -> Result<LinkEnd, Port> {
        match self {
            Event::Land { job, .. } => Ok(job.to),
            Event::Fetched { job, .. } => Ok(job.from),
            Event::Done { to, .. } | Event::Message { to, .. } | Event::GroupFrame { to, .. } => {
                Ok(*to)
            }
            Event::Connect { to, .. } => Err(*to),
            Event::Cut { at, .. } | Event::WorkFails { at, .. } => Ok(*at),
        }
    }

    /// The NIC at which it happens.
    pub fn at(&self) -> Port {
        self.end().map_or_else(|port| port, |(port, _)| port)
    }
}

impl World {
    fn is_up(&self, (port, link): LinkEnd) -> bool {
        self.nodes.get(&port).is_some_and(|n| n.links.contains_key(&link))
    }

    /// Both ends of every link that is up at both, from either end.
    fn ends(&self) -> Vec<(LinkEnd, LinkEnd)> {
        let mut ends: Vec<_> =
            self.nodes.ports().into_iter().flat_map(|port| self.links_of(port)).collect();
        ends.retain(|(_, there)| self.is_up(*there));
        ends
    }

    pub(crate) fn choices(&mut self) -> Vec<NextEvent> {
        let Some(mut free) = self.free.take() else { return Vec::new() };
        // Events at an end that is down have no effect, in any order.
        free.pending.retain(|p| p.event.end().map_or(true, |end| self.is_up(end)));
        let events = free.ready(self.config.ordered).into_iter().map(NextEvent::Event);
        let losses = (0..self.ends().len()).map(NextEvent::Loss);
        let choices = events.chain(losses).collect();
        self.free = Some(free);
        choices
    }

    pub(crate) fn take(&mut self, choice: NextEvent) {
        let Some(free) = &mut self.free else { return };
        match choice {
            NextEvent::Event(i) => {
                let PendingEvent { id, event, .. } = free.pending.remove(i);
                free.happening = id;
                free.record_seen(event.at().engine, id);
                if let Event::Connect { from, .. } = event {
                    free.record_seen(from.engine, id);
                }
                self.apply_event(event);
            }
            NextEvent::Loss(i) => {
                let Some((here, there)) = self.ends().get(i).copied() else { return };
                let Some(free) = &mut self.free else { return };
                free.record_seen(
                    here.0.engine,
                    1 + u64::from(here.0.rail) + (u64::from(here.1) << 8),
                );
                let cause = DomainError::LinkDown("the link broke".into());
                free.add(here.0.engine, None, Event::Cut { at: there, cause: cause.clone() });
                self.cut(here, &cause);
            }
        }
    }

    pub(crate) fn describe(&self, choice: NextEvent, incarnations: &[EngineId]) -> String {
        let node = |port: Port| {
            let place = incarnations.iter().position(|l| *l == port.engine);
            place
                .map_or("an earlier incarnation".into(), |n| format!("node {n} rail {}", port.rail))
        };
        let by = |link: LinkId| format!("link {link}");
        match choice {
            NextEvent::Loss(i) => match self.ends().get(i) {
                None => "nothing".into(),
                Some(((port, link), _)) => format!("{} of {} is lost", by(*link), node(*port)),
            },
            NextEvent::Event(i) => match self.free.as_ref().and_then(|f| f.pending.get(i)) {
                None => "nothing".into(),
                Some(p) => {
                    let at = node(p.event.at());
                    match &p.event {
                        Event::Land { job, chunk } => {
                            let (what, of) = (job.describe(), by(job.to.1));
                            format!("chunk {chunk} of {what} arrives at {at} by {of}")
                        }
                        Event::Fetched { job, chunk } => {
                            format!("chunk {chunk} of {} arrives back at {at}", job.describe())
                        }
                        Event::Done { to, result, .. } => {
                            format!("{at} is notified of work on {}: {result:?}", by(to.1))
                        }
                        Event::Message { to, .. } => {
                            format!("a message arrives at {at} by {}", by(to.1))
                        }
                        Event::GroupFrame { to, .. } => {
                            format!("a group frame arrives at {at} by {}", by(to.1))
                        }
                        Event::Connect { from, .. } => format!("{} connects to {at}", node(*from)),
                        Event::Cut { at: (_, link), .. } => {
                            format!("{at} finds {} lost", by(*link))
                        }
                        Event::WorkFails { .. } => format!("work of {at} fails"),
                    }
                }
            },
        }
    }
}
