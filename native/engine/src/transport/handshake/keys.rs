//! Secrets that prove a peer (IC-2), macs, and keys derived from a handshake.

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use super::{
    messages::{Digest, Nonce},
    token::stretched,
    user_key::user_key,
};
use crate::domain::DomainError;

/// The secret that a peer must know, or the user that it must run as.
#[derive(Clone)]
pub(crate) enum Secret {
    /// The key of the configured token.
    Token(Digest),
    /// The key of this user on this host.
    User,
    /// Nothing: the kernel reported that the peer's process belongs to this user.
    Kernel,
}

impl Secret {
    /// For transports where the kernel does not report the peer's user. Without a token, only
    /// processes of the same user on the same host are peers.
    pub fn new(token: Option<&[u8]>) -> Result<Self, DomainError> {
        match token {
            Some(token) => Ok(Self::Token(stretched(token)?)),
            // Report a missing folder now rather than at the first handshake.
            None => user_key().map(|_| Self::User),
        }
    }

    /// For transports that ask the kernel for the peer's user before the first byte. They need no
    /// secret without a token.
    pub fn or_kernel(token: Option<&[u8]>) -> Result<Self, DomainError> {
        token.map_or(Ok(Self::Kernel), |token| Ok(Self::Token(stretched(token)?)))
    }

    pub fn is_token(&self) -> bool {
        matches!(self, Self::Token(_))
    }

    pub(super) fn key(&self) -> Result<Digest, DomainError> {
        match self {
            Self::Token(key) => Ok(*key),
            Self::User => user_key(),
            Self::Kernel => Ok([0; 32]),
        }
    }

    /// Number of this kind in handshake messages.
    pub(super) fn kind(&self) -> u8 {
        match self {
            Self::Kernel => 0,
            Self::User => 1,
            Self::Token(_) => 2,
        }
    }

    /// Why a peer with the kind of secret `theirs` failed to prove this one.
    pub(super) fn mismatch_reason(&self, peer_kind: u8) -> String {
        match (self.is_token(), peer_kind == 2) {
            (true, true) => "the tokens differ; give both engines the same token".into(),
            (true, false) | (false, true) => {
                "one engine has a token and the other has none; give both the same token".into()
            }
            (false, false) => format!(
                "without a token only processes of one user (here {}) that share /dev/shm are \
                 peers, and the peer is of another user or in another container; give both engines \
                 the same token",
                rustix::process::geteuid().as_raw()
            ),
        }
    }
}

pub(super) fn nonce() -> Result<Nonce, DomainError> {
    let mut n = [0; 32];
    getrandom::fill(&mut n).map_err(|e| DomainError::Unavailable(format!("getrandom: {e}")))?;
    Ok(n)
}

pub(super) fn mac(key: &Digest, role: &[u8], parts: &[&[u8]]) -> Hmac<Sha256> {
    // HMAC takes keys of any length.
    let mut mac = <Hmac<Sha256> as KeyInit>::new_from_slice(key)
        .unwrap_or_else(|_| unreachable!("hmac takes any key"));
    for part in std::iter::once(&role).chain(parts) {
        mac.update(&(part.len() as u64).to_le_bytes());
        mac.update(part);
    }
    mac
}

/// A key that only the two sides of one handshake know. It seals further data on a wire that
/// strangers can write to.
#[derive(Clone)]
pub(crate) struct Session(Digest);

impl From<Hmac<Sha256>> for Session {
    fn from(mac: Hmac<Sha256>) -> Self {
        Self(mac.finalize().into_bytes().into())
    }
}

impl Session {
    /// Encrypts bytes and appends a mac. Call it once per handshake and `role`; roles separate the
    /// two directions. The initiator uses it before the acceptor has proven itself.
    pub fn seal(&self, role: &[u8], bytes: &[u8]) -> Vec<u8> {
        let mut sealed = self.masked(role, bytes);
        let sum = mac(&self.0, b"sealed", &[role, &sealed]).finalize().into_bytes();
        sealed.extend_from_slice(&sum);
        sealed
    }

    /// Decrypts what [`Self::seal`] made, if the mac is right.
    pub fn unseal(&self, role: &[u8], sealed: &[u8]) -> Result<Vec<u8>, DomainError> {
        let cut = sealed.len().checked_sub(size_of::<Digest>());
        let (bytes, sum) = cut.map(|n| sealed.split_at(n)).unwrap_or_default();
        mac(&self.0, b"sealed", &[role, bytes])
            .verify_slice(sum)
            .map(|()| self.masked(role, bytes))
            .map_err(|_| DomainError::Handshake("a message was changed on its way".into()))
    }

    /// XORs the bytes with a stream of macs over a counter.
    fn masked(&self, role: &[u8], bytes: &[u8]) -> Vec<u8> {
        let mut out = bytes.to_vec();
        for (block, number) in out.chunks_mut(size_of::<Digest>()).zip(0u64..) {
            let stream = mac(&self.0, b"mask", &[role, &number.to_le_bytes()]).finalize();
            block.iter_mut().zip(stream.into_bytes()).for_each(|(b, s)| *b ^= s);
        }
        out
    }
}
