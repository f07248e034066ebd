//! What an executor knows of one rank.

use std::collections::{HashMap, VecDeque};

use fabric_engine::{Handle, RemoteRegion, Time};

use crate::{command::CHANNELS, order::Channel, sending::Sending, tag::LIVES};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// Not there yet: what it sends is kept until it is.
    Absent,
    Alive,
    /// Given up: what it sends counts for nobody, what is sent to it is over at once.
    Masked,
}

/// A request under way.
#[derive(Debug)]
pub(crate) struct Posted {
    pub handle: Handle,
    /// The FIFO that it came from; credits and entries into barriers come from none.
    pub fifo: Option<usize>,
    /// The index of its first command.
    pub first: u64,
    pub commands: u32,
    /// Whoever sleeps is told of its end.
    pub told: bool,
}

#[derive(Debug)]
pub(crate) struct Peer {
    pub state: State,
    /// Of the latest life that was announced; 0: none.
    pub incarnation: u32,
    /// Where its proxy takes atomics.
    pub control: Option<RemoteRegion>,
    /// Ends when the peer does.
    pub watch: Option<Handle>,
    /// Under way, the oldest first.
    pub posted: VecDeque<Posted>,
    /// Requests so far, and how many of them are over, from the oldest on.
    pub requests: u64,
    pub over: u64,
    /// Commands under way.
    pub outstanding: u32,
    /// Commands that are about to be.
    pub planned: u32,
    /// When something of it last arrived.
    pub heard: Time,
    /// Since when a command has waited for epochs.
    pub waits_since: Option<Time>,
    sending: Box<[Option<Box<Sending>>]>,
    receiving: Box<[Option<Box<Channel>>]>,
    /// What a life that isn't announced yet has sent: tags and how many writes carried each.
    pub early: HashMap<u32, u32>,
}

impl Default for Peer {
    fn default() -> Self {
        Self {
            state: State::Absent,
            incarnation: 0,
            control: None,
            watch: None,
            posted: VecDeque::new(),
            requests: 0,
            over: 0,
            outstanding: 0,
            planned: 0,
            heard: Time(0),
            waits_since: None,
            sending: Box::default(),
            receiving: Box::default(),
            early: HashMap::new(),
        }
    }
}

fn channel<T: Default>(of: &mut Box<[Option<Box<T>>]>, channel: u8) -> &mut T {
    if of.is_empty() {
        *of = (0..CHANNELS).map(|_| None).collect();
    }
    of[usize::from(channel)].get_or_insert_default()
}

impl Peer {
    pub fn life(&self) -> u8 {
        life(self.incarnation)
    }

    /// Whether a tag is of a life that may still be announced.
    pub fn is_ahead(&self, life: u8) -> bool {
        let ahead = u32::from(life.wrapping_sub(self.life())) % LIVES;
        self.incarnation == 0 || (1..LIVES / 2).contains(&ahead)
    }

    #[inline]
    pub fn sending(&mut self, number: u8) -> &mut Sending {
        channel(&mut self.sending, number)
    }

    #[inline]
    pub fn receiving(&mut self, number: u8) -> &mut Channel {
        channel(&mut self.receiving, number)
    }

    /// Forgets an earlier life, all but what the next one has sent already.
    pub fn reborn(&mut self, incarnation: u32, control: RemoteRegion) {
        let early = std::mem::take(&mut self.early);
        *self = Self {
            state: State::Alive,
            incarnation,
            control: Some(control),
            early,
            ..Self::default()
        };
    }
}

pub(crate) fn life(incarnation: u32) -> u8 {
    (incarnation % LIVES) as u8
}
