//! Signals between two threads of which each could be a process: a flag, a futex, a ring.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use super::copies::spin_until;
use super::raw::{futex_wait, futex_wake};
use super::Request;

/// Long enough for a waiter to be asleep, and its core with it.
pub const UNTIL_PARKED: Duration = Duration::from_micros(500);

/// A word on cache lines of its own (two, for the neighbour-line prefetcher).
#[derive(Debug, Default)]
#[repr(align(128))]
struct CacheLine<T>(T);

/// Half a round trip of a counter in shared memory, both sides spinning.
pub fn flag(request: &Request) -> Vec<f64> {
    let (ping, pong) = (CacheLine(AtomicU64::new(0)), CacheLine(AtomicU64::new(0)));
    let trips = (request.operations * request.batches) as u64;
    thread::scope(|scope| {
        scope.spawn(|| {
            for trip in 1..=trips {
                spin_until(|| ping.0.load(Ordering::Acquire) == trip);
                pong.0.store(trip, Ordering::Release);
            }
        });
        let mut trip = 0;
        (0..request.batches)
            .map(|_| {
                let start = Instant::now();
                for _ in 0..request.operations {
                    trip += 1;
                    ping.0.store(trip, Ordering::Release);
                    spin_until(|| pong.0.load(Ordering::Acquire) == trip);
                }
                start.elapsed().as_secs_f64() / (2 * request.operations) as f64
            })
            .collect()
    })
}

/// From a store and a wake to the sleeper running, one way.
pub fn futex(request: &Request) -> Vec<f64> {
    let word = AtomicU32::new(0);
    let (woken, stamps) = mpsc::channel::<Instant>();
    let wakes = request.operations * request.batches;
    thread::scope(|scope| {
        let word = &word;
        scope.spawn(move || {
            for seen in 0..wakes as u32 {
                while word.load(Ordering::Acquire) == seen {
                    futex_wait(word, seen);
                }
                if woken.send(Instant::now()).is_err() {
                    return;
                }
            }
        });
        one_way(request, || {
            thread::sleep(UNTIL_PARKED);
            let start = Instant::now();
            word.fetch_add(1, Ordering::Release);
            futex_wake(word);
            stamps.recv().map_or(Duration::ZERO, |end| end.saturating_duration_since(start))
        })
    })
}

/// Mean of `operations` one-way times, for each sample.
pub fn one_way(request: &Request, mut trip: impl FnMut() -> Duration) -> Vec<f64> {
    (0..request.batches)
        .map(|_| {
            let total: Duration = (0..request.operations).map(|_| trip()).sum();
            total.as_secs_f64() / request.operations as f64
        })
        .collect()
}

const SLOTS: usize = 1024;

/// A 64-byte record: its number, which publishes it, and seven words of content.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Record {
    number: AtomicU64,
    content: [AtomicU64; 7],
}

/// 64-byte records through a ring of one producer and one consumer, until the last is read.
pub fn ring(request: &Request) -> Vec<f64> {
    let slots: Vec<Record> = (0..SLOTS).map(|_| Record::default()).collect();
    let consumed = CacheLine(AtomicU64::new(0));
    let records = (request.operations * request.batches) as u64;
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut sum = 0u64;
            for number in 1..=records {
                let slot = &slots[number as usize % SLOTS];
                spin_until(|| slot.number.load(Ordering::Acquire) == number);
                for word in &slot.content {
                    sum = sum.wrapping_add(word.load(Ordering::Relaxed));
                }
                // The producer only needs to hear now and then, and at the end of each batch.
                if number % (SLOTS as u64 / 4) == 0 || number % request.operations as u64 == 0 {
                    consumed.0.store(number, Ordering::Release);
                }
            }
            std::hint::black_box(sum);
        });
        let mut number = 0u64;
        let mut free_until = SLOTS as u64;
        (0..request.batches)
            .map(|_| {
                let start = Instant::now();
                for _ in 0..request.operations {
                    number += 1;
                    if number > free_until {
                        spin_until(|| {
                            free_until = consumed.0.load(Ordering::Acquire) + SLOTS as u64;
                            number <= free_until
                        });
                    }
                    let slot = &slots[number as usize % SLOTS];
                    for word in &slot.content {
                        word.store(number, Ordering::Relaxed);
                    }
                    slot.number.store(number, Ordering::Release);
                }
                spin_until(|| consumed.0.load(Ordering::Acquire) == number);
                start.elapsed().as_secs_f64() / request.operations as f64
            })
            .collect()
    })
}
