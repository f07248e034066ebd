use std::cell::{Cell, RefCell};

use proptest::prelude::*;

use super::*;
use crate::{memory::file::FileBackend, wake::Waker};

#[test]
fn the_columns_of_a_matrix_are_one_call_and_a_whole_matrix_is_one_range() {
    let column = |i: usize| CopyRange { to: 384 * i, from: (1 << 20) + 1536 * i, len: 384 };
    let pieces: Vec<_> = (0..2048).map(column).collect();
    assert_eq!(Rows::of(&pieces).len(), 1);
    let whole: Vec<_> =
        (0..2048).map(|i| CopyRange { to: 384 * i, from: (1 << 20) + 384 * i, len: 384 }).collect();
    let ranges: Vec<_> = Rows::of(&whole).iter().map(Rows::range).collect();
    assert_eq!(ranges, [Some(CopyRange { to: 0, from: 1 << 20, len: 384 * 2048 })]);
}

thread_local! {
    /// Calls for streams and events, in order.
    static CALLS: RefCell<Vec<&'static str>> = const { RefCell::new(Vec::new()) };
    /// Copies that are still accepted.
    static LEFT: Cell<usize> = const { Cell::new(0) };
}

fn called(call: &'static str) -> sys::Result {
    CALLS.with_borrow_mut(|calls| calls.push(call));
    sys::SUCCESS
}

unsafe extern "C" fn create(event: *mut sys::Event, _: u32) -> sys::Result {
    // SAFETY: the caller's place.
    unsafe { *event = 7 as *mut _ };
    called("create")
}

extern "C" fn copy(_: u64, _: u64, _: usize, _: sys::Stream) -> sys::Result {
    match LEFT.get() {
        0 => sys::ERROR_OUT_OF_MEMORY,
        left => {
            LEFT.set(left - 1);
            called("copy")
        }
    }
}

extern "C" fn record(_: sys::Event, _: sys::Stream) -> sys::Result {
    called("record")
}

extern "C" fn wait(_: sys::Event) -> sys::Result {
    called("wait")
}

extern "C" fn destroy_event(_: sys::Event) -> sys::Result {
    called("destroy event")
}

extern "C" fn synchronize(_: sys::Stream) -> sys::Result {
    called("synchronize")
}

extern "C" fn destroy(_: sys::Stream) -> sys::Result {
    called("destroy")
}

extern "C" fn no_text(_: sys::Result, _: *mut *const std::ffi::c_char) -> sys::Result {
    sys::ERROR_INVALID_VALUE
}

/// The stream of a device that accepts so many copies.
fn accepting(copies: usize) -> CopyStream {
    LEFT.set(copies);
    let driver = Driver::of_contexts(1, |table| {
        (table.get_error_name, table.get_error_string) = (no_text, no_text);
        (table.copy_async, table.event_create, table.event_record) = (copy, create, record);
        (table.event_synchronize, table.event_destroy) = (wait, destroy_event);
        (table.stream_synchronize, table.stream_destroy) = (synchronize, destroy);
    });
    CopyStream { driver, device: 0, stream: 5, idle: Vec::new() }
}

const APART: [CopyRange; 2] = [
    CopyRange { to: 0x1000, from: 0x9000, len: 8 },
    CopyRange { to: 0x2000, from: 0xa001, len: 4 },
];

#[test]
fn mr_1_a_dropped_stream_waits_for_its_copies() {
    let mut stream = accepting(2);
    let current = stream.enter().unwrap();
    // SAFETY: the driver copies nothing.
    unsafe { stream.start(&current, &APART) }.unwrap();
    drop((current, stream));
    assert_eq!(CALLS.take(), ["create", "copy", "copy", "record", "synchronize", "destroy"]);
}

#[test]
fn mr_1_a_call_ends_after_its_copies_whether_all_were_accepted_or_not() {
    let mut stream = accepting(4);
    for calls in
        [&["create", "copy", "copy", "record", "wait"][..], &["copy", "copy", "record", "wait"]]
    {
        // SAFETY: the driver copies nothing.
        unsafe { stream.copy_and_wait(&APART) }.unwrap();
        assert_eq!(CALLS.take(), calls);
    }
    LEFT.set(1);
    // SAFETY: as above.
    unsafe { stream.copy_and_wait(&APART) }.unwrap_err();
    assert_eq!(CALLS.take(), ["copy", "synchronize"]);
    drop(stream);
    assert_eq!(CALLS.take(), ["synchronize", "destroy event", "destroy"]);
}

#[test]
fn mr_1_copies_whose_end_is_unknown_are_not_over() {
    let driver = Driver::without_devices();
    let stream = CopyStream { driver, device: 0, stream: 0, idle: Vec::new() };
    let files = FileQueue::new(&Waker::default(), FileBackend::Best);
    let mut copier = AsyncCopier::new(&files);
    copier.streams.push(((0, true), stream));
    let copy = PendingCopy::Device { device: 0, inward: true, event: 1 };
    assert!(copier.poll(&copy).is_none(), "its slot would be used again");
}

proptest! {
    #[test]
    fn rows_are_the_same_copies_in_the_same_order_and_overlap_nowhere(
        steps in proptest::collection::vec((0usize..4, 0usize..4, 1usize..3), 0..40),
    ) {
        let (mut to, mut from) = (1000, 5000);
        let pieces: Vec<CopyRange> = steps
            .iter()
            .map(|(a, b, len)| {
                (to, from) = (to + 2 * a, from + 2 * b);
                CopyRange { to, from, len: *len }
            })
            .collect();
        let rows = Rows::of(&pieces);
        let same: Vec<CopyRange> = rows.iter().flat_map(Rows::each).collect();
        prop_assert_eq!(same, pieces);
        for r in rows.iter().filter(|r| r.count > 1) {
            prop_assert!(r.to_pitch.min(r.from_pitch) >= r.first.len);
        }
    }
}
