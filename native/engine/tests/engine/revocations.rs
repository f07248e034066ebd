//! Regions that are revoked while another thread submits requests that use them.

use std::{
    sync::{mpsc, Arc, Barrier},
    thread,
    time::{Duration, Instant},
};

use fabric_engine::{
    api::TransportKind, BatchObserver, EngineError, Local, Op, Outcome, Region, Remote, Submit,
    TransferEngine,
};

use super::{engine, TIMEOUT};

/// Operations of a request: their checks take long enough for another thread to revoke meanwhile.
const OPERATIONS: usize = 20_000;
const ROUNDS: u32 = 40;
/// Time by which each round revokes later than the one before.
const STEP: Duration = Duration::from_micros(4);
/// What the owner stores into memory that is its own again.
const REUSED: u8 = 0xee;

struct Results(mpsc::Sender<(usize, Outcome)>);

impl BatchObserver for Results {
    fn on_events(&self, events: Vec<(usize, Outcome)>) {
        events.into_iter().for_each(|event| drop(self.0.send(event)));
    }
}

/// Submits `ops` as one request, or as one request each; the result of the first operation.
fn first_result(a: &TransferEngine, ops: &[Op<'_>], batch: bool) -> Result<(), EngineError> {
    if !batch {
        return a.submit(ops, Submit::default())?.wait(TIMEOUT).expect("a result");
    }
    let (tell, told) = mpsc::channel();
    a.submit_batch(ops, Submit::default(), Arc::new(Results(tell)))?;
    let mut first = None;
    while let Ok((at, outcome)) = told.recv_timeout(TIMEOUT) {
        match outcome {
            Outcome::Ended(result) if at == 0 => first = Some(result),
            _ => {}
        }
    }
    first.expect("a result")
}

/// The first operation of each request uses a region that another thread revokes meanwhile.
fn memory_is_used_only_before_its_revocation_ends(
    transport: TransportKind,
    batch: bool,
    op: impl for<'a> Fn(&'a Region, Remote<'a>) -> Op<'a> + Sync,
) {
    let (a, b) = (engine(transport), engine(transport));
    let (own, peers) = (a.alloc(64).unwrap(), b.alloc(64).unwrap());
    let (at_first, there) = (b.alloc(64).unwrap(), a.import(&peers.descriptor()).unwrap());
    let first_there = a.import(&at_first.descriptor()).unwrap();
    first_result(&a, &[op(&own, Remote { region: &there, offset: 0 })], false).unwrap();
    for round in 0..ROUNDS {
        at_first.put(0, &[1; 8]).unwrap();
        let mut memory = vec![1u8; 64].into_boxed_slice();
        let addr = memory.as_mut_ptr() as usize;
        // SAFETY: the memory outlives the region's registration, and only this test uses it.
        let region = unsafe { a.register(addr, 64, None) }.unwrap();
        let mut ops = vec![op(&own, Remote { region: &there, offset: 0 }); OPERATIONS];
        ops[0] = op(&region, Remote { region: &first_there, offset: 0 });
        let begins = Barrier::new(2);
        let result = thread::scope(|scope| {
            scope.spawn(|| {
                begins.wait();
                let start = Instant::now();
                while start.elapsed() < STEP * round {
                    std::hint::spin_loop();
                }
                region.revoke().unwrap().wait(TIMEOUT).unwrap().unwrap();
                // SAFETY: as above.
                unsafe { (addr as *mut u8).write_bytes(REUSED, 64) };
            });
            begins.wait();
            first_result(&a, &ops, batch)
        });
        assert!(matches!(result, Ok(()) | Err(EngineError::Stale { .. })), "{result:?}");
        assert!(memory.iter().all(|byte| *byte == REUSED), "{transport}: bytes land in {round}");
        assert_eq!(at_first.get(0, 8).unwrap(), [1; 8], "{transport}: round {round} sends them");
    }
}

fn write<'a>(region: &'a Region, dst: Remote<'a>) -> Op<'a> {
    Op::Write { src: Local { region, offset: 0 }, dst, len: 1, imm: None }
}

fn read<'a>(region: &'a Region, src: Remote<'a>) -> Op<'a> {
    Op::Read { src, dst: Local { region, offset: 0 }, len: 1 }
}

#[test]
fn mr_1_a_write_reads_no_memory_whose_revocation_has_ended() {
    for transport in [TransportKind::Shm, TransportKind::Tcp] {
        memory_is_used_only_before_its_revocation_ends(transport, false, write);
    }
}

#[test]
fn mr_1_a_read_fills_no_memory_whose_revocation_has_ended() {
    for transport in [TransportKind::Shm, TransportKind::Tcp] {
        memory_is_used_only_before_its_revocation_ends(transport, false, read);
    }
}

#[test]
fn mr_1_writes_of_one_call_read_no_memory_whose_revocation_has_ended() {
    for transport in [TransportKind::Shm, TransportKind::Tcp] {
        memory_is_used_only_before_its_revocation_ends(transport, true, write);
    }
}

#[test]
fn mr_1_a_revocation_ends_after_what_its_owner_reads() {
    let engine = engine(TransportKind::Shm);
    let mut memory = vec![1u8; 64].into_boxed_slice();
    // SAFETY: the memory outlives the region's registration, and only this test uses it.
    let region = unsafe { engine.register(memory.as_mut_ptr() as usize, 64, None) }.unwrap();
    let revocation = region
        .with_bytes(0, 64, |_| {
            let revocation = region.revoke().unwrap();
            assert!(revocation.wait(Duration::from_millis(100)).is_none(), "bytes are in use");
            revocation
        })
        .unwrap();
    revocation.wait(TIMEOUT).unwrap().unwrap();
    assert!(matches!(region.get(0, 1), Err(EngineError::Stale { .. })));
}
