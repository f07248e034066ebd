//! What an endpoint tells of itself in its engine's address. Peers are untrusted: it is bounded,
//! and compared with what this side speaks before anything is sent there.

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::info::{ip_of, Offer};
use crate::{
    api::{EngineAddress, Envelope, TransportKind},
    domain::DomainError,
};

const ENVELOPE: Envelope = Envelope::new(*b"FRlf", "a libfabric endpoint", 1024);

/// Tells hosts apart; a host may boot anew and be another.
pub(super) fn host() -> [u8; 16] {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let mut id = [0; 16];
    id.copy_from_slice(&Sha256::digest(boot.trim())[..16]);
    id
}

/// Where a NIC's endpoint is, and what it speaks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Place {
    pub provider: String,
    /// What travels on the wire; endpoints of different protocols can't talk.
    pub protocol: u32,
    pub addr_format: u32,
    /// As the provider writes it.
    pub address: Vec<u8>,
    /// For people.
    pub nic: String,
    /// Differs between hosts.
    pub host: [u8; 16],
}

impl Place {
    pub fn encode(&self) -> Vec<u8> {
        ENVELOPE.encode(self)
    }

    pub fn decode(bytes: &[u8]) -> Result<Self, DomainError> {
        let place: Self =
            ENVELOPE.decode(bytes).map_err(|e| DomainError::Handshake(e.to_string()))?;
        if place.address.is_empty() || place.address.len() > 512 {
            let n = place.address.len();
            return Err(DomainError::Handshake(format!("a libfabric address of {n} bytes")));
        }
        Ok(place)
    }

    /// The place at one of an engine's endpoints.
    pub fn of(peer: &EngineAddress, endpoint: usize) -> Result<Self, DomainError> {
        match peer.endpoints.get(endpoint) {
            Some(e) if e.transport == TransportKind::Libfabric => Self::decode(&e.data),
            _ => {
                Err(DomainError::Handshake(format!("its endpoint {endpoint} is not of libfabric")))
            }
        }
    }

    /// Why endpoints of this side's kind can't reach it, if so.
    pub fn unfit(&self, own: &Offer, host: &[u8; 16]) -> Option<String> {
        if (self.protocol, self.addr_format) != (own.protocol, own.addr_format) {
            return Some(format!(
                "the peer's {} speaks another protocol than {} here; use one libfabric provider, \
                 and the same kind of library, on both sides",
                self.provider, own.provider
            ));
        }
        if self.host == *host && own.is_efa() {
            return Some(
                "both are on one host, and EFA has no way back to it; the shm transport serves \
                 peers of one host"
                    .into(),
            );
        }
        if self.host != *host && own.is_local() {
            return Some(format!("{} ({}) does not leave its host", own.domain, own.provider));
        }
        None
    }

    /// The peer's NIC and where it is.
    pub fn label(&self) -> String {
        let nic: String = self.nic.chars().filter(|c| !c.is_control()).take(40).collect();
        match ip_of(self.addr_format, &self.address) {
            Some(ip) => format!("{nic} at {ip}"),
            None => nic,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place() -> Place {
        Place {
            provider: "efa".into(),
            protocol: 19,
            addr_format: 12,
            address: vec![7; 32],
            nic: "rdmap0s6-rdm".into(),
            host: [1; 16],
        }
    }

    fn offer() -> Offer {
        Offer { provider: "efa".into(), protocol: 19, addr_format: 12, ..Default::default() }
    }

    #[test]
    fn places_survive_and_impossible_ones_are_refused() {
        assert_eq!(Place::decode(&place().encode()), Ok(place()));
        for n in [0, 513] {
            let bad = Place { address: vec![0; n], ..place() };
            assert!(Place::decode(&bad.encode()).is_err());
        }
        assert!(Place::decode(&[0; 2000]).is_err());
    }

    #[test]
    fn whoever_can_not_be_reached_is_told_why() {
        assert_eq!(place().unfit(&offer(), &[2; 16]), None);
        assert!(place().unfit(&offer(), &[1; 16]).unwrap().contains("one host"));
        let tcp = Offer { provider: "tcp;ofi_rxm".into(), protocol: 11, ..offer() };
        assert!(place().unfit(&tcp, &[2; 16]).unwrap().contains("another protocol"));
        let shm = Offer { provider: "shm".into(), ..offer() };
        assert!(place().unfit(&shm, &[2; 16]).unwrap().contains("does not leave its host"));
    }
}
