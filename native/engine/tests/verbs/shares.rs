//! Several processes of a host with work for one NIC.

use std::{
    io::{BufRead, BufReader, Read},
    process::{Child, Command, Stdio},
    time::Instant,
};

use fabric_engine::{Handle, Region, RemoteRegion, TransferEngine};

use crate::world::{engine, import, wait, write, Side, LONG};

const BYTES: usize = 32 << 20;
/// Far more than any window holds.
const QUEUED: usize = 64;

fn backlog(at: &TransferEngine, src: &Region, imported: &RemoteRegion) -> Vec<Handle> {
    (0..QUEUED).map(|_| write(at, src, imported, BYTES as u64, None)).collect()
}

/// Not a test itself: a process that keeps the same NIC busy until its input ends.
#[test]
#[ignore = "needs RDMA devices"]
fn neighbour_process() {
    let Ok(descriptor) = std::env::var("FABRIC_TEST_NEIGHBOUR") else { return };
    let byte = |i: usize| u8::from_str_radix(&descriptor[i..i + 2], 16).unwrap();
    let descriptor: Vec<u8> = (0..descriptor.len()).step_by(2).map(byte).collect();
    let a = engine(Side::A);
    let (src, imported) = (a.alloc(BYTES as u64).unwrap(), import(&a, &descriptor));
    assert_eq!(wait(&write(&a, &src, &imported, 64, None)), Ok(()));
    let _work = backlog(&a, &src, &imported);
    println!("\nworks");
    let _ = std::io::stdin().read(&mut [0]);
}

struct Neighbour(Child);

impl Neighbour {
    fn start(of: &Region) -> Self {
        let bytes = of.descriptor().to_bytes();
        let hex: String = bytes.iter().map(|b| format!("{b:02x}")).collect();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "--nocapture", "shares::neighbour_process"])
            .env("FABRIC_TEST_NEIGHBOUR", hex)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.any(|l| l.is_ok_and(|l| l == "works")), "the child has ended");
        Self(child)
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn until(what: &str, at: &TransferEngine, reached: impl Fn(u64) -> bool) {
    let start = Instant::now();
    while !reached(at.rails().unwrap()[0].window) {
        assert!(start.elapsed() < LONG, "{what}: {:?}", at.rails().unwrap());
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
}

/// Two processes with more work than a NIC takes have half of it each; when one is killed, the
/// other gets its half.
#[test]
#[ignore = "needs RDMA devices"]
fn processes_share_a_nic_and_a_dead_process_has_no_share() {
    let (a, b) = (engine(Side::A), engine(Side::B));
    let (own_region, neighbour_region) =
        (b.alloc(BYTES as u64).unwrap(), b.alloc(BYTES as u64).unwrap());
    let src = a.alloc(BYTES as u64).unwrap();
    let imported = import(&a, &own_region.descriptor().to_bytes());
    assert_eq!(wait(&write(&a, &src, &imported, 64, None)), Ok(()));
    let whole = a.rails().unwrap()[0].window;
    let work = backlog(&a, &src, &imported);
    let neighbour = Neighbour::start(&neighbour_region);
    until("half of it is the neighbour's", &a, |window| window <= whole / 2);
    let share = a.rails().unwrap()[0].window;
    assert!(share >= whole / 2 - (64 << 10), "{share} of {whole}");
    drop(neighbour);
    until("the neighbour's half comes back", &a, |window| window == whole);
    assert!(work.iter().any(|w| !w.is_done()), "there was too little work to tell");
    a.close();
}
