use std::collections::HashMap;

use proptest::prelude::*;

use super::*;

/// A sender's channels: the number of writes of each epoch, and whether its atomic is ordered.
type Sent = Vec<Vec<(u32, bool)>>;

/// One arrival: a write or the atomic of an epoch of a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Arrival {
    channel: usize,
    epoch: usize,
    atomic: bool,
}

fn arrivals(sent: &Sent) -> Vec<Arrival> {
    let mut all = Vec::new();
    for (channel, epochs) in sent.iter().enumerate() {
        for (epoch, (writes, _)) in epochs.iter().enumerate() {
            let one = |atomic| Arrival { channel, epoch, atomic };
            all.extend((0..*writes).map(|_| one(false)));
            all.push(one(true));
        }
    }
    all
}

/// A receiver, and the atomics that it has applied.
#[derive(Clone)]
struct Receiver {
    channels: Vec<Channel>,
    came: HashMap<Arrival, u32>,
    applied: Vec<Vec<usize>>,
    /// The number of the first epoch.
    first: u64,
}

impl Receiver {
    fn new(channels: usize, first: u64) -> Self {
        let channel = Channel { oldest: first, ..Channel::default() };
        Self {
            channels: vec![channel; channels],
            came: HashMap::new(),
            applied: vec![Vec::new(); channels],
            first,
        }
    }

    /// Delivers one arrival and checks every atomic that is applied.
    fn take(&mut self, sent: &Sent, a: Arrival) {
        *self.came.entry(a).or_default() += 1;
        let epoch = ((self.first + a.epoch as u64) % EPOCHS) as u8;
        let (writes, ordered) = sent[a.channel][a.epoch];
        let mut now = Vec::new();
        let channel = &mut self.channels[a.channel];
        match a.atomic {
            true => {
                let entry = OrderEntry { slot: 0, value: a.epoch as i64, ordered, writes };
                channel.ended(epoch, entry, |e| now.push(e.value as usize)).unwrap();
            }
            false => channel.on_write(epoch, 1, |e| now.push(e.value as usize)).unwrap(),
        }
        for epoch in now {
            let applied = &self.applied[a.channel];
            assert!(!applied.contains(&epoch), "OR-3: epoch {epoch} twice");
            let came =
                |epoch, atomic| *self.came.get(&Arrival { epoch, atomic, ..a }).unwrap_or(&0);
            assert_eq!(came(epoch, true), 1, "OR-3: out of nothing");
            assert_eq!(came(epoch, false), sent[a.channel][epoch].0, "OR-1");
            if sent[a.channel][epoch].1 {
                let earlier = (0..epoch).all(|e| applied.contains(&e));
                assert!(earlier, "OR-2: epoch {epoch} after {applied:?}");
            }
            self.applied[a.channel].push(epoch);
        }
    }

    fn is_over(&self, sent: &Sent) -> bool {
        self.applied.iter().zip(sent).all(|(applied, epochs)| applied.len() == epochs.len())
    }
}

/// Tries every order of `left`; returns the number of orders.
fn explore(sent: &Sent, receiver: &Receiver, left: &mut Vec<Arrival>) -> u64 {
    if left.is_empty() {
        assert!(receiver.is_over(sent), "lost: only {:?} of {sent:?}", receiver.applied);
        return 1;
    }
    let mut orders = 0;
    for i in 0..left.len() {
        // Equal arrivals give the same order.
        if left[..i].contains(&left[i]) {
            continue;
        }
        let mut next = receiver.clone();
        let arrival = left.remove(i);
        next.take(sent, arrival);
        orders += explore(sent, &next, left);
        left.insert(i, arrival);
    }
    orders
}

#[test]
fn or_every_order_of_arrival_on_two_channels_applies_each_atomic_once_and_in_its_turn() {
    let (o, f) = (true, false);
    let cases: [Sent; 7] = [
        vec![vec![(2, o), (1, o)], vec![(1, o)]],
        vec![vec![(1, f), (1, f)], vec![(1, f), (0, f)]],
        vec![vec![(1, f), (1, o), (1, f)], vec![(2, o)]],
        vec![vec![(0, o), (2, o), (0, o)], vec![(0, f), (2, o)]],
        vec![vec![(1, o), (0, f), (0, o), (1, f)], vec![(1, f)]],
        vec![vec![(3, f), (3, o)], vec![]],
        vec![vec![(1, o), (1, o), (1, o), (1, o)], vec![]],
    ];
    let mut orders = 0;
    for sent in &cases {
        // Includes epochs whose numbers wrap around.
        for first in [0, EPOCHS - 2] {
            orders += explore(sent, &Receiver::new(2, first), &mut arrivals(sent));
        }
    }
    assert!(orders > 20_000, "{orders}");
}

proptest! {
    /// Long runs whose numbers wrap around many times: a sender that respects its credits never
    /// stalls.
    #[test]
    fn or_4_credits_keep_a_sender_going(
        epochs in prop::collection::vec((0u32..4, any::<bool>()), 1..200),
        seed in any::<u64>(),
    ) {
        let sent = vec![epochs];
        let mut dice = fastrand::Rng::with_seed(seed);
        let mut receiver = Receiver::new(1, 0);
        let (mut begun, mut credits) = (0, 0);
        let mut in_flight = Vec::new();
        loop {
            while begun < sent[0].len() && (begun as u64) < EPOCHS + credits * CREDIT {
                in_flight.extend(arrivals(&sent).into_iter().filter(|a| a.epoch == begun));
                begun += 1;
            }
            if in_flight.is_empty() {
                break;
            }
            let next = in_flight.swap_remove(dice.usize(..in_flight.len()));
            receiver.take(&sent, next);
            credits += receiver.channels[0].credits();
        }
        prop_assert!(begun == sent[0].len() && receiver.is_over(&sent), "stuck after {begun} epochs");
    }

    #[test]
    fn an_entry_survives_its_bytes(slot in 0u16..4096, value: i64, ordered: bool, writes: u32) {
        let entry = OrderEntry { slot, value, ordered, writes };
        prop_assert_eq!(OrderEntry::from_bytes(entry.to_bytes()), Ok(entry));
    }
}

#[test]
fn a_sender_that_violates_the_protocol_is_detected() {
    let entry = OrderEntry { slot: 0, value: 1, ordered: true, writes: 1 };
    let mut channel = Channel::default();
    channel.ended(0, entry, |_| panic!("its write is missing")).unwrap();
    assert_eq!(channel.ended(0, entry, |_| ()), Err(OrderError::Twice(0)));
    let too_many = OrderError::TooMany { epoch: 1, counted: 2, writes: 1 };
    channel.on_write(1, 2, |_| ()).unwrap();
    assert_eq!(channel.ended(1, entry, |_| ()), Err(too_many));
    assert_eq!(OrderEntry::from_bytes([0xff; 16]), Err(OrderError::Garbled));
}
