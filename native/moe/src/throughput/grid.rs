//! Ranks as a grid of nodes and rails, and the numbers of the rings between them. Pure.
//!
//! While a rank is missing, the grid is *flat*: every rank is a node of its own, and no rank
//! forwards. A ring has the same two ends in either grid, so that no other rank writes where a lost
//! rank might (MR-1).

/// Content and endpoints of a ring. A *lane* is a source's tokens on a channel; its *gateway*
/// on a node is the rank there with the source's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Family {
    /// Tokens, from their source to its gateway on another node.
    RailOut,
    /// Tokens, from a gateway to a rank of its node.
    NodeOut,
    /// Answers, from a rank to the gateway of its node.
    NodeBack,
    /// Sums of a node, from a gateway to the source.
    RailBack,
}

impl Family {
    pub const ALL: [Self; 4] = [Self::RailOut, Self::NodeOut, Self::NodeBack, Self::RailBack];

    pub fn is_back(self) -> bool {
        matches!(self, Self::NodeBack | Self::RailBack)
    }
}

/// Position of this rank among the nodes and ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    pub rank: u32,
    pub ranks: u32,
    pub per_node: u32,
    /// Ranks of a node when all are here.
    pub home: u32,
}

impl Grid {
    /// The same where every rank is a node of its own.
    pub fn flat(self) -> Self {
        Self { per_node: 1, ..self }
    }

    /// The same when all ranks are here.
    pub fn whole(self) -> Self {
        Self { per_node: self.home, ..self }
    }

    pub fn nodes(self) -> u32 {
        self.ranks / self.per_node
    }

    pub fn node(self) -> u32 {
        self.node_of(self.rank)
    }

    pub fn local(self) -> u32 {
        self.local_of(self.rank)
    }

    pub fn node_of(self, rank: u32) -> u32 {
        rank / self.per_node
    }

    pub fn local_of(self, rank: u32) -> u32 {
        rank % self.per_node
    }

    pub fn at(self, node: u32, local: u32) -> u32 {
        node * self.per_node + local
    }

    /// The number of a ring at this rank, which is one of its two ends, among those out or those
    /// back of a channel; `partner` is the other end, `source` the node of the lane's source.
    pub fn ring(self, family: Family, source: u32, partner: u32) -> u64 {
        if self.per_node != self.home {
            return self.flat_ring(family, partner);
        }
        let across = || skip(self.node_of(partner), self.node());
        let within = || source * (self.per_node - 1) + skip(self.local_of(partner), self.local());
        u64::from(match family {
            Family::RailOut | Family::RailBack => across(),
            Family::NodeOut | Family::NodeBack => self.nodes() - 1 + within(),
        })
    }

    /// The ring of a pair in the flat grid: one that it has anyway, or one beyond those.
    fn flat_ring(self, family: Family, partner: u32) -> u64 {
        let home = self.whole();
        let node = home.node_of(partner);
        if home.local_of(partner) == home.local() {
            return home.ring(family, node, partner);
        }
        if node == home.node() {
            let within = if family.is_back() { Family::NodeBack } else { Family::NodeOut };
            return home.ring(within, node, partner);
        }
        let place = skip(node, home.node()) * (self.home - 1);
        u64::from(self.ranks - 1 + place + skip(home.local_of(partner), home.local()))
    }

    /// The numbers of all rings with a partner, in either grid.
    pub fn rings_with(self, partner: u32) -> Vec<u64> {
        let home = self.whole();
        if home.node_of(partner) == home.node() && self.home > 1 {
            let ring = |source| home.ring(Family::NodeOut, source, partner);
            return (0..home.nodes()).map(ring).collect();
        }
        vec![self.flat().ring(Family::RailOut, partner, partner)]
    }

    /// The same ring as the partner numbers it.
    pub fn ring_at(self, partner: u32, family: Family, source: u32) -> u64 {
        Self { rank: partner, ..self }.ring(family, source, self.rank)
    }
}

/// `i` among all but `own`.
fn skip(i: u32, own: u32) -> u32 {
    i - u32::from(i > own)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_ring_has_a_number_of_its_own_at_either_end() {
        for (nodes, per_node) in [(1, 1), (1, 4), (4, 1), (2, 2), (3, 2), (2, 3)] {
            let ranks = nodes * per_node;
            for rank in 0..ranks {
                let grid = Grid { rank, ranks, per_node, home: per_node };
                let others = |own: u32, n: u32| (0..n).filter(move |i| *i != own);
                let rail = || others(grid.node(), nodes).map(|n| grid.at(n, grid.local()));
                let node = || others(grid.local(), per_node).map(|l| grid.at(grid.node(), l));
                for (across, within) in
                    [(Family::RailOut, Family::NodeOut), (Family::RailBack, Family::NodeBack)]
                {
                    let mut numbers: Vec<u64> =
                        rail().map(|p| grid.ring(across, grid.node_of(p), p)).collect();
                    for source in 0..nodes {
                        numbers.extend(node().map(|p| grid.ring(within, source, p)));
                    }
                    let all: HashSet<u64> = numbers.iter().copied().collect();
                    assert_eq!((all.len(), numbers.len() as u32), (numbers.len(), ranks - 1));
                    assert!(numbers.iter().all(|n| *n < u64::from(ranks - 1)));
                }
            }
        }
    }

    /// A ring has the same endpoints in the grid of all ranks and in the flat one.
    #[test]
    fn mr_1_a_ring_has_the_same_ends_in_either_grid() {
        for (nodes, per_node) in [(1, 4), (4, 1), (2, 2), (3, 2), (2, 3)] {
            let ranks = nodes * per_node;
            for rank in 0..ranks {
                let grid = Grid { rank, ranks, per_node, home: per_node };
                let mut ends = std::collections::HashMap::new();
                let others = |own: u32, n: u32| (0..n).filter(move |i| *i != own);
                for node in others(grid.node(), nodes) {
                    let partner = grid.at(node, grid.local());
                    ends.insert(grid.ring(Family::RailOut, node, partner), partner);
                }
                for (source, local) in
                    (0..nodes).flat_map(|s| others(grid.local(), per_node).map(move |l| (s, l)))
                {
                    let partner = grid.at(grid.node(), local);
                    ends.insert(grid.ring(Family::NodeOut, source, partner), partner);
                }
                let flat = grid.flat();
                let all = ranks - 1 + (nodes - 1) * (per_node - 1);
                for partner in others(rank, ranks) {
                    let number = flat.ring(Family::RailOut, partner, partner);
                    assert_eq!(*ends.entry(number).or_insert(partner), partner);
                    assert_eq!(number, flat.ring(Family::RailBack, partner, partner));
                    assert!(number < u64::from(all));
                }
                assert_eq!(ends.len() as u32, all);
                for partner in others(rank, ranks) {
                    for number in grid.rings_with(partner) {
                        assert_eq!(ends.remove(&number), Some(partner));
                    }
                }
                assert!(ends.is_empty());
            }
        }
    }
}
