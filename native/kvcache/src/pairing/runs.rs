//! The contiguous runs that a link copies of each cell.

use std::ops::Range;

use rustc_hash::FxHashMap;

use crate::layout::{BufferOffset, CacheGroup, CacheTensor};

use super::cells::{cycle_tokens, phases, Cells};
use super::compare::held_heads;
use super::head_classes::common;
use super::MAX_RUNS;

/// Bytes that lie side by side in a source page and in a target page, once in each cell of one
/// phase.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    /// The tensor from whose place the offsets count and whose page strides hold.
    pub tensor: u32,
    pub nbytes: u64,
    /// May be negative: a run that joins tensors counts from the first by number.
    pub src_offset: i64,
    pub dst_offset: i64,
}

/// Everything that one source rank copies of one group to one target rank.
#[derive(Debug)]
pub(super) struct GroupRuns {
    /// Layers whose tensors lie alike to each other have the same runs.
    layer_runs: Vec<LayerRuns>,
    /// For each layer, the index of its runs.
    form_of: Box<[u32]>,
    /// Writes of a page in all layers, in the phases before each; the last entry is those of a
    /// cycle.
    before: Box<[u64]>,
}

/// The runs of one layer.
#[derive(Debug)]
struct LayerRuns {
    /// By phase.
    runs: Box<[Run]>,
    /// Where those of a phase begin; one more entry than there are phases.
    firsts: Box<[u32]>,
}

impl GroupRuns {
    /// `heads` are ranges of heads that both ranks hold, by tensor and in order.
    pub fn new(
        source: &CacheGroup,
        target: &CacheGroup,
        cells: &Cells,
        heads: &[(usize, Range<u32>)],
    ) -> Self {
        let mut used: Vec<usize> = heads.iter().map(|h| h.0).collect();
        used.dedup();
        let per_layer = run_limit(source, target);
        let (mut arrangements, mut form_of) = arranged(source, target, &used, true);
        if per_layer.saturating_mul(arrangements.len() as u64) > MAX_RUNS {
            (arrangements, form_of) = arranged(source, target, &used, false);
        }
        let layer_runs: Vec<LayerRuns> =
            arrangements.iter().map(|a| LayerRuns::new(source, target, cells, heads, a)).collect();
        let mut layers = vec![0u64; layer_runs.len()];
        form_of.iter().for_each(|&f| layers[f as usize] += 1);
        let mut before = vec![0u64];
        for phase in 0..cells.phases() {
            let runs = |(f, n): (&LayerRuns, &u64)| f.of(phase).len() as u64 * n;
            before.push(before[phase] + layer_runs.iter().zip(&layers).map(runs).sum::<u64>());
        }
        Self { layer_runs, form_of, before: before.into() }
    }

    /// The runs of a layer, in the cells of that phase.
    pub fn of(&self, layer: usize, phase: usize) -> &[Run] {
        self.layer_runs[self.form_of[layer] as usize].of(phase)
    }

    /// Writes of a page in a range of cells, in all layers or in one.
    pub fn writes(&self, cells: &Range<u64>, layer: Option<usize>) -> u128 {
        let before = |phase: usize| match layer {
            None => self.before[phase],
            Some(layer) => self.layer_runs[self.form_of[layer] as usize].firsts[phase].into(),
        };
        let phases = self.before.len() - 1;
        let until = |end: u64| {
            let (cycles, rest) = (end / phases as u64, end % phases as u64);
            u128::from(cycles) * u128::from(before(phases)) + u128::from(before(rest as usize))
        };
        until(cells.end.max(cells.start)) - until(cells.start)
    }

    /// How many runs it remembers.
    pub fn len(&self) -> usize {
        self.layer_runs.iter().map(|f| f.runs.len()).sum()
    }
}

impl LayerRuns {
    fn new(
        source: &CacheGroup,
        target: &CacheGroup,
        cells: &Cells,
        heads: &[(usize, Range<u32>)],
        arrangement: &[JoinOffsets],
    ) -> Self {
        let (mut runs, mut firsts) = (Vec::new(), vec![0]);
        for phase in 0..cells.phases() {
            let mut rows = Vec::new();
            for (tensor, heads) in heads {
                let sides = (&source.tensors[*tensor], &target.tensors[*tensor]);
                add_rows(&mut rows, sides, cells, phase, heads, arrangement[*tensor]);
            }
            merge(rows, &mut runs);
            firsts.push(runs.len() as u32);
        }
        Self { runs: runs.into(), firsts: firsts.into() }
    }

    fn of(&self, phase: usize) -> &[Run] {
        &self.runs[self.firsts[phase] as usize..self.firsts[phase + 1] as usize]
    }
}

/// The runs of a cell of one tensor, as long as that tensor's strides make plain.
fn add_rows(
    rows: &mut Vec<Run>,
    (src, dst): (&CacheTensor, &CacheTensor),
    cells: &Cells,
    phase: usize,
    heads: &Range<u32>,
    joined: JoinOffsets,
) {
    let tokens = cells.tokens(phase);
    let row = row_bytes(src);
    let offset = |t: &CacheTensor, head: u32, token: u64, page: u64| {
        // Checked layouts keep it below 2^46.
        (u64::from(head - t.first_head) * t.head_stride + token % page * t.token_stride) as i64
    };
    let mut add = |head: u32, token: u64, rows_long: u64| {
        rows.push(Run {
            tensor: joined.root,
            nbytes: rows_long * row,
            src_offset: joined.src + offset(src, head, token, cells.source_page()),
            dst_offset: joined.dst + offset(dst, head, token, cells.target_page()),
        });
    };
    if tight(src, dst, |t| t.token_stride) {
        heads.clone().for_each(|head| add(head, tokens.start, tokens.end - tokens.start));
    } else if tight(src, dst, |t| t.head_stride) {
        tokens.for_each(|token| add(heads.start, token, heads.len() as u64));
    } else {
        for token in tokens {
            heads.clone().for_each(|head| add(head, token, 1));
        }
    }
}

/// Joins runs that continue each other on both sides.
///
/// No two runs overlap at the target, so whatever continues a run comes right after it by target
/// offset.
fn merge(mut rows: Vec<Run>, runs: &mut Vec<Run>) {
    rows.sort_unstable_by_key(|r| (r.tensor, r.dst_offset));
    let first = runs.len();
    for row in rows {
        let after = |last: &Run, offset: i64, last_offset: i64| {
            offset.checked_sub(last_offset) == i64::try_from(last.nbytes).ok()
        };
        match runs[first..].last_mut() {
            Some(last)
                if last.tensor == row.tensor
                    && after(last, row.src_offset, last.src_offset)
                    && after(last, row.dst_offset, last.dst_offset) =>
            {
                last.nbytes += row.nbytes;
            }
            _ => runs.push(row),
        }
    }
}

/// From where a tensor's runs count in a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct JoinOffsets {
    root: u32,
    /// From the root's place to the tensor's.
    src: i64,
    dst: i64,
}

/// The different ways in which tensors lie to each other, and which each layer has.
///
/// Tensors whose pages touch or interleave on both sides, page for page, count from one of them, so
/// that their runs can join.
fn arranged(
    source: &CacheGroup,
    target: &CacheGroup,
    used: &[usize],
    join: bool,
) -> (Vec<Vec<JoinOffsets>>, Box<[u32]>) {
    let mut known: FxHashMap<Vec<JoinOffsets>, u32> = FxHashMap::default();
    let mut all = Vec::new();
    let mut form_of = Vec::with_capacity(source.layers.len());
    for layer in 0..source.layers.len() {
        let mut roots: Vec<usize> = (0..source.tensors.len()).collect();
        for (i, &one) in used.iter().enumerate().filter(|_| join) {
            for &other in &used[..i] {
                let touch = |g: &CacheGroup| touching(g, one, other, layer);
                let (a, b) = (roots[one], roots[other]);
                if a != b && touch(source) && touch(target) {
                    roots.iter_mut().filter(|r| **r == a.max(b)).for_each(|r| *r = a.min(b));
                }
            }
        }
        let joined = |(tensor, &root): (usize, &usize)| {
            let apart = |g: &CacheGroup| {
                let place = |t: usize| g.tensors[t].places[layer].offset as i64;
                place(tensor) - place(root)
            };
            JoinOffsets { root: root as u32, src: apart(source), dst: apart(target) }
        };
        let arrangement: Vec<JoinOffsets> = roots.iter().enumerate().map(joined).collect();
        let layer_form = *known.entry(arrangement).or_insert_with_key(|a| {
            all.push(a.clone());
            all.len() as u32 - 1
        });
        form_of.push(layer_form);
    }
    (all, form_of.into())
}

/// Whether two tensors' pages of the same number touch or interleave.
fn touching(group: &CacheGroup, one: usize, other: usize, layer: usize) -> bool {
    let (a, b) = (&group.tensors[one], &group.tensors[other]);
    let (p, q): (BufferOffset, BufferOffset) = (a.places[layer], b.places[layer]);
    let page = |t: &CacheTensor| {
        let step = |count: u32, stride: u64| match count {
            1 => 0,
            n => u64::from(n - 1) * stride,
        };
        step(t.held_heads, t.head_stride) + step(group.page_tokens, t.token_stride) + row_bytes(t)
    };
    p.buffer == q.buffer
        && a.page_stride == b.page_stride
        && p.offset <= q.offset + page(b)
        && q.offset <= p.offset + page(a)
}

/// Most runs of a layer that any link between the two has, before those of different heads or
/// tensors join.
pub(super) fn run_limit(source: &CacheGroup, target: &CacheGroup) -> u64 {
    let (a, b) = (u64::from(source.page_tokens), u64::from(target.page_tokens));
    let of = |(src, dst): (&CacheTensor, &CacheTensor)| {
        let heads = common(&held_heads(src), &held_heads(dst)).len() as u64;
        if tight(src, dst, |t| t.token_stride) {
            heads * phases(a, b)
        } else if tight(src, dst, |t| t.head_stride) {
            cycle_tokens(a, b) * heads.min(1)
        } else {
            cycle_tokens(a, b) * heads
        }
    };
    source.tensors.iter().zip(&target.tensors).map(of).sum()
}

/// Whether the steps of a dimension leave no gap on either side.
fn tight(src: &CacheTensor, dst: &CacheTensor, stride: impl Fn(&CacheTensor) -> u64) -> bool {
    let row = row_bytes(src);
    stride(src) == row && stride(dst) == row
}

fn row_bytes(tensor: &CacheTensor) -> u64 {
    tensor.row_bytes().expect("a checked layout's dtypes are known")
}
