//! Files as regions: spilled to and fetched from with the same requests as memory, by their own
//! engine and by peers, and with the same promises where a disk is full or a file is cut short.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use fabric_engine::{
    api::{PageIndices, Pages, TransportKind},
    EngineError, FileOptions, Handle, Local, Op, Region, Remote, RemoteRegion, Submit,
    TransferEngine,
};

use super::{engine, TestFolder, TIMEOUT};

/// Two engines over each transport, and one alone.
fn everywhere(test: impl Fn(&Arc<TransferEngine>, &Arc<TransferEngine>)) {
    for transport in [TransportKind::Shm, TransportKind::Tcp] {
        test(&engine(transport), &engine(transport));
    }
    let alone = engine(TransportKind::File);
    test(&alone, &alone);
}

impl TestFolder {
    fn file(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.0.join(name);
        fs::write(&path, bytes).unwrap();
        path
    }
}

fn random(n: usize, seed: u64) -> Vec<u8> {
    let mut rng = fastrand::Rng::with_seed(seed);
    (0..n).map(|_| rng.u8(..)).collect()
}

fn memory(engine: &TransferEngine, bytes: &[u8]) -> Region {
    let region = engine.alloc(bytes.len() as u64).unwrap();
    region.put(0, bytes).unwrap();
    region
}

fn region_of(engine: &TransferEngine, path: &Path) -> Region {
    engine.register_file(path, FileOptions::default()).unwrap()
}

fn done(handle: Handle) -> Result<(), EngineError> {
    handle.wait(TIMEOUT).expect("it ends")
}

fn write(
    engine: &TransferEngine,
    (src, from): (&Region, u64),
    (dst, to): (&RemoteRegion, u64),
    len: u64,
    imm: Option<fabric_engine::api::Imm>,
) -> Handle {
    let (src, dst) = (Local { region: src, offset: from }, Remote { region: dst, offset: to });
    engine.submit(&[Op::Write { src, dst, len, imm }], Submit::default()).unwrap()
}

fn read(
    engine: &TransferEngine,
    (src, from): (&RemoteRegion, u64),
    (dst, to): (&Region, u64),
    len: u64,
) -> Handle {
    let (src, dst) = (Remote { region: src, offset: from }, Local { region: dst, offset: to });
    engine.submit(&[Op::Read { src, dst, len }], Submit::default()).unwrap()
}

#[test]
fn bytes_go_between_files_and_memory_in_every_direction_and_count() {
    const N: usize = (5 << 20) + 777;
    everywhere(|a, b| {
        let folder = TestFolder::new();
        let bytes = random(N, 1);
        let zeroes = vec![0; N + 4096];
        let here_file = folder.file("here", &bytes);
        let there_file = folder.file("there", &zeroes);
        let (here, there) = (region_of(a, &here_file), region_of(b, &there_file));
        let (here_memory, there_memory) = (memory(a, &bytes), memory(b, &zeroes));
        let counter = b.counter().unwrap();
        let peer = b.peer(a.address()).unwrap();
        let mut expected = 0;
        let n = N as u64 - 5;

        for src in [&here, &here_memory] {
            for dst in [&there, &there_memory] {
                match dst.location().file() {
                    Some(_) => fs::write(&there_file, &zeroes).unwrap(),
                    None => there_memory.put(0, &zeroes).unwrap(),
                }
                let remote = a.import(&dst.descriptor()).unwrap();
                let arrived = counter.expect(1, std::slice::from_ref(&peer), TIMEOUT).unwrap();
                let handle = write(a, (src, 3), (&remote, 1001), n, Some(counter.imm()));
                done(arrived).unwrap();
                // IC-2: by the count the bytes are readable.
                let got = match dst.location().file() {
                    Some(_) => fs::read(&there_file).unwrap(),
                    None => there_memory.get(0, zeroes.len() as u64).unwrap(),
                };
                assert!(got[..1001].iter().all(|b| *b == 0), "{src:?} to {dst:?}");
                assert!(
                    got[1001..][..n as usize] == bytes[3..][..n as usize],
                    "{src:?} to {dst:?}"
                );
                assert!(got[1001 + n as usize..].iter().all(|b| *b == 0), "{src:?} to {dst:?}");
                done(handle).unwrap();
                expected += 1;
                assert_eq!(counter.arrived(), expected, "IC-1");
            }
        }

        let back_file = folder.file("back", &vec![0; N]);
        let (back, back_memory) = (region_of(a, &back_file), memory(a, &vec![0; N]));
        for src in [&there, &there_memory] {
            let remote = a.import(&src.descriptor()).unwrap();
            for dst in [&back, &back_memory] {
                fs::write(&back_file, vec![0; N]).unwrap();
                back_memory.put(0, &vec![0; N]).unwrap();
                done(read(a, (&remote, 1001), (dst, 5), n)).unwrap();
                let got = match dst.location().file() {
                    Some(_) => fs::read(&back_file).unwrap(),
                    None => back_memory.get(0, N as u64).unwrap(),
                };
                assert!(got[5..] == bytes[3..][..n as usize], "{src:?} to {dst:?}");
                assert!(got[..5] == [0; 5]);
            }
        }
        there.sync().unwrap();
        let said = a.explain(&a.peer(b.address()).unwrap()).unwrap();
        let chosen = said.verdicts.iter().find(|v| v.chosen).unwrap();
        assert!(chosen.reason.contains("file"), "{}", chosen.reason);
    });
}

#[test]
fn ic_1_random_pages_are_spilled_and_fetched_and_count_one_each() {
    everywhere(|a, b| {
        let folder = TestFolder::new();
        let mut rng = fastrand::Rng::with_seed(7);
        for (page, pages) in [(1u64, 40u32), (97, 1200), (4096, 700), ((1 << 20) + 5, 5)] {
            let bytes = random((page * u64::from(pages)) as usize, page);
            let path = folder.file("pages", &vec![0; bytes.len() + 64]);
            let file = region_of(b, &path);
            let src = memory(a, &bytes);
            let remote = a.import(&file.descriptor()).unwrap();
            let mut order: Vec<u32> = (0..pages).collect();
            rng.shuffle(&mut order);
            let theirs = Pages::new(PageIndices::list(order.clone()).unwrap(), page, 64);
            let ours = Pages::new(PageIndices::range(0, pages).unwrap(), page, 0);
            let counter = b.counter().unwrap();
            let op = Op::WritePages {
                page_len: page,
                src: &src,
                src_pages: &ours,
                dst: &remote,
                dst_pages: &theirs,
                imm: Some(counter.imm()),
            };
            let all = counter.expect(pages, &[], TIMEOUT).unwrap();
            done(a.submit(&[op], Submit::default()).unwrap()).unwrap();
            done(all).unwrap();
            assert_eq!(counter.arrived(), u64::from(pages));
            let there = fs::read(&path).unwrap();
            for (i, at) in order.iter().enumerate() {
                let (i, at, n) = (i * page as usize, *at as usize * page as usize, page as usize);
                assert!(there[64 + at..][..n] == bytes[i..][..n], "page of {page} bytes");
            }
            let back = memory(a, &vec![0; bytes.len()]);
            let op = Op::ReadPages {
                page_len: page,
                src: &remote,
                src_pages: &theirs,
                dst: &back,
                dst_pages: &ours,
            };
            done(a.submit(&[op], Submit::default()).unwrap()).unwrap();
            assert!(back.get(0, bytes.len() as u64).unwrap() == bytes);
        }
    });
}

#[test]
fn overlapping_requests_leave_bytes_of_one_or_the_other() {
    everywhere(|a, b| {
        let folder = TestFolder::new();
        let path = folder.file("overlap", &vec![0; 4 << 20]);
        let file = region_of(b, &path);
        let remote = a.import(&file.descriptor()).unwrap();
        let sources: Vec<_> = (1..=8u8).map(|i| memory(a, &vec![i; 2 << 20])).collect();
        let counter = b.counter().unwrap();
        let handles: Vec<_> = sources
            .iter()
            .zip(0u64..)
            .map(|(src, i)| {
                write(a, (src, 0), (&remote, i * 300_001), 1_900_001, Some(counter.imm()))
            })
            .collect();
        handles.into_iter().for_each(|h| done(h).unwrap());
        assert_eq!(done(counter.expect(8, &[], TIMEOUT).unwrap()), Ok(()));
        for (at, byte) in fs::read(&path).unwrap().into_iter().enumerate() {
            let covers = |i: u8| {
                let from = usize::from(i - 1) * 300_001;
                (from..from + 1_900_001).contains(&at)
            };
            match byte {
                0 => assert!(!(1..=8).any(covers), "offset {at} was never written"),
                i => assert!(covers(i), "offset {at} holds a byte of write {i}"),
            }
        }
    });
}

/// A file system of so many bytes; `None` where this process may not mount.
struct Tiny(TestFolder);

impl Tiny {
    fn new(bytes: usize) -> Option<Self> {
        let folder = TestFolder::new();
        let target = std::ffi::CString::new(folder.0.to_str().unwrap()).unwrap();
        let options = std::ffi::CString::new(format!("size={bytes}")).unwrap();
        let tmpfs = c"tmpfs".as_ptr();
        // SAFETY: strings that outlive the call.
        let rc = unsafe { libc::mount(tmpfs, target.as_ptr(), tmpfs, 0, options.as_ptr().cast()) };
        (rc == 0).then_some(Self(folder))
    }
}

impl Drop for Tiny {
    fn drop(&mut self) {
        let target = std::ffi::CString::new(self.0 .0.to_str().unwrap()).unwrap();
        // SAFETY: a string that outlives the call.
        unsafe { libc::umount2(target.as_ptr(), libc::MNT_DETACH) };
    }
}

#[test]
fn rs_1_a_full_disk_fails_the_transfer_names_the_file_and_counts_nothing() {
    everywhere(|a, b| {
        let Some(disk) = Tiny::new(2 << 20) else {
            eprintln!("not allowed to mount a small file system: left out");
            return;
        };
        let path = disk.0 .0.join("model.ckpt");
        let options = FileOptions { len: Some(64 << 20), create: true, ..Default::default() };
        let file = b.register_file(&path, options).unwrap();
        let remote = a.import(&file.descriptor()).unwrap();
        let src = memory(a, &random(16 << 20, 3));
        let counter = b.counter().unwrap();
        // Many chunks, many once more, and one.
        for (at, len) in [(0, 16 << 20), (0, 16 << 20), (40 << 20, 1 << 16)] {
            let e = done(write(a, (&src, 0), (&remote, at), len, Some(counter.imm()))).unwrap_err();
            let said = e.to_string();
            assert!(matches!(e, EngineError::Storage { .. }), "{said}");
            assert!(said.contains("model.ckpt") && said.contains("No space left"), "{said}");
        }
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(counter.poll().unwrap(), 0, "IC-2");
        // Once there is room the same region works.
        fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(0).unwrap();
        done(write(a, (&src, 0), (&remote, 0), 1 << 20, Some(counter.imm()))).unwrap();
        done(counter.expect(1, &[], TIMEOUT).unwrap()).unwrap();
        assert_eq!(counter.arrived(), 1);
        drop((file, remote));
    });
}

#[test]
fn rs_1_a_file_that_was_cut_short_fails_reads_and_names_itself() {
    everywhere(|a, b| {
        let folder = TestFolder::new();
        let path = folder.file("pages.bin", &random(4 << 20, 5));
        let file = region_of(b, &path);
        let remote = a.import(&file.descriptor()).unwrap();
        let dst = memory(a, &vec![0; 4 << 20]);
        fs::OpenOptions::new().write(true).open(&path).unwrap().set_len((1 << 20) + 100).unwrap();
        let e = done(read(a, (&remote, 0), (&dst, 0), 4 << 20)).unwrap_err();
        let said = e.to_string();
        assert!(matches!(e, EngineError::Storage { .. }), "{said}");
        assert!(said.contains("pages.bin") && said.contains("cut short"), "{said}");
        // What is still there is still read.
        done(read(a, (&remote, 0), (&dst, 0), 1 << 20)).unwrap();

        // The same where the file is at the writer's end: nothing is counted.
        let short = region_of(a, &folder.file("short.bin", &random(3 << 20, 6)));
        let target = memory(b, &vec![0; 3 << 20]);
        let remote = a.import(&target.descriptor()).unwrap();
        let counter = b.counter().unwrap();
        fs::write(folder.0.join("short.bin"), b"x").unwrap();
        let e = done(write(a, (&short, 0), (&remote, 0), 3 << 20, Some(counter.imm())));
        let said = e.unwrap_err().to_string();
        assert!(said.contains("short.bin"), "{said}");
        assert_eq!(counter.arrived(), 0);
    });
}

#[test]
fn a_file_for_reading_is_not_written_to() {
    everywhere(|a, b| {
        let folder = TestFolder::new();
        let path = folder.file("frozen", &random(8192, 9));
        let options = FileOptions { writable: false, ..Default::default() };
        let file = b.register_file(&path, options).unwrap();
        let remote = a.import(&file.descriptor()).unwrap();
        let src = memory(a, &[1; 4096]);
        let e = done(write(a, (&src, 0), (&remote, 0), 4096, None)).unwrap_err();
        assert!(e.to_string().contains("for reading only"), "{e}");
        done(read(a, (&remote, 0), (&src, 0), 4096)).unwrap();
        assert!(src.get(0, 4096).unwrap() == fs::read(&path).unwrap()[..4096]);
    });
}

#[test]
fn mr_2_a_deregistered_file_is_stale_and_closed() {
    everywhere(|a, b| {
        let folder = TestFolder::new();
        let path = folder.file("gone", &random(4096, 9));
        let file = region_of(b, &path);
        let remote = a.import(&file.descriptor()).unwrap();
        let src = memory(a, &[1; 4096]);
        done(write(a, (&src, 0), (&remote, 0), 4096, None)).unwrap();
        file.deregister(TIMEOUT).unwrap();
        let e = done(write(a, (&src, 0), (&remote, 0), 4096, None)).unwrap_err();
        assert!(matches!(e, EngineError::Stale { .. }), "{e}");
    });
}

#[test]
fn mr_3_a_part_of_a_file_keeps_its_bounds() {
    let engine = engine(TransportKind::File);
    let folder = TestFolder::new();
    let path = folder.file("part", &random(10_000, 4));
    let options = FileOptions { offset: 1000, len: Some(2000), ..Default::default() };
    let file = engine.register_file(&path, options).unwrap();
    let remote = engine.import(&file.descriptor()).unwrap();
    let dst = memory(&engine, &[0; 4000]);
    done(read(&engine, (&remote, 7), (&dst, 0), 1993)).unwrap();
    assert!(dst.get(0, 1993).unwrap() == fs::read(&path).unwrap()[1007..3000]);
    let (src, to) = (Remote { region: &remote, offset: 8 }, Local { region: &dst, offset: 0 });
    let op = Op::Read { src, dst: to, len: 1993 };
    let e = engine.submit(&[op], Submit::default()).unwrap_err();
    assert!(matches!(e, EngineError::OutOfBounds { .. }), "{e}");
    // A descriptor that was tampered with is held to the registration by its owner.
    let forged = fabric_engine::api::RegionDescriptor { len: 1 << 40, ..file.descriptor() };
    let remote = engine.import(&forged).unwrap();
    let e = done(read(&engine, (&remote, 1500), (&dst, 0), 1993)).unwrap_err();
    assert!(matches!(e, EngineError::Refused { .. }), "{e}");
}

#[test]
fn mr_3_a_forged_descriptor_reaches_no_further_than_its_part_of_a_file() {
    everywhere(|a, b| {
        let folder = TestFolder::new();
        let bytes = random(10_000, 4);
        let path = folder.file("part", &bytes);
        let options = FileOptions { offset: 1000, len: Some(2000), ..Default::default() };
        let file = b.register_file(&path, options).unwrap();
        let forged = fabric_engine::api::RegionDescriptor { len: 1 << 20, ..file.descriptor() };
        let remote = a.import(&forged).unwrap();
        let (src, counter) = (memory(a, &[1; 4000]), b.counter().unwrap());
        for (at, len) in [(1999, 2), (2000, 1), (0, 2001), (1 << 19, 64)] {
            let e = done(write(a, (&src, 0), (&remote, at), len, Some(counter.imm()))).unwrap_err();
            assert!(matches!(e, EngineError::Refused { .. }), "{e}");
            let e = done(read(a, (&remote, at), (&src, 0), len)).unwrap_err();
            assert!(matches!(e, EngineError::Refused { .. }), "{e}");
        }
        assert_eq!(counter.poll().unwrap(), 0);
        assert!(fs::read(&path).unwrap() == bytes);
    });
}

#[test]
fn rs_4_a_peer_that_dies_ends_what_goes_to_its_files() {
    for transport in [TransportKind::Shm, TransportKind::Tcp] {
        let (a, b) = (engine(transport), engine(transport));
        let folder = TestFolder::new();
        let file = region_of(&b, &folder.file("there", &vec![0; 32 << 20]));
        let here = region_of(&a, &folder.file("here", &random(32 << 20, 2)));
        let remote = a.import(&file.descriptor()).unwrap();
        let handles: Vec<_> =
            (0..6).map(|_| write(&a, (&here, 0), (&remote, 0), 32 << 20, None)).collect();
        b.close();
        for handle in handles {
            let end = done(handle);
            assert!(
                matches!(
                    end,
                    Ok(()) | Err(EngineError::PeerLost { .. } | EngineError::Unreachable { .. })
                ),
                "{end:?}"
            );
        }
        here.deregister(TIMEOUT).unwrap();
    }
}

#[test]
fn mr_1_nothing_is_read_or_written_after_close() {
    let folder = TestFolder::new();
    let bytes = random(64 << 20, 8);
    for round in 0..20 {
        let a = engine(TransportKind::File);
        let path = folder.file("there", &[]);
        let options = FileOptions { len: Some(64 << 20), create: true, ..Default::default() };
        let file = a.register_file(&path, options).unwrap();
        let remote = a.import(&file.descriptor()).unwrap();
        let src = memory(&a, &bytes);
        let handle = write(&a, (&src, 0), (&remote, 0), 64 << 20, None);
        std::thread::sleep(Duration::from_micros(200 * (round % 5)));
        a.close();
        // Whatever is still written makes it longer again.
        fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(0).unwrap();
        assert!(handle.poll().is_some());
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(fs::metadata(&path).unwrap().len(), 0, "round {round}");
    }
}

#[test]
fn an_engine_is_its_own_peer() {
    for transport in [TransportKind::Shm, TransportKind::Tcp, TransportKind::File] {
        let engine = engine(transport);
        let own = engine.peer(engine.address()).unwrap();
        let (src, dst) = (memory(&engine, &random(3 << 20, 1)), memory(&engine, &[0; 3 << 20]));
        let remote = engine.import(&dst.descriptor()).unwrap();
        let counter = engine.counter().unwrap();
        let all = counter.expect(2, std::slice::from_ref(&own), TIMEOUT).unwrap();
        done(write(&engine, (&src, 0), (&remote, 0), 3 << 20, Some(counter.imm()))).unwrap();
        let group = engine.peer_group(std::slice::from_ref(&own)).unwrap();
        let barrier = Op::Barrier { group: &group, imm: counter.imm() };
        done(engine.submit(&[barrier], Submit::default()).unwrap()).unwrap();
        done(all).unwrap();
        assert!(dst.get(0, 3 << 20).unwrap() == src.get(0, 3 << 20).unwrap());
        assert_eq!(engine.transport(&own), Some(TransportKind::File));

        let (tell, told) = std::sync::mpsc::channel();
        let on_message = move |m: fabric_engine::Delivery| tell.send(m.message().to_vec()).unwrap();
        engine.receive(64, 2, on_message).unwrap();
        let send = Op::Send { peer: &own, message: b"to myself" };
        done(engine.submit(&[send], Submit::default()).unwrap()).unwrap();
        assert_eq!(told.recv_timeout(TIMEOUT).unwrap(), b"to myself");
    }
}

#[test]
fn what_is_no_file_is_refused_with_words() {
    let engine = engine(TransportKind::File);
    let folder = TestFolder::new();
    let empty = folder.file("empty", b"");
    let refused = |path: &Path, options: FileOptions, words: &str| {
        let e = engine.register_file(path, options).unwrap_err().to_string();
        assert!(e.contains(words) && e.contains(path.to_str().unwrap()), "{e}");
    };
    let plain = FileOptions::default();
    let none = folder.0.join("none");
    refused(&none, plain, "must exist");
    refused(&none, FileOptions { create: true, ..plain }, "name nbytes");
    refused(&none, FileOptions { create: true, len: Some(0), ..plain }, "zero bytes");
    assert!(!none.exists(), "what is refused makes no file");
    refused(&folder.0, FileOptions { writable: false, ..plain }, "neither a file nor a disk");
    refused(Path::new("/dev/full"), plain, "neither a file nor a disk");
    refused(&empty, plain, "zero bytes");
    refused(&empty, FileOptions { len: Some(5), ..plain }, "with create it is lengthened");
    refused(&empty, FileOptions { len: Some(u64::MAX), offset: 1, ..plain }, "largest file");
    refused(&empty, FileOptions { create: true, writable: false, ..plain }, "must be writable");
    let some = folder.file("some", b"bytes");
    refused(&some, FileOptions { create: true, offset: 4096, ..plain }, "name nbytes");
    assert_eq!(fs::read(&some).unwrap(), b"bytes", "what is refused changes no file");
    let file = region_of(&engine, &some);
    assert!(file.get(0, 5).unwrap_err().to_string().contains("no address"));
    assert!(file.put(0, b"x").is_err());
}
