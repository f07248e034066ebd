//! What the NIC transports share: small frames, messages in fragments, handshakes in pieces. No
//! I/O here: transports carry the bytes.

pub(crate) mod files;
pub(crate) mod frame;
pub(crate) mod mail;
pub(crate) mod pieces;
