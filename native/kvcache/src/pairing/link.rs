//! The writes from one source rank to one target rank.

use std::ops::Range;
use std::sync::Arc;

use fabric_engine::api::{PageIndices, Pages};

use crate::layout::CacheTensor;

use super::inner::{Group, Inner};
use super::runs::{GroupRuns, Run};
use super::{RequestError, Side};

/// The way from a source rank to a target rank, for requests of one salt's choice. It may be empty.
///
/// Cheap to get and to clone: what is heavy is shared with the [`Pairing`](super::Pairing).
#[derive(Clone, Debug)]
pub struct Link {
    pub(super) pairing: Arc<Inner>,
    pub(super) source: usize,
    pub(super) target: usize,
    /// By group; `None` where nothing goes this way.
    pub(super) groups: Box<[Option<Arc<GroupRuns>>]>,
}

/// One paged write between buffers of the two ranks. It counts one for each page (IC-1).
#[derive(Clone, Debug)]
pub struct PagedWrite {
    /// Of each page.
    pub nbytes: u64,
    /// Among the source rank's [`buffers`](crate::layout::CacheLayout::buffers).
    pub src_buffer: u32,
    pub src_pages: Pages,
    /// Among the target rank's.
    pub dst_buffer: u32,
    pub dst_pages: Pages,
}

impl PagedWrite {
    /// Count at the target.
    pub fn count(&self) -> u64 {
        self.src_pages.indices.len().into()
    }
}

impl Link {
    pub fn source(&self) -> usize {
        self.source
    }

    pub fn target(&self) -> usize {
        self.target
    }

    /// Whether nothing goes this way.
    pub fn is_empty(&self) -> bool {
        self.groups.iter().all(Option::is_none)
    }

    /// The pages of a range of cells, looked up once for all layers of the group.
    ///
    /// Entry `i` of a table is the page of tokens `i * page_tokens..` of the request. Entries in
    /// whose pages no cell lies are never looked at.
    ///
    /// # Errors
    /// A table that is too short or names pages that its rank hasn't.
    pub fn select(
        &self,
        group: usize,
        cells: Range<u64>,
        src_table: &[u32],
        dst_table: &[u32],
    ) -> Result<Selection, RequestError> {
        let of = self.pairing.group(group)?;
        of.check_cells(&cells)?;
        let mut selection = Selection {
            pairing: self.pairing.clone(),
            group,
            source: self.source,
            target: self.target,
            runs: self.groups[group].clone(),
            phases: Vec::new(),
        };
        if cells.is_empty() || selection.runs.is_none() {
            return Ok(selection);
        }
        let mut source = PageTableView::new(of, Side::Source, self.source, src_table);
        let mut target = PageTableView::new(of, Side::Target, self.target, dst_table);
        let cycle = of.cells.phases() as u64;
        // Where there are fewer cells than a cycle has, most phases are empty.
        let here = (cells.end - cells.start).min(cycle);
        let mut phases: Vec<u64> =
            (cells.start..cells.start + here).map(|cell| cell % cycle).collect();
        phases.sort_unstable();
        for phase in phases {
            let cycles = of.cells.cycles(&cells, phase as usize);
            let token = of.cells.tokens(phase as usize).start;
            let src = source.pick(token / of.cells.source_page(), &cycles)?;
            let dst = target.pick(token / of.cells.target_page(), &cycles)?;
            selection.phases.push(PhasePages { phase: phase as u32, src, dst });
        }
        Ok(selection)
    }

    /// The writes of a layer, by its number in the group. For several layers of the same cells
    /// [`select`](Self::select) once.
    ///
    /// # Errors
    /// As for [`select`](Self::select), and a layer that the group hasn't.
    pub fn writes(
        &self,
        group: usize,
        layer: usize,
        cells: Range<u64>,
        src_table: &[u32],
        dst_table: &[u32],
    ) -> Result<impl Iterator<Item = PagedWrite>, RequestError> {
        let selection = self.select(group, cells, src_table, dst_table)?;
        let writes: Vec<PagedWrite> = selection.writes(layer)?.collect();
        Ok(writes.into_iter())
    }

    /// Count of these cells at the target (IC-1): one for each page of each write, in all layers
    /// of the group. Parts of a range add up to the whole.
    ///
    /// # Errors
    /// A group or cells that don't exist.
    pub fn expected(&self, group: usize, cells: Range<u64>) -> Result<u64, RequestError> {
        self.counted(group, None, cells)
    }

    /// Count of one layer at the target, by the layer's number in the group.
    ///
    /// # Errors
    /// A group, layer or cells that don't exist.
    pub fn expected_of_layer(
        &self,
        group: usize,
        layer: usize,
        cells: Range<u64>,
    ) -> Result<u64, RequestError> {
        self.pairing.group(group)?.check_layer(layer)?;
        self.counted(group, Some(layer), cells)
    }

    fn counted(
        &self,
        group: usize,
        layer: Option<usize>,
        cells: Range<u64>,
    ) -> Result<u64, RequestError> {
        self.pairing.group(group)?.check_cells(&cells)?;
        let writes = self.groups[group].as_ref().map_or(0, |runs| runs.writes(&cells, layer));
        let (start, end) = (cells.start, cells.end);
        u64::try_from(writes).map_err(|_| RequestError::Cells { start, end })
    }
}

/// The pages of some cells of a request on a link, for any of the group's layers.
#[derive(Clone, Debug)]
pub struct Selection {
    pairing: Arc<Inner>,
    group: usize,
    source: usize,
    target: usize,
    runs: Option<Arc<GroupRuns>>,
    phases: Vec<PhasePages>,
}

/// The pages in which the cells of one phase lie, cycle after cycle.
#[derive(Clone, Debug)]
struct PhasePages {
    phase: u32,
    src: PageIndices,
    dst: PageIndices,
}

impl Selection {
    /// The writes of a layer, by its number in the group.
    ///
    /// # Errors
    /// A layer that the group hasn't.
    pub fn writes(
        &self,
        layer: usize,
    ) -> Result<impl Iterator<Item = PagedWrite> + '_, RequestError> {
        let of = self.pairing.group(self.group)?;
        of.check_layer(layer)?;
        let (source, target) = (&of.source[self.source], &of.target[self.target]);
        let runs = self.runs.iter().flat_map(move |runs| {
            let all = move |p| runs_of(runs, layer, p);
            self.phases.iter().flat_map(all)
        });
        Ok(runs.map(move |(pages, run)| {
            let (src, dst) =
                (&source.tensors[run.tensor as usize], &target.tensors[run.tensor as usize]);
            PagedWrite {
                nbytes: run.nbytes,
                src_buffer: src.places[layer].buffer,
                src_pages: placed(&pages.src, src, layer, run.src_offset),
                dst_buffer: dst.places[layer].buffer,
                dst_pages: placed(&pages.dst, dst, layer, run.dst_offset),
            }
        }))
    }

    /// Whether nothing of these cells goes this way.
    pub fn is_empty(&self) -> bool {
        self.phases.is_empty()
    }
}

fn runs_of<'a>(
    runs: &'a GroupRuns,
    layer: usize,
    pages: &'a PhasePages,
) -> impl Iterator<Item = (&'a PhasePages, &'a Run)> {
    runs.of(layer, pages.phase as usize).iter().map(move |run| (pages, run))
}

fn placed(indices: &PageIndices, tensor: &CacheTensor, layer: usize, offset: i64) -> Pages {
    let place = tensor.places[layer].offset;
    let offset = place.checked_add_signed(offset).expect("a run lies in its tensors' buffer");
    Pages::new(indices.clone(), tensor.page_stride, offset)
}

/// A request's page table of one rank, from which lists are picked.
struct PageTableView<'a> {
    group: &'a Group,
    side: Side,
    rank: usize,
    entries: &'a [u32],
    /// Pages of a cycle.
    cycle: u64,
    /// Pages that the rank has.
    pages: u32,
    /// The last selection: all cells of one page have the same list.
    last: Option<(u64, Range<u64>, PageIndices)>,
}

impl<'a> PageTableView<'a> {
    fn new(group: &'a Group, side: Side, rank: usize, entries: &'a [u32]) -> Self {
        let (cycle, pages) = match side {
            Side::Source => (group.cells.source_pages(), group.source[rank].pages),
            Side::Target => (group.cells.target_pages(), group.target[rank].pages),
        };
        Self { group, side, rank, entries, cycle, pages, last: None }
    }

    /// Every cycle's page of that number.
    fn pick(&mut self, page: u64, cycles: &Range<u64>) -> Result<PageIndices, RequestError> {
        if let Some((last, of, indices)) = &self.last {
            if *last == page && of == cycles {
                return Ok(indices.clone());
            }
        }
        let needed = (cycles.end - 1) * self.cycle + page + 1;
        if needed > self.entries.len() as u64 {
            let (side, group) = (self.side, self.group.name.clone());
            let entries = self.entries.len();
            return Err(RequestError::ShortTable { side, group, entries, needed });
        }
        let picked = self.entries[(cycles.start * self.cycle + page) as usize..needed as usize]
            .iter()
            .step_by(self.cycle as usize);
        let list: Vec<u32> = picked.copied().collect();
        if let Some(at) = list.iter().position(|&index| index >= self.pages) {
            return Err(RequestError::NoPage {
                side: self.side,
                group: self.group.name.clone(),
                rank: self.rank,
                entry: (cycles.start + at as u64) * self.cycle + page,
                page: list[at],
                pages: self.pages,
            });
        }
        let indices = indices(list);
        self.last = Some((page, cycles.clone(), indices.clone()));
        Ok(indices)
    }
}

/// A range where the pages follow each other, else a list.
fn indices(list: Vec<u32>) -> PageIndices {
    let count = list.len() as u32;
    if list.windows(2).all(|pair| pair[0].checked_add(1) == Some(pair[1])) {
        return PageIndices::Range { first: list[0], count };
    }
    PageIndices::list(list).expect("a table's length was checked")
}
