//! From a store to the watched word to the first post of a layer's pages (fabric-lib, table 4): a
//! prefiller and a decoder on two engines of this process, over shared memory. Each layer has one
//! small page, so that what is timed is the way to the post, and not copying.
//!
//! `watch` reads one JSON request a line on stdin and writes one JSON reply a line on stdout:
//! `{"callback": [...], "post": [...], "rung": [...]}`, nanoseconds of each sample.

use std::{
    sync::{
        atomic::{AtomicU64, Ordering},
        mpsc::{channel, Receiver},
        Arc,
    },
    thread,
    time::Duration,
};

use clap::Args;
use fabric_engine::{
    api::{EngineConfig, Spin, TransportKind},
    Time, TransferEngine, Watcher,
};
use fabric_kvcache::{
    layout::{BufferOffset, CacheGroup, CacheLayout, CacheTensor},
    Decoder, JobEvent, LocalRank, Prefiller, Pull, Terms, Timeline,
};
use serde::{Deserialize, Serialize};

use crate::lines::{self, text, TextResult};

#[derive(Debug, Clone, Args)]
pub struct Options {
    /// Microseconds that the engines' threads look for work before they sleep
    #[arg(long, default_value_t = 50)]
    spin_us: u64,
}

/// How the word is changed, and what the watching thread is doing then.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum WakePath {
    /// A plain store, while the thread still looks
    Spinning,
    /// A plain store, when the thread naps between its looks
    Napping,
    /// A store that wakes the thread, which has gone to sleep
    Woken,
}

impl WakePath {
    /// What is between two stores, asleep: there may be no core for one more thread that looks.
    fn sleep_between(self) {
        thread::sleep(match self {
            Self::Spinning => Duration::from_micros(60),
            Self::Napping | Self::Woken => Duration::from_millis(2),
        });
    }
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Request {
    way: WakePath,
    samples: u32,
}

#[derive(Debug, Default, Serialize)]
struct Reply {
    /// Until the callback runs
    callback: Vec<u64>,
    /// Until the page and its count are in the decoder's memory
    post: Vec<u64>,
    /// Until the decoder, if it sleeps, was woken besides
    rung: Vec<u64>,
}

const LAYERS: u64 = 64;
const TOKENS: u64 = 256;
const PAGE: u64 = 64;
const TIMEOUT: Duration = Duration::from_secs(30);

/// The word's value that a callback was about, and when it began and had returned.
type CallbackTimes = (u64, u64, u64);

struct Setup {
    decoder: Decoder,
    prefiller: Arc<Prefiller>,
    word: Watcher,
    callback_times: Receiver<CallbackTimes>,
    jobs: Receiver<(u64, JobEvent)>,
    to: u64,
    job: Option<SentJob>,
}

/// The job that is being sent.
struct SentJob {
    job: u64,
    timeline: Arc<Timeline>,
    /// Layers still to come in all its passes.
    left: u64,
}

impl SentJob {
    /// When the layer that was last to come was posted.
    fn posted(&self) -> Option<u64> {
        let layer = (TOKENS * LAYERS - self.left - 1) % LAYERS;
        self.timeline.layers()[layer as usize].posted.map(|time| time.0)
    }
}

pub fn run(options: &Options) -> TextResult<()> {
    let mut setup = Setup::new(options)?;
    lines::serve(|request| setup.measure(request))
}

fn rank(name: &str, options: &Options) -> TextResult<(CacheLayout, LocalRank)> {
    let config = EngineConfig {
        name: name.into(),
        transports: vec![TransportKind::Shm],
        spin: Spin::For(Duration::from_micros(options.spin_us)),
        ..EngineConfig::default()
    };
    let engine = Arc::new(TransferEngine::open(config).map_err(text)?);
    let tensor = CacheTensor {
        name: "k".into(),
        heads: 1,
        first_head: 0,
        held_heads: 1,
        width: PAGE as u32,
        dtype: "uint8".into(),
        page_stride: PAGE,
        head_stride: PAGE,
        token_stride: PAGE,
        places: (0..LAYERS)
            .map(|l| BufferOffset { buffer: 0, offset: l * TOKENS * PAGE })
            .collect(),
    };
    let group = CacheGroup {
        name: "all".into(),
        layers: (0..LAYERS as u32).collect(),
        page_tokens: 1,
        is_state: false,
        block_tokens: None,
        pages: TOKENS as u32,
        window: None,
        tensors: vec![tensor],
    };
    let nbytes = LAYERS * TOKENS * PAGE;
    let region = engine.alloc(nbytes).map_err(text)?;
    let layout = CacheLayout {
        model: "watch".into(),
        groups: vec![group],
        buffers: vec![nbytes],
        is_stage: false,
    };
    Ok((layout, LocalRank { rank: 0, engine, buffers: vec![region], tail: None }))
}

impl Setup {
    fn new(options: &Options) -> TextResult<Self> {
        let (layout, local) = rank("prefiller", options)?;
        let engine = Arc::clone(&local.engine);
        let (sender, jobs) = channel();
        let on_event = move |job, event| drop(sender.send((job, event)));
        let prefiller =
            Prefiller::new("prefiller", vec![layout], vec![local], Terms::default(), on_event);
        let prefiller = Arc::new(prefiller.map_err(text)?);
        let advance = prefiller.advancer();
        let (sender, callback_times) = channel();
        let on_change = move |old, new| {
            let entered = Time::now().0;
            advance(old, new);
            let _ = sender.send((new, entered, Time::now().0));
        };
        let word = engine.watch(on_change).map_err(text)?;
        let (layout, local) = rank("decoder", options)?;
        let decoder =
            Decoder::new("decoder", vec![layout], vec![local], Terms::default(), |_, _| ());
        let decoder = decoder.map_err(text)?;
        let to = decoder.connect(&prefiller.offer()).map_err(text)?;
        Ok(Self { decoder, prefiller, word, callback_times, jobs, to, job: None })
    }

    fn measure(&mut self, request: &Request) -> TextResult<Reply> {
        let mut reply = Reply::default();
        for _ in 0..request.samples {
            self.make_ready()?;
            request.way.sleep_between();
            let value = self.word.load() + 1;
            let stored = Time::now().0;
            match request.way {
                WakePath::Woken => self.word.store(value).map_err(text)?,
                WakePath::Spinning | WakePath::Napping => {
                    // SAFETY: the word is 8 aligned bytes that live as long as the watcher, and are
                    // only changed atomically.
                    let word = unsafe { AtomicU64::from_ptr(self.word.addr() as *mut u64) };
                    word.store(value, Ordering::Release);
                }
            }
            // Waits asleep: the one that stores is a GPU, or goes on with its own work.
            match self.callback_times.recv_timeout(TIMEOUT) {
                Ok((new, entered, returned)) if new == value => {
                    let posted = self.job.as_ref().and_then(SentJob::posted);
                    let posted = posted.ok_or("the layer's page was not posted")?;
                    reply.callback.push(entered.saturating_sub(stored));
                    reply.post.push(posted.saturating_sub(stored));
                    reply.rung.push(returned.saturating_sub(stored));
                }
                Ok((new, ..)) => return Err(format!("the callback saw {new}, not {value}")),
                Err(_) => return Err("no callback noticed that the word has changed".into()),
            }
        }
        Ok(reply)
    }

    /// The next layer is of a pass that has begun, of a job that has pages to send.
    fn make_ready(&mut self) -> TextResult<()> {
        let mut sent = match self.job.take() {
            Some(SentJob { job, left: 0, .. }) => {
                self.prefiller.finish(job, 0).map_err(text)?;
                self.wait_event(|event| matches!(event, JobEvent::Released).then_some(()))?;
                self.accept()?
            }
            Some(open) => open,
            None => self.accept()?,
        };
        if sent.left % LAYERS == 0 {
            let pass = [(sent.job, TOKENS - sent.left / LAYERS + 1)];
            self.prefiller.begin(&pass, self.word.load()).map_err(text)?;
        }
        sent.left -= 1;
        self.job = Some(sent);
        Ok(())
    }

    fn accept(&self) -> TextResult<SentJob> {
        let table: Vec<u32> = (0..TOKENS as u32).collect();
        let pull = Pull {
            tokens: TOKENS,
            tables: vec![table.clone()],
            timeout: Duration::from_secs(3600),
            ..Pull::default()
        };
        self.decoder.request(self.to, pull).map_err(text)?;
        let (job, timeline) = self.wait_event(|event| match event {
            JobEvent::Requested(asked) => Some(Arc::clone(&asked.timeline)),
            _ => None,
        })?;
        self.prefiller.accept(job, vec![table], 0).map_err(text)?;
        Ok(SentJob { job, timeline, left: TOKENS * LAYERS })
    }

    /// The next event, if it is the one that is wanted: its job, and what it brings.
    fn wait_event<T>(&self, wanted: impl Fn(&JobEvent) -> Option<T>) -> TextResult<(u64, T)> {
        let Ok((job, event)) = self.jobs.recv_timeout(TIMEOUT) else {
            return Err("the prefiller was told nothing".into());
        };
        let brings = wanted(&event).ok_or(format!("the prefiller was told {event:?}"))?;
        Ok((job, brings))
    }
}
