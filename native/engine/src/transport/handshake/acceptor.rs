//! The side that is called. It proves itself last: a stranger that connects learns nothing to guess the token by. Only
//! a proven initiator gets a link, and so counts or sends messages (IC-2).

use hmac::{Hmac, Mac};
use sha2::Sha256;

use super::{
    failure::{claimed, decode, outdated, refused, unexpected, Failure},
    keys::{mac, nonce, Secret, Session},
    messages::{Digest, Message, Welcome},
    Credentials,
};
use crate::{
    api::{EngineId, Versions},
    domain::PeerIdentity,
};

/// Waits for the proof of the initiator.
pub(crate) struct Acceptor {
    secret: Secret,
    key: Digest,
    /// What the initiator says that it proves itself by.
    theirs: u8,
    hello: Vec<u8>,
    pub(super) welcome: Vec<u8>,
    pub peer: PeerIdentity,
    pub extra: Vec<u8>,
}

impl Acceptor {
    /// Returns what to answer.
    pub fn on_hello(credentials: &Credentials, bytes: &[u8]) -> Result<(Self, Vec<u8>), Failure> {
        if let Some(refusal) = outdated(bytes) {
            return Err(refusal);
        }
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
        let key = credentials.secret.key().map_err(Failure::silent)?;
        let (from, secret) = ((&credentials.own).into(), credentials.secret.kind());
        let nonce = nonce().map_err(Failure::silent)?;
        let welcome = Message::Welcome(Welcome { version, from, nonce, secret }).encode();
        let this = Self {
            secret: credentials.secret.clone(),
            key,
            theirs: hello.secret,
            hello: bytes.to_vec(),
            welcome: welcome.clone(),
            peer: PeerIdentity { address: hello.from.into(), version: Some(version) },
            extra: hello.extra,
        };
        Ok((this, welcome))
    }

    fn sum(&self, role: &[u8]) -> Hmac<Sha256> {
        mac(&self.key, role, &[&self.hello, &self.welcome])
    }

    /// Worth something once the proof was right.
    pub fn session(&self) -> Session {
        self.sum(b"session").into()
    }

    /// Returns the acceptance to send, which is this side's proof.
    pub fn on_proof(&self, bytes: &[u8]) -> Result<Vec<u8>, Failure> {
        let proof = match decode(bytes)? {
            Message::Proof(p) => p,
            Message::Refusal(r) => return Err(refused(r)),
            _ => return Err(unexpected("a proof")),
        };
        match self.sum(b"initiator").verify_slice(&proof) {
            Ok(()) => {
                let own = self.sum(b"acceptor").finalize().into_bytes().into();
                Ok(Message::Accepted(own).encode())
            }
            Err(_) => Err(Failure::refuse(false, self.secret.differs(self.theirs))),
        }
    }
}
