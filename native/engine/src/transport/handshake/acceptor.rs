//! The side that is called.

use hmac::{Hmac, Mac};
use sha2::Sha256;

use super::{
    failure::{claimed, decode, refused, unexpected, Failure},
    keys::{mac, nonce, Session},
    messages::{Message, Welcome},
    Credentials, WRONG_TOKEN,
};
use crate::{
    api::{EngineId, Versions},
    domain::PeerIdentity,
};

/// Waits for the proof of whoever said hello.
pub(crate) struct Acceptor {
    token: Vec<u8>,
    hello: Vec<u8>,
    /// All of ours but its mac.
    pub(super) welcome: Vec<u8>,
    pub peer: PeerIdentity,
    pub extra: Vec<u8>,
}

impl Acceptor {
    /// Returns what to answer.
    pub fn on_hello(credentials: &Credentials, bytes: &[u8]) -> Result<(Self, Vec<u8>), Failure> {
        let Message::Hello(hello) = decode(bytes)? else { return Err(unexpected("a hello")) };
        let (ours, theirs) =
            (credentials.versions, Versions { oldest: hello.oldest, newest: hello.newest });
        let Some(version) = ours.common(theirs) else {
            // Both sides read it: here and there would mean something else to each.
            let (name, from) = (claimed(&(&credentials.own).into()), claimed(&hello.from));
            return Err(Failure::refuse(
                false,
                format!(
                    "no common protocol version: {theirs} is spoken by {from}, {ours} by {name}; \
                     upgrade the older side"
                ),
            ));
        };
        let to = EngineId(hello.to);
        if to != credentials.own.id {
            let now = credentials.own.label();
            return Err(Failure::refuse(
                true,
                format!("engine {to} is gone, {now} lives at its address now"),
            ));
        }
        let from = (&credentials.own).into();
        let nonce = nonce().map_err(Failure::silent)?;
        let mut welcome = Welcome { version, from, nonce, mac: [0; 32] };
        let this = Self {
            token: credentials.token.clone(),
            hello: bytes.to_vec(),
            welcome: welcome.unsigned(),
            peer: PeerIdentity { address: hello.from.into(), version: Some(version) },
            extra: hello.extra,
        };
        welcome.mac = this.sum(b"acceptor").finalize().into_bytes().into();
        Ok((this, Message::Welcome(welcome).encode()))
    }

    fn sum(&self, role: &[u8]) -> Hmac<Sha256> {
        mac(&self.token, role, &[&self.hello, &self.welcome])
    }

    /// Worth something once the proof was right.
    pub fn session(&self) -> Session {
        self.sum(b"session").into()
    }

    /// Returns the acceptance to send.
    pub fn on_proof(&self, bytes: &[u8]) -> Result<Vec<u8>, Failure> {
        let proof = match decode(bytes)? {
            Message::Proof(p) => p,
            Message::Refusal(r) => return Err(refused(r)),
            _ => return Err(unexpected("a proof")),
        };
        match self.sum(b"initiator").verify_slice(&proof) {
            Ok(()) => Ok(Message::Accepted.encode()),
            Err(_) => Err(Failure::refuse(false, WRONG_TOKEN.into())),
        }
    }
}
