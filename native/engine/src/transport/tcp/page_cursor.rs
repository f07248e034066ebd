//! The pages of a frame in this process's memory, range by range.

use std::sync::Arc;

use crate::{
    domain::{Data, DomainError},
    memory::RegionMemory,
};

use super::frame::Header;

/// Start of each page, relative to a base address.
#[derive(Clone, Debug)]
pub(super) enum PageIndex {
    Strided,
    Listed(Arc<[u32]>),
}

/// A cursor over pages in memory.
#[derive(Clone, Debug)]
pub(super) struct PageCursor {
    base: usize,
    stride: u64,
    page_len: u64,
    pages: u32,
    index: PageIndex,
    page: u32,
    byte: u64,
    /// The region of a remote request, kept while the cursor exists.
    pub region: Option<Arc<RegionMemory>>,
}

impl PageCursor {
    /// The pages that a peer names, if they lie inside the region (MR-3).
    pub fn in_region(
        region: &Arc<RegionMemory>,
        h: &Header,
        index: PageIndex,
    ) -> Result<Self, DomainError> {
        let last = match &index {
            PageIndex::Strided => u64::from(h.pages - 1),
            PageIndex::Listed(list) => u64::from(list.iter().copied().max().unwrap_or(0)),
        };
        let end = last
            .checked_mul(h.stride)
            .and_then(|n| n.checked_add(h.offset))
            .and_then(|n| n.checked_add(h.len));
        if end.is_none_or(|end| end > region.len) {
            return Err(DomainError::Refused(format!(
                "bytes outside region {} of {} bytes",
                region.key.index, region.len
            )));
        }
        Ok(Self {
            base: region.base + h.offset as usize,
            stride: h.stride,
            page_len: h.len,
            pages: h.pages,
            index,
            page: 0,
            byte: 0,
            region: Some(Arc::clone(region)),
        })
    }

    /// The local side of a request.
    pub fn local(data: &Data) -> Self {
        let (base, stride, index) = match &data.local_seq {
            crate::domain::Seq::Strided { offset, stride } => {
                (data.local.0 + *offset as usize, *stride, PageIndex::Strided)
            }
            crate::domain::Seq::Indexed { list, from, offset, stride } => {
                let from = *from as usize;
                let part = &list.indices[from..from + data.pages as usize];
                (data.local.0 + *offset as usize, *stride, PageIndex::Listed(part.into()))
            }
        };
        Self {
            base,
            stride,
            page_len: data.page_len,
            pages: data.pages,
            index,
            page: 0,
            byte: 0,
            region: None,
        }
    }

    /// One contiguous range.
    pub fn contiguous(addr: usize, len: u64) -> Self {
        Self {
            base: addr,
            stride: 0,
            page_len: len,
            pages: 1,
            index: PageIndex::Strided,
            page: 0,
            byte: 0,
            region: None,
        }
    }

    /// Whether its pages are of this region.
    pub fn is_in(&self, index: u32) -> bool {
        self.region.as_ref().is_some_and(|region| region.key.index == index)
    }

    pub fn left(&self) -> u64 {
        u64::from(self.pages - self.page) * self.page_len - self.byte
    }

    fn addr(&self, page: u32) -> usize {
        let i = match &self.index {
            PageIndex::Strided => page,
            PageIndex::Listed(list) => list[page as usize],
        };
        self.base + (u64::from(i) * self.stride) as usize
    }

    /// Calls `f` for the next ranges, at most `most` of them and `bytes` bytes; does not move the
    /// cursor.
    pub fn peek(&self, most: usize, bytes: u64, mut f: impl FnMut(usize, usize)) {
        let (mut page, mut byte, mut bytes) = (self.page, self.byte, bytes);
        for _ in 0..most {
            if page == self.pages || bytes == 0 {
                return;
            }
            let n = (self.page_len - byte).min(bytes);
            if n > 0 {
                f(self.addr(page) + byte as usize, n as usize);
            }
            bytes -= n;
            byte += n;
            if byte == self.page_len {
                byte = 0;
                page += 1;
            }
        }
    }

    /// Advances by `n` bytes.
    pub fn advance(&mut self, mut n: u64) {
        if self.page_len == 0 {
            self.page = self.pages;
            return;
        }
        n += self.byte;
        self.page += (n / self.page_len) as u32;
        self.byte = n % self.page_len;
    }

    pub fn is_done(&self) -> bool {
        self.left() == 0
    }

    /// `len` bytes from `from` of a cursor over a single page.
    pub fn part(&self, from: u64, len: u64) -> Self {
        debug_assert!(self.pages == 1 && from + len <= self.page_len);
        Self { region: self.region.clone(), ..Self::contiguous(self.addr(0) + from as usize, len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_covers_its_pages_in_any_steps() {
        let cursor = PageCursor {
            stride: 100,
            page_len: 30,
            pages: 4,
            index: PageIndex::Listed([3, 0, 2, 9].into()),
            ..PageCursor::contiguous(1000, 0)
        };
        let whole: Vec<usize> = [1300, 1000, 1200, 1900].iter().flat_map(|a| *a..*a + 30).collect();
        for step in [1, 7, 30, 31, 119, 120, 500] {
            let (mut w, mut seen) = (cursor.clone(), Vec::new());
            while !w.is_done() {
                let mut n = 0;
                w.peek(3, step, |addr, len| {
                    seen.extend(addr..addr + len);
                    n += len as u64;
                });
                assert!(n > 0 && n <= step);
                w.advance(n);
            }
            assert_eq!(seen, whole, "step {step}");
        }
    }
}
