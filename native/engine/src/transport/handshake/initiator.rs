//! The active side of a handshake.

use hmac::Mac;

use super::{
    failure::{claimed, decode, refused, unexpected, Failure},
    keys::{mac, nonce, Session},
    messages::{Digest, Hello, Message},
    Credentials,
};
use crate::{
    api::{EngineId, Versions},
    domain::{DomainError, PeerIdentity},
};

pub(crate) struct Initiator {
    versions: Versions,
    key: Digest,
    to: EngineId,
    hello: Vec<u8>,
}

/// An unproven welcome: send `proof`, then wait for the acceptor's.
pub(crate) struct UnprovenWelcome {
    pub proof: Vec<u8>,
    /// Encrypts data that only a holder of the key may read.
    pub session: Session,
    pub pending: UnprovenAcceptor,
}

/// An acceptor that has not proven itself yet.
pub(crate) struct UnprovenAcceptor {
    peer: PeerIdentity,
    /// The mac that the acceptor must send.
    expected: hmac::Hmac<sha2::Sha256>,
}

impl Initiator {
    /// Returns the handshake and the hello to send.
    pub fn start(
        credentials: &Credentials,
        to: EngineId,
        extra: Vec<u8>,
    ) -> Result<(Self, Vec<u8>), DomainError> {
        let (nonce, key) = (nonce()?, credentials.secret.key()?);
        let versions = credentials.versions;
        let Versions { oldest, newest } = versions;
        let (from, secret) = ((&credentials.own).into(), credentials.secret.kind());
        let hello = Hello { oldest, newest, from, to: to.0, nonce, secret, extra };
        let hello = Message::Hello(hello).encode();
        Ok((Self { versions, key, to, hello: hello.clone() }, hello))
    }

    /// Checks a welcome and returns this side's proof. The welcome itself is still unproven.
    pub fn on_welcome(&self, bytes: &[u8]) -> Result<UnprovenWelcome, Failure> {
        let welcome = match decode(bytes)? {
            Message::Welcome(w) => w,
            Message::Refusal(r) => return Err(refused(r)),
            _ => return Err(unexpected("a welcome")),
        };
        let ours = self.versions;
        if !ours.contains(welcome.version) {
            let reason = format!(
                "protocol version {} was chosen, {ours} was offered; upgrade the older side",
                welcome.version
            );
            return Err(Failure::refuse(false, reason));
        }
        if welcome.from.id() != self.to {
            let cause = format!("engine {} answers there now", claimed(&welcome.from));
            return Err(Failure::silent(DomainError::Stale(cause)));
        }
        let sum = |role: &[u8]| mac(&self.key, role, &[&self.hello, bytes]);
        let proof = sum(b"initiator").finalize().into_bytes().into();
        let peer = PeerIdentity { address: welcome.from.into(), version: Some(welcome.version) };
        Ok(UnprovenWelcome {
            proof: Message::Proof(proof).encode(),
            session: sum(b"session").into(),
            pending: UnprovenAcceptor { peer, expected: sum(b"acceptor") },
        })
    }
}

impl UnprovenAcceptor {
    /// Checks the acceptor's proof; returns the authenticated peer.
    pub fn on_accepted(&self, bytes: &[u8]) -> Result<PeerIdentity, Failure> {
        let proof = match decode(bytes)? {
            Message::Accepted(proof) => proof,
            Message::Refusal(r) => return Err(refused(r)),
            _ => return Err(unexpected("an acceptance")),
        };
        match self.expected.clone().verify_slice(&proof) {
            Ok(()) => Ok(self.peer.clone()),
            Err(_) => Err(Failure::refuse(
                false,
                "the acceptor's proof is wrong: it does not know the key; check which process listens there".into(),
            )),
        }
    }
}
