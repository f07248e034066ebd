//! The conditions that a rank waits for.

use super::{link::Link, state::State};
use crate::phase::Phase;

/// What a caller may wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// The last exchange has left nothing to do: own rows have left, peers know, and no answer
    /// waits for its asker.
    MayDispatch,
    /// Nothing of lost ranks can land any more, and nothing on its way to them is read (MR-1).
    Quiet,
    Routes,
    /// There are rows to hand out, or all were.
    Rows,
    /// More answers can be sent.
    AnswersLeft,
    Answers,
    /// Others have all that was handed in for them.
    NothingOwed,
}

impl State {
    pub fn holds(&self, until: Until) -> bool {
        match until {
            Until::MayDispatch => {
                // What waits is not lost (IC-4).
                let queued = self.here().any(|l| !l.out.answers.is_empty());
                self.rows_left() && self.fenced && !queued && self.holds(Until::Quiet)
            }
            Until::Quiet => self.revoking.is_empty() && self.unsettled == 0,
            Until::Routes => self.all_routes(),
            Until::Rows => self.here().any(Link::has_rows) || self.all_collected(),
            Until::AnswersLeft if self.phase == Phase::Collected => {
                self.answers_out == 0 && self.holds(Until::Quiet)
            }
            Until::AnswersLeft if self.cursor.ranks + 1 == self.shape.ranks => self.rows_left(),
            Until::AnswersLeft => self.answers_out + self.unsettled == 0,
            Until::Answers => self.all_answers(),
            Until::NothingOwed => !self.owes(),
        }
    }

    /// Whether what is waited for hangs on lost ranks, who let go of memory when they like.
    pub fn hangs_on_quiet(&self, until: Until) -> bool {
        self.needs_quiet(until) && !self.holds(Until::Quiet)
    }

    /// Whether what is waited for takes memory that lost ranks may hold on to.
    pub fn needs_quiet(&self, until: Until) -> bool {
        match until {
            Until::Routes | Until::Answers | Until::NothingOwed => false,
            Until::Rows => !self.waiting.is_empty(),
            Until::MayDispatch | Until::Quiet | Until::AnswersLeft => true,
        }
    }

    /// Whether all of this rank's routes and rows have left, those that wait for a fence or a grant
    /// included: what comes later would count in the next exchange (IC-6), or be read when its
    /// memory is used again (MR-1).
    pub fn rows_left(&self) -> bool {
        self.rows_out == 0
            && self.unsettled == 0
            && self.here().all(|l| l.out.routed && l.out.sent == l.out.rows)
    }

    /// Whether the routes of every rank that is here are known.
    pub fn all_routes(&self) -> bool {
        self.here().all(|l| l.inward.counts.is_some())
    }

    /// Whether the answers of every rank that is here have come.
    fn all_answers(&self) -> bool {
        self.here().all(|l| l.out.rows == 0 || l.out.answered)
    }

    /// Ranks whose answers don't come: what is in their place is not theirs, or not of this
    /// exchange (RS-1).
    pub fn missing(&self) -> Vec<bool> {
        let gone = |(rank, link): (usize, &Option<Link>)| match link {
            None => rank != self.rank as usize,
            Some(link) => !link.out.answered,
        };
        self.links.iter().enumerate().map(gone).collect()
    }

    /// Those of them that had rows of this rank.
    pub fn left_out(&self, missing: &[bool]) -> Vec<u32> {
        let had_rows = |rank: &u32| missing[*rank as usize] && self.routes.rows_to(*rank) > 0;
        (0..self.shape.ranks).filter(had_rows).collect()
    }

    /// Each source's rows for each local expert; none from one that is left out.
    pub fn incoming(&self) -> Vec<Vec<u32>> {
        let mut incoming = vec![Vec::new(); self.shape.ranks as usize];
        for link in self.here() {
            incoming[link.wire.rank as usize] = link.inward.counts.clone().unwrap_or_default();
        }
        incoming[self.rank as usize] = self.routes.counts_to(&self.shape, self.rank).to_vec();
        incoming
    }

    /// Whether every rank's rows were handed out.
    pub fn all_collected(&self) -> bool {
        self.here().all(|l| l.inward.counts.is_some() && l.inward.collected == l.inward.rows)
    }
}
