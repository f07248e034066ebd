//! Regions by the control plane: what this process exports, and what it imports.

use smallvec::smallvec;

use super::{
    control_socket::{Fds, Frame},
    ShmDomain,
};
use crate::{
    api::{EngineId, RegionKey},
    domain::{Completion, DomainError, LinkId},
    memory::{device::Driver, Backing},
};

impl ShmDomain {
    /// Answers a peer that resolves a region. The key grants access, unless the region is granted
    /// to another engine (MR-3).
    pub(super) fn resolve(&self, peer: Option<EngineId>, key: RegionKey) -> (Frame, Fds) {
        let unknown = |reason: String| (Frame::Unknown { key, reason }, smallvec![]);
        let region = match self.book.lookup_for(peer, key) {
            Ok(r) => r,
            Err(DomainError::Refused(reason)) => {
                return (Frame::Denied { key, reason }, smallvec![])
            }
            Err(e) => return unknown(e.to_string()),
        };
        if let Some(range) = region.location.cuda() {
            let export = || {
                let driver = Driver::open()?;
                let handle = driver.export(range.device, range.base)?.to_vec();
                let uuid = driver.device(range.device)?.uuid;
                let (len, base) = (region.len, range.base);
                let offset = region.base as u64 - base;
                Ok(Frame::Device { key, len, handle, uuid, offset, base })
            };
            return match export() {
                Ok(frame) => (frame, smallvec![]),
                Err(e @ DomainError::Unavailable(_)) => unknown(e.to_string()),
                Err(e) => unknown(format!("its GPU memory can't be exported: {e}")),
            };
        }
        match &region.backing {
            Backing::Foreign => {
                (Frame::Foreign { key, len: region.len, addr: region.base as u64 }, smallvec![])
            }
            Backing::Owned { allocation, offset } => match allocation.fd().try_clone_to_owned() {
                Ok(fd) => {
                    let frame = Frame::Mapped {
                        key,
                        len: region.len,
                        allocation: allocation.id(),
                        allocation_len: allocation.len(),
                        offset: *offset,
                    };
                    (frame, smallvec![fd])
                }
                Err(e) => unknown(format!("its memory can't be exported: {e}")),
            },
        }
    }

    /// Continues work that waited for a region, or fails it.
    pub(super) fn on_resolved(
        &mut self,
        id: LinkId,
        key: RegionKey,
        result: Result<(), DomainError>,
        out: &mut Vec<Completion>,
    ) {
        let Some(link) = self.link(id) else { return };
        let waiting = link.resolving.remove(&key).unwrap_or_default();
        match result {
            Ok(()) => {
                link.deferred.extend(waiting);
                self.retry_deferred(id, out);
            }
            Err(e) => out.extend(waiting.into_iter().map(|(token, _)| Completion::Done {
                link: id,
                token,
                result: Err(e.clone()),
            })),
        }
    }

    /// A peer can't access a region any more.
    pub(super) fn on_released(&mut self, id: LinkId, index: u32, out: &mut Vec<Completion>) {
        if let Some(region) = self.retiring.get_mut(&index) {
            region.holders.remove(&id);
            if region.holders.is_empty() {
                self.retiring.remove(&index);
                out.push(Completion::RegionReleased { index });
            }
        }
    }
}
