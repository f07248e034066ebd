//! Chooses how bytes are copied: by size, by whether the destination is cached, and by measurement
//! on this machine.

use std::time::Instant;

use super::{
    recent_writes::{cache_window, RecentWrites},
    routine::{cached, cold_candidates, fence, page_candidates, PageRoutine, Routine},
    routine_choice::{RoutineChoice, RoutineUse},
};

/// Shortest copy with a choice, bytes; below, the choice costs more than it saves.
const SMALL: usize = 4096;
/// Pages from here on are copied one by one: what comes before the next is fetched is a small part
/// of one.
const LARGE_PAGE: usize = 256 << 10;
/// Shortest copy with streaming stores, bytes; shorter ones don't fill enough lines.
const TINY_PAGE: usize = 256;
/// Shortest copy that is timed, bytes.
const TIMED: usize = 16 << 10;

/// Copies between mapped memory. Shared by all threads of an engine.
pub struct Copier {
    recent_writes: RecentWrites,
    candidates: &'static [Routine],
    classes: [RoutineChoice; 2],
    page_candidates: &'static [PageRoutine],
    page_classes: [RoutineChoice; 2],
}

impl std::fmt::Debug for Copier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let best: Vec<_> = self.classes.iter().map(RoutineChoice::best).collect();
        write!(f, "Copier({} candidates, best {best:?})", self.candidates.len())
    }
}

impl Default for Copier {
    fn default() -> Self {
        let (candidates, page_candidates) = (cold_candidates(), page_candidates());
        Self {
            recent_writes: RecentWrites::new(cache_window()),
            candidates,
            classes: [0; 2].map(|_| RoutineChoice::new(candidates.len())),
            page_candidates,
            page_classes: [0; 2].map(|_| RoutineChoice::new(page_candidates.len())),
        }
    }
}

impl Copier {
    /// Copies `len` bytes; they are ordered before any later store of this thread (IC-2).
    ///
    /// # Safety
    /// Both ranges must be mapped, and must not overlap. The bytes may be written by others at the
    /// same time: what arrives then is unspecified, as with any one-sided write.
    #[inline]
    pub unsafe fn copy(&self, dst: usize, src: usize, len: usize) {
        let (d, s) = (dst as *mut u8, src as *const u8);
        if len < SMALL {
            // SAFETY: the caller's.
            return unsafe { cached(d, s, len) };
        }
        if self.candidates.len() == 1 || self.recent_writes.record(dst, len) {
            // SAFETY: the caller's.
            return unsafe { cached(d, s, len) };
        }
        let class = &self.classes[usize::from(len >= 256 << 10)];
        if len < TIMED {
            // SAFETY: the caller's.
            return unsafe { self.candidates[class.best()](d, s, len) };
        }
        let used = class.choose();
        let start = used.is_timed().then(Instant::now);
        // SAFETY: the caller's.
        unsafe { self.candidates[used.routine](d, s, len) };
        if let Some(start) = start {
            let picos = start.elapsed().as_nanos() as u64 * 1000;
            class.learn(used, picos / len as u64);
        }
    }

    /// Copies `n` pages of `len` bytes; `at` gives destination and source of each. They are ordered
    /// before any later store of this thread (IC-2).
    ///
    /// # Safety
    /// As [`Self::copy`], for every page.
    pub unsafe fn copy_pages(&self, n: u32, len: usize, at: impl Fn(u32) -> (usize, usize)) {
        let bytes = n as usize * len;
        if n == 1 || len >= LARGE_PAGE {
            for (dst, src) in (0..n).map(at) {
                // SAFETY: the caller's.
                unsafe { self.copy(dst, src, len) };
            }
            return;
        }
        // The first page stands for all: a sender that repeats pages sends them in the same
        // order.
        let cold = len >= TINY_PAGE
            && bytes >= SMALL
            && self.page_candidates.len() > 1
            && !self.recent_writes.record(at(0).0, bytes);
        if !cold {
            for (dst, src) in (0..n).map(at) {
                // SAFETY: the caller's.
                unsafe { cached(dst as *mut u8, src as *const u8, len) };
            }
            return;
        }
        let class = &self.page_classes[usize::from(len >= SMALL)];
        let used = match bytes < TIMED {
            true => RoutineUse::untimed(class.best()),
            false => class.choose(),
        };
        let copy_page = self.page_candidates[used.routine];
        let start = used.is_timed().then(Instant::now);
        let (mut dst, mut src) = at(0);
        for i in 0..n {
            let next = if i + 1 < n { at(i + 1) } else { (dst, src) };
            // SAFETY: the caller's.
            unsafe { copy_page(dst as *mut u8, src as *const u8, len, next.1 as *const u8) };
            (dst, src) = next;
        }
        fence();
        if let Some(start) = start {
            let picos = start.elapsed().as_nanos() as u64 * 1000;
            class.learn(used, picos / bytes as u64);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_pages_arrive() {
        let copier = Copier::default();
        let src: Vec<u8> = (0..400_000usize).map(|i| (i % 251) as u8).collect();
        for round in 0..20u32 {
            for len in [8usize, 300, 1280, 5000] {
                let n = 60;
                let mut dst = vec![0u8; 400_000];
                let (to, from) = (dst.as_mut_ptr() as usize, src.as_ptr() as usize);
                let place = |i: u32| ((i * 37 + round) % n) as usize * (len + 3);
                // SAFETY: 60 pages of at most 5003 bytes lie inside both vectors.
                unsafe { copier.copy_pages(n, len, |i| (to + place(i), from + i as usize * len)) };
                for i in 0..n {
                    let (d, s) = (place(i), i as usize * len);
                    assert_eq!(dst[d..d + len], src[s..s + len]);
                    assert_eq!(dst[d + len..d + len + 3], [0; 3]);
                }
            }
        }
    }

    #[test]
    fn all_sizes_arrive() {
        let copier = Copier::default();
        let src: Vec<u8> = (0..300_000usize).map(|i| (i % 253) as u8).collect();
        for round in 0..40 {
            for len in [1, 4095, 4096, 65_536, 299_999] {
                let mut dst = vec![0u8; 300_000];
                // SAFETY: both vectors are longer than `len`.
                unsafe { copier.copy(dst.as_mut_ptr() as usize, src.as_ptr() as usize, len) };
                assert!(dst[..len] == src[..len] && dst[len..].iter().all(|b| *b == 0), "{round}");
            }
        }
    }
}
