//! A ring of the latest values, in memory that is allocated once.

/// The latest values, each with its number; new ones overwrite the oldest.
#[derive(Clone, Debug)]
pub(crate) struct Ring<T> {
    slots: Vec<T>,
    /// A power of two, or 0 to keep nothing.
    room: usize,
    written: u64,
}

impl<T> Default for Ring<T> {
    fn default() -> Self {
        Self::new(0)
    }
}

impl<T> Ring<T> {
    /// Keeps at least so many, or none for 0. Allocates with the first.
    pub fn new(room: usize) -> Self {
        let room = if room == 0 { 0 } else { room.next_power_of_two() };
        Self { slots: Vec::new(), room, written: 0 }
    }

    #[inline]
    pub fn push(&mut self, value: T) {
        if self.slots.len() < self.room {
            if self.slots.capacity() == 0 {
                self.slots.reserve_exact(self.room);
            }
            self.slots.push(value);
        } else if self.room > 0 {
            let at = self.written as usize & (self.room - 1);
            self.slots[at] = value;
        } else {
            return;
        }
        self.written += 1;
    }

    /// Number of entries written in all, which is the number of the next.
    #[inline]
    pub fn written(&self) -> u64 {
        self.written
    }

    /// The number of the oldest that is still there.
    pub fn oldest(&self) -> u64 {
        self.written - self.slots.len() as u64
    }

    #[inline]
    pub fn last_mut(&mut self) -> Option<&mut T> {
        let last = self.written.checked_sub(1)?;
        let at = last as usize & (self.room - 1);
        self.slots.get_mut(at)
    }

    /// The kept entries from a number on, oldest first.
    pub fn since(&self, number: u64) -> impl Iterator<Item = &T> {
        let numbers = number.max(self.oldest())..self.written;
        numbers.map(|n| &self.slots[n as usize & (self.room - 1)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_are_kept_in_their_order() {
        let mut ring = Ring::new(3);
        let kept = |ring: &Ring<u32>, n| ring.since(n).copied().collect::<Vec<_>>();
        assert_eq!(kept(&ring, 0), []);
        (0..3).for_each(|n| ring.push(n));
        assert_eq!(kept(&ring, 0), [0, 1, 2]);
        (3..11).for_each(|n| ring.push(n));
        assert_eq!((ring.oldest(), ring.written()), (7, 11));
        assert_eq!(kept(&ring, 0), [7, 8, 9, 10]);
        assert_eq!(kept(&ring, 9), [9, 10]);
        assert_eq!(kept(&ring, 11), []);
        *ring.last_mut().unwrap() = 0;
        assert_eq!(kept(&ring, 10), [0]);
    }

    #[test]
    fn without_room_nothing_is_kept() {
        let mut ring = Ring::new(0);
        ring.push(1);
        assert_eq!((ring.written(), ring.since(0).count()), (0, 0));
        assert!(ring.last_mut().is_none());
    }
}
