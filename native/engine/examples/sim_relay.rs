//! A protocol of a higher layer on the virtual clock: ranks relay a version of the weights, chunk
//! by chunk. The engine is the real one. In a second run one rank dies half-way.
//!
//! `cargo run -p fabric-engine --example sim_relay`; `cargo test` runs it as well.

use std::{sync::Arc, time::Duration};

use fabric_engine::{
    api::{EngineConfig, Imm},
    simulation::SimNet,
    transport::sim::SimConfig,
    EngineError, Handle, Local, Op, Region, Remote, RemoteRegion, Result, Submit, Time,
    TransferEngine,
};

const RANKS: usize = 8;
const CHUNKS: u32 = 16;
const CHUNK: u64 = 1 << 20;
/// Bytes per nanosecond: ports of 400 Gb/s.
const PORT: f64 = 50.0;

struct Rank {
    engine: Arc<TransferEngine>,
    region: Region,
    next: Option<RemoteRegion>,
}

impl Rank {
    fn pass_on(&self, chunk: u32) -> Result<()> {
        let Some(next) = &self.next else { return Ok(()) };
        let offset = u64::from(chunk) * CHUNK;
        let (src, dst) = (Local { region: &self.region, offset }, Remote { region: next, offset });
        let op = Op::Write { src, dst, len: CHUNK, imm: Some(Imm::plain(chunk)?) };
        self.engine.submit(&[op], Submit::default()).map(drop)
    }
}

/// For each rank, the handle of each chunk.
type Waits = Vec<Vec<Handle>>;

/// Makes every rank expect every chunk, and starts the first rank.
fn relay(net: &mut SimNet) -> Result<(Vec<Arc<Rank>>, Waits)> {
    let name = |rank| EngineConfig { name: format!("rank {rank}"), ..EngineConfig::default() };
    let mut ranks: Vec<Arc<Rank>> = Vec::new();
    for rank in (0..RANKS).rev() {
        let engine = net.engine(name(rank))?;
        let region = engine.alloc(u64::from(CHUNKS) * CHUNK)?;
        let there = ranks.first().map(|r| r.region.descriptor());
        let next = there.map(|d| engine.import(&d)).transpose()?;
        ranks.insert(0, Arc::new(Rank { engine, region, next }));
    }
    let mut waiting = vec![Vec::new()];
    for (i, rank) in ranks.iter().enumerate().skip(1) {
        // All ranks upstream: if one of them dies, no chunk arrives.
        let upstream = ranks[..i].iter().map(|r| rank.engine.peer(r.engine.address()));
        let upstream = upstream.collect::<Result<Vec<_>>>()?;
        let chunks = (0..CHUNKS).map(|chunk| {
            let counter = rank.engine.plain_counter(Imm::plain(chunk)?);
            let handle = counter.expect(1, &upstream, Duration::from_secs(60))?;
            let this = Arc::clone(rank);
            handle.on_done(move |arrived| drop(arrived.and_then(|()| this.pass_on(chunk))));
            Ok(handle)
        });
        waiting.push(chunks.collect::<Result<_>>()?);
    }
    for chunk in 0..CHUNKS {
        let at = u64::from(chunk) * CHUNK;
        ranks[0].region.put(at, &[chunk as u8 + 1; CHUNK as usize])?;
        ranks[0].pass_on(chunk)?;
    }
    Ok((ranks, waiting))
}

/// Runs the simulation until all waits have ended; returns the virtual time in microseconds.
fn run(net: &mut SimNet, waiting: &[Vec<Handle>]) -> u64 {
    while !waiting.iter().flatten().all(Handle::is_done) && net.step() {}
    net.now().0 / 1000
}

fn simulated() -> SimNet {
    let (delay, max_bytes, port_rate) = (1000..2000, 1 << 30, Some(PORT));
    SimNet::new(SimConfig { delay, max_bytes, port_rate, ordered: true, ..SimConfig::default() })
}

fn main() -> Result<()> {
    let mut net = simulated();
    let (ranks, waiting) = relay(&mut net)?;
    let took = run(&mut net, &waiting);
    for rank in &ranks {
        for chunk in 0..CHUNKS {
            let bytes = rank.region.get(u64::from(chunk) * CHUNK, CHUNK)?;
            assert!(bytes.iter().all(|b| *b == chunk as u8 + 1));
        }
    }
    let in_turn = (RANKS as u64 - 1) * u64::from(CHUNKS) * CHUNK * 1_000 / (PORT * 1e6) as u64;
    println!("all {RANKS} have it after {took} us; from one port alone: {in_turn} us at least");
    assert!(took < in_turn / 3);

    let mut net = simulated();
    let (ranks, mut waiting) = relay(&mut net)?;
    while net.step_until(Time(took * 500)) {}
    let doomed = 4;
    net.kill(ranks[doomed].engine.id());
    waiting[doomed].clear();
    let ended = run(&mut net, &waiting);
    let lost = |h: &Handle| matches!(h.poll(), Some(Err(EngineError::PeerLost { .. })));
    assert!(waiting[..doomed].iter().flatten().all(|h| h.poll() == Some(Ok(()))));
    assert!(waiting[doomed + 1..].iter().all(|chunks| chunks.iter().any(lost)));
    println!("rank {doomed} died after {} us; those behind it knew by {ended} us", took / 2);
    assert!(ended < took / 2 + 2_000_000, "RS-4");
    Ok(())
}

#[test]
fn a_relay_ends_with_all_bytes_or_with_the_loss_that_stopped_it() {
    main().unwrap();
}
