//! Rows and answers that a device stores to peers' memory by itself.
//!
//! The device enters a peer's memory when it is told where to store, and leaves it when it reports
//! the end: in between that memory isn't quiesced (MR-1). Both follow each other on the device, so
//! that no peer waits for a caller between its calls.

use std::sync::Arc;

use fabric_engine::{Local, Op, Remote, Stay, Submit};

use super::{
    act::Act,
    device::Device,
    link::{Stage, Wire},
    state::State,
    AllToAll, Inner,
};
use crate::device::{RowWay, Told, STORED};

/// What a transport needs to show a region to a device: any of its bytes.
const GLANCE: u64 = 16;
/// What rows begin at multiples of.
const ALIGN: usize = 16;

/// Peers' memory that the device may be storing to, each until it has said something.
#[derive(Debug, Default)]
pub struct Stays(Vec<(Told, Stay)>);

impl Stays {
    pub fn add(&mut self, until: Told, stay: Stay) {
        self.0.push((until, stay));
    }

    /// The device has said so: these are over. To be dropped without the state's lock, for a
    /// transport may have memory to unmap then.
    pub fn over(&mut self, told: Told) -> Self {
        Self(self.0.extract_if(.., |(until, _)| *until == told).collect())
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Where a device stores answers to a peer's rows.
#[derive(Debug)]
pub struct AnswersThere {
    pub place: u64,
    /// As many as the writes would be that the peer waits for.
    pub counts: u32,
    pub stay: Stay,
}

impl State {
    /// Where each rank's rows go. The first ones go to the private slots of ranks that the device
    /// reaches and that have opened their memory. All others are packed here and written as a
    /// caller's are: a further row's place is known after the slot offer, and no rank's rows wait
    /// for another rank.
    pub fn ways(&mut self, stays: &mut Stays) -> Vec<RowWay> {
        let (memory, shape, me) = (self.memory, self.shape, self.rank);
        let mut ways = vec![RowWay::default(); shape.ranks as usize];
        for rank in self.others() {
            let Some(link) = self.link(rank) else { continue };
            link.rows_out += link.out.rows;
            if !link.out.routed {
                continue;
            }
            let rows = link.out.rows.min(shape.private_rows());
            let Some(stay) = (rows > 0).then(|| link.enter()).flatten() else { continue };
            let (offset, nbytes) = (memory.private(me, 0), rows * shape.row_stride());
            let Some(to) = stay.address(offset, nbytes) else { continue };
            link.out.stored = true;
            link.rows_stored += rows;
            ways[rank as usize] = RowWay { to: to as u64, rows };
            stays.add(Told::Packed, stay);
        }
        ways
    }

    /// Where answers to a peer's rows go, from the `first` of them on, if the device may store them
    /// itself now.
    pub fn answers_there(&mut self, rank: u32, first: u64, rows: u64) -> Option<AnswersThere> {
        let (memory, shape) = (self.memory, self.shape);
        let link = self.link(rank).filter(|l| l.open)?;
        let stay = link.enter()?;
        let offset = memory.own_back(link.inward.first + first);
        let to = stay.address(offset, rows * shape.back_stride())?;
        let counts = rows.div_ceil(shape.shared_rows()) as u32;
        Some(AnswersThere { place: STORED | to as u64, counts, stay })
    }

    /// The device has stored answers to a peer.
    pub fn answers_stored(&mut self, rank: u32, counts: u32, acts: &mut Vec<Act>) {
        if let Some(link) = self.link(rank) {
            acts.extend((0..counts).map(|_| link.count(Stage::Answers)));
        }
    }
}

impl Inner {
    /// Finds out whether the device reaches a peer's rows. Until that is known they are written as
    /// a caller's.
    pub(super) fn seek(self: &Arc<Self>, wire: Arc<Wire>) {
        if !self.state.lock().device.as_ref().is_some_and(Device::stores) {
            return;
        }
        let op = Op::Write {
            src: Local { region: &self.rows, offset: 0 },
            dst: Remote { region: &wire.rows, offset: 0 },
            len: GLANCE,
            imm: None,
        };
        let by = self.rows.location().cuda().map(|range| range.device);
        match self.engine.prepare(&[op], Submit::default()) {
            Ok(handle) => {
                let weak = Arc::downgrade(self);
                handle.on_done(move |end| {
                    let Some(inner) = weak.upgrade() else { return };
                    let found = end.map_err(|e| e.to_string()).and_then(|()| {
                        let there = inner.engine.aperture(&wire.rows, by)?;
                        let begins = there.enter().and_then(|s| s.address(0, GLANCE));
                        match begins.is_some_and(|address| address.is_multiple_of(ALIGN)) {
                            true => Ok(there),
                            false => Err(format!("its rows begin at no multiple of {ALIGN}")),
                        }
                    });
                    let _ = wire.stores.set(found);
                });
            }
            Err(e) => {
                let _ = wire.stores.set(Err(e.to_string()));
            }
        }
    }
}

impl AllToAll {
    /// Which way rows go to each other rank, and why (RS-2).
    pub fn ways(&self) -> Vec<(u32, String)> {
        let state = self.inner.state.lock();
        let stores = state.device.as_ref().map(Device::stores);
        let way = |rank: u32| {
            let all = [&state.links, &state.newcomers];
            let link = all.iter().find_map(|all| all.get(rank as usize)?.as_ref());
            let sent = "written by the engine";
            match (link.map(|l| l.wire.stores.get()), stores) {
                (None, _) => "it is not here".into(),
                (_, None) => format!("{sent}: no kernels carry this exchange out"),
                (_, Some(false)) => format!("{sent}: direct stores are turned off"),
                (Some(None), _) => {
                    format!("{sent}: whether this device reaches it is not known yet")
                }
                (Some(Some(Err(why))), _) => format!("{sent}: {why}"),
                (Some(Some(Ok(there))), _) => match there.shut_by() {
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
        state.others().map(|rank| (rank, way(rank))).collect()
    }
}
