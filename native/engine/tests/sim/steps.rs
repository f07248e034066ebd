//! The users' actions.

use std::time::Duration;

use fabric_engine::{
    api::{Imm, PageIndices, Pages, RegionDescriptor},
    EngineError, Handle, Local, Op, Remote, RemoteRegion, ScatterDst, Submit, TransferEngine,
};

use crate::{
    case::{Ns, Step, PLAIN},
    check::{Checked, Count, Transfer, Unit, Wait},
    memory::pattern,
    run::{plain, Run, OP_TIMEOUT},
};

/// Released slots that the engine queues before it reuses one.
const REST: usize = 4096;

/// A request under construction.
#[derive(Default)]
struct Asked {
    units: Vec<Unit>,
    sources: Vec<(u64, u64)>,
    targets: Vec<(u64, Vec<u8>)>,
    message: Option<usize>,
    old_key: bool,
}

impl Run<'_> {
    pub fn step(&mut self, step: &Step) -> Checked {
        match step {
            Step::Write { from, to, len, counter, rail, within } => {
                let mut asked = Asked::default();
                let imm = self.imm(*to, *counter);
                let Some((src, dst)) = self.write_to(*from, *to, *counter, *len, &mut asked) else {
                    return Ok(());
                };
                self.submit((*from, &[*to]), asked, (*rail, *within), |run, engine, submit| {
                    let there = run.there(engine, *to)?;
                    let src = Local { region: run.region(*from), offset: src };
                    let dst = Remote { region: &there, offset: dst };
                    engine.submit(&[Op::Write { src, dst, len: *len, imm }], submit)
                })
            }
            Step::Pages { from, to, len, pages, counter, within } => {
                self.pages(*from, *to, (*len, *pages), *counter, *within)
            }
            Step::Scatter { from, to, len, within } => self.scatter(*from, to, *len, *within),
            Step::Read { from, of, len, pages, within } => {
                self.read(*from, *of, (*len, *pages), *within)
            }
            Step::Barrier { from, to } => {
                let mut asked = Asked::default();
                for to in to {
                    let (incarnation, count) = self.count(*to, PLAIN);
                    let unit = Unit { incarnation, landing: None, count: Some(count) };
                    self.counts[count].units.push(unit);
                    asked.units.push(unit);
                }
                self.submit((*from, to), asked, (None, None), |run, engine, submit| {
                    let peers: Result<Vec<_>, _> =
                        to.iter().map(|to| engine.peer(&run.incarnation(*to).address)).collect();
                    // Connecting may fail at once: then no request was submitted.
                    let group = engine.peer_group(&peers?)?;
                    engine.submit(&[Op::Barrier { group: &group, imm: plain() }], submit)
                })
            }
            Step::Message { from, to, len } => {
                let number = self.sent_to.len();
                self.sent_to.push(self.nodes[usize::from(*to)]);
                self.messages.lock().push(0);
                let mut message = vec![1; *len as usize];
                message[..8].copy_from_slice(&(number as u64).to_le_bytes());
                let asked = Asked { message: Some(number), ..Default::default() };
                self.submit((*from, &[*to]), asked, (None, None), |run, engine, submit| {
                    let peer = engine.peer(&run.incarnation(*to).address)?;
                    engine.submit(&[Op::Send { peer: &peer, message: &message }], submit)
                })
            }
            Step::Expect { at, counter, n, writer, within } => {
                self.expect(*at, *counter, *n, *writer, *within)
            }
            Step::Reuse { at, counter } => self.reuse(*at, *counter),
            Step::Restart { node } => {
                self.restart(*node);
                Ok(())
            }
            Step::OldKey { from, to } => self.old_key(*from, *to),
        }
    }

    fn incarnation(&self, node: u8) -> &crate::run::Incarnation {
        &self.incarnations[self.nodes[usize::from(node)]]
    }

    fn region(&self, node: u8) -> &fabric_engine::Region {
        &self.incarnation(node).memory.region
    }

    fn there(&self, engine: &TransferEngine, node: u8) -> Result<RemoteRegion, EngineError> {
        engine.import(&self.region(node).descriptor())
    }

    /// The current incarnation of a node, and the current generation of one of its counters.
    fn count(&self, node: u8, counter: u8) -> (usize, usize) {
        let incarnation = self.nodes[usize::from(node)];
        (incarnation, self.incarnations[incarnation].counts[usize::from(counter)])
    }

    fn imm(&self, node: u8, counter: Option<u8>) -> Option<Imm> {
        let (_, count) = self.count(node, counter?);
        self.counts[count].counter.as_ref().map(fabric_engine::Counter::imm)
    }

    /// Prepares bytes at the sender and their target; returns the offsets of both.
    fn write_to(
        &mut self,
        from: u8,
        to: u8,
        counter: Option<u8>,
        len: u64,
        asked: &mut Asked,
    ) -> Option<(u64, u64)> {
        let bytes = pattern(self.id(), len);
        let (ours, incarnation) = (self.nodes[usize::from(from)], self.nodes[usize::from(to)]);
        let src = self.incarnations[ours].memory.local(len)?;
        self.incarnations[ours].memory.region.put(src, &bytes).unwrap();
        let (landing, dst) = self.incarnations[incarnation].memory.landing(bytes)?;
        let count = counter.map(|c| self.count(to, c).1);
        let unit = Unit { incarnation, landing: Some(landing), count };
        if let Some(count) = count {
            self.counts[count].units.push(unit);
        }
        asked.units.push(unit);
        asked.sources.push((src, len));
        Some((src, dst))
    }

    fn submit(
        &mut self,
        (from, to): (u8, &[u8]),
        asked: Asked,
        (rail, within): (Option<u8>, Option<Ns>),
        ask: impl FnOnce(&Self, &TransferEngine, Submit) -> Result<Handle, EngineError>,
    ) -> Checked {
        let incarnation = self.nodes[usize::from(from)];
        let Some(engine) = self.incarnations[incarnation].engine.clone() else { return Ok(()) };
        let now = self.net.now().0;
        let deadline = self.net.when(engine.id(), within.unwrap_or(OP_TIMEOUT)).0;
        let timeout = within.map(Duration::from_nanos);
        let submit = Submit { timeout, rail, ..Submit::default() };
        // Requests to peers that are known to be lost are refused at once: nothing was submitted.
        let Ok(handle) = ask(self, &engine, submit) else { return Ok(()) };
        let Asked { units, sources, targets, message, old_key } = asked;
        self.transfers.push(Transfer {
            handle,
            incarnation,
            to: to.iter().map(|to| self.nodes[usize::from(*to)]).collect(),
            since: now,
            deadline,
            units,
            sources,
            targets,
            message,
            old_key,
            pinned: rail.is_some(),
            hurried: within.is_some(),
            over: false,
        });
        Ok(())
    }

    fn pages(
        &mut self,
        from: u8,
        to: u8,
        (len, pages): (u64, u32),
        counter: Option<u8>,
        within: Option<Ns>,
    ) -> Checked {
        let mut asked = Asked::default();
        let imm = self.imm(to, counter);
        let (mut src, mut dst) = (Vec::new(), Vec::new());
        for _ in 0..pages {
            // The stride is one byte, so an index is an offset.
            let Some((s, d)) = self.write_to(from, to, counter, len, &mut asked) else {
                self.forget(&asked);
                return Ok(());
            };
            src.push(s as u32);
            dst.push(d as u32);
        }
        dst.reverse();
        // The sources are reversed too, so that every page lands at its target.
        src.reverse();
        self.submit((from, &[to]), asked, (None, within), |run, engine, submit| {
            let there = run.there(engine, to)?;
            let op = Op::WritePages {
                page_len: len,
                src: run.region(from),
                src_pages: &Pages::new(PageIndices::list(src)?, 1, 0),
                dst: &there,
                dst_pages: &Pages::new(PageIndices::list(dst)?, 1, 0),
                imm,
            };
            engine.submit(&[op], submit)
        })
    }

    /// Removes the units of a request that was not submitted.
    fn forget(&mut self, asked: &Asked) {
        for unit in asked.units.iter().rev() {
            if let Some(count) = unit.count {
                self.counts[count].units.pop();
            }
        }
    }

    fn scatter(&mut self, from: u8, to: &[u8], len: u64, within: Option<Ns>) -> Checked {
        let mut asked = Asked::default();
        let mut places = Vec::new();
        for to in to {
            let Some(place) = self.write_to(from, *to, Some(PLAIN), len, &mut asked) else {
                self.forget(&asked);
                return Ok(());
            };
            places.push((*to, place));
        }
        self.submit((from, to), asked, (None, within), |run, engine, submit| {
            let part = |(to, (src_offset, dst_offset)): &(u8, (u64, u64))| {
                let dst = run.there(engine, *to)?;
                Ok(ScatterDst { len, src_offset: *src_offset, dst, dst_offset: *dst_offset })
            };
            let parts: Result<Vec<_>, EngineError> = places.iter().map(part).collect();
            let src = run.region(from);
            let op = Op::Scatter { group: None, src, parts: &parts?, imm: Some(plain()) };
            engine.submit(&[op], submit)
        })
    }

    fn read(&mut self, from: u8, of: u8, (len, pages): (u64, u32), within: Option<Ns>) -> Checked {
        let mut asked = Asked::default();
        let (ours, theirs) = (self.nodes[usize::from(from)], self.nodes[usize::from(of)]);
        let (mut src, mut dst) = (Vec::new(), Vec::new());
        for page in 0..pages {
            let Some(at) = self.incarnations[ours].memory.local(len) else { return Ok(()) };
            let there = u64::from(page) * 17 % 400;
            let bytes = self.incarnations[theirs].memory.readable(there, len).to_vec();
            asked.targets.push((at, bytes));
            src.push(there as u32);
            dst.push(at as u32);
        }
        self.submit((from, &[of]), asked, (None, within), |run, engine, submit| {
            let there = run.there(engine, of)?;
            let op = Op::ReadPages {
                page_len: len,
                src: &there,
                src_pages: &Pages::new(PageIndices::list(src)?, 1, 0),
                dst: run.region(from),
                dst_pages: &Pages::new(PageIndices::list(dst)?, 1, 0),
            };
            engine.submit(&[op], submit)
        })
    }

    fn expect(&mut self, at: u8, counter: u8, n: u32, writer: Option<u8>, within: Ns) -> Checked {
        let (incarnation, count) = self.count(at, counter);
        let Some(engine) = self.incarnations[incarnation].engine.clone() else { return Ok(()) };
        let writers: Vec<_> = writer
            .filter(|w| *w != at)
            .and_then(|w| engine.peer(&self.incarnation(w).address).ok())
            .into_iter()
            .collect();
        let Some(counter) = &self.counts[count].counter else { return Ok(()) };
        let now = self.net.now().0;
        let handle = counter.expect(n, &writers, Duration::from_nanos(within)).unwrap();
        let writer = writer.filter(|_| !writers.is_empty()).map(|w| self.nodes[usize::from(w)]);
        let deadline = self.net.when(engine.id(), within).0;
        self.waits.push(Wait { handle, count, n, writer, since: now, deadline, over: false });
        Ok(())
    }

    fn reuse(&mut self, at: u8, counter: u8) -> Checked {
        let (incarnation, count) = self.count(at, counter);
        let Some(engine) = self.incarnations[incarnation].engine.clone() else { return Ok(()) };
        // A pending expectation keeps its counter.
        if self.waits.iter().any(|w| w.count == count && !w.over) {
            return Ok(());
        }
        self.waits.retain(|w| w.count != count);
        let Some(old) = self.counts[count].counter.take() else { return Ok(()) };
        let slot = slot(old.imm());
        drop(old);
        for _ in 0..REST {
            drop(engine.counter().unwrap());
        }
        let mut new = engine.counter().unwrap();
        // Other slots of this engine may have been released before.
        while slot_of(&new) != slot {
            new = engine.counter().unwrap();
        }
        self.counts.push(Count::new(incarnation, new));
        self.incarnations[incarnation].counts[usize::from(counter)] = self.counts.len() - 1;
        Ok(())
    }

    fn old_key(&mut self, from: u8, to: u8) -> Checked {
        let incarnation = self.nodes[usize::from(to)];
        let Some(address) =
            self.incarnations[incarnation].engine.as_ref().map(|e| e.address().clone())
        else {
            return Ok(());
        };
        let earlier = self.incarnations[..incarnation].iter().rev().find(|l| l.engine.is_none());
        let Some(earlier) = earlier else { return Ok(()) };
        let old = RegionDescriptor { owner: address, ..earlier.memory.region.descriptor() };
        // No other write lands there.
        let offset = old.len - 64;
        let asked = Asked { old_key: true, ..Default::default() };
        self.submit((from, &[to]), asked, (None, None), |run, engine, submit| {
            let there = engine.import(&old)?;
            let src = Local { region: run.region(from), offset: 0 };
            let dst = Remote { region: &there, offset };
            engine.submit(&[Op::Write { src, dst, len: 8, imm: None }], submit)
        })
    }
}

fn slot_of(counter: &fabric_engine::Counter) -> u64 {
    slot(counter.imm())
}

/// The slot of a counter, without its generation.
fn slot(imm: Imm) -> u64 {
    let text = format!("{imm:?}");
    let digits: String = text.chars().filter(char::is_ascii_digit).collect();
    digits.parse::<u64>().unwrap() >> 12
}
