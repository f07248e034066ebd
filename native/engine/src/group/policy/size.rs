//! Chooses the slice size of a request.
//!
//! TENT §3.3.1: slices have a smallest size (64 KiB), the number of slices of a request is limited,
//! and so slices grow with very large requests. Here the limit follows from the number of rails.

/// Smallest slice, bytes, unless the whole request is smaller.
pub const SMALLEST: u64 = 64 << 10;
/// Slices begin on multiples of this, counted from the start of the request.
pub const GRAIN: u64 = 4096;
/// Most slices of a request per rail. The last slice of a rail is then about 3% of its bytes, so
/// that rails end nearly together.
pub const PER_RAIL: u64 = 32;
/// Most slices of a request, for any number of rails.
pub const MAX_SLICES_PER_REQUEST: u64 = 256;

/// The slice size, bytes, of a request of `bytes` over `rails`; the last slice may be smaller. A
/// multiple of [`GRAIN`].
pub fn slice_size(bytes: u64, rails: usize) -> u64 {
    let most = (rails.max(1) as u64).saturating_mul(PER_RAIL).min(MAX_SLICES_PER_REQUEST);
    bytes.div_ceil(most).next_multiple_of(GRAIN).max(SMALLEST)
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
            // bytes, rails, size
            (0,              4, 64 * K),
            (1,              4, 64 * K),
            (144 * K,        4, 64 * K),
            (4 * M,          4, 64 * K),
            (4 * M,          1, 128 * K),
            (64 * M,         4, 512 * K),
            (1024 * M,       4, 8 * M),
            (1024 * M,       1, 32 * M),
            (1024 * M,     100, 4 * M),
            (1024 * M,       0, 32 * M),
        ];
        for (bytes, rails, size) in table {
            assert_eq!(slice_size(bytes, rails), size, "{bytes} bytes over {rails} rails");
        }
    }

    fn any_bytes() -> impl Strategy<Value = u64> {
        // Every magnitude, up to sums that would overflow.
        (any::<u64>(), 0u32..64).prop_map(|(b, shift)| b >> shift)
    }

    proptest! {
        #[test]
        fn slices_are_few_and_not_small(bytes in any_bytes(), rails in 0usize..20) {
            let size = slice_size(bytes, rails);
            prop_assert!(size >= SMALLEST && size.is_multiple_of(GRAIN));
            prop_assert!(bytes.div_ceil(size) <= MAX_SLICES_PER_REQUEST.min(PER_RAIL * rails.max(1) as u64));
        }

        #[test]
        fn a_larger_request_never_has_smaller_slices(
            a in any_bytes(), b in any_bytes(), rails in 0usize..20,
        ) {
            let (less, more) = (a.min(b), a.max(b));
            prop_assert!(slice_size(less, rails) <= slice_size(more, rails));
        }
    }
}
