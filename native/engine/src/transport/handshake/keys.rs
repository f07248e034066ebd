//! What a token is used for: macs over what was said, and keys that follow from it.

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use super::messages::{Digest, Nonce};
use crate::domain::DomainError;

pub(super) fn nonce() -> Result<Nonce, DomainError> {
    let mut n = [0; 32];
    getrandom::fill(&mut n).map_err(|e| DomainError::Unavailable(format!("getrandom: {e}")))?;
    Ok(n)
}

pub(super) fn mac(key: &[u8], role: &[u8], said: &[&[u8]]) -> Hmac<Sha256> {
    // HMAC takes keys of any length.
    let mut mac = <Hmac<Sha256> as KeyInit>::new_from_slice(key)
        .unwrap_or_else(|_| unreachable!("hmac takes any key"));
    mac.update(role);
    said.iter().for_each(|part| mac.update(part));
    mac
}

/// What both sides of one handshake know and nobody else: a key for what else they tell each other
/// on a wire that strangers can write to.
#[derive(Clone)]
pub(crate) struct Session(Digest);

impl From<Hmac<Sha256>> for Session {
    fn from(mac: Hmac<Sha256>) -> Self {
        Self(mac.finalize().into_bytes().into())
    }
}

impl Session {
    /// The bytes with a mac behind them. `role` tells the two directions apart.
    pub fn seal(&self, role: &[u8], bytes: &[u8]) -> Vec<u8> {
        let sum = mac(&self.0, role, &[bytes]);
        [bytes, &sum.finalize().into_bytes()].concat()
    }

    /// The bytes before the mac, if it is right.
    pub fn unseal<'a>(&self, role: &[u8], sealed: &'a [u8]) -> Result<&'a [u8], DomainError> {
        let cut = sealed.len().checked_sub(size_of::<Digest>());
        let (bytes, sum) = cut.map(|n| sealed.split_at(n)).unwrap_or_default();
        mac(&self.0, role, &[bytes])
            .verify_slice(sum)
            .map(|()| bytes)
            .map_err(|_| DomainError::Handshake("a message was changed on its way".into()))
    }
}
