//! Membership of an exchange: incarnations of ranks that begin and end, counted equally by all
//! ranks.
//!
//! The state of each rank is twice its incarnation, plus one if that has ended. The sum over all
//! ranks is the *era*, which only grows. Ranks with equal knowledge are in the same era, in
//! whatever order they heard it.

use fabric_engine::{EngineError, Result};

/// A rank and its incarnation: 0, plus one for each process that replaces a lost one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    pub rank: u32,
    pub incarnation: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MembershipState {
    /// The descriptor of the rank has not arrived.
    Awaited,
    Here,
    Out,
}

#[derive(Clone, Debug)]
pub struct Membership {
    events: Vec<u32>,
    states: Vec<MembershipState>,
}

impl Membership {
    pub fn new(own: Member, ranks: u32) -> Self {
        let mut events = vec![0; ranks as usize];
        let mut states = vec![MembershipState::Awaited; ranks as usize];
        events[own.rank as usize] = 2 * own.incarnation;
        states[own.rank as usize] = MembershipState::Here;
        Self { events, states }
    }

    pub fn is_here(&self, rank: u32) -> bool {
        self.states[rank as usize] == MembershipState::Here
    }

    /// Whether an incarnation of it has ended, and no other has begun.
    pub fn is_out(&self, rank: u32) -> bool {
        self.states[rank as usize] == MembershipState::Out
    }

    pub fn here(&self) -> Vec<bool> {
        self.states.iter().map(|s| *s == MembershipState::Here).collect()
    }

    pub fn are_all_here(&self) -> bool {
        self.states.iter().all(|s| *s == MembershipState::Here)
    }

    /// The first rank without a descriptor that is not known to be absent.
    pub fn awaited(&self) -> Option<u32> {
        self.states.iter().position(|s| *s == MembershipState::Awaited).map(|rank| rank as u32)
    }

    /// The latest incarnation of a rank.
    pub fn incarnation(&self, rank: u32) -> u32 {
        self.events[rank as usize] / 2
    }

    /// The state of each rank.
    pub fn events(&self) -> &[u32] {
        &self.events
    }

    pub fn era(&self) -> u32 {
        self.events.iter().sum()
    }

    /// Checks that an incarnation of a rank may begin.
    ///
    /// # Errors
    /// [`EngineError::Invalid`]: the rank is here, or this incarnation has ended.
    pub fn check_newcomer(&self, Member { rank, incarnation }: Member) -> Result<()> {
        if self.is_here(rank) {
            return Err(EngineError::Invalid(format!(
                "rank {rank} is here already; if that incarnation has ended, mask it"
            )));
        }
        let had = self.events[rank as usize];
        match 2 * u64::from(incarnation) < u64::from(had) {
            false => Ok(()),
            true => Err(EngineError::Invalid(format!(
                "rank {rank} joined with incarnation {incarnation}, which has ended; restart it with incarnation={}",
                had.div_ceil(2)
            ))),
        }
    }

    /// Begins a checked incarnation.
    pub fn admit(&mut self, Member { rank, incarnation }: Member) {
        self.events[rank as usize] = 2 * incarnation;
        self.states[rank as usize] = MembershipState::Here;
    }

    /// Ends the incarnation of a present rank, or marks a rank that hasn't joined as absent.
    pub fn lose(&mut self, rank: u32) {
        self.events[rank as usize] |= 1;
        self.states[rank as usize] = MembershipState::Out;
    }

    /// An incarnation of an absent rank began and ended elsewhere; the rank stays absent.
    pub fn pass_over(&mut self, Member { rank, incarnation }: Member) {
        self.events[rank as usize] = 2 * incarnation + 1;
        self.states[rank as usize] = MembershipState::Out;
    }

    /// The first incarnation of a rank that isn't known to have ended.
    pub fn next_incarnation(&self, rank: u32) -> u32 {
        self.events[rank as usize].div_ceil(2)
    }

    /// Merges another rank's knowledge; it may know more of absent ranks.
    pub fn learn(&mut self, events: &[u32]) {
        for ((had, state), new) in self.events.iter_mut().zip(&self.states).zip(events) {
            if *state != MembershipState::Here {
                *had = (*had).max(*new);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(rank: u32, incarnation: u32) -> Member {
        Member { rank, incarnation }
    }

    /// Four ranks of which two are lost and join again, as two of the others and a new process see
    /// it.
    #[test]
    fn ranks_that_know_the_same_are_in_the_same_era_in_whatever_order_they_heard_it() {
        let mut first = Membership::new(member(0, 0), 4);
        let mut second = Membership::new(member(1, 0), 4);
        (1..4).for_each(|r| first.admit(member(r, 0)));
        [0, 2, 3].into_iter().for_each(|r| second.admit(member(r, 0)));
        assert_eq!((first.era(), second.era()), (0, 0));
        first.lose(3);
        first.lose(2);
        second.lose(2);
        assert!(second.era() < first.era());
        second.lose(3);
        assert_eq!((first.era(), second.era()), (2, 2));
        let mut anew = Membership::new(member(3, 1), 4);
        for other in [&first, &second] {
            anew.learn(other.events());
        }
        [0, 1].into_iter().for_each(|r| anew.admit(member(r, 0)));
        anew.lose(2);
        first.admit(member(3, 1));
        second.admit(member(3, 1));
        assert_eq!([first.era(), second.era(), anew.era()], [3; 3]);
        let mut last = Membership::new(member(2, 1), 4);
        last.learn(anew.events());
        [(0, 0), (1, 0), (3, 1)].into_iter().for_each(|(r, l)| last.admit(member(r, l)));
        for one in [&mut first, &mut second, &mut anew] {
            one.admit(member(2, 1));
            assert!(one.era() == last.era() && one.are_all_here());
        }
    }

    #[test]
    fn mr_2_an_ended_incarnation_does_not_begin_again() {
        let mut membership = Membership::new(member(0, 0), 2);
        assert_eq!(membership.awaited(), Some(1));
        membership.check_newcomer(member(1, 0)).unwrap();
        membership.admit(member(1, 0));
        let said = |e: EngineError| e.to_string();
        assert!(said(membership.check_newcomer(member(1, 1)).unwrap_err()).contains("here already"));
        membership.lose(1);
        let old = said(membership.check_newcomer(member(1, 0)).unwrap_err());
        assert!(old.contains("incarnation=1"), "{old}");
        membership.check_newcomer(member(1, 1)).unwrap();
    }
}
