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
    domain::{DomainError, NicKeys, Pinned, Pinner},
    memory::{device::Driver, RegionBook, RegionMemory, HIDDEN},
};

/// Registrations of at least so many bytes are ended by a thread that may take its time: many may end
/// at once, and all under one lock.
const LARGE: u64 = 1 << 20;

/// A region that the NIC knows. Fields in the order in which they go: the NIC lets go of the memory
/// before we do.
pub(super) struct Registered {
    /// Each `part` bytes long, but for the last.
    parts: Vec<Mr>,
    part: u64,
    /// What the NIC calls the region's first byte.
    iova: u64,
    /// Whether the GPU that the memory lies on must be flushed before what was written counts.
    flush: bool,
    region: Arc<RegionMemory>,
}

impl Registered {
    /// Registers a region, in several parts if it is larger than the NIC takes at once.
    fn new(device: &Device, region: &Arc<RegionMemory>) -> Result<Self, DomainError> {
        let part = device.limits.max_mr.max(4096);
        let base = region.base as u64;
        let iova = if device.limits.names { name_of(base)? } else { base };
        let (mut parts, mut offset, mut flush) = (Vec::new(), 0, false);
        while offset < region.len {
            let n = part.min(region.len - offset);
            let (base, iova) = (base + offset, iova + offset);
            parts.push(match region.location.cuda() {
                None => Mr::new(&device.pd, base as usize, n, (iova, PEERS))?,
                Some(range) => {
                    flush |= Driver::open()?.needs_flush(range.device)?;
                    let exported = range.dmabuf(base);
                    let dmabuf = exported.as_ref().map(|d| (d.fd.as_raw_fd(), d.offset));
                    let dmabuf = dmabuf.map_err(Clone::clone);
                    register_dmabuf(&device.pd, dmabuf, (base, n), iova)?
                }
            });
            offset += n;
        }
        // An old library has no names but addresses.
        let iova = parts.first().map_or(iova, |mr| mr.iova);
        Ok(Self { parts, part, iova, flush, region: Arc::clone(region) })
    }

    fn keys(&self) -> NicKeys {
        let mask = mask(self.region.key);
        let starts = (0..).map(|i| i * self.part);
        let keys = self.parts.iter().zip(starts).map(|(mr, offset)| {
            let (base, key) = (self.iova + offset, u64::from(mr.rkey ^ mask));
            RailKey { rail: 0, offset, base, key }
        });
        keys.collect()
    }

    /// Ends it; true if the NIC has let go of the memory (MR-1). If not, it is kept for good.
    pub fn end(mut self) -> bool {
        let released = self.parts.iter_mut().try_for_each(Mr::release);
        if let Err(error) = released {
            tracing::error!(region = ?self.region, %error, "the NIC keeps it; so do we");
            std::mem::forget(self);
            return false;
        }
        true
    }
}

/// What the NIC shall call memory at `base`: a NIC may give a later registration of the same memory
/// the key of an earlier one, and then only the name tells their holders apart (MR-2). Bits that
/// decide how large pages can be are left alone.
fn name_of(base: u64) -> Result<u64, DomainError> {
    let mut random = [0; 8];
    getrandom::fill(&mut random)
        .map_err(|e| DomainError::Unavailable(format!("getrandom: {e}")))?;
    let high = u64::from_le_bytes(random) & ((1 << 62) - 1);
    Ok(high & !(GIGABYTE - 1) | base & (GIGABYTE - 1))
}

const GIGABYTE: u64 = 1 << 30;

/// Registers memory, by any thread.
pub(super) struct VerbsPinner(pub Arc<Device>);

impl Pinner for VerbsPinner {
    fn pin(&self, region: &Arc<RegionMemory>) -> Result<Pinned, DomainError> {
        Ok(Box::new(Registered::new(&self.0, region)?))
    }
}

/// What becomes of a deregistration.
pub(super) enum Removed {
    Now,
    /// When this has ended.
    Slowly(Box<Registered>),
    /// The NIC keeps the memory.
    Never,
}

#[derive(Default)]
pub(super) struct Regions {
    by_index: Vec<Option<Registered>>,
    /// Those of transports' own, whose indices begin elsewhere.
    hidden: Vec<Option<Registered>>,
    /// GPUs whose memory must be flushed before what was written to it counts. Also when it is no
    /// longer registered: what was written before may be told of after.
    gpus: SmallVec<[i32; 1]>,
    /// The same, for the questions of peers whose access was refused.
    pub book: RegionBook,
}

impl Regions {
    /// Takes in what the pinner has made.
    pub fn add(
        &mut self,
        device: &Device,
        region: &Arc<RegionMemory>,
        pinned: Option<Pinned>,
    ) -> Result<NicKeys, DomainError> {
        let registered = match pinned.map(Pinned::downcast::<Registered>) {
            Some(Ok(registered)) => *registered,
            _ => Registered::new(device, region)?,
        };
        let keys = registered.keys();
        if let Some(range) = region.location.cuda().filter(|_| registered.flush) {
            if !self.gpus.contains(&range.device) {
                self.gpus.push(range.device);
            }
        }
        let (slots, i) = self.slots(region.key.index);
        if slots.len() <= i {
            slots.resize_with(i + 1, || None);
        }
        slots[i] = Some(registered);
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

    /// Takes a registration out, and ends it if that is quick.
    pub fn remove(&mut self, index: u32) -> Removed {
        self.book.remove(index);
        let (slots, i) = self.slots(index);
        let Some(r) = slots.get_mut(i).and_then(Option::take) else { return Removed::Now };
        match r.region.len >= LARGE {
            true => Removed::Slowly(Box::new(r)),
            false if r.end() => Removed::Now,
            false => Removed::Never,
        }
    }

    #[inline]
    pub fn has_gpus(&self) -> bool {
        !self.gpus.is_empty()
    }

    /// Waits until what NICs have written to GPU memory is visible to the GPUs.
    pub fn flush_gpus(&self) -> Result<(), DomainError> {
        let Some(driver) = Driver::in_use() else { return Ok(()) };
        self.gpus.iter().try_for_each(|device| driver.flush_rdma_writes(*device))
    }

    /// The local key for `addr` in a registration, what the NIC calls it, and how many bytes the key
    /// is good for.
    #[inline]
    pub fn local(&self, index: u32, addr: u64) -> Result<(u32, u64, u64), DomainError> {
        let at = |r: &Registered| {
            let offset = addr.checked_sub(r.region.base as u64)?;
            let (i, within) = match r.parts.len() {
                1 => (0, offset),
                _ => ((offset / r.part) as usize, offset % r.part),
            };
            let left = r.part.min(r.region.len - i as u64 * r.part).checked_sub(within)?;
            Some((r.parts.get(i)?.lkey, r.iova + offset, left)).filter(|_| left > 0)
        };
        self.get(index).and_then(at).ok_or_else(|| {
            DomainError::Refused(
                "the local memory is not registered with this NIC; files never are, they go over \
                 shm or tcp"
                    .into(),
            )
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
    (base, len): (u64, u64),
    iova: u64,
) -> Result<Mr, DomainError> {
    let refused = match dmabuf.and_then(|d| Mr::of_dmabuf(pd, d, iova, len)) {
        Ok(mr) => return Ok(mr),
        Err(e) => e,
    };
    Mr::new(pd, base as usize, len, (iova, PEERS)).map_err(|e| {
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
        let e = register_dmabuf(&device.pd, Ok((file.as_raw_fd(), 0)), (unmapped, 4096), unmapped);
        let e = e.unwrap_err().to_string();
        assert!(e.contains("by dma-buf") && e.contains("by address"), "{e}");
        assert!(e.contains("nvidia-peermem"), "{e}");
    }
}
