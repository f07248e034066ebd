//! Contents of a ring's slot: its head, the experts of a token, the number of rows.
//!
//! A head is four little-endian words: what it is, the exchange, the token (or the rows that follow
//! a preamble), zero. The number of an exchange begins with its era: the ranks that take part, and
//! in which grid. Everything that a peer wrote there is checked before use (MR-3).

use super::spec::Spec;
use crate::routes::NONE;

/// Bytes of a head.
pub const HEAD: u64 = 16;

/// Content of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Numbers of rows of a lane for a node, for each rank there, and for each expert of these
    /// ranks.
    Preamble = 1,
    Token = 2,
    /// A rank's sum of its experts' answers to a token.
    Answer = 3,
    /// A node's sum of its ranks' answers.
    Sum = 4,
}

/// Bits of an exchange's number within its era.
const COUNT: u32 = 16;

/// The number of the first exchange of an era, of which there are less than 2^15.
pub fn first_exchange(era: u32, is_flat: bool) -> u32 {
    (2 * era + u32::from(is_flat)) << COUNT | 1
}

/// The next number in the same era. It wraps around: a rank that is so far behind is in another
/// era.
pub fn next_exchange(exchange: u32) -> u32 {
    let mask = (1 << COUNT) - 1;
    exchange & !mask | exchange.wrapping_add(1) & mask
}

/// Whether a slot with this head was sent in an earlier era than an exchange's, in its own, or in a
/// later one.
pub fn compare_era(head: &[u8], exchange: u32) -> std::cmp::Ordering {
    (word(head, 1) >> COUNT).cmp(&(exchange >> COUNT))
}

pub fn head(kind: Kind, exchange: u32, token: u32) -> [u8; HEAD as usize] {
    let mut bytes = [0; HEAD as usize];
    for (place, word) in bytes.chunks_exact_mut(4).zip([kind as u32, exchange, token, 0]) {
        place.copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

/// Reads the third word of a slot, if its head has this kind and exchange.
///
/// # Errors
/// The found head, as text.
pub fn read_head(bytes: &[u8], kind: Kind, exchange: u32) -> Result<u32, String> {
    let [k, e, token, zero] = std::array::from_fn(|i| word(bytes, i));
    match (k, e, zero) == (kind as u32, exchange, 0) {
        true => Ok(token),
        false if k == kind as u32 && zero == 0 => {
            let [theirs, ours] = [e, exchange].map(|n| n & ((1 << COUNT) - 1));
            Err(format!(
                "it is in its exchange {theirs}, and this rank in its {ours}; have every rank call dispatch and combine \
                 in the same order"
            ))
        }
        false => {
            Err(format!("it sent a {kind:?} that can't be read: words {k}, {e}, {token}, {zero}"))
        }
    }
}

fn word(bytes: &[u8], i: usize) -> u32 {
    let at = bytes.get(4 * i..4 * i + 4).and_then(|b| <[u8; 4]>::try_from(b).ok());
    at.map_or(0, u32::from_le_bytes)
}

/// Numbers of rows of a lane for the ranks of one node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Preamble {
    /// Tokens for the node.
    pub rows: u32,
    /// Tokens for each of its ranks.
    pub rows_to: Vec<u32>,
    /// Rows for each of the node's experts.
    pub counts: Vec<u32>,
}

impl Preamble {
    /// Whole words of 8 bytes.
    pub fn to_bytes(&self, exchange: u32) -> Vec<u8> {
        let mut bytes = head(Kind::Preamble, exchange, self.rows).to_vec();
        let words = self.rows_to.iter().chain(&self.counts);
        bytes.extend(words.flat_map(|w| w.to_le_bytes()));
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        bytes
    }

    /// # Errors
    /// The head is of another exchange, or the numbers of rows are impossible for this shape.
    pub fn read(spec: &Spec, exchange: u32, bytes: &[u8]) -> Result<Self, String> {
        let rows = read_head(bytes, Kind::Preamble, exchange)?;
        let (ranks, experts) = (spec.ranks_per_node as usize, spec.node_experts() as usize);
        let first = HEAD as usize / 4;
        let words = |from: usize, n: usize| (from..from + n).map(|i| word(bytes, i)).collect();
        let this =
            Self { rows, rows_to: words(first, ranks), counts: words(first + ranks, experts) };
        let local = spec.shape.local_experts() as usize;
        let tokens = spec.channel_tokens();
        let pair = u64::from(tokens) * u64::from(spec.shape.topk.min(spec.shape.local_experts()));
        let fits = this.rows_to.iter().zip(this.counts.chunks(local)).all(|(rows, counts)| {
            let sum: u64 = counts.iter().map(|n| u64::from(*n)).sum();
            let most = counts.iter().copied().max().unwrap_or(0);
            *rows <= this.rows && most <= *rows && u64::from(*rows) <= sum && sum <= pair
        });
        match fits && rows <= tokens {
            true => Ok(this),
            false => Err(format!("its counts can't be: {rows} tokens, {:?}", this.rows_to)),
        }
    }
}

/// The experts and weights behind a token's head.
pub fn put_experts(bytes: &mut Vec<u8>, experts: &[i64], weight: impl Fn(usize) -> f32) {
    for (k, expert) in experts.iter().enumerate() {
        let expert = u32::try_from(*expert).unwrap_or(NONE);
        bytes.extend(expert.to_le_bytes());
        bytes.extend(weight(k).to_le_bytes());
    }
}

/// A token's experts and their weights; those that aren't there are left out.
pub fn experts<'a>(spec: &Spec, bytes: &'a [u8]) -> impl Iterator<Item = (u32, f32)> + use<'a> {
    let first = HEAD as usize / 4;
    let pair = move |k: usize| {
        let at = first + 2 * k;
        (word(bytes, at), f32::from_bits(word(bytes, at + 1)))
    };
    (0..spec.shape.topk as usize).map(pair).filter(|(expert, _)| *expert != NONE)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{kernels::Float, AnswerFormat, Shape};

    fn spec() -> Spec {
        let back = AnswerFormat { elements: 4, float: Float::F32 };
        let shape = Shape {
            ranks: 4,
            experts: 8,
            topk: 3,
            max_tokens: 5,
            row_nbytes: 16,
            back,
            private_rows: 0,
            shared_rows: None,
        };
        Spec { shape, ranks_per_node: 2, channels: 1, chunk: 2, ring_chunks: 2, threads: 1 }
    }

    #[test]
    fn a_preamble_says_what_it_was_made_of() {
        let preamble = Preamble { rows: 4, rows_to: vec![3, 2], counts: vec![3, 1, 0, 2] };
        let bytes = preamble.to_bytes(7);
        assert_eq!(Preamble::read(&spec(), 7, &bytes), Ok(preamble));
        assert!(Preamble::read(&spec(), 8, &bytes).unwrap_err().contains("exchange 7"));
        assert!(read_head(&bytes, Kind::Token, 7).unwrap_err().contains("can't be read"));
    }

    #[test]
    fn an_exchange_says_which_era_it_is_of() {
        use std::cmp::Ordering::{Equal, Greater, Less};
        let old = first_exchange(2, true);
        let new = first_exchange(3, false);
        let of = |exchange| head(Kind::Token, exchange, 0);
        assert_eq!(compare_era(&of(old), new), Less);
        assert_eq!(compare_era(&of(new), old), Greater);
        let mut exchange = old;
        for _ in 0..1 << COUNT {
            exchange = next_exchange(exchange);
            assert_eq!(compare_era(&of(exchange), old), Equal);
        }
        assert_eq!(exchange, old);
    }

    #[test]
    fn a_token_names_its_experts_and_their_weights() {
        let mut bytes = head(Kind::Token, 1, 3).to_vec();
        put_experts(&mut bytes, &[6, -1, 2], |k| k as f32);
        assert_eq!(read_head(&bytes, Kind::Token, 1), Ok(3));
        assert_eq!(experts(&spec(), &bytes).collect::<Vec<_>>(), [(6, 0.0), (2, 2.0)]);
    }

    #[test]
    fn mr_3_counts_that_can_not_be_are_refused() {
        let of = |rows, rows_to: [u32; 2], counts: [u32; 4]| {
            let preamble = Preamble { rows, rows_to: rows_to.into(), counts: counts.into() };
            Preamble::read(&spec(), 1, &preamble.to_bytes(1))
        };
        assert!(of(5, [5, 5], [5, 5, 5, 5]).is_ok());
        for wrong in [
            of(6, [6, 0], [5, 1, 0, 0]),
            of(2, [3, 0], [3, 0, 0, 0]),
            of(2, [1, 0], [2, 0, 0, 0]),
            of(2, [2, 1], [2, 0, 0, 0]),
        ] {
            assert!(wrong.unwrap_err().contains("can't be"));
        }
    }

    #[test]
    fn mr_3_no_channel_brings_more_than_its_part_of_the_tokens() {
        let two = Spec { channels: 2, ..spec() };
        let of = |rows, counts: [u32; 4]| {
            let preamble = Preamble { rows, rows_to: vec![rows, 0], counts: counts.into() };
            Preamble::read(&two, 1, &preamble.to_bytes(1))
        };
        assert!(of(3, [3, 3, 0, 0]).is_ok());
        assert!(of(4, [4, 0, 0, 0]).unwrap_err().contains("can't be"));
    }

    proptest! {
        /// For any input, no more rows get room than a source can have.
        #[test]
        fn mr_3_no_preamble_passes_what_a_source_can_send(
            words in prop::collection::vec(0u32..8, 0..12),
            channels in 1u32..4,
        ) {
            let s = Spec { channels, ..spec() };
            let head = [Kind::Preamble as u32, 1];
            let bytes: Vec<u8> = head.iter().chain(&words).flat_map(|w| w.to_le_bytes()).collect();
            if let Ok(preamble) = Preamble::read(&s, 1, &bytes) {
                prop_assert!(preamble.rows <= s.channel_tokens());
                for counts in preamble.counts.chunks(2) {
                    let sum: u64 = counts.iter().map(|n| u64::from(*n)).sum();
                    prop_assert!(sum <= 2 * u64::from(s.channel_tokens()));
                }
            }
        }
    }
}
