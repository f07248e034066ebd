use std::time::Duration;

use crate::{
    command::{RANKS, SLOTS},
    fifo::{FifoError, MAX_CAPACITY},
    symmetric::check_rank,
    ProxyError, Result,
};

/// Configuration of a rank's proxy. `ranks`, `threads` and `per_node` must be the same on all
/// ranks.
#[derive(Clone, Debug)]
pub struct Config {
    pub rank: usize,
    /// At most 1024.
    pub ranks: usize,
    /// Ranks of a node. Ranks that are equal modulo this number share a rail.
    pub per_node: usize,
    /// The incarnation of this rank; each restart must have a larger one.
    pub incarnation: u32,
    /// Thread *i* executes the commands of its own FIFOs and exchanges data with thread *i* of the
    /// peers.
    pub threads: usize,
    /// FIFOs of each thread.
    pub fifos: usize,
    /// Capacity of a FIFO in commands, `kMaxInflight` of the paper; a power of two.
    pub capacity: u32,
    /// Number of atomic words that the device reads; at most 4096.
    pub words: usize,
    /// Maximum number of commands in flight to one peer: pacing against incast.
    pub max_outstanding: u32,
    /// Timeout of a command and of a reply that a command waits for; after it the peer is lost.
    pub deadline: Duration,
    /// Time for which a thread polls before it sleeps.
    pub spin: Duration,
    /// Maximum sleep of a thread. A device that can't wake it is noticed after it; a push by a CPU
    /// wakes the thread at once.
    pub nap: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            rank: 0,
            ranks: 1,
            per_node: 1,
            incarnation: 1,
            threads: 1,
            fifos: 1,
            capacity: 1024,
            words: 1024,
            max_outstanding: 256,
            deadline: Duration::from_secs(10),
            spin: Duration::from_micros(50),
            nap: Duration::from_millis(100),
        }
    }
}

impl Config {
    /// # Errors
    /// [`ProxyError::Rank`], [`ProxyError::Fifo`], [`ProxyError::Invalid`].
    pub fn check(&self) -> Result<()> {
        check_rank(self.rank, self.ranks)?;
        let within = [
            ("ranks", self.ranks, RANKS),
            ("ranks of a node", self.per_node, self.ranks),
            ("threads", self.threads, 64),
            ("FIFOs of a thread", self.fifos, 64),
            ("atomic words", self.words, SLOTS),
            ("commands outstanding at a peer", self.max_outstanding as usize, 1 << 20),
        ];
        for (what, n, most) in within {
            if n == 0 || n > most {
                return Err(ProxyError::Invalid(format!("{what} is {n}; expected 1 to {most}")));
            }
        }
        if !self.ranks.is_multiple_of(self.per_node) {
            return Err(ProxyError::Invalid(format!(
                "{} ranks are not a multiple of {} ranks per node",
                self.ranks, self.per_node
            )));
        }
        if !self.capacity.is_power_of_two() || self.capacity > MAX_CAPACITY {
            return Err(FifoError::Capacity(self.capacity).into());
        }
        if self.incarnation == 0 || self.deadline.is_zero() || self.nap.is_zero() {
            return Err(ProxyError::Invalid(
                "incarnation, deadline and nap must be above 0".into(),
            ));
        }
        Ok(())
    }
}
