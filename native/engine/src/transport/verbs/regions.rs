//! Registered memory: what peers are shown, and what local requests need.

use std::{
    os::fd::{AsRawFd, RawFd},
    sync::Arc,
};

use smallvec::SmallVec;

use super::{
    device::Device,
    memory::{Mr, PEERS},
    post::mask,
    raw::Pd,
};
use crate::{
    api::RailKey,
    domain::{DomainError, NicKeys, Quiet},
    memory::{device::Driver, RegionBook, RegionMemory, HIDDEN},
};

/// Fields in the order in which they go: the NIC lets go of the memory before we do.
struct Registered {
    /// Each `part` bytes long, but for the last.
    parts: Vec<Mr>,
    part: u64,
    region: Arc<RegionMemory>,
}

#[derive(Default)]
pub(super) struct Regions {
    by_index: Vec<Option<Registered>>,
    /// Those of transports' own, whose indices begin elsewhere.
    hidden: Vec<Option<Registered>>,
    /// GPUs whose memory must be flushed before what was written to it counts, and how many regions
    /// of it there are.
    gpus: SmallVec<[(i32, usize); 1]>,
    /// The same, for the questions of peers whose access was refused.
    pub book: RegionBook,
}

impl Regions {
    /// Registers a region, in several parts if it is larger than the NIC takes at once.
    pub fn add(
        &mut self,
        device: &Device,
        region: &Arc<RegionMemory>,
    ) -> Result<NicKeys, DomainError> {
        let part = device.limits.max_mr.max(4096);
        let mut parts = Vec::new();
        let mut keys = NicKeys::new();
        let (mut offset, mut flush) = (0, false);
        while offset < region.len {
            let n = part.min(region.len - offset);
            let base = region.base as u64 + offset;
            let mr = match region.location.cuda() {
                None => Mr::new(&device.pd, base as usize, n, PEERS)?,
                Some(range) => {
                    flush |= Driver::open()?.needs_flush(range.device)?;
                    let exported = range.dmabuf(base);
                    let dmabuf = exported.as_ref().map(|d| (d.fd.as_raw_fd(), d.offset));
                    register_dmabuf(&device.pd, dmabuf.map_err(Clone::clone), n, base)?
                }
            };
            let key = u64::from(mr.rkey ^ mask(region.key));
            keys.push(RailKey { rail: 0, offset, base, key });
            parts.push(mr);
            offset += n;
        }
        let (slots, i) = self.slots(region.key.index);
        if slots.len() <= i {
            slots.resize_with(i + 1, || None);
        }
        slots[i] = Some(Registered { region: Arc::clone(region), parts, part });
        if let Some(range) = region.location.cuda().filter(|_| flush) {
            match self.gpus.iter_mut().find(|(device, _)| *device == range.device) {
                Some((_, regions)) => *regions += 1,
                None => self.gpus.push((range.device, 1)),
            }
        }
        self.book.insert(region);
        Ok(keys)
    }

    fn slots(&mut self, index: u32) -> (&mut Vec<Option<Registered>>, usize) {
        let slots = if index & HIDDEN == 0 { &mut self.by_index } else { &mut self.hidden };
        (slots, (index & !HIDDEN) as usize)
    }

    #[inline]
    fn get(&self, index: u32) -> Option<&Registered> {
        let slots = if index & HIDDEN == 0 { &self.by_index } else { &self.hidden };
        slots.get((index & !HIDDEN) as usize)?.as_ref()
    }

    /// Ends a registration. The NIC has let go of the memory when the library says so (MR-1); if it
    /// doesn't, the memory is kept.
    pub fn remove(&mut self, index: u32) -> Quiet {
        self.book.remove(index);
        let (slots, i) = self.slots(index);
        let Some(slot) = slots.get_mut(i) else { return Quiet::Now };
        let Some(r) = slot else { return Quiet::Now };
        for mr in &mut r.parts {
            if let Err(error) = mr.release() {
                tracing::error!(region = ?r.region, %error, "the NIC keeps it; so do we");
                return Quiet::Later;
            }
        }
        let location = r.region.location.clone();
        *slot = None;
        if let Some(range) = location.cuda() {
            for (_, regions) in self.gpus.iter_mut().filter(|(device, _)| *device == range.device) {
                *regions -= 1;
            }
            self.gpus.retain(|(_, regions)| *regions > 0);
        }
        Quiet::Now
    }

    #[inline]
    pub fn has_gpus(&self) -> bool {
        !self.gpus.is_empty()
    }

    /// Waits until what NICs have written to GPU memory is visible to the GPUs.
    pub fn flush_gpus(&self) -> Result<(), DomainError> {
        let Some(driver) = Driver::in_use() else { return Ok(()) };
        self.gpus.iter().try_for_each(|(device, _)| driver.flush_rdma_writes(*device))
    }

    /// The local key for `addr` in a registration, and how many bytes it is good for.
    #[inline]
    pub fn local(&self, index: u32, addr: u64) -> Result<(u32, u64), DomainError> {
        let at = |r: &Registered| {
            let offset = addr.checked_sub(r.region.base as u64)?;
            let (i, within) = match r.parts.len() {
                1 => (0, offset),
                _ => ((offset / r.part) as usize, offset % r.part),
            };
            let left = r.part.min(r.region.len - i as u64 * r.part).checked_sub(within)?;
            Some((r.parts.get(i)?.lkey, left)).filter(|_| left > 0)
        };
        self.get(index).and_then(at).ok_or_else(|| {
            DomainError::Refused("the local memory is not registered with this NIC".into())
        })
    }

    /// Whether the CPU may read the region, so that small writes can carry its bytes.
    #[inline]
    pub fn is_readable(&self, index: u32) -> bool {
        self.get(index).is_some_and(|r| r.region.location.cuda().is_none())
    }
}

/// Registers device memory: by its dma-buf, or, where the kernel or the NIC has no such thing, by
/// its address, which the driver's peer memory module must then know.
fn register_dmabuf(
    pd: &Arc<Pd>,
    dmabuf: Result<(RawFd, u64), DomainError>,
    len: u64,
    iova: u64,
) -> Result<Mr, DomainError> {
    let refused = match dmabuf.and_then(|d| Mr::of_dmabuf(pd, d, iova, len)) {
        Ok(mr) => return Ok(mr),
        Err(e) => e,
    };
    Mr::new(pd, iova as usize, len, PEERS).map_err(|e| {
        DomainError::Unavailable(format!(
            "device memory can't be registered: by dma-buf: {refused}; by address: {e}; load \
             nvidia-peermem, or use a kernel and a driver with dma-buf"
        ))
    })
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Needs a NIC; soft-RoCE takes no dma-buf, so that both ways fail and both reasons are told.
    #[test]
    #[ignore = "needs an RDMA device"]
    fn memory_that_no_way_leads_to_says_both_reasons() {
        let config = crate::api::NicConfig::default();
        let (_, chosen) = super::super::discover::machine(&config);
        let chosen = chosen.into_iter().next().expect("a device");
        let device = Device::open(chosen, &config, std::time::Duration::from_secs(2)).unwrap();
        let file = std::fs::File::open("/dev/null").unwrap();
        let unmapped = 1u64 << 46;
        let e = register_dmabuf(&device.pd, Ok((file.as_raw_fd(), 0)), 4096, unmapped);
        let e = e.unwrap_err().to_string();
        assert!(e.contains("by dma-buf") && e.contains("by address"), "{e}");
        assert!(e.contains("nvidia-peermem"), "{e}");
    }
}
