//! What a region's key tells a writer about the memory behind it: three bits of the random number, so
//! that a descriptor says it without saying more.

use super::Location;
use crate::{api::RegionKey, memory::Backing};

/// Who reaches a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Nature {
    /// Every transport.
    Plain,
    /// Its owner only: peers stage.
    Kept,
    /// A GPU; other processes can't map it.
    Device,
    /// A GPU; other processes of the host can map it.
    Exported,
    /// A file: its owner only.
    File,
}

const MASK: u64 = 7;

impl Nature {
    /// Of memory at `location`; `keep` if the kernel must not reach other people's memory.
    pub fn of(location: &Location, backing: &Backing, keep: bool) -> Self {
        match (location.cuda(), backing) {
            (Some(_), _) if location.is_exportable() => Self::Exported,
            (Some(_), _) => Self::Device,
            (None, _) if location.file().is_some() => Self::File,
            (None, Backing::Foreign) if keep => Self::Kept,
            (None, _) => Self::Plain,
        }
    }

    /// A key's random number with this in it.
    pub fn mark(self, rkey: u64) -> u64 {
        rkey & !MASK
            | match self {
                Self::Plain => 0,
                Self::Kept => 1,
                Self::Device => 2,
                Self::Exported => 3,
                Self::File => 4,
            }
    }

    pub fn is_device(self) -> bool {
        matches!(self, Self::Device | Self::Exported)
    }
}

impl RegionKey {
    #[inline]
    pub(crate) fn nature(self) -> Nature {
        match self.rkey & MASK {
            0 => Nature::Plain,
            1 => Nature::Kept,
            2 => Nature::Device,
            3 => Nature::Exported,
            // Of kinds to come, their owners know more than we do.
            _ => Nature::File,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_keeps_its_nature_and_sixty_one_random_bits() {
        for nature in [Nature::Plain, Nature::Kept, Nature::Device, Nature::Exported, Nature::File]
        {
            for random in [0, u64::MAX, 0x1234_5678_9abc_def1] {
                let rkey = nature.mark(random);
                assert_eq!(RegionKey { index: 0, rkey }.nature(), nature);
                assert_eq!(rkey >> 3, random >> 3);
            }
        }
    }
}
