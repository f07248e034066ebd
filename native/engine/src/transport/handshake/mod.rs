//! How two engines become sure of each other before anything else is said: protocol version, whose
//! life this is (MR-2), and that both know the token. Used by every software transport.
//!
//! ```text
//! initiator -> Hello    { versions, me, whom I want, nonce, extra }
//! acceptor  -> Welcome  { version, me, nonce, mac }            or Refusal
//! initiator -> Proof    { mac }
//! acceptor  -> Accepted                                        or Refusal
//! ```
//! What these messages say stays as it is in all versions: [`messages`].
//!
//! A mac is HMAC-SHA256, keyed with the token, over the role, the hello as it came, and all of the welcome but its
//! mac: nobody on the way can change a version, a name or an endpoint.

mod acceptor;
mod failure;
mod initiator;
mod keys;
mod messages;
#[cfg(test)]
mod tests;

#[cfg(all(test, not(loom)))]
pub(crate) use self::messages::samples;
pub(crate) use self::{
    acceptor::Acceptor,
    failure::{mourn, Failure},
    initiator::Initiator,
    keys::Session,
    messages::MAX_MESSAGE,
};
use crate::api::{EngineAddress, Versions, WIRE};

const WRONG_TOKEN: &str = "the tokens differ: give both engines the same token";

/// What a side brings to a handshake.
#[derive(Clone)]
pub(crate) struct Credentials {
    pub own: EngineAddress,
    pub token: Vec<u8>,
    pub versions: Versions,
}

impl Credentials {
    pub fn new(own: EngineAddress, token: Vec<u8>) -> Self {
        Self { own, token, versions: WIRE }
    }
}
