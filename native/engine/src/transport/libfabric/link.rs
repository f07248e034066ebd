//! A link: what both sides of an authenticated connection know of each other.

use std::{collections::VecDeque, time::Duration};

use fabric_sys::libfabric::FiAddr;

use super::{place::Place, setup::Terms};
use crate::{
    domain::{DomainError, LinkId, PeerIdentity},
    time::Time,
    transport::nic::{
        frame::Exchange,
        mail::{Mail, Places, SPARE},
        pieces::Letter,
    },
};

/// Fragments that may be under way in one direction.
pub(super) const FRAGMENTS: u32 = 8;
/// Receive slots that one link may use up.
pub(super) const LINK_SLOTS: usize = (FRAGMENTS + SPARE) as usize;

/// Before every frame: a number that the receiver has told this sender alone. Unconnected endpoints
/// hear whoever knows their address.
pub(super) const SEAL: usize = 8;

/// Where one side takes frames.
pub(super) fn places() -> Places {
    Places { slot_bytes: (super::slots::SLOT - SEAL) as u32, slots: FRAGMENTS, imms: 0 }
}

/// Questions about accesses that the NIC has refused, in their order.
#[derive(Default)]
pub(super) struct Asking {
    /// Operations, and what the provider said.
    pub ops: VecDeque<u32>,
    /// The first one's question is on its way.
    pub asked: bool,
}

/// See [`super::retire`].
#[derive(Default)]
pub(super) struct Fences {
    /// Ours: the last one sent, the last one answered, the one that somebody waits for.
    pub sent: u32,
    pub done: u32,
    pub wanted: u32,
    /// The peer's: its number, and our operations that it waits for.
    pub due: Option<(u32, u32)>,
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
    pub accepted: Option<Letter>,
    pub seal_in: u64,
    pub terms: Terms,
    pub mail: Mail,
    /// A frame that the provider had no room for: its slot and length.
    pub pending: Option<(u32, usize)>,
    pub heard_at: Time,
    pub spoke_at: Time,
    /// Bytes and counted writes of ours that are under way.
    pub bytes: u64,
    pub imms: u32,
    pub asking: Asking,
    pub fences: Fences,
}

impl Link {
    /// When it wants attention even if nothing happens: to show life, or to miss it.
    pub fn next_timer(&self, peer_timeout: Duration) -> Time {
        self.spoke_at.after(peer_timeout / 4).min(self.heard_at.after(peer_timeout))
    }

    pub fn silence(peer_timeout: Duration) -> DomainError {
        DomainError::LinkDown(format!("nothing heard for {peer_timeout:?}"))
    }
}
