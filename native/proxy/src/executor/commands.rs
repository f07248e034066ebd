//! Turns commands into requests.

use fabric_engine::{Local, Op, Remote, Time};

use super::{control_offset, Event, Executor, RING};
use crate::{
    barrier::BarrierRounds,
    command::{Add, Command, Scope},
    order::{OrderEntry, ENTRY},
    peer::{PostedRequest, RankState},
    tag::{Kind, Notice},
    ProxyError, Result,
};

/// Commands per burst. Commands of a burst to one peer become one request.
const BURST: u64 = 32;
/// Bursts of one FIFO per step, so that FIFOs share the thread.
const BURSTS: usize = 4;

/// A command that is ready to be posted.
#[derive(Clone, Copy, Debug)]
pub(super) struct PlannedCommand {
    rank: usize,
    index: u64,
    channel: u8,
    epoch: u8,
    /// CommandSource offset, destination offset and length.
    data: Option<(u64, u64, u64)>,
    atomic: bool,
}

/// The next action for a command.
enum CommandStatus {
    Post(PlannedCommand),
    /// The command is complete.
    Done,
    /// The command can't proceed yet.
    Wait,
}

impl Executor {
    pub(super) fn run_fifo(&mut self, fifo: usize, now: Time) -> bool {
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

    /// Executes the oldest commands of a FIFO; returns how many.
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
                // Drains and barriers concern the commands before them, which are posted first.
                Ok(_) if !plan.is_empty() => break,
                Ok(Command::Drain { up_to }) => Ok(self.drain(fifo, index, up_to)),
                Ok(Command::Barrier { scope, channel }) => {
                    Ok(self.barrier(fifo, (scope, channel), now))
                }
                Err(error) => Err(ProxyError::Command(error)),
            };
            match verdict {
                Ok(CommandStatus::Post(planned)) => plan.push(planned),
                Ok(CommandStatus::Done) => {}
                Ok(CommandStatus::Wait) => {
                    self.sources[fifo].blocked = true;
                    break;
                }
                Err(error) => (self.on_event)(Event::Refused { fifo, index, error }),
            }
            taken += 1;
        }
        // A stable sort: each rank's commands keep their order.
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

    /// Checks a write or an atomic, and assigns its epoch.
    fn send(
        &mut self,
        now: Time,
        (rank, channel, index): (u16, u8, u64),
        data: Option<(u64, u64, u64)>,
        add: Option<Add>,
    ) -> Result<CommandStatus> {
        let rank = usize::from(rank);
        let state = self.peers.get(rank).map(|p| p.state);
        if state != Some(RankState::Alive) && self.inbox.has_changes() {
            // The rank may have joined before the command was pushed.
            return Ok(CommandStatus::Wait);
        }
        if state == Some(RankState::Masked) {
            return Ok(CommandStatus::Done);
        }
        if let Some((from, to, len)) = data {
            self.memory.local(from, len)?;
            self.memory.remote(rank, to, len)?;
        }
        if state != Some(RankState::Alive) {
            self.memory.remote(rank, 0, 0)?;
            return Err(ProxyError::NotConnected { rank });
        }
        let slots = self.common.words.len();
        if let Some(slot) = add.map(|a| a.slot).filter(|s| usize::from(*s) >= slots) {
            return Err(ProxyError::Slot { slot, slots });
        }
        let peer = &mut self.peers[rank];
        if peer.outstanding + peer.planned >= self.config.max_outstanding {
            return Ok(CommandStatus::Wait);
        }
        let (request, over) = (peer.requests + 1, peer.ended);
        let sending = peer.sending(channel);
        let Some(epoch) = sending.begin(over) else { return Ok(self.wait_for_epochs(rank, now)) };
        if data.is_some() {
            sending.write(request);
        }
        if let Some(add) = add {
            let writes = sending.end(request);
            let entry =
                OrderEntry { slot: add.slot, value: add.value, ordered: add.ordered, writes };
            self.control.put(self.staged(rank, channel, epoch), &entry.to_bytes())?;
        }
        self.peers[rank].planned += 1;
        Ok(CommandStatus::Post(PlannedCommand {
            rank,
            index,
            channel,
            epoch,
            data,
            atomic: add.is_some(),
        }))
    }

    /// Drops a peer that returns no epochs within the timeout.
    fn wait_for_epochs(&mut self, rank: usize, now: Time) -> CommandStatus {
        let since = *self.peers[rank].waiting_since.get_or_insert(now);
        let after = self.config.deadline;
        if now.since(since) < after {
            return CommandStatus::Wait;
        }
        self.lose(rank, ProxyError::Silent { rank, what: "return epochs", after });
        CommandStatus::Done
    }

    fn staged(&self, rank: usize, channel: u8, epoch: u8) -> u64 {
        RING * self.config.ranks as u64 + control_offset(rank, channel, epoch)
    }

    /// Posts commands to one peer as one request.
    fn post_planned(&mut self, fifo: usize, planned: &[PlannedCommand]) {
        let rank = planned[0].rank;
        let ring = self.config.rank;
        self.peers[rank].planned = 0;
        let mut ops = Vec::with_capacity(2 * planned.len());
        for p in planned {
            // A later command may have found that the peer is lost.
            let Some(control) = &self.peers[rank].control else { return };
            if let Some((from, to, len)) = p.data {
                let (Ok(src), Ok(dst)) =
                    (self.memory.local(from, len), self.memory.remote(rank, to, len))
                else {
                    return;
                };
                let imm = Some(self.tag(Kind::Data, p.channel, p.epoch).imm());
                ops.push(Op::Write { src, dst, len, imm });
            }
            if p.atomic {
                let offset = self.staged(rank, p.channel, p.epoch);
                let src = Local { region: &self.control, offset };
                let offset = control_offset(ring, p.channel, p.epoch);
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
                self.track(rank, PostedRequest { handle, fifo, first, commands, wakes: false });
            }
            Err(error) => {
                drop(ops);
                self.lose(rank, ProxyError::Engine(error));
            }
        }
    }

    fn drain(&self, fifo: usize, index: u64, up_to: Option<u32>) -> CommandStatus {
        if self.sources[fifo].outstanding == 0 {
            return CommandStatus::Done;
        }
        let Some(up_to) = up_to else { return CommandStatus::Wait };
        // The nearest index before this one with these lower 32 bits.
        let last = index.wrapping_sub(u64::from((index as u32).wrapping_sub(up_to)));
        let in_flight = self.active.iter().flat_map(|r| &self.peers[*r].posted);
        let mut in_flight = in_flight.filter(|p| p.fifo == Some(fifo));
        match in_flight.any(|p| p.first <= last) {
            true => CommandStatus::Wait,
            false => CommandStatus::Done,
        }
    }

    fn barrier(&mut self, fifo: usize, (scope, channel): (Scope, u8), now: Time) -> CommandStatus {
        let ranks = self.peers.len();
        let (round, since) = match self.sources[fifo].barrier {
            Some(entered) => entered,
            // Ranks that joined before the command was pushed take part.
            None if self.inbox.has_changes() => return CommandStatus::Wait,
            None => {
                let key = (scope, channel);
                let round =
                    self.rounds.entry(key).or_insert_with(|| BarrierRounds::new(ranks)).enter();
                self.sources[fifo].barrier = Some((round, now));
                let others: Vec<_> = self.participants(scope).collect();
                let entered = Notice::Entered(scope).epoch();
                others.iter().for_each(|r| self.send_tag(*r, Kind::Notice, channel, entered));
                (round, now)
            }
        };
        // A late rank may itself wait for the timeout of another rank: hence twice the timeout.
        let after = 2 * self.config.deadline;
        let is_long_ago = |t: Time| now.since(t) >= after;
        while self.missing(scope, channel, round, |_| true).is_some() {
            let silent = self.missing(scope, channel, round, is_long_ago);
            let Some(rank) = silent.filter(|_| is_long_ago(since)) else {
                return CommandStatus::Wait;
            };
            self.lose(rank, ProxyError::Silent { rank, what: "enter a barrier", after });
        }
        self.sources[fifo].barrier = None;
        CommandStatus::Done
    }

    /// A rank that has not entered the barrier, among ranks whose last arrival `is_recent` accepts.
    fn missing(
        &self,
        scope: Scope,
        channel: u8,
        round: u64,
        is_recent: impl Fn(Time) -> bool,
    ) -> Option<usize> {
        let picked = self.participants(scope).filter(|r| is_recent(self.peers[*r].last_arrival));
        self.rounds[&(scope, channel)].missing(round, picked)
    }
}
