//! The commands of one channel, in order and with their indices; buffered while the FIFO is full.

use std::collections::VecDeque;

use fabric_proxy::{
    command::{Add, Command},
    fifo::{FifoError, Pusher},
};

#[derive(Debug)]
pub struct Commands {
    /// The only pusher of its FIFO, so it knows the index of each command.
    pusher: Pusher,
    queue: VecDeque<Command>,
    next: u64,
    /// The last drain: the commands before the first number, by the drain with the second number.
    drained: (u64, u64),
    /// The drain after which nothing was pushed any more.
    last_drain: Option<u64>,
}

impl Commands {
    pub fn new(pusher: Pusher) -> Self {
        Self { pusher, queue: VecDeque::new(), next: 0, drained: (0, 0), last_drain: None }
    }

    pub fn push(&mut self, command: Command) -> u64 {
        self.last_drain = None;
        self.queue.push_back(command);
        self.next += 1;
        self.next - 1
    }

    pub fn add(&mut self, rank: u32, channel: u8, slot: u64, value: u64) {
        let add = Add { slot: slot as u16, value: value as i64, ordered: true };
        self.push(Command::Atomic { rank: rank as u16, channel, add });
    }

    /// A drain that completes when the commands up to one have ended, so that their source may be
    /// reused.
    pub fn drain_up_to(&mut self, index: u64) -> u64 {
        if self.drained.0 <= index {
            let drain = self.push(Command::Drain { up_to: Some(index as u32) });
            self.drained = (index + 1, drain);
        }
        self.drained.1
    }

    /// The same for all commands so far.
    pub fn drain(&mut self) -> u64 {
        match self.next {
            0 => self.push(Command::Drain { up_to: None }),
            next => self.drain_up_to(next - 1),
        }
    }

    /// The index of the last command.
    pub fn last(&self) -> Option<u64> {
        self.next.checked_sub(1)
    }

    pub fn is_complete(&self, index: u64) -> bool {
        self.pusher.is_complete(index)
    }

    /// Hands over what the FIFO has room for; whether that was anything.
    ///
    /// # Errors
    /// [`FifoError::Closed`].
    pub fn flush(&mut self) -> Result<bool, FifoError> {
        let mut moved = false;
        while let Some(command) = self.queue.front() {
            match self.pusher.try_push(command) {
                Ok(_) => moved = true,
                Err(FifoError::Full(_)) => break,
                Err(error) => return Err(error),
            }
            self.queue.pop_front();
        }
        Ok(moved)
    }

    /// Whether all commands have completed; true if the proxy is closed.
    pub fn has_left(&mut self) -> bool {
        let drain = match self.last_drain {
            Some(drain) => drain,
            None => self.drain(),
        };
        self.last_drain = Some(drain);
        self.flush().is_err() || self.is_complete(drain)
    }

    pub fn is_flushed(&self) -> bool {
        self.queue.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use fabric_proxy::{fifo::fifo, Parker};

    use super::*;

    #[test]
    fn a_rank_has_left_when_its_one_drain_is_over() {
        let (pusher, mut popper) = fifo(16, Arc::new(Parker::default())).unwrap();
        let mut commands = Commands::new(pusher);
        commands.add(1, 0, 0, 1);
        for _ in 0..40 {
            assert!(!commands.has_left());
        }
        assert_eq!((popper.poll(1).is_some(), popper.poll(2)), (true, None));
        popper.pop(1);
        assert!(!commands.has_left());
        popper.pop(1);
        assert!(commands.has_left());
        // What is said after that has yet to leave.
        commands.add(1, 0, 0, 1);
        assert!(!commands.has_left());
        popper.pop(2);
        assert!(commands.has_left());
    }
}
