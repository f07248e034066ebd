use std::time::Duration;

use crate::{
    command::{RANKS, SLOTS},
    fifo::{FifoError, MAX_CAPACITY},
    symmetric::check_rank,
    ProxyError, Result,
};

/// What a rank's proxy is like. Ranks, threads and the ranks of a node must be the same everywhere.
#[derive(Clone, Debug)]
pub struct Config {
    pub rank: usize,
    /// At most 1024.
    pub ranks: usize,
    /// Ranks on a node: those whose numbers are alike modulo this share a rail.
    pub per_node: usize,
    /// Which life of this rank this is; every further one has a larger number.
    pub incarnation: u32,
    /// Thread *i* carries out the commands of its own FIFOs, and talks to thread *i* of the peers.
    pub threads: usize,
    /// FIFOs of each thread.
    pub fifos: usize,
    /// Commands that a FIFO holds, `kMaxInflight` of the paper; a power of two.
    pub capacity: u32,
    /// Atomic words that the device reads; at most 4096.
    pub words: usize,
    /// Commands to one peer whose bytes may be under way: pacing against incast.
    pub max_outstanding: u32,
    /// How long a command, or an answer that a command waits for, may take before the peer is taken for lost.
    pub deadline: Duration,
    /// How long a thread looks for work before it sleeps.
    pub spin: Duration,
    /// How long a sleeping thread may miss what was pushed by a device that can't wake it; what processors push wakes
    /// it at once.
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
                return Err(ProxyError::Invalid(format!("{n} {what}: take 1 to {most}")));
            }
        }
        if !self.ranks.is_multiple_of(self.per_node) {
            return Err(ProxyError::Invalid(format!(
                "{} ranks are no whole number of nodes of {}",
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
