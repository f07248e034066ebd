//! A link: what both sides of an authenticated connection know of each other.

use std::{
    collections::{HashMap, VecDeque},
    time::Duration,
};

use fabric_sys::libfabric::FiAddr;

use super::{
    delivery::{Seen, Sent},
    place::Place,
    setup::Terms,
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
/// Receive slots that one link may use up.
pub(super) const LINK_SLOTS: usize = (FRAGMENTS + SPARE) as usize;

/// Before every frame: a number that the receiver has told this sender alone, for unconnected
/// endpoints hear whoever knows their address; the frame's own number, for it may be sent again; and
/// which frames of the receiver's have come.
pub(super) const SEAL: usize = 8 + 4 + Seen::BYTES;

/// Where one side takes frames.
pub(super) fn receive_limits() -> ReceiveLimits {
    ReceiveLimits { slot_bytes: (super::slots::SLOT - SEAL) as u32, slots: FRAGMENTS, imms: 0 }
}

/// Questions about accesses that the NIC has refused, in their order.
#[derive(Default)]
pub(super) struct Asking {
    /// Operations, and what the provider said.
    pub ops: VecDeque<u32>,
    /// The first one's question is on its way.
    pub asked: bool,
    /// Where peers are asked first: how far a region may be written, by what they said.
    pub vouched: HashMap<RegionKey, u64>,
    /// A fence came while the question was on its way: the answer holds for that access alone.
    pub outdated: bool,
}

/// See [`super::retire`].
#[derive(Default)]
pub(super) struct Fences {
    /// Ours: the last one sent, the last one answered, the one that somebody waits for.
    pub sent: u32,
    pub done: u32,
    pub wanted: u32,
    /// Losses of peers when it was sent.
    pub losses: u64,
    /// The peer's, which waits for operations of ours.
    pub due: Option<u32>,
}

/// A frame in a transmit slot.
#[derive(Clone, Copy)]
pub(super) struct Filled {
    pub context: u32,
    pub number: u32,
    /// Bytes, with the seal.
    pub len: usize,
}

pub(super) struct Link {
    pub id: LinkId,
    pub peer: PeerIdentity,
    /// Which endpoint of the peer's is at the other end.
    pub endpoint: usize,
    pub place: Place,
    /// Its place among the addresses, and what the library calls it.
    pub address: usize,
    pub addr: FiAddr,
    pub exchange: Exchange,
    /// The acceptor's last word, to be repeated if it was lost.
    pub accepted: Option<HandshakeMessage>,
    /// The other side is known to know that the link is up.
    pub confirmed: bool,
    pub seal_in: u64,
    pub terms: Terms,
    pub channel: MessageChannel,
    /// Frames that the provider had no room for.
    pub pending: VecDeque<Filled>,
    /// What it said when it failed to deliver a frame.
    pub trouble: Option<String>,
    pub sent: Sent,
    pub seen: Seen,
    /// When the peer must have been told what has come.
    pub confirm_at: Time,
    pub heard_at: Time,
    pub spoke_at: Time,
    /// What the library holds of it: pieces and their bytes, transmit slots.
    pub pieces: usize,
    pub bytes: u64,
    pub frames: usize,
    /// Counted writes of ours that are under way.
    pub imms: u32,
    pub asking: Asking,
    pub fences: Fences,
}

impl Link {
    /// When it wants attention even if nothing happens: to show life, or to miss it.
    pub fn next_timer(&self, peer_timeout: Duration) -> Time {
        let life = self.spoke_at.after(peer_timeout / 4).min(self.heard_at.after(peer_timeout));
        life.min(self.sent.next_due()).min(self.confirm_at)
    }

    /// Writes what goes before a frame.
    pub fn seal(&self, number: u32, slot: &mut [u8]) {
        slot[..8].copy_from_slice(&self.terms.seal.to_le_bytes());
        slot[8..12].copy_from_slice(&number.to_le_bytes());
        slot[12..SEAL].copy_from_slice(&self.seen.encode());
    }

    pub fn silence(&self, peer_timeout: Duration) -> DomainError {
        let trouble = self.trouble.as_ref().map_or(String::new(), |t| format!("; {t}"));
        DomainError::Gone(format!("nothing heard for {peer_timeout:?}{trouble}"))
    }
}
