//! Mapping of KV pages from the ranks of a prefilling instance to those of a decoding instance.
//!
//! Both ends make a [`Pairing`] of the same layouts and come to the same answers. It is pure: no
//! addresses, no clock, no I/O. Ranks and groups are numbered as in the layouts it was made of,
//! layers by their place in the group.
//!
//! - **Heads.** Any numbers of ranks; where several source ranks hold a head, [`Pairing::link`] says which.
//! - **Cells.** The page boundaries of both sides cut the tokens into cells. Cells repeat after a cycle of
//!   the least common multiple of the page sizes, so what is copied of one cycle holds for all.
//! - **Runs.** What lies side by side in a cell on both sides is one paged write: over all cycles, by
//!   indices picked from the request's page tables.
//!
//! The offsets and strides of slices under GQA and the random matching of MLA's replicas are those
//! of fabric-lib, section 4.

mod cells;
mod compare;
mod error;
mod head_classes;
mod inner;
mod link;
mod runs;

use std::ops::Range;
use std::sync::Arc;

use crate::layout::CacheLayout;

use cells::MAX_TOKENS;
use inner::Inner;

pub use compare::{Difference, Mismatch, Side};
pub use error::RequestError;
pub use link::{Link, PagedWrite, Selection};

/// Of an instance.
pub const MAX_RANKS: usize = 512;
/// Runs of a layer's cycle on a link.
pub const MAX_RUNS: u64 = 1 << 20;

/// Two instances whose caches fit.
#[derive(Clone, Debug)]
pub struct Pairing {
    inner: Arc<Inner>,
}

impl Pairing {
    /// Pairs the ranks of an instance that prefills with those of one that decodes.
    ///
    /// Page sizes, strides, orders of dimensions and of tensors, buffers and numbers of pages may
    /// differ. If either instance is a stage of a pipeline, the layers that both have are paired,
    /// which may be none; who waits for pages sees to it that other stages have the others.
    ///
    /// # Errors
    /// A layout that isn't consistent, or every field that must agree and doesn't, with both
    /// values.
    pub fn new(source: &[CacheLayout], target: &[CacheLayout]) -> Result<Self, Mismatch> {
        Ok(Self { inner: Arc::new(Inner::new(source, target)?) })
    }

    /// Number of source ranks.
    pub fn source_ranks(&self) -> usize {
        self.inner.sources
    }

    /// Number of target ranks.
    pub fn target_ranks(&self) -> usize {
        self.inner.targets
    }

    /// Number of groups. Without stages they are those of the layouts; else there is one for each
    /// two groups that have layers in common.
    pub fn groups(&self) -> usize {
        self.inner.groups.len()
    }

    /// The numbers of a group in the layouts of the source and of the target, by which requests
    /// have page tables.
    ///
    /// # Errors
    /// There is no such group.
    pub fn tables(&self, group: usize) -> Result<(usize, usize), RequestError> {
        Ok(self.inner.group(group)?.of)
    }

    /// Where a layer of the source is paired: the group, and the layer's number in it. `None` if
    /// the target lacks it.
    ///
    /// # Arguments
    /// The group in the layout of the source, and the layer's number there.
    pub fn of_source(&self, group: usize, layer: usize) -> Option<(usize, usize)> {
        *self.inner.source_layers.get(group)?.get(layer)?
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

    /// The pages that a source rank sends to a target rank in requests with this salt; may be
    /// empty.
    ///
    /// Each head of each tensor reaches a target rank from one source rank. Let `C` be the ranks
    /// that hold the head, ascending, and `j` the place of the target rank among those that need
    /// any head held by exactly `C`, ascending. The rank is `C[(j + h(salt)) mod |C|]`, `h` being
    /// the finaliser of SplitMix64.
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

    /// The cells to send of a request of `tokens.end` tokens, whose decoder has the first
    /// `tokens.start`.
    ///
    /// These are the cells that hold a token of `tokens`, and of a group with a window one of the
    /// prompt's last `window`, or of the block in which the target keeps the first of these. A
    /// window counts the token that looks back: neither the next token nor the prompt's last,
    /// should it be computed again, sees further. Cells are sent whole, the last one too, whose
    /// rest is unused memory of the same pages. A group of states has one cell.
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
        if have != n && !group.target[0].is_whole_pages(have) {
            return Err(RequestError::PartPage { group: group.name.clone(), have, page_tokens });
        }
        let end = group.until(n);
        if have == n {
            return Ok(end..end);
        }
        Ok(group.cells.at(have.max(group.target[0].first_needed(n)))..end)
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

    /// Count of a request at a target rank, from all sources and in all groups (IC-1).
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
