//! Handshake messages. Their encoding never changes, so that builds of all versions can read each
//! other's refusals.
//!
//! The types are separate from the engine's own for that reason; the fuzzer's seeds are made of
//! them.

use serde::{Deserialize, Serialize};

#[cfg(all(test, not(loom)))]
use super::Credentials;
use crate::{
    api::{Endpoint, EngineAddress, EngineId, Envelope, Versions},
    domain::DomainError,
};

const ENVELOPE: Envelope = envelope(2);

/// Version 1 began with the acceptor's mac, by which a stranger could guess tokens. It is refused
/// with a refusal of version 1.
pub(super) const OUTDATED: Envelope = envelope(1);

const fn envelope(version: u16) -> Envelope {
    let (what, limit) = ("a handshake message", MAX_MESSAGE);
    Envelope { magic: *b"FRhs", what, limit, reads: Versions::only(version), writes: version }
}

/// Longest handshake message, bytes.
pub(crate) const MAX_MESSAGE: usize = 16 << 10;

pub(super) type Nonce = [u8; 32];
pub(super) type Digest = [u8; 32];

/// An engine's identity and endpoints, as sent in a hello or a welcome.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct EngineIdentity {
    id: [u8; 16],
    pub name: String,
    pub endpoints: Vec<PartyEndpoint>,
}

/// The listening address of one transport of the engine. Endpoints of unknown kinds keep their
/// index, because links and keys name endpoints by index.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct PartyEndpoint {
    pub kind: u32,
    pub data: Vec<u8>,
}

impl EngineIdentity {
    pub fn id(&self) -> EngineId {
        EngineId(self.id)
    }
}

impl From<&EngineAddress> for EngineIdentity {
    fn from(address: &EngineAddress) -> Self {
        let endpoint =
            |e: &Endpoint| PartyEndpoint { kind: e.transport.into(), data: e.data.clone() };
        Self {
            id: address.id.0,
            name: address.name.clone(),
            endpoints: address.endpoints.iter().map(endpoint).collect(),
        }
    }
}

impl From<EngineIdentity> for EngineAddress {
    fn from(party: EngineIdentity) -> Self {
        let endpoint = |d: PartyEndpoint| Endpoint { transport: d.kind.into(), data: d.data };
        let endpoints = party.endpoints.into_iter().map(endpoint).collect();
        Self { id: EngineId(party.id), name: party.name, endpoints }
    }
}

#[derive(Serialize, Deserialize)]
pub(super) struct Hello {
    pub oldest: u16,
    pub newest: u16,
    pub from: EngineIdentity,
    pub to: [u8; 16],
    pub nonce: Nonce,
    /// Kind of secret: see `Secret::kind`.
    pub secret: u8,
    pub extra: Vec<u8>,
}

#[derive(Serialize, Deserialize)]
pub(super) struct Welcome {
    pub version: u16,
    pub from: EngineIdentity,
    pub nonce: Nonce,
    pub secret: u8,
}

#[derive(Serialize, Deserialize)]
pub(super) struct Refusal {
    pub stale: bool,
    pub reason: String,
}

#[derive(Serialize, Deserialize)]
pub(super) enum Message {
    Hello(Hello),
    Welcome(Welcome),
    Proof(Digest),
    Accepted(Digest),
    Refusal(Refusal),
}

impl Message {
    pub fn encode(&self) -> Vec<u8> {
        ENVELOPE.encode(self)
    }

    pub fn decode(bytes: &[u8]) -> Result<Self, DomainError> {
        ENVELOPE.decode(bytes).map_err(|e| DomainError::Handshake(e.to_string()))
    }
}

/// Seals arbitrary bytes as a message.
#[cfg(any(test, fuzzing))]
pub(crate) fn sealed(body: &[u8]) -> Vec<u8> {
    ENVELOPE.seal(body)
}

/// One message of each kind, with constant contents.
#[cfg(all(test, not(loom)))]
pub(crate) fn samples(a: Credentials, b: Credentials) -> [Vec<u8>; 5] {
    let (to, nonce, mac) = (b.own.id.0, [3; 32], [5; 32]);
    let (from, secret) = ((&a.own).into(), 2);
    let hello = Hello { oldest: 1, newest: 1, from, to, nonce, secret, extra: vec![6] };
    let refusal = Refusal { stale: true, reason: "it is gone".into() };
    [
        Message::Hello(hello),
        Message::Welcome(Welcome { version: 1, from: (&b.own).into(), nonce, secret }),
        Message::Proof(mac),
        Message::Accepted(mac),
        Message::Refusal(refusal),
    ]
    .map(|m| m.encode())
}
