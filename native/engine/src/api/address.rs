use std::fmt;

use serde::{Deserialize, Serialize};

use super::{envelope::Envelope, TransportKind};
use crate::{EngineError, Result};

const ENVELOPE: Envelope = Envelope::new(*b"FRad", "an engine address", 4096);

/// One incarnation of an engine: random, and new when it opens, so that a restart under the same
/// name is another engine (MR-2).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct EngineId(pub [u8; 16]);

impl EngineId {
    pub fn random() -> Result<Self> {
        let mut id = [0; 16];
        getrandom::fill(&mut id).map_err(|e| EngineError::Resource {
            call: "getrandom",
            cause: e.to_string(),
            hint: "the system's random source must be readable".into(),
        })?;
        Ok(Self(id))
    }

    /// All of it, as Python and metrics name an engine.
    pub fn to_hex(self) -> String {
        format!("{:032x}", u128::from_be_bytes(self.0))
    }
}

impl fmt::Display for EngineId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0[..4].iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}

impl fmt::Debug for EngineId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EngineId({self})")
    }
}

/// The endpoint of one transport of an engine; only that transport interprets `data`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Endpoint {
    pub transport: TransportKind,
    pub data: Vec<u8>,
}

/// The address of an engine: its id, and the endpoint of each of its transports.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineAddress {
    pub id: EngineId,
    /// For people and logs only; two incarnations of one name differ in `id`.
    pub name: String,
    pub endpoints: Vec<Endpoint>,
}

impl EngineAddress {
    /// As peers decode it if [`EngineAddress::check_size`] holds.
    pub fn to_bytes(&self) -> Vec<u8> {
        ENVELOPE.encode(self)
    }

    /// Checks before the encoding is sent that a peer accepts it.
    ///
    /// # Errors
    /// [`EngineError::Invalid`]: it is too long.
    pub fn check_size(&self) -> Result<()> {
        let advised = |e| EngineError::Invalid(format!("{e}; use fewer NICs or a shorter name"));
        ENVELOPE.check_size(self).map_err(advised)
    }

    /// Bounded and checked; see [`EngineError::Decode`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        ENVELOPE.decode(bytes)
    }

    pub fn endpoint(&self, kind: TransportKind) -> Option<&Endpoint> {
        self.endpoints.iter().find(|e| e.transport == kind)
    }

    /// The places of a transport's endpoints: one for each NIC.
    pub fn endpoints_of(&self, kind: TransportKind) -> impl Iterator<Item = usize> + '_ {
        let all = self.endpoints.iter().enumerate();
        all.filter(move |(_, e)| e.transport == kind).map(|(i, _)| i)
    }

    /// Whether any of its transports drives NICs.
    pub fn has_nics(&self) -> bool {
        self.endpoints.iter().any(|e| e.transport.has_nics())
    }

    /// The place of a transport's only endpoint.
    pub(crate) fn first_of(&self, kind: TransportKind) -> usize {
        self.endpoints_of(kind).next().unwrap_or_default()
    }

    /// `name#id`, as it appears in errors.
    pub fn label(&self) -> String {
        format!("{}#{}", self.name, self.id)
    }
}
