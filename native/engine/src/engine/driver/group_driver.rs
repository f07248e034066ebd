//! Drives the group under its lock: the worker when traffic arrives, a caller that submits, a
//! caller that waits. The submit path never waits for the lock. If it is taken, the command goes to
//! the inbox, which the holder empties.

use std::{
    sync::{
        atomic::{
            AtomicBool, AtomicU32, AtomicU64,
            Ordering::{Relaxed, SeqCst},
        },
        Arc,
    },
    time::Duration,
};

use super::{
    combining_lock::{CarryOut, CombiningGuard, CombiningLock},
    heartbeats::Heartbeats,
    parker::Parker,
    share::HostShare,
    state::{Command, Core},
};
use crate::{
    domain::{Assist, Domain, Pinner},
    engine::Shared,
    group::{Group, Policy},
    time::Time,
    topology::Tier,
    Result,
};

/// Time from a caller's last poll until the worker takes over. A caller that polls again at once
/// finds nothing armed, and the wake-up promise (150 us) holds.
const HANDOVER_DELAY: Duration = Duration::from_micros(60);
/// The longest interval of the worker's checks while callers keep polling.
const MAX_HANDOVER_DELAY: Duration = Duration::from_micros(240);

/// Failed attempts in a row after which the worker queues for the lock: some milliseconds.
const MAX_MISSES: u32 = 16;

/// Idle polls after which a spinning thread yields between polls.
const YIELD_AFTER: u32 = 2_000;

/// The worker yields after this many idle polls: the event that it polls for may need its core.
const WORKER_YIELDS: u32 = 16;

pub(crate) struct GroupDriver {
    core: CombiningLock<Core, Command>,
    /// Threads that poll while they wait.
    pollers: AtomicU32,
    /// When a poller last left.
    left_at: AtomicU64,
    /// Number of successive rounds in which the worker found the lock taken.
    misses: AtomicU32,
    parker: Option<Parker>,
    assistants: Vec<Arc<dyn Assist>>,
    pinners: Vec<Option<Arc<dyn Pinner>>>,
    spin: Duration,
    pub(super) heartbeats: Arc<Heartbeats>,
    pub stopping: AtomicBool,
}

/// Commands get a reference to the engine.
impl CarryOut<Core, Command> for &Arc<Shared> {
    #[inline]
    fn carry_out(&self, core: &mut Core, command: Command) {
        command(core, self);
    }
}

pub(crate) type Guard<'a> = CombiningGuard<'a, Core, Command, &'a Arc<Shared>>;

impl GroupDriver {
    /// `tiers`: the distance of each rail from the engine's memory, where known. With `threaded`
    /// false the caller drives, and no thread sleeps or is woken (simulator).
    pub fn new(
        domains: Vec<Box<dyn Domain>>,
        (policy, tiers): (Policy, &[Tier]),
        spin: Duration,
        threaded: bool,
    ) -> Result<Self> {
        let parker = threaded.then(|| Parker::new(&domains)).transpose()?;
        let assistants = domains.iter().filter_map(|d| d.assistant()).collect();
        // With a simulated clock the NICs are simulated too, and not shared.
        let shares = domains.iter().enumerate().filter(|(_, d)| threaded && d.kind().has_nics());
        let shares = shares.map(|(rail, d)| (rail, HostShare::join(d.device(), 1))).collect();
        let rail_window = policy.rail_window;
        let heartbeats = Arc::new(Heartbeats::default());
        let pinners = domains.iter().map(|d| d.pinner()).collect();
        let mut group = Group::new(policy);
        tiers.iter().enumerate().for_each(|(rail, tier)| group.set_tier(rail, *tier));
        Ok(Self {
            core: CombiningLock::new(Core {
                group,
                domains,
                completions: Vec::new(),
                first_rail: 0,
                armed: false,
                closed: false,
                drains: Vec::new(),
                shares,
                rail_window,
                heartbeats: Arc::clone(&heartbeats),
            }),
            pollers: AtomicU32::new(0),
            left_at: AtomicU64::new(0),
            misses: AtomicU32::new(0),
            parker,
            assistants,
            pinners,
            spin,
            heartbeats,
            stopping: AtomicBool::new(false),
        })
    }

    pub fn lock<'a>(&'a self, shared: &'a Arc<Shared>) -> Guard<'a> {
        self.core.lock(shared)
    }

    #[inline]
    pub fn try_lock<'a>(&'a self, shared: &'a Arc<Shared>) -> Option<Guard<'a>> {
        self.core.try_lock(shared)
    }

    /// Runs `command` under the lock: on this thread if the lock is free, else on its holder.
    pub fn post(&self, shared: &Arc<Shared>, command: Command) {
        self.core.post(shared, command);
    }

    /// The pinner of each domain, if any; used without the lock.
    pub fn pinners(&self) -> &[Option<Arc<dyn Pinner>>] {
        &self.pinners
    }

    /// Wakes the worker, unless another thread polls.
    pub fn kick(&self) {
        std::sync::atomic::fence(SeqCst);
        if self.pollers.load(SeqCst) == 0 {
            self.kick_worker();
        }
    }

    pub fn kick_worker(&self) {
        if let Some(parker) = &self.parker {
            parker.kick();
        }
    }

    /// Makes a sleeping worker wake at `at` or earlier.
    pub fn set_alarm(&self, at: Time) {
        if let Some(parker) = self.parker.as_ref().filter(|_| at != Time::NEVER) {
            parker.set_timer(at, Duration::ZERO);
        }
    }

    /// Sets a timer after which the worker takes over if no caller polls. Nothing is armed until
    /// then.
    fn set_handover_timer(&self, now: Time) {
        if let Some(parker) = &self.parker {
            parker.set_timer(now.after(HANDOVER_DELAY), MAX_HANDOVER_DELAY - HANDOVER_DELAY);
        }
    }

    /// Takes the lock for the worker. While other threads hold it repeatedly, the worker backs off,
    /// so as not to take their core. After [`MAX_MISSES`] attempts it waits for the lock and
    /// drives, so that heartbeats are sent (RS-4).
    fn lock_or_linger<'a>(&'a self, shared: &'a Arc<Shared>, now: Time) -> Option<Guard<'a>> {
        if let Some(core) = self.try_lock(shared) {
            self.misses.store(0, Relaxed);
            return Some(core);
        }
        let misses = self.misses.fetch_add(1, Relaxed);
        if misses < MAX_MISSES {
            self.set_alarm(now.after(HANDOVER_DELAY * (1 << misses.min(2))));
            return None;
        }
        self.misses.store(0, Relaxed);
        let mut core = self.lock(shared);
        core.drive(shared);
        Some(core)
    }

    /// One round on this thread, unless another thread is in one.
    #[inline]
    pub fn poll_once(&self, shared: &Arc<Shared>) -> bool {
        if self.parker.is_none() {
            return false;
        }
        self.enter();
        let moved = self.round(shared);
        self.leave();
        moved
    }

    fn enter(&self) {
        self.pollers.fetch_add(1, SeqCst);
    }

    fn leave(&self) {
        self.pollers.fetch_sub(1, SeqCst);
        let now = Time::now();
        self.left_at.store(now.0, Relaxed);
        self.set_handover_timer(now);
    }

    #[inline]
    fn round(&self, shared: &Arc<Shared>) -> bool {
        let Some(mut core) = self.try_lock(shared) else { return false };
        if core.armed {
            core.disarm();
        }
        core.drive(shared)
    }

    /// One round on a thread that has an event of its own. It saves waking the worker, which would
    /// take a core from copying threads where cores are few.
    pub fn poll_here(&self, shared: &Arc<Shared>) {
        if self.parker.is_none() {
            return;
        }
        // The holder of the lock may have polled before the event.
        let Some(mut core) = self.try_lock(shared) else { return self.kick() };
        let armed = core.armed;
        if armed {
            core.disarm();
        }
        core.drive(shared);
        // Otherwise another thread polls, or an alarm is set.
        if armed && self.pollers.load(SeqCst) == 0 && !self.arm(&mut core, shared) {
            self.kick_worker();
        }
    }

    /// Polls until `done` or `deadline`, and never sleeps.
    pub fn spin(&self, shared: &Arc<Shared>, done: &dyn Fn() -> bool, deadline: Time) {
        if self.parker.is_none() {
            return;
        }
        self.enter();
        let mut idle = 0;
        for turn in 1u32.. {
            if done() || (turn % 16 == 0 && Time::now() >= deadline) {
                break;
            }
            self.step(shared, &mut idle);
        }
        self.leave();
    }

    /// Polls during progress and for the spin time after it. Then hands over to the worker, so that
    /// the caller can sleep.
    pub fn wait(&self, shared: &Arc<Shared>, done: &dyn Fn() -> bool, deadline: Time) {
        if self.parker.is_none() {
            return;
        }
        self.enter();
        let mut idle = 0;
        let mut quiet_since = None;
        for turn in 1u32.. {
            if done() {
                return self.leave();
            }
            self.step(shared, &mut idle);
            if idle == 0 {
                quiet_since = None;
            }
            if turn % 16 == 0 {
                let now = Time::now();
                let quiet = now.since(*quiet_since.get_or_insert(now));
                if now >= deadline || quiet >= self.spin {
                    break;
                }
            }
        }
        self.hand_over(shared);
    }

    fn step(&self, shared: &Arc<Shared>, idle: &mut u32) {
        let moved = self.round(shared) | self.assistants.iter().any(|a| a.assist());
        if moved {
            *idle = 0;
            return;
        }
        *idle += 1;
        match *idle > YIELD_AFTER {
            true => std::thread::yield_now(),
            false => std::hint::spin_loop(),
        }
    }

    /// The last poller arms everything, so that the worker can sleep until an event.
    fn hand_over(&self, shared: &Arc<Shared>) {
        self.pollers.fetch_sub(1, SeqCst);
        match self.try_lock(shared).filter(|_| self.pollers.load(SeqCst) == 0) {
            Some(mut core) => {
                if !self.arm(&mut core, shared) {
                    self.kick_worker();
                }
            }
            // Another thread drives, and arms when it leaves.
            None => self.set_handover_timer(Time::now()),
        }
    }

    /// Arms everything before the last poller leaves; false if there is work to do first.
    fn arm(&self, core: &mut Core, shared: &Arc<Shared>) -> bool {
        let Some(parker) = &self.parker else { return true };
        // Descriptors may have fired since: the worker woke, saw a poller, and slept again.
        if core.armed {
            core.disarm();
        }
        if !core.arm_domains() {
            return false;
        }
        parker.arm(&core.domains);
        self.set_alarm(core.next_timer(shared));
        true
    }

    /// Whether a caller polled just now and may poll again.
    fn is_lingering(&self, now: Time) -> bool {
        now.since(Time(self.left_at.load(Relaxed))) < HANDOVER_DELAY
    }

    /// The worker's loop: drives during traffic, sleeps otherwise.
    pub(super) fn work(&self, shared: &Arc<Shared>, always: bool) {
        let Some(parker) = &self.parker else { return };
        let mut spin = self.spin;
        while !self.stopping.load(SeqCst) {
            self.work_awake(shared, always, spin);
            while !self.stopping.load(SeqCst) {
                let only_alarm = parker.sleep();
                // More events may follow an event. A bare alarm only means that a caller has left.
                spin = if only_alarm { Duration::ZERO } else { self.spin };
                let now = Time::now();
                if !only_alarm || always || !self.is_lingering(now) {
                    break;
                }
                // Callers keep polling: another polling thread would only take a core from threads
                // that move bytes.
                self.set_alarm(now.after(MAX_HANDOVER_DELAY));
            }
        }
    }

    /// Drives until nothing has moved for `spin`, or for the full spin time once something has.
    fn work_awake(&self, shared: &Arc<Shared>, always: bool, mut spin: Duration) {
        let mut idle_since = None;
        let mut idle = 0u32;
        while !self.stopping.load(SeqCst) {
            if self.pollers.load(SeqCst) > 0 && !always {
                // Callers drive; the last one arms, or sets an alarm, when it leaves.
                return;
            }
            if self.round(shared) {
                idle_since = None;
                idle = 0;
                spin = self.spin;
                continue;
            }
            idle += 1;
            if always {
                std::hint::spin_loop();
                continue;
            }
            let now = Time::now();
            let since = *idle_since.get_or_insert(now);
            if now.since(since) < spin {
                match idle.is_multiple_of(WORKER_YIELDS) {
                    true => std::thread::yield_now(),
                    false => std::hint::spin_loop(),
                }
                continue;
            }
            if self.is_lingering(now) {
                return self.set_alarm(now.after(MAX_HANDOVER_DELAY));
            }
            let Some(mut core) = self.lock_or_linger(shared, now) else { return };
            if self.arm(&mut core, shared) {
                return;
            }
        }
    }
}
