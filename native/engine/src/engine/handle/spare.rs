//! Reuses the states of handles.

use std::sync::Arc;

use super::{HandleOperation, HandleRef, HandleState, KeptRegions};
use crate::locks::Mutex;

/// States that are kept at most.
const MAX_SPARE_HANDLES: usize = 1024;

/// States of ended transfers whose callers have dropped the handle, for later transfers. The thread
/// that ends a transfer is often another than the one that made its handle. If it freed the memory,
/// the two would contend for the lock of the allocator's arena.
#[derive(Default)]
pub(crate) struct SpareHandles(Mutex<Vec<HandleRef>>);

impl SpareHandles {
    /// A state for a transfer; gives back its regions if there is none.
    pub fn take(
        &self,
        source: Option<HandleOperation>,
        keep: KeptRegions,
    ) -> Result<HandleRef, KeptRegions> {
        let Some(mut spare) = self.0.lock().pop() else { return Err(keep) };
        let Some(state) = Arc::get_mut(&mut spare) else { return Err(keep) };
        state.source = source;
        state.unquiesced.lock().keep = keep;
        Ok(spare)
    }
}

/// Keeps the state of an ended transfer, unless the caller or a hook still has it.
pub(super) fn recycle(mut state: HandleRef) {
    let Some(unshared) = Arc::get_mut(&mut state) else { return };
    let Some(shared) = unshared.shared.upgrade() else { return };
    let engine = std::mem::take(&mut unshared.shared);
    *unshared = HandleState { shared: engine, ..HandleState::default() };
    let mut spare = shared.spare_handles.0.lock();
    if spare.len() < MAX_SPARE_HANDLES {
        spare.push(state);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::atomic::Ordering::SeqCst;

    use super::*;
    use crate::{
        api::EngineConfig,
        engine::Quiescence,
        group::{OperationCompletion, TransferKey},
        simulation::SimNet,
        transport::sim::SimConfig,
        EngineError,
    };

    #[test]
    fn a_state_is_reused_as_new_once_its_caller_has_dropped_it() {
        let mut net = SimNet::new(SimConfig::default());
        let engine = net.engine(EngineConfig::default()).unwrap();
        let region = engine.alloc(64).unwrap();
        let of = |slot| {
            let keep = std::iter::once(region.clone()).collect();
            let key = TransferKey { slot, serial: slot };
            HandleState::of_transfer(&engine.shared, Some(key), keep)
        };
        let end = |state: HandleRef| {
            region.inner.memory.users.fetch_add(1, SeqCst);
            state.release(0, false, Some(Err(EngineError::Closed)));
            state.recycle();
        };
        let callers = of(1);
        end(Arc::clone(&callers));
        assert!(!Arc::ptr_eq(&callers, &of(2)), "the caller still has it");
        assert_eq!(callers.result().unwrap_err().to_string(), EngineError::Closed.to_string());
        let dropped = of(3);
        let at = Arc::as_ptr(&dropped);
        dropped.is_of(HandleOperation::Transfer(TransferKey { slot: 3, serial: 3 }));
        end(dropped);
        let next = of(4);
        assert_eq!(Arc::as_ptr(&next), at);
        assert_eq!((next.is_done(), next.quiescence()), (false, Quiescence::InFlight));
        assert!(next.result().is_ok() && next.late_source.get().is_none());
        let Some(HandleOperation::Transfer(key)) = next.source() else { panic!("a transfer") };
        assert_eq!(key, TransferKey { slot: 4, serial: 4 });
        assert_eq!(next.unquiesced.lock().keep.len(), 1);
    }
}
