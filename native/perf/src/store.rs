//! Stores to a word of another process, as a GPU does: by a process that has no part in the
//! interpreter there.
//!
//! `store --pid --addr` reads one JSON request a line on stdin, `{"first": 1, "samples": 100,
//! "rest_us": 60}`, and writes one JSON reply a line on stdout: `{"stored": [...]}`, when each
//! value was about to be stored, monotonic nanoseconds.

use std::{thread, time::Duration};

use clap::Args;
use fabric_engine::Time;
use serde::{Deserialize, Serialize};

use crate::{
    floor::raw::store_word,
    lines::{self, TextResult},
};

#[derive(Debug, Clone, Args)]
pub struct Options {
    /// Of the other process, which must let this one write to its memory
    #[arg(long)]
    pid: i32,
    /// Where the word lies there
    #[arg(long)]
    addr: usize,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Request {
    /// The value that is stored first; each one after it is larger by one
    first: u64,
    samples: u32,
    /// Before each store, asleep
    rest_us: u64,
}

#[derive(Debug, Serialize)]
struct Reply {
    stored: Vec<u64>,
}

pub fn run(options: &Options) -> TextResult<()> {
    lines::serve(|request| store(options, request))
}

fn store(options: &Options, request: &Request) -> TextResult<Reply> {
    let mut stored = Vec::with_capacity(request.samples as usize);
    for value in (request.first..).take(request.samples as usize) {
        thread::sleep(Duration::from_micros(request.rest_us));
        stored.push(Time::now().0);
        store_word(options.pid, options.addr, value)?;
    }
    Ok(Reply { stored })
}
