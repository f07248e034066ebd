//! How two engines become sure of each other before anything else is said: protocol version, whose
//! life this is (MR-2), and that both know the same key. Used by every transport that reaches other processes.
//!
//! ```text
//! initiator -> Hello    { versions, me, whom I want, nonce, by what I prove myself, extra }
//! acceptor  -> Welcome  { version, me, nonce, by what I prove myself }      or Refusal
//! initiator -> Proof    { mac }
//! acceptor  -> Accepted { mac }                                             or Refusal
//! ```
//! What these messages say stays as it is in all versions: [`messages`].
//!
//! A mac is HMAC-SHA256 over the role, the hello and the welcome as they came: nobody on the way can change a version,
//! a name or an endpoint. Its key is the token's, stretched ([`token`]), or without one the user's ([`user_key`]). The
//! initiator proves itself first, so that a stranger that connects gets nothing to guess a token by.

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
    initiator::{Initiator, Pending, Welcomed},
    keys::{Secret, Session},
    messages::MAX_MESSAGE,
    token::stretched,
};
use crate::api::{EngineAddress, Versions, WIRE};

/// What a side brings to a handshake.
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
