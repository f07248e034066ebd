//! Handshake fragments: sending, receiving, and those of strangers.

use super::{join_parts, split_parts, Role};
use crate::{
    domain::DomainError,
    transport::{
        handshake::{Acceptor, Failure},
        libfabric::{address::EndpointAddress, link, slots, LibfabricDomain, LinkEntry},
        nic::{
            frame::{Exchange, HandshakeFragment},
            handshake_fragments::{HandshakeMessage, Reassembly},
        },
    },
};

/// Handshakes of strangers at a time; further ones are not answered.
const MAX_UNPROVEN: usize = 64;
/// Fragments that may wait for the provider; further ones are dropped and repeated later.
const OUTBOX: usize = 256;

impl LibfabricDomain {
    pub(in super::super) fn send_handshake_message(
        &mut self,
        address: usize,
        message: &HandshakeMessage,
    ) {
        for fragment in message.frames(slots::SLOT - link::SEAL) {
            if self.outbox.len() >= OUTBOX {
                return;
            }
            self.addresses.acquire_again(address);
            self.outbox.push_back((address, fragment));
        }
        self.send_handshake_fragments();
    }

    /// Handles a handshake fragment. Strangers are bounded in number.
    pub(in super::super) fn on_handshake_fragment(&mut self, fragment: &HandshakeFragment<'_>) {
        if self.closing {
            return;
        }
        let key = (fragment.exchange, fragment.to_initiator);
        if !self.handshakes.contains_key(&key) {
            if self.repeat_accepted(fragment) || fragment.to_initiator || fragment.step != 1 {
                return;
            }
            let strangers = self.handshakes.keys().filter(|(_, initiator)| !initiator).count();
            if strangers >= MAX_UNPROVEN {
                return;
            }
            self.strangers.retain(|(_, _, deadline)| *deadline > self.now);
            if !self.strangers.iter().any(|(e, _, _)| *e == fragment.exchange) {
                if self.strangers.len() >= MAX_UNPROVEN {
                    return;
                }
                let deadline = self.now.after(self.peer_timeout);
                self.strangers.push((fragment.exchange, Reassembly::default(), deadline));
            }
            let Some((_, reassembly, _)) =
                self.strangers.iter_mut().find(|(e, _, _)| *e == fragment.exchange)
            else {
                return;
            };
            match reassembly.take(fragment) {
                Ok(None) => return,
                Ok(Some(hello)) => self.on_hello(fragment.exchange, &hello),
                Err(e) => self.log.unproven("an unproven peer", &e),
            }
            self.strangers.retain(|(e, _, _)| *e != fragment.exchange);
            return;
        }
        let Some(handshake) = self.handshakes.get_mut(&key) else { return };
        if fragment.step <= handshake.message.step {
            // The answer to that step was lost, or is under way.
            if let Ok(Some(_)) = handshake.reassembly.take(fragment) {
                self.send_current(key);
            }
            return;
        }
        let heard = match handshake.reassembly.take(fragment) {
            Ok(None) => return,
            Ok(Some(message)) => self.on_step(key, fragment.step, &message),
            Err(e) => Err(Failure { reply: None, error: e }),
        };
        if let Err(failure) = heard {
            self.on_handshake_failed(key, failure);
        }
    }

    /// Repeats the acceptor's last answer to an initiator that did not receive it.
    fn repeat_accepted(&mut self, fragment: &HandshakeFragment<'_>) -> bool {
        if fragment.to_initiator {
            return false;
        }
        let known = self.links.iter().find_map(|(_, slot)| match slot {
            LinkEntry::Up(l) if l.exchange == fragment.exchange => {
                Some((l.address, l.accepted.clone().filter(|_| !l.confirmed)))
            }
            _ => None,
        });
        let Some((address, message)) = known else { return false };
        // Once per repetition: with its last fragment.
        let last = fragment.offset as usize + fragment.bytes.len() == fragment.total as usize;
        if let Some(message) = message.filter(|_| last) {
            self.send_handshake_message(address, &message);
        }
        true
    }

    /// Handles a stranger's complete hello.
    fn on_hello(&mut self, exchange: Exchange, message: &[u8]) {
        let opened = split_parts(message).and_then(|(remote, hello)| {
            let remote = EndpointAddress::decode(remote)?;
            if let Some(why) = remote.unfit(&self.offer, &self.own_address.host) {
                return Err(DomainError::Handshake(why));
            }
            let nic = self.nic.as_ref().ok_or_else(crate::transport::libfabric::closed)?;
            let address = self.addresses.acquire(nic, &remote.address)?;
            Ok((remote, hello, address))
        });
        let (remote, hello, address) = match opened {
            Ok(opened) => opened,
            Err(e) => return self.log.unproven("an unproven peer", &e),
        };
        let reply = |bytes: &[u8]| HandshakeMessage {
            exchange,
            to_initiator: true,
            step: 2,
            bytes: join_parts(&[], bytes),
        };
        match Acceptor::on_hello(&self.credentials, hello) {
            Ok((acceptor, welcome)) => {
                let role = Role::Acceptor(Box::new(acceptor));
                let initiator = (usize::MAX, remote, address);
                let handshake = self.new_handshake(self.now, role, 0, initiator, reply(&welcome));
                self.handshakes.insert((exchange, false), handshake);
                self.send_current((exchange, false));
            }
            Err(failure) => {
                self.log.unproven(&remote.label(), &failure.error);
                if let Some(refusal) = failure.reply {
                    self.send_handshake_message(address, &reply(&refusal));
                }
                self.addresses.release(address);
            }
        }
    }
}
