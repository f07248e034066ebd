//! The owning side: a window of slots for each peer, and the copies between it and local regions.

use std::sync::Arc;

use super::{
    frames::{copy_error, slot_offset, to_count, Frame, Pages, Refusal, WINDOW_BYTES},
    ControlChannel, Staged, SLOTS,
};
use crate::{
    api::RegionKey,
    domain::{Completion, Count, DomainError, LinkId, RegionRelease},
    memory::{
        device::{PendingCopy, Pinned},
        Backing, RegionMemory, FIRST_INTERNAL_INDEX,
    },
};

/// A window that a peer writes to and reads from.
#[derive(Debug)]
pub(super) struct Window {
    pub key: RegionKey,
    pub memory: Pinned,
    /// Slots whose copy is under way: one bit each.
    busy: u32,
}

/// A local copy that a peer requested.
#[derive(Debug)]
pub(super) struct WindowCopy {
    pub link: LinkId,
    slot: u8,
    chunk: u64,
    pub copy: PendingCopy,
    /// Kept while the copy runs (MR-1).
    pub region: Arc<RegionMemory>,
    count: Option<Count>,
}

impl<D: ControlChannel> Staged<D> {
    /// Gives a peer its window.
    pub(super) fn open_window(&mut self, link: LinkId) -> Result<(), DomainError> {
        let Some(state) = self.link_states.get(&link) else { return Ok(()) };
        let key = match &state.window {
            Some(window) => window.key,
            None => {
                let mut rkey = [0; 8];
                getrandom::fill(&mut rkey)
                    .map_err(|e| DomainError::Unavailable(format!("getrandom: {e}")))?;
                self.next_window = (self.next_window + 1) & (FIRST_INTERNAL_INDEX - 1);
                let key = RegionKey {
                    index: FIRST_INTERNAL_INDEX | self.next_window,
                    rkey: u64::from_le_bytes(rkey),
                };
                let memory = Pinned::new(WINDOW_BYTES)?;
                let backing =
                    Backing::Owned { allocation: Arc::clone(&memory.allocation), offset: 0 };
                let region = RegionMemory::new(key, memory.base(), WINDOW_BYTES, backing, None);
                self.inner.register(&Arc::new(region), None)?;
                if let Some(state) = self.link_states.get_mut(&link) {
                    state.window = Some(Window { key, memory, busy: 0 });
                }
                key
            }
        };
        self.inner.send_control(link, Frame::Window { key }.encode());
        Ok(())
    }

    /// Starts a copy that a peer requested, if its key names a region (MR-2) that it may access and
    /// the pages lie inside (MR-3). An error means that the peer violates the protocol.
    pub(super) fn start_window_copy(
        &mut self,
        link: LinkId,
        (slot, chunk, inward): (u8, u64, bool),
        pages: &Pages,
        count: Option<(u32, u32)>,
    ) -> Result<(), DomainError> {
        let window = self.link_states.get_mut(&link).and_then(|s| s.window.as_mut());
        let bit = 1u32.checked_shl(u32::from(slot)).unwrap_or(0);
        let Some(window) = window.filter(|w| slot < SLOTS && w.busy & bit == 0) else {
            return Err(DomainError::Handshake("it uses a slot that it does not own".into()));
        };
        let at = window.memory.base() + slot_offset(slot) as usize;
        let begun = self.book.lookup_for(self.inner.peer(link), pages.key).and_then(|region| {
            let pieces = pages.pieces(region, at, inward)?;
            window.memory.pin_for(&region.location);
            // SAFETY: the pieces lie in the region, which the copy keeps registered, and in the
            // slot, whose window is kept while its bit is set. A peer that writes to the slot
            // meanwhile damages its own bytes.
            let copy = unsafe { self.copier.start(&region.location, inward, &pieces) }
                .map_err(copy_error)?;
            Ok((copy, Arc::clone(region)))
        });
        match begun {
            Ok((copy, region)) => {
                window.busy |= bit;
                let count = count.map(to_count).filter(|_| inward);
                self.window_copies.push(WindowCopy { link, slot, chunk, copy, region, count });
            }
            Err(e) => {
                let result = Err(Refusal::of(&e));
                self.inner.send_control(link, Frame::CopyDone { chunk, result }.encode());
            }
        }
        Ok(())
    }

    /// Reports copies that have ended; their counts follow the bytes (IC-2).
    pub(super) fn report_window_copies(&mut self, out: &mut Vec<Completion>) -> bool {
        let mut progressed = false;
        let mut i = 0;
        while i < self.window_copies.len() {
            let Some(result) = self.copier.poll(&self.window_copies[i].copy) else {
                i += 1;
                continue;
            };
            progressed = true;
            // `remove` keeps the order, and so the order of one peer's counts.
            let copy = self.window_copies.remove(i);
            let count = copy.count.filter(|_| result.is_ok());
            if let Some(state) = self.link_states.get_mut(&copy.link) {
                if let Some(window) = &mut state.window {
                    window.busy &= !(1 << copy.slot);
                }
            }
            out.extend(count.map(Completion::Count));
            let result = result.map_err(|e| Refusal::of(&e));
            let frame = Frame::CopyDone { chunk: copy.chunk, result };
            self.inner.send_control(copy.link, frame.encode());
            let index = copy.region.key.index;
            drop(copy);
            if self.retiring.contains(&index) && !self.is_copying_region(index) {
                self.retiring.retain(|r| *r != index);
                out.push(Completion::RegionReleased { index });
            }
        }
        progressed
    }

    /// Whether a copy to or from a local region is under way.
    pub(super) fn is_copying_region(&self, index: u32) -> bool {
        self.window_copies.iter().any(|l| l.region.key.index == index)
    }

    /// Deregisters a staged region; `None` if it isn't one.
    pub(super) fn deregister_staged(&mut self, index: u32) -> Option<RegionRelease> {
        self.book.remove(index)?;
        if !self.is_copying_region(index) {
            return Some(RegionRelease::Now);
        }
        self.retiring.push(index);
        Some(RegionRelease::Later)
    }

    /// Deregisters a window that no copy uses any more.
    pub(super) fn release_window(&mut self, window: Window) {
        match self.inner.deregister(window.key.index) {
            RegionRelease::Now => drop(window),
            // Until the transport reports that the peer has released it.
            RegionRelease::Later => self.closing_windows.push(window),
        }
    }
}
