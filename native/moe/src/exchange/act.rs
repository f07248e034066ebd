//! What the state asks of the engine: done without the state's lock, for its callbacks take that.

use std::sync::{Arc, Weak};

use fabric_engine::{Local, Op, Region, Remote, Result, Submit};

use super::{
    link::{Stage, Wire},
    Inner,
};

/// What a write is part of, for whoever waits until the memory that it reads is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Load {
    /// Rows on their way to experts.
    Rows,
    /// Answers on their way back.
    Answers,
    /// Blocks and counts.
    Control,
    /// That this rank waits for another. Nothing hangs on whether it arrives.
    Word,
}

/// One write, in bytes of both memories, blocks or rows as the stage says; it counts at the peer's counter for a stage.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    pub src: u64,
    pub dst: u64,
    pub len: u64,
    pub counts: Stage,
}

impl Piece {
    /// No bytes: what counts is there already, or is nothing but the count.
    pub fn count(counts: Stage) -> Self {
        Self { src: 0, dst: 0, len: 0, counts }
    }
}

#[derive(Debug)]
pub enum Act {
    /// Waits for `n` counts.
    Expect {
        wire: Arc<Wire>,
        stage: Stage,
        n: u32,
    },
    Write {
        wire: Arc<Wire>,
        piece: Piece,
        load: Load,
    },
    /// Writes `words` down where the piece begins, then writes the piece.
    Tell {
        wire: Arc<Wire>,
        words: Vec<u32>,
        piece: Piece,
    },
    /// Takes memory back from whoever could write it.
    Revoke {
        rank: u32,
        memory: Region,
    },
    /// Tells the state when a beat is over.
    Beat,
}

/// What has ended.
#[derive(Clone, Copy, Debug)]
pub enum Ended {
    Came(Stage),
    Written(Load, Stage),
}

impl Inner {
    pub(super) fn run(self: &Arc<Self>, acts: Vec<Act>) {
        for act in acts {
            match act {
                Act::Expect { wire, stage, n } => self.expect(wire, stage, n),
                Act::Write { wire, piece, load } => self.write(wire, piece, load),
                Act::Beat => self.start_beat(),
                Act::Revoke { rank, memory } => match memory.revoke() {
                    Ok(handle) => {
                        let weak = Arc::downgrade(self);
                        handle.on_done(move |end| {
                            if let Some(inner) = weak.upgrade() {
                                inner.revoked(rank, end);
                            }
                        });
                    }
                    Err(e) => self.revoked(rank, Err(e)),
                },
                Act::Tell { wire, words, piece } => {
                    let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
                    match self.control.put(piece.src, &bytes) {
                        Ok(()) => self.write(wire, piece, Load::Control),
                        Err(e) => {
                            self.ended(&wire, Ended::Written(Load::Control, piece.counts), Err(e))
                        }
                    }
                }
            }
        }
    }

    fn expect(self: &Arc<Self>, wire: Arc<Wire>, stage: Stage, n: u32) {
        let counter = &wire.ours.counters[stage as usize];
        let writers = std::slice::from_ref(&wire.peer);
        match counter.expect(n, writers, self.patience()) {
            Ok(handle) => {
                let weak = Arc::downgrade(self);
                handle.on_done(move |end| tell(&weak, &wire, Ended::Came(stage), end));
            }
            Err(e) => self.ended(&wire, Ended::Came(stage), Err(e)),
        }
    }

    fn write(self: &Arc<Self>, wire: Arc<Wire>, piece: Piece, load: Load) {
        let ended = Ended::Written(load, piece.counts);
        let (ours, theirs) = match piece.counts.is_rows() && piece.len > 0 {
            true => (&self.rows, &wire.rows),
            false => (&self.control, &wire.control),
        };
        let op = Op::Write {
            src: Local { region: ours, offset: piece.src },
            dst: Remote { region: theirs, offset: piece.dst },
            len: piece.len,
            imm: Some(wire.counters[piece.counts as usize].imm()),
        };
        let options = Submit { timeout: Some(self.timeout()), ..Submit::default() };
        match self.engine.submit(&[op], options) {
            Ok(handle) => {
                let (weak, again) = (Arc::downgrade(self), handle.clone());
                handle.on_done(move |end| {
                    let failed = end.is_err() && load != Load::Word;
                    tell(&weak, &wire, ended, end);
                    if failed {
                        // What failed may be read for a while yet, and must not be read as something else.
                        again.on_quiet(move |_| settled(&weak));
                    }
                });
            }
            Err(e) => {
                self.ended(&wire, ended, Err(e));
                if load != Load::Word {
                    self.settled();
                }
            }
        }
    }
}

fn settled(inner: &Weak<Inner>) {
    if let Some(inner) = inner.upgrade() {
        inner.settled();
    }
}

fn tell(inner: &Weak<Inner>, wire: &Wire, what: Ended, end: Result<()>) {
    if let Some(inner) = inner.upgrade() {
        inner.ended(wire, what, end);
    }
}
