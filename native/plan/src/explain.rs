//! A plan in words: which rank sends which box of which tensor, and why that replica was chosen.
//!
//! Boxes and reasons aren't stored: they are computed again from the two sides, with equal results.

use std::fmt::Write;

use crate::assign::{assign, Assignment, Senders};
use crate::error::{PlanError, Result, Role};
use crate::layout::HeldLeaf;
use crate::matching::{LeafRegion, Matcher};
use crate::overlap::Share;
use crate::plan::Plan;
use crate::regions::Bounds;
use crate::replicas::sections;

/// Maximum number of lines of an explanation.
const MAX_LINES: usize = 2000;

/// Number of links that a summary lists.
const BUSIEST: usize = 8;

impl Plan {
    /// A summary of the plan, or the copies of one tensor or container, or into one target rank.
    ///
    /// # Errors
    /// [`PlanError::Invalid`] when neither side has a tensor or container of that name,
    /// [`PlanError::UnknownRank`] for a rank that is no target.
    pub fn explain(&self, name: Option<&str>, rank: Option<u32>) -> Result<String> {
        let mut out = self.summary();
        if name.is_none() && rank.is_none() {
            return Ok(out);
        }
        let only = rank.map(|r| self.dense(Role::Target, r)).transpose()?;
        let named = |side: &crate::model::Side, name: &str| {
            side.tensors.iter().any(|t| t.name == name)
                || side.containers.iter().any(|c| c.name == name)
        };
        if let Some(name) = name.filter(|n| !named(&self.source, n) && !named(&self.target, n)) {
            return Err(PlanError::invalid(
                Role::Target,
                format!("name `{name}`"),
                "is neither a tensor nor a container of the plan; its to_dict() lists them",
            ));
        }
        let mut matcher = Matcher::new(&self.source, &self.target, self.options)?;
        let sections = sections(&matcher.target);
        let assignment = assign(&mut matcher, &sections, self.options.min_split_bytes)?;
        let mut explainer = Explainer { matcher, assignment, lines: 0, out: &mut out };
        for target in 0..self.target.ranks.len() as u32 {
            if only.is_none() || only == Some(target) {
                explainer.target(target, name)?;
            }
        }
        if explainer.lines == 0 {
            out.push_str("  no copy matches\n");
        }
        Ok(out)
    }

    fn summary(&self) -> String {
        let balance = self.balance();
        let mut links: Vec<_> = self.links().collect();
        let mut out = format!(
            "{} from {} source ranks to {} target ranks over {} links in {} copies\n\
             busiest sender {:.3}x, receiver {:.3}x, link {:.3}x the mean\n",
            bytes(balance.total),
            self.source.ranks.len(),
            self.target.ranks.len(),
            links.len(),
            self.total_copies(),
            balance.sender_imbalance,
            balance.receiver_imbalance,
            balance.link_imbalance,
        );
        links.sort_by_key(|l| (std::cmp::Reverse(l.bytes), l.src, l.dst));
        for l in links.iter().take(BUSIEST) {
            let _ = writeln!(
                out,
                "  rank {} -> rank {}: {} in {} copies, {} pages",
                l.src,
                l.dst,
                bytes(l.bytes),
                l.copies,
                l.pages
            );
        }
        if links.len() > BUSIEST {
            let _ = writeln!(out, "and {} more links, none with more bytes", links.len() - BUSIEST);
        }
        out
    }
}

struct Explainer<'o, 's> {
    matcher: Matcher<'s>,
    assignment: Assignment,
    lines: usize,
    out: &'o mut String,
}

impl Explainer<'_, '_> {
    fn line(&mut self, text: &str) {
        self.lines += 1;
        match self.lines.cmp(&MAX_LINES) {
            std::cmp::Ordering::Less => {
                self.out.push_str(text);
                self.out.push('\n');
            }
            std::cmp::Ordering::Equal => {
                self.out.push_str("more lines follow; name a tensor or a rank to see them\n");
            }
            std::cmp::Ordering::Greater => {}
        }
    }

    fn target(&mut self, target: u32, name: Option<&str>) -> Result<()> {
        for nth in 0..self.matcher.target.held[target as usize].len() {
            let to = self.matcher.target.held[target as usize][nth];
            for leaf_region in self.matcher.leaf_regions(to)? {
                self.leaf_region(target, leaf_region, name)?;
            }
        }
        Ok(())
    }

    fn leaf_region(
        &mut self,
        target: u32,
        leaf_region: LeafRegion,
        name: Option<&str>,
    ) -> Result<()> {
        let to = leaf_region.to;
        let decision = self.assignment.decision(target, leaf_region);
        let class = decision.map_or(0, |d| d.class as usize);
        let matcher = &mut self.matcher;
        let wanted = |text: &str| name.is_none_or(|n| n == text);
        let target_matches = wanted(matcher.target.tensor_name(to.leaf))
            || wanted(matcher.target.container_name(to.leaf));
        let mut source_leaves = matcher.classes(leaf_region).iter().flatten();
        if !target_matches && !source_leaves.any(|&l| wanted(matcher.source.container_name(l))) {
            return Ok(());
        }
        let overlap = matcher.overlap(leaf_region, class);
        let matcher = &self.matcher;
        let mut lines = vec![format!(
            "tensor `{}`, target rank {} container `{}`: wants {}",
            matcher.target.tensor_name(to.leaf),
            matcher.target.rank_id(target),
            matcher.target.container_name(to.leaf),
            matcher.bounds(to, Role::Target).describe(),
        )];
        let mut nth_box = 0;
        let mut holders = Vec::new();
        matcher.boxes(&overlap, |shares| {
            matcher.holders(&matcher.classes(leaf_region)[class], shares, &mut holders);
            let whole = self.bounds(to, shares);
            let mut add = |holder: u32, bounds: &Bounds| {
                let Some(&from) = holders.get(holder as usize) else { return };
                lines.push(format!(
                    "  from rank {} container `{}`: {}, {}",
                    matcher.source.rank_id(matcher.source.rank_of(from)),
                    matcher.source.container_name(from.leaf),
                    bounds.describe(),
                    self.reason(from, &holders),
                ));
            };
            match decision.map(|d| self.assignment.senders(d, nth_box)) {
                None => add(0, &whole),
                Some(Senders::One(holder)) => add(holder, &whole),
                Some(Senders::Parts(parts)) => {
                    for part in parts {
                        let mut bounds = whole.clone();
                        let d = part.dim as usize;
                        bounds.hi[d] = bounds.lo[d] + part.hi;
                        bounds.lo[d] += part.lo;
                        add(part.holder, &bounds);
                    }
                }
            }
            nth_box += 1;
            Ok(())
        })?;
        lines.iter().for_each(|l| self.line(l));
        Ok(())
    }

    /// The box around the shares, in indices of the logical tensor.
    fn bounds(&self, to: HeldLeaf, shares: &[&Share]) -> Bounds {
        let mut bounds = Bounds { lo: Default::default(), hi: Default::default() };
        for (d, share) in shares.iter().enumerate() {
            let index = |local: u64| self.matcher.global_index(to, d, local);
            let first = share.ranges.first().map_or(0, |s| s.dst);
            let last =
                share.ranges.last().map_or(0, |s| s.dst + (s.count - 1) * s.dst_step + s.len - 1);
            bounds.lo.push(index(first));
            bounds.hi.push(index(last) + 1);
        }
        bounds
    }

    fn reason(&self, from: HeldLeaf, holders: &[HeldLeaf]) -> String {
        if holders.len() == 1 {
            return "the only holder".into();
        }
        let source = &self.matcher.source;
        let mut ranks: Vec<u32> =
            holders.iter().take(16).map(|&h| source.rank_id(source.rank_of(h))).collect();
        ranks.dedup();
        let load = self.assignment.loads[source.rank_of(from) as usize];
        let busiest =
            holders.iter().map(|&h| self.assignment.loads[source.rank_of(h) as usize]).max();
        format!(
            "chosen among {} holders {ranks:?}{} as least loaded or already sending there; it \
             sends {} in all, the busiest of them {}",
            holders.len(),
            if holders.len() > ranks.len() { " and more" } else { "" },
            bytes(load),
            bytes(busiest.unwrap_or(load)),
        )
    }
}

fn bytes(n: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut value = n as f64;
    let mut unit = "bytes";
    for next in UNITS {
        if value < 1024.0 {
            break;
        }
        (value, unit) = (value / 1024.0, next);
    }
    if unit == "bytes" {
        return format!("{n} bytes");
    }
    format!("{value:.1} {unit}")
}
