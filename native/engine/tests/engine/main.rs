//! The engine over the transports of one host, and the topology of hosts.

use std::{
    fs,
    path::PathBuf,
    sync::{
        atomic::{AtomicU32, Ordering::Relaxed},
        Arc,
    },
    time::Duration,
};

use fabric_engine::{
    api::{EngineConfig, TransportKind},
    TransferEngine,
};

mod closing;
mod files;
mod flight;
mod overlaps;
mod peer_mappings;
mod request_batches;
mod revocations;
mod segments;
mod slow_polls;
mod small_writes;
mod staging;
mod topology;
mod wakeups;

/// No wait of a test takes longer.
const TIMEOUT: Duration = Duration::from_secs(20);

/// An engine over one transport.
fn engine(transport: TransportKind) -> Arc<TransferEngine> {
    open(EngineConfig { transports: vec![transport], ..Default::default() })
}

/// An engine with the token of all engines here.
fn open(config: EngineConfig) -> Arc<TransferEngine> {
    let config = EngineConfig { token: Some(b"t".to_vec()), ..config };
    Arc::new(TransferEngine::open(config).unwrap())
}

/// A folder of one test, which is removed at its end.
struct TestFolder(PathBuf);

impl TestFolder {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("fabric-tests-{}-{}", std::process::id(), NEXT.fetch_add(1, Relaxed));
        let path = std::env::temp_dir().join(name);
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for TestFolder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
