//! The receiving process: says where it is, then notices counts and tells when.

use std::{
    io,
    sync::{mpsc, Arc},
    time::Duration,
};

use fabric_engine::{
    api::{Imm, RegionDescriptor},
    Counter, Local, Op, Region, Remote, RemoteRegion, Submit, Time, TransferEngine,
};
use serde::{Deserialize, Serialize};

use super::{walk, walk::Walk, Notice, Options};
use crate::lines::{text, write_line, TextResult};

/// The endpoint that each side sends to the other.
#[derive(Debug, Serialize, Deserialize)]
pub struct EndpointDescriptor {
    region: Vec<u8>,
    imm: u32,
}

impl EndpointDescriptor {
    pub fn new(region: &Region, imm: u32) -> Self {
        Self { region: region.descriptor().to_bytes(), imm }
    }

    pub fn read(&self, engine: &TransferEngine) -> TextResult<(RemoteRegion, Imm)> {
        let descriptor = RegionDescriptor::from_bytes(&self.region).map_err(text)?;
        let region = engine.import(&descriptor).map_err(text)?;
        Ok((region, Imm::plain(self.imm).map_err(text)?))
    }
}

/// One line on the target's stdin; each is answered with one line.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TargetCommand {
    /// Target of replies: the writer's region and counter
    Connect(EndpointDescriptor),
    /// Reply at once; then notice `rounds` times `counts` counts, write back after each if told to,
    /// and reply with the times
    Watch { rounds: u32, counts: u32, notice: Notice, answer: bool },
    /// Zero the region
    Clear,
    /// Reply what is wrong with the region after this many steps, or nothing
    Check { walk: Walk, steps: u64 },
}

/// Nothing takes longer.
pub const LONG: Duration = Duration::from_secs(60);
const WRITES: u32 = 7;

struct AnswerWriter {
    engine: Arc<TransferEngine>,
    src: Region,
    dst: RemoteRegion,
    imm: Imm,
}

impl AnswerWriter {
    fn answer(&self) {
        let op = Op::Write {
            src: Local { region: &self.src, offset: 0 },
            dst: Remote { region: &self.dst, offset: 0 },
            len: 8,
            imm: Some(self.imm),
        };
        if let Err(e) = self.engine.submit(&[op], Submit::default()) {
            eprintln!("the target can't answer: {e}");
        }
    }
}

pub fn run(options: &Options) -> TextResult<()> {
    // SAFETY: PR_SET_PDEATHSIG takes a signal number and touches no memory.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    let engine = Arc::new(super::open(options, "target")?);
    let region = super::region(options, &engine)?;
    walk::clear(&region)?;
    let counter = Arc::new(engine.plain_counter(Imm::plain(WRITES).map_err(text)?));
    let mut out = io::stdout();
    write_line(&mut out, &EndpointDescriptor::new(&region, WRITES))?;
    let mut back = None;
    for line in io::stdin().lines() {
        match serde_json::from_str(&line.map_err(text)?).map_err(text)? {
            TargetCommand::Connect(descriptor) => {
                let src = engine.alloc(4096).map_err(text)?;
                let (dst, imm) = descriptor.read(&engine)?;
                back = Some(Arc::new(AnswerWriter { engine: Arc::clone(&engine), src, dst, imm }));
                write_line(&mut out, &true)?;
            }
            TargetCommand::Watch { rounds, counts, notice, answer } => {
                let back = back.as_ref().ok_or("told to watch before it met the writer")?;
                let times = match notice {
                    Notice::Spin => {
                        let seen = counter.arrived();
                        write_line(&mut out, &true)?;
                        spin(&counter, answer.then_some(back), seen, (rounds, counts))?
                    }
                    Notice::Wait | Notice::Callback => {
                        // What spinning rounds counted was never claimed; now, before more comes.
                        let rest = counter.unclaimed() as u32;
                        counter.expect(rest, &[], LONG).map_err(text)?;
                        if notice == Notice::Wait {
                            write_line(&mut out, &true)?;
                            wait(&counter, back, rounds, counts)?
                        } else {
                            let (told, times) = mpsc::channel();
                            arm(&counter, back, (rounds, counts), told);
                            write_line(&mut out, &true)?;
                            (0..rounds).map_while(|_| times.recv_timeout(LONG).ok()).collect()
                        }
                    }
                };
                write_line(&mut out, &times)?;
            }
            TargetCommand::Clear => {
                walk::clear(&region)?;
                write_line(&mut out, &true)?;
            }
            TargetCommand::Check { walk, steps } => {
                let fault = region.with_bytes(0, region.len(), |bytes| walk.fault(steps, bytes));
                write_line(&mut out, &fault.map_err(text)?)?;
            }
        }
    }
    Ok(())
}

/// The times at which each round was noticed, nanoseconds.
fn spin(
    counter: &Counter,
    back: Option<&Arc<AnswerWriter>>,
    mut seen: u64,
    (rounds, counts): (u32, u32),
) -> TextResult<Vec<u64>> {
    let mut times = Vec::with_capacity(rounds as usize);
    for _ in 0..rounds {
        seen += u64::from(counts);
        spin_until(|| counter.poll().is_ok_and(|n| n >= seen), "what was written did not arrive")?;
        times.push(Time::now().0);
        if let Some(back) = back {
            back.answer();
        }
    }
    Ok(times)
}

fn wait(counter: &Counter, back: &AnswerWriter, rounds: u32, counts: u32) -> TextResult<Vec<u64>> {
    let mut times = Vec::with_capacity(rounds as usize);
    for _ in 0..rounds {
        let handle = counter.expect(counts, &[], LONG).map_err(text)?;
        handle.wait(LONG).ok_or("what was written did not arrive")?.map_err(text)?;
        times.push(Time::now().0);
        back.answer();
    }
    Ok(times)
}

/// Has a callback tell the time of the next round. It arms the one after before it answers, so
/// that no round can come early.
fn arm(
    counter: &Arc<Counter>,
    back: &Arc<AnswerWriter>,
    (rounds, counts): (u32, u32),
    told: mpsc::Sender<u64>,
) {
    if rounds == 0 {
        return;
    }
    let handle = match counter.expect(counts, &[], LONG) {
        Ok(handle) => handle,
        Err(e) => return eprintln!("the target can't expect: {e}"),
    };
    let (counter, back) = (Arc::clone(counter), Arc::clone(back));
    handle.on_done(move |result| {
        let now = Time::now().0;
        if let Err(e) = result {
            return eprintln!("the target's expectation failed: {e}");
        }
        // The receiver has gone if a round took too long.
        let _ = told.send(now);
        arm(&counter, &back, (rounds - 1, counts), told);
        back.answer();
    });
}

/// Polls for at most [`LONG`]. It never yields: two that yield to each other on one core stay
/// there, two that don't are moved apart.
pub fn spin_until(mut ready: impl FnMut() -> bool, otherwise: &str) -> TextResult<()> {
    let start = Time::now();
    let mut turns = 0u32;
    while !ready() {
        turns = turns.wrapping_add(1);
        if turns.is_multiple_of(1024) && Time::now().since(start) > LONG {
            return Err(otherwise.into());
        }
        std::hint::spin_loop();
    }
    Ok(())
}
