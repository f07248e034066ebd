//! Engine benchmark in Rust: a pair of processes, one writes, one receives.
//!
//! `engine serve` reads one JSON request per line on stdin and writes one JSON reply per line on
//! stdout: `{"seconds": [...], "transport": "shm"}` (of one operation, one per sample) or
//! `{"error": "..."}`. The clock runs from the writer's call until the receiver knows that the
//! bytes are there; both read the machine's one monotonic clock.

use std::time::Duration;

use clap::{Args, Subcommand};
use fabric_engine::{
    api::{EngineConfig, NicConfig, Spin},
    Region, TransferEngine,
};
use serde::{Deserialize, Serialize};

mod target;
mod walk;
mod writer;

use crate::{
    floor::{raw::Mapping, Temperature},
    lines::{self, text, TextResult},
    rails::Policy,
};

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Answer JSON requests from stdin, one a line, until it closes
    Serve(Options),
    /// The receiving process; started by `serve`
    #[command(hide = true)]
    Target(Options),
}

#[derive(Debug, Clone, Args)]
pub struct Options {
    #[arg(long, default_value = "shm")]
    pub transport: String,
    /// Threads that may copy at once
    #[arg(long, default_value_t = 1)]
    pub copy_threads: usize,
    #[arg(long, default_value_t = 2)]
    pub tcp_streams: usize,
    /// Bytes of the region on either side
    #[arg(long, default_value_t = 256 << 20)]
    pub region: u64,
    /// Register ordinary memory instead of the engine's own
    #[arg(long)]
    pub foreign: bool,
    /// The writer's NICs, by name or glob, with commas between
    #[arg(long, value_delimiter = ',')]
    pub nics: Vec<String>,
    /// The target's NICs
    #[arg(long, value_delimiter = ',')]
    pub target_nics: Vec<String>,
    /// libfabric's provider
    #[arg(long)]
    pub provider: Option<String>,
    /// Microseconds that threads look for work before they sleep
    #[arg(long, default_value_t = 50)]
    pub spin_us: u64,
    /// Do without retry and revival
    #[arg(long)]
    pub no_heal: bool,
    /// Do without the flight recorder
    #[arg(long)]
    pub no_records: bool,
    /// How large writes are spread over several NICs
    #[arg(long, value_enum, default_value = "adaptive")]
    pub policy: Policy,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// Counted writes of `bytes`, each after the one before
    Write,
    /// Paged writes of `pages` pages of `bytes` each to shuffled places, each after the one before
    Pages,
    /// Counted writes there and back between receivers that spin; an operation is half of it
    Echo,
    /// Counted writes with all of a sample in flight
    Rate,
    /// The same, `pages` of them in a submit
    Batch,
    /// Counted writes with at most `pages` of them in flight, shared by `threads` threads that
    /// submit
    Window,
}

/// The method by which the receiver notices a count.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Notice {
    /// It polls the counter
    #[default]
    Spin,
    /// It waits for an expectation
    Wait,
    /// A callback is called
    Callback,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    pub kind: Kind,
    #[serde(default = "eight")]
    pub bytes: u64,
    #[serde(default = "one")]
    pub pages: u32,
    /// Threads that submit: those of a window
    #[serde(default = "one")]
    pub threads: u32,
    /// Operations in one sample
    #[serde(default = "one")]
    pub operations: u32,
    #[serde(default = "one")]
    pub samples: u32,
    #[serde(default)]
    pub temperature: Temperature,
    #[serde(default)]
    pub notice: Notice,
    /// Microseconds of silence before each sample, so that the receiver sleeps
    #[serde(default)]
    pub rest_us: u64,
    /// Tell of each write of a window when it was submitted and when it was acknowledged
    #[serde(default)]
    pub trace: bool,
    /// Zero the target first, and compare its whole region afterwards; an error if it differs
    #[serde(default)]
    pub verify: bool,
}

fn eight() -> u64 {
    8
}

fn one() -> u32 {
    1
}

#[derive(Debug, Serialize)]
struct Reply {
    seconds: Vec<f64>,
    transport: String,
    /// Nanoseconds of the monotonic clock
    #[serde(skip_serializing_if = "Vec::is_empty")]
    trace: Vec<(u64, u64)>,
}

pub fn run(command: Command) -> TextResult<()> {
    let options = match command {
        Command::Target(options) => return target::run(&options),
        Command::Serve(options) => options,
    };
    let mut writer = writer::Writer::start(&options)?;
    lines::serve(|request| writer.measure(request))
}

/// The engine of either side.
fn open(options: &Options, name: &str) -> TextResult<TransferEngine> {
    let transport = options.transport.parse().map_err(text)?;
    let config = EngineConfig {
        name: name.into(),
        transports: vec![transport],
        copy_threads: options.copy_threads,
        tcp_streams: options.tcp_streams,
        // Both ends are this program's: the secret only lets NICs connect.
        token: Some(b"fabric-perf".to_vec()),
        bind: vec![std::net::Ipv4Addr::LOCALHOST.into()],
        spin: Spin::For(Duration::from_micros(options.spin_us)),
        heal: !options.no_heal,
        records: if options.no_records { 0 } else { EngineConfig::default().records },
        nics: NicConfig {
            names: options.nics.clone(),
            spray: options.policy.spray(),
            provider: options.provider.clone(),
            ..NicConfig::default()
        },
        ..EngineConfig::default()
    };
    TransferEngine::open(config).map_err(text)
}

/// A region of the size asked for, of the engine's memory or of ordinary memory.
fn region(options: &Options, engine: &TransferEngine) -> TextResult<Region> {
    let region = if options.foreign {
        let memory = Mapping::private(options.region as usize)?;
        let addr = memory.bytes().as_ptr() as usize;
        // SAFETY: the region keeps the memory, which nothing else refers to.
        unsafe { engine.register(addr, options.region, Some(Box::new(memory))) }
    } else {
        engine.alloc(options.region)
    };
    region.map_err(text)
}
