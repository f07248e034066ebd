//! Letters in pieces: sent, heard, and those of strangers.

use super::{pack, unpack, Role};
use crate::{
    domain::DomainError,
    transport::{
        handshake::{Acceptor, Failure},
        libfabric::{link, place::Place, slots, LibfabricDomain, Slot},
        nic::{
            frame::{Exchange, HandshakeFragment},
            handshake_fragments::{HandshakeMessage, Reassembly},
        },
    },
};

/// Strangers' handshakes at a time; further ones are not answered.
const STRANGERS: usize = 64;
/// Pieces that wait for the provider; beyond, they are lost and repeated later.
const OUTBOX: usize = 256;

impl LibfabricDomain {
    pub(in super::super) fn mail_letter(&mut self, address: usize, letter: &HandshakeMessage) {
        for piece in letter.frames(slots::SLOT - link::SEAL) {
            if self.outbox.len() >= OUTBOX {
                return;
            }
            self.addresses.hold_again(address);
            self.outbox.push_back((address, piece));
        }
        self.send_letters();
    }

    /// A piece of somebody's letter. Strangers get no further than their manners allow.
    pub(in super::super) fn hear_piece(&mut self, piece: &HandshakeFragment<'_>) {
        if self.closing {
            return;
        }
        let key = (piece.exchange, piece.to_initiator);
        if !self.setups.contains_key(&key) {
            if self.repeat_acceptance(piece) || piece.to_initiator || piece.step != 1 {
                return;
            }
            let strangers = self.setups.keys().filter(|(_, initiator)| !initiator).count();
            if strangers >= STRANGERS {
                return;
            }
            self.strangers.retain(|(_, _, deadline)| *deadline > self.now);
            if !self.strangers.iter().any(|(e, _, _)| *e == piece.exchange) {
                if self.strangers.len() >= STRANGERS {
                    return;
                }
                let deadline = self.now.after(self.peer_timeout);
                self.strangers.push((piece.exchange, Reassembly::default(), deadline));
            }
            let Some((_, pieces, _)) =
                self.strangers.iter_mut().find(|(e, _, _)| *e == piece.exchange)
            else {
                return;
            };
            match pieces.take(piece) {
                Ok(None) => return,
                Ok(Some(hello)) => self.welcome(piece.exchange, &hello),
                Err(e) => self.log.unproven("a stranger", &e),
            }
            self.strangers.retain(|(e, _, _)| *e != piece.exchange);
            return;
        }
        let Some(setup) = self.setups.get_mut(&key) else { return };
        if piece.step <= setup.letter.step {
            // Our answer to that was lost, or is on its way.
            if let Ok(Some(_)) = setup.pieces.take(piece) {
                self.repeat(key);
            }
            return;
        }
        let heard = match setup.pieces.take(piece) {
            Ok(None) => return,
            Ok(Some(letter)) => self.answer(key, piece.step, &letter),
            Err(e) => Err(Failure { reply: None, error: e }),
        };
        if let Err(failure) = heard {
            self.setup_failed(key, failure);
        }
    }

    /// An initiator that has not heard our last word says its own again.
    fn repeat_acceptance(&mut self, piece: &HandshakeFragment<'_>) -> bool {
        if piece.to_initiator {
            return false;
        }
        let known = self.links.iter().find_map(|(_, slot)| match slot {
            Slot::Up(l) if l.exchange == piece.exchange => {
                Some((l.address, l.accepted.clone().filter(|_| !l.confirmed)))
            }
            _ => None,
        });
        let Some((address, letter)) = known else { return false };
        // Once for each repetition: with its last piece.
        let last = piece.offset as usize + piece.bytes.len() == piece.total as usize;
        if let Some(letter) = letter.filter(|_| last) {
            self.mail_letter(address, &letter);
        }
        true
    }

    /// A stranger's hello is whole.
    fn welcome(&mut self, exchange: Exchange, letter: &[u8]) {
        let opened = unpack(letter).and_then(|(place, hello)| {
            let place = Place::decode(place)?;
            if let Some(why) = place.unfit(&self.offer, &self.place.host) {
                return Err(DomainError::Handshake(why));
            }
            let nic = self.nic.as_ref().ok_or_else(crate::transport::libfabric::closed)?;
            let address = self.addresses.hold(nic, &place.address)?;
            Ok((place, hello, address))
        });
        let (place, hello, address) = match opened {
            Ok(opened) => opened,
            Err(e) => return self.log.unproven("a stranger", &e),
        };
        let reply = |bytes: &[u8]| HandshakeMessage {
            exchange,
            to_initiator: true,
            step: 2,
            bytes: pack(&[], bytes),
        };
        match Acceptor::on_hello(&self.credentials, hello) {
            Ok((acceptor, welcome)) => {
                let role = Role::Acceptor(Box::new(acceptor));
                let whom = (usize::MAX, place, address);
                let setup = self.setup(self.now, role, 0, whom, reply(&welcome));
                self.setups.insert((exchange, false), setup);
                self.repeat((exchange, false));
            }
            Err(failure) => {
                self.log.unproven(&place.label(), &failure.error);
                if let Some(refusal) = failure.reply {
                    self.mail_letter(address, &reply(&refusal));
                }
                self.addresses.release(address);
            }
        }
    }
}
