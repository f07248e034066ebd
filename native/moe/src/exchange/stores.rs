//! Rows and answers that a device stores to peers' memory by itself.
//!
//! A peer is entered when the device is told where to store, and left when it says that it has: in between the peer's
//! memory isn't quiet (MR-1). Both follow one another on the device, so that nobody is kept waiting by what a caller does
//! between its calls.

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

    /// The device has said so: its stores of before are over.
    pub fn end(&mut self, told: Told) {
        self.0.retain(|(until, _)| *until != told);
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
    /// Where each rank's rows go: to the private slots of those whose memory the device reaches, and who have said that it
    /// may be written. All others' are packed here, to be written as a caller's are.
    pub fn first_ways(&mut self, rest: bool, stays: &mut Stays) -> Vec<RowWay> {
        let (memory, shape, me) = (self.memory, self.shape, self.rank);
        let mut ways = vec![RowWay::default(); shape.ranks as usize];
        for rank in self.others() {
            let Some(link) = self.link(rank).filter(|l| l.out.routed && l.out.rows > 0) else {
                continue;
            };
            let private = link.out.rows.min(shape.private_rows());
            let (offset, nbytes) = (memory.private(me, 0), private * shape.row_stride());
            let Some(stay) = link.enter() else { continue };
            let Some(to) = stay.address(offset, nbytes) else { continue };
            link.out.stored = private > 0;
            link.out.rest_stored = rest && link.out.rows > private;
            let way = &mut ways[rank as usize];
            way.home = if link.out.rest_stored { u64::MAX } else { private };
            if link.out.stored {
                (way.to, way.end) = (to as u64, private as u32);
                stays.add(Told::Packed, stay);
            }
        }
        ways
    }

    /// Where further rows go, once all have said so to whom the device stores them; `None` before.
    pub fn rest_ways(&mut self, stays: &mut Stays, acts: &mut Vec<Act>) -> Option<Vec<RowWay>> {
        if self.here().any(|l| l.out.rest_stored && l.out.grant.is_none()) {
            return None;
        }
        let (memory, stride) = (self.memory, self.shape.row_stride());
        let mut ways = vec![RowWay::NONE; self.shape.ranks as usize];
        for rank in self.others() {
            let Some(link) = self.link(rank).filter(|l| l.out.rest_stored) else { continue };
            let Some((place, rows)) = link.out.grant else { continue };
            let stay = link.enter();
            let to = stay.as_ref().and_then(|s| s.address(memory.shared(place), rows * stride));
            let (begin, end) = (link.out.rows - rows, link.out.rows);
            match (stay, to) {
                (Some(stay), Some(to)) => {
                    stays.add(Told::RestStored, stay);
                    ways[rank as usize] = RowWay {
                        to: to as u64,
                        begin: begin as u32,
                        end: end as u32,
                        ..RowWay::NONE
                    };
                }
                // They lie nowhere else.
                _ => self.lose(rank, Stage::Rows, "it has taken its memory back".into(), acts),
            }
        }
        Some(ways)
    }

    /// The device has stored the further rows.
    pub fn rest_stored(&mut self, acts: &mut Vec<Act>) {
        for link in self.links.iter_mut().flatten().filter(|l| l.out.rest_stored) {
            if let Some((_, rows)) = link.out.grant.take() {
                link.out.sent += rows;
                acts.push(link.count(Stage::Rows));
            }
        }
        self.go_on(acts);
    }

    /// Where answers to a peer's rows go, from the `first` of them on, if the device may store them itself now.
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
    /// Finds out whether the device reaches a peer's rows. Until that is known they are written as a caller's.
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
                (Some(Some(Ok(there))), _) if !there.is_open() => {
                    format!("{sent}: it has taken its memory back")
                }
                (Some(Some(Ok(_))), _) => "stored by this rank's kernels".into(),
            }
        };
        state.others().map(|rank| (rank, way(rank))).collect()
    }
}
