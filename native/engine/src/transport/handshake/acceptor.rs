//! The passive side of a handshake. It proves itself last (see the module). Only a proven initiator
//! gets a link and may count or send messages (IC-2).

use hmac::{Hmac, Mac};
use sha2::Sha256;

use super::{
    failure::{claimed, decode, outdated, refused, unexpected, Failure},
    keys::{nonce, Secret, Session},
    messages::{Digest, Message, Welcome},
    Credentials,
};
use crate::{
    api::{EngineId, Versions},
    domain::PeerIdentity,
};

/// State between the welcome and the initiator's proof.
pub(crate) struct Acceptor {
    secret: Secret,
    key: Digest,
    /// Kind of secret that the initiator claims, see `Secret::kind`.
    theirs: u8,
    hello: Vec<u8>,
    pub(super) welcome: Vec<u8>,
    pub peer: PeerIdentity,
    pub extra: Vec<u8>,
}

impl Acceptor {
    /// Checks a hello; returns the welcome to send.
    pub fn on_hello(credentials: &Credentials, bytes: &[u8]) -> Result<(Self, Vec<u8>), Failure> {
        if let Some(refusal) = outdated(bytes) {
            return Err(refusal);
        }
        let Message::Hello(hello) = decode(bytes)? else { return Err(unexpected("a hello")) };
        let (ours, theirs) =
            (credentials.versions, Versions { oldest: hello.oldest, newest: hello.newest });
        let Some(version) = ours.common(theirs) else {
            // Both sides print this text, so it names the engines instead of "here" and "there".
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
                format!("engine {to} has ended; engine {now} has its address now"),
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

    fn mac(&self, role: &[u8]) -> Hmac<Sha256> {
        super::keys::mac(&self.key, role, &[&self.hello, &self.welcome])
    }

    /// The session's keys; trustworthy only after [`Self::on_proof`] succeeded.
    pub fn session(&self) -> Session {
        self.mac(b"session").into()
    }

    /// Checks the initiator's proof; returns the acceptance to send, which proves this side.
    pub fn on_proof(&self, bytes: &[u8]) -> Result<Vec<u8>, Failure> {
        let proof = match decode(bytes)? {
            Message::Proof(p) => p,
            Message::Refusal(r) => return Err(refused(r)),
            _ => return Err(unexpected("a proof")),
        };
        match self.mac(b"initiator").verify_slice(&proof) {
            Ok(()) => {
                let own = self.mac(b"acceptor").finalize().into_bytes().into();
                Ok(Message::Accepted(own).encode())
            }
            Err(_) => Err(Failure::refuse(false, self.secret.mismatch_reason(self.theirs))),
        }
    }
}
