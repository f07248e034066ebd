//! Tests with processes that are stopped and killed at any moment. The test binary runs itself
//! again with the filter [`member`].

use std::{
    io::{BufRead, BufReader, Read},
    process::{Child, ChildStdin, Command, Stdio},
    sync::{
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
        Arc,
    },
    time::Instant,
};

use super::{
    tests::{TempFolder, BUSY, WINDOW},
    *,
};

/// The directory of a member process, and its role.
const DIRECTORY_VARIABLE: &str = "FABRIC_RAY_TEST_SHARE";
const ROLE_VARIABLE: &str = "FABRIC_RAY_TEST_SHARE_AS";
/// Fails tests that hang; far above any expected duration.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Interval of polls.
const STEP: Duration = Duration::from_millis(1);

/// Joins. Retries while another process is stopped in the middle of leaving.
fn join(dir: &Path) -> HostShare {
    let start = Instant::now();
    loop {
        let share = HostShare::join_in(dir, "mlx5_0", 1);
        if share.table.is_some() {
            return share;
        }
        assert!(start.elapsed() < TIMEOUT, "the table is wedged");
    }
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < TIMEOUT, "{what}");
        std::thread::sleep(STEP);
    }
}

/// The body of a member process, until its input ends. Does nothing in the parent.
#[test]
fn member() {
    let (Some(dir), Ok(how)) = (std::env::var_os(DIRECTORY_VARIABLE), std::env::var(ROLE_VARIABLE))
    else {
        return;
    };
    let stop = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&stop);
    std::thread::spawn(move || {
        let _ = std::io::stdin().read(&mut [0]);
        seen.store(true, SeqCst);
    });
    let going_on = || !stop.load(SeqCst);
    match how.as_str() {
        "churn" => churn(Path::new(&dir), going_on),
        how => work(Path::new(&dir), how == "fork", going_on),
    }
}

/// Demands more than the window, and prints its part.
fn work(dir: &Path, forks: bool, going_on: impl Fn() -> bool) {
    let mut share = join(dir);
    if forks {
        // SAFETY: the child only sleeps, and dies at the latest by the alarm.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: takes a number; ends the child if the test doesn't.
            unsafe { libc::alarm(2 * TIMEOUT.as_secs() as u32) };
            loop {
                // SAFETY: waits for a signal.
                unsafe { libc::pause() };
            }
        }
        println!("\nchild {child}");
    }
    let mut said = 0;
    while going_on() {
        share.publish(Time::now(), BUSY);
        let part = share.window(WINDOW, Priority::Bulk);
        if part != std::mem::replace(&mut said, part) {
            println!("\npart {part}");
        }
        std::thread::sleep(2 * STEP);
    }
}

/// Joins and leaves in a loop. While it is joined, its table has the name.
fn churn(dir: &Path, going_on: impl Fn() -> bool) {
    while going_on() {
        let mut share = join(dir);
        for _ in 0..fastrand::u32(..8) {
            let table = share.table.as_ref().expect("no table is damaged here");
            assert!(table.is_named(), "other engines use another table");
            share.publish(Time::now(), BUSY);
            assert!(share.window(WINDOW, Priority::Bulk) >= MIN_WINDOW);
        }
    }
}

struct Member {
    process: Child,
    input: Option<ChildStdin>,
    part: Arc<AtomicU64>,
    child: Arc<AtomicU64>,
}

impl Member {
    fn spawn(dir: &TempFolder, how: &str) -> Self {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "engine::driver::share::processes::member", "--nocapture"])
            .env(DIRECTORY_VARIABLE, &dir.0)
            .env(ROLE_VARIABLE, how)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let input = process.stdin.take();
        let output = BufReader::new(process.stdout.take().unwrap());
        let (part, child) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let told = [("part ", Arc::clone(&part)), ("child ", Arc::clone(&child))];
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                for (name, value) in &told {
                    if let Some(n) = line.strip_prefix(name) {
                        value.store(n.parse().unwrap(), SeqCst);
                    }
                }
            }
        });
        Self { process, input, part, child }
    }

    fn part(&self) -> u64 {
        self.part.load(SeqCst)
    }

    fn signal(&self, signal: i32) {
        // SAFETY: a child that was not waited for.
        unsafe { libc::kill(self.process.id() as i32, signal) };
    }

    /// Sends SIGKILL at an arbitrary point.
    fn kill(mut self) {
        assert!(self.process.try_wait().unwrap().is_none(), "it has failed before");
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    fn leave(mut self) {
        self.input = None;
        assert!(self.process.wait().unwrap().success());
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn all_have(members: &[Member], part: u64) {
    until("the shares don't settle", || members.iter().all(|m| m.part() == part));
}

#[test]
fn the_part_of_a_process_that_ends_in_any_way_comes_back() {
    let dir = TempFolder::new();
    let mut dice = fastrand::Rng::with_seed(33);
    let mut members = Vec::new();
    for round in 0..24 {
        let n = members.len();
        match dice.u8(..3) {
            _ if n < 2 || round % 4 == 0 => members.push(Member::spawn(&dir, "work")),
            0 => members.swap_remove(dice.usize(..n)).leave(),
            _ => members.swap_remove(dice.usize(..n)).kill(),
        }
        all_have(&members, WINDOW / members.len() as u64);
    }
    members.push(Member::spawn(&dir, "work"));
    let n = members.len() as u64;
    all_have(&members, WINDOW / n);
    // A hung process holds its slot and has no share.
    let hangs = members.pop().unwrap();
    hangs.signal(libc::SIGSTOP);
    all_have(&members, WINDOW / (n - 1));
    hangs.signal(libc::SIGCONT);
    all_have(&members, WINDOW / n);
    members.push(hangs);
    members.into_iter().for_each(Member::leave);
    assert!(!dir.table().exists());
}

#[test]
fn a_child_that_outlives_its_parent_keeps_no_slot() {
    let dir = TempFolder::new();
    let mut share = join(&dir.0);
    let parent = Member::spawn(&dir, "fork");
    let mut part = || {
        share.publish(Time::now(), BUSY);
        share.window(WINDOW, Priority::Bulk)
    };
    until("the other process doesn't join", || part() == WINDOW / 2);
    until("the child doesn't start", || parent.child.load(SeqCst) != 0);
    let child = parent.child.load(SeqCst) as i32;
    parent.kill();
    until("the share doesn't come back", || part() == WINDOW);
    // The kernel has released the lock: the share came back without a timeout.
    let table = share.table.as_ref().unwrap();
    let held = (0..record::SLOTS).filter(|slot| table.is_held(*slot)).count();
    // SAFETY: signal 0 only checks that the process exists.
    let lives = unsafe { libc::kill(child, 0) } == 0;
    // SAFETY: the sleeping child.
    unsafe { libc::kill(child, libc::SIGKILL) };
    assert_eq!((held, lives), (0, true));
}

#[test]
fn coming_going_and_dying_at_any_moment_wedges_nothing() {
    let dir = TempFolder::new();
    let mut dice = fastrand::Rng::with_seed(34);
    let mut members: Vec<_> = (0..3).map(|_| Member::spawn(&dir, "churn")).collect();
    for _ in 0..150 {
        std::thread::sleep(Duration::from_micros(dice.u64(..25_000)));
        let victim = dice.usize(..3);
        std::mem::replace(&mut members[victim], Member::spawn(&dir, "churn")).kill();
        let share = join(&dir.0);
        assert!(share.table.as_ref().unwrap().is_named());
    }
    members.into_iter().for_each(Member::leave);
    let mut share = join(&dir.0);
    share.publish(Time::now(), BUSY);
    // Records of dead processes have no share.
    assert_eq!(share.window(WINDOW, Priority::Bulk), WINDOW);
    drop(share);
    assert!(!dir.table().exists());
}
