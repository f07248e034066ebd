//! Physical floors: the same bytes moved by nothing but the machine.
//!
//! `floor serve` reads one JSON request per line on stdin and writes one JSON reply per line on
//! stdout, keeping its memory populated in between and blocking (not spinning) while no request is
//! there.

use clap::Subcommand;
use serde::{Deserialize, Serialize};

use crate::lines;

mod copies;
pub(crate) mod raw;
mod signals;
mod tcp;

pub use copies::shuffled;
pub use raw::Routine;

pub use lines::TextResult;

const MAX_REGION: usize = 16 << 30;
const MAX_SAMPLES: usize = 1 << 20;

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Answer JSON requests from stdin, one a line, until it closes
    Serve,
    /// List the copy routines this CPU has
    Routines,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// `bytes` contiguous bytes from one mapped memory to another
    Copy,
    /// `pages` pages of `bytes` each to shuffled places
    Pages,
    /// The same as `pages`, by process_vm_writev with `iovecs` pages a call
    Cma,
    /// A flag in shared memory, half a round trip, both sides spinning
    Flag,
    /// A futex wake-up of a parked thread, one way
    Futex,
    /// 64-byte records through a single-producer ring
    Ring,
    /// `bytes` over a loopback TCP connection into their place
    TcpStream,
    /// 8 bytes over loopback TCP, half a round trip
    TcpPingpong,
    /// 8 bytes over loopback TCP into a parked reader, one way
    TcpWake,
    /// 32-byte records over loopback TCP, `pages` of them in each send call
    TcpRecords,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Temperature {
    /// Successive blocks of the region
    #[default]
    Cold,
    /// The same block again
    Hot,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Wait {
    #[default]
    Spin,
    Block,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MemoryKind {
    /// Of a memfd, which a peer could map
    #[default]
    Shared,
    /// Anonymous, which no other process can map
    Private,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    pub kind: Kind,
    #[serde(default)]
    pub routine: Routine,
    /// Bytes of one block or page
    #[serde(default = "eight")]
    pub bytes: usize,
    /// Pages in one operation
    #[serde(default = "one")]
    pub pages: usize,
    /// Copying threads, 1 or 2
    #[serde(default = "one")]
    pub threads: usize,
    #[serde(default)]
    pub temperature: Temperature,
    #[serde(default)]
    pub memory: MemoryKind,
    #[serde(default)]
    pub wait: Wait,
    /// Socket buffer in bytes; 0 keeps the system's default
    #[serde(default)]
    pub socket_buffer: usize,
    /// Whether the receiver answers each block of a stream before the next is sent
    #[serde(default)]
    pub answered: bool,
    /// Pages handed to one process_vm_writev call
    #[serde(default = "iovecs")]
    pub iovecs: usize,
    /// Operations in one sample
    #[serde(default = "one")]
    pub operations: usize,
    /// Samples to take
    #[serde(default = "one")]
    pub batches: usize,
    /// Bytes of the memory that cold blocks walk through
    #[serde(default = "region")]
    pub region: usize,
}

fn one() -> usize {
    1
}
fn eight() -> usize {
    8
}
fn iovecs() -> usize {
    256
}
fn region() -> usize {
    256 << 20
}

#[derive(Debug, Serialize)]
struct Reply {
    /// Of one operation, one figure per sample
    seconds: Vec<f64>,
}

/// Source and target memory, populated once and kept between requests.
#[derive(Debug, Default)]
pub struct Bench {
    memory: Option<copies::Memory>,
}

impl Bench {
    fn reply(&mut self, request: &Request) -> TextResult<Reply> {
        check(request)?;
        Ok(Reply { seconds: self.measure(request)? })
    }

    /// Seconds of one operation for each sample asked for.
    fn measure(&mut self, request: &Request) -> TextResult<Vec<f64>> {
        match request.kind {
            Kind::Copy => self.memory(request)?.copy(request),
            Kind::Pages => self.memory(request)?.pages(request),
            Kind::Cma => self.memory(request)?.cma(request),
            Kind::TcpStream => {
                let (source, target) = self.memory(request)?.slices();
                tcp::stream(request, source, target)
            }
            Kind::Flag => Ok(signals::flag(request)),
            Kind::Futex => Ok(signals::futex(request)),
            Kind::Ring => Ok(signals::ring(request)),
            Kind::TcpPingpong => tcp::pingpong(request),
            Kind::TcpWake => tcp::wake(request),
            Kind::TcpRecords => tcp::records(request),
        }
    }

    fn memory(&mut self, request: &Request) -> TextResult<&mut copies::Memory> {
        let (kind, region) = (request.memory, request.region);
        if self.memory.as_ref().is_some_and(|memory| !memory.is(kind, region)) {
            self.memory = None;
        }
        match &mut self.memory {
            Some(memory) => Ok(memory),
            empty => Ok(empty.insert(copies::Memory::new(kind, region)?)),
        }
    }
}

fn check(request: &Request) -> TextResult<()> {
    let total = request.bytes.saturating_mul(request.pages);
    if request.region > MAX_REGION || request.region < 4096 {
        return Err(format!("region must be 4 KiB to 16 GiB, not {} bytes", request.region));
    }
    if total == 0 || total > request.region {
        return Err(format!(
            "one operation of {} x {} bytes must fit the region of {} bytes",
            request.pages, request.bytes, request.region
        ));
    }
    if !(1..=2).contains(&request.threads) {
        return Err(format!("threads must be 1 or 2, not {}", request.threads));
    }
    if request.operations == 0 || request.batches == 0 || request.batches > MAX_SAMPLES {
        return Err(format!(
            "operations and batches must be positive, batches at most {MAX_SAMPLES}"
        ));
    }
    if !(1..=1024).contains(&request.iovecs) {
        return Err(format!("iovecs must be 1 to 1024, not {}", request.iovecs));
    }
    request.routine.available()
}

pub fn run(command: Command) -> TextResult<()> {
    match command {
        Command::Serve => {
            let mut bench = Bench::default();
            lines::serve(|request| bench.reply(request))
        }
        Command::Routines => {
            let names: Vec<_> = Routine::available_here().iter().map(Routine::name).collect();
            println!("{}", names.join("\n"));
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(line: &str) -> String {
        let mut out = Vec::new();
        let mut bench = Bench::default();
        lines::answer(line.as_bytes(), &mut out, |request| bench.reply(request)).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn bad_requests_are_answered_with_a_sentence_and_the_service_goes_on() {
        let out = reply(concat!(
            "{\"kind\":\"copy\",\"bytes\":0}\n",
            "not json\n",
            "{\"kind\":\"copy\",\"bytes\":9223372036854775807,\"pages\":2}\n",
            "{\"kind\":\"flag\",\"operations\":10,\"batches\":2}\n",
        ));
        let lines: Vec<_> = out.lines().collect();
        assert_eq!(lines.len(), 4);
        assert!(lines[..3].iter().all(|line| line.starts_with("{\"error\":")), "{out}");
        assert!(lines[3].starts_with("{\"seconds\":["), "{out}");
    }

    #[test]
    fn every_kind_returns_one_positive_figure_per_sample() {
        for kind in ["copy", "pages", "cma", "flag", "futex", "ring"].into_iter().chain([
            "tcp-stream",
            "tcp-pingpong",
            "tcp-wake",
            "tcp-records",
        ]) {
            for wait in ["spin", "block"] {
                let line = format!(
                    "{{\"kind\":\"{kind}\",\"wait\":\"{wait}\",\"bytes\":4096,\"pages\":4,\
                     \"operations\":3,\"batches\":2,\"region\":1048576}}\n"
                );
                let out = reply(&line);
                let parsed: serde_json::Value = serde_json::from_str(&out).unwrap();
                let seconds =
                    parsed["seconds"].as_array().unwrap_or_else(|| panic!("{kind}: {out}"));
                assert_eq!(seconds.len(), 2, "{kind}: {out}");
                assert!(seconds.iter().all(|s| s.as_f64().unwrap() > 0.0), "{kind}: {out}");
            }
        }
    }
}
