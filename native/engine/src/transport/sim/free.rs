//! A network in which nothing has a time of its own: whoever drives it says what happens next. So every order of
//! what is under way can be tried, and not only those that delays bring about.
//!
//! An engine is a state machine, so its state follows from what it has seen, in its order. These histories, as
//! numbers, are the state of the whole: two runs that share them go on alike.

use std::collections::BTreeMap;

use super::{
    node::{Port, Side},
    wire::{Event, Way, World},
};
use crate::{
    api::EngineId,
    domain::{DomainError, LinkId},
};

/// One thing that may happen next, named by its place among the others of its kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Choice {
    /// What is under way arrives, or what has happened is found out.
    Event(usize),
    /// One end of a link is lost. Its other end finds out later, or is told before.
    Loss(usize),
}

struct Pending {
    id: u64,
    way: Option<Way>,
    event: Event,
}

/// What one engine has seen, and how much it has sent since the start.
#[derive(Default)]
struct History {
    seen: u64,
    sent: u64,
}

#[derive(Default)]
pub(crate) struct Free {
    pending: Vec<Pending>,
    histories: BTreeMap<EngineId, History>,
    /// What happens just now.
    happening: u64,
}

impl Free {
    /// Something is under way; `by` has sent it.
    pub fn add(&mut self, by: EngineId, way: Option<Way>, event: Event) {
        let history = self.histories.entry(by).or_default();
        history.sent += 1;
        let id = mix(history.seen, history.sent);
        self.pending.push(Pending { id, way, event });
    }

    /// A number for what all engines have seen.
    pub fn seen(&self, start: u64) -> u64 {
        self.histories.values().map(|h| h.seen).fold(start, mix)
    }

    /// An engine sees something.
    pub fn see(&mut self, engine: EngineId, what: u64) {
        let history = self.histories.entry(engine).or_default();
        history.seen = mix(history.seen, what);
    }

    /// A name for the link that comes up now: the same whenever the same engines have seen the same.
    pub fn name(&self) -> u64 {
        self.happening | 1
    }

    /// Those of the pending that nothing is ahead of.
    fn ready(&self, ordered: bool) -> Vec<usize> {
        let lane = |p: &Pending| p.way.map(|w| (w.name, w.from));
        let is_note = |p: &Pending| matches!(p.event, Event::Note { .. });
        let behind = |a: &Pending, b: &Pending| {
            lane(a).is_some() && lane(a) == lane(b) && (ordered || is_note(a) && is_note(b))
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
    /// The end of a link that it comes to; `Err` for a connection: at whose place it is made.
    fn end(&self) -> Result<Side, Port> {
        match self {
            Event::Land { job, .. } => Ok(job.to),
            Event::Fetched { job, .. } => Ok(job.from),
            Event::Done { to, .. } | Event::Message { to, .. } | Event::Note { to, .. } => Ok(*to),
            Event::Connect { to, .. } => Err(*to),
            Event::Cut { at, .. } | Event::WorkFails { at, .. } => Ok(*at),
        }
    }

    /// At whose place it happens.
    pub fn at(&self) -> Port {
        self.end().map_or_else(|port| port, |(port, _)| port)
    }
}

impl World {
    fn is_up(&self, (port, link): Side) -> bool {
        self.nodes.get(&port).is_some_and(|n| n.links.contains_key(&link))
    }

    /// Both ends of every link that is up at both, by either end.
    fn ends(&self) -> Vec<(Side, Side)> {
        let mut ends: Vec<_> =
            self.nodes.ports().into_iter().flat_map(|port| self.links_of(port)).collect();
        ends.retain(|(_, there)| self.is_up(*there));
        ends
    }

    pub(crate) fn choices(&mut self) -> Vec<Choice> {
        let Some(mut free) = self.free.take() else { return Vec::new() };
        // What comes to an end that is down does nothing, in whatever order.
        free.pending.retain(|p| p.event.end().map_or(true, |end| self.is_up(end)));
        let events = free.ready(self.config.ordered).into_iter().map(Choice::Event);
        let losses = (0..self.ends().len()).map(Choice::Loss);
        let choices = events.chain(losses).collect();
        self.free = Some(free);
        choices
    }

    pub(crate) fn take(&mut self, choice: Choice) {
        let Some(free) = &mut self.free else { return };
        match choice {
            Choice::Event(i) => {
                let Pending { id, event, .. } = free.pending.remove(i);
                free.happening = id;
                free.see(event.at().engine, id);
                if let Event::Connect { from, .. } = event {
                    free.see(from.engine, id);
                }
                self.happen(event);
            }
            Choice::Loss(i) => {
                let Some((here, there)) = self.ends().get(i).copied() else { return };
                let Some(free) = &mut self.free else { return };
                free.see(here.0.engine, 1 + u64::from(here.0.rail) + (u64::from(here.1) << 8));
                let cause = DomainError::LinkDown("the link broke".into());
                free.add(here.0.engine, None, Event::Cut { at: there, cause: cause.clone() });
                self.cut(here, &cause);
            }
        }
    }

    pub(crate) fn words(&self, choice: Choice, lives: &[EngineId]) -> String {
        let node = |port: Port| {
            let place = lives.iter().position(|l| *l == port.engine);
            place.map_or("a past life".into(), |n| format!("node {n} rail {}", port.rail))
        };
        let by = |link: LinkId| format!("link {link}");
        match choice {
            Choice::Loss(i) => match self.ends().get(i) {
                None => "nothing".into(),
                Some(((port, link), _)) => format!("{} of {} is lost", by(*link), node(*port)),
            },
            Choice::Event(i) => match self.free.as_ref().and_then(|f| f.pending.get(i)) {
                None => "nothing".into(),
                Some(p) => {
                    let at = node(p.event.at());
                    match &p.event {
                        Event::Land { job, piece } => {
                            let (what, of) = (job.words(), by(job.to.1));
                            format!("piece {piece} of {what} arrives at {at} by {of}")
                        }
                        Event::Fetched { job, piece } => {
                            format!("piece {piece} of {} comes home to {at}", job.words())
                        }
                        Event::Done { to, result, .. } => {
                            format!("{at} is told of work on {}: {result:?}", by(to.1))
                        }
                        Event::Message { to, .. } => {
                            format!("a message arrives at {at} by {}", by(to.1))
                        }
                        Event::Note { to, .. } => format!("a note arrives at {at} by {}", by(to.1)),
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
