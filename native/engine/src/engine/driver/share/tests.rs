//! Tests with several engines of one process: each has its own slot, and the test sets the time.

use std::{
    fs,
    os::{
        fd::AsFd,
        unix::fs::{symlink, MetadataExt, PermissionsExt},
    },
    path::PathBuf,
};

use rustix::fs::OFlags;

use super::{other_processes::SILENCE_LIMIT, record::SLOTS, *};
use crate::group::policy::divide::MIN_WINDOW;

const M: u64 = 1 << 20;
pub(super) const WINDOW: u64 = 8 * M;

/// A directory for tables, removed in the end.
pub(super) struct TempFolder(pub PathBuf);

impl TempFolder {
    pub fn new() -> Self {
        let name = format!("fabric-ray-test-{}-{}", std::process::id(), fastrand::u64(..));
        let path = Path::new(SHARED_MEMORY_DIR).join(name);
        fs::create_dir(&path).unwrap();
        Self(path)
    }

    pub fn join(&self, weight: u32) -> HostShare {
        HostShare::join_in(&self.0, "mlx5_0", weight)
    }

    pub fn table(&self) -> PathBuf {
        self.0.join(file_name("mlx5_0"))
    }
}

impl Drop for TempFolder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn bulk(bytes: u64) -> ByClass {
    ByClass { bulk: bytes, ..ByClass::default() }
}

pub(super) const BUSY: ByClass = ByClass { latency: 0, bulk: 99 * M, background: 0 };
const IDLE: ByClass = ByClass { latency: 0, bulk: 0, background: 0 };

fn ms(n: u64) -> Time {
    Time(n * 1_000_000)
}

/// Every engine publishes three times, so that all see the demands of all.
fn settle(at: &mut u64, shares: &mut [(&mut HostShare, ByClass)]) -> Vec<u64> {
    for _ in 0..3 {
        *at += 10;
        shares.iter_mut().for_each(|(s, demand)| s.publish(ms(*at), *demand));
    }
    shares.iter_mut().map(|(s, _)| s.window(WINDOW, Priority::Bulk)).collect()
}

#[test]
fn busy_engines_divide_the_window_by_weight() {
    let dir = TempFolder::new();
    let (mut a, mut b, mut c) = (dir.join(1), dir.join(1), dir.join(2));
    assert_eq!(a.window(WINDOW, Priority::Bulk), WINDOW);
    let at = &mut 0;
    assert_eq!(settle(at, &mut [(&mut a, BUSY), (&mut b, IDLE), (&mut c, IDLE)])[0], WINDOW);
    let parts = settle(at, &mut [(&mut a, BUSY), (&mut b, BUSY), (&mut c, BUSY)]);
    assert_eq!(parts, [2 * M, 2 * M, 4 * M]);
    assert_eq!((a.window(4 * M, Priority::Bulk), a.window(4 * M, Priority::Latency)), (M, 4 * M));
    // An engine without demand gives its share back; so does one that leaves.
    let parts = settle(at, &mut [(&mut a, BUSY), (&mut b, BUSY), (&mut c, IDLE)]);
    assert_eq!(parts[..2], [4 * M, 4 * M]);
    drop(b);
    assert_eq!(settle(at, &mut [(&mut a, BUSY), (&mut c, IDLE)])[0], WINDOW);
}

#[test]
fn each_device_has_a_table_of_its_own_whatever_its_name() {
    let dir = TempFolder::new();
    let names = ["mlx5_0", "mlx5_1", "../mlx5_0", "", ".", "a/b", "efa 0%"];
    let mut shares: Vec<_> = names.iter().map(|n| HostShare::join_in(&dir.0, n, 1)).collect();
    assert_eq!(fs::read_dir(&dir.0).unwrap().count(), names.len());
    let mut busy: Vec<_> = shares.iter_mut().map(|s| (s, BUSY)).collect();
    assert_eq!(settle(&mut 0, &mut busy), [WINDOW; 7]);
    drop(shares);
    assert_eq!(fs::read_dir(&dir.0).unwrap().count(), 0);
}

#[test]
fn small_demands_write_nothing_and_need_no_timer() {
    let dir = TempFolder::new();
    let mut a = dir.join(1);
    let before = fs::read(dir.table()).unwrap();
    for t in 0..100 {
        a.publish(ms(7 * t), bulk(MIN_WINDOW - 1));
        assert_eq!((a.next_timer(), a.window(WINDOW, Priority::Bulk)), (Time::NEVER, WINDOW));
    }
    assert_eq!(fs::read(dir.table()).unwrap(), before);
    // An engine with demand must write that it continues, and in the end that it is over.
    a.publish(ms(1000), BUSY);
    assert_ne!(fs::read(dir.table()).unwrap(), before);
    assert_eq!(a.next_timer(), ms(1000).after(HEARTBEAT_INTERVAL));
    a.publish(ms(1001), IDLE);
    assert_eq!(a.next_timer(), ms(1000).after(READ_INTERVAL));
    // The maximum since the last read counts.
    a.publish(ms(1010), IDLE);
    assert_eq!(a.next_timer(), ms(1020));
    a.publish(ms(1020), IDLE);
    assert_eq!(a.next_timer(), Time::NEVER);
}

#[test]
fn a_hung_engine_has_no_share_until_it_continues() {
    let dir = TempFolder::new();
    let (mut a, mut b) = (dir.join(1), dir.join(1));
    let at = &mut 0;
    settle(at, &mut [(&mut a, BUSY), (&mut b, BUSY)]);
    let hangs_at = *at;
    while *at < hangs_at + SILENCE_LIMIT.as_millis() as u64 - 40 {
        assert_eq!(settle(at, &mut [(&mut a, BUSY)]), [4 * M]);
    }
    *at += 40;
    assert_eq!(settle(at, &mut [(&mut a, BUSY)]), [WINDOW]);
    assert_eq!(settle(at, &mut [(&mut a, BUSY), (&mut b, BUSY)]), [4 * M, 4 * M]);
    // A constant demand counts while heartbeats are written.
    for _ in 0..100 {
        assert_eq!(settle(at, &mut [(&mut a, BUSY), (&mut b, BUSY)]), [4 * M, 4 * M]);
    }
}

#[test]
fn the_last_to_leave_removes_the_table() {
    let dir = TempFolder::new();
    let shares: Vec<_> = (0..5).map(|_| dir.join(1)).collect();
    let inode = fs::metadata(dir.table()).unwrap().ino();
    assert_eq!(fs::metadata(dir.table()).unwrap().mode() & 0o777, 0o600);
    for share in shares {
        assert_eq!(fs::metadata(dir.table()).unwrap().ino(), inode);
        drop(share);
    }
    assert!(!dir.table().exists());
}

#[test]
fn engines_that_leave_at_once_remove_the_table() {
    let dir = TempFolder::new();
    let start = std::sync::Barrier::new(4);
    for _ in 0..200 {
        std::thread::scope(|s| {
            for _ in 0..4 {
                let (dir, start) = (&dir, &start);
                s.spawn(move || {
                    let share = dir.join(1);
                    start.wait();
                    drop(share);
                });
            }
        });
        assert!(!dir.table().exists());
    }
}

#[test]
fn an_engine_without_a_free_slot_has_the_whole_window() {
    let dir = TempFolder::new();
    let mut shares: Vec<_> = (0..SLOTS).map(|_| dir.join(1)).collect();
    let mut late = dir.join(1);
    assert!(late.table.is_none() && late.warned);
    let mut busy: Vec<_> = shares.iter_mut().map(|s| (s, BUSY)).collect();
    assert_eq!(settle(&mut 0, &mut busy), [WINDOW / SLOTS as u64; SLOTS]);
    late.publish(ms(1), BUSY);
    assert_eq!(late.window(WINDOW, Priority::Bulk), WINDOW);
    drop(shares.swap_remove(9));
    late.publish(ms(2000), BUSY);
    assert_eq!(late.table.as_ref().unwrap().slot(), 9);
    assert!(late.window(WINDOW, Priority::Bulk) < WINDOW);
}

/// Damages the table of two engines: both continue, and share a table again.
fn survives(what: &str, harm: impl Fn(&Path)) {
    let dir = TempFolder::new();
    let (mut a, mut b) = (dir.join(1), dir.join(1));
    let at = &mut 0;
    settle(at, &mut [(&mut a, BUSY), (&mut b, BUSY)]);
    harm(&dir.table());
    for _ in 0..100 {
        for part in settle(at, &mut [(&mut a, BUSY), (&mut b, BUSY)]) {
            assert!(part == WINDOW || part == WINDOW / 2, "{what}: {part}");
        }
    }
    let parts = settle(at, &mut [(&mut a, BUSY), (&mut b, BUSY)]);
    assert_eq!(parts, [WINDOW / 2; 2], "{what}");
    let mut late = dir.join(1);
    let shares = &mut [(&mut a, BUSY), (&mut b, BUSY), (&mut late, BUSY)];
    assert_eq!(settle(at, shares), [WINDOW / 3; 3], "{what}");
    drop((a, b, late));
    assert!(!dir.table().exists(), "{what}");
}

#[test]
fn a_damaged_table_crashes_no_engine_and_is_replaced() {
    survives("nothing", |_| {});
    survives("removed", |t| fs::remove_file(t).unwrap());
    for size in [0, 1, 64, 100, 4096, 1 << 20] {
        survives(&format!("cut to {size}"), |t| {
            fs::OpenOptions::new().write(true).open(t).unwrap().set_len(size).unwrap();
        });
    }
    survives("garbage", |t| fs::write(t, [0xa5; 9000]).unwrap());
    survives("garbage after the header", |t| {
        let mut bytes = fs::read(t).unwrap();
        bytes[64..].fill(0xff);
        fs::write(t, bytes).unwrap();
    });
    survives("another version", |t| {
        let mut bytes = fs::read(t).unwrap();
        bytes[8] = 99;
        fs::write(t, bytes).unwrap();
    });
    survives("invalid numbers", |t| {
        let sharer = NicSharer { weight: u32::MAX, demand: bulk(u64::MAX) };
        let mut bytes = fs::read(t).unwrap();
        for slot in bytes[64 * 5..].chunks_exact_mut(64) {
            slot.copy_from_slice(&Record { id: 1, beat: 1, sharer }.encode());
        }
        fs::write(t, bytes).unwrap();
    });
}

#[test]
fn a_leftover_file_is_replaced() {
    for left in [vec![], vec![7; 10], vec![0; 8192], vec![0xff; 10_000]] {
        let dir = TempFolder::new();
        fs::write(dir.table(), left).unwrap();
        fs::set_permissions(dir.table(), fs::Permissions::from_mode(0o600)).unwrap();
        let (mut a, mut b) = (dir.join(1), dir.join(1));
        assert_eq!(settle(&mut 0, &mut [(&mut a, BUSY), (&mut b, BUSY)]), [WINDOW / 2; 2]);
    }
}

#[test]
fn a_table_of_another_version_in_use_is_not_replaced() {
    let dir = TempFolder::new();
    let theirs = dir.join(1);
    let mut bytes = fs::read(dir.table()).unwrap();
    bytes[8] += 1;
    fs::write(dir.table(), &bytes).unwrap();
    let mut late = dir.join(1);
    assert!(late.table.is_none() && late.warned);
    assert_eq!(settle(&mut 0, &mut [(&mut late, BUSY)]), [WINDOW]);
    assert_eq!(fs::read(dir.table()).unwrap(), bytes);
    drop(theirs);
    assert_eq!(settle(&mut 2000, &mut [(&mut late, BUSY)]), [WINDOW]);
    assert!(late.table.is_some());
}

#[test]
fn a_file_that_others_can_access_is_not_touched() {
    let others_may_read = |t: &Path| {
        fs::write(t, b"theirs").unwrap();
        fs::set_permissions(t, fs::Permissions::from_mode(0o644)).unwrap();
    };
    let link = |t: &Path| {
        let target = t.with_extension("target");
        fs::write(&target, b"").unwrap();
        fs::set_permissions(&target, fs::Permissions::from_mode(0o600)).unwrap();
        symlink(target, t).unwrap();
    };
    let folder = |t: &Path| fs::create_dir(t).unwrap();
    let pipe = |t: &Path| {
        use rustix::fs::{mknodat, FileType, Mode, CWD};
        mknodat(CWD, t, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    };
    type Damage<'a> = (&'a str, &'a dyn Fn(&Path));
    let damages: [Damage<'_>; 4] = [
        ("others may read it", &others_may_read),
        ("a symbolic link", &link),
        ("a folder", &folder),
        ("a pipe", &pipe),
    ];
    for (what, make) in damages {
        let dir = TempFolder::new();
        make(&dir.table());
        let mut a = dir.join(1);
        assert_eq!(settle(&mut 0, &mut [(&mut a, BUSY)]), [WINDOW], "{what}");
        assert!(a.table.is_none() && a.warned, "{what}");
        drop(a);
        assert!(fs::symlink_metadata(dir.table()).is_ok(), "{what}");
        let kept = fs::read(dir.table().with_extension("target"));
        assert!(kept.is_err() || kept.unwrap().is_empty(), "{what}");
    }
}

#[test]
fn a_forked_child_neither_writes_nor_keeps_a_slot() {
    let dir = TempFolder::new();
    let mut a = dir.join(1);
    a.publish(ms(0), BUSY);
    let slot = a.table.as_ref().unwrap().slot();
    let before = fs::read(dir.table()).unwrap();
    // SAFETY: the child calls nothing that takes a lock of another thread, and ends by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let table = a.table.as_ref().unwrap();
        let gone = !table.is_ours() && !table.is_named() && a.exchange(ms(900), BUSY).is_err();
        // A descriptor that reuses the parent's number stays open when the copy is dropped.
        let other = rustix::fs::open("/dev/null", OFlags::RDONLY, rustix::fs::Mode::empty());
        a.table = None;
        let open = other.is_ok_and(|fd| rustix::fs::fstat(fd.as_fd()).is_ok());
        // SAFETY: ends the child, without the harness of the tests.
        unsafe { libc::_exit(if gone && open { 0 } else { 1 }) };
    }
    let mut status = 0;
    // SAFETY: waits for the child made above.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(status, 0);
    assert_eq!(fs::read(dir.table()).unwrap(), before);
    let b = dir.join(1);
    assert!(b.table.as_ref().unwrap().is_held(slot), "the parent still has its slot");
}
