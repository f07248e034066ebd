//! From a command to requests.

use fabric_engine::{Local, Op, Remote, Time};

use super::{place, Event, Executor, RING};
use crate::{
    command::{Add, Command, Scope},
    order::{Entry, ENTRY},
    peer::{Posted, State},
    rounds::Rounds,
    tag::Kind,
    ProxyError, Result,
};

/// Commands that are looked at before what they need is posted: what goes to one peer goes as one request.
const BURST: u64 = 32;
/// Bursts of one FIFO in one step, so that the others have their turn.
const BURSTS: usize = 4;

/// A command that can be posted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Planned {
    rank: usize,
    index: u64,
    channel: u8,
    epoch: u8,
    /// Source offset, destination offset and length.
    data: Option<(u64, u64, u64)>,
    atomic: bool,
}

/// What is to be done about a command now.
enum Verdict {
    Post(Planned),
    /// It is over.
    Over,
    /// Not yet.
    Wait,
}

impl Executor {
    pub(super) fn run(&mut self, fifo: usize, now: Time) -> bool {
        let mut moved = false;
        self.sources[fifo].blocked = false;
        for _ in 0..BURSTS {
            let taken = self.burst(fifo, now);
            if taken == 0 {
                break;
            }
            moved = true;
            if self.sources[fifo].blocked {
                break;
            }
        }
        moved
    }

    /// Carries out the oldest commands as far as possible at once; how many.
    fn burst(&mut self, fifo: usize, now: Time) -> u64 {
        let mut plan = std::mem::take(&mut self.plan);
        let mut taken = 0;
        while taken < BURST {
            let Some(words) = self.sources[fifo].popper.poll(taken) else { break };
            let index = self.sources[fifo].popper.index() + taken;
            let verdict = match Command::decode(words) {
                Ok(Command::Write { rank, channel, from, to, len, add }) => {
                    self.send(now, (rank, channel, index), Some((from, to, len)), add)
                }
                Ok(Command::Atomic { rank, channel, add }) => {
                    self.send(now, (rank, channel, index), None, Some(add))
                }
                // They are about what came before them, which is posted first.
                Ok(_) if !plan.is_empty() => break,
                Ok(Command::Drain { up_to }) => Ok(self.drain(fifo, index, up_to)),
                Ok(Command::Barrier { scope, channel }) => {
                    Ok(self.barrier(fifo, (scope, channel), now))
                }
                Err(error) => Err(ProxyError::Command(error)),
            };
            match verdict {
                Ok(Verdict::Post(planned)) => plan.push(planned),
                Ok(Verdict::Over) => {}
                Ok(Verdict::Wait) => {
                    self.sources[fifo].blocked = true;
                    break;
                }
                Err(error) => (self.on_event)(Event::Refused { fifo, index, error }),
            }
            taken += 1;
        }
        // In the order of the ranks, and of each one's commands.
        plan.sort_by_key(|p| p.rank);
        for of_one in plan.chunk_by(|a, b| a.rank == b.rank) {
            self.post_planned(fifo, of_one);
        }
        plan.clear();
        self.plan = plan;
        if taken > 0 {
            self.sources[fifo].popper.pop(taken);
        }
        taken
    }

    /// Checks a write or an atomic, and finds its place among those to the same peer.
    fn send(
        &mut self,
        now: Time,
        (rank, channel, index): (u16, u8, u64),
        data: Option<(u64, u64, u64)>,
        add: Option<Add>,
    ) -> Result<Verdict> {
        let rank = usize::from(rank);
        let state = self.peers.get(rank).map(|p| p.state);
        if state != Some(State::Alive) && self.inbox.has_news() {
            // It may have joined before this was pushed.
            return Ok(Verdict::Wait);
        }
        if state == Some(State::Masked) {
            return Ok(Verdict::Over);
        }
        if let Some((from, to, len)) = data {
            self.memory.here(from, len)?;
            self.memory.at(rank, to, len)?;
        }
        if state != Some(State::Alive) {
            self.memory.at(rank, 0, 0)?;
            return Err(ProxyError::NotThere { rank });
        }
        let slots = self.common.words.len();
        if let Some(slot) = add.map(|a| a.slot).filter(|s| usize::from(*s) >= slots) {
            return Err(ProxyError::Slot { slot, slots });
        }
        let peer = &mut self.peers[rank];
        if peer.outstanding + peer.planned >= self.config.max_outstanding {
            return Ok(Verdict::Wait);
        }
        let (request, over) = (peer.requests + 1, peer.over);
        let sending = peer.sending(channel);
        let Some(epoch) = sending.begin(over) else { return Ok(self.wait_for(rank, now)) };
        if data.is_some() {
            sending.write(request);
        }
        if let Some(add) = add {
            let writes = sending.end(request);
            let entry = Entry { slot: add.slot, value: add.value, ordered: add.ordered, writes };
            self.control.put(self.staged(rank, channel, epoch), &entry.to_bytes())?;
        }
        self.peers[rank].planned += 1;
        Ok(Verdict::Post(Planned { rank, index, channel, epoch, data, atomic: add.is_some() }))
    }

    /// A peer that gives back no epochs for too long is lost.
    fn wait_for(&mut self, rank: usize, now: Time) -> Verdict {
        let since = *self.peers[rank].waits_since.get_or_insert(now);
        let after = self.config.deadline;
        if now.since(since) < after {
            return Verdict::Wait;
        }
        self.lose(rank, ProxyError::Silent { rank, what: "apply what it was sent", after });
        Verdict::Over
    }

    fn staged(&self, rank: usize, channel: u8, epoch: u8) -> u64 {
        RING * self.config.ranks as u64 + place(rank, channel, epoch)
    }

    /// Posts commands to one peer as one request.
    fn post_planned(&mut self, fifo: usize, planned: &[Planned]) {
        let rank = planned[0].rank;
        let ring = self.config.rank;
        self.peers[rank].planned = 0;
        let mut ops = Vec::with_capacity(2 * planned.len());
        for p in planned {
            // A command after them may have found the peer lost.
            let Some(control) = &self.peers[rank].control else { return };
            if let Some((from, to, len)) = p.data {
                let (Ok(src), Ok(dst)) =
                    (self.memory.here(from, len), self.memory.at(rank, to, len))
                else {
                    return;
                };
                let imm = Some(self.tag(Kind::Data, p.channel, p.epoch).imm());
                ops.push(Op::Write { src, dst, len, imm });
            }
            if p.atomic {
                let offset = self.staged(rank, p.channel, p.epoch);
                let src = Local { region: &self.control, offset };
                let offset = place(ring, p.channel, p.epoch);
                let dst = Remote { region: control, offset };
                let imm = Some(self.tag(Kind::Atomic, p.channel, p.epoch).imm());
                ops.push(Op::Write { src, dst, len: ENTRY, imm });
            }
        }
        match self.post(&ops) {
            Ok(handle) => {
                drop(ops);
                self.peers[rank].requests += 1;
                let (first, commands) = (planned[0].index, planned.len() as u32);
                let fifo = Some(fifo);
                self.keep(rank, Posted { handle, fifo, first, commands, told: false });
            }
            Err(error) => {
                drop(ops);
                self.lose(rank, ProxyError::Engine(error));
            }
        }
    }

    fn drain(&self, fifo: usize, index: u64, up_to: Option<u32>) -> Verdict {
        if self.sources[fifo].outstanding == 0 {
            return Verdict::Over;
        }
        let Some(up_to) = up_to else { return Verdict::Wait };
        // The nearest index before this one with those lower bits.
        let last = index.wrapping_sub(u64::from((index as u32).wrapping_sub(up_to)));
        let under_way = self.active.iter().flat_map(|r| &self.peers[*r].posted);
        let mut under_way = under_way.filter(|p| p.fifo == Some(fifo));
        match under_way.any(|p| p.first <= last) {
            true => Verdict::Wait,
            false => Verdict::Over,
        }
    }

    fn barrier(&mut self, fifo: usize, (scope, channel): (Scope, u8), now: Time) -> Verdict {
        let ranks = self.peers.len();
        let (round, since) = match self.sources[fifo].barrier {
            Some(entered) => entered,
            // Whoever joined before this was pushed takes part.
            None if self.inbox.has_news() => return Verdict::Wait,
            None => {
                let key = (scope, channel);
                let round = self.rounds.entry(key).or_insert_with(|| Rounds::new(ranks)).enter();
                self.sources[fifo].barrier = Some((round, now));
                let others: Vec<_> = self.participants(scope).collect();
                let number = u8::from(scope == Scope::Rail);
                others.iter().for_each(|r| self.tell(*r, Kind::Barrier, channel, number));
                (round, now)
            }
        };
        // Who is late may himself be waiting for the deadline of another.
        let after = 2 * self.config.deadline;
        let is_long_ago = |t: Time| now.since(t) >= after;
        while self.missing(scope, channel, round, |_| true).is_some() {
            let silent = self.missing(scope, channel, round, is_long_ago);
            let Some(rank) = silent.filter(|_| is_long_ago(since)) else { return Verdict::Wait };
            self.lose(rank, ProxyError::Silent { rank, what: "enter a barrier", after });
        }
        self.sources[fifo].barrier = None;
        Verdict::Over
    }

    /// Who hasn't entered a barrier yet, of those whom `heard` picks by when they were last heard of.
    fn missing(
        &self,
        scope: Scope,
        channel: u8,
        round: u64,
        heard: impl Fn(Time) -> bool,
    ) -> Option<usize> {
        let picked = self.participants(scope).filter(|r| heard(self.peers[*r].heard));
        self.rounds[&(scope, channel)].missing(round, picked)
    }
}
