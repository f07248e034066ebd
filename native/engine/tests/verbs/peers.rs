use std::{
    io::{BufRead, BufReader, Write},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use fabric_engine::{Counter, EngineError, Handle, Region, RemoteRegion, TransferEngine};

use crate::world::{ends, engine, filled, import, nic, wait, write, Side};

/// The default peer timeout, and some slack for emulated processors.
const SOON: Duration = Duration::from_secs(4);
const BYTES: usize = 32 << 20;

/// A process with an engine on the other device and a region in it.
struct Peer {
    child: Child,
    descriptor: Vec<u8>,
}

impl Peer {
    fn start() -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "--nocapture", "peers::peer_process"])
            .env("FABRIC_TEST_CHILD", "peer")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        let descriptor = lines
            .filter_map(|l| l.split_once("descriptor ").map(|(_, hex)| hex.trim().to_owned()))
            .next()
            .expect("the peer prints its region's descriptor");
        let byte = |i: usize| u8::from_str_radix(&descriptor[i..i + 2], 16).unwrap();
        let descriptor = (0..descriptor.len()).step_by(2).map(byte).collect();
        Self { child, descriptor }
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Connects the engines by a write; then expects a write from the peer, which never comes.
fn joined_and_awaited(
    a: &TransferEngine,
    src: &Region,
    imported: &RemoteRegion,
) -> (Counter, Handle) {
    assert_eq!(wait(&write(a, src, imported, 64, None)), Ok(()));
    let counter = a.counter().unwrap();
    let awaited = counter.expect(1, std::slice::from_ref(imported.peer()), Duration::from_secs(30));
    (counter, awaited.unwrap())
}

/// Not a test itself: the child process of the other tests.
#[test]
#[ignore = "needs RDMA devices"]
fn peer_process() {
    if std::env::var("FABRIC_TEST_CHILD").is_ok_and(|t| t == "peer") {
        let b = engine(Side::B);
        let region = b.alloc(BYTES as u64).unwrap();
        let bytes = region.descriptor().to_bytes();
        let hex: String = bytes.iter().map(|b| format!("{b:02x}")).collect();
        println!("\ndescriptor {hex}");
        std::io::stdout().flush().unwrap();
        // Until the parent is gone.
        let _ = std::io::stdin().lines().next();
    }
}

#[test]
#[ignore = "needs RDMA devices"]
fn rs_4_a_peer_killed_mid_transfer_ends_everything_in_time() {
    let mut peer = Peer::start();
    let a = engine(Side::A);
    let src = filled(&a, BYTES, 1);
    let imported = import(&a, &peer.descriptor);
    let (_counter, awaited) = joined_and_awaited(&a, &src, &imported);
    let handles: Vec<_> = (0..4).map(|_| write(&a, &src, &imported, BYTES as u64, None)).collect();
    std::thread::sleep(Duration::from_millis(200));
    assert!(!handles[3].is_done(), "it is under way");
    peer.kill();
    for h in handles.iter().chain([&awaited]) {
        let (error, after) = ends(h);
        assert!(matches!(error, EngineError::PeerLost { .. }), "{error}");
        assert!(after < SOON, "{error} after {after:?}");
        let text = error.to_string();
        assert!(text.contains("b#") && text.contains(&nic(Side::A)), "{text}");
    }
}

#[test]
#[ignore = "needs RDMA devices"]
fn rs_4_an_expectation_alone_learns_that_its_peer_was_killed() {
    let mut peer = Peer::start();
    let a = engine(Side::A);
    let src = filled(&a, 64, 1);
    let imported = import(&a, &peer.descriptor);
    let (_counter, awaited) = joined_and_awaited(&a, &src, &imported);
    // Longer than the peer timeout: heartbeats keep the link alive.
    std::thread::sleep(Duration::from_secs(3));
    assert!(!awaited.is_done(), "{:?}", awaited.poll());
    peer.kill();
    let (error, after) = ends(&awaited);
    assert!(matches!(error, EngineError::PeerLost { .. }), "{error}");
    assert!(after < SOON, "{error} after {after:?}");
}

#[test]
#[ignore = "needs RDMA devices"]
fn rs_4_a_peer_that_hangs_is_lost_though_its_nic_answers() {
    let peer = Peer::start();
    let a = engine(Side::A);
    let src = filled(&a, 64, 1);
    let imported = import(&a, &peer.descriptor);
    let (_counter, awaited) = joined_and_awaited(&a, &src, &imported);
    let (sender, receiver) = std::sync::mpsc::channel();
    let start = Instant::now();
    awaited.on_done(move |result| {
        let _ = sender.send((result.clone(), start.elapsed()));
    });
    // SAFETY: stops a child process of this test, which `Child::drop` kills.
    assert_eq!(unsafe { libc::kill(peer.child.id() as i32, libc::SIGSTOP) }, 0);
    let mut written = 0;
    while !awaited.is_done() && start.elapsed() < 2 * SOON {
        // Writes to its memory succeed as long as its queue pairs exist. The last write may find
        // the peer lost, and then ends when no new link can be made.
        written += u32::from(wait(&write(&a, &src, &imported, 64, None)).is_ok());
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(written > 10, "{written} writes: its NIC stopped answering");
    let (result, after) = receiver.recv_timeout(SOON).expect("the peer is reported lost");
    let error = result.unwrap_err();
    assert!(matches!(error, EngineError::PeerLost { .. }), "{error}");
    assert!(after < SOON, "{error} after {after:?}");
}
