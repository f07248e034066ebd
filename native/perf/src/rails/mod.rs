//! Rails that differ, slow down, die and return, in the simulator, by each policy.
//!
//! `rails run` carries one scenario out with the engine's own group on a virtual clock and prints
//! one JSON object: the summary, what arrived in each millisecond by rail, the transfers, and the
//! slices of the time asked for.

use std::{io, path::PathBuf};

use clap::{Args, Subcommand, ValueEnum};
use fabric_engine::api::Spray;
use serde::Serialize;

#[cfg(test)]
mod aims;
mod run;
mod scenario;
mod summary;

use crate::lines::{write_line, TextResult};
use run::{EndedTransfer, Run, Slice};
use scenario::Scenario;
use summary::Summary;

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Carry out one scenario
    Run(Options),
    /// Print the scenarios that have a name, one JSON object a line
    List,
}

#[derive(Debug, Args)]
pub struct Options {
    /// A scenario's name, or a file with one in JSON
    scenario: String,
    #[arg(long, value_enum, default_value = "adaptive")]
    policy: Policy,
    /// Print the slices posted or ended between two times, in ms: 59.5:62
    #[arg(long, value_parser = span)]
    slices: Option<(f64, f64)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    Adaptive,
    RoundRobin,
    Random,
}

impl Policy {
    pub fn spray(self) -> Spray {
        match self {
            Self::Adaptive => Spray::Adaptive,
            Self::RoundRobin => Spray::RoundRobin,
            Self::Random => Spray::Random(1),
        }
    }
}

#[derive(Debug, Serialize)]
struct Report<'a> {
    scenario: &'a Scenario,
    policy: Policy,
    summary: Summary,
    /// Bytes that arrived in each millisecond, by rail
    arrived: Vec<Vec<u64>>,
    transfers: &'a [EndedTransfer],
    slices: Vec<Slice>,
    digest: u64,
}

pub fn run(command: Command) -> TextResult<()> {
    let mut out = io::stdout().lock();
    let options = match command {
        Command::List => {
            return scenario::named().iter().try_for_each(|s| write_line(&mut out, s));
        }
        Command::Run(options) => options,
    };
    let scenario = find(&options.scenario)?;
    let run = run::run(&scenario, options.policy.spray())?;
    let Run { ref transfers, digest, .. } = run;
    let report = Report {
        summary: summary::summary(&scenario, &run),
        arrived: summary::by_rail(&scenario, &run),
        policy: options.policy,
        slices: options.slices.map_or(Vec::new(), |span| within(&run, span)),
        scenario: &scenario,
        transfers,
        digest,
    };
    write_line(&mut out, &report)
}

fn find(name: &str) -> TextResult<Scenario> {
    let named = scenario::named();
    if let Some(scenario) = named.iter().find(|s| s.name == name) {
        return Ok(scenario.clone());
    }
    let path = PathBuf::from(name);
    if !path.exists() {
        let names: Vec<_> = named.iter().map(|s| s.name.as_str()).collect();
        return Err(format!("no scenario or file is called {name}; known: {}", names.join(", ")));
    }
    let text = std::fs::read_to_string(path).map_err(|e| e.to_string())?;
    serde_json::from_str(&text).map_err(|e| format!("{name}: {e}"))
}

fn within(run: &Run, (from, to): (f64, f64)) -> Vec<Slice> {
    let (from, to) = ((from * 1e6) as u64, (to * 1e6) as u64);
    run.slices.iter().filter(|s| s.posted < to && s.ended >= from).copied().collect()
}

fn span(text: &str) -> Result<(f64, f64), String> {
    let parts = text.split_once(':').and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
    parts.filter(|(a, b)| a < b).ok_or_else(|| format!("{text:?} is not FROM:TO in ms"))
}
