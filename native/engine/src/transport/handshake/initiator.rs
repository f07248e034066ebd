//! The side that begins.

use hmac::Mac;

use super::{
    failure::{claimed, decode, refused, unexpected, Failure},
    keys::{mac, nonce, Session},
    messages::{Hello, Message},
    Credentials, WRONG_TOKEN,
};
use crate::{
    api::{EngineId, Versions},
    domain::{DomainError, PeerIdentity},
};

pub(crate) struct Initiator {
    credentials: Credentials,
    to: EngineId,
    hello: Vec<u8>,
}

/// The acceptor's word, checked: send `proof`, then await `Accepted`.
pub(crate) struct Welcomed {
    pub proof: Vec<u8>,
    pub peer: PeerIdentity,
    pub session: Session,
}

impl Initiator {
    /// Returns the first message to send.
    pub fn start(
        credentials: &Credentials,
        to: EngineId,
        extra: Vec<u8>,
    ) -> Result<(Self, Vec<u8>), DomainError> {
        let nonce = nonce()?;
        let Versions { oldest, newest } = credentials.versions;
        let from = (&credentials.own).into();
        let hello = Hello { oldest, newest, from, to: to.0, nonce, extra };
        let hello = Message::Hello(hello).encode();
        let this = Self { credentials: credentials.clone(), to, hello: hello.clone() };
        Ok((this, hello))
    }

    pub fn on_welcome(&self, bytes: &[u8]) -> Result<Welcomed, Failure> {
        let welcome = match decode(bytes)? {
            Message::Welcome(w) => w,
            Message::Refusal(r) => return Err(refused(r)),
            _ => return Err(unexpected("a welcome")),
        };
        let ours = self.credentials.versions;
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
        let token = &self.credentials.token;
        let unsigned = welcome.unsigned();
        let sum = |role: &[u8]| mac(token, role, &[&self.hello, &unsigned]);
        if sum(b"acceptor").verify_slice(&welcome.mac).is_err() {
            return Err(Failure::refuse(false, WRONG_TOKEN.into()));
        }
        let proof = sum(b"initiator").finalize().into_bytes().into();
        let session = sum(b"session").into();
        Ok(Welcomed {
            proof: Message::Proof(proof).encode(),
            peer: PeerIdentity { address: welcome.from.into(), version: Some(welcome.version) },
            session,
        })
    }

    pub fn on_accepted(&self, bytes: &[u8]) -> Result<(), Failure> {
        match decode(bytes)? {
            Message::Accepted => Ok(()),
            Message::Refusal(r) => Err(refused(r)),
            _ => Err(unexpected("an acceptance")),
        }
    }
}
