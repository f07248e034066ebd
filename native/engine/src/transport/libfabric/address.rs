//! The address of a libfabric endpoint, as part of its engine's address. Peers are untrusted:
//! addresses are bounded and compared with the local endpoint before anything is sent.

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::info::{ip_of, Offer};
use crate::{
    api::{EngineAddress, Envelope, TransportKind},
    domain::DomainError,
};

const ENVELOPE: Envelope = Envelope::new(*b"FRlf", "a libfabric endpoint", 1024);

/// Identifies this boot of this host.
pub(super) fn host() -> [u8; 16] {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let mut id = [0; 16];
    id.copy_from_slice(&Sha256::digest(boot.trim())[..16]);
    id
}

/// Address and protocol of an endpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct EndpointAddress {
    pub provider: String,
    /// The wire protocol; endpoints of different protocols can't communicate.
    pub protocol: u32,
    pub addr_format: u32,
    /// In the provider's format.
    pub address: Vec<u8>,
    /// The NIC's name, for messages.
    pub nic: String,
    /// Identifies the host.
    pub host: [u8; 16],
}

impl EndpointAddress {
    pub fn encode(&self) -> Vec<u8> {
        ENVELOPE.encode(self)
    }

    pub fn decode(bytes: &[u8]) -> Result<Self, DomainError> {
        let address: Self =
            ENVELOPE.decode(bytes).map_err(|e| DomainError::Handshake(e.to_string()))?;
        if address.address.is_empty() || address.address.len() > 512 {
            let n = address.address.len();
            return Err(DomainError::Handshake(format!("a libfabric address of {n} bytes")));
        }
        Ok(address)
    }

    /// The address at one of an engine's endpoints.
    pub fn of(peer: &EngineAddress, endpoint: usize) -> Result<Self, DomainError> {
        match peer.endpoints.get(endpoint) {
            Some(e) if e.transport == TransportKind::Libfabric => Self::decode(&e.data),
            _ => Err(DomainError::Handshake(format!(
                "endpoint {endpoint} is not a libfabric endpoint"
            ))),
        }
    }

    /// Why the local endpoint can't reach it, if so.
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
                "both engines are on one host, which EFA can't reach; use the shm transport for peers \
                of one host"
                    .into(),
            );
        }
        if self.host != *host && own.is_local() {
            return Some(format!("{} ({}) does not leave its host", own.domain, own.provider));
        }
        None
    }

    /// The peer's NIC and IP address.
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

    fn address() -> EndpointAddress {
        EndpointAddress {
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
        assert_eq!(EndpointAddress::decode(&address().encode()), Ok(address()));
        for n in [0, 513] {
            let bad = EndpointAddress { address: vec![0; n], ..address() };
            assert!(EndpointAddress::decode(&bad.encode()).is_err());
        }
        assert!(EndpointAddress::decode(&[0; 2000]).is_err());
    }

    #[test]
    fn an_unreachable_address_names_the_reason() {
        assert_eq!(address().unfit(&offer(), &[2; 16]), None);
        assert!(address().unfit(&offer(), &[1; 16]).unwrap().contains("one host"));
        let tcp = Offer { provider: "tcp;ofi_rxm".into(), protocol: 11, ..offer() };
        assert!(address().unfit(&tcp, &[2; 16]).unwrap().contains("another protocol"));
        let shm = Offer { provider: "shm".into(), ..offer() };
        assert!(address().unfit(&shm, &[2; 16]).unwrap().contains("does not leave its host"));
    }
}
