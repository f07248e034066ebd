//! What changed of a block, encoded and applied.

use fabric_plan::delta::{changes, decode, encode, BLOCK};
use proptest::prelude::*;

const SIZES: [usize; 4] = [1, 2, 4, 8];

/// A block's old and new bytes, and the size of its elements.
fn versions() -> impl Strategy<Value = (Vec<u8>, Vec<u8>, usize)> {
    let share = prop_oneof![Just(0.0), Just(0.001), Just(0.03), Just(0.3), Just(1.0)];
    (prop::sample::select(&SIZES[..]), 0..=BLOCK, share, any::<u64>()).prop_map(
        |(size, elements, share, seed)| {
            let mut random = seed | 1;
            let mut next = move || {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (random >> 33) as u32
            };
            let old: Vec<u8> = (0..elements * size).map(|_| next() as u8).collect();
            let mut new = old.clone();
            for element in new.chunks_exact_mut(size) {
                if f64::from(next()) < share * f64::from(1u32 << 31) {
                    element[0] ^= 1 + next() as u8 % 255;
                }
            }
            (old, new, size)
        },
    )
}

proptest! {
    #[test]
    fn the_new_block_comes_back((old, new, size) in versions(), after in any::<Vec<u8>>()) {
        let mut encoded = Vec::new();
        prop_assert_eq!(encode(&new, &old, size, &mut encoded), new != old);
        prop_assert!(encoded.len() <= new.len() + 2);
        let count = changes(&new, &old, size);
        let bitmap = 2 + count * size + (new.len() / size).div_ceil(8);
        prop_assert!(encoded.len() <= bitmap.min(new.len() + 2));
        encoded.extend(&after);
        let mut block = old;
        prop_assert_eq!(decode(&mut block, size, &encoded), Some(&after[..]));
        prop_assert_eq!(block, new);
    }

    #[test]
    fn other_bytes_do_no_harm((mut block, _, size) in versions(), bytes in any::<Vec<u8>>()) {
        if let Some(rest) = decode(&mut block, size, &bytes) {
            prop_assert!(bytes.ends_with(rest));
        }
    }

    #[test]
    fn a_cut_encoding_is_refused((old, new, size) in versions(), cut in 1usize..100) {
        let mut encoded = Vec::new();
        encode(&new, &old, size, &mut encoded);
        let kept = encoded.len().saturating_sub(cut);
        let mut block = old;
        prop_assert_eq!(decode(&mut block, size, &encoded[..kept]), None);
    }
}

#[test]
fn three_changed_elements_of_a_hundred_take_a_twentieth() {
    let old = vec![0u8; 2 * BLOCK];
    let mut new = old.clone();
    for at in (0..BLOCK).step_by(33) {
        new[2 * at] = 1;
    }
    let mut encoded = Vec::new();
    encode(&new, &old, 2, &mut encoded);
    assert!(encoded.len() * 20 < new.len(), "{} of {} bytes", encoded.len(), new.len());
}
