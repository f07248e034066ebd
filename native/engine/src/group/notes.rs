//! What the groups at the two ends of a lost link say to each other about it.
//!
//! Peers are untrusted: a note names links of its sender only, and decoding is bounded.

use serde::{Deserialize, Serialize};

use crate::{
    api::Envelope,
    domain::{LinkName, MAX_NOTE},
    Result,
};

const ENVELOPE: Envelope =
    Envelope { magic: *b"FRgn", what: "a note between groups", limit: MAX_NOTE };

/// Immediates of one question: at most this many, so that question and answer fit.
pub(super) const MAX_IMMS: usize = 128;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Note {
    /// This link is lost to me. End it on your side, so that nothing of mine can land by it any more, and
    /// tell what it has counted for these immediates.
    Lost { name: LinkName, imms: Vec<u32> },
    /// It has ended here too.
    Ended { name: LinkName, imms: Vec<u32>, tally: Tally },
}

/// See [`crate::domain::Receipt`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Tally {
    Unknown,
    InOrder(u64),
    /// For each immediate that was asked for.
    ByImm(Vec<u64>),
}

impl Note {
    pub fn encode(&self) -> Vec<u8> {
        ENVELOPE.encode(self)
    }

    pub fn decode(bytes: &[u8]) -> Result<Self> {
        ENVELOPE.decode(bytes)
    }
}

/// What decodes encodes to something that decodes to the same.
#[cfg(any(test, fuzzing))]
pub(crate) fn fuzz_note(body: &[u8]) {
    let Ok(note) = Note::decode(&crate::fuzzing::sealed(b"FRgn", body)) else { return };
    assert_eq!(Note::decode(&note.encode()), Ok(note));
}

#[cfg(test)]
pub(crate) fn sample_note() -> Vec<u8> {
    Note::Ended { name: 9, imms: vec![1, 1 << 20], tally: Tally::ByImm(vec![3, u64::MAX]) }.encode()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_notes_fit() {
        let lost = Note::Lost { name: u64::MAX, imms: vec![u32::MAX; MAX_IMMS] };
        let tally = Tally::ByImm(vec![u64::MAX; MAX_IMMS]);
        let imms = vec![u32::MAX; MAX_IMMS];
        for note in [lost, Note::Ended { name: u64::MAX, imms, tally }] {
            let bytes = note.encode();
            assert!(bytes.len() <= MAX_NOTE, "{}", bytes.len());
            assert_eq!(Note::decode(&bytes).ok(), Some(note));
        }
    }

    #[test]
    fn nonsense_is_refused() {
        let good = Note::Lost { name: 7, imms: vec![1, 2, 3] }.encode();
        for cut in 0..good.len() {
            assert!(Note::decode(&good[..cut]).is_err());
        }
        assert!(Note::decode(&[0xFF; MAX_NOTE + 1]).is_err());
    }
}
