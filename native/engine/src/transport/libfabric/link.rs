//! A link: the state of an authenticated connection.

use std::{
    collections::{HashMap, VecDeque},
    time::Duration,
};

use fabric_sys::libfabric::FiAddr;

use super::{
    address::EndpointAddress,
    delivery::{ReceivedFrames, UnconfirmedFrames},
    handshake::LinkTerms,
};
use crate::{
    api::RegionKey,
    domain::{DomainError, LinkId, PeerIdentity},
    time::Time,
    transport::nic::{
        frame::Exchange,
        handshake_fragments::HandshakeMessage,
        message_channel::{MessageChannel, ReceiveLimits, SPARE},
    },
};

/// Fragments that may be under way in one direction.
pub(super) const FRAGMENTS: u32 = 8;
/// Receive slots that one link may use.
pub(super) const LINK_SLOTS: usize = (FRAGMENTS + SPARE) as usize;

/// Bytes before every frame: a secret number that the receiver gave this sender, because
/// unconnected endpoints receive from any sender; the frame's number, because it may be repeated;
/// and confirmations of the receiver's frames.
pub(super) const SEAL: usize = 8 + 4 + ReceivedFrames::BYTES;

/// Limits of the frames that one side receives.
pub(super) fn receive_limits() -> ReceiveLimits {
    ReceiveLimits { slot_bytes: (super::slots::SLOT - SEAL) as u32, slots: FRAGMENTS, imms: 0 }
}

/// Queries about accesses, in order.
#[derive(Default)]
pub(super) struct AccessQueries {
    /// Operations whose access is queried.
    pub ops: VecDeque<u32>,
    /// Whether the query of the first one is under way.
    pub in_flight: bool,
    /// With queries before accesses: the limit up to which the peer has allowed each region.
    pub allowed_up_to: HashMap<RegionKey, u64>,
    /// A fence arrived during the query: its answer holds for that access alone.
    pub outdated: bool,
}

/// Fences; see [`super::regions`].
#[derive(Default)]
pub(super) struct Fences {
    /// Local fences: the last one sent, answered, and requested.
    pub sent: u32,
    pub answered: u32,
    pub requested: u32,
    /// Number of lost peers when it was sent.
    pub losses: u64,
    /// The peer's fence that waits for local operations.
    pub due: Option<u32>,
}

/// A frame in a transmit slot.
#[derive(Clone, Copy)]
pub(super) struct FilledSlot {
    pub context: u32,
    pub number: u32,
    /// Bytes, with the seal.
    pub len: usize,
}

pub(super) struct Link {
    pub id: LinkId,
    pub peer: PeerIdentity,
    /// The peer's endpoint at the other end.
    pub endpoint: usize,
    pub remote: EndpointAddress,
    /// Index of its address, and the library's number of it.
    pub address: usize,
    pub addr: FiAddr,
    pub exchange: Exchange,
    /// The acceptor's last answer, to be repeated if it was lost.
    pub accepted: Option<HandshakeMessage>,
    /// Whether the peer is known to have the link up.
    pub confirmed: bool,
    pub seal_in: u64,
    pub terms: LinkTerms,
    pub channel: MessageChannel,
    /// Frames that the provider had no room for.
    pub pending: VecDeque<FilledSlot>,
    /// The provider's last error for a frame.
    pub last_error: Option<String>,
    pub unconfirmed: UnconfirmedFrames,
    pub received: ReceivedFrames,
    /// When received frames must be confirmed.
    pub confirm_at: Time,
    pub received_at: Time,
    pub sent_at: Time,
    /// When a message of the peer was last delivered.
    pub delivered_at: Time,
    /// Chunks that the library holds for the link. `bytes`: their bytes; `frames`: transmit slots.
    pub chunks: usize,
    pub bytes: u64,
    pub frames: usize,
    /// Local counted writes under way.
    pub imms: u32,
    pub queries: AccessQueries,
    pub fences: Fences,
}

impl Link {
    /// The next time for a heartbeat, a confirmation, a repetition, or for the peer's timeout.
    pub fn next_timer(&self, peer_timeout: Duration) -> Time {
        let due_at = self.sent_at.after(peer_timeout / 4).min(self.received_at.after(peer_timeout));
        due_at.min(self.unconfirmed.next_due()).min(self.confirm_at)
    }

    /// Writes the bytes before a frame.
    pub fn seal(&self, number: u32, slot: &mut [u8]) {
        slot[..8].copy_from_slice(&self.terms.seal.to_le_bytes());
        slot[8..12].copy_from_slice(&number.to_le_bytes());
        slot[12..SEAL].copy_from_slice(&self.received.encode());
    }

    /// The error for a peer that sent nothing within `peer_timeout`.
    pub fn silent_error(&self, peer_timeout: Duration) -> DomainError {
        let last_error = self.last_error.as_ref().map_or(String::new(), |t| format!("; {t}"));
        DomainError::Gone(format!("nothing received for {peer_timeout:?}{last_error}"))
    }
}
