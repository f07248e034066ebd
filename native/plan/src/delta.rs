//! Lossless encoding of the elements of a block that changed since another version of it.
//!
//! An encoded block is a little-endian `u16` head, then how the changed elements lie, then their
//! new values in order. The head holds the number of changed elements and a form:
//!
//! | head | follows |
//! |---|---|
//! | 0 | nothing: no element changed |
//! | count | gaps: a byte below 255 skips so many elements and marks the next; 255 skips 255 |
//! | count with [`BITMAP`] | one bit for each element, least significant first |
//! | count with [`WHOLE`] | the values of all elements; the count is theirs |

use bytemuck::{pod_read_unaligned, Pod};
use wide::{u16x8, u32x4, u64x2, u8x16};

/// Most elements of a block.
pub const BLOCK: usize = 4096;
/// Bytes of an encoded block's head; a block that did not change is no longer.
pub const HEAD: usize = 2;

const BITMAP: u16 = 1 << 14;
const WHOLE: u16 = 1 << 15;
const COUNT: u16 = BITMAP - 1;
const GROUP: usize = 64;
const AT_ONCE: usize = 4;
const SKIP: u8 = u8::MAX;

/// One bit for each element of a block: whether it changed.
type Changed = [u64; BLOCK / GROUP];

/// An unsigned integer as wide as an element.
trait Word: PartialEq + Pod {
    /// One bit for each of [`GROUP`] elements: whether they differ.
    fn differ(new: &[u8], old: &[u8]) -> u64;
}

macro_rules! word {
    ($($type:ty, $vector:ty);*) => {$(
        impl Word for $type {
            fn differ(new: &[u8], old: &[u8]) -> u64 {
                const LANES: usize = size_of::<$vector>() / size_of::<$type>();
                let vectors = |bytes| <[u8]>::chunks_exact(bytes, size_of::<$vector>());
                let pairs = vectors(new).zip(vectors(old)).enumerate();
                !pairs.fold(0, |same, (i, (new, old))| {
                    let [new, old] = [new, old].map(pod_read_unaligned::<$vector>);
                    same | u64::from(new.simd_eq(old).to_bitmask()) << (LANES * i)
                })
            }
        }
    )*};
}

word!(u8, u8x16; u16, u16x8; u32, u32x4; u64, u64x2);

/// Appends the encoding of `new` against `old` to `out`; returns whether they differ. Both are as
/// long, at most [`BLOCK`] elements of `size` bytes; `size` is 1, 2, 4 or 8.
pub fn encode(new: &[u8], old: &[u8], size: usize, out: &mut Vec<u8>) -> bool {
    if new == old {
        out.extend(0u16.to_le_bytes());
        return false;
    }
    match size {
        1 => encode_words::<u8>(new, old, out),
        2 => encode_words::<u16>(new, old, out),
        4 => encode_words::<u32>(new, old, out),
        _ => encode_words::<u64>(new, old, out),
    }
    true
}

/// Number of elements in which two blocks differ; arguments as of [`encode`].
pub fn changes(new: &[u8], old: &[u8], size: usize) -> usize {
    let mut changed = [0; BLOCK / GROUP];
    match size {
        1 => compare::<u8>(new, old, &mut changed),
        2 => compare::<u16>(new, old, &mut changed),
        4 => compare::<u32>(new, old, &mut changed),
        _ => compare::<u64>(new, old, &mut changed),
    }
    changed.iter().map(|group| group.count_ones() as usize).sum()
}

/// Applies an encoded block to `block`, which holds the version that it was encoded against.
/// Returns what of `encoded` follows the block; `None` if it is no encoding of such a block.
pub fn decode<'e>(block: &mut [u8], size: usize, encoded: &'e [u8]) -> Option<&'e [u8]> {
    match size {
        1 => decode_words::<1>(block, encoded),
        2 => decode_words::<2>(block, encoded),
        4 => decode_words::<4>(block, encoded),
        _ => decode_words::<8>(block, encoded),
    }
}

fn encode_words<W: Word>(new: &[u8], old: &[u8], out: &mut Vec<u8>) {
    let size = size_of::<W>();
    let elements = new.len() / size;
    let mut changed = [0; BLOCK / GROUP];
    compare::<W>(new, old, &mut changed);
    let mut places = [0; BLOCK + AT_ONCE];
    let places = list(&changed, &mut places);
    let count = places.len();
    // From here on a bitmap and values are not shorter.
    if count * size + elements.div_ceil(8) >= new.len() {
        out.extend((elements as u16 | WHOLE).to_le_bytes());
        out.extend_from_slice(new);
        return;
    }
    let bitmap = elements.div_ceil(8);
    let mut gaps = [0; BLOCK / 8];
    if let Some(length) = write_gaps(places, &mut gaps[..bitmap]) {
        out.extend((count as u16).to_le_bytes());
        out.extend_from_slice(&gaps[..length]);
    } else {
        out.extend((count as u16 | BITMAP).to_le_bytes());
        out.extend(changed.iter().flat_map(|group| group.to_le_bytes()).take(bitmap));
    }
    let begin = out.len();
    out.resize(begin + count * size, 0);
    for (value, &at) in out[begin..].chunks_exact_mut(size).zip(places) {
        value.copy_from_slice(&new[usize::from(at) * size..][..size]);
    }
}

/// Marks the elements that differ.
fn compare<W: Word>(new: &[u8], old: &[u8], changed: &mut Changed) {
    let group = GROUP * size_of::<W>();
    let groups = new.chunks(group).zip(old.chunks(group));
    for ((new, old), mask) in groups.zip(changed) {
        *mask = if new.len() == group { W::differ(new, old) } else { differ::<W>(new, old) };
    }
}

/// One bit for each of fewer than [`GROUP`] elements: whether they differ.
fn differ<W: Word>(new: &[u8], old: &[u8]) -> u64 {
    let [new, old] = [new, old].map(|bytes| bytes.chunks_exact(size_of::<W>()));
    let pairs = new.map(pod_read_unaligned::<W>).zip(old.map(pod_read_unaligned::<W>)).enumerate();
    pairs.fold(0, |mask, (i, (new, old))| mask | u64::from(new != old) << i)
}

/// Lists the changed elements in order.
fn list<'p>(changed: &Changed, places: &'p mut [u16; BLOCK + AT_ONCE]) -> &'p [u16] {
    let mut count = 0;
    for (group, &mask) in changed.iter().enumerate() {
        let (mut left, end) = (mask, count + mask.count_ones() as usize);
        // Too many at a time rather than one by one: processors can't predict where a group ends.
        while count < end {
            for place in &mut places[count..][..AT_ONCE] {
                *place = (group * GROUP) as u16 + left.trailing_zeros() as u16;
                left &= left.wrapping_sub(1);
            }
            count += AT_ONCE;
        }
        count = end;
    }
    &places[..count]
}

/// Writes the gaps before changed elements; returns their length, or `None` where they don't fit.
fn write_gaps(places: &[u16], gaps: &mut [u8]) -> Option<usize> {
    let (mut next, mut length) = (0, 0);
    for &at in places {
        let mut gap = at - next;
        while gap >= SKIP.into() {
            *gaps.get_mut(length)? = SKIP;
            length += 1;
            gap -= u16::from(SKIP);
        }
        *gaps.get_mut(length)? = gap as u8;
        length += 1;
        next = at + 1;
    }
    Some(length)
}

fn decode_words<'e, const SIZE: usize>(block: &mut [u8], encoded: &'e [u8]) -> Option<&'e [u8]> {
    let (head, rest) = encoded.split_first_chunk()?;
    let head = u16::from_le_bytes(*head);
    let count = usize::from(head & COUNT);
    let elements = block.len() / SIZE;
    if count > elements || (head & WHOLE != 0 && count < elements) {
        return None;
    }
    if head & WHOLE != 0 {
        let (values, rest) = rest.split_at_checked(block.len())?;
        block.copy_from_slice(values);
        return Some(rest);
    }
    if head & BITMAP != 0 {
        let (bitmap, rest) = rest.split_at_checked(elements.div_ceil(8))?;
        let (values, rest) = rest.split_at_checked(count * SIZE)?;
        let mut changed = [0; BLOCK / GROUP];
        for (group, bytes) in changed.iter_mut().zip(bitmap.chunks(GROUP / 8)) {
            let mut whole = [0; GROUP / 8];
            whole[..bytes.len()].copy_from_slice(bytes);
            *group = u64::from_le_bytes(whole);
        }
        let mut places = [0; BLOCK + AT_ONCE];
        let places = list(&changed, &mut places);
        if places.len() != count {
            return None;
        }
        for (&at, value) in places.iter().zip(values.chunks_exact(SIZE)) {
            let at = usize::from(at) * SIZE;
            block.get_mut(at..at + SIZE)?.copy_from_slice(value);
        }
        return Some(rest);
    }
    // The gaps end where they have marked as many elements as there are values.
    let (mut length, mut marked) = (0, 0);
    if rest.get(..count).is_some_and(|gaps| !gaps.contains(&SKIP)) {
        (length, marked) = (count, count);
    }
    while marked < count {
        marked += usize::from(*rest.get(length)? != SKIP);
        length += 1;
    }
    let (gaps, rest) = rest.split_at(length);
    let (values, rest) = rest.split_at_checked(count * SIZE)?;
    let (mut values, mut at) = (values.chunks_exact(SIZE), 0);
    for &gap in gaps {
        at += usize::from(gap);
        if gap != SKIP {
            block.get_mut(at * SIZE..(at + 1) * SIZE)?.copy_from_slice(values.next()?);
            at += 1;
        }
    }
    Some(rest)
}
