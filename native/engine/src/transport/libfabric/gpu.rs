//! GPU memory with providers that have `FI_HMEM`: registration, and flushes before completions are
//! reported.

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

/// Whether this machine may have GPU memory. Requesting it without need can make providers choose
/// other paths for everything else.
pub(super) fn may_exist() -> bool {
    Driver::in_use().is_some() || std::path::Path::new("/dev/nvidiactl").exists()
}

/// Registers a region on a GPU by its dma-buf. If the kernel or the library has no dma-buf support,
/// registers it by address, which the provider handles itself. Also returns whether the GPU must be
/// flushed before writes count.
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
    // SAFETY: by this function's contract.
    let register = |extent: &Extent| unsafe { nic.register_extent(extent, key()) };
    // Exported in any case: this also makes synchronous CUDA calls wait, which the NIC needs.
    let exported = range.dmabuf(region.base as u64);
    let by_dmabuf = exported.and_then(|dmabuf| {
        nic.supports_dmabuf()?;
        register(&Extent { dmabuf: Some((dmabuf.fd.as_raw_fd(), dmabuf.offset)), ..plain })
    });
    let mr = match by_dmabuf {
        Ok(mr) => mr,
        Err(refused) => register(&plain).map_err(|e| both_errors(&refused, &e))?,
    };
    Ok((mr, flush))
}

/// The error if both registrations fail, and the remedy.
fn both_errors(by_dmabuf: &DomainError, by_address: &DomainError) -> DomainError {
    DomainError::Unavailable(format!(
        "device memory can't be registered: by dma-buf: {by_dmabuf}; by address: {by_address}; load \
         nvidia-peermem, or use a kernel and a driver with dma-buf"
    ))
}

impl LibfabricDomain {
    /// IC-2 for GPU memory: a completion does not mean that the GPU sees the bytes. Flushes the
    /// GPUs before these events are handled. If that fails, counts are withheld, and reads and
    /// links fail.
    pub(super) fn flush_gpus(&mut self, events: &mut Vec<Event>) {
        if !self.regions.has_gpus() {
            return;
        }
        let (table, regions) = (&self.table, &self.regions);
        let filled = |context| regions.is_flushed(table.region(context));
        let shows = |e: &Event| match e {
            Event::Counted(..) => true,
            Event::Completed(context) => filled(*context),
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
                Event::Completed(context) if filled(*context) => {
                    *event = Event::Failed(*context, why.clone());
                }
                _ => {}
            }
        }
        events.retain(|e| !matches!(e, Event::Counted(..)));
        for id in self.link_ids() {
            self.close_link(id, DomainError::LinkDown(why.clone()), true);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unregistrable_gpu_memory_names_both_reasons_and_the_remedy() {
        let no = |why: &str| DomainError::Unavailable(why.into());
        let e = both_errors(&no("too old"), &no("not permitted")).to_string();
        for part in ["by dma-buf: ", "too old", "by address: ", "not permitted", "nvidia-peermem"] {
            assert!(e.contains(part), "{e}");
        }
    }
}
