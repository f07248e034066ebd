//! Children by fork move nothing of their parent's engines (IC-2, IC-3, MR-1).

use std::time::{Duration, Instant};

use fabric_engine::{
    api::{EngineConfig, Imm, TransportKind},
    locks::Mutex,
    EngineError, Local, Op, Region, Remote, RemoteRegion, Submit, TransferEngine,
};

const TIMEOUT: Duration = Duration::from_secs(20);

/// Held by each test: at a fork no thread of another one begins or ends.
static ALONE: Mutex<()> = Mutex::new(());

/// Runs `act` in a child by fork, and returns whether it answered true before its time was over.
fn in_child(act: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child runs `act` alone and ends itself without unwinding.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let ok = std::panic::catch_unwind(std::panic::AssertUnwindSafe(act)).unwrap_or(false);
        // SAFETY: ends the process at once.
        unsafe { libc::_exit(i32::from(!ok)) };
    }
    let (mut status, start) = (0, Instant::now());
    // SAFETY: waits for a child of this process.
    while unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) } == 0 {
        if start.elapsed() > TIMEOUT {
            // SAFETY: ends a child of this process.
            unsafe { libc::kill(child, libc::SIGKILL) };
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    status == 0
}

/// A write of the whole region `src` to the begin of `there`.
fn write<'a>(src: &'a Region, there: &'a RemoteRegion, imm: Option<Imm>) -> Op<'a> {
    let (src, len) = (Local { region: src, offset: 0 }, src.len());
    Op::Write { src, dst: Remote { region: there, offset: 0 }, len, imm }
}

fn forked<T>(result: Result<T, EngineError>) -> bool {
    matches!(result, Err(EngineError::Forked { .. }))
}

#[test]
fn ic_3_a_child_by_fork_moves_nothing_of_its_parents() {
    let _alone = ALONE.lock();
    for transport in [TransportKind::Tcp, TransportKind::Shm] {
        let open = || {
            let config = EngineConfig { transports: vec![transport], ..Default::default() };
            TransferEngine::open(config).unwrap()
        };
        let (a, b) = (open(), open());
        let (src, dst) = (a.alloc(4096).unwrap(), b.alloc(4096).unwrap());
        let (there, counter) = (a.import(&dst.descriptor()).unwrap(), b.counter().unwrap());
        let op = || write(&src, &there, Some(counter.imm()));
        let write = |n: u64| {
            let sent = a.submit(&[op()], Submit::default()).unwrap();
            assert_eq!(sent.wait(TIMEOUT), Some(Ok(())), "{transport}: write {n}");
            let counted = counter.expect(1, &[], TIMEOUT).unwrap();
            assert_eq!(counted.wait(TIMEOUT), Some(Ok(())), "{transport}: write {n}");
            assert_eq!(counter.arrived(), n, "{transport}");
        };
        write(1);
        let pending = counter.expect(1000, &[], TIMEOUT).unwrap();
        let refused = in_child(|| {
            let end = Instant::now() + Duration::from_millis(300);
            let mut all = true;
            while all && Instant::now() < end {
                all &= forked(counter.poll()) && forked(b.poll()) && forked(b.metrics());
                all &= pending.drive().is_some_and(forked);
                all &= pending.wait(Duration::from_millis(1)).is_some_and(forked);
                all &= pending.spin(Duration::from_millis(1)).is_some_and(forked);
                all &= forked(a.submit(&[op()], Submit::default()));
                all &= forked(src.put(0, &[1]));
            }
            all
        });
        assert!(refused, "{transport}: not all calls of the child were refused");
        pending.cancel();
        (2..=6).for_each(write);
        assert!(in_child(|| {
            b.close();
            true
        }));
        (7..=9).for_each(write);
    }
}

#[test]
fn mr_1_what_a_child_drops_stays_its_parents() {
    let _alone = ALONE.lock();
    for transport in [TransportKind::Tcp, TransportKind::Shm] {
        let open = || {
            let config = EngineConfig { transports: vec![transport], ..Default::default() };
            TransferEngine::open(config).unwrap()
        };
        let (a, b) = (open(), open());
        let (src, dst) = (a.alloc(4096).unwrap(), b.alloc(4096).unwrap());
        let (there, counter) = (a.import(&dst.descriptor()).unwrap(), b.counter().unwrap());
        let imm = Some(counter.imm());
        let all = std::cell::Cell::new(Some((b, dst, counter)));
        let write = |from: &Region| {
            let sent = a.submit(&[write(from, &there, imm)], Submit::default()).unwrap();
            assert_eq!(sent.wait(TIMEOUT), Some(Ok(())), "{transport}");
        };
        write(&src);
        assert!(in_child(|| {
            drop(all.take());
            true
        }));
        let (_b, _dst, counter) = all.take().unwrap();
        write(&src);
        let counted = counter.expect(2, &[], TIMEOUT).unwrap();
        assert_eq!(counted.wait(TIMEOUT), Some(Ok(())), "{transport}");
    }
}

#[test]
fn a_childs_own_engines_work_whatever_its_parents_threads_wait_for() {
    let _alone = ALONE.lock();
    let open = || TransferEngine::open(EngineConfig::default()).unwrap();
    let parents: Vec<_> = (0..4).map(|_| open()).collect();
    // All threads sleep.
    std::thread::sleep(Duration::from_millis(50));
    let engines_work = || {
        for _ in 0..20 {
            let (a, b) = (open(), open());
            let (src, dst) = (a.alloc(64).unwrap(), b.alloc(64).unwrap());
            let there = a.import(&dst.descriptor()).unwrap();
            let sent = a.submit(&[write(&src, &there, None)], Submit::default()).unwrap();
            if sent.wait(TIMEOUT / 4) != Some(Ok(())) {
                return false;
            }
            [a, b].iter().for_each(TransferEngine::close);
        }
        true
    };
    assert!(in_child(engines_work));
    drop(parents);
}
