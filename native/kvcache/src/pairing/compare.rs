//! Whether the ranks of both instances hold the same cache of the same model.

use std::fmt;
use std::ops::Range;

use crate::layout::{CacheGroup, CacheLayout, CacheTensor, LayoutError};

use super::{MAX_RANKS, MAX_RUNS};

/// Layers that a group of the source and one of the target have in common.
pub(super) struct CommonLayers {
    pub source: usize,
    pub target: usize,
    /// Their numbers in the model, in the order of the source.
    pub layers: Vec<u32>,
}

/// What is paired of two instances: group by group, or where one of them is a stage of a pipeline
/// all layers of the same kind and number.
pub(super) fn common_layers(source: &CacheLayout, target: &CacheLayout) -> Vec<CommonLayers> {
    if !(source.is_stage || target.is_stage) {
        let of = |(g, group): (usize, &CacheGroup)| CommonLayers {
            source: g,
            target: g,
            layers: group.layers.clone(),
        };
        return source.groups.iter().enumerate().map(of).collect();
    }
    let mut found = Vec::new();
    for (s, one) in source.groups.iter().enumerate() {
        for (t, other) in target.groups.iter().enumerate().filter(|(_, g)| g.name == one.name) {
            let both = |layer: &&u32| other.layers.contains(layer);
            let layers: Vec<u32> = one.layers.iter().filter(both).copied().collect();
            if !layers.is_empty() {
                found.push(CommonLayers { source: s, target: t, layers });
            }
        }
    }
    found
}

/// One end of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The instance that prefills.
    Source,
    /// The instance that decodes.
    Target,
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Source => "source",
            Self::Target => "target",
        })
    }
}

/// Why no cache can be transferred between two instances.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Mismatch {
    #[error("the {side} has {count} ranks; give the layouts of 1 to {MAX_RANKS}")]
    Ranks { side: Side, count: usize },
    #[error("{side} rank {rank}: {error}")]
    Layout {
        side: Side,
        rank: usize,
        #[source]
        error: LayoutError,
    },
    #[error("the caches don't fit: {}; start both ends with the same model and cache", listed(.0))]
    Differ(Vec<Difference>),
    #[error(
        "group {group:?} falls into {runs} runs a layer between pages of {source_page} and \
         {target_page} tokens, more than {MAX_RUNS}; let one page size divide the other, or order \
         both caches heads first"
    )]
    TooFine { group: String, runs: u64, source_page: u32, target_page: u32 },
}

/// A field that must be the same and isn't.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Name of the field, with its group and tensor.
    pub field: String,
    /// Each side, and its value.
    pub values: [(String, String); 2],
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [(one, a), (other, b)] = &self.values;
        write!(f, "{}: {a} ({one}), {b} ({other})", self.field)
    }
}

fn listed(differences: &[Difference]) -> String {
    let lines: Vec<String> = differences.iter().map(ToString::to_string).collect();
    lines.join("; ")
}

/// All that must agree and doesn't, of layouts that are each consistent.
pub(super) fn differences(source: &[CacheLayout], target: &[CacheLayout]) -> Vec<Difference> {
    let mut found = Vec::new();
    for (side, ranks) in [(Side::Source, source), (Side::Target, target)] {
        for (rank, layout) in ranks.iter().enumerate().skip(1) {
            let names = [format!("{side} rank 0"), format!("{side} rank {rank}")];
            let mut pair = LayoutComparison { names, found: &mut found };
            pair.layouts(&ranks[0], layout);
            pair.page_tokens(&ranks[0], layout);
        }
    }
    let names = [Side::Source, Side::Target].map(|side| format!("{side} rank 0"));
    let mut pair = LayoutComparison { names, found: &mut found };
    let (one, other) = (&source[0], &target[0]);
    if one.is_stage || other.is_stage {
        pair.model(one, other);
        for common in common_layers(one, other) {
            pair.groups(&one.groups[common.source], &other.groups[common.target]);
        }
    } else {
        pair.layouts(one, other);
    }
    for common in common_layers(one, other) {
        if let Some(group) = other.groups.get(common.target) {
            pair.blocks(&one.groups[common.source], group);
        }
    }
    for (side, ranks) in [(Side::Source, source), (Side::Target, target)] {
        coverage(side, ranks, &mut found);
    }
    found
}

/// Two ranks being compared.
struct LayoutComparison<'a> {
    names: [String; 2],
    found: &'a mut Vec<Difference>,
}

impl LayoutComparison<'_> {
    fn same<T: PartialEq + ?Sized>(
        &mut self,
        field: &str,
        a: &T,
        b: &T,
        show: impl Fn(&T) -> String,
    ) {
        if a != b {
            let [one, other] = self.names.clone();
            let values = [(one, show(a)), (other, show(b))];
            self.found.push(Difference { field: field.to_string(), values });
        }
    }

    fn model(&mut self, a: &CacheLayout, b: &CacheLayout) {
        self.same("model", &a.model, &b.model, |m| format!("{m:?}"));
    }

    fn layouts(&mut self, a: &CacheLayout, b: &CacheLayout) {
        self.model(a, b);
        // In order, because a request's page tables are numbered like the groups.
        let names = |l: &CacheLayout| l.groups.iter().map(|g| g.name.clone()).collect::<Vec<_>>();
        self.same("groups", &names(a), &names(b), |n| format!("{n:?}"));
        for (one, other) in paired_groups(a, b) {
            let field = format!("group {:?}, layers", one.name);
            self.same(&field, &one.layers, &other.layers, |l| numbers(l));
            self.groups(one, other);
        }
    }

    fn groups(&mut self, a: &CacheGroup, b: &CacheGroup) {
        let of = format!("group {:?}", a.name);
        self.same(&format!("{of}, window"), &a.window, &b.window, or_none);
        let kind = |is_state: &bool| if *is_state { "states" } else { "tokens" }.to_string();
        self.same(&format!("{of}, pages of"), &a.is_state, &b.is_state, kind);
        let names = |g: &CacheGroup| {
            let mut names: Vec<String> = g.tensors.iter().map(|t| t.name.clone()).collect();
            names.sort_unstable();
            names
        };
        self.same(&format!("{of}, tensors"), &names(a), &names(b), |n| format!("{n:?}"));
        for (one, other) in in_both(&a.tensors, &b.tensors, |t| &t.name) {
            let of = format!("{of}, tensor {:?}", one.name);
            self.same(&format!("{of}, heads"), &one.heads, &other.heads, u32::to_string);
            self.same(&format!("{of}, width"), &one.width, &other.width, u32::to_string);
            self.same(&format!("{of}, dtype"), &one.dtype, &other.dtype, Clone::clone);
        }
    }

    /// A request has one page table per group and side, so the ranks of a side page alike.
    fn page_tokens(&mut self, a: &CacheLayout, b: &CacheLayout) {
        for (one, other) in paired_groups(a, b) {
            let field = format!("group {:?}, page_tokens", one.name);
            self.same(&field, &one.page_tokens, &other.page_tokens, u32::to_string);
            let field = format!("group {:?}, block_tokens", one.name);
            self.same(&field, &one.block_tokens, &other.block_tokens, or_none);
        }
    }

    /// A source gives blocks before a window back. So it has all of each block that the target
    /// needs only where its own begin at no other tokens than these.
    fn blocks(&mut self, source: &CacheGroup, target: &CacheGroup) {
        let Some(needed) = target.window.and(target.block_tokens) else { return };
        if !source.block_tokens.is_some_and(|tokens| tokens.is_multiple_of(needed)) {
            let field = format!("group {:?}, block_tokens", source.name);
            self.same(&field, &source.block_tokens, &target.block_tokens, or_none);
        }
    }
}

fn or_none(tokens: &Option<u32>) -> String {
    tokens.map_or("none".to_string(), |tokens| tokens.to_string())
}

/// Groups of the same name and number.
fn paired_groups<'a>(
    a: &'a CacheLayout,
    b: &'a CacheLayout,
) -> impl Iterator<Item = (&'a CacheGroup, &'a CacheGroup)> {
    a.groups.iter().zip(&b.groups).filter(|(one, other)| one.name == other.name)
}

/// What both have, by name.
fn in_both<'a, T>(
    a: &'a [T],
    b: &'a [T],
    name: impl Fn(&T) -> &String + Copy,
) -> impl Iterator<Item = (&'a T, &'a T)> {
    a.iter().filter_map(move |one| Some((one, b.iter().find(|other| name(other) == name(one))?)))
}

/// Heads that no rank of a side holds.
fn coverage(side: Side, ranks: &[CacheLayout], found: &mut Vec<Difference>) {
    for (number, group) in ranks[0].groups.iter().enumerate() {
        for tensor in &group.tensors {
            let like = ranks.iter().filter_map(|r| tensor_of(r, number, &tensor.name));
            let mut held: Vec<Range<u32>> = like.map(held_heads).collect();
            held.sort_unstable_by_key(|h| h.start);
            let mut together: Vec<Range<u32>> = Vec::new();
            for range in held {
                match together.last_mut() {
                    Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
                    _ => together.push(range),
                }
            }
            if !matches!(&together[..], [all] if *all == (0..tensor.heads)) {
                let held: Vec<String> = together.iter().map(span).collect();
                let values = [
                    (format!("all {side} ranks together"), held.join(", ")),
                    ("the model".to_string(), span(&(0..tensor.heads))),
                ];
                let field = format!("group {:?}, tensor {:?}, held heads", group.name, tensor.name);
                found.push(Difference { field, values });
            }
        }
    }
}

fn tensor_of<'a>(layout: &'a CacheLayout, group: usize, tensor: &str) -> Option<&'a CacheTensor> {
    let group = layout.groups.get(group)?;
    group.tensors.iter().find(|t| t.name == tensor)
}

/// Those of the model's heads that a rank holds.
pub(super) fn held_heads(tensor: &CacheTensor) -> Range<u32> {
    tensor.first_head..tensor.first_head + tensor.held_heads
}

fn span(range: &Range<u32>) -> String {
    match range.len() {
        1 => range.start.to_string(),
        _ => format!("{}-{}", range.start, range.end - 1),
    }
}

/// Numbers with their stretches shortened: `0-3, 6`.
fn numbers(all: &[u32]) -> String {
    let mut parts: Vec<(u32, u32)> = Vec::new();
    for &n in all {
        match parts.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(n) => *last = n,
            _ => parts.push((n, n)),
        }
    }
    let show = |&(a, b): &(u32, u32)| if a == b { a.to_string() } else { format!("{a}-{b}") };
    parts.iter().map(show).collect::<Vec<_>>().join(", ")
}
