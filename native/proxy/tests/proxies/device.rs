//! A simulated device: it sends tokens and signals them by atomics. The receiver checks the bytes
//! of each token when its atomic arrives.

use std::{collections::VecDeque, sync::atomic::Ordering::Acquire};

use fabric_engine::Region;
use fabric_proxy::{
    command::{Add, Command, Scope},
    fifo::{FifoError, Pusher},
    raw::AtomicWords,
};

const TOKEN: u64 = 32;
const MAX_TOKENS: u64 = 3;

/// Everything that each rank sends; the same on all ranks.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub ranks: usize,
    pub channels: u8,
    pub rounds: u32,
    /// Ordered atomics use one word per sender and channel; others one word per round.
    pub ordered: bool,
    pub seed: u64,
}

impl Plan {
    fn lane(&self, src: usize, channel: u8) -> usize {
        src * usize::from(self.channels) + usize::from(channel)
    }

    /// Bytes of one half of a rank's part: tokens to send, then received tokens.
    fn half(&self) -> u64 {
        (self.ranks * usize::from(self.channels)) as u64
            * u64::from(self.rounds)
            * MAX_TOKENS
            * TOKEN
    }

    pub fn memory(&self) -> u64 {
        2 * self.half()
    }

    pub fn words(&self) -> usize {
        self.ranks * usize::from(self.channels) * self.rounds as usize
    }

    /// The words that a rank's ordered atomics are added to.
    pub fn of(&self, src: usize) -> impl Iterator<Item = usize> + '_ {
        (0..self.channels).map(move |c| self.lane(src, c))
    }

    fn at(&self, lane: usize, round: u32, token: u64) -> u64 {
        ((lane as u64 * u64::from(self.rounds) + u64::from(round)) * MAX_TOKENS + token) * TOKEN
    }

    fn dice(&self, src: usize, dst: usize, channel: u8, round: u32) -> fastrand::Rng {
        let place = (src * self.ranks + dst) as u64 * 64 + u64::from(channel);
        fastrand::Rng::with_seed(
            self.seed ^ (place << 32 | u64::from(round)).wrapping_mul(0x9e37_79b9),
        )
    }

    fn tokens(&self, src: usize, dst: usize, channel: u8, round: u32) -> u64 {
        self.dice(src, dst, channel, round).u64(0..=MAX_TOKENS)
    }

    fn token(&self, src: usize, dst: usize, channel: u8, round: u32, token: u64) -> Vec<u8> {
        let mut dice = self.dice(src, dst, channel, round);
        dice.seed(dice.get_seed() ^ (token + 1));
        (0..TOKEN).map(|_| dice.u8(1..)).collect()
    }

    fn slot(&self, src: usize, channel: u8, round: u32) -> u16 {
        let lane = self.lane(src, channel);
        let slot = if self.ordered { lane } else { lane * self.rounds as usize + round as usize };
        slot as u16
    }
}

/// One rank's device.
pub struct Device {
    pub rank: usize,
    plan: Plan,
    memory: Region,
    words: AtomicWords,
    /// One for each channel.
    pushers: Vec<Pusher>,
    /// Commands not pushed yet, by channel.
    queues: Vec<VecDeque<Command>>,
    /// Commands that must complete: the last of each channel.
    pub last: Vec<Option<u64>>,
    /// BarrierRounds of each lane that were checked.
    seen: Vec<Vec<bool>>,
}

impl Device {
    /// Sends to each of `peers`, all rounds on all channels; then drains and enters a barrier if
    /// asked to.
    pub fn new(
        rank: usize,
        plan: Plan,
        (memory, words, pushers): (Region, AtomicWords, Vec<Pusher>),
        peers: &[usize],
        barrier: bool,
    ) -> Self {
        let mut queues: Vec<VecDeque<Command>> = vec![VecDeque::new(); plan.channels.into()];
        let mut dice = fastrand::Rng::with_seed(plan.seed ^ rank as u64);
        for channel in 0..plan.channels {
            let queue = &mut queues[usize::from(channel)];
            let mut todo: Vec<_> = match plan.rounds {
                0 => Vec::new(),
                _ => peers.iter().map(|dst| (*dst, 0)).collect(),
            };
            while !todo.is_empty() {
                let i = dice.usize(..todo.len());
                let (dst, round) = todo[i];
                let tokens = plan.tokens(rank, dst, channel, round);
                let (rank16, beside) = (dst as u16, dice.bool());
                let value = if plan.ordered { 1 } else { i64::from(round) + 1 };
                let slot = plan.slot(rank, channel, round);
                let add = Add { slot, value, ordered: plan.ordered };
                for token in 0..tokens {
                    let from = plan.at(plan.lane(dst, channel), round, token);
                    let to = plan.half() + plan.at(plan.lane(rank, channel), round, token);
                    memory.put(from, &plan.token(rank, dst, channel, round, token)).unwrap();
                    let add = (beside && token + 1 == tokens).then_some(add);
                    queue.push_back(Command::Write {
                        rank: rank16,
                        channel,
                        from,
                        to,
                        len: TOKEN,
                        add,
                    });
                }
                if !beside || tokens == 0 {
                    queue.push_back(Command::Atomic { rank: rank16, channel, add });
                }
                todo[i].1 += 1;
                if todo[i].1 == plan.rounds {
                    todo.swap_remove(i);
                }
            }
            queue.push_back(Command::Drain { up_to: None });
            if barrier {
                queue.push_back(Command::Barrier { scope: Scope::All, channel });
            }
        }
        let lanes = plan.ranks * usize::from(plan.channels);
        let seen = vec![vec![false; plan.rounds as usize]; lanes];
        let last = vec![None; plan.channels.into()];
        Self { rank, plan, memory, words, pushers, queues, last, seen }
    }

    /// Pushes while there is room, and checks arrivals.
    pub fn step(&mut self) {
        for (i, queue) in self.queues.iter_mut().enumerate() {
            while let Some(command) = queue.front() {
                match self.pushers[i].try_push(command) {
                    Ok(index) => self.last[i] = Some(index),
                    Err(FifoError::Full(_)) => break,
                    Err(error) => panic!("{error}"),
                }
                queue.pop_front();
            }
        }
        self.look();
    }

    /// For every visible atomic, its tokens must be there.
    pub fn look(&mut self) {
        for src in 0..self.plan.ranks {
            for channel in 0..self.plan.channels {
                let lane = self.plan.lane(src, channel);
                for round in 0..self.plan.rounds {
                    let slot = usize::from(self.plan.slot(src, channel, round));
                    let word = self.words[slot].load(Acquire);
                    let limit =
                        u64::from(if self.plan.ordered { self.plan.rounds } else { round + 1 });
                    assert!(word <= limit, "applied twice: {word} on slot {slot}");
                    let told = match self.plan.ordered {
                        true => word > u64::from(round),
                        false => word == limit,
                    };
                    assert!(self.plan.ordered || told || word == 0, "another's value: {word}");
                    if told && !std::mem::replace(&mut self.seen[lane][round as usize], true) {
                        self.check(src, channel, round);
                    }
                }
            }
        }
    }

    fn check(&self, src: usize, channel: u8, round: u32) {
        for token in 0..self.plan.tokens(src, self.rank, channel, round) {
            let lane = self.plan.lane(src, channel);
            let at = self.plan.half() + self.plan.at(lane, round, token);
            let bytes = self.memory.get(at, TOKEN).unwrap();
            let right = self.plan.token(src, self.rank, channel, round, token);
            assert_eq!(bytes, right, "round {round} of {src} before its tokens");
        }
    }

    /// Whether everything of `sources` has arrived.
    pub fn has_all_of(&self, sources: &[usize]) -> bool {
        sources.iter().all(|src| {
            (0..self.plan.channels).all(|c| self.seen[self.plan.lane(*src, c)].iter().all(|s| *s))
        })
    }

    /// Whether all its commands are completed.
    pub fn has_sent_all(&self) -> bool {
        self.queues.iter().all(VecDeque::is_empty)
            && self
                .pushers
                .iter()
                .zip(&self.last)
                .all(|(p, last)| last.is_none_or(|i| p.is_complete(i)))
    }
}
