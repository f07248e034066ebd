//! Memory of GPUs, where the provider has `FI_HMEM`: how it is registered, and when what NICs have
//! written there may be told of.

use std::{os::fd::AsRawFd, sync::Arc};

use super::{
    poll::Event,
    raw::{Extent, Mr, Nic},
    LibfabricDomain,
};
use crate::{
    domain::DomainError,
    memory::{device::CudaRange, device::Driver, RegionMemory},
};

/// Whether there can be memory of GPUs to register. Asking providers for it where there is none can
/// have them choose other ways for everything else.
pub(super) fn are_there() -> bool {
    Driver::in_use().is_some() || std::path::Path::new("/dev/nvidiactl").exists()
}

/// Registers a region on a GPU: by its dma-buf, or, where the kernel or the library has no such thing,
/// by its address, for which the provider finds a way of its own. Also tells whether the GPU must be
/// flushed before what was written to it counts.
///
/// # Safety
/// As for [`Nic::register_extent`].
pub(super) unsafe fn register(
    nic: &Nic,
    region: &Arc<RegionMemory>,
    range: &CudaRange,
    key: &dyn Fn() -> u64,
) -> Result<(Mr, bool), DomainError> {
    let flush = Driver::open()?.needs_flush(range.device)?;
    let plain =
        Extent { base: region.base, len: region.len, gpu: Some(range.device), dmabuf: None };
    // SAFETY: the caller's word.
    let register = |extent: &Extent| unsafe { nic.register_extent(extent, key()) };
    // Asked for in any case: it also makes synchronous CUDA calls wait, which the NIC needs.
    let exported = range.dmabuf(region.base as u64);
    let by_dmabuf = exported.and_then(|dmabuf| {
        nic.takes_dmabufs()?;
        register(&Extent { dmabuf: Some((dmabuf.fd.as_raw_fd(), dmabuf.offset)), ..plain })
    });
    let mr = match by_dmabuf {
        Ok(mr) => mr,
        Err(refused) => register(&plain).map_err(|e| explained(&refused, &e))?,
    };
    Ok((mr, flush))
}

/// Why no way leads to memory of a GPU, and what to change.
fn explained(by_dmabuf: &DomainError, by_address: &DomainError) -> DomainError {
    DomainError::Unavailable(format!(
        "device memory can't be registered: by dma-buf: {by_dmabuf}; by address: {by_address}; load \
         nvidia-peermem, or use a kernel and a driver with dma-buf"
    ))
}

impl LibfabricDomain {
    /// IC-2 for GPU memory: a completion doesn't say that the GPU sees the bytes. Before what these
    /// events tell of is passed on, it does; what can't be made visible is not counted, and its
    /// writers are told.
    pub(super) fn flush_gpus(&mut self, events: &mut Vec<Event>) {
        if !self.regions.has_gpus() {
            return;
        }
        let (table, regions) = (&self.table, &self.regions);
        let filled = |context| regions.is_flushed(table.region(context));
        let shows = |e: &Event| match e {
            Event::Counted(..) => true,
            Event::Landed(context) => filled(*context),
            _ => false,
        };
        if !events.iter().any(shows) {
            return;
        }
        let Err(cause) = self.regions.flush_gpus() else { return };
        let why = format!("GPU memory can't be flushed: {cause}");
        tracing::error!(nic = %self.offer.domain, %why);
        for event in events.iter_mut() {
            match event {
                Event::Counted(_, Some(slot)) => *event = Event::Freed(*slot),
                Event::Landed(context) if filled(*context) => {
                    *event = Event::Failed(*context, why.clone());
                }
                _ => {}
            }
        }
        events.retain(|e| !matches!(e, Event::Counted(..)));
        for id in self.link_ids() {
            self.take_down(id, DomainError::LinkDown(why.clone()), true);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_no_way_leads_to_says_both_reasons_and_the_remedy() {
        let no = |why: &str| DomainError::Unavailable(why.into());
        let e = explained(&no("too old"), &no("not permitted")).to_string();
        for part in ["by dma-buf: ", "too old", "by address: ", "not permitted", "nvidia-peermem"] {
            assert!(e.contains(part), "{e}");
        }
    }
}
