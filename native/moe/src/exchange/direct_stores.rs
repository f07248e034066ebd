//! Rows and answers that a device stores to peers' memory by itself.
//!
//! The device may store to a peer's memory from the time when it gets the address until it reports
//! the end. In between, that memory isn't quiesced (MR-1). No host call is needed in between, so no
//! peer waits for a caller.

use std::sync::Arc;

use fabric_engine::{Local, Op, Remote, StoreGuard, Submit};

use super::{
    actions::Action,
    device::Device,
    link::{MessageKind, PeerEndpoint},
    state::ExchangeState,
    AllToAll, Inner,
};
use crate::device::{DeviceEvent, RowPath, STORE_ADDRESS};

/// Bytes of the write that is prepared to find out whether a device reaches a region.
const PROBE_NBYTES: u64 = 16;
/// Bytes at multiples of which a device stores rows.
const ALIGN: usize = 16;

/// Peers' memory that the device may be storing to, each with the event that ends the stores.
#[derive(Debug, Default)]
pub struct ActiveStores(Vec<(DeviceEvent, StoreGuard)>);

impl ActiveStores {
    pub fn add(&mut self, event: DeviceEvent, guard: StoreGuard) {
        self.0.push((event, guard));
    }

    /// Removes the stores that an event ends. Drop them without the state's lock: a transport may
    /// unmap memory then.
    pub fn take_ended(&mut self, event: DeviceEvent) -> Self {
        Self(self.0.extract_if(.., |(until, _)| *until == event).collect())
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Destination of a device's stores of answers to a peer's rows.
#[derive(Debug)]
pub struct AnswerStores {
    pub place: u64,
    /// Number of counts that the peer expects.
    pub counts: u32,
    pub guard: StoreGuard,
}

impl ExchangeState {
    /// Destinations of each rank's rows. The device stores the first ones to the private slots of
    /// ranks that it reaches and that have opened their memory. It packs all others here, and the
    /// engine writes them: their places are known after the slot offer.
    pub fn row_paths(&mut self, active_stores: &mut ActiveStores) -> Vec<RowPath> {
        let (memory, shape, me) = (self.memory, self.shape, self.rank);
        let mut paths = vec![RowPath::default(); shape.ranks as usize];
        for rank in self.others() {
            let Some(link) = self.link(rank) else { continue };
            link.rows_out += link.outbound.rows;
            if !link.outbound.routed {
                continue;
            }
            let rows = link.outbound.rows.min(shape.private_rows());
            let Some(guard) = (rows > 0).then(|| link.begin_stores()).flatten() else { continue };
            let (offset, nbytes) = (memory.private(me, 0), rows * shape.row_stride());
            let Some(to) = guard.address(offset, nbytes) else { continue };
            link.outbound.stored = true;
            link.rows_stored += rows;
            paths[rank as usize] = RowPath { to: to as u64, rows };
            active_stores.add(DeviceEvent::Packed, guard);
        }
        paths
    }

    /// Destination of answers to a peer's rows from `first` on, if the device may store them now.
    pub fn answer_stores(&mut self, rank: u32, first: u64, rows: u64) -> Option<AnswerStores> {
        let (memory, shape) = (self.memory, self.shape);
        let link = self.link(rank).filter(|l| l.open)?;
        let guard = link.begin_stores()?;
        let offset = memory.own_back(link.inbound.first + first);
        let to = guard.address(offset, rows * shape.back_stride())?;
        let counts = rows.div_ceil(shape.shared_rows()) as u32;
        Some(AnswerStores { place: STORE_ADDRESS | to as u64, counts, guard })
    }

    /// The device has stored answers to a peer.
    pub fn answers_stored(&mut self, rank: u32, counts: u32, actions: &mut Vec<Action>) {
        if let Some(link) = self.link(rank) {
            actions.extend((0..counts).map(|_| link.count(MessageKind::Answers)));
        }
    }
}

impl Inner {
    /// Finds out whether the device reaches a peer's rows. Until that is known, the engine writes
    /// them.
    pub(super) fn probe_direct_stores(self: &Arc<Self>, endpoint: Arc<PeerEndpoint>) {
        if !self.state.lock().device.as_ref().is_some_and(Device::stores) {
            return;
        }
        let op = Op::Write {
            src: Local { region: &self.rows, offset: 0 },
            dst: Remote { region: &endpoint.rows, offset: 0 },
            len: PROBE_NBYTES,
            imm: None,
        };
        let by = self.rows.location().cuda().map(|range| range.device);
        match self.engine.prepare(&[op], Submit::default()) {
            Ok(handle) => {
                let weak = Arc::downgrade(self);
                handle.on_done(move |end| {
                    let Some(inner) = weak.upgrade() else { return };
                    let found = end.map_err(|e| e.to_string()).and_then(|()| {
                        let there = inner.engine.map_peer_region(&endpoint.rows, by)?;
                        let begins = there.begin_stores().and_then(|s| s.address(0, PROBE_NBYTES));
                        match begins.is_some_and(|address| address.is_multiple_of(ALIGN)) {
                            true => Ok(there),
                            false => Err(format!("its rows are not aligned to {ALIGN} bytes")),
                        }
                    });
                    let _ = endpoint.stores.set(found);
                });
            }
            Err(e) => {
                let _ = endpoint.stores.set(Err(e.to_string()));
            }
        }
    }
}

impl AllToAll {
    /// The path of rows to each peer, and why (RS-2).
    pub fn paths(&self) -> Vec<(u32, String)> {
        let state = self.inner.state.lock();
        let stores = state.device.as_ref().map(Device::stores);
        let path = |rank: u32| {
            let all = [&state.links, &state.newcomers];
            let link = all.iter().find_map(|all| all.get(rank as usize)?.as_ref());
            let sent = "written by the engine";
            match (link.map(|l| l.endpoint.stores.get()), stores) {
                (None, _) => "the rank is not present".into(),
                (_, None) => format!("{sent}: no kernels execute this exchange"),
                (_, Some(false)) => format!("{sent}: direct stores are turned off"),
                (Some(None), _) => {
                    format!("{sent}: whether this device reaches the rank is not known yet")
                }
                (Some(Some(Err(why))), _) => format!("{sent}: {why}"),
                (Some(Some(Ok(there))), _) => match there.closed_by() {
                    Some(cause) => format!("{sent}: {cause}"),
                    None => {
                        let (stored, rows) = link.map_or((0, 0), |l| (l.rows_stored, l.rows_out));
                        let most = state.shape.private_rows();
                        format!(
                            "stored by this rank's kernels, at most {most} of a dispatch: {stored} of {rows} rows so far, \
                             the engine writes the others"
                        )
                    }
                },
            }
        };
        state.others().map(|rank| (rank, path(rank))).collect()
    }
}
