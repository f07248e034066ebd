//! Layout of a link's inbox, which the consumer creates and the producer maps.

use super::{
    messages::RingLayout,
    raw::Map,
    ring::{Slot, Tail},
};

const RECORDS: usize = 4096;
const COUNT_TAIL: usize = 0;
const HEADER: usize = 4096;
pub(super) const COUNTS: usize = HEADER;
const MESSAGES: usize = COUNTS + RECORDS * size_of::<Slot>();
const MESSAGE_BYTES: usize = 256 << 10;

pub(super) const INBOX: usize = MESSAGES + MESSAGE_BYTES;

pub(super) const MESSAGE_RING: RingLayout =
    RingLayout { head: 256, tail: 512, waiting: 768, bytes: MESSAGES, capacity: MESSAGE_BYTES };

#[inline]
pub(super) fn counts(inbox: &Map) -> (&[Slot], &Tail) {
    (inbox.slots(COUNTS, RECORDS), inbox.tail(COUNT_TAIL))
}
