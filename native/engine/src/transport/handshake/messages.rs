//! What is said in a handshake, for good: builds of all versions read it, so that they can refuse each other in words.
//!
//! These types belong to the handshake alone. Whatever the engine's own become, these bytes stay, and so do the seeds
//! of the fuzzer that are made of them.

use serde::{Deserialize, Serialize};

#[cfg(all(test, not(loom)))]
use super::Credentials;
use crate::{
    api::{Endpoint, EngineAddress, EngineId, Envelope, Versions},
    domain::DomainError,
};

const ENVELOPE: Envelope = envelope(2);

/// Version 1 began with the acceptor's mac, by which who connected could guess tokens: it is refused, in its own words.
pub(super) const OUTDATED: Envelope = envelope(1);

const fn envelope(version: u16) -> Envelope {
    let (what, limit) = ("a handshake message", MAX_MESSAGE);
    Envelope { magic: *b"FRhs", what, limit, reads: Versions::only(version), writes: version }
}

/// Longest handshake message, bytes.
pub(crate) const MAX_MESSAGE: usize = 16 << 10;

pub(super) type Nonce = [u8; 32];
pub(super) type Digest = [u8; 32];

/// An engine, as it tells of itself.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct Party {
    id: [u8; 16],
    pub name: String,
    pub endpoints: Vec<Door>,
}

/// Where one of its transports listens. A kind that this build doesn't know is passed over, and keeps its place: links
/// and keys name endpoints by it.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct Door {
    pub kind: u32,
    pub data: Vec<u8>,
}

impl Party {
    pub fn id(&self) -> EngineId {
        EngineId(self.id)
    }
}

impl From<&EngineAddress> for Party {
    fn from(address: &EngineAddress) -> Self {
        let door = |e: &Endpoint| Door { kind: e.transport.into(), data: e.data.clone() };
        Self {
            id: address.id.0,
            name: address.name.clone(),
            endpoints: address.endpoints.iter().map(door).collect(),
        }
    }
}

impl From<Party> for EngineAddress {
    fn from(party: Party) -> Self {
        let endpoint = |d: Door| Endpoint { transport: d.kind.into(), data: d.data };
        let endpoints = party.endpoints.into_iter().map(endpoint).collect();
        Self { id: EngineId(party.id), name: party.name, endpoints }
    }
}

#[derive(Serialize, Deserialize)]
pub(super) struct Hello {
    pub oldest: u16,
    pub newest: u16,
    pub from: Party,
    pub to: [u8; 16],
    pub nonce: Nonce,
    /// What it proves itself by: see `Secret::kind`.
    pub secret: u8,
    pub extra: Vec<u8>,
}

#[derive(Serialize, Deserialize)]
pub(super) struct Welcome {
    pub version: u16,
    pub from: Party,
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

/// A message with this body, whatever it is.
#[cfg(any(test, fuzzing))]
pub(crate) fn sealed(body: &[u8]) -> Vec<u8> {
    ENVELOPE.seal(body)
}

/// One message of each kind, always the same.
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
