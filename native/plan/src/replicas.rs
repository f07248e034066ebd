//! Target ranks that need the same boxes at the same bytes, such as replicas of one engine.
//!
//! Replicas are planned once, and their links share one list of copies: at scale this saves most
//! of the work and memory. Ranks may be replicas in some containers only (attention replicated
//! everywhere, experts on a few), so containers with the same replicas form a *section*.

use std::hash::{Hash, Hasher};

use rustc_hash::{FxHashMap, FxHashSet, FxHasher};

use crate::cuts::CutsTable;
use crate::error::{Result, Role};
use crate::layout::Evaluated;
use crate::model::Side;
use crate::placer::Dims;

/// Containers beyond this many different groupings share one last section.
const MAX_SECTIONS: usize = 8;

/// Containers in which the same ranks are replicas of each other.
#[derive(Debug)]
pub(crate) struct Section {
    /// Ascending.
    pub containers: Vec<u32>,
    /// Dense ranks that hold any of them, ascending inside a group.
    pub groups: Vec<Vec<u32>>,
}

/// `(dense rank, first rank of its group)` for every holder of a container, by rank.
type Grouping = Vec<(u32, u32)>;

type Signature = (u32, Dims<u32>, (u64, u32));

fn signatures<'a>(
    target: &'a Evaluated<'_>,
    rank: u32,
    container: u32,
) -> impl Iterator<Item = Signature> + 'a {
    target.held_in(rank, container).iter().map(|&held| {
        let ndim = target.leaves[held.leaf as usize].cuts.len();
        let coords = (0..ndim).map(|d| target.coord(held, d)).collect();
        (held.leaf, coords, target.placed_key(held))
    })
}

fn grouping(target: &Evaluated<'_>, container: u32, holders: &[u32]) -> Grouping {
    let mut by_hash: FxHashMap<u64, Vec<u32>> = FxHashMap::default();
    holders
        .iter()
        .map(|&rank| {
            let mut hasher = FxHasher::default();
            signatures(target, rank, container).for_each(|s| s.hash(&mut hasher));
            let firsts = by_hash.entry(hasher.finish()).or_default();
            let replica = firsts.iter().copied().find(|&first| {
                signatures(target, first, container).eq(signatures(target, rank, container))
            });
            (
                rank,
                replica.unwrap_or_else(|| {
                    firsts.push(rank);
                    rank
                }),
            )
        })
        .collect()
}

/// The ranks that hold each container of a side, and the ranks that hold the same bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holders {
    /// The ranks that hold anything of each container, ascending.
    pub by_container: Vec<Vec<u32>>,
    /// Groups of ranks that hold the same boxes at the same bytes in all of their containers;
    /// ascending. Ranks that hold nothing are in no group.
    pub replicas: Vec<Vec<u32>>,
}

impl Side {
    /// # Errors
    /// [`PlanError::Invalid`](crate::PlanError::Invalid) and the other layout errors of
    /// [`crate::plan`].
    pub fn holders(&self, role: Role) -> Result<Holders> {
        self.check(role)?;
        let mut cuts = CutsTable::default();
        let evaluated = Evaluated::new(role, self, &mut cuts)?;
        let named = |ranks: &mut dyn Iterator<Item = u32>| {
            ranks.map(|dense| self.ranks[dense as usize]).collect()
        };
        let mut by_container = vec![Vec::new(); self.containers.len()];
        let mut different = FxHashSet::default();
        for (container, grouping) in groupings(&evaluated) {
            by_container[container as usize] = named(&mut grouping.iter().map(|&(rank, _)| rank));
            different.insert(grouping);
        }
        let groups = groups(&different.into_iter().collect::<Vec<_>>());
        let replicas = groups.into_iter().map(|group| named(&mut group.into_iter())).collect();
        Ok(Holders { by_container, replicas })
    }
}

/// The replica groups of each target container that at least one rank holds.
fn groupings(target: &Evaluated<'_>) -> Vec<(u32, Grouping)> {
    let mut holders: Vec<Vec<u32>> = vec![Vec::new(); target.side.containers.len()];
    for rank in 0..target.held.len() as u32 {
        target.containers_of(rank).for_each(|c| holders[c as usize].push(rank));
    }
    let held = (0..).zip(&holders).filter(|(_, ranks)| !ranks.is_empty());
    held.map(|(container, ranks)| (container, grouping(target, container, ranks))).collect()
}

/// All target containers, divided into sections.
pub(crate) fn sections(target: &Evaluated<'_>) -> Vec<Section> {
    let mut ids: FxHashMap<Grouping, usize> = FxHashMap::default();
    let mut found: Vec<(Vec<u32>, Vec<Grouping>)> = Vec::new();
    for (container, grouping) in groupings(target) {
        let next = ids.len().min(MAX_SECTIONS - 1);
        let id = *ids.entry(grouping.clone()).or_insert(next);
        if id == found.len() {
            found.push((Vec::new(), vec![grouping.clone()]));
        }
        let (containers, groupings) = &mut found[id];
        containers.push(container);
        if groupings.last() != Some(&grouping) {
            groupings.push(grouping);
        }
    }
    found
        .into_iter()
        .map(|(containers, groupings)| Section { containers, groups: groups(&groupings) })
        .collect()
}

/// Ranks that are replicas of each other in every grouping.
fn groups(groupings: &[Grouping]) -> Vec<Vec<u32>> {
    let mut labels: FxHashMap<u32, Vec<(usize, u32)>> = FxHashMap::default();
    for (n, grouping) in groupings.iter().enumerate() {
        for &(rank, first) in grouping {
            labels.entry(rank).or_default().push((n, first));
        }
    }
    let mut ranks: Vec<u32> = labels.keys().copied().collect();
    ranks.sort_unstable();
    let mut ids: FxHashMap<&[(usize, u32)], usize> = FxHashMap::default();
    let mut groups: Vec<Vec<u32>> = Vec::new();
    for rank in ranks {
        let next = groups.len();
        let id = *ids.entry(&labels[&rank]).or_insert(next);
        if id == next {
            groups.push(Vec::new());
        }
        groups[id].push(rank);
    }
    groups
}
