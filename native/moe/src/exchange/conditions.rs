//! The conditions that a rank waits for.

use super::{device::Device, link::PeerLink, state::ExchangeState};
use crate::phase::Phase;

/// A condition that a caller waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Condition {
    /// The last exchange has ended: own rows have left, fences are sent, and no answer is queued.
    MayDispatch,
    /// No write of a lost rank can land any more, and no write to one reads memory (MR-1).
    Quiesced,
    Routes,
    /// The device has the routes of its dispatch with this ticket, or has failed.
    DeviceRoutes(u32),
    /// There are rows to hand out, or all were.
    Rows,
    /// The shared buffer is free for more answers.
    AnswersSent,
    Answers,
    /// Peers have everything that this rank was to send.
    AllDelivered,
}

impl ExchangeState {
    pub fn holds(&self, condition: Condition) -> bool {
        match condition {
            Condition::MayDispatch => {
                // Queued answers are not dropped (IC-4).
                let queued = self.here().any(|l| !l.outbound.answers.is_empty());
                self.rows_left() && self.fenced && !queued && self.holds(Condition::Quiesced)
            }
            Condition::Quiesced => self.revoking.is_empty() && self.failed_in_flight == 0,
            Condition::Routes => self.all_routes(),
            Condition::DeviceRoutes(ticket) => {
                self.device.as_ref().is_some_and(|d| d.has_failed() || d.has_routes_of(ticket))
            }
            Condition::Rows => self.here().any(PeerLink::has_rows) || self.all_collected(),
            Condition::AnswersSent if self.phase == Phase::Collected => {
                self.answers_out == 0 && self.holds(Condition::Quiesced)
            }
            Condition::AnswersSent if self.cursor.ranks + 1 == self.shape.ranks => self.rows_left(),
            Condition::AnswersSent => self.answers_out + self.failed_in_flight == 0,
            Condition::Answers => self.all_answers(),
            Condition::AllDelivered => !self.has_undelivered(),
        }
    }

    /// Whether a condition waits until memory of lost ranks is quiesced.
    pub fn blocked_on_quiesce(&self, condition: Condition) -> bool {
        self.needs_quiesce(condition) && !self.holds(Condition::Quiesced)
    }

    /// Whether a condition needs memory that lost ranks may access.
    pub fn needs_quiesce(&self, condition: Condition) -> bool {
        match condition {
            Condition::Routes
            | Condition::DeviceRoutes(_)
            | Condition::Answers
            | Condition::AllDelivered => false,
            Condition::Rows => !self.waiting.is_empty(),
            Condition::MayDispatch | Condition::Quiesced | Condition::AnswersSent => true,
        }
    }

    /// Whether all of this rank's routes and rows have left, including those that wait for a fence
    /// or a slot offer. A later one would count in the next exchange (IC-6), or be read from memory
    /// that is used again (MR-1).
    pub fn rows_left(&self) -> bool {
        self.rows_out == 0
            && self.failed_in_flight == 0
            && self.here().all(|l| l.outbound.routed && l.outbound.sent == l.outbound.rows)
    }

    /// Whether no exchange is under way, for the caller or the device.
    pub fn between_exchanges(&self) -> bool {
        let ended = matches!(self.phase, Phase::Idle | Phase::Collected);
        let busy = |d: &Device| d.has_failed() || d.begins() || d.hands_out();
        ended && !self.left && !self.device.as_ref().is_some_and(busy)
    }

    /// Whether the routes of every present rank are known.
    pub fn all_routes(&self) -> bool {
        self.here().all(|l| l.inbound.counts.is_some())
    }

    /// Whether the answers of every present rank have arrived.
    fn all_answers(&self) -> bool {
        self.here().all(|l| l.outbound.rows == 0 || l.outbound.answered)
    }

    /// By rank, whether its answers are missing: their memory holds other bytes (RS-1).
    pub fn missing(&self) -> Vec<bool> {
        let gone = |(rank, link): (usize, &Option<PeerLink>)| match link {
            None => rank != self.rank as usize,
            Some(link) => !link.outbound.answered,
        };
        self.links.iter().enumerate().map(gone).collect()
    }

    /// Missing ranks that this rank sent rows to.
    pub fn left_out(&self, missing: &[bool]) -> Vec<u32> {
        let had_rows = |rank: &u32| missing[*rank as usize] && self.routes.rows_to(*rank) > 0;
        (0..self.shape.ranks).filter(had_rows).collect()
    }

    /// By source, the rows for each local expert; empty for absent sources.
    pub fn incoming(&self) -> Vec<Vec<u32>> {
        let mut incoming = vec![Vec::new(); self.shape.ranks as usize];
        for link in self.here() {
            incoming[link.endpoint.rank as usize] = link.inbound.counts.clone().unwrap_or_default();
        }
        incoming[self.rank as usize] = self.routes.counts_to(&self.shape, self.rank).to_vec();
        incoming
    }

    /// Whether every rank's rows were handed out.
    pub fn all_collected(&self) -> bool {
        self.here().all(|l| l.inbound.counts.is_some() && l.inbound.collected == l.inbound.rows)
    }
}
