//! Reports events to the caller: in the order of decisions, from any thread, never under a lock.

use std::collections::VecDeque;

use fabric_engine::locks::Mutex;

/// Queued events and their receiver.
///
/// Events are [`push`](Self::push)ed under the lock that decides them, so they keep the order of
/// decisions, and reported by [`report`](Self::report) after it is released. One thread reports at
/// a time, so that no `Released` overtakes a `Ready`.
pub(crate) struct Events<E> {
    queue: Mutex<Queue<E>>,
    on_event: Box<dyn Fn(u64, E) + Send + Sync>,
}

struct Queue<E> {
    waiting: VecDeque<(u64, E)>,
    reporting: bool,
}

impl<E> Events<E> {
    pub fn new(on_event: impl Fn(u64, E) + Send + Sync + 'static) -> Self {
        let queue = Queue { waiting: VecDeque::new(), reporting: false };
        Self { queue: Mutex::new(queue), on_event: Box::new(on_event) }
    }

    pub fn push(&self, of: u64, event: E) {
        self.queue.lock().waiting.push_back((of, event));
    }

    /// Reports all events, or leaves them to the thread that is reporting.
    pub fn report(&self) {
        {
            let mut queue = self.queue.lock();
            if queue.reporting {
                return;
            }
            queue.reporting = true;
        }
        // If the user's function panics, the next event is told all the same.
        let _guard = ReportGuard(&self.queue);
        loop {
            let next = {
                let mut queue = self.queue.lock();
                let next = queue.waiting.pop_front();
                queue.reporting = next.is_some();
                next
            };
            let Some((of, event)) = next else { return };
            (self.on_event)(of, event);
        }
    }
}

/// Released on drop only by a panic; otherwise it has been released already.
struct ReportGuard<'a, E>(&'a Mutex<Queue<E>>);

impl<E> Drop for ReportGuard<'_, E> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.lock().reporting = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn events_are_told_in_their_order_by_one_thread_at_a_time() {
        let seen: Arc<Mutex<Vec<u64>>> = Arc::default();
        let theirs = Arc::clone(&seen);
        let events = Arc::new(Events::new(move |of, ()| {
            std::thread::yield_now();
            theirs.lock().push(of);
        }));
        let order = Mutex::new(0);
        std::thread::scope(|s| {
            for _ in 0..4 {
                s.spawn(|| {
                    for _ in 0..500 {
                        {
                            let mut next = order.lock();
                            events.push(*next, ());
                            *next += 1;
                        }
                        events.report();
                    }
                });
            }
        });
        assert_eq!(*seen.lock(), (0..2000).collect::<Vec<_>>());
    }

    #[test]
    fn who_is_told_may_cause_the_next_event_and_may_panic() {
        let seen: Arc<Mutex<Vec<u64>>> = Arc::default();
        let (theirs, again) = (Arc::clone(&seen), Arc::new(Mutex::new(None::<Arc<Events<()>>>)));
        let weak = Arc::clone(&again);
        let events = Arc::new(Events::new(move |of, ()| {
            theirs.lock().push(of);
            let events = weak.lock().clone();
            if let Some(events) = events.filter(|_| of == 1) {
                events.push(2, ());
                events.report();
            }
            assert!(of != 3, "on purpose");
        }));
        *again.lock() = Some(Arc::clone(&events));
        events.push(1, ());
        events.report();
        events.push(3, ());
        let told = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| events.report()));
        assert!(told.is_err());
        events.push(4, ());
        events.report();
        assert_eq!(*seen.lock(), [1, 2, 3, 4]);
        again.lock().take();
    }
}
