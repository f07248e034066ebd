//! KV cache transfer: which bytes of which pages go where, and the protocol that moves them.
//!
//! [`layout`] says what one rank's cache looks like. It is what ranks tell each other when they meet.
#![forbid(unsafe_code)]

pub mod layout;
pub mod pairing;
