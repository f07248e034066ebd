//! Symmetric memory: every rank has one region of the same length; an address is a rank and an
//! offset (uccl-ep §3.2).

use fabric_engine::{
    api::RegionDescriptor, Local, Peer, Region, Remote, RemoteRegion, TransferEngine,
};

use crate::error::{ProxyError, Result};

/// The parts of all ranks, as one engine sees them.
#[derive(Debug)]
pub struct SymmetricMemory {
    local: Region,
    rank: usize,
    parts: Vec<Option<RemoteRegion>>,
}

impl SymmetricMemory {
    /// `local` is the part of `rank`, registered with the engine that writes from it.
    ///
    /// # Errors
    /// [`ProxyError::Rank`].
    pub fn new(local: Region, rank: usize, ranks: usize) -> Result<Self> {
        check_rank(rank, ranks)?;
        Ok(Self { local, rank, parts: vec![None; ranks] })
    }

    /// Sets the part of `rank`; replaces that of an earlier incarnation.
    ///
    /// # Errors
    /// [`ProxyError::Rank`], [`ProxyError::UnequalMemory`], and the engine's error about the
    /// descriptor.
    pub fn set(
        &mut self,
        engine: &TransferEngine,
        rank: usize,
        descriptor: &RegionDescriptor,
    ) -> Result<&Peer> {
        check_rank(rank, self.parts.len())?;
        if descriptor.len != self.local.len() {
            let (len, local) = (descriptor.len, self.local.len());
            return Err(ProxyError::UnequalMemory { rank, len, local });
        }
        let part = engine.import(descriptor)?;
        Ok(self.parts[rank].insert(part).peer())
    }

    /// Removes the part of a rank.
    pub fn clear(&mut self, rank: usize) {
        if let Some(part) = self.parts.get_mut(rank) {
            *part = None;
        }
    }

    /// Bytes of each part.
    pub fn nbytes(&self) -> u64 {
        self.local.len()
    }

    pub fn ranks(&self) -> usize {
        self.parts.len()
    }

    /// `len` bytes of this rank's part.
    ///
    /// # Errors
    /// [`ProxyError::OutOfBounds`].
    #[inline]
    pub fn local(&self, offset: u64, len: u64) -> Result<Local<'_>> {
        self.check(self.rank, offset, len)?;
        Ok(Local { region: &self.local, offset })
    }

    /// `len` bytes of the part of any rank, including this one.
    ///
    /// # Errors
    /// [`ProxyError::Rank`], [`ProxyError::NotConnected`], [`ProxyError::OutOfBounds`].
    #[inline]
    pub fn remote(&self, rank: usize, offset: u64, len: u64) -> Result<Remote<'_>> {
        check_rank(rank, self.parts.len())?;
        self.check(rank, offset, len)?;
        let region = self.parts[rank].as_ref().ok_or(ProxyError::NotConnected { rank })?;
        Ok(Remote { region, offset })
    }

    #[inline]
    fn check(&self, rank: usize, offset: u64, len: u64) -> Result<()> {
        let limit = self.local.len();
        match offset.checked_add(len).is_some_and(|end| end <= limit) {
            true => Ok(()),
            false => Err(ProxyError::OutOfBounds { rank, offset, len, limit }),
        }
    }
}

#[inline]
pub(crate) fn check_rank(rank: usize, ranks: usize) -> Result<()> {
    match rank < ranks {
        true => Ok(()),
        false => Err(ProxyError::Rank { rank, ranks }),
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use fabric_engine::{api::EngineConfig, simulation::SimNet, transport::sim::SimConfig};

    use super::*;

    #[test]
    fn addresses_outside_a_joined_ranks_part_are_refused() {
        let mut net = SimNet::new(SimConfig::default());
        let engines: Vec<_> =
            (0..2).map(|_| net.engine(EngineConfig::default()).unwrap()).collect();
        let parts: Vec<_> = engines.iter().map(|e| e.alloc(4096).unwrap()).collect();
        let mut memory = SymmetricMemory::new(parts[0].clone(), 0, 3).unwrap();
        for (rank, part) in parts.iter().enumerate() {
            memory.set(&engines[0], rank, &part.descriptor()).unwrap();
        }
        assert!(memory.remote(1, 4032, 64).is_ok() && memory.local(0, 4096).is_ok());
        let refused = |rank, offset, len| memory.remote(rank, offset, len).unwrap_err().to_string();
        assert_eq!(refused(3, 0, 1), "rank 3 is out of range [0, 3)");
        assert_eq!(refused(2, 0, 1), "rank 2 is not connected; give its descriptor to join()");
        assert_eq!(
            refused(1, 4090, 64),
            "rank 1: bytes 4090..4154 exceed its 4096 bytes of symmetric memory"
        );
        for (offset, len) in [(u64::MAX, 2), (4096, 1), (0, 4097)] {
            let error = memory.remote(1, offset, len).unwrap_err();
            assert!(matches!(error, ProxyError::OutOfBounds { .. }), "{error}");
            assert!(memory.local(offset, len).is_err());
        }
        let short = engines[1].alloc(4095).unwrap().descriptor();
        let unequal = memory.set(&engines[0], 1, &short).unwrap_err();
        assert_eq!(unequal, ProxyError::UnequalMemory { rank: 1, len: 4095, local: 4096 });
        assert!(SymmetricMemory::new(parts[0].clone(), 3, 3).is_err());
    }
}
