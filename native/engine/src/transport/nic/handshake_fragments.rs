//! Handshake messages that are longer than a datagram: fragmentation and reassembly.

use super::frame::{self, Body, Exchange, HandshakeFragment, Header, HANDSHAKE_FRAGMENT_HEADER};
use crate::{domain::DomainError, transport::handshake::MAX_MESSAGE};

/// Longest message of an exchange, bytes: a handshake message and its extra data.
pub(crate) const MAX_EXCHANGE_MESSAGE: usize = MAX_MESSAGE + 1024;

/// One message of an exchange, whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HandshakeMessage {
    pub exchange: Exchange,
    pub to_initiator: bool,
    pub step: u8,
    pub bytes: Vec<u8>,
}

impl HandshakeMessage {
    /// The frames that carry the message, each at most `mtu` bytes.
    pub fn frames(&self, mtu: usize) -> impl Iterator<Item = Vec<u8>> + '_ {
        let room = mtu.saturating_sub(HANDSHAKE_FRAGMENT_HEADER).max(1);
        let n = self.bytes.len().div_ceil(room).max(1);
        (0..n).map(move |i| {
            let from = i * room;
            let fragment = HandshakeFragment {
                exchange: self.exchange,
                to_initiator: self.to_initiator,
                step: self.step,
                total: self.bytes.len() as u32,
                offset: from as u32,
                bytes: &self.bytes[from..self.bytes.len().min(from + room)],
            };
            let mut out = vec![0; HANDSHAKE_FRAGMENT_HEADER + fragment.bytes.len()];
            let n = frame::encode(&Header::default(), &Body::HandshakeFragment(fragment), &mut out);
            out.truncate(n);
            out
        })
    }
}

/// The fragments of one side's current message. They may arrive in any order and repeatedly.
#[derive(Debug, Default)]
pub(crate) struct Reassembly {
    step: u8,
    bytes: Vec<u8>,
    /// Per byte, whether it has arrived: the sender's MTU determines the fragments' sizes.
    arrived: Vec<bool>,
    missing: usize,
    done: bool,
}

impl Reassembly {
    /// Takes a fragment. Returns the message once it is whole, and again for each repetition.
    pub fn take(
        &mut self,
        fragment: &HandshakeFragment<'_>,
    ) -> Result<Option<Vec<u8>>, DomainError> {
        let (total, offset) = (fragment.total as usize, fragment.offset as usize);
        let fits = offset.checked_add(fragment.bytes.len()).is_some_and(|end| end <= total);
        if total == 0 || total > MAX_EXCHANGE_MESSAGE || !fits {
            return Err(DomainError::Handshake(
                "a handshake fragment has impossible bounds".into(),
            ));
        }
        if self.done || self.step != fragment.step || self.bytes.len() != total {
            *self = Self {
                step: fragment.step,
                bytes: vec![0; total],
                arrived: vec![false; total],
                missing: total,
                done: false,
            };
        }
        for (i, byte) in fragment.bytes.iter().enumerate() {
            let at = offset + i;
            self.missing -= usize::from(!std::mem::replace(&mut self.arrived[at], true));
            self.bytes[at] = *byte;
        }
        if self.missing > 0 {
            return Ok(None);
        }
        self.done = true;
        Ok(Some(self.bytes.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fragments(message: &HandshakeMessage, mtu: usize) -> Vec<Vec<u8>> {
        message.frames(mtu).collect()
    }

    fn take(into: &mut Reassembly, frame: &[u8]) -> Result<Option<Vec<u8>>, DomainError> {
        match frame::decode(frame).unwrap().1 {
            Body::HandshakeFragment(p) => into.take(&p),
            other => panic!("{other:?}"),
        }
    }

    fn message(step: u8, n: usize) -> HandshakeMessage {
        let bytes = (0..n).map(|i| i as u8 ^ step).collect();
        HandshakeMessage { exchange: [1; 16], to_initiator: false, step, bytes }
    }

    #[test]
    fn any_order_and_repetition_make_the_message() {
        let sent = message(1, 3000);
        let mut frames = fragments(&sent, 1024);
        assert!(frames.len() == 4 && frames.iter().all(|f| f.len() <= 1024));
        frames.reverse();
        frames.insert(1, frames[0].clone());
        let mut into = Reassembly::default();
        let (last, before) = frames.split_last().unwrap();
        for f in before {
            assert_eq!(take(&mut into, f), Ok(None));
        }
        assert_eq!(take(&mut into, last), Ok(Some(sent.bytes.clone())));
        // A repetition after a lost answer yields the message again.
        let again: Vec<_> = frames.iter().map(|f| take(&mut into, f).unwrap()).collect();
        assert_eq!(again.iter().flatten().count(), 1);
        // The next message replaces it.
        let next = message(3, 10);
        assert_eq!(take(&mut into, &fragments(&next, 1024)[0]), Ok(Some(next.bytes)));
    }

    #[test]
    fn impossible_fragments_are_refused() {
        let fragment = |total, offset| HandshakeFragment {
            exchange: [0; 16],
            to_initiator: false,
            step: 1,
            total,
            offset,
            bytes: &[1, 2, 3],
        };
        let bad = [
            (0, 0),
            (2, 0),
            (3, 1),
            (u32::MAX, 0),
            (10, u32::MAX),
            (MAX_EXCHANGE_MESSAGE as u32 + 1, 0),
        ];
        for (total, offset) in bad {
            assert!(Reassembly::default().take(&fragment(total, offset)).is_err());
        }
    }
}
