//! How long the last receiving call waited for each rank.

use std::time::{Duration, Instant};

use super::link::MessageKind;
use crate::phase::Phase;

/// Times between the beginning of a receiving call and the last message of each rank that it waited
/// for. What had arrived before has cost no time.
#[derive(Debug, Default)]
pub struct WaitTimes {
    began: Option<Instant>,
    by_rank: Vec<Duration>,
}

impl WaitTimes {
    /// The next receiving call is yet to come.
    pub fn reset(&mut self, ranks: u32) {
        self.began = None;
        self.by_rank = vec![Duration::ZERO; ranks as usize];
    }

    /// A receiving call waits from now on, if it did not before.
    pub fn begin(&mut self) {
        self.began.get_or_insert_with(Instant::now);
    }

    /// A rank's message has arrived in a phase.
    pub fn on_message(&mut self, rank: u32, kind: MessageKind, phase: Phase) {
        let awaited = match phase {
            Phase::Dispatched => matches!(kind, MessageKind::Routes | MessageKind::Rows),
            Phase::Answered => kind == MessageKind::Answers,
            Phase::Idle | Phase::Collected | Phase::Answering => false,
        };
        if let (true, Some(began)) = (awaited, self.began) {
            if let Some(time) = self.by_rank.get_mut(rank as usize) {
                *time = began.elapsed();
            }
        }
    }

    pub fn by_rank(&self) -> &[Duration] {
        &self.by_rank
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_a_call_waits_for_has_a_time() {
        let mut times = WaitTimes::default();
        times.reset(3);
        times.on_message(0, MessageKind::Rows, Phase::Dispatched);
        times.begin();
        times.on_message(1, MessageKind::Fence, Phase::Dispatched);
        std::thread::sleep(Duration::from_millis(2));
        times.on_message(2, MessageKind::Rows, Phase::Dispatched);
        times.begin();
        let [first, second, third] = times.by_rank() else { panic!("three ranks") };
        assert_eq!((*first, *second), (Duration::ZERO, Duration::ZERO));
        assert!(*third >= Duration::from_millis(2));
        times.reset(3);
        times.begin();
        times.on_message(2, MessageKind::Routes, Phase::Answered);
        times.on_message(2, MessageKind::Answers, Phase::Collected);
        assert_eq!(times.by_rank()[2], Duration::ZERO);
        times.on_message(2, MessageKind::Answers, Phase::Answered);
        assert!(times.by_rank()[2] > Duration::ZERO);
    }
}
