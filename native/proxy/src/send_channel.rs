//! The sender's half of [`order`](crate::order): assigns epochs and bounds them by credits (OR-4).
//! Pure.

use crate::{
    order::{OrderError, CREDIT},
    tag::EPOCHS,
};

/// One channel to one peer.
#[derive(Clone, Debug)]
pub(crate) struct SendChannel {
    /// The current epoch.
    epoch: u64,
    /// Whether it has begun.
    begun: bool,
    /// Number of its writes.
    writes: u32,
    /// Epochs that the peer has returned.
    credited: u64,
    /// By epoch number, the last request of its latest epoch.
    last: [u64; EPOCHS as usize],
}

impl Default for SendChannel {
    fn default() -> Self {
        Self { epoch: 0, begun: false, writes: 0, credited: 0, last: [0; EPOCHS as usize] }
    }
}

impl SendChannel {
    /// The number of the current epoch. `None` while the number is in use: the peer hasn't returned
    /// it, or requests of its last use may still land. `over` is the number of ended requests to
    /// the peer.
    #[inline]
    pub fn begin(&mut self, over: u64) -> Option<u8> {
        let number = (self.epoch % EPOCHS) as usize;
        if !self.begun {
            if self.epoch >= self.credited + EPOCHS || self.last[number] > over {
                return None;
            }
            self.begun = true;
        }
        Some(number as u8)
    }

    /// Adds a write of `request` to the epoch.
    #[inline]
    pub fn write(&mut self, request: u64) {
        self.writes += 1;
        self.last[(self.epoch % EPOCHS) as usize] = request;
    }

    /// Ends the epoch with an atomic of `request`; returns the number of its writes.
    #[inline]
    pub fn end(&mut self, request: u64) -> u32 {
        self.last[(self.epoch % EPOCHS) as usize] = request;
        self.epoch += 1;
        self.begun = false;
        std::mem::take(&mut self.writes)
    }

    /// # Errors
    /// [`OrderError::Credits`].
    pub fn credit(&mut self, n: u32) -> Result<(), OrderError> {
        self.credited += u64::from(n) * CREDIT;
        match self.credited <= self.epoch {
            true => Ok(()),
            false => Err(OrderError::Credits),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn or_4_a_number_is_used_again_when_it_is_given_back_and_quiet() {
        let mut s = SendChannel::default();
        for e in 0..EPOCHS {
            assert_eq!(s.begin(0), Some(e as u8));
            s.write(e + 1);
            assert_eq!(s.end(e + 1), 1);
        }
        assert_eq!(s.begin(EPOCHS), None, "not given back");
        s.credit(1).unwrap();
        assert_eq!(s.begin(0), None, "given back, but it may still land");
        assert_eq!(s.begin(1), Some(0));
        s.write(40);
        assert_eq!(s.begin(1), Some(0), "an epoch that has begun goes on");
        assert_eq!(s.credit(10), Err(OrderError::Credits));
    }
}
