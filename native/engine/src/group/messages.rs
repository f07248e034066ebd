//! Messages between groups: about lost links, and about credit.
//!
//! Peers are untrusted: a message names links of its sender only, and decoding is bounded.

use serde::{Deserialize, Serialize};

use crate::{
    api::Envelope,
    domain::{LinkName, MAX_GROUP_FRAME},
    Result,
};

const ENVELOPE: Envelope = Envelope::new(*b"FRgn", "a message between groups", MAX_GROUP_FRAME);

/// Most numbers of one question: the question and its answer fit into one frame.
pub(super) const MAX_NUMBERS: usize = 128;

/// A message to the group of a peer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum GroupMessage {
    /// The sender has lost this link. The receiver ends it on its side, so that nothing can land
    /// over it any more, and answers with `Ended`. `numbers` name the work requests, if they have
    /// numbers.
    Lost { id: u32, name: LinkName, numbers: Vec<u64> },
    /// The link has ended at this end too. `id` is that of `Lost`.
    Ended { id: u32, came: Arrived },
    /// The sender has much to send, or no longer has.
    Want(bool),
    /// Bytes that the receiver of this message may have under way to its sender.
    Credit(u64),
}

/// The counts that arrived over a lost link; see [`crate::domain::Receipt`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Arrived {
    Unknown,
    /// The number of counts that arrived, in the order in which they were posted.
    InOrder(u64),
    /// For each work request of the question, whether it arrived.
    These(Vec<bool>),
}

impl GroupMessage {
    pub fn encode(&self) -> Vec<u8> {
        ENVELOPE.encode(self)
    }

    pub fn decode(bytes: &[u8]) -> Result<Self> {
        ENVELOPE.decode(bytes)
    }
}

/// Checks that a decoded message survives encoding.
#[cfg(any(test, fuzzing))]
pub(crate) fn fuzz_group_message(body: &[u8]) {
    let Ok(message) = GroupMessage::decode(&crate::fuzzing::sealed(b"FRgn", body)) else { return };
    assert_eq!(GroupMessage::decode(&message.encode()), Ok(message));
}

#[cfg(test)]
pub(crate) fn sample_group_message() -> Vec<u8> {
    GroupMessage::Lost { id: 7, name: 9, numbers: vec![1, u64::MAX] }.encode()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_messages_fit() {
        let lost = GroupMessage::Lost {
            id: u32::MAX,
            name: u64::MAX,
            numbers: vec![u64::MAX; MAX_NUMBERS],
        };
        let came = Arrived::These(vec![true; MAX_NUMBERS]);
        for message in [lost, GroupMessage::Ended { id: u32::MAX, came }] {
            let bytes = message.encode();
            assert!(bytes.len() <= MAX_GROUP_FRAME, "{}", bytes.len());
            assert_eq!(GroupMessage::decode(&bytes).ok(), Some(message));
        }
    }

    #[test]
    fn nonsense_is_refused() {
        let good = GroupMessage::Lost { id: 1, name: 7, numbers: vec![1, 2, 3] }.encode();
        for cut in 0..good.len() {
            assert!(GroupMessage::decode(&good[..cut]).is_err());
        }
        assert!(GroupMessage::decode(&[0xFF; MAX_GROUP_FRAME + 1]).is_err());
    }
}
