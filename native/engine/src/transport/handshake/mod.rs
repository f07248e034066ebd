//! The handshake that authenticates two engines before any other message: protocol version,
//! incarnation (MR-2) and the shared key. Every transport that reaches other processes uses it.
//!
//! ```text
//! initiator -> Hello    { versions, own address, acceptor's id, nonce, kind of secret, extra }
//! acceptor  -> Welcome  { version, own address, nonce, kind of secret }     or Refusal
//! initiator -> Proof    { mac }
//! acceptor  -> Accepted { mac }                                             or Refusal
//! ```
//! [`messages`] stay the same in all versions.
//!
//! A mac is HMAC-SHA256 over the role, the hello and the welcome as received, so a third party
//! cannot change a version, a name or an endpoint. Its key is the stretched token ([`token`]) or,
//! without a token, the user's key ([`user_key`]). The initiator proves itself first, so a stranger
//! that connects receives nothing to guess a token by.

mod acceptor;
mod failure;
mod initiator;
mod keys;
mod messages;
#[cfg(test)]
mod tests;
mod token;
mod user_key;

#[cfg(all(test, not(loom)))]
pub(crate) use self::messages::samples;
#[cfg(any(test, fuzzing))]
pub(crate) use self::messages::sealed;
pub(crate) use self::{
    acceptor::Acceptor,
    failure::Failure,
    initiator::{Initiator, UnprovenAcceptor, UnprovenWelcome},
    keys::{Secret, Session},
    messages::MAX_MESSAGE,
    token::stretched,
};
use crate::api::{EngineAddress, Versions, WIRE};

/// One side's address, secret and supported versions.
#[derive(Clone)]
pub(crate) struct Credentials {
    pub own: EngineAddress,
    pub secret: Secret,
    pub versions: Versions,
}

impl Credentials {
    pub fn new(own: EngineAddress, secret: Secret) -> Self {
        Self { own, secret, versions: WIRE }
    }
}
