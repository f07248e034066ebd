use std::{hash::Hasher, ops::Range};

use fabric_engine as fe;
use fe::api::{PageIndices, Pages as EnginePages};
use pyo3::prelude::*;
use twox_hash::XxHash3_64;

use super::{
    checked_int,
    class_arg::ClassArg,
    memory::{Pages, Region},
    threads::on_threads,
};
use crate::errors::{raise, OrRaise};

/// Bytes that a thread takes at a time; of GPU memory, bytes that are copied to the host.
const AT_A_TIME: u64 = 8 << 20;
const MAX_THREADS: usize = 8;

struct PageRun {
    region: fe::Region,
    page_len: u64,
    pages: EnginePages,
    /// Address of each page at the receiver. It is part of the digest, so exchanged pages change
    /// it.
    places: EnginePages,
}

fn nth(pages: &EnginePages, list: Option<&[u32]>, i: u32) -> u64 {
    let index = match (&pages.indices, list) {
        (PageIndices::Range { first, .. }, _) => first + i,
        (_, Some(list)) => list[i as usize],
        (_, None) => i,
    };
    pages.offset + u64::from(index) * pages.stride
}

/// A digest of pages that is the same on both sides of a transfer: a sum, over pages, of the xxh3
/// of the page's bytes seeded with its place at the receiver. Order and grouping don't matter.
#[pyclass(module = "fabric_ray._native")]
#[derive(Default)]
pub(crate) struct Digest {
    runs: Vec<PageRun>,
}

#[pymethods]
impl Digest {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// Adds pages of `page_nbytes` bytes of `region`; `places` are the same pages at the receiver.
    fn add(
        &mut self,
        py: Python<'_>,
        #[pyo3(from_py_with = checked_int)] page_nbytes: u64,
        region: ClassArg<'_, Region>,
        pages: ClassArg<'_, Pages>,
        places: ClassArg<'_, Pages>,
    ) -> PyResult<()> {
        self.push(py, page_nbytes, &region.0, pages.0.clone(), places.0.clone())
    }

    /// The digest of the bytes as they are now.
    fn compute(&self, py: Python<'_>) -> PyResult<u64> {
        let groups: Vec<_> = self.runs.iter().flat_map(PageRun::groups).collect();
        let threads = match self.runs.iter().any(PageRun::is_on_gpu) {
            true => 1,
            false => std::thread::available_parallelism().map_or(1, usize::from).min(MAX_THREADS),
        };
        let sums = |groups| on_threads(groups, threads, |(run, group)| PageRun::digest(run, group));
        let sum = |sums: Vec<u64>| sums.into_iter().fold(0, u64::wrapping_add);
        py.detach(|| sums(groups).map(sum)).or_raise(py)
    }

    fn __repr__(&self) -> String {
        format!("Digest({} runs)", self.runs.len())
    }
}

impl Digest {
    pub(super) fn push(
        &mut self,
        py: Python<'_>,
        page_len: u64,
        region: &fe::Region,
        pages: EnginePages,
        places: EnginePages,
    ) -> PyResult<()> {
        if pages.indices.len() != places.indices.len() {
            let text = "a digest needs as many places as pages".to_owned();
            return Err(raise(py, &fe::EngineError::Invalid(text)));
        }
        let end = pages.end(page_len).unwrap_or(u64::MAX);
        region.slice(0, end).or_raise(py)?;
        self.runs.push(PageRun { region: region.clone(), page_len, pages, places });
        Ok(())
    }
}

impl PageRun {
    fn is_on_gpu(&self) -> bool {
        self.region.location().cuda().is_some()
    }

    /// The pages in groups of about [`AT_A_TIME`] bytes.
    fn groups(&self) -> impl Iterator<Item = (&Self, Range<u32>)> {
        // A list of ranges must not be large either.
        let together = (AT_A_TIME / self.page_len.max(1)).clamp(1, 1 << 16) as u32;
        let count = self.pages.indices.len();
        let begins = (0..count).step_by(together as usize);
        begins.map(move |first| (self, first..count.min(first.saturating_add(together))))
    }

    fn digest(&self, group: Range<u32>) -> fe::Result<u64> {
        let (from, to) = (self.pages.list(), self.places.list());
        if self.is_on_gpu() && self.page_len > AT_A_TIME {
            return group.into_iter().try_fold(0u64, |sum, i| {
                let seed = nth(&self.places, to, i);
                Ok(sum.wrapping_add(self.in_parts(nth(&self.pages, from, i), seed)?))
            });
        }
        let (first, mut sum) = (group.start, 0u64);
        let ranges: Vec<(u64, u64)> =
            group.map(|i| (nth(&self.pages, from, i), self.page_len)).collect();
        self.region.with_ranges(&ranges, |i, bytes| {
            let seed = nth(&self.places, to, first + i as u32);
            sum = sum.wrapping_add(XxHash3_64::oneshot_with_seed(seed, bytes));
        })?;
        Ok(sum)
    }

    /// The hash of one large page.
    fn in_parts(&self, at: u64, seed: u64) -> fe::Result<u64> {
        let mut hash = XxHash3_64::with_seed(seed);
        for begin in (0..self.page_len).step_by(AT_A_TIME as usize) {
            let part = (at + begin, AT_A_TIME.min(self.page_len - begin));
            self.region.with_ranges(&[part], |_, bytes| hash.write(bytes))?;
        }
        Ok(hash.finish())
    }
}
