//! Both backends, on real files.

use std::{fs, os::fd::AsRawFd, path::PathBuf, sync::Arc, time::Duration};

use super::{lengthen::lengthen, queue::FileBackend, FileMemory, FileOptions, FileQueue, FileWork};
use crate::{error::DomainError, memory::device::CopyRange, wake::Waker};

const BOTH: [FileBackend; 2] = [FileBackend::Best, FileBackend::Threads];

fn temporary(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("fabric-file-{}-{name}", std::process::id()))
}

fn open(path: &std::path::Path, len: u64) -> Arc<FileMemory> {
    let options = FileOptions { len: Some(len), create: true, ..Default::default() };
    Arc::new(FileMemory::open(path, options).unwrap().0)
}

fn end(work: &FileWork) -> Result<(), DomainError> {
    let start = std::time::Instant::now();
    while !work.is_over() {
        assert!(start.elapsed() < Duration::from_secs(20), "it does not end");
        std::thread::sleep(Duration::from_micros(100));
    }
    work.result().unwrap()
}

#[test]
fn scattered_ranges_are_written_and_read_back() {
    for backend in BOTH {
        let path = temporary(&format!("{backend:?}"));
        let queue = FileQueue::new(&Waker::default(), backend);
        let mut rng = fastrand::Rng::with_seed(3);
        let bytes: Vec<u8> = (0..2_000_000).map(|_| rng.u8(..)).collect();
        let file = open(&path, bytes.len() as u64);
        let mut read = vec![0u8; bytes.len()];
        for inward in [true, false] {
            let memory = if inward { bytes.as_ptr() as usize } else { read.as_mut_ptr() as usize };
            let mut works = Vec::new();
            for chunk in 0..200 {
                let pieces: Vec<_> = (0..100)
                    .map(|i| {
                        let at = (chunk * 100 + i) * 100;
                        let (to, from) = if inward { (at, memory + at) } else { (memory + at, at) };
                        CopyRange { to, from, len: 100 }
                    })
                    .collect();
                // SAFETY: both buffers outlive the works, which are waited for.
                works.push(unsafe { queue.start(&file, inward, &pieces) }.unwrap());
            }
            works.iter().for_each(|w| end(w).unwrap());
        }
        assert!(fs::read(&path).unwrap() == bytes && read == bytes, "{backend:?}");
        if backend == FileBackend::Threads {
            assert_eq!(queue.backend_name(), Some("threads"));
        }
        fs::remove_file(&path).unwrap();
    }
}

/// Runs a test on a thread whose calls of `fallocate` the kernel fails with this error.
fn without_fallocate(errno: i32, test: impl FnOnce() + Send) {
    let step = |code: u32, k, (jt, jf)| libc::sock_filter { code: code as u16, jt, jf, k };
    let mut steps = [
        // The number of the system call.
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, (0, 0)),
        step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, libc::SYS_fallocate as u32, (0, 1)),
        step(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ERRNO | errno as u32, (0, 0)),
        step(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW, (0, 0)),
    ];
    let run = || {
        let filter = libc::sock_fprog { len: steps.len() as u16, filter: steps.as_mut_ptr() };
        // SAFETY: the filter outlives the calls and ends with this thread.
        let set = unsafe {
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
                && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &filter) == 0
        };
        assert!(set, "seccomp: {}", std::io::Error::last_os_error());
        test();
    };
    std::thread::scope(|threads| threads.spawn(run).join()).unwrap();
}

/// Two engines may make one file at a time, each up to the end of its own part.
#[test]
fn a_file_that_another_process_has_lengthened_meanwhile_is_not_cut_off() {
    let path = temporary("lengthen");
    let file = fs::File::create(&path).unwrap();
    let lengthen = |steps: [(u64, u64); 3]| {
        for (end, len) in steps {
            assert!(lengthen(&file, &path, false, end).unwrap());
            assert_eq!(file.metadata().unwrap().len(), len);
        }
    };
    lengthen([(8192, 8192), (4096, 8192), (8193, 8193)]);
    for errno in [libc::EOPNOTSUPP, libc::ENOSYS] {
        file.set_len(0).unwrap();
        without_fallocate(errno, || lengthen([(8192, 8192), (4096, 8192), (8193, 8193)]));
    }
    fs::remove_file(&path).unwrap();
}

#[test]
fn without_fallocate_a_file_is_lengthened_only_under_its_lock() {
    let path = temporary("lock");
    fs::write(&path, b"bytes").unwrap();
    let other = fs::File::open(&path).unwrap();
    let operation = rustix::fs::FlockOperation::NonBlockingLockExclusive;
    rustix::fs::flock(&other, operation).unwrap();
    without_fallocate(libc::EOPNOTSUPP, || {
        let options = FileOptions { len: Some(4096), create: true, ..Default::default() };
        let e = FileMemory::open(&path, options).unwrap_err().to_string();
        assert!(e.contains("flock"), "{e}");
        assert_eq!(fs::read(&path).unwrap(), b"bytes");
        drop(other);
        let file = FileMemory::open(&path, options).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().len(), 4096);
        rustix::fs::flock(fs::File::open(&path).unwrap(), operation).unwrap();
        drop(file);
    });
    fs::remove_file(&path).unwrap();
}

#[test]
fn a_file_that_could_not_be_created_at_its_length_leaves_nothing() {
    let path = temporary("no-room");
    let options = FileOptions { len: Some(4096), create: true, ..Default::default() };
    let refused = || {
        let e = FileMemory::open(&path, options).unwrap_err().to_string();
        assert!(e.contains("fallocate") && e.contains("No space left"), "{e}");
    };
    without_fallocate(libc::ENOSPC, || {
        refused();
        assert!(!path.exists());
        // A file that was there stays, whether it is empty or not.
        for bytes in [&b""[..], b"bytes"] {
            fs::write(&path, bytes).unwrap();
            refused();
            assert_eq!(fs::read(&path).unwrap(), bytes);
        }
    });
    fs::remove_file(&path).unwrap();
}

#[test]
fn rs_1_a_file_that_its_creator_has_removed_is_opened_again() {
    let path = temporary("removed");
    let file = fs::File::create(&path).unwrap();
    fs::remove_file(&path).unwrap();
    assert!(!lengthen(&file, &path, false, 4096).unwrap());
    let new = open(&path, 4096);
    assert!(!lengthen(&file, &path, false, 4096).unwrap(), "another file has its path");
    assert_eq!(new.file.metadata().unwrap().len(), 4096);
    fs::remove_file(&path).unwrap();
}

#[test]
fn rs_1_a_file_that_may_not_grow_and_one_cut_short_are_errors_of_their_work_alone() {
    for backend in BOTH {
        let queue = FileQueue::new(&Waker::default(), backend);
        let memory =
            rustix::fs::memfd_create(c"sealed", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
        let path = PathBuf::from(format!("/proc/self/fd/{}", memory.as_raw_fd()));
        let file = open(&path, 4096);
        rustix::fs::fcntl_add_seals(&memory, rustix::fs::SealFlags::GROW).unwrap();
        let mut buffer = vec![7u8; 16384];
        let addr = buffer.as_mut_ptr() as usize;
        // SAFETY: the buffer outlives all of it.
        let start = |inward, piece| unsafe { queue.start(&file, inward, &[piece]) }.unwrap();
        let beyond = start(true, CopyRange { to: 2048, from: addr, len: 8192 });
        let inside = start(true, CopyRange { to: 0, from: addr, len: 4096 });
        let e = end(&beyond).unwrap_err();
        assert!(matches!(&e, DomainError::Storage(s) if s.contains("/proc/self/fd")), "{e}");
        end(&inside).unwrap();
        let past = start(false, CopyRange { to: addr, from: 4000, len: 97 });
        let e = end(&past).unwrap_err().to_string();
        assert!(e.contains("cut short"), "{e}");
        end(&start(false, CopyRange { to: addr, from: 4000, len: 96 })).unwrap();
    }
}

#[test]
fn mr_1_once_closed_nothing_is_begun_and_all_that_was_is_over() {
    for backend in BOTH {
        let path = temporary(&format!("close-{backend:?}"));
        let file = open(&path, 64 << 20);
        let bytes = vec![1u8; 1 << 20];
        for _ in 0..20 {
            let queue = FileQueue::new(&Waker::default(), backend);
            let piece =
                |i: usize| CopyRange { to: i << 20, from: bytes.as_ptr() as usize, len: 1 << 20 };
            let start = |i| {
                // SAFETY: the bytes outlive the queue.
                unsafe { queue.start(&file, true, &[piece(i)]) }
            };
            let works: Vec<_> = (0..64).map(|i| start(i).unwrap()).collect();
            queue.close();
            assert!(works.iter().all(|w| w.is_over()), "{backend:?}");
            assert!(start(0).is_err());
        }
        fs::remove_file(&path).unwrap();
    }
}
