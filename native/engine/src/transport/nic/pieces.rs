//! Messages of a handshake that are longer than a datagram: cut up, and put together again.

use super::frame::{self, Body, Exchange, Header, Piece, PIECE};
use crate::{domain::DomainError, transport::handshake::MAX_MESSAGE};

/// Longest message of an exchange, bytes: a handshake's own, and what goes with it.
pub(crate) const LIMIT: usize = MAX_MESSAGE + 1024;

/// A message of an exchange, whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Letter {
    pub exchange: Exchange,
    pub to_initiator: bool,
    pub step: u8,
    pub bytes: Vec<u8>,
}

impl Letter {
    /// The frames that carry it, none longer than `mtu`.
    pub fn frames(&self, mtu: usize) -> impl Iterator<Item = Vec<u8>> + '_ {
        let room = mtu.saturating_sub(PIECE).max(1);
        let n = self.bytes.len().div_ceil(room).max(1);
        (0..n).map(move |i| {
            let from = i * room;
            let piece = Piece {
                exchange: self.exchange,
                to_initiator: self.to_initiator,
                step: self.step,
                total: self.bytes.len() as u32,
                offset: from as u32,
                bytes: &self.bytes[from..self.bytes.len().min(from + room)],
            };
            let mut out = vec![0; PIECE + piece.bytes.len()];
            let n = frame::encode(&Header::default(), &Body::Piece(piece), &mut out);
            out.truncate(n);
            out
        })
    }
}

/// The pieces of one side's current message. Any order, any number of times.
#[derive(Debug, Default)]
pub(crate) struct Pieces {
    step: u8,
    bytes: Vec<u8>,
    /// Byte by byte, what is there: pieces come in whatever sizes the other side's MTU makes.
    there: Vec<bool>,
    missing: usize,
    done: bool,
}

impl Pieces {
    /// Takes a piece; returns the message when it is whole, once for each repetition of it.
    pub fn take(&mut self, piece: &Piece<'_>) -> Result<Option<Vec<u8>>, DomainError> {
        let (total, offset) = (piece.total as usize, piece.offset as usize);
        let fits = offset.checked_add(piece.bytes.len()).is_some_and(|end| end <= total);
        if total == 0 || total > LIMIT || !fits {
            return Err(DomainError::Handshake("an impossible piece of a handshake".into()));
        }
        if self.done || self.step != piece.step || self.bytes.len() != total {
            *self = Self {
                step: piece.step,
                bytes: vec![0; total],
                there: vec![false; total],
                missing: total,
                done: false,
            };
        }
        for (i, byte) in piece.bytes.iter().enumerate() {
            let at = offset + i;
            self.missing -= usize::from(!std::mem::replace(&mut self.there[at], true));
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

    fn pieces(letter: &Letter, mtu: usize) -> Vec<Vec<u8>> {
        letter.frames(mtu).collect()
    }

    fn take(into: &mut Pieces, frame: &[u8]) -> Result<Option<Vec<u8>>, DomainError> {
        match frame::decode(frame).unwrap().1 {
            Body::Piece(p) => into.take(&p),
            other => panic!("{other:?}"),
        }
    }

    fn letter(step: u8, n: usize) -> Letter {
        let bytes = (0..n).map(|i| i as u8 ^ step).collect();
        Letter { exchange: [1; 16], to_initiator: false, step, bytes }
    }

    #[test]
    fn any_order_and_repetition_make_the_message() {
        let sent = letter(1, 3000);
        let mut frames = pieces(&sent, 1024);
        assert!(frames.len() == 4 && frames.iter().all(|f| f.len() <= 1024));
        frames.reverse();
        frames.insert(1, frames[0].clone());
        let mut into = Pieces::default();
        let (last, before) = frames.split_last().unwrap();
        for f in before {
            assert_eq!(take(&mut into, f), Ok(None));
        }
        assert_eq!(take(&mut into, last), Ok(Some(sent.bytes.clone())));
        // Sent again because the answer was lost: it comes out again.
        let again: Vec<_> = frames.iter().map(|f| take(&mut into, f).unwrap()).collect();
        assert_eq!(again.iter().flatten().count(), 1);
        // The next message takes its place.
        let next = letter(3, 10);
        assert_eq!(take(&mut into, &pieces(&next, 1024)[0]), Ok(Some(next.bytes)));
    }

    #[test]
    fn impossible_pieces_are_refused() {
        let piece = |total, offset| Piece {
            exchange: [0; 16],
            to_initiator: false,
            step: 1,
            total,
            offset,
            bytes: &[1, 2, 3],
        };
        let bad = [(0, 0), (2, 0), (3, 1), (u32::MAX, 0), (10, u32::MAX), (LIMIT as u32 + 1, 0)];
        for (total, offset) in bad {
            assert!(Pieces::default().take(&piece(total, offset)).is_err());
        }
    }
}
