//! Who takes part in an exchange: cards that go around, ranks that come, and ranks that are given up.

use std::sync::{Arc, OnceLock};

use fabric_engine::{EngineError, Result};

use super::{
    act::Act,
    link::{Link, Ours, Stage, Wire},
    state::{Lost, State},
    waits::Until,
    AllToAll, Inner,
};
use crate::card::{Card, Grant};

impl AllToAll {
    /// What others need to know of this rank; for all that aren't here, or for one.
    ///
    /// Each rank gets access of its own, so that it can be taken back from it alone (MR-2).
    ///
    /// # Errors
    /// Those of a registration; [`EngineError::Invalid`] for a rank that is here.
    pub fn card(&self, only: Option<u32>) -> Result<Vec<u8>> {
        let inner = &self.inner;
        let mut state = inner.state.lock();
        let ranks = inner.shape.ranks;
        if let Some(rank) = only {
            inner.check_other(rank)?;
            if state.knows(rank) {
                let text = format!("rank {rank} is here; mask it before it comes anew");
                return Err(EngineError::Invalid(text));
            }
        }
        let wanted = |rank: u32| rank != inner.rank && only.is_none_or(|only| only == rank);
        let (mut grants, mut acts) = (Vec::new(), Vec::new());
        for rank in 0..ranks {
            let grant = match wanted(rank) && !state.knows(rank) {
                true => inner.grant(&mut state, rank, &mut acts).map(Some),
                false => Ok(None),
            };
            grants.push(grant);
        }
        drop(state);
        inner.run(acts);
        let grants = grants.into_iter().collect::<Result<_>>()?;
        let address = inner.engine.address().clone();
        Ok(Card { rank: inner.rank, shape: inner.shape, address, grants }.to_bytes())
    }

    /// Takes a rank in by its card, from the next dispatch on. It must have this rank's card as well.
    ///
    /// # Errors
    /// [`EngineError::Handshake`] if it is of another shape; [`EngineError::Invalid`] if it is here already, or this
    /// rank made no card for it; [`EngineError::NotQuiesced`] if the one before it still holds on to our memory.
    pub fn admit(&self, card: &[u8]) -> Result<u32> {
        let inner = &self.inner;
        let card = Card::from_bytes(card)?;
        let rank = card.rank;
        inner.check_other(rank)?;
        inner.check_shape(&card)?;
        let unlike =
            |cause: String| EngineError::Handshake { peer: card.address.name.clone(), cause };
        let grant =
            card.grants.get(inner.rank as usize).and_then(Option::as_ref).ok_or_else(|| {
                unlike(format!("its card has nothing for rank {}; have it make one", inner.rank))
            })?;
        let owner = card.address.id;
        if [&grant.control, &grant.rows].iter().any(|memory| memory.owner != card.address)
            || grant.control.len != inner.memory.control_nbytes()
            || grant.rows.len != inner.memory.rows_nbytes()
            || grant.counters.iter().any(|c| c.owner != owner)
        {
            return Err(unlike("its memory and counters aren't those of its engine".into()));
        }
        let control = inner.engine.import(&grant.control)?;
        let rows = inner.engine.import(&grant.rows)?;
        let peer = rows.peer().clone();
        inner.engine.connect(&peer)?;
        let mut state = inner.state.lock();
        if state.knows(rank) {
            return Err(EngineError::Invalid(format!("rank {rank} is here already")));
        }
        // Its slots are those of the one before it, who must not write there any more (MR-1).
        if state.revoking.contains(&rank) {
            inner.wait(&mut state, Until::Quiet)?;
        }
        let Some(ours) = state.ours[rank as usize].take() else {
            return Err(EngineError::Invalid(format!(
                "this rank has made no card for rank {rank}; make one, and give it to that rank"
            )));
        };
        let life = state.new_life();
        let wire = Wire {
            rank,
            life,
            peer,
            control,
            rows,
            counters: grant.counters,
            ours,
            stores: OnceLock::new(),
        };
        state.lost.retain(|l| l.rank != rank);
        let link = Link::new(wire);
        let wire = Arc::clone(&link.wire);
        state.newcomers[rank as usize] = Some(link);
        drop(state);
        inner.seek(wire);
        Ok(rank)
    }

    /// Gives a rank up; its tokens and answers are not waited for, and it can't write here any more.
    pub fn mask(&self, rank: u32, cause: &str) -> Result<()> {
        self.inner.check_other(rank)?;
        let mut acts = Vec::new();
        let mut state = self.inner.state.lock();
        state.lose(rank, Stage::Routes, cause.to_owned(), &mut acts);
        self.inner.wake(&mut state, &mut acts);
        drop(state);
        self.inner.run(acts);
        Ok(())
    }

    /// Ranks that were given up and haven't come again, in that order.
    pub fn lost(&self) -> Vec<Lost> {
        self.inner.state.lock().lost.clone()
    }

    /// Whether each rank is here, this one included.
    pub fn present(&self) -> Vec<bool> {
        let state = self.inner.state.lock();
        let me = self.inner.rank;
        (0..self.inner.shape.ranks).map(|rank| rank == me || state.knows(rank)).collect()
    }
}

impl Inner {
    fn check_other(&self, rank: u32) -> Result<()> {
        match rank {
            r if r == self.rank => Err(EngineError::Invalid(format!("rank {rank} is this one"))),
            r if r < self.shape.ranks => Ok(()),
            _ => Err(EngineError::Invalid(format!("rank {rank} is none of {}", self.shape.ranks))),
        }
    }

    fn check_shape(&self, card: &Card) -> Result<()> {
        if card.shape == self.shape {
            return Ok(());
        }
        Err(EngineError::Handshake {
            peer: card.address.name.clone(),
            cause: format!(
                "rank {} is of another shape: {:?}, and this one's is {:?}; give all ranks the same",
                card.rank, card.shape, self.shape
            ),
        })
    }

    /// Makes what a rank may use of ours.
    fn grant(&self, state: &mut State, rank: u32, acts: &mut Vec<Act>) -> Result<Grant> {
        // What was handed out and never used is not handed out to somebody else.
        if let Some(old) = state.ours[rank as usize].take() {
            state.revoke(rank, &old, acts);
        }
        let control = self.engine.register_again(&self.control)?;
        let rows = self.engine.register_again(&self.rows)?;
        let counters = (0..Stage::ALL.len()).map(|_| self.engine.counter());
        let counters = counters.collect::<Result<Vec<_>>>()?;
        let counters = <[_; 5]>::try_from(counters).map_err(|_| EngineError::Closed)?;
        let references = counters.each_ref().map(fabric_engine::Counter::reference);
        let grant =
            Grant { control: control.descriptor(), rows: rows.descriptor(), counters: references };
        state.ours[rank as usize] = Some(Ours { control, rows, counters });
        Ok(grant)
    }
}
