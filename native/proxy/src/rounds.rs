//! Barriers by counting: who enters tells everybody, and leaves when everybody has told. Nobody leads, so that
//! nobody's death stops the others. Pure.

/// The barriers of one scope and channel.
#[derive(Clone, Debug)]
pub(crate) struct Rounds {
    /// Entered by this rank.
    entered: u64,
    /// Entered by each rank, as far as this one was told.
    told: Vec<u64>,
}

impl Rounds {
    pub fn new(ranks: usize) -> Self {
        Self { entered: 0, told: vec![0; ranks] }
    }

    /// This rank enters the next one; its number.
    pub fn enter(&mut self) -> u64 {
        self.entered += 1;
        self.entered
    }

    pub fn tell(&mut self, rank: usize, n: u32) {
        self.told[rank] += u64::from(n);
    }

    /// A new life of a rank takes part from the next one on.
    pub fn join(&mut self, rank: usize) {
        self.told[rank] = self.entered;
    }

    /// Who of `ranks` isn't there yet.
    pub fn missing(&self, round: u64, mut ranks: impl Iterator<Item = usize>) -> Option<usize> {
        ranks.find(|r| self.told[*r] < round)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn nobody_leaves_before_all_have_entered_and_fast_ranks_do_not_mix_rounds() {
        let mut rounds = Rounds::new(3);
        rounds.tell(1, 1);
        rounds.tell(1, 1);
        let first = rounds.enter();
        assert_eq!(rounds.missing(first, [1, 2].into_iter()), Some(2));
        assert_eq!(rounds.missing(first, [1].into_iter()), None, "without the lost one");
        rounds.tell(2, 1);
        assert_eq!(rounds.missing(first, [1, 2].into_iter()), None);
        let second = rounds.enter();
        assert_eq!(rounds.missing(second, [1, 2].into_iter()), Some(2));
        rounds.join(2);
        assert_eq!(rounds.missing(second, [1, 2].into_iter()), None);
        let third = rounds.enter();
        assert_eq!(rounds.missing(third, [2].into_iter()), Some(2));
    }
}
