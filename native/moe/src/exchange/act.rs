//! Actions that the state requests of the engine: executed without the state's lock, which its
//! callbacks take.

use std::sync::{Arc, Weak};

use fabric_engine::{
    EngineError, Expect, Listener, Local, Op, Outcome, Quiet, Region, Remote, Submit,
};

use super::{
    link::{Stage, Wire},
    Inner,
};

/// The purpose of a write, for waits until the memory that it reads is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Load {
    /// Rows on their way to experts.
    Rows,
    /// Answers on their way back.
    Answers,
    /// Blocks and counts.
    Control,
    /// The signal that this rank waits for another. Its arrival is not required.
    Word,
}

/// One write, in bytes of both memories, blocks or rows as the stage says; it counts at the peer's
/// counter for a stage.
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
    /// Writes `words` at the begin of the source range, then writes the range to the peer.
    Tell {
        wire: Arc<Wire>,
        words: Vec<u32>,
        piece: Piece,
    },
    /// Revokes a peer's access to memory.
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

impl Ended {
    /// Whether it is a write on which the memory that it reads hangs.
    pub fn is_load(self) -> bool {
        matches!(self, Self::Written(load, _) if load != Load::Word)
    }
}

/// What the engine is asked for at one go: of each, what it will tell, and what it takes to ask for
/// it.
struct Asks<T> {
    what: Vec<(Arc<Wire>, Ended)>,
    how: Vec<T>,
}

impl<T> Asks<T> {
    fn with_room(n: usize) -> Self {
        Self { what: Vec::with_capacity(n), how: Vec::with_capacity(n) }
    }

    fn add(&mut self, wire: Arc<Wire>, what: Ended, how: T) {
        self.what.push((wire, what));
        self.how.push(how);
    }
}

/// Hears what becomes of it.
struct Asked {
    inner: Weak<Inner>,
    what: Vec<(Arc<Wire>, Ended)>,
}

impl Listener for Asked {
    fn hear(&self, news: Vec<(usize, Outcome)>) {
        let Some(inner) = self.inner.upgrade() else { return };
        inner.heard(news.into_iter().map(|(at, outcome)| {
            let (wire, what) = &self.what[at];
            (&**wire, *what, outcome)
        }));
    }
}

impl Inner {
    /// Writes go by one call of the engine, and so do expectations.
    pub(super) fn run(self: &Arc<Self>, acts: Vec<Act>) {
        if acts.is_empty() {
            return;
        }
        let n = acts.iter().filter(|act| matches!(act, Act::Expect { .. })).count();
        let (mut writes, mut expected) = (Asks::with_room(acts.len() - n), Asks::with_room(n));
        for act in acts {
            match act {
                Act::Expect { wire, stage, n } => {
                    expected.add(wire, Ended::Came(stage), (stage, n))
                }
                Act::Write { wire, piece, load } => {
                    writes.add(wire, Ended::Written(load, piece.counts), piece);
                }
                Act::Tell { wire, words, piece } => {
                    let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
                    let what = Ended::Written(Load::Control, piece.counts);
                    match self.control.put(piece.src, &bytes) {
                        Ok(()) => writes.add(wire, what, piece),
                        Err(e) => self.refused(&[(wire, what)], &e),
                    }
                }
                Act::Beat => self.start_beat(),
                Act::Revoke { rank, memory } => self.revoke(rank, &memory),
            }
        }
        self.write(writes);
        self.expect(expected);
    }

    fn write(self: &Arc<Self>, Asks { what, how }: Asks<Piece>) {
        if what.is_empty() {
            return;
        }
        let asked = Arc::new(Asked { inner: Arc::downgrade(self), what });
        let writes = asked.what.iter().zip(&how);
        let ops: Vec<Op<'_>> = writes.map(|((wire, _), piece)| self.op(wire, piece)).collect();
        let options = Submit { timeout: Some(self.timeout()), ..Submit::default() };
        if let Err(e) = self.engine.submit_each(&ops, options, asked.clone()) {
            self.refused(&asked.what, &e);
        }
    }

    fn op<'a>(&'a self, wire: &'a Wire, piece: &Piece) -> Op<'a> {
        let (ours, theirs) = match piece.counts.is_rows() && piece.len > 0 {
            true => (&self.rows, &wire.rows),
            false => (&self.control, &wire.control),
        };
        Op::Write {
            src: Local { region: ours, offset: piece.src },
            dst: Remote { region: theirs, offset: piece.dst },
            len: piece.len,
            imm: Some(wire.counters[piece.counts as usize].imm()),
        }
    }

    fn expect(self: &Arc<Self>, Asks { what, how }: Asks<(Stage, u32)>) {
        if what.is_empty() {
            return;
        }
        let asked = Arc::new(Asked { inner: Arc::downgrade(self), what });
        let mut all = Vec::with_capacity(how.len());
        for ((wire, _), (stage, n)) in asked.what.iter().zip(how) {
            let counter = &wire.ours.counters[stage as usize];
            all.push(Expect { counter, n, writers: std::slice::from_ref(&wire.peer) });
        }
        if let Err(e) = self.engine.expect_each(&all, self.patience(), asked.clone()) {
            self.refused(&asked.what, &e);
        }
    }

    /// None of it was begun.
    fn refused(self: &Arc<Self>, what: &[(Arc<Wire>, Ended)], error: &EngineError) {
        self.heard(what.iter().flat_map(|(wire, what)| {
            let over = [Outcome::Ended(Err(error.clone())), Outcome::Quiet(Quiet::Quiet)];
            over.map(|outcome| (&**wire, *what, outcome))
        }));
    }

    fn revoke(self: &Arc<Self>, rank: u32, memory: &Region) {
        match memory.revoke() {
            Ok(handle) => {
                let weak = Arc::downgrade(self);
                handle.on_done(move |end| {
                    if let Some(inner) = weak.upgrade() {
                        inner.revoked(rank, end);
                    }
                });
            }
            Err(e) => self.revoked(rank, Err(e)),
        }
    }
}
