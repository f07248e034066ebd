use fabric_engine as fe;
use fe::api::{PageIndices, Pages as EnginePages};
use pyo3::prelude::*;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::{
    checked_int,
    class_arg::ClassArg,
    memory::{Pages, Region},
};
use crate::errors::{raise, OrRaise};

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
        py.detach(|| {
            self.runs.iter().try_fold(0u64, |sum, run| Ok(sum.wrapping_add(run.digest()?)))
        })
        .or_raise(py)
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
    fn digest(&self) -> fe::Result<u64> {
        let (from, to) = (self.pages.list(), self.places.list());
        let mut sum = 0u64;
        for i in 0..self.pages.indices.len() {
            let seed = nth(&self.places, to, i);
            let at = nth(&self.pages, from, i);
            let hash = self.region.with_bytes(at, self.page_len, |b| xxh3_64_with_seed(b, seed))?;
            sum = sum.wrapping_add(hash);
        }
        Ok(sum)
    }
}
