//! What groups say to each other: about links that were lost, and about how much may be under way.
//!
//! Peers are untrusted: a note names links of its sender only, and decoding is bounded.

use serde::{Deserialize, Serialize};

use crate::{
    api::Envelope,
    domain::{LinkName, MAX_NOTE},
    Result,
};

const ENVELOPE: Envelope = Envelope::new(*b"FRgn", "a note between groups", MAX_NOTE);

/// Numbers of one question: at most this many, so that question and answer fit.
pub(super) const MAX_NUMBERS: usize = 128;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Note {
    /// This link is lost to me. End it on your side, so that nothing of mine can land by it any more, and
    /// tell what came of it: of these work requests, where they have numbers. `id` comes back.
    Lost { id: u32, name: LinkName, numbers: Vec<u64> },
    /// It has ended here too.
    Ended { id: u32, came: Arrived },
    /// I send you much, or have done.
    Want(bool),
    /// So many bytes may be on their way from you to me.
    Credit(u64),
}

/// See [`crate::domain::Receipt`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Arrived {
    Unknown,
    /// So many counts, in the order in which they were posted.
    InOrder(u64),
    /// Whether each of those that were asked for.
    These(Vec<bool>),
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
    Note::Lost { id: 7, name: 9, numbers: vec![1, u64::MAX] }.encode()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_notes_fit() {
        let lost =
            Note::Lost { id: u32::MAX, name: u64::MAX, numbers: vec![u64::MAX; MAX_NUMBERS] };
        let came = Arrived::These(vec![true; MAX_NUMBERS]);
        for note in [lost, Note::Ended { id: u32::MAX, came }] {
            let bytes = note.encode();
            assert!(bytes.len() <= MAX_NOTE, "{}", bytes.len());
            assert_eq!(Note::decode(&bytes).ok(), Some(note));
        }
    }

    #[test]
    fn nonsense_is_refused() {
        let good = Note::Lost { id: 1, name: 7, numbers: vec![1, 2, 3] }.encode();
        for cut in 0..good.len() {
            assert!(Note::decode(&good[..cut]).is_err());
        }
        assert!(Note::decode(&[0xFF; MAX_NOTE + 1]).is_err());
    }
}
