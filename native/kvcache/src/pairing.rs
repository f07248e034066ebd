//! Which bytes of which pages go from a prefilling instance's ranks to a decoding instance's.
//!
//! Both ends make a [`Pairing`] of the same layouts and come to the same answers. It is pure: no
//! addresses, no clock, no I/O. Ranks and groups are numbered as in the layouts it was made of, layers by
//! their place in the group.
//!
//! - **Heads.** Any numbers of ranks; where several source ranks hold a head, [`Pairing::link`] says which.
//! - **Cells.** The page boundaries of both sides cut the tokens into cells. Cells repeat after a cycle of
//!   the least common multiple of the page sizes, so what is copied of one cycle holds for all.
//! - **Runs.** What lies side by side in a cell on both sides is one paged write: over all cycles, by
//!   indices picked from the request's page tables.
//!
//! The offsets and strides of slices under GQA and the random matching of MLA's replicas are those of
//! fabric-lib, section 4.

mod cells;
mod choice;
mod compare;
mod error;
mod link;
mod runs;

use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;
use rustc_hash::FxHashMap;

use crate::layout::{CacheGroup, CacheLayout};

use cells::{Cells, MAX_TOKENS};
use choice::{common, Class};
use compare::held_heads;
use runs::GroupRuns;

pub use compare::{Difference, Mismatch, Side};
pub use error::RequestError;
pub use link::{Link, PagedWrite, Selection};

/// Of an instance.
pub const MAX_RANKS: usize = 512;
/// Runs of a layer's cycle on a link.
pub const MAX_RUNS: u64 = 1 << 20;
/// Runs that a pairing keeps for links that are asked for again; beyond, they are made anew.
const KEPT_RUNS: usize = 1 << 21;

/// Two instances whose caches fit.
#[derive(Clone, Debug)]
pub struct Pairing {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    groups: Vec<Group>,
    sources: usize,
    targets: usize,
    kept: Mutex<Kept>,
}

/// One group of layers, on all ranks.
#[derive(Debug)]
struct Group {
    name: String,
    /// By rank; tensors are in the same order everywhere.
    source: Vec<CacheGroup>,
    target: Vec<CacheGroup>,
    cells: Cells,
    classes: Vec<Class>,
}

/// Runs of links that were asked for, by source, target, group and the classes that go this way.
#[derive(Debug, Default)]
struct Kept {
    runs: FxHashMap<(usize, usize, usize, Vec<u32>), Arc<GroupRuns>>,
    count: usize,
}

impl Pairing {
    /// Pairs the ranks of an instance that prefills with those of one that decodes.
    ///
    /// Page sizes, strides, orders of dimensions and of tensors, buffers and numbers of pages may differ.
    ///
    /// # Errors
    /// A layout that isn't consistent, or every field that must agree and doesn't, with both values.
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
        let groups = (0..source[0].groups.len())
            .map(|group| Group::new(group, source, target))
            .collect::<Result<_, _>>()?;
        let (sources, targets) = (source.len(), target.len());
        let inner = Inner { groups, sources, targets, kept: Mutex::default() };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// How many source ranks there are.
    pub fn source_ranks(&self) -> usize {
        self.inner.sources
    }

    /// How many target ranks there are.
    pub fn target_ranks(&self) -> usize {
        self.inner.targets
    }

    /// How many groups there are.
    pub fn groups(&self) -> usize {
        self.inner.groups.len()
    }

    /// The name and the model's layer numbers of a group.
    ///
    /// # Errors
    /// There is no such group.
    pub fn group(&self, group: usize) -> Result<(&str, &[u32]), RequestError> {
        let group = self.inner.group(group)?;
        Ok((&group.name, &group.source[0].layers))
    }

    /// Tokens of a page of a group.
    ///
    /// # Errors
    /// There is no such group.
    pub fn page_tokens(&self, group: usize, side: Side) -> Result<u32, RequestError> {
        let group = self.inner.group(group)?;
        Ok(match side {
            Side::Source => group.source[0].page_tokens,
            Side::Target => group.target[0].page_tokens,
        })
    }

    /// What goes from a source rank to a target rank in requests of that salt; empty if nothing does.
    ///
    /// Each head of each tensor reaches a target rank from one source rank. Let `C` be the ranks that hold
    /// the head, ascending, and `j` the place of the target rank among those that need any head held by
    /// exactly `C`, ascending. The rank is `C[(j + h(salt)) mod |C|]`, `h` being the finaliser of SplitMix64.
    ///
    /// # Errors
    /// There is no such rank.
    pub fn link(&self, source: usize, target: usize, salt: u64) -> Result<Link, RequestError> {
        self.inner.check_rank(Side::Source, source)?;
        self.inner.check_rank(Side::Target, target)?;
        let groups = (0..self.groups()).map(|g| self.inner.runs(source, target, g, salt)).collect();
        Ok(Link { pairing: self.inner.clone(), source, target, groups })
    }

    /// The source ranks that send anything to a target rank, ascending.
    ///
    /// # Errors
    /// There is no such rank.
    pub fn sources(&self, target: usize, salt: u64) -> Result<Vec<usize>, RequestError> {
        self.inner.check_rank(Side::Target, target)?;
        let classes = self.inner.groups.iter().flat_map(|g| &g.classes);
        let mut ranks: Vec<usize> =
            classes.filter_map(|c| c.source(target as u32, salt)).map(|r| r as usize).collect();
        ranks.sort_unstable();
        ranks.dedup();
        Ok(ranks)
    }

    /// The target ranks that a source rank sends anything to, ascending.
    ///
    /// # Errors
    /// There is no such rank.
    pub fn targets(&self, source: usize, salt: u64) -> Result<Vec<usize>, RequestError> {
        self.inner.check_rank(Side::Source, source)?;
        let gets = |&target: &usize| {
            let mut classes = self.inner.groups.iter().flat_map(|g| &g.classes);
            classes.any(|c| c.source(target as u32, salt) == Some(source as u32))
        };
        Ok((0..self.target_ranks()).filter(gets).collect())
    }

    /// The cells to send of a request of `tokens.end` tokens, whose decoder has the first `tokens.start`.
    ///
    /// Cells that hold a token in `max(tokens.start, tokens.end - window)..tokens.end`. The last may be
    /// partly filled; it is sent whole. With a window, what lies wholly before the last `window` tokens is
    /// left out: a token sees itself and less than `window` before, or that many, so neither the next token
    /// nor the prompt's last, computed again, can see it.
    ///
    /// # Errors
    /// The prefix is longer than the prompt or ends within a page of the target.
    pub fn cells(&self, group: usize, tokens: Range<u64>) -> Result<Range<u64>, RequestError> {
        let group = self.inner.group(group)?;
        let Range { start: have, end: n } = tokens;
        if have > n || n > MAX_TOKENS {
            return Err(RequestError::Tokens { have, tokens: n });
        }
        let page_tokens = group.cells.target_page();
        if have % page_tokens != 0 && have != n {
            return Err(RequestError::PartPage { group: group.name.clone(), have, page_tokens });
        }
        let seen = group.source[0].window.map_or(0, |w| n.saturating_sub(w.into()));
        let end = group.until(n);
        if have == n {
            return Ok(end..end);
        }
        Ok(group.cells.at(have.max(seen))..end)
    }

    /// The end of the cells that are complete when `done` of `tokens` tokens are computed: those of
    /// which every token is, and the last one when all are.
    ///
    /// # Errors
    /// More is done than there is.
    pub fn ready(&self, group: usize, done: u64, tokens: u64) -> Result<u64, RequestError> {
        let group = self.inner.group(group)?;
        if done > tokens || tokens > MAX_TOKENS {
            return Err(RequestError::Tokens { have: done, tokens });
        }
        Ok(if done == tokens { group.until(tokens) } else { group.cells.at(done) })
    }

    /// The cells to send when the computed tokens grow from `done.start` to `done.end`: over chunks
    /// that follow each other from 0 to the end, each of [`cells`](Self::cells) once.
    ///
    /// # Errors
    /// As for [`cells`](Self::cells) and [`ready`](Self::ready).
    pub fn chunk(
        &self,
        group: usize,
        tokens: Range<u64>,
        done: Range<u64>,
    ) -> Result<Range<u64>, RequestError> {
        let all = self.cells(group, tokens.clone())?;
        let before = self.ready(group, done.start, tokens.end)?;
        let after = self.ready(group, done.end, tokens.end)?;
        let start = before.clamp(all.start, all.end);
        Ok(start..after.clamp(start, all.end))
    }

    /// What a target rank counts for a request, from all sources and in all groups (IC-1).
    ///
    /// However the request is cut into chunks, the count is the same.
    ///
    /// # Errors
    /// As for [`cells`](Self::cells), and a rank that doesn't exist.
    pub fn expected(
        &self,
        target: usize,
        salt: u64,
        tokens: Range<u64>,
    ) -> Result<u64, RequestError> {
        let mut sum = 0u64;
        for source in self.sources(target, salt)? {
            let link = self.link(source, target, salt)?;
            for group in 0..self.groups() {
                let count = link.expected(group, self.cells(group, tokens.clone())?)?;
                let (have, n) = (tokens.start, tokens.end);
                sum = sum.checked_add(count).ok_or(RequestError::Tokens { have, tokens: n })?;
            }
        }
        Ok(sum)
    }
}

impl Inner {
    fn group(&self, group: usize) -> Result<&Group, RequestError> {
        let groups = self.groups.len();
        self.groups.get(group).ok_or(RequestError::NoGroup { group, groups })
    }

    fn check_rank(&self, side: Side, rank: usize) -> Result<(), RequestError> {
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
    fn runs(
        &self,
        source: usize,
        target: usize,
        group: usize,
        salt: u64,
    ) -> Option<Arc<GroupRuns>> {
        let of = &self.groups[group];
        let this_way =
            |(_, c): &(u32, &Class)| c.source(target as u32, salt) == Some(source as u32);
        let classes: Vec<u32> =
            (0..).zip(&of.classes).filter(this_way).map(|(number, _)| number).collect();
        if classes.is_empty() {
            return None;
        }
        let key = (source, target, group, classes);
        if let Some(runs) = self.kept.lock().runs.get(&key) {
            return Some(runs.clone());
        }
        let heads = of.heads(target, &key.3);
        let made = GroupRuns::new(&of.source[source], &of.target[target], &of.cells, &heads);
        let made = Arc::new(made);
        let mut kept = self.kept.lock();
        if kept.count + made.len() <= KEPT_RUNS {
            kept.count += made.len();
            kept.runs.insert(key, made.clone());
        }
        Some(made)
    }
}

impl Group {
    fn new(group: usize, source: &[CacheLayout], target: &[CacheLayout]) -> Result<Self, Mismatch> {
        let reference = &source[0].groups[group];
        let alike = |layout: &CacheLayout| {
            let mut own = layout.groups[group].clone();
            let place = |name: &str| reference.tensors.iter().position(|t| t.name == name);
            own.tensors.sort_by_key(|t| place(&t.name));
            own
        };
        let source: Vec<CacheGroup> = source.iter().map(alike).collect();
        let target: Vec<CacheGroup> = target.iter().map(alike).collect();
        let name = reference.name.clone();
        let (source_page, target_page) = (source[0].page_tokens, target[0].page_tokens);
        let links = source.iter().flat_map(|s| target.iter().map(move |t| (s, t)));
        let most = links.map(|(s, t)| runs::run_limit(s, t)).max().unwrap_or(0);
        if most > MAX_RUNS {
            return Err(Mismatch::TooFine { group: name, runs: most, source_page, target_page });
        }
        let classes = choice::classes(&source, &target);
        let cells = Cells::new(source_page, target_page);
        Ok(Self { name, source, target, cells, classes })
    }

    /// The end of the cells that hold the first `tokens` tokens.
    fn until(&self, tokens: u64) -> u64 {
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

    fn check_layer(&self, layer: usize) -> Result<(), RequestError> {
        let layers = self.source[0].layers.len();
        if layer >= layers {
            return Err(RequestError::NoLayer { layer, layers });
        }
        Ok(())
    }

    fn check_cells(&self, cells: &Range<u64>) -> Result<(), RequestError> {
        let &Range { start, end } = cells;
        if start > end || end > self.until(MAX_TOKENS) {
            return Err(RequestError::Cells { start, end });
        }
        Ok(())
    }
}
