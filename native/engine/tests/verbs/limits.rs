use std::{process::Command, time::Duration};

use fabric_engine::api::{PageIndices, Pages};
use fabric_engine::Op;

use crate::world::{engine, filled, import, pattern, run, wait, write, Side};

/// CPU time that this process has used.
fn cpu_time() -> Duration {
    let used = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(used.tv_sec as u64, used.tv_nsec as u32)
}

#[test]
#[ignore = "needs RDMA devices"]
fn an_idle_engine_does_not_poll() {
    let (a, b) = (engine(Side::A), engine(Side::B));
    let src = filled(&a, 64, 1);
    let dst = b.alloc(64).unwrap();
    let imported = import(&a, &dst.descriptor().to_bytes());
    assert_eq!(wait(&write(&a, &src, &imported, 64, None)), Ok(()));
    std::thread::sleep(Duration::from_millis(500));
    let (before, idle) = (cpu_time(), Duration::from_secs(3));
    std::thread::sleep(idle);
    let used = cpu_time() - before;
    // Heartbeats of both engines, on an emulated processor.
    assert!(used < idle / 5, "{used:?} of {idle:?}");
    assert_eq!(wait(&write(&a, &src, &imported, 64, None)), Ok(()), "the link has lived on");
}

/// Runs a test in a child process: limits are lowered by environment variables before an engine
/// opens.
fn in_a_child(test: &str, variables: &[(&str, &str)]) {
    let done = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "--nocapture", &format!("limits::{test}")])
        .envs(variables.iter().copied())
        .env("FABRIC_TEST_CHILD", test)
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(done.status.success(), "{stderr}{}", String::from_utf8_lossy(&done.stdout));
}

fn is_child(test: &str) -> bool {
    std::env::var("FABRIC_TEST_CHILD").is_ok_and(|t| t == test)
}

#[test]
#[ignore = "needs RDMA devices"]
fn regions_and_writes_larger_than_the_nic_takes_are_cut() {
    const TEST: &str = "regions_and_writes_larger_than_the_nic_takes_are_cut";
    if !is_child(TEST) {
        in_a_child(TEST, &[("FABRIC_TEST_MAX_MR", "65536")]);
        return in_a_child(TEST, &[("FABRIC_TEST_MAX_MSG", "8192")]);
    }
    let (a, b) = (engine(Side::A), engine(Side::B));
    let n = 1 << 20;
    let src = filled(&a, n, 7);
    let dst = b.alloc(n as u64).unwrap();
    if std::env::var_os("FABRIC_TEST_MAX_MR").is_some() {
        assert!(dst.descriptor().rail_keys.as_slice().len() >= 16);
    }
    let imported = import(&a, &dst.descriptor().to_bytes());
    let counter = b.counter().unwrap();
    assert_eq!(wait(&write(&a, &src, &imported, n as u64, Some(counter.imm()))), Ok(()));
    assert_eq!(wait(&counter.expect(1, &[], Duration::from_secs(30)).unwrap()), Ok(()));
    assert!(dst.get(0, n as u64).unwrap() == pattern(n, 7));
    // Pages across the ends of registrations, in both directions.
    let list = |i: &[u32]| Pages::new(PageIndices::list(i).unwrap(), 60_000, 5_000);
    let (from, to) = (list(&[3, 0, 14]), list(&[0, 9, 2]));
    let op = Op::WritePages {
        page_len: 30_000,
        src: &src,
        src_pages: &from,
        dst: &imported,
        dst_pages: &to,
        imm: Some(counter.imm()),
    };
    let h = a.submit(&[op], fabric_engine::Submit::default()).unwrap();
    assert_eq!(wait(&h), Ok(()));
    assert_eq!(wait(&counter.expect(3, &[], Duration::from_secs(30)).unwrap()), Ok(()));
    let bytes = pattern(n, 7);
    for (f, t) in [(3, 0), (0, 9), (14, 2)] {
        let got = dst.get(5_000 + t * 60_000, 30_000).unwrap();
        assert!(got == bytes[5_000 + f * 60_000..][..30_000]);
    }
    assert_eq!(counter.arrived(), 4);
}

#[test]
#[ignore = "needs RDMA devices"]
fn too_little_locked_memory_is_named_with_the_remedy() {
    const TEST: &str = "too_little_locked_memory_is_named_with_the_remedy";
    if !is_child(TEST) {
        // Root has no limit; the child drops to another user.
        run("chmod -R a+rwX /dev/infiniband");
        return in_a_child(TEST, &[]);
    }
    let engine = {
        let engine = engine(Side::A);
        // Facts that are determined at first use are determined as root.
        engine.alloc(4096).unwrap();
        let limit = rustix::process::Rlimit { current: Some(1 << 20), maximum: Some(1 << 20) };
        rustix::process::setrlimit(rustix::process::Resource::Memlock, limit).unwrap();
        // SAFETY: changes the credentials of this process, which ends with this test.
        assert_eq!(unsafe { libc::setuid(65_534) }, 0);
        engine
    };
    let error = engine.alloc(64 << 20).unwrap_err().to_string();
    assert!(error.contains("RLIMIT_MEMLOCK") && error.contains("ulimit -l"), "{error}");
}
