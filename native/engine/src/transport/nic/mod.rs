//! Shared by the NIC transports: frames, messages in fragments, handshake fragments. No I/O; the
//! transports carry the bytes.

pub(crate) mod files;
pub(crate) mod frame;
pub(crate) mod handshake_fragments;
pub(crate) mod message_channel;
