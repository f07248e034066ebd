//! The weighted sum of the answers to each token.
//!
//! In 32-bit floats and in the order of a token's experts, whichever ranks they are on: the sum is
//! the same, bit by bit, for any number of ranks (fabric-lib §7.4.3 has what other orders cost).

use half::{bf16, f16};

use super::{Float, Part, PartMut};
use crate::routes::NONE;

/// The answers to the rows of one rank.
pub trait Answers {
    /// The answer to a row, if there is one.
    fn row(&self, row: u32) -> Option<&[u8]>;
}

/// For each token the sum of the answers to its rows, each times its weight, or times one without
/// weights.
///
/// `row_of` has the row of each (token, k). A token without any answer gets zeros.
pub fn weighted_sum(
    answers: &impl Answers,
    (float, elements): (Float, usize),
    (row_of, topk): (&[u32], usize),
    weights: Option<Part<'_>>,
    out: &mut PartMut<'_>,
    out_float: Float,
) {
    let mut sum = vec![0f32; elements];
    for (token, rows) in row_of.chunks_exact(topk).enumerate() {
        sum.fill(0.0);
        for (k, row) in rows.iter().enumerate().filter(|(_, row)| **row != NONE) {
            let Some(answer) = answers.row(*row) else { continue };
            let weight = weights.map_or(1.0, |w| weight_of(&w, token, k));
            add(&mut sum, answer, float, weight, weights.is_some());
        }
        store(&sum, out.row(token), out_float);
    }
}

fn weight_of(weights: &Part<'_>, token: usize, k: usize) -> f32 {
    let row = weights.row(token);
    let bytes = row.get(4 * k..4 * k + 4).and_then(|b| <[u8; 4]>::try_from(b).ok());
    bytes.map_or(0.0, f32::from_ne_bytes)
}

/// Adds an answer, times its weight if it is weighted.
pub(crate) fn add(sum: &mut [f32], answer: &[u8], float: Float, weight: f32, weighted: bool) {
    // One loop for each format, so that each is a row of vector instructions.
    macro_rules! over {
        ($nbytes:literal, $read:expr) => {{
            let (values, _) = answer.as_chunks::<$nbytes>();
            match weighted {
                true => sum.iter_mut().zip(values).for_each(|(s, v)| *s += weight * $read(*v)),
                false => sum.iter_mut().zip(values).for_each(|(s, v)| *s += $read(*v)),
            }
        }};
    }
    match float {
        Float::F32 => over!(4, f32::from_ne_bytes),
        Float::Bf16 => over!(2, |b| f32::from_bits(u32::from(u16::from_ne_bytes(b)) << 16)),
        Float::F16 => over!(2, |b| f16::from_ne_bytes(b).to_f32()),
    }
}

/// Rounds a sum to a format.
pub(crate) fn store(sum: &[f32], out: &mut [u8], float: Float) {
    macro_rules! over {
        ($nbytes:literal, $write:expr) => {{
            let (places, _) = out.as_chunks_mut::<$nbytes>();
            places.iter_mut().zip(sum).for_each(|(place, s)| *place = $write(*s));
        }};
    }
    match float {
        Float::F32 => over!(4, f32::to_ne_bytes),
        Float::Bf16 => over!(2, |s| bf16::from_f32(s).to_ne_bytes()),
        Float::F16 => over!(2, |s| f16::from_f32(s).to_ne_bytes()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Rows(Vec<Vec<u8>>);

    impl Answers for Rows {
        fn row(&self, row: u32) -> Option<&[u8]> {
            self.0.get(row as usize).map(Vec::as_slice)
        }
    }

    fn bytes(values: &[f32], float: Float) -> Vec<u8> {
        let mut out = vec![0; values.len() * float.nbytes() as usize];
        store(values, &mut out, float);
        out
    }

    fn sum(float: Float, weights: Option<&[f32]>, row_of: &[u32]) -> Vec<f32> {
        let rows = [[1.0, -2.0, 0.5], [4.0, 8.0, 16.0]];
        let answers = Rows(rows.iter().map(|r| bytes(r, float)).collect());
        let raw: Vec<u8> = weights.unwrap_or(&[]).iter().flat_map(|w| w.to_ne_bytes()).collect();
        let weights = weights.map(|_| Part { bytes: &raw, stride: 8, width: 8 });
        let mut out = vec![0u8; row_of.len() / 2 * 12];
        let mut part = PartMut { bytes: &mut out, stride: 12, width: 12 };
        weighted_sum(&answers, (float, 3), (row_of, 2), weights, &mut part, Float::F32);
        let (values, _) = out.as_chunks::<4>();
        values.iter().map(|b| f32::from_ne_bytes(*b)).collect()
    }

    #[test]
    fn answers_are_weighted_and_summed_in_every_format() {
        for float in [Float::F32, Float::Bf16, Float::F16] {
            let sums = sum(float, Some(&[0.5, 2.0, 1.0, 1.0]), &[0, 1, NONE, NONE]);
            assert_eq!(sums, [8.5, 15.0, 32.25, 0.0, 0.0, 0.0]);
            assert_eq!(sum(float, None, &[1, 0]), [5.0, 6.0, 16.5]);
        }
    }

    #[test]
    fn an_answer_that_is_not_there_adds_nothing() {
        assert_eq!(sum(Float::F32, None, &[1, 9]), [4.0, 8.0, 16.0]);
    }
}
