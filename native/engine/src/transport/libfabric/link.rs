//! A link: what both sides of an authenticated connection know of each other.

use std::{
    collections::{HashMap, VecDeque},
    time::Duration,
};

use fabric_sys::libfabric::FiAddr;

use super::{place::Place, setup::Terms};
use crate::{
    api::RegionKey,
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

/// Before every frame: a number that the receiver has told this sender alone, for unconnected
/// endpoints hear whoever knows their address; and the frame's own number, for a frame is sent again
/// when the provider can't tell whether it was delivered.
pub(super) const SEAL: usize = 12;

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

/// Which of the latest frames have come: those that were sent again come once.
pub(super) struct Seen {
    /// Beyond the newest.
    next: u32,
    /// One bit for each of the latest, by number.
    bits: [u64; Seen::SPAN as usize / 64],
}

impl Seen {
    const SPAN: u32 = 1024;

    pub fn new() -> Self {
        Self { next: 0, bits: [0; Self::SPAN as usize / 64] }
    }

    /// Whether a frame is new; `None` if that can't be told any more.
    pub fn is_new(&mut self, number: u32) -> Option<bool> {
        let ahead = number.wrapping_sub(self.next);
        if ahead < Self::SPAN {
            for n in 0..=ahead {
                self.set(self.next.wrapping_add(n), false);
            }
            self.next = number.wrapping_add(1);
        } else if self.next.wrapping_sub(number) > Self::SPAN {
            return None;
        }
        Some(!self.set(number, true))
    }

    fn set(&mut self, number: u32, to: bool) -> bool {
        let at = (number % Self::SPAN) as usize;
        let (word, bit) = (&mut self.bits[at / 64], 1 << (at % 64));
        let was = *word & bit != 0;
        *word = if to { *word | bit } else { *word & !bit };
        was
    }
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
    /// The other side is known to know that the link is up.
    pub confirmed: bool,
    pub seal_in: u64,
    pub terms: Terms,
    pub mail: Mail,
    /// Frames that the provider had no room for: their contexts and lengths.
    pub pending: VecDeque<(u32, usize)>,
    /// Frames that it failed to deliver: they are sent again a little later.
    pub failed: Vec<(u32, usize)>,
    /// What it said when it failed.
    pub trouble: Option<String>,
    pub next_frame: u32,
    pub seen: Seen,
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
        self.spoke_at.after(peer_timeout / 4).min(self.heard_at.after(peer_timeout))
    }

    pub fn silence(&self, peer_timeout: Duration) -> DomainError {
        let trouble = self.trouble.as_ref().map_or(String::new(), |t| format!("; {t}"));
        DomainError::Gone(format!("nothing heard for {peer_timeout:?}{trouble}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_that_is_sent_again_comes_once() {
        let mut seen = Seen::new();
        for n in [0, 2, 1, 5, 1000, 3] {
            assert_eq!(seen.is_new(n), Some(true), "{n}");
            assert_eq!(seen.is_new(n), Some(false), "{n}");
        }
        assert_eq!(seen.is_new(4), Some(true));
        assert_eq!(seen.is_new(1800), Some(true));
        assert_eq!((seen.is_new(1000), seen.is_new(999)), (Some(false), Some(true)));
        assert_eq!((seen.is_new(5), seen.is_new(1 << 31)), (None, None));
    }

    #[test]
    fn numbers_of_frames_wrap() {
        let mut seen = Seen { next: u32::MAX - 1, ..Seen::new() };
        for n in [u32::MAX, 1, 0, u32::MAX - 1] {
            assert_eq!((seen.is_new(n), seen.is_new(n)), (Some(true), Some(false)), "{n}");
        }
    }
}
