//! The receive pool of SEND/RECV, which bounds the messages that users hold.

use std::sync::{
    atomic::{AtomicBool, AtomicI64, Ordering::SeqCst},
    Arc,
};

use super::callbacks::Callbacks;
use crate::{
    api::EngineId,
    domain::{Admit, MessageRoom},
    locks::Mutex,
    wake::Waker,
};

/// A received message. Dropping it frees its slot in the pool.
pub struct Delivery {
    from: EngineId,
    message: Box<[u8]>,
    _slot: PoolSlot,
}

impl std::fmt::Debug for Delivery {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Delivery({} bytes from {})", self.message.len(), self.from)
    }
}

impl Delivery {
    /// The engine that sent it.
    pub fn from(&self) -> EngineId {
        self.from
    }

    pub fn message(&self) -> &[u8] {
        &self.message
    }
}

/// The user's message handler.
pub type OnMessage = dyn Fn(Delivery) + Send + Sync;

struct Pool {
    max_len: usize,
    free: Arc<AtomicI64>,
    on_message: Arc<OnMessage>,
}

#[derive(Default)]
pub(crate) struct Receives {
    pool: Mutex<Option<Pool>>,
    /// The slots of messages that the present poll has admitted and not delivered yet.
    reserved: Mutex<Vec<PoolSlot>>,
    room: Arc<NewRoom>,
}

/// Tells the engine that messages which found no room may find some.
#[derive(Default)]
struct NewRoom {
    unseen: AtomicBool,
    waker: Waker,
}

impl NewRoom {
    fn report(&self) {
        // Set first: a caller that polls is not woken, and looks at it before it sleeps.
        self.unseen.store(true, SeqCst);
        self.waker.wake();
    }
}

impl Receives {
    pub fn new(waker: Waker) -> Self {
        Self {
            pool: Mutex::default(),
            reserved: Mutex::default(),
            room: Arc::new(NewRoom { unseen: AtomicBool::new(false), waker }),
        }
    }

    /// Opens the pool, or replaces it: `count` messages of at most `max_len` bytes.
    pub fn open(&self, max_len: usize, count: u32, on_message: Arc<OnMessage>) {
        let free = Arc::new(AtomicI64::new(i64::from(count)));
        let before = self.pool.lock().replace(Pool { max_len, free, on_message });
        // Without the lock: the user's handler may take any lock as it ends.
        drop(before);
        self.room.report();
    }

    /// Whether there is room since the last [`begin_round`](Self::begin_round). Read before the
    /// engine sleeps.
    pub fn has_new_room(&self) -> bool {
        self.room.unseen.load(SeqCst)
    }

    /// The domains are polled next, and look for room anew.
    #[inline]
    pub fn begin_round(&self) {
        if self.has_new_room() {
            self.room.unseen.store(false, SeqCst);
        }
    }

    /// The messages of a poll are delivered; those of links that the group does not know are not.
    pub fn end_poll(&self) {
        let unused = std::mem::take(&mut *self.reserved.lock());
        drop(unused);
    }

    pub fn deliver(&self, callbacks: &Callbacks, from: EngineId, message: Box<[u8]>) {
        let reserved = self.reserved.lock().pop();
        let pool = self.pool.lock();
        let Some(now) = pool.as_ref() else { return };
        // The pool may be another one by now.
        let slot = match reserved {
            Some(slot) if Arc::ptr_eq(&slot.0, &now.free) => slot,
            _ => PoolSlot::take(now, &self.room),
        };
        let on_message = Arc::clone(&now.on_message);
        drop(pool);
        let delivery = Delivery { from, message, _slot: slot };
        callbacks.push(Box::new(move || on_message(delivery)));
    }
}

struct PoolSlot(Arc<AtomicI64>, Arc<NewRoom>);

impl PoolSlot {
    fn take(pool: &Pool, room: &Arc<NewRoom>) -> Self {
        pool.free.fetch_sub(1, SeqCst);
        Self(Arc::clone(&pool.free), Arc::clone(room))
    }
}

impl Drop for PoolSlot {
    fn drop(&mut self) {
        if self.0.fetch_add(1, SeqCst) <= 0 {
            // Messages may wait for this slot.
            self.1.report();
        }
    }
}

impl MessageRoom for Receives {
    fn admit(&self, len: usize) -> Admit {
        match &*self.pool.lock() {
            None => Admit::Wait,
            Some(pool) if len > pool.max_len => Admit::TooLong { limit: pool.max_len },
            Some(pool) if pool.free.load(SeqCst) <= 0 => Admit::Wait,
            Some(pool) => {
                // Only the thread that drives takes slots.
                self.reserved.lock().push(PoolSlot::take(pool, &self.room));
                Admit::Take
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::{sync::mpsc, time::Duration};

    use super::*;

    /// What a user's handler owns, whose end looks at the pool.
    struct LooksAtItsEnd(Arc<Receives>, mpsc::Sender<()>);

    impl Drop for LooksAtItsEnd {
        fn drop(&mut self) {
            assert!(matches!(self.0.admit(1), Admit::Take));
            let _ = self.1.send(());
        }
    }

    #[test]
    fn a_replaced_handler_ends_without_the_lock() {
        let receives = Arc::new(Receives::new(Waker::default()));
        let (ended, ends) = mpsc::channel();
        let owned = LooksAtItsEnd(Arc::clone(&receives), ended);
        receives.open(8, 1, Arc::new(move |_| _ = &owned));
        std::thread::spawn(move || receives.open(8, 1, Arc::new(|_| ())));
        ends.recv_timeout(Duration::from_secs(30)).expect("the end of the handler");
    }
}
