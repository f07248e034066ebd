//! A prefiller and a decoder with engines behind them that compute recognisable bytes.

use std::{collections::HashMap, sync::Arc};

use fabric_engine::{
    api::{EngineConfig, NicConfig, TransportKind},
    locks::Mutex,
    Region, Result, TransferEngine,
};
use fabric_kvcache::{Decoder, Event, JobEvent, LocalRank, Prefiller, Pull, Terms};

use crate::cache::{Cache, Shape};

/// Bytes of a tail.
pub const TAIL: u64 = 64;
/// Tails that an end has room for.
pub const SLOTS: u32 = 8;

/// The tail of a request.
pub fn tail_of(request: u64) -> Vec<u8> {
    let mut rng = fastrand::Rng::with_seed(!request);
    (0..TAIL).map(|_| rng.u8(1..)).collect()
}

/// What a decoder's events were, by request.
pub type Events = Arc<Mutex<HashMap<u64, Vec<Event>>>>;
/// What a prefiller's events were, in order.
pub type JobEvents = Arc<Mutex<Vec<(u64, JobEvent)>>>;

pub struct DecodeNode {
    pub caches: Vec<Cache>,
    pub tail: Region,
    pub decoder: Decoder,
    pub events: Events,
}

pub struct PrefillNode {
    pub caches: Vec<Cache>,
    pub tail: Region,
    pub prefiller: Prefiller,
    pub events: JobEvents,
}

/// How an instance's cache is cut.
#[derive(Clone, Copy, Debug)]
pub struct Cut {
    pub page_tokens: u32,
    pub pages: u32,
}

fn ranks(
    engines: &[Arc<TransferEngine>],
    shape: &Shape,
    cut: Cut,
) -> Result<(Vec<Cache>, Region, Vec<LocalRank>)> {
    let count = engines.len() as u32;
    let tail = engines[0].alloc(TAIL * 8)?;
    let mut caches = Vec::new();
    let mut local = Vec::new();
    for (rank, engine) in engines.iter().enumerate() {
        let layout = shape.layout(rank as u32, count, cut.page_tokens, cut.pages);
        let cache = Cache::new(engine, layout)?;
        local.push(LocalRank {
            rank: rank as u32,
            engine: Arc::clone(engine),
            buffers: vec![cache.region.clone()],
            tail: (rank == 0).then(|| tail.clone()),
        });
        caches.push(cache);
    }
    Ok((caches, tail, local))
}

pub fn terms() -> Terms {
    let (beat, silence) =
        (std::time::Duration::from_millis(100), std::time::Duration::from_secs(20));
    Terms { beat, silence, max_message: 4 << 20, tail_nbytes: TAIL, ..Terms::default() }
}

impl DecodeNode {
    pub fn new(engines: &[Arc<TransferEngine>], shape: &Shape, cut: Cut) -> Result<Self> {
        let (caches, tail, local) = ranks(engines, shape, cut)?;
        let events = Events::default();
        let theirs = Arc::clone(&events);
        let layouts = caches.iter().map(|c| c.layout.clone()).collect();
        let decoder = Decoder::new("decoder", layouts, local, terms(), move |seq, event| {
            theirs.lock().entry(seq).or_default().push(event);
        })?;
        Ok(Self { caches, tail, decoder, events })
    }

    pub fn events(&self, seq: u64) -> Vec<Event> {
        self.events.lock().get(&seq).cloned().unwrap_or_default()
    }
}

impl PrefillNode {
    pub fn new(engines: &[Arc<TransferEngine>], shape: &Shape, cut: Cut) -> Result<Self> {
        let (caches, tail, local) = ranks(engines, shape, cut)?;
        let events = JobEvents::default();
        let theirs = Arc::clone(&events);
        let layouts = caches.iter().map(|c| c.layout.clone()).collect();
        let prefiller = Prefiller::new("prefiller", layouts, local, terms(), move |job, event| {
            theirs.lock().push((job, event));
        })?;
        Ok(Self { caches, tail, prefiller, events })
    }

    /// Computes a chunk of a request in all layers, and sends it as it goes.
    pub fn pass(&self, job: u64, request: u64, tokens: std::ops::Range<u64>, table: &[u32]) {
        let counted = self.prefiller.counted();
        self.prefiller.begin(&[(job, tokens.end)], counted).unwrap();
        for layer in 0..self.prefiller.layers() {
            for cache in &self.caches {
                cache.compute(request, layer, tokens.clone(), table);
            }
            self.prefiller.advance(1);
        }
    }

    pub fn tail(&self, job: u64, request: u64) -> Result<()> {
        self.tail.put(0, &[request as u8; TAIL as usize])?;
        self.prefiller.finish(job, 0)
    }
}

/// Engines of this process over the transports that `FABRIC_KV_TRANSPORTS` names, for example
/// `verbs`; those of prefillers over the NICs of `FABRIC_TEST_NICS_A`, of decoders over those of
/// `FABRIC_TEST_NICS_B`, if these are given.
pub fn engines(count: u32, name: &str) -> Vec<Arc<TransferEngine>> {
    let named = std::env::var("FABRIC_KV_TRANSPORTS");
    let kind = |name: &str| match name {
        "shm" => TransportKind::Shm,
        "tcp" => TransportKind::Tcp,
        "verbs" => TransportKind::Verbs,
        "libfabric" => TransportKind::Libfabric,
        _ => panic!("FABRIC_KV_TRANSPORTS names shm, tcp, verbs or libfabric, not {name}"),
    };
    let transports: Vec<TransportKind> =
        named.as_deref().unwrap_or("shm,tcp").split(',').map(kind).collect();
    engines_over(&transports, count, name)
}

/// As `engines`, over these transports.
pub fn engines_over(
    transports: &[TransportKind],
    count: u32,
    name: &str,
) -> Vec<Arc<TransferEngine>> {
    let side = if name == "prefill" { "FABRIC_TEST_NICS_A" } else { "FABRIC_TEST_NICS_B" };
    let nics = std::env::var(side).unwrap_or_default();
    let names: Vec<String> =
        nics.split(',').filter(|nic| !nic.is_empty()).map(str::to_owned).collect();
    let open = |i: u32| {
        let (name, transports) = (format!("{name}-{i}"), transports.to_vec());
        let nics = NicConfig { names: names.clone(), ..NicConfig::default() };
        let config = EngineConfig { name, transports, nics, ..EngineConfig::default() };
        Arc::new(TransferEngine::open(config).unwrap())
    };
    (0..count).map(open).collect()
}

pub fn ask(tokens: u64, have: u64, table: Vec<u32>, salt: u64) -> Pull {
    let timeout = std::time::Duration::from_secs(20);
    Pull { tokens, have, salt, tables: vec![table], timeout, ..Pull::default() }
}
