//! The 26 bits of a tagged immediate: which write arrived.
//!
//! | bits  | field       |                                                            |
//! |-------|-------------|------------------------------------------------------------|
//! | 16-25 | source      | the rank that wrote                                        |
//! | 12-15 | incarnation | of that rank, modulo 16: an earlier incarnation is ignored (IC-6) |
//! | 10-11 | kind        | data, atomic, credit, notice                               |
//! | 5-9   | channel     |                                                            |
//! | 0-4   | epoch       | of data and atomics; which notice                          |

use fabric_engine::api::{Imm, TAG_BITS};

use crate::command::{Scope, CHANNELS, RANKS};

/// Epochs of a channel that may be under way at a time; see [`order`](crate::order).
pub const EPOCHS: u64 = 32;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A write of an epoch.
    Data,
    /// The atomic that ends an epoch is in its slot of the control ring.
    Atomic,
    /// The receiver returns [`order::CREDIT`](crate::order::CREDIT) epochs of this channel.
    Credit,
    /// See [`Notice`].
    Notice,
}

/// What a rank says without data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Notice {
    /// It has entered a barrier.
    Entered(Scope),
    /// It has joined the receiver: it takes what that sends.
    Joined,
    /// It has masked the receiver: it takes nothing of it any more.
    Masked,
}

impl Notice {
    const ALL: [Self; 4] =
        [Self::Entered(Scope::All), Self::Entered(Scope::Rail), Self::Joined, Self::Masked];

    pub fn epoch(self) -> u8 {
        match self {
            Self::Entered(Scope::All) => 0,
            Self::Entered(Scope::Rail) => 1,
            Self::Joined => 2,
            Self::Masked => 3,
        }
    }
}

/// Incarnations of a rank that tags distinguish.
pub(crate) const TAG_INCARNATIONS: u32 = 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tag {
    pub source: u16,
    /// Below [`TAG_INCARNATIONS`].
    pub incarnation: u8,
    pub kind: Kind,
    pub channel: u8,
    /// Below [`EPOCHS`].
    pub epoch: u8,
}

const _: () =
    assert!(RANKS * TAG_INCARNATIONS as usize * 4 * CHANNELS * EPOCHS as usize == 1 << TAG_BITS);

impl Tag {
    #[inline]
    pub fn imm(self) -> Imm {
        let value = u32::from(self.source) << 16
            | u32::from(self.incarnation) << 12
            | (self.kind as u32) << 10
            | u32::from(self.channel) << 5
            | u32::from(self.epoch);
        Imm::tagged(value).expect("its fields are within their bits")
    }

    #[inline]
    pub fn of(value: u32) -> Self {
        Self {
            source: (value >> 16) as u16 & (RANKS as u16 - 1),
            incarnation: (value >> 12) as u8 & (TAG_INCARNATIONS as u8 - 1),
            kind: match value >> 10 & 3 {
                0 => Kind::Data,
                1 => Kind::Atomic,
                2 => Kind::Credit,
                _ => Kind::Notice,
            },
            channel: (value >> 5) as u8 & (CHANNELS as u8 - 1),
            epoch: value as u8 & (EPOCHS as u8 - 1),
        }
    }

    /// `None` for a notice that there isn't.
    pub fn notice(self) -> Option<Notice> {
        Notice::ALL.into_iter().find(|notice| notice.epoch() == self.epoch)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_tag_survives_its_26_bits() {
        for value in (0..1 << TAG_BITS).step_by(997).chain([(1 << TAG_BITS) - 1]) {
            assert_eq!(Tag::of(value).imm(), Imm::tagged(value).unwrap());
        }
    }

    #[test]
    fn only_what_a_notice_says_is_one() {
        let of = |epoch| Tag { epoch, ..Tag::of(3 << 10) }.notice();
        assert!(Notice::ALL.iter().all(|notice| of(notice.epoch()) == Some(*notice)));
        assert!((4..EPOCHS as u8).all(|epoch| of(epoch).is_none()));
    }
}
