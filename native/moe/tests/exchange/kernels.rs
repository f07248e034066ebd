//! A device's kernels, step by step on the CPU, with only the memory shared with the exchange and
//! this rank's rows.

use std::sync::{
    atomic::Ordering::{Acquire, Relaxed},
    Arc,
};

use fabric_engine::{Region, TransferEngine};
use fabric_moe::{
    device::{
        rounds, Add, AtomicWords, Command, DeviceEvent, Layout, RowPath, SharedWords, Word,
        STORE_ADDRESS, ZERO_ROWS,
    },
    memory::Memory,
    routes::{Order, Routes, RowPlacement},
    AllToAll, Shape,
};

use crate::model::{bytes, floats, Batch, Handed, EXTRA, WIDE};

/// What it does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    Route,
    Pack,
    Place,
    HandOut(u64),
    Combine,
    Answer(u64),
    Sum,
}

/// A rank's device.
pub struct Kernels {
    shape: Shape,
    rank: u32,
    memory: Memory,
    layout: Layout,
    rows: Region,
    words: AtomicWords,
    exchange: u64,
    /// That its dispatches carry.
    pub ticket: u32,
    combined: bool,
    pub next: Next,
    routes: Routes,
    placing: Option<RowPlacement>,
    handed: Handed,
    answers: Vec<u8>,
    /// It stores to peers' memory.
    stores: bool,
    /// What it was told of where to store, and has yet to do.
    ways: Option<Vec<RowPath>>,
    leaving: Option<Vec<Listed>>,
    /// Rows and answers that it has stored there.
    pub stored: u64,
}

/// What came of a step.
pub enum Outcome {
    /// What it waits for isn't there.
    Waits,
    Went,
    /// All tokens were handed out.
    Collected,
    /// The sums, and whose answers are missing in them.
    Summed(Vec<f32>, Vec<u32>),
}

#[derive(Clone, Copy)]
struct Listed {
    source: u32,
    rows: u64,
    first: u64,
    place: u64,
}

impl Kernels {
    pub fn new(
        engine: Arc<TransferEngine>,
        shape: Shape,
        rank: u32,
        stores: bool,
    ) -> (AllToAll, Self) {
        let (memory, layout) = (Memory::new(shape).unwrap(), Layout::new(&shape));
        let rows = engine.alloc(memory.rows_nbytes()).unwrap();
        let all = AllToAll::over(engine, shape, rank, rows.clone()).unwrap();
        let words = AtomicWords::allocate(layout.words);
        all.attach(SharedWords::new(words.clone(), &shape).unwrap(), stores).unwrap();
        let kernels = Self {
            shape,
            rank,
            memory,
            layout,
            rows,
            words,
            exchange: 0,
            ticket: 0,
            combined: false,
            next: Next::Route,
            routes: Routes::default(),
            placing: None,
            handed: Handed::default(),
            answers: Vec::new(),
            stores,
            ways: None,
            leaving: None,
            stored: 0,
        };
        (all, kernels)
    }

    pub fn tell(&self, all: &AllToAll, told: DeviceEvent) {
        self.say(all, told, 1);
    }

    fn say(&self, all: &AllToAll, told: DeviceEvent, value: i64) {
        let add = Add { slot: told as u16, value, ordered: true };
        let command = Command::Atomic { rank: self.rank as u16, channel: 0, add };
        all.on_command(command.encode().unwrap());
    }

    /// It may have been told where to store, and has not said that it has.
    pub fn is_storing(&self) -> bool {
        self.stores && matches!(self.next, Next::Pack | Next::Answer(_))
    }

    pub fn has(&self, word: Word, value: u64) -> bool {
        self.words[word as usize].load(Acquire) >= value
    }

    /// What was handed out, rows of each local expert, and the first of each.
    pub fn handed(&self) -> (&Handed, &[u32], &[u32]) {
        let placing = self.placing.as_ref().unwrap();
        (&self.handed, &placing.counts, &placing.starts)
    }

    /// The next kernel, if what it waits for is there.
    pub fn step(&mut self, all: &AllToAll, batch: &Batch, combine: bool) -> Outcome {
        let (n, (lots, rooms)) = (self.exchange, rounds(&self.shape));
        let ready = match self.next {
            Next::Route => self.has(Word::Over, 2 * n + u64::from(self.combined)),
            Next::Pack => !self.stores || self.has(Word::RowPaths, n),
            Next::Combine => true,
            Next::Place => self.has(Word::Routes, n),
            Next::HandOut(turn) => self.has(Word::Rows, n * lots + turn),
            Next::Answer(turn) => self.has(Word::Room, n * rooms + turn),
            Next::Sum => self.has(Word::Answers, n),
        };
        if !ready {
            return Outcome::Waits;
        }
        match self.next {
            Next::Route => {
                self.exchange += 1;
                self.route(batch);
                self.say(all, DeviceEvent::Begun, 2 * i64::from(self.ticket) + 1);
                self.next = Next::Pack;
            }
            Next::Pack => {
                // What it was told is a while old when it stores.
                let Some(ways) = self.ways.take() else {
                    self.ways = Some(self.read_ways());
                    return Outcome::Went;
                };
                self.pack(batch, &ways);
                self.tell(all, DeviceEvent::Packed);
                self.next = Next::Place;
            }
            Next::Place => {
                self.place();
                self.next = Next::HandOut(1);
            }
            Next::HandOut(turn) => {
                self.hand_out();
                self.tell(all, DeviceEvent::HandedOut);
                self.next = Next::HandOut(turn + 1);
                if turn == lots {
                    (self.combined, self.next) = (combine, Next::Route);
                    if combine {
                        self.next = if self.stores { Next::Combine } else { Next::Answer(1) };
                        self.compute();
                    }
                    return Outcome::Collected;
                }
            }
            Next::Combine => {
                self.tell(all, DeviceEvent::Combining);
                self.next = Next::Answer(1);
            }
            Next::Answer(turn) => {
                let Some(leaving) = self.leaving.take() else {
                    self.leaving = Some(self.chunks(self.layout.answers));
                    return Outcome::Went;
                };
                self.pack_answers(&leaving);
                self.tell(all, DeviceEvent::Answered);
                self.next = if turn == rooms { Next::Sum } else { Next::Answer(turn + 1) };
            }
            Next::Sum => {
                let sums = self.sum(batch);
                let left_out = all.left_out();
                self.tell(all, DeviceEvent::Summed);
                self.next = Next::Route;
                return Outcome::Summed(sums, left_out);
            }
        }
        Outcome::Went
    }

    fn route(&mut self, batch: &Batch) {
        self.routes = Routes::new(&self.shape, &batch.indices).unwrap();
        let counts = self.routes.counts.chunks(2);
        let pairs =
            counts.map(|c| u64::from(c[0]) | u64::from(c.get(1).copied().unwrap_or(0)) << 32);
        let note = [u64::MAX, u64::from(self.routes.tokens)].into_iter().chain(pairs);
        for (word, value) in self.words[self.layout.routes.0..].iter().zip(note) {
            word.store(value, Relaxed);
        }
    }

    fn read_ways(&self) -> Vec<RowPath> {
        let first = self.layout.row_paths.0 + 1;
        let word = |i: usize| self.words[first + i].load(Acquire);
        let way = |rank: usize| RowPath { to: word(2 * rank), rows: word(2 * rank + 1) };
        (0..self.shape.ranks as usize).map(way).collect()
    }

    fn pack(&mut self, batch: &Batch, ways: &[RowPath]) {
        let values = bytes(&batch.values);
        for (row, token) in self.routes.token_of.iter().enumerate() {
            let (row, token) = (row as u64, *token as usize);
            let all =
                [&values[token * WIDE * 4..][..WIDE * 4], &batch.extra[token * EXTRA..][..EXTRA]];
            let rank = self.routes.first.partition_point(|first| u64::from(*first) <= row) - 1;
            let (way, i) = (ways[rank], row - u64::from(self.routes.first[rank]));
            if i < way.rows {
                store(way.to + i * self.shape.row_stride(), &all.concat());
                self.stored += 1;
            } else {
                self.rows.put(self.memory.own(row), &all.concat()).unwrap();
            }
        }
    }

    fn place(&mut self) {
        let local = self.shape.local_experts() as usize;
        let count = |i: usize| (self.area(self.layout.incoming, i / 2) >> (i % 2 * 32)) as u32;
        let all: Vec<u32> = (0..self.shape.ranks as usize * local).map(count).collect();
        let incoming = all.chunks(local).map(<[u32]>::to_vec).collect();
        let order = Order::Packed { multiple: 2 };
        let placing = RowPlacement::new(local as u32, incoming, order).unwrap();
        self.handed = Handed::room(placing.rows);
        self.placing = Some(placing);
    }

    fn hand_out(&mut self) {
        let placing = self.placing.as_ref().unwrap();
        for chunk in self.chunks(self.layout.rows) {
            for run in placing.runs(chunk.source, chunk.first, chunk.first + chunk.rows) {
                for i in 0..run.rows {
                    let (mut row, to) = (vec![0; WIDE * 4 + EXTRA], (run.to + i) as usize);
                    if chunk.place != ZERO_ROWS {
                        let from = run.from + i - chunk.first;
                        row = self.read(chunk.place + from * self.shape.row_stride(), row.len());
                    }
                    self.handed.values[to * WIDE * 4..][..WIDE * 4]
                        .copy_from_slice(&row[..WIDE * 4]);
                    self.handed.extra[to * EXTRA..][..EXTRA].copy_from_slice(&row[WIDE * 4..]);
                }
            }
        }
    }

    fn compute(&mut self) {
        let placing = self.placing.as_ref().unwrap();
        let (counts, starts) = (&placing.counts, &placing.starts);
        self.answers = self.handed.answers(&self.shape, self.rank, counts, starts);
    }

    fn pack_answers(&mut self, leaving: &[Listed]) {
        let placing = self.placing.as_ref().unwrap();
        for chunk in leaving {
            for run in placing.runs(chunk.source, chunk.first, chunk.first + chunk.rows) {
                for i in 0..run.rows {
                    let place =
                        chunk.place + (run.from - chunk.first + i) * self.shape.back_stride();
                    let answer = &self.answers[(run.to + i) as usize * WIDE * 4..][..WIDE * 4];
                    if chunk.place & STORE_ADDRESS != 0 {
                        store(place & !STORE_ADDRESS, answer);
                        self.stored += 1;
                    } else {
                        self.rows.put(place, answer).unwrap();
                    }
                }
            }
        }
    }

    fn sum(&self, batch: &Batch) -> Vec<f32> {
        let missing = |rank: u32| {
            let (word, byte) = (rank as usize / 8, rank as usize % 8);
            self.area(self.layout.missing, word) >> (8 * byte) & 0xff != 0
        };
        let mut sums = vec![0f32; batch.values.len()];
        for (i, row) in self.routes.row_of.iter().enumerate() {
            let (token, expert) = (i / batch.topk, batch.indices[i]);
            if expert < 0 || missing(self.shape.rank_of(expert as u32)) {
                continue;
            }
            let answer = floats(&self.read(self.memory.own_back(u64::from(*row)), WIDE * 4));
            let sum = &mut sums[token * WIDE..][..WIDE];
            sum.iter_mut().zip(answer).for_each(|(s, a)| *s += batch.weights[i] * a);
        }
        sums
    }

    fn area(&self, (first, _): (usize, usize), i: usize) -> u64 {
        self.words[first + i].load(Acquire)
    }

    fn chunks(&self, area: (usize, usize)) -> Vec<Listed> {
        let one = |i: u64| {
            let word = |j: usize| self.area(area, 1 + 3 * i as usize + j);
            Listed { source: word(0) as u32, rows: word(0) >> 32, first: word(1), place: word(2) }
        };
        (0..self.area(area, 0)).map(one).collect()
    }

    fn read(&self, at: u64, len: usize) -> Vec<u8> {
        self.rows.with_bytes(at, len as u64, <[u8]>::to_vec).unwrap()
    }
}

/// What a device does to memory of a peer.
fn store(to: u64, bytes: &[u8]) {
    // SAFETY: the exchange has said that this rank may store there until it says that it has, and
    // keeps the memory of the peer, which is in this process, until then.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to as *mut u8, bytes.len()) };
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, thread, time::Duration};

    use fabric_engine::{api::EngineConfig, simulation::SimNet, transport::sim::SimConfig};
    use fabric_engine::{EngineError, TransferEngine};

    use super::*;
    use crate::model::{check_rows, shape};

    fn alone(ranks: u32) -> (SimNet, Arc<TransferEngine>, AllToAll, Kernels) {
        let mut net = SimNet::new(SimConfig::default());
        let engine = net.engine(EngineConfig::default()).unwrap();
        let (all, kernels) = Kernels::new(Arc::clone(&engine), shape(ranks, 2, 2, 4), 0, false);
        (net, engine, all, kernels)
    }

    #[test]
    fn rs_4_a_device_that_goes_on_without_what_it_waited_for_gets_nothing_more() {
        for early in [
            DeviceEvent::Packed,
            DeviceEvent::HandedOut,
            DeviceEvent::Answered,
            DeviceEvent::Summed,
            DeviceEvent::Combining,
        ] {
            let (_net, _engine, all, kernels) = alone(1);
            kernels.tell(&all, early);
            assert!(kernels.has(Word::Abort, 1), "{early:?}");
            let said = all.check().unwrap_err();
            assert!(matches!(said, EngineError::Cancelled { .. }), "{said}");
            assert!(said.to_string().contains(&format!("{early:?}")), "{said}");
            assert_eq!(all.check(), Err(said), "for good");
        }
    }

    #[test]
    fn a_command_that_no_exchange_takes_ends_it() {
        let (to_self, other) =
            (Add { slot: 6, value: 1, ordered: true }, Add { slot: 0, value: 1, ordered: true });
        for command in [
            Command::Atomic { rank: 0, channel: 0, add: to_self },
            Command::Atomic { rank: 1, channel: 0, add: other },
            Command::Write { rank: 0, channel: 0, from: 0, to: 0, len: 16, add: None },
        ] {
            let (_net, _engine, all, kernels) = alone(2);
            all.on_command(command.encode().unwrap());
            assert!(kernels.has(Word::Abort, 1), "{command:?}");
            assert!(all.check().is_err());
        }
    }

    #[test]
    fn a_device_that_says_that_it_waited_for_too_long_is_heard() {
        let (_net, _engine, all, kernels) = alone(2);
        kernels.say(&all, DeviceEvent::Begun, 0);
        assert!(kernels.has(Word::Abort, 1));
        assert!(all.check().unwrap_err().to_string().contains("wait before Begun timed out"));
    }

    #[test]
    fn rs_1_tables_of_the_exchange_before_are_empty_when_the_next_begins() {
        let (_net, _engine, all, mut kernels) = alone(1);
        let batch = Batch::random(&mut fastrand::Rng::with_seed(1), &kernels.shape, None);
        while !matches!(kernels.step(&all, &batch, true), Outcome::Summed(..)) {}
        let (words, at) = (kernels.words.clone(), kernels.layout.missing.0);
        assert_eq!(words[at].load(Acquire) & 0xff, 0, "the own answers were there");
        assert!(matches!(kernels.step(&all, &batch, true), Outcome::Went));
        assert_eq!(words[at].load(Acquire), u64::MAX);
    }

    /// Two tokens for expert 0.
    fn two_tokens(byte: u8) -> Batch {
        Batch {
            topk: 2,
            values: vec![f32::from(byte); 2 * WIDE],
            extra: vec![byte; 2 * EXTRA],
            indices: vec![0, -1, 0, -1],
            weights: vec![1.0; 4],
        }
    }

    /// Runs the device until it may hand out rows of rank 1, then gives rank 1 up. The returned
    /// batches are those of ranks 0 and 1.
    fn hands_out_rows_of_a_lost_rank() -> (SimNet, AllToAll, Kernels, [Batch; 2]) {
        let (mut net, _engine, all, mut kernels) = alone(2);
        let engine = net.engine(EngineConfig::default()).unwrap();
        let peer = AllToAll::new(engine, kernels.shape, 1).unwrap();
        let descriptors = [&all, &peer].map(|a| a.descriptor(None).unwrap());
        peer.admit(&descriptors[0]).unwrap();
        all.admit(&descriptors[1]).unwrap();
        let batches = [two_tokens(1), two_tokens(2)];
        batches[1].send(&peer).unwrap();
        while kernels.next != Next::HandOut(1) || !kernels.has(Word::Rows, 2) {
            if matches!(kernels.step(&all, &batches[0], false), Outcome::Waits) {
                assert!(net.step());
            }
        }
        all.mask(1, "it is lost").unwrap();
        while !all.is_quiesced() {
            assert!(net.step());
        }
        (net, all, kernels, batches)
    }

    #[test]
    fn rs_1_a_newcomer_gets_no_slot_that_a_device_hands_out() {
        let (mut net, all, mut kernels, batches) = hands_out_rows_of_a_lost_rank();
        let engine = net.engine(EngineConfig::default()).unwrap();
        let again = AllToAll::new(engine, kernels.shape, 1).unwrap();
        let descriptor = again.descriptor(None).unwrap();
        all.set_timeout(Duration::from_millis(10));
        for only in [Some(1), None] {
            match all.descriptor(only) {
                Err(error) => {
                    assert!(matches!(error, EngineError::NotQuiesced { .. }), "{error}");
                    assert!(error.to_string().contains("still hands out its rows"), "{error}");
                }
                Ok(none) => {
                    assert_eq!(only, None);
                    let error = again.admit(&none).unwrap_err();
                    assert!(error.to_string().contains("no memory for rank 1"), "{error}");
                }
            }
        }
        let step = kernels.step(&all, &batches[0], false);
        assert!(matches!(step, Outcome::Collected));
        let sent = batches.each_ref().map(Some);
        check_rows(&kernels.shape, 0, kernels.handed(), &sent, &[]).unwrap();
        // The device has read the rows.
        again.admit(&all.descriptor(Some(1)).unwrap()).unwrap();
        assert_eq!(all.admit(&descriptor), Ok(1));
    }

    #[test]
    fn a_descriptor_waits_only_until_the_device_has_handed_out_rows_or_failed() {
        for fails in [false, true] {
            let (_net, all, mut kernels, batches) = hands_out_rows_of_a_lost_rank();
            all.set_timeout(Duration::from_secs(20));
            thread::scope(|threads| {
                let (done, descriptor) = mpsc::channel();
                let all = &all;
                threads.spawn(move || done.send(all.descriptor(Some(1)).map(|_| ())).unwrap());
                let early = descriptor.recv_timeout(Duration::from_millis(50));
                assert_eq!(early, Err(mpsc::RecvTimeoutError::Timeout));
                match fails {
                    true => all.leave(),
                    false => drop(kernels.step(all, &batches[0], false)),
                }
                assert_eq!(descriptor.recv_timeout(Duration::from_secs(5)), Ok(Ok(())), "{fails}");
            });
        }
    }

    #[test]
    fn a_caller_waits_for_the_routes_of_its_own_dispatch() {
        let (mut net, _engine, all, mut kernels) = alone(2);
        let engine = net.engine(EngineConfig::default()).unwrap();
        let peer = AllToAll::new(engine, kernels.shape, 1).unwrap();
        let descriptors = [&all, &peer].map(|a| a.descriptor(None).unwrap());
        peer.admit(&descriptors[0]).unwrap();
        all.admit(&descriptors[1]).unwrap();
        let now = |ticket| all.wait_arriving_on_device(ticket, Duration::ZERO);
        let batches = [two_tokens(1), two_tokens(2)];
        for ticket in 1..3 {
            kernels.ticket = ticket;
            assert_eq!(now(ticket), Ok(None));
            while kernels.next != Next::Pack {
                let waits = matches!(kernels.step(&all, &batches[0], false), Outcome::Waits);
                assert!(!waits || net.step());
            }
            // This rank's routes are known, the peer's aren't. Before, those of the last dispatch
            // were.
            assert_eq!((now(ticket), now(ticket - 1)), (Ok(None), Ok(None)));
            batches[1].send(&peer).unwrap();
            let placing = thread::scope(|threads| {
                let wait = || all.wait_arriving_on_device(ticket, Duration::from_secs(20));
                let waits = threads.spawn(wait);
                while !kernels.has(Word::Routes, u64::from(ticket)) {
                    assert!(net.step());
                }
                waits.join().unwrap()
            });
            assert_eq!(placing.unwrap().unwrap().counts, [4, 0]);
            assert_eq!(now(ticket + 1), Ok(None));
            while !matches!(kernels.step(&all, &batches[0], false), Outcome::Collected) {
                net.step();
            }
            let order = Order::Packed { multiple: 1 };
            while peer.arriving(order).unwrap().is_none()
                || !peer.collect(&mut Handed::room(0).parts()).unwrap()
            {
                assert!(net.step());
            }
            while !peer.may_dispatch() {
                assert!(net.step());
            }
        }
        all.leave();
        assert!(matches!(now(2), Err(EngineError::Cancelled { .. })));
    }

    #[test]
    fn rs_1_what_a_device_counts_is_checked() {
        let (_net, _engine, all, mut kernels) = alone(2);
        let batch = Batch::random(&mut fastrand::Rng::with_seed(1), &kernels.shape, None);
        kernels.route(&batch);
        let count = &kernels.words[kernels.layout.routes.0 + 2];
        count.store(u64::from(u32::MAX), Relaxed);
        kernels.tell(&all, DeviceEvent::Begun);
        assert!(kernels.has(Word::Abort, 1));
        assert!(all.check().unwrap_err().to_string().contains("can't have"));
    }

    #[test]
    fn there_are_turns_for_all_that_can_come_and_leave() {
        let all = shape(3, 2, 2, 5);
        assert_eq!(rounds(&all), (1, 1));
        // 2 others with 10 rows each, 2 of them private.
        assert_eq!(rounds(&Shape { shared_rows: Some(5), ..all }), (4, 4));
        assert_eq!(rounds(&Shape { shared_rows: Some(1), ..all }), (16, 20));
        assert_eq!(rounds(&Shape { shared_rows: Some(1), ..shape(1, 2, 2, 5) }), (1, 1));
    }

    #[test]
    fn a_device_takes_the_place_of_the_host() {
        let (_net, engine, all, kernels) = alone(1);
        let batch = Batch::random(&mut fastrand::Rng::with_seed(1), &kernels.shape, None);
        assert!(batch.send(&all).unwrap_err().to_string().contains("a device executes"));
        let words = AtomicWords::allocate(kernels.layout.words);
        assert!(all.attach(SharedWords::new(words, &kernels.shape).unwrap(), false).is_err());
        assert!(SharedWords::new(AtomicWords::allocate(3), &kernels.shape).is_err());
        let rows = engine.alloc(64).unwrap();
        assert!(AllToAll::over(engine, kernels.shape, 0, rows).is_err());
    }
}
