//! Drives the group under its lock: the worker when traffic arrives, a caller that submits, a
//! caller that waits. The submit path never waits for the lock. If it is taken, the command goes to
//! the inbox, which the holder empties.

use std::{
    sync::{
        atomic::{
            AtomicBool, AtomicI32, AtomicU32, AtomicU64,
            Ordering::{Relaxed, SeqCst},
        },
        Arc,
    },
    time::Duration,
};

use super::{
    combining_lock::{CarryOut, CombiningGuard, CombiningLock},
    heartbeats::Heartbeats,
    parker::{Parker, Sleeper},
    share::HostShare,
    state::{Command, Core},
    waiters::Waiters,
};
use crate::{
    domain::{Assist, Domain, Pinner},
    engine::Shared,
    group::{Group, Policy},
    time::Time,
    topology::Tier,
    Result,
};

/// Time from a caller's last poll until the worker takes over, unless callers have kept polling. One
/// that polls again at once finds nothing armed.
pub(super) const HANDOVER_DELAY: Duration = Duration::from_micros(60);
/// The longest interval of the worker's checks while callers keep polling. Each check takes a
/// virtual machine 40 us: to set a timer, for its interrupt, and for the worker.
pub(super) const MAX_HANDOVER_DELAY: Duration = Duration::from_micros(1920);

/// Time after which the worker drives beside callers. Their threads may get no core.
const CALLER_CHECK: Duration = Duration::from_millis(50);

/// Failed attempts in a row after which the worker queues for the lock: some milliseconds.
const MAX_MISSES: u32 = 16;

/// Idle polls after which a spinning thread yields between polls.
const YIELD_AFTER: u32 = 2_000;

/// The worker yields after this many idle polls: the event that it polls for may need its core.
const WORKER_YIELDS: u32 = 16;

pub(crate) struct GroupDriver {
    core: CombiningLock<Core, Command>,
    pub(super) waiters: Waiters,
    /// When a poller last left.
    left_at: AtomicU64,
    /// Time from a poller's leave to the worker's check, nanoseconds: doubled by each check that
    /// finds callers polling, so it is at most the time for which they have kept doing so.
    handover_delay: AtomicU64,
    /// Number of successive rounds in which the worker found the lock taken.
    misses: AtomicU32,
    pub(super) parker: Option<Parker>,
    assistants: Vec<Arc<dyn Assist>>,
    pinners: Vec<Option<Arc<dyn Pinner>>>,
    pub(super) spin: Duration,
    /// The worker never sleeps.
    pub(super) always: bool,
    /// The worker's nice value, once it runs.
    pub(super) worker_nice: AtomicI32,
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
        (spin, always): (Duration, bool),
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
            waiters: Waiters::new(),
            left_at: AtomicU64::new(0),
            handover_delay: AtomicU64::new(HANDOVER_DELAY.as_nanos() as u64),
            misses: AtomicU32::new(0),
            parker,
            assistants,
            pinners,
            spin,
            always,
            worker_nice: AtomicI32::new(i32::MIN),
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
        if !self.waiters.are_polling() {
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
        self.set_alarm(now.after(self.handover_delay()));
    }

    pub(super) fn handover_delay(&self) -> Duration {
        Duration::from_nanos(self.handover_delay.load(Relaxed))
    }

    fn set_handover_delay(&self, delay: Duration) {
        self.handover_delay.store(delay.as_nanos() as u64, Relaxed);
    }

    /// The worker found callers polling: it checks again after twice the time.
    fn postpone_handover(&self, now: Time) {
        self.set_handover_delay((self.handover_delay() * 2).min(MAX_HANDOVER_DELAY));
        self.set_handover_timer(now);
    }

    /// Sets a timer after which the worker checks that callers drive.
    fn set_check_timer(&self) {
        if let Some(parker) = &self.parker {
            parker.set_timer(Time::now().after(CALLER_CHECK), CALLER_CHECK);
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

    /// A caller begins to poll, and may get no core then.
    pub(super) fn enter(&self) {
        self.waiters.enter();
        self.set_check_timer();
    }

    pub(super) fn leave(&self) {
        self.waiters.leave();
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
        if armed && !self.waiters.are_polling() && !self.arm(&mut core, shared) {
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

    pub(super) fn step(&self, shared: &Arc<Shared>, idle: &mut u32) {
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

    /// The last poller arms everything, so that a thread can sleep until an event; false if there
    /// is work to do first.
    pub(super) fn hand_over(&self, shared: &Arc<Shared>) -> bool {
        self.waiters.hand_over(
            || self.try_lock(shared),
            |core| self.arm(core, shared),
            // Another thread drives, and arms when it leaves.
            || self.set_alarm(Time::now().after(HANDOVER_DELAY)),
        )
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
        // The domains look for room in the receive pool when they are polled only.
        if shared.receives.has_new_room() {
            core.disarm();
            return false;
        }
        let sleeper = self.waiters.sleeper();
        parker.arm(&core.domains, sleeper);
        self.set_alarm(core.next_timer(shared));
        if sleeper == Sleeper::Caller {
            self.set_check_timer();
        }
        true
    }

    pub(super) fn left_at(&self) -> Time {
        Time(self.left_at.load(Relaxed))
    }

    /// Whether a caller polled just now and may poll again.
    fn is_lingering(&self, now: Time) -> bool {
        now.since(self.left_at()) < HANDOVER_DELAY
    }

    /// Whether callers poll again and again. One that polls on has no need of a check so soon.
    pub(super) fn do_callers_go_on(&self, now: Time) -> bool {
        let polls_anew = now.since(self.left_at()) < MAX_HANDOVER_DELAY;
        self.is_lingering(now) || (polls_anew && self.waiters.are_polling())
    }

    /// The worker's loop: drives during traffic, sleeps otherwise.
    pub(super) fn work(&self, shared: &Arc<Shared>) {
        let Some(parker) = &self.parker else { return };
        if let Ok(nice) = rustix::process::getpriority_process(None) {
            self.worker_nice.store(nice, Relaxed);
        }
        let mut spin = self.spin;
        while !self.stopping.load(SeqCst) {
            self.work_awake(shared, spin);
            while !self.stopping.load(SeqCst) {
                let only_alarm = parker.sleep();
                // More events may follow an event. A bare alarm only means that a caller has left.
                spin = if only_alarm { Duration::ZERO } else { self.spin };
                let now = Time::now();
                if !only_alarm || self.always || !self.do_callers_go_on(now) {
                    break;
                }
                // Another polling thread would only take a core from threads that move bytes.
                self.postpone_handover(now);
            }
        }
    }

    /// Drives until nothing has moved for `spin`, or for the full spin time once something has.
    fn work_awake(&self, shared: &Arc<Shared>, mut spin: Duration) {
        let mut idle_since = None;
        let mut idle = 0u32;
        let mut has_moved = false;
        while !self.stopping.load(SeqCst) {
            if self.waiters.are_polling() && !self.always {
                // Callers drive; the last one arms, or sets an alarm, when it leaves.
                if Time::now().since(self.heartbeats.driven_at()) >= CALLER_CHECK {
                    self.round(shared);
                }
                return self.set_check_timer();
            }
            if self.round(shared) {
                idle_since = None;
                idle = 0;
                has_moved = true;
                spin = self.spin;
                continue;
            }
            idle += 1;
            if self.always {
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
                return self.postpone_handover(now);
            }
            self.set_handover_delay(HANDOVER_DELAY);
            let Some(mut core) = self.lock_or_linger(shared, now) else { return };
            if has_moved && self.waiters.give_events_to_worker() {
                self.wake_caller();
            }
            if self.arm(&mut core, shared) {
                return;
            }
        }
    }
}
