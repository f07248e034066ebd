//! State that an executor keeps for one rank.

use std::collections::{HashMap, VecDeque};

use fabric_engine::{Handle, RemoteRegion, Time};

use crate::{command::CHANNELS, order::Channel, send_channel::SendChannel, tag::TAG_INCARNATIONS};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RankState {
    /// Not joined yet; its early messages are kept.
    Absent,
    Alive,
    /// Dropped: its messages are ignored, and commands to it complete at once.
    Masked,
}

/// A request in flight.
#[derive(Debug)]
pub(crate) struct PostedRequest {
    pub handle: Handle,
    /// The FIFO of its commands; credits and notices have none.
    pub fifo: Option<usize>,
    /// The index of its first command.
    pub first: u64,
    pub commands: u32,
    /// Whether its completion wakes the sleeping thread.
    pub wakes: bool,
}

#[derive(Debug)]
pub(crate) struct Peer {
    pub state: RankState,
    /// The latest announced incarnation; 0 for none.
    pub incarnation: u32,
    /// The region that receives the peer's atomics.
    pub control: Option<RemoteRegion>,
    /// Fails when the peer is lost.
    pub watch: Option<Handle>,
    /// Requests in flight, oldest first.
    pub posted: VecDeque<PostedRequest>,
    /// Requests posted so far, and how many of them have ended, in order.
    pub requests: u64,
    pub ended: u64,
    /// Commands in flight.
    pub outstanding: u32,
    /// Commands that are about to be posted.
    pub planned: u32,
    /// Time of the last arrival.
    pub last_arrival: Time,
    /// Time since which a command has waited for epochs.
    pub waiting_since: Option<Time>,
    sending: Box<[Option<Box<SendChannel>>]>,
    receiving: Box<[Option<Box<Channel>>]>,
    /// Early messages of an unannounced incarnation: tags, and how many writes carried each.
    pub early: HashMap<u32, u32>,
}

impl Default for Peer {
    fn default() -> Self {
        Self {
            state: RankState::Absent,
            incarnation: 0,
            control: None,
            watch: None,
            posted: VecDeque::new(),
            requests: 0,
            ended: 0,
            outstanding: 0,
            planned: 0,
            last_arrival: Time(0),
            waiting_since: None,
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
    pub fn tag_incarnation(&self) -> u8 {
        tag_incarnation(self.incarnation)
    }

    /// Whether a tag belongs to an incarnation that may still be announced.
    pub fn is_ahead(&self, tag_incarnation: u8) -> bool {
        let ahead =
            u32::from(tag_incarnation.wrapping_sub(self.tag_incarnation())) % TAG_INCARNATIONS;
        self.incarnation == 0 || (1..TAG_INCARNATIONS / 2).contains(&ahead)
    }

    #[inline]
    pub fn sending(&mut self, number: u8) -> &mut SendChannel {
        channel(&mut self.sending, number)
    }

    #[inline]
    pub fn receiving(&mut self, number: u8) -> &mut Channel {
        channel(&mut self.receiving, number)
    }

    /// Resets the state for a new incarnation, except for its early messages.
    pub fn restart(&mut self, incarnation: u32, control: RemoteRegion) {
        let early = std::mem::take(&mut self.early);
        *self = Self {
            state: RankState::Alive,
            incarnation,
            control: Some(control),
            early,
            ..Self::default()
        };
    }
}

pub(crate) fn tag_incarnation(incarnation: u32) -> u8 {
    (incarnation % TAG_INCARNATIONS) as u8
}
