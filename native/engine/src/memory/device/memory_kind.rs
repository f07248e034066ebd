//! The kind of a region's memory, in three bits of its key. A descriptor thus tells writers the
//! kind, and nothing else of the memory.

use super::Location;
use crate::{api::RegionKey, memory::Backing};

/// The kind of a region's memory, by the agents that can reach it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MemoryKind {
    /// Host memory that every transport reaches.
    Host,
    /// Host memory that only its owner reaches: peers stage.
    OwnerOnly,
    /// GPU memory that other processes can't map.
    Device,
    /// GPU memory that other processes of the host can map.
    Exportable,
    /// A file, which only its owner reaches.
    File,
}

const MASK: u64 = 7;

impl MemoryKind {
    /// The kind of memory at `location`. With `stage_foreign`, peers stage memory that this engine
    /// did not allocate.
    pub fn of(location: &Location, backing: &Backing, stage_foreign: bool) -> Self {
        match (location.cuda(), backing) {
            (Some(_), _) if location.is_exportable() => Self::Exportable,
            (Some(_), _) => Self::Device,
            (None, _) if location.file().is_some() => Self::File,
            (None, Backing::Foreign) if stage_foreign => Self::OwnerOnly,
            (None, _) => Self::Host,
        }
    }

    /// Puts the kind into the random number of a key.
    pub fn mark(self, rkey: u64) -> u64 {
        rkey & !MASK
            | match self {
                Self::Host => 0,
                Self::OwnerOnly => 1,
                Self::Device => 2,
                Self::Exportable => 3,
                Self::File => 4,
            }
    }

    pub fn is_device(self) -> bool {
        matches!(self, Self::Device | Self::Exportable)
    }
}

impl RegionKey {
    #[inline]
    pub(crate) fn memory_kind(self) -> MemoryKind {
        match self.rkey & MASK {
            0 => MemoryKind::Host,
            1 => MemoryKind::OwnerOnly,
            2 => MemoryKind::Device,
            3 => MemoryKind::Exportable,
            // A later version may have further kinds, which only owners reach.
            _ => MemoryKind::File,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_keeps_its_nature_and_sixty_one_random_bits() {
        for memory_kind in [
            MemoryKind::Host,
            MemoryKind::OwnerOnly,
            MemoryKind::Device,
            MemoryKind::Exportable,
            MemoryKind::File,
        ] {
            for random in [0, u64::MAX, 0x1234_5678_9abc_def1] {
                let rkey = memory_kind.mark(random);
                assert_eq!(RegionKey { index: 0, rkey }.memory_kind(), memory_kind);
                assert_eq!(rkey >> 3, random >> 3);
            }
        }
    }
}
