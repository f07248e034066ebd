//! The transfers of one rank, in the order in which to post them.

use std::collections::BTreeMap;

use crate::error::{Result, Role};
use crate::plan::{Copy, Link, Plan};

/// A copy and the rank at its other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfer<'p> {
    pub peer: u32,
    pub copy: Copy<'p>,
}

impl Plan {
    /// All transfers of a source rank.
    ///
    /// Most urgent target container first. Within a container the targets come in turn, and every
    /// source starts with another one, so that senders don't all write to the same receiver.
    pub fn for_source(&self, rank: u32) -> Result<impl Iterator<Item = Transfer<'_>>> {
        let src = self.dense(Role::Source, rank)?;
        let (targets, start) = (self.target.ranks.len(), self.first_target(src));
        let mut order: Vec<(u32, u32, u32)> = Vec::new();
        for (turn, link) in self.links_of(src) {
            let program = self.programs[link.program as usize];
            order.extend(
                (program.first..program.end)
                    .map(|c| (self.columns.dst_container[c as usize], turn, c)),
            );
        }
        order.sort_unstable();
        Ok(order.into_iter().map(move |(_, turn, copy)| {
            let dst = (turn as usize + start) % targets;
            Transfer { peer: self.target.ranks[dst], copy: self.copy(copy) }
        }))
    }

    /// The target (dense) that a source (dense) starts with.
    fn first_target(&self, src: u32) -> usize {
        src as usize * self.target.ranks.len() / self.source.ranks.len()
    }

    /// The links of a source (dense), each with the turn of its target.
    fn links_of(&self, src: u32) -> impl Iterator<Item = (u32, Link)> + '_ {
        let (targets, start) = (self.target.ranks.len(), self.first_target(src));
        let from = self.links.partition_point(|l| l.src < src);
        let until = self.links.partition_point(|l| l.src <= src);
        let turn = move |link: &Link| ((link.dst as usize + targets - start) % targets) as u32;
        self.links[from..until].iter().map(move |link| (turn(link), *link))
    }

    /// Visits all copies of a source rank, unsorted, with the target's index on its side.
    pub fn for_each_copy(&self, rank: u32, mut sent: impl FnMut(u32, Copy<'_>)) -> Result<()> {
        let src = self.dense(Role::Source, rank)?;
        for (_, link) in self.links_of(src) {
            let program = self.programs[link.program as usize];
            (program.first..program.end).for_each(|c| sent(link.dst, self.copy(c)));
        }
        Ok(())
    }

    /// The containers that a source rank sends from, in the order of their first transfer.
    pub fn sending_order(&self, rank: u32) -> Result<Vec<u32>> {
        // By target container, then by turn, as `for_source` has them.
        let mut first: BTreeMap<u32, (u32, u32, u32)> = BTreeMap::new();
        let src = self.dense(Role::Source, rank)?;
        let mut programs: Vec<(u32, u32)> =
            self.links_of(src).map(|(turn, link)| (link.program, turn)).collect();
        // Links that share a program have its copies in common: the first turn counts.
        programs.sort_unstable();
        programs.dedup_by_key(|(program, _)| *program);
        for (program, turn) in programs {
            let program = self.programs[program as usize];
            for c in program.first..program.end {
                let at = (self.columns.dst_container[c as usize], turn, c);
                let container = self.columns.src_container[c as usize];
                let known = first.entry(container).or_insert(at);
                *known = at.min(*known);
            }
        }
        let mut order: Vec<_> = first.into_iter().map(|(container, at)| (at, container)).collect();
        order.sort_unstable();
        Ok(order.into_iter().map(|(_, container)| container).collect())
    }

    /// All transfers into a target rank, most urgent container first, then by source.
    pub fn for_target(&self, rank: u32) -> Result<impl Iterator<Item = Transfer<'_>>> {
        let dst = self.dense(Role::Target, rank)?;
        let mut order: Vec<(u32, u32, u32)> = Vec::new();
        for link in self.links.iter().filter(|l| l.dst == dst) {
            let program = self.programs[link.program as usize];
            order.extend(
                (program.first..program.end)
                    .map(|c| (self.columns.dst_container[c as usize], link.src, c)),
            );
        }
        order.sort_unstable();
        Ok(order.into_iter().map(move |(_, src, copy)| Transfer {
            peer: self.source.ranks[src as usize],
            copy: self.copy(copy),
        }))
    }

    /// The distribution of bytes over senders, receivers and links.
    pub fn balance(&self) -> Balance {
        let mut sent = vec![0u64; self.source.ranks.len()];
        let mut received = vec![0u64; self.target.ranks.len()];
        for link in &self.links {
            let bytes = self.programs[link.program as usize].bytes;
            sent[link.src as usize] += bytes;
            received[link.dst as usize] += bytes;
        }
        let links: Vec<u64> = self.links().map(|l| l.bytes).collect();
        let total: u64 = sent.iter().sum();
        let imbalance = |max: u64, count: usize| {
            if total == 0 {
                1.0
            } else {
                max as f64 * count as f64 / total as f64
            }
        };
        let max = |loads: &[u64]| loads.iter().copied().max().unwrap_or(0);
        Balance {
            total,
            sender_imbalance: imbalance(max(&sent), sent.len()),
            receiver_imbalance: imbalance(max(&received), received.len()),
            link_imbalance: imbalance(max(&links), links.len()),
            sent: self.source.ranks.iter().copied().zip(sent).collect(),
            received: self.target.ranks.iter().copied().zip(received).collect(),
        }
    }
}

/// Bytes per rank, and the largest over the mean (1.0 is even; idle ranks count).
#[derive(Clone, Debug, PartialEq)]
pub struct Balance {
    pub total: u64,
    /// `(rank, bytes)`, in the order of the side's ranks.
    pub sent: Vec<(u32, u64)>,
    pub received: Vec<(u32, u64)>,
    pub sender_imbalance: f64,
    pub receiver_imbalance: f64,
    /// Over pairs of ranks that exchange data.
    pub link_imbalance: f64,
}
