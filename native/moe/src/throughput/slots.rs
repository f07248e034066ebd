//! What a slot of a ring says: its head, the experts of a token, how many rows come.
//!
//! A head is four little-endian words: what it is, the exchange, the token (or the rows that follow a preamble), zero.
//! Whatever a peer wrote there is checked before it is used (MR-3).

use super::spec::Spec;
use crate::routes::NONE;

/// Bytes of a head.
pub const HEAD: u64 = 16;

/// What a slot holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// How many rows a lane has for a node, for each of its ranks, and for each of their experts.
    Preamble = 1,
    Token = 2,
    /// A rank's sum of its experts' answers to a token.
    Answer = 3,
    /// A node's sum of its ranks' answers.
    Sum = 4,
}

pub fn head(kind: Kind, exchange: u32, token: u32) -> [u8; HEAD as usize] {
    let mut bytes = [0; HEAD as usize];
    for (place, word) in bytes.chunks_exact_mut(4).zip([kind as u32, exchange, token, 0]) {
        place.copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

/// The third word of a slot of that kind and exchange.
///
/// # Errors
/// What it says instead.
pub fn read_head(bytes: &[u8], kind: Kind, exchange: u32) -> Result<u32, String> {
    let [k, e, token, zero] = std::array::from_fn(|i| word(bytes, i));
    match (k, e, zero) == (kind as u32, exchange, 0) {
        true => Ok(token),
        false if k == kind as u32 && zero == 0 => Err(format!(
            "it is in its exchange {e}, and this rank in its {exchange}; have every rank call dispatch and combine \
             in the same order"
        )),
        false => Err(format!("it sent a {kind:?} that can't be read: words {k}, {e}, {token}, {zero}")),
    }
}

fn word(bytes: &[u8], i: usize) -> u32 {
    let at = bytes.get(4 * i..4 * i + 4).and_then(|b| <[u8; 4]>::try_from(b).ok());
    at.map_or(0, u32::from_le_bytes)
}

/// What a lane has for the ranks of one node.
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
    pub fn to_bytes(&self, exchange: u32) -> Vec<u8> {
        let mut bytes = head(Kind::Preamble, exchange, self.rows).to_vec();
        let words = self.rows_to.iter().chain(&self.counts);
        bytes.extend(words.flat_map(|w| w.to_le_bytes()));
        bytes
    }

    /// # Errors
    /// What is wrong: another exchange, or rows that no source of this shape has.
    pub fn read(spec: &Spec, exchange: u32, bytes: &[u8]) -> Result<Self, String> {
        let rows = read_head(bytes, Kind::Preamble, exchange)?;
        let (ranks, experts) = (spec.ranks_per_node as usize, spec.node_experts() as usize);
        let first = HEAD as usize / 4;
        let words = |from: usize, n: usize| (from..from + n).map(|i| word(bytes, i)).collect();
        let this =
            Self { rows, rows_to: words(first, ranks), counts: words(first + ranks, experts) };
        let local = spec.shape.local_experts() as usize;
        let pair = spec.shape.pair_rows();
        let fits = this.rows_to.iter().zip(this.counts.chunks(local)).all(|(rows, counts)| {
            let sum: u64 = counts.iter().map(|n| u64::from(*n)).sum();
            let most = counts.iter().copied().max().unwrap_or(0);
            *rows <= this.rows && most <= *rows && u64::from(*rows) <= sum && sum <= pair
        });
        match fits && rows <= spec.shape.max_tokens {
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
