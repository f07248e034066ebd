//! Who takes part in an exchange: lives of ranks that begin and end, counted alike by all.
//!
//! Of each rank is known what has happened to it: twice the number of its life, and one more if that is over. The sum over
//! all ranks is the *era*, which only grows. Ranks that know the same are in the same era, whatever order they heard it in.

use fabric_engine::{EngineError, Result};

/// A rank's place, and which life of it this is: 0, then one more for each process that takes a lost one's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seat {
    pub rank: u32,
    pub life: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Its card isn't here yet.
    Awaited,
    Here,
    Out,
}

#[derive(Clone, Debug)]
pub struct Members {
    events: Vec<u32>,
    states: Vec<State>,
}

impl Members {
    pub fn new(own: Seat, ranks: u32) -> Self {
        let mut events = vec![0; ranks as usize];
        let mut states = vec![State::Awaited; ranks as usize];
        events[own.rank as usize] = 2 * own.life;
        states[own.rank as usize] = State::Here;
        Self { events, states }
    }

    pub fn is_here(&self, rank: u32) -> bool {
        self.states[rank as usize] == State::Here
    }

    /// Whether a life of it has ended, and no other has begun.
    pub fn is_out(&self, rank: u32) -> bool {
        self.states[rank as usize] == State::Out
    }

    pub fn here(&self) -> Vec<bool> {
        self.states.iter().map(|s| *s == State::Here).collect()
    }

    pub fn are_all_here(&self) -> bool {
        self.states.iter().all(|s| *s == State::Here)
    }

    /// The first rank of which neither a card has come nor is it known that it takes no part.
    pub fn awaited(&self) -> Option<u32> {
        self.states.iter().position(|s| *s == State::Awaited).map(|rank| rank as u32)
    }

    /// Which life of a rank the latest is.
    pub fn life(&self, rank: u32) -> u32 {
        self.events[rank as usize] / 2
    }

    /// What has happened to each rank.
    pub fn events(&self) -> &[u32] {
        &self.events
    }

    pub fn era(&self) -> u32 {
        self.events.iter().sum()
    }

    /// Whether a life of a rank may begin.
    ///
    /// # Errors
    /// [`EngineError::Invalid`]: it is here, or this life of it has ended.
    pub fn check_newcomer(&self, Seat { rank, life }: Seat) -> Result<()> {
        if self.is_here(rank) {
            return Err(EngineError::Invalid(format!(
                "rank {rank} is here already; if that life of it is over, mask it"
            )));
        }
        let had = self.events[rank as usize];
        match 2 * u64::from(life) < u64::from(had) {
            false => Ok(()),
            true => Err(EngineError::Invalid(format!(
                "rank {rank} comes in life {life}, and others have seen the end of life {}; make it with life={}",
                had / 2,
                had.div_ceil(2)
            ))),
        }
    }

    /// A life begins, which was checked.
    pub fn admit(&mut self, Seat { rank, life }: Seat) {
        self.events[rank as usize] = 2 * life;
        self.states[rank as usize] = State::Here;
    }

    /// The life of a rank that is here ends, or nobody waits for one that hasn't come.
    pub fn lose(&mut self, rank: u32) {
        self.events[rank as usize] |= 1;
        self.states[rank as usize] = State::Out;
    }

    /// A life of a rank that isn't here began and ended elsewhere; nobody waits for it.
    pub fn pass_over(&mut self, Seat { rank, life }: Seat) {
        self.events[rank as usize] = 2 * life + 1;
        self.states[rank as usize] = State::Out;
    }

    /// The first life of a rank that isn't known to have ended.
    pub fn next_life(&self, rank: u32) -> u32 {
        self.events[rank as usize].div_ceil(2)
    }

    /// What another rank knows: of those that aren't here it may know more.
    pub fn learn(&mut self, events: &[u32]) {
        for ((had, state), new) in self.events.iter_mut().zip(&self.states).zip(events) {
            if *state != State::Here {
                *had = (*had).max(*new);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seat(rank: u32, life: u32) -> Seat {
        Seat { rank, life }
    }

    /// Four ranks of which two are lost and come again, as two of the others and one that comes anew see it.
    #[test]
    fn ranks_that_know_the_same_are_in_the_same_era_in_whatever_order_they_heard_it() {
        let mut first = Members::new(seat(0, 0), 4);
        let mut second = Members::new(seat(1, 0), 4);
        (1..4).for_each(|r| first.admit(seat(r, 0)));
        [0, 2, 3].into_iter().for_each(|r| second.admit(seat(r, 0)));
        assert_eq!((first.era(), second.era()), (0, 0));
        first.lose(3);
        first.lose(2);
        second.lose(2);
        assert!(second.era() < first.era());
        second.lose(3);
        assert_eq!((first.era(), second.era()), (2, 2));
        let mut anew = Members::new(seat(3, 1), 4);
        for other in [&first, &second] {
            anew.learn(other.events());
        }
        [0, 1].into_iter().for_each(|r| anew.admit(seat(r, 0)));
        anew.lose(2);
        first.admit(seat(3, 1));
        second.admit(seat(3, 1));
        assert_eq!([first.era(), second.era(), anew.era()], [3; 3]);
        let mut last = Members::new(seat(2, 1), 4);
        last.learn(anew.events());
        [(0, 0), (1, 0), (3, 1)].into_iter().for_each(|(r, l)| last.admit(seat(r, l)));
        for one in [&mut first, &mut second, &mut anew] {
            one.admit(seat(2, 1));
            assert!(one.era() == last.era() && one.are_all_here());
        }
    }

    #[test]
    fn mr_2_a_life_that_has_ended_does_not_begin_again() {
        let mut members = Members::new(seat(0, 0), 2);
        assert_eq!(members.awaited(), Some(1));
        members.check_newcomer(seat(1, 0)).unwrap();
        members.admit(seat(1, 0));
        let said = |e: EngineError| e.to_string();
        assert!(said(members.check_newcomer(seat(1, 1)).unwrap_err()).contains("here already"));
        members.lose(1);
        let old = said(members.check_newcomer(seat(1, 0)).unwrap_err());
        assert!(old.contains("life=1"), "{old}");
        members.check_newcomer(seat(1, 1)).unwrap();
    }
}
