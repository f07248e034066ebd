//! What proves a peer (IC-2), macs over what was said, and keys that follow from it.

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use super::{
    messages::{Digest, Nonce},
    token::stretched,
    user_key::user_key,
};
use crate::domain::DomainError;

/// What a peer must know, or be.
#[derive(Clone)]
pub(crate) enum Secret {
    /// The key of the configured token.
    Token(Digest),
    /// The key of this user on this host.
    User,
    /// Nothing: the kernel has said that the process at the other end is this user's.
    Kernel,
}

impl Secret {
    /// Of a transport where the kernel doesn't say who is at the other end. Without a token, only processes of the same
    /// user on the same host are peers.
    pub fn new(token: Option<&[u8]>) -> Result<Self, DomainError> {
        match token {
            Some(token) => Ok(Self::Token(stretched(token)?)),
            // A folder that is missing is better found now than by the first peer.
            None => user_key().map(|_| Self::User),
        }
    }

    /// Of a transport that asks the kernel for the peer's user before the first byte, without a token.
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

    /// As handshakes tell it.
    pub(super) fn kind(&self) -> u8 {
        match self {
            Self::Kernel => 0,
            Self::User => 1,
            Self::Token(_) => 2,
        }
    }

    /// Why a peer with such a secret didn't prove this one.
    pub(super) fn differs(&self, theirs: u8) -> String {
        match (self.is_token(), theirs == 2) {
            (true, true) => "the tokens differ: give both engines the same token".into(),
            (true, false) | (false, true) => {
                "one engine has a token and the other has none: give both the same token".into()
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

pub(super) fn mac(key: &Digest, role: &[u8], said: &[&[u8]]) -> Hmac<Sha256> {
    // HMAC takes keys of any length.
    let mut mac = <Hmac<Sha256> as KeyInit>::new_from_slice(key)
        .unwrap_or_else(|_| unreachable!("hmac takes any key"));
    for part in std::iter::once(&role).chain(said) {
        mac.update(&(part.len() as u64).to_le_bytes());
        mac.update(part);
    }
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
    /// The bytes, hidden, with a mac behind them: the initiator says them before the acceptor has proven itself.
    /// Once per handshake and `role`, which tells the two directions apart.
    pub fn seal(&self, role: &[u8], bytes: &[u8]) -> Vec<u8> {
        let mut sealed = self.masked(role, bytes);
        let sum = mac(&self.0, b"sealed", &[role, &sealed]).finalize().into_bytes();
        sealed.extend_from_slice(&sum);
        sealed
    }

    /// The bytes before the mac, if it is right.
    pub fn unseal(&self, role: &[u8], sealed: &[u8]) -> Result<Vec<u8>, DomainError> {
        let cut = sealed.len().checked_sub(size_of::<Digest>());
        let (bytes, sum) = cut.map(|n| sealed.split_at(n)).unwrap_or_default();
        mac(&self.0, b"sealed", &[role, bytes])
            .verify_slice(sum)
            .map(|()| self.masked(role, bytes))
            .map_err(|_| DomainError::Handshake("a message was changed on its way".into()))
    }

    /// The bytes under a stream of macs over a counter, or from under it.
    fn masked(&self, role: &[u8], bytes: &[u8]) -> Vec<u8> {
        let mut out = bytes.to_vec();
        for (block, number) in out.chunks_mut(size_of::<Digest>()).zip(0u64..) {
            let stream = mac(&self.0, b"mask", &[role, &number.to_le_bytes()]).finalize();
            block.iter_mut().zip(stream.into_bytes()).for_each(|(b, s)| *b ^= s);
        }
        out
    }
}
