//! `fabric-perf`: measures what this machine can do at best, and what the engine makes of it.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

mod engine;
mod floor;
mod lines;
mod moe;
mod rails;
mod store;
mod watch;

#[derive(Debug, Parser)]
#[command(version, about = "Measures the engine and the physical floors beside it")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Plain copies, flags, futexes and sockets: what no engine can beat
    #[command(subcommand)]
    Floor(floor::Command),
    /// The engine between two processes
    #[command(subcommand)]
    Engine(engine::Command),
    /// The engine over rails that differ and fail, in the simulator
    #[command(subcommand)]
    Rails(rails::Command),
    /// Tokens between experts, on simulated NICs
    Moe(moe::Options),
    /// From a store to the word that counts layers to the first post: answers JSON requests from stdin, one a line
    Watch(watch::Options),
    /// Stores to a word of another process, when JSON requests on stdin say so, one a line
    Store(store::Options),
}

fn main() -> ExitCode {
    let outcome = match Arguments::parse().command {
        Command::Floor(command) => floor::run(command),
        Command::Engine(command) => engine::run(command),
        Command::Rails(command) => rails::run(command),
        Command::Moe(options) => moe::run(&options),
        Command::Watch(options) => watch::run(&options),
        Command::Store(options) => store::run(&options),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("fabric-perf: {error}");
            ExitCode::FAILURE
        }
    }
}
