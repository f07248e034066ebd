//! Registered memory: keys for peers, and keys for local requests.

use std::{
    os::fd::{AsRawFd, RawFd},
    sync::Arc,
};

use smallvec::SmallVec;

use super::{
    device::Device,
    memory::{Mr, PEER_ACCESS},
    post::mask,
    raw::Pd,
};
use crate::{
    api::RailKey,
    domain::{DomainError, NicKeys, Pinned, Pinner},
    memory::{device::Driver, RegionBook, RegionMemory, FIRST_INTERNAL_INDEX},
};

/// Bytes from which a registration is ended on a helper thread: ending one takes long, and many may
/// end at once under one lock.
const LARGE: u64 = 1 << 20;

/// A region that is registered with the NIC. Field order is drop order: the registrations end
/// before the memory is released.
pub(super) struct Registered {
    /// Registrations of `part` bytes each; the last may be shorter.
    parts: Vec<Mr>,
    part: u64,
    /// The NIC's address of the region's first byte.
    iova: u64,
    /// Whether the memory's GPU must be flushed before a write counts.
    flush: bool,
    region: Arc<RegionMemory>,
}

impl Registered {
    /// Registers a region, in several parts if it exceeds the NIC's limit.
    fn new(device: &Device, region: &Arc<RegionMemory>) -> Result<Self, DomainError> {
        let part = device.limits.max_mr.max(4096);
        let base = region.base as u64;
        let iova = if device.limits.has_iova { random_iova(base)? } else { base };
        let (mut parts, mut offset, mut flush) = (Vec::new(), 0, false);
        while offset < region.len {
            let n = part.min(region.len - offset);
            let (base, iova) = (base + offset, iova + offset);
            parts.push(match region.location.cuda() {
                None => Mr::new(&device.pd, base as usize, n, (iova, PEER_ACCESS))?,
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
        // Without iova support the NIC uses the addresses of this process.
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

    /// Ends the registrations; true if the NIC has released the memory (MR-1). Otherwise it is
    /// leaked.
    pub fn release(mut self) -> bool {
        let released = self.parts.iter_mut().try_for_each(Mr::release);
        if let Err(error) = released {
            tracing::error!(region = ?self.region, %error, "the NIC still holds a region; leaking its memory");
            std::mem::forget(self);
            return false;
        }
        true
    }
}

/// A random NIC address for memory at `base`. A NIC may give a later registration the key of an
/// earlier one; the address then keeps holders of the old key out (MR-2). The low 30 bits, which
/// determine the page size, are kept.
fn random_iova(base: u64) -> Result<u64, DomainError> {
    let mut random = [0; 8];
    getrandom::fill(&mut random)
        .map_err(|e| DomainError::Unavailable(format!("getrandom: {e}")))?;
    let high = u64::from_le_bytes(random) & ((1 << 62) - 1);
    Ok(high & !(GIGABYTE - 1) | base & (GIGABYTE - 1))
}

const GIGABYTE: u64 = 1 << 30;

/// Registers memory on any thread.
pub(super) struct VerbsPinner(pub Arc<Device>);

impl Pinner for VerbsPinner {
    fn pin(&self, region: &Arc<RegionMemory>) -> Result<Pinned, DomainError> {
        Ok(Box::new(Registered::new(&self.0, region)?))
    }
}

/// Result of a deregistration.
pub(super) enum Deregistration {
    Done,
    /// Once this registration has been ended by a helper thread.
    Deferred(Box<Registered>),
    /// Never: the NIC still holds the memory.
    Failed,
}

#[derive(Default)]
pub(super) struct Regions {
    by_index: Vec<Option<Registered>>,
    /// Regions of the transports themselves, whose indices start elsewhere.
    hidden: Vec<Option<Registered>>,
    /// GPUs that must be flushed before writes to them count. They stay listed after
    /// deregistration, because earlier writes may be reported later.
    gpus: SmallVec<[i32; 1]>,
    /// The regions again, to answer access queries of peers.
    pub book: RegionBook,
}

impl Regions {
    /// Adds a region that the pinner has registered, or registers it now.
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
        let slots =
            if index & FIRST_INTERNAL_INDEX == 0 { &mut self.by_index } else { &mut self.hidden };
        (slots, (index & !FIRST_INTERNAL_INDEX) as usize)
    }

    #[inline]
    fn get(&self, index: u32) -> Option<&Registered> {
        let slots = if index & FIRST_INTERNAL_INDEX == 0 { &self.by_index } else { &self.hidden };
        slots.get((index & !FIRST_INTERNAL_INDEX) as usize)?.as_ref()
    }

    /// Removes a registration, and ends it if that is quick.
    pub fn remove(&mut self, index: u32) -> Deregistration {
        self.book.remove(index);
        let (slots, i) = self.slots(index);
        let Some(r) = slots.get_mut(i).and_then(Option::take) else { return Deregistration::Done };
        match r.region.len >= LARGE {
            true => Deregistration::Deferred(Box::new(r)),
            false if r.release() => Deregistration::Done,
            false => Deregistration::Failed,
        }
    }

    #[inline]
    pub fn has_gpus(&self) -> bool {
        !self.gpus.is_empty()
    }

    /// Waits until the GPUs see what NICs have written to them.
    pub fn flush_gpus(&self) -> Result<(), DomainError> {
        let Some(driver) = Driver::in_use() else { return Ok(()) };
        self.gpus.iter().try_for_each(|device| driver.flush_rdma_writes(*device))
    }

    /// The local key for `addr` in a region, the NIC's address, and the number of bytes that the
    /// key covers from there.
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
                "the local memory is not registered with this NIC; files are sent over shm or tcp"
                    .into(),
            )
        })
    }

    /// Whether the CPU can read the region, so that small writes can be inlined.
    #[inline]
    pub fn is_readable(&self, index: u32) -> bool {
        self.get(index).is_some_and(|r| r.region.location.cuda().is_none())
    }
}

/// Registers device memory by its dma-buf. If the kernel or the NIC has no dma-buf support,
/// registers it by address, which needs the driver's peer memory module.
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
    Mr::new(pd, base as usize, len, (iova, PEER_ACCESS)).map_err(|e| {
        DomainError::Unavailable(format!(
            "device memory can't be registered: by dma-buf: {refused}; by address: {e}; load \
             nvidia-peermem, or use a kernel and a driver with dma-buf"
        ))
    })
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Needs a NIC. Soft-RoCE takes no dma-buf, so both attempts fail and the error has both
    /// reasons.
    #[test]
    #[ignore = "needs an RDMA device"]
    fn unregistrable_device_memory_names_both_reasons() {
        let config = crate::api::NicConfig::default();
        let (_, chosen) = super::super::discover::survey_machine(&config);
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
