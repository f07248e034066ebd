//! Both backends, on real files.

use std::{fs, os::fd::AsRawFd, path::PathBuf, sync::Arc, time::Duration};

use super::{queue::FileBackend, FileMemory, FileOptions, FileQueue, FileWork};
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

/// Two engines may make one file at a time, each up to the end of its own part.
#[test]
fn a_file_that_another_process_has_lengthened_meanwhile_is_not_cut_off() {
    let path = temporary("lengthen");
    let file = fs::File::create(&path).unwrap();
    for (end, len) in [(8192, 8192), (4096, 8192), (8193, 8193)] {
        super::lengthen(&file, end).unwrap();
        assert_eq!(file.metadata().unwrap().len(), len);
    }
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
