//! Barriers by counting: a rank that enters sends a message to all ranks, and leaves after a
//! message from each. There is no leader, so a lost rank does not stop the others. Pure.

/// The barriers of one scope and channel.
#[derive(Clone, Debug)]
pub(crate) struct BarrierRounds {
    /// Number of rounds that this rank has entered.
    entered: u64,
    /// Number of rounds that each rank has entered, as far as this rank knows.
    entered_by: Vec<u64>,
}

impl BarrierRounds {
    pub fn new(ranks: usize) -> Self {
        Self { entered: 0, entered_by: vec![0; ranks] }
    }

    /// Enters the next round; returns its number.
    pub fn enter(&mut self) -> u64 {
        self.entered += 1;
        self.entered
    }

    pub fn on_entered(&mut self, rank: usize, n: u32) {
        self.entered_by[rank] += u64::from(n);
    }

    /// A new incarnation of a rank takes part from the next round on.
    pub fn join(&mut self, rank: usize) {
        self.entered_by[rank] = self.entered;
    }

    /// A rank of `ranks` that has not entered the round.
    pub fn missing(&self, round: u64, mut ranks: impl Iterator<Item = usize>) -> Option<usize> {
        ranks.find(|r| self.entered_by[*r] < round)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn no_rank_leaves_before_all_have_entered_and_fast_ranks_do_not_mix_rounds() {
        let mut rounds = BarrierRounds::new(3);
        rounds.on_entered(1, 1);
        rounds.on_entered(1, 1);
        let first = rounds.enter();
        assert_eq!(rounds.missing(first, [1, 2].into_iter()), Some(2));
        assert_eq!(rounds.missing(first, [1].into_iter()), None, "without the lost one");
        rounds.on_entered(2, 1);
        assert_eq!(rounds.missing(first, [1, 2].into_iter()), None);
        let second = rounds.enter();
        assert_eq!(rounds.missing(second, [1, 2].into_iter()), Some(2));
        rounds.join(2);
        assert_eq!(rounds.missing(second, [1, 2].into_iter()), None);
        let third = rounds.enter();
        assert_eq!(rounds.missing(third, [2].into_iter()), Some(2));
    }
}
