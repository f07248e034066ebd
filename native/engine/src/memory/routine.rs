//! Copy routines. Which one is fastest differs between machines, by a factor of up to two.
//! `copy.rs` chooses by measurement.

/// A routine copies `len` bytes from `src` to `dst`, which don't overlap; when it returns, the
/// bytes are ordered before any later store of this thread.
pub(super) type Routine = unsafe fn(dst: *mut u8, src: *const u8, len: usize);

/// A routine that copies one page of several. `next` is the source of the following page. The
/// caller fences after the last page.
pub(super) type PageRoutine = unsafe fn(dst: *mut u8, src: *const u8, len: usize, next: *const u8);

/// The platform's memcpy: keeps the destination in the cache.
///
/// # Safety
/// `src` is readable and `dst` writable for `len` bytes, and the two don't overlap.
pub(super) unsafe fn cached(dst: *mut u8, src: *const u8, len: usize) {
    // SAFETY: the caller vouches for both ranges.
    unsafe { std::ptr::copy_nonoverlapping(src, dst, len) }
}

/// The routines for destinations that are not in the cache, best guess first.
pub(super) fn cold_candidates() -> &'static [Routine] {
    #[cfg(target_arch = "x86_64")]
    {
        if std::is_x86_feature_detected!("avx512f") {
            return &[x86::stream_512, x86::stream_512_pages, cached];
        }
        if std::is_x86_feature_detected!("avx2") {
            return &[x86::stream_256, cached];
        }
    }
    &[cached]
}

/// [`cached`] for one page of several.
///
/// # Safety
/// As for [`cached`].
unsafe fn cached_page(dst: *mut u8, src: *const u8, len: usize, _: *const u8) {
    // SAFETY: the caller vouches for both ranges.
    unsafe { cached(dst, src, len) }
}

/// The routines for pages that are too small to be copied one by one, best guess first.
pub(super) fn page_candidates() -> &'static [PageRoutine] {
    #[cfg(target_arch = "x86_64")]
    {
        if std::is_x86_feature_detected!("avx512f") {
            return &[
                x86::page_512::<true>,
                x86::page_512::<false>,
                x86::page_512_quads,
                cached_page,
            ];
        }
        if std::is_x86_feature_detected!("avx2") {
            return &[x86::page_256::<true>, x86::page_256::<false>, cached_page];
        }
    }
    &[cached_page]
}

/// Orders streaming stores before any later store of this thread.
#[inline]
pub(super) fn fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 has it.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// Contract of all: that of [`cached`], on a CPU with the instructions of its name.
#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    const PAGE: usize = 4096;

    /// Copies up to the first boundary of `align` bytes of `dst`; returns how many bytes that were.
    unsafe fn head(dst: *mut u8, src: *const u8, len: usize, align: usize) -> usize {
        let n = dst.align_offset(align).min(len);
        // SAFETY: `n` is at most `len`.
        unsafe { std::ptr::copy_nonoverlapping(src, dst, n) };
        n
    }

    #[target_feature(enable = "avx512f")]
    unsafe fn stream_512_inner(dst: *mut u8, src: *const u8, len: usize) {
        // SAFETY: all offsets stay below `len`, and streaming stores go to 64-byte boundaries.
        unsafe {
            let mut i = head(dst, src, len, 64);
            while i + 256 <= len {
                let (s, d) = (src.add(i), dst.add(i));
                let a = _mm512_loadu_si512(s.cast());
                let b = _mm512_loadu_si512(s.add(64).cast());
                let c = _mm512_loadu_si512(s.add(128).cast());
                let e = _mm512_loadu_si512(s.add(192).cast());
                _mm512_stream_si512(d.cast(), a);
                _mm512_stream_si512(d.add(64).cast(), b);
                _mm512_stream_si512(d.add(128).cast(), c);
                _mm512_stream_si512(d.add(192).cast(), e);
                i += 256;
            }
            std::ptr::copy_nonoverlapping(src.add(i), dst.add(i), len - i);
        }
    }

    pub(in crate::memory) unsafe fn stream_512(dst: *mut u8, src: *const u8, len: usize) {
        // SAFETY: only offered where the feature was detected; streaming stores are weakly ordered,
        // hence the fence.
        unsafe {
            stream_512_inner(dst, src, len);
            _mm_sfence();
        }
    }

    #[target_feature(enable = "avx512f")]
    unsafe fn stream_512_pages_inner(dst: *mut u8, src: *const u8, len: usize) {
        // SAFETY: as in `stream_512_inner`.
        unsafe {
            let mut i = head(dst, src, len, 64);
            // Four pages at a time, a line of each in turn: more DRAM banks stay busy.
            while i + 4 * PAGE <= len {
                for line in (0..PAGE).step_by(64) {
                    for page in 0..4 {
                        let o = i + page * PAGE + line;
                        let v = _mm512_loadu_si512(src.add(o).cast());
                        _mm512_stream_si512(dst.add(o).cast(), v);
                    }
                }
                i += 4 * PAGE;
            }
            stream_512_inner(dst.add(i), src.add(i), len - i);
        }
    }

    pub(in crate::memory) unsafe fn stream_512_pages(dst: *mut u8, src: *const u8, len: usize) {
        // SAFETY: as in `stream_512`.
        unsafe {
            stream_512_pages_inner(dst, src, len);
            _mm_sfence();
        }
    }

    #[target_feature(enable = "avx512f")]
    unsafe fn page_512_inner<const AHEAD: bool>(
        dst: *mut u8,
        src: *const u8,
        len: usize,
        next: *const u8,
    ) {
        // SAFETY: as in `stream_512_inner`; a prefetch may name any address.
        unsafe {
            let mut i = head(dst, src, len, 64);
            while i + 64 <= len {
                if AHEAD {
                    _mm_prefetch::<_MM_HINT_T0>(next.wrapping_add(i).cast());
                }
                let v = _mm512_loadu_si512(src.add(i).cast());
                _mm512_stream_si512(dst.add(i).cast(), v);
                i += 64;
            }
            std::ptr::copy_nonoverlapping(src.add(i), dst.add(i), len - i);
        }
    }

    pub(in crate::memory) unsafe fn page_512<const AHEAD: bool>(
        dst: *mut u8,
        src: *const u8,
        len: usize,
        next: *const u8,
    ) {
        // SAFETY: only offered where the feature was detected.
        unsafe { page_512_inner::<AHEAD>(dst, src, len, next) }
    }

    pub(in crate::memory) unsafe fn page_512_quads(
        dst: *mut u8,
        src: *const u8,
        len: usize,
        _: *const u8,
    ) {
        // SAFETY: only offered where the feature was detected.
        unsafe { stream_512_pages_inner(dst, src, len) }
    }

    #[target_feature(enable = "avx2")]
    unsafe fn page_256_inner<const AHEAD: bool>(
        dst: *mut u8,
        src: *const u8,
        len: usize,
        next: *const u8,
    ) {
        // SAFETY: as in `page_512_inner`.
        unsafe {
            let mut i = head(dst, src, len, 32);
            while i + 64 <= len {
                if AHEAD {
                    _mm_prefetch::<_MM_HINT_T0>(next.wrapping_add(i).cast());
                }
                let a = _mm256_loadu_si256(src.add(i).cast());
                let b = _mm256_loadu_si256(src.add(i + 32).cast());
                _mm256_stream_si256(dst.add(i).cast(), a);
                _mm256_stream_si256(dst.add(i + 32).cast(), b);
                i += 64;
            }
            std::ptr::copy_nonoverlapping(src.add(i), dst.add(i), len - i);
        }
    }

    pub(in crate::memory) unsafe fn page_256<const AHEAD: bool>(
        dst: *mut u8,
        src: *const u8,
        len: usize,
        next: *const u8,
    ) {
        // SAFETY: only offered where the feature was detected.
        unsafe { page_256_inner::<AHEAD>(dst, src, len, next) }
    }

    #[target_feature(enable = "avx2")]
    unsafe fn stream_256_inner(dst: *mut u8, src: *const u8, len: usize) {
        // SAFETY: all offsets stay below `len`, and streaming stores go to 32-byte boundaries.
        unsafe {
            let mut i = head(dst, src, len, 32);
            while i + 128 <= len {
                let (s, d) = (src.add(i), dst.add(i));
                let a = _mm256_loadu_si256(s.cast());
                let b = _mm256_loadu_si256(s.add(32).cast());
                let c = _mm256_loadu_si256(s.add(64).cast());
                let e = _mm256_loadu_si256(s.add(96).cast());
                _mm256_stream_si256(d.cast(), a);
                _mm256_stream_si256(d.add(32).cast(), b);
                _mm256_stream_si256(d.add(64).cast(), c);
                _mm256_stream_si256(d.add(96).cast(), e);
                i += 128;
            }
            std::ptr::copy_nonoverlapping(src.add(i), dst.add(i), len - i);
        }
    }

    pub(in crate::memory) unsafe fn stream_256(dst: *mut u8, src: *const u8, len: usize) {
        // SAFETY: as in `stream_512`.
        unsafe {
            stream_256_inner(dst, src, len);
            _mm_sfence();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_routine_copies_every_byte_at_any_alignment() {
        let src: Vec<u8> = (0..70_000u32).map(|i| (i * 7 + i / 251) as u8).collect();
        for routine in cold_candidates() {
            for (so, d_o, len) in [
                (0, 0, 65536),
                (1, 3, 65536),
                (7, 64, 16384),
                (5, 1, 255),
                (0, 9, 0),
                (3, 2, 40_001),
            ] {
                let mut dst = vec![0xEE; 70_000];
                // SAFETY: both ranges lie inside their vectors.
                unsafe { routine(dst.as_mut_ptr().add(d_o), src.as_ptr().add(so), len) };
                assert_eq!(dst[d_o..d_o + len], src[so..so + len]);
                assert!(dst[..d_o].iter().chain(&dst[d_o + len..]).all(|b| *b == 0xEE));
            }
        }
    }

    #[test]
    fn every_page_routine_copies_every_byte_at_any_alignment() {
        let src: Vec<u8> = (0..50_000u32).map(|i| (i * 11 + i / 241) as u8).collect();
        for routine in page_candidates() {
            for (so, d_o, len) in
                [(0, 0, 4096), (1, 3, 4095), (9, 64, 257), (5, 1, 63), (0, 9, 0), (2, 1, 40_000)]
            {
                let mut dst = vec![0xEE; 50_000];
                let next = src.as_ptr().wrapping_add(100_000);
                // SAFETY: both ranges lie inside their vectors.
                unsafe { routine(dst.as_mut_ptr().add(d_o), src.as_ptr().add(so), len, next) };
                fence();
                assert_eq!(dst[d_o..d_o + len], src[so..so + len]);
                assert!(dst[..d_o].iter().chain(&dst[d_o + len..]).all(|b| *b == 0xEE));
            }
        }
    }
}
