//! How large the slices of a request are.
//!
//! TENT §3.3.1: slices have a smallest size (64 KiB), the number of slices of a request is limited,
//! and so slices grow with very large requests. How the limit follows from the rails is ours.

use std::ops::Range;

/// No slice is smaller, unless the whole request is.
pub const SMALLEST: u64 = 64 << 10;
/// Slices begin on multiples of this, counted from the start of the request.
pub const GRAIN: u64 = 4096;
/// Enough that the last slice of a rail is about 3% of what it carried, so that the rails can end
/// nearly together.
pub const PER_RAIL: u64 = 32;
/// The most slices of one request, however many rails there are.
pub const MOST: u64 = 256;

/// A request cut into slices: all but the last of equal size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slicing {
    /// Of every slice but the last, bytes; a multiple of [`GRAIN`].
    pub size: u64,
    /// At least 1, at most `PER_RAIL` for each rail and [`MOST`].
    pub count: u64,
    bytes: u64,
}

/// Cuts a request of so many bytes for so many rails.
pub fn slicing(bytes: u64, rails: usize) -> Slicing {
    let most = (rails.max(1) as u64).saturating_mul(PER_RAIL).min(MOST);
    let size = bytes.div_ceil(most).next_multiple_of(GRAIN).max(SMALLEST);
    // What is left over joins the last slice rather than become one that is too small.
    let whole = bytes / size;
    let rest = bytes % size;
    let count = (whole + u64::from(rest >= SMALLEST)).max(1);
    Slicing { size, count, bytes }
}

impl Slicing {
    /// The bytes of one slice, as offsets into the request; empty beyond the last.
    pub fn slice(&self, index: u64) -> Range<u64> {
        if index >= self.count {
            return self.bytes..self.bytes;
        }
        let start = index * self.size;
        let end = if index + 1 == self.count { self.bytes } else { start + self.size };
        start..end
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn slices_grow_with_the_request() {
        const K: u64 = 1 << 10;
        const M: u64 = 1 << 20;
        #[rustfmt::skip]
        let table = [
            // bytes, rails, size, count
            (0,              4, 64 * K,   1),
            (1,              4, 64 * K,   1),
            (64 * K,         4, 64 * K,   1),
            (128 * K - 1,    4, 64 * K,   1),
            (128 * K,        4, 64 * K,   2),
            (144 * K,        4, 64 * K,   2),
            (4 * M,          4, 64 * K,  64),
            (4 * M,          1, 128 * K, 32),
            (64 * M,         4, 512 * K, 128),
            (1024 * M,       4, 8 * M,   128),
            (1024 * M,       1, 32 * M,  32),
            (1024 * M,     100, 4 * M,  256),
            (1024 * M,       0, 32 * M,  32),
        ];
        for (bytes, rails, size, count) in table {
            let s = slicing(bytes, rails);
            assert_eq!((s.size, s.count), (size, count), "{bytes} bytes over {rails} rails");
        }
    }

    fn any_bytes() -> impl Strategy<Value = u64> {
        // Every magnitude, up to sums that would overflow.
        (any::<u64>(), 0u32..64).prop_map(|(b, shift)| b >> shift)
    }

    proptest! {
        #[test]
        fn slices_cover_the_request_once_within_their_bounds(
            bytes in any_bytes(), rails in 0usize..20,
        ) {
            let s = slicing(bytes, rails);
            prop_assert!(s.size >= SMALLEST && s.size.is_multiple_of(GRAIN));
            prop_assert!(s.count >= 1 && s.count <= MOST.min(PER_RAIL * rails.max(1) as u64));
            let mut at = 0;
            for i in 0..s.count {
                let slice = s.slice(i);
                prop_assert_eq!(slice.start, at);
                prop_assert_eq!(slice.start % GRAIN, 0);
                prop_assert!(slice.end - slice.start >= SMALLEST.min(bytes));
                prop_assert!(slice.end - slice.start < s.size + SMALLEST || s.count == 1);
                at = slice.end;
            }
            prop_assert_eq!(at, bytes);
            prop_assert!(s.slice(s.count).is_empty());
        }

        #[test]
        fn a_larger_request_never_has_smaller_slices(
            a in any_bytes(), b in any_bytes(), rails in 0usize..20,
        ) {
            let (less, more) = (a.min(b), a.max(b));
            prop_assert!(slicing(less, rails).size <= slicing(more, rails).size);
        }
    }
}
