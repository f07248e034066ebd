//! State of a pairing: its groups, and the runs of the requested links.

use std::ops::Range;
use std::sync::Arc;

use rustc_hash::FxHashMap;

use crate::layout::{CacheGroup, CacheLayout};
use fabric_engine::locks::Mutex;

use super::cells::{Cells, MAX_TOKENS};
use super::compare::{common_layers, held_heads, CommonLayers};
use super::head_classes::{self, common, HeadClass};
use super::runs::{self, GroupRuns};
use super::{compare, Mismatch, RequestError, Side, MAX_RANKS, MAX_RUNS};

/// Runs that are cached for links that are asked for again; beyond, they are made anew.
const KEPT_RUNS: usize = 1 << 21;

/// A group here, and the number of a layer in it.
type PairedLayer = (usize, usize);

#[derive(Debug)]
pub(super) struct Inner {
    pub groups: Vec<Group>,
    /// For each layer of each group of the source.
    pub source_layers: Vec<Box<[Option<PairedLayer>]>>,
    pub sources: usize,
    pub targets: usize,
    cached: Mutex<CachedRuns>,
}

/// One group of layers, on all ranks.
#[derive(Debug)]
pub(super) struct Group {
    pub name: String,
    /// The numbers of the groups in the layouts of the source and of the target.
    pub of: (usize, usize),
    /// By rank; tensors are in the same order everywhere, and so are layers, all of which both
    /// sides have.
    pub source: Vec<CacheGroup>,
    pub target: Vec<CacheGroup>,
    pub cells: Cells,
    pub classes: Vec<HeadClass>,
}

/// Runs of links that were asked for, by source, target, group and the classes that go this way.
#[derive(Debug, Default)]
struct CachedRuns {
    runs: FxHashMap<(usize, usize, usize, Vec<u32>), Arc<GroupRuns>>,
    count: usize,
}

impl Inner {
    pub fn new(source: &[CacheLayout], target: &[CacheLayout]) -> Result<Self, Mismatch> {
        for (side, ranks) in [(Side::Source, source), (Side::Target, target)] {
            if ranks.is_empty() || ranks.len() > MAX_RANKS {
                return Err(Mismatch::Ranks { side, count: ranks.len() });
            }
            for (rank, layout) in ranks.iter().enumerate() {
                layout.check().map_err(|error| Mismatch::Layout { side, rank, error })?;
            }
        }
        let differences = compare::differences(source, target);
        if !differences.is_empty() {
            return Err(Mismatch::Differ(differences));
        }
        let of_layers = |group: &CacheGroup| vec![None; group.layers.len()].into();
        let mut source_layers: Vec<Box<[_]>> = source[0].groups.iter().map(of_layers).collect();
        let mut groups = Vec::new();
        for common in common_layers(&source[0], &target[0]) {
            for (number, layer) in common.layers.iter().enumerate() {
                let at = place_of(&source[0].groups[common.source], *layer);
                source_layers[common.source][at] = Some((groups.len(), number));
            }
            groups.push(Group::new(&common, source, target)?);
        }
        let (sources, targets) = (source.len(), target.len());
        Ok(Self { groups, source_layers, sources, targets, cached: Mutex::default() })
    }

    pub fn group(&self, group: usize) -> Result<&Group, RequestError> {
        let groups = self.groups.len();
        self.groups.get(group).ok_or(RequestError::NoGroup { group, groups })
    }

    pub fn check_rank(&self, side: Side, rank: usize) -> Result<(), RequestError> {
        let ranks = match side {
            Side::Source => self.sources,
            Side::Target => self.targets,
        };
        if rank >= ranks {
            return Err(RequestError::NoRank { side, rank, ranks });
        }
        Ok(())
    }

    /// The runs of a group on a link, made when first asked for.
    pub fn runs(
        &self,
        source: usize,
        target: usize,
        group: usize,
        salt: u64,
    ) -> Option<Arc<GroupRuns>> {
        let of = &self.groups[group];
        let this_way =
            |(_, c): &(u32, &HeadClass)| c.source(target as u32, salt) == Some(source as u32);
        let classes: Vec<u32> =
            (0..).zip(&of.classes).filter(this_way).map(|(number, _)| number).collect();
        if classes.is_empty() {
            return None;
        }
        let key = (source, target, group, classes);
        if let Some(runs) = self.cached.lock().runs.get(&key) {
            return Some(runs.clone());
        }
        let heads = of.heads(target, &key.3);
        let made = GroupRuns::new(&of.source[source], &of.target[target], &of.cells, &heads);
        let made = Arc::new(made);
        let mut cached = self.cached.lock();
        if cached.count + made.len() <= KEPT_RUNS {
            cached.count += made.len();
            cached.runs.insert(key, made.clone());
        }
        Some(made)
    }
}

/// The place of a layer in its group, which has it.
fn place_of(group: &CacheGroup, layer: u32) -> usize {
    group.layers.iter().position(|&l| l == layer).expect("a common layer is in both groups")
}

impl Group {
    pub fn new(
        common: &CommonLayers,
        source: &[CacheLayout],
        target: &[CacheLayout],
    ) -> Result<Self, Mismatch> {
        let of = (common.source, common.target);
        let reference = &source[0].groups[of.0];
        let alike = |group: &CacheGroup| {
            let mut own = group.clone();
            let place = |name: &str| reference.tensors.iter().position(|t| t.name == name);
            own.tensors.sort_by_key(|t| place(&t.name));
            if own.layers != common.layers {
                let at: Vec<usize> = common.layers.iter().map(|&l| place_of(group, l)).collect();
                for tensor in &mut own.tensors {
                    tensor.places = at.iter().map(|&layer| tensor.places[layer]).collect();
                }
                own.layers = common.layers.clone();
            }
            own
        };
        let source: Vec<CacheGroup> = source.iter().map(|l| alike(&l.groups[of.0])).collect();
        let target: Vec<CacheGroup> = target.iter().map(|l| alike(&l.groups[of.1])).collect();
        let name = reference.name.clone();
        let (source_page, target_page) = (source[0].page_tokens, target[0].page_tokens);
        let links = source.iter().flat_map(|s| target.iter().map(move |t| (s, t)));
        let most = links.map(|(s, t)| runs::run_limit(s, t)).max().unwrap_or(0);
        if most > MAX_RUNS {
            return Err(Mismatch::TooFine { group: name, runs: most, source_page, target_page });
        }
        let classes = head_classes::classes(&source, &target);
        let cells = match source[0].is_state {
            true => Cells::of_state(),
            false => Cells::new(source_page, target_page),
        };
        Ok(Self { name, of, source, target, cells, classes })
    }

    /// The end of the cells that hold the first `tokens` tokens.
    pub fn until(&self, tokens: u64) -> u64 {
        tokens.checked_sub(1).map_or(0, |last| self.cells.at(last) + 1)
    }

    /// The heads of these classes that a target rank needs, by tensor and in order.
    fn heads(&self, target: usize, classes: &[u32]) -> Vec<(usize, Range<u32>)> {
        let of = classes.iter().flat_map(|&c| &self.classes[c as usize].heads);
        let needed = |(tensor, heads): &(usize, Range<u32>)| {
            let held = held_heads(&self.target[target].tensors[*tensor]);
            (*tensor, common(heads, &held))
        };
        let mut all: Vec<_> = of.map(needed).filter(|(_, heads)| !heads.is_empty()).collect();
        all.sort_unstable_by_key(|(tensor, heads)| (*tensor, heads.start));
        all.dedup_by(|next, last| {
            let joins = next.0 == last.0 && next.1.start == last.1.end;
            if joins {
                last.1.end = next.1.end;
            }
            joins
        });
        all
    }

    pub fn check_layer(&self, layer: usize) -> Result<(), RequestError> {
        let layers = self.source[0].layers.len();
        if layer >= layers {
            return Err(RequestError::NoLayer { layer, layers });
        }
        Ok(())
    }

    pub fn check_cells(&self, cells: &Range<u64>) -> Result<(), RequestError> {
        let &Range { start, end } = cells;
        if start > end || end > self.until(MAX_TOKENS) {
            return Err(RequestError::Cells { start, end });
        }
        Ok(())
    }
}
