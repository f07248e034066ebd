//! What the flight recorder adds to a request: engines with and without it in one process, over a
//! link to nowhere, in many short turns. Their core and what else the machine does are the same;
//! where their memory lies isn't, which makes some percent between runs. One thread does it all.

use std::time::{Duration, Instant};

use fabric_engine::{
    api::{EngineConfig, Imm, TransportKind},
    Local, Op, Region, Remote, RemoteRegion, Submit, TransferEngine,
};

const TURNS: usize = 2000;
const REQUESTS: u32 = 200;
/// Of the first one in many is kept, of the second each.
const SIZES: [u64; 2] = [8, 64 << 10];

struct Writer {
    engine: TransferEngine,
    src: Region,
    dst: RemoteRegion,
    imm: Imm,
    /// The peer, as long as there are writes.
    _there: (Region, TransferEngine),
}

impl Writer {
    fn new(records: usize) -> Self {
        let open = |name: &str| {
            let transports = vec![TransportKind::Null];
            let config =
                EngineConfig { name: name.into(), records, transports, ..EngineConfig::default() };
            TransferEngine::open(config).expect("a null engine opens")
        };
        let (engine, peer) = (open("writer"), open("peer"));
        let src = engine.alloc(1 << 20).expect("memory");
        let region = peer.alloc(1 << 20).expect("memory");
        let dst = engine.import(&region.descriptor()).expect("a descriptor");
        let imm = Imm::plain(1).expect("small");
        let writer = Self { engine, src, dst, imm, _there: (region, peer) };
        let connected = writer.write(8).wait(Duration::from_secs(5));
        connected.expect("in time").expect("connected");
        writer
    }

    fn write(&self, len: u64) -> fabric_engine::Handle {
        let op = Op::Write {
            src: Local { region: &self.src, offset: 0 },
            dst: Remote { region: &self.dst, offset: 0 },
            len,
            imm: Some(self.imm),
        };
        self.engine.submit(&[op], Submit::default()).expect("a write")
    }

    /// Nanoseconds of a request.
    fn turn(&self, len: u64) -> f64 {
        let begin = Instant::now();
        (0..REQUESTS).for_each(|_| drop(self.write(len)));
        begin.elapsed().as_nanos() as f64 / f64::from(REQUESTS)
    }
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn main() {
    let (off, on) = (Writer::new(0), Writer::new(EngineConfig::default().records));
    for len in SIZES {
        let (mut without, mut with) = (Vec::new(), Vec::new());
        for turn in 0..TURNS {
            let mut on_turn = || with.push(on.turn(len));
            if turn % 2 == 0 {
                on_turn();
                without.push(off.turn(len));
            } else {
                without.push(off.turn(len));
                on_turn();
            }
        }
        let (without, with) = (median(without), median(with));
        println!("{len:6} B: {without:.1} ns, {:.1} more with the recorder", with - without);
    }
}
