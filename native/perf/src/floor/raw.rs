//! Everything `unsafe` of the floors: mapped memory, copy routines, and three system calls.

use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::ptr;
use std::sync::atomic::AtomicU32;

use clap::ValueEnum;
use serde::Deserialize;

use super::TextResult;

/// Populated memory: of a memfd, as two processes would map it, or private to this one.
#[derive(Debug)]
pub struct Mapping {
    start: *mut u8,
    len: usize,
}

// SAFETY: the mapping is owned memory; access goes through borrowed slices like that of a Vec.
unsafe impl Send for Mapping {}
// SAFETY: as above; `&Mapping` only gives out shared slices.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Zeroed memory that no other process could map, of huge pages where they are to be had: numpy
    /// and torch ask for them too, and so does the harness for all others.
    pub fn private(len: usize) -> TextResult<Self> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a fresh anonymous mapping at an address of the kernel's choice; the result is
        // checked by `owned`.
        let start = unsafe { libc::mmap(ptr::null_mut(), len, protection, flags, -1, 0) };
        Self::populated(start, len)
    }

    pub fn shared(len: usize) -> TextResult<Self> {
        // SAFETY: the name is a NUL-terminated literal; the result is checked.
        let fd = unsafe { libc::memfd_create(c"fabric-perf".as_ptr(), libc::MFD_CLOEXEC) };
        if fd < 0 {
            return Err(last("memfd_create"));
        }
        // SAFETY: `fd` is a fresh memfd that no other code has; ftruncate and mmap get its real
        // length, results are checked, and the descriptor is closed exactly once. The mapping
        // stays valid without it.
        let start = unsafe {
            let sized = libc::ftruncate(fd, len as libc::off_t) == 0;
            let protection = libc::PROT_READ | libc::PROT_WRITE;
            let flags = libc::MAP_SHARED;
            let start = if sized {
                libc::mmap(ptr::null_mut(), len, protection, flags, fd, 0)
            } else {
                libc::MAP_FAILED
            };
            libc::close(fd);
            start
        };
        Self::populated(start, len)
    }

    /// With huge pages where they are to be had.
    fn populated(start: *mut libc::c_void, len: usize) -> TextResult<Self> {
        let mut memory = Self::owned(start, len)?;
        // SAFETY: advice on the whole of a mapping that is owned here; it changes no byte.
        unsafe { libc::madvise(start, len, libc::MADV_HUGEPAGE) };
        memory.bytes_mut().fill(0);
        Ok(memory)
    }

    /// Takes what mmap returned for `len` readable and writable bytes.
    fn owned(start: *mut libc::c_void, len: usize) -> TextResult<Self> {
        if start == libc::MAP_FAILED {
            return Err(format!("{} ({len} bytes; free memory or ask for less)", last("mmap")));
        }
        Ok(Self { start: start.cast(), len })
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: start..start+len is mapped and initialised (zero pages) until drop.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and `&mut self` makes the slice the only one.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `shared` or `private` and no slice of it can outlive
        // `self`.
        unsafe { libc::munmap(self.start.cast(), self.len) };
    }
}

fn last(call: &str) -> String {
    format!("{call} failed: {}", std::io::Error::last_os_error())
}

/// A way to copy bytes in user space.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Routine {
    #[default]
    Memcpy,
    Movsb,
    /// AVX2 loads, streaming stores
    Stream256,
    /// The same, four 4 KiB pages at once
    Stream256x4,
    /// AVX-512 loads, streaming stores
    Stream512,
    /// The same, four 4 KiB pages at once
    Stream512x4,
}

const PAGE: usize = 4096;

impl Routine {
    pub fn name(&self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }

    pub fn available_here() -> Vec<Self> {
        Self::value_variants().iter().copied().filter(|r| r.available().is_ok()).collect()
    }

    pub fn available(self) -> TextResult<()> {
        if self.runs_here() {
            return Ok(());
        }
        Err(format!(
            "this CPU has no {}; `fabric-perf floor routines` lists what it has",
            self.name()
        ))
    }

    #[cfg(target_arch = "x86_64")]
    fn runs_here(self) -> bool {
        match self {
            Self::Memcpy | Self::Movsb => true,
            Self::Stream256 | Self::Stream256x4 => is_x86_feature_detected!("avx2"),
            Self::Stream512 | Self::Stream512x4 => is_x86_feature_detected!("avx512f"),
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn runs_here(self) -> bool {
        self == Self::Memcpy
    }

    /// Copies `source` over `target`. Streaming routines do the part they can (64-byte aligned,
    /// whole lines) and leave the rest to memcpy.
    ///
    /// # Panics
    /// If the lengths differ or `available` refuses the routine.
    #[inline]
    pub fn copy(self, source: &[u8], target: &mut [u8]) {
        assert_eq!(source.len(), target.len());
        if self == Self::Memcpy {
            return target.copy_from_slice(source);
        }
        assert!(self.runs_here());
        #[cfg(target_arch = "x86_64")]
        self.copy_x86(source, target);
    }

    #[cfg(target_arch = "x86_64")]
    #[inline]
    fn copy_x86(self, source: &[u8], target: &mut [u8]) {
        let (from, to, len) = (source.as_ptr(), target.as_mut_ptr(), source.len());
        if self == Self::Movsb {
            // SAFETY: both ranges are `len` bytes and cannot overlap (`&` against `&mut`).
            unsafe { x86::movsb(from, to, len) };
            return;
        }
        let aligned = to as usize & 63 == 0;
        let lines = if aligned { len - len % 64 } else { 0 };
        let paged = matches!(self, Self::Stream256x4 | Self::Stream512x4);
        let quads = if paged { lines - lines % (4 * PAGE) } else { 0 };
        let rest = lines - quads;
        // SAFETY: `runs_here` was checked by the caller; `to` is 64-byte aligned whenever a
        // length is not zero; quads and rest lie one after the other within both ranges, quads
        // is a multiple of four pages and rest of 64, and the ranges cannot overlap.
        unsafe {
            match self {
                Self::Stream256 | Self::Stream256x4 => {
                    x86::stream256_pages(from, to, quads);
                    x86::stream256(from.add(quads), to.add(quads), rest);
                }
                _ => {
                    x86::stream512_pages(from, to, quads);
                    x86::stream512(from.add(quads), to.add(quads), rest);
                }
            }
            std::arch::x86_64::_mm_sfence();
        }
        target[lines..].copy_from_slice(&source[lines..]);
    }
}

/// Inline assembly, so that a floor is exactly these instructions at any optimisation level.
///
/// Contract of all: `from` and `to` are valid for `len` bytes and do not overlap. Of the
/// streaming ones also: the CPU has the feature, `to` is 64-byte aligned, `len` is a multiple of
/// 64 (of four pages for `_pages`), and the caller fences afterwards.
#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::asm;

    pub unsafe fn movsb(from: *const u8, to: *mut u8, len: usize) {
        // SAFETY: by the module's contract; the direction flag is clear by the ABI.
        unsafe {
            asm!("rep movsb", inout("rcx") len => _, inout("rsi") from => _, inout("rdi") to => _,
                 options(nostack, preserves_flags));
        }
    }

    macro_rules! stream {
        ($line:ident, $pages:ident, $load:literal, $a:literal, $b:literal, $c:literal, $d:literal, $width:literal) => {
            pub unsafe fn $line(from: *const u8, to: *mut u8, len: usize) {
                if len == 0 {
                    return;
                }
                // SAFETY: by the module's contract; the loop touches exactly len bytes.
                unsafe {
                    asm!(
                        "2:",
                        concat!($load, " ", $a, ", [{from} + rax]"),
                        concat!("vmovntdq [{to} + rax], ", $a),
                        concat!("add rax, ", $width),
                        "cmp rax, {len}",
                        "jb 2b",
                        "vzeroupper",
                        from = in(reg) from, to = in(reg) to, len = in(reg) len,
                        inout("rax") 0usize => _, clobber_abi("C"), options(nostack),
                    );
                }
            }

            pub unsafe fn $pages(from: *const u8, to: *mut u8, len: usize) {
                for quad in (0..len).step_by(4 * super::PAGE) {
                    // SAFETY: by the module's contract; each turn touches one quad of pages.
                    unsafe {
                        asm!(
                            "2:",
                            concat!($load, " ", $a, ", [{from} + rax]"),
                            concat!($load, " ", $b, ", [{from} + rax + 4096]"),
                            concat!($load, " ", $c, ", [{from} + rax + 8192]"),
                            concat!($load, " ", $d, ", [{from} + rax + 12288]"),
                            concat!("vmovntdq [{to} + rax], ", $a),
                            concat!("vmovntdq [{to} + rax + 4096], ", $b),
                            concat!("vmovntdq [{to} + rax + 8192], ", $c),
                            concat!("vmovntdq [{to} + rax + 12288], ", $d),
                            concat!("add rax, ", $width),
                            "cmp rax, 4096",
                            "jb 2b",
                            "vzeroupper",
                            from = in(reg) from.add(quad), to = in(reg) to.add(quad),
                            inout("rax") 0usize => _, clobber_abi("C"), options(nostack),
                        );
                    }
                }
            }
        };
    }

    stream!(stream256, stream256_pages, "vmovdqu", "ymm0", "ymm1", "ymm2", "ymm3", "32");
    stream!(stream512, stream512_pages, "vmovdqu64", "zmm0", "zmm1", "zmm2", "zmm3", "64");
}

/// One process_vm_writev of `pairs` of equal-length ranges into this very process: the kernel
/// pins and copies exactly as it does for another process.
pub fn write_vectors(pairs: &mut [(&[u8], &mut [u8])]) -> TextResult<()> {
    let local: Vec<libc::iovec> = pairs
        .iter()
        .map(|(from, _)| libc::iovec { iov_base: from.as_ptr() as *mut _, iov_len: from.len() })
        .collect();
    let remote: Vec<libc::iovec> = pairs
        .iter_mut()
        .map(|(_, to)| libc::iovec { iov_base: to.as_mut_ptr().cast(), iov_len: to.len() })
        .collect();
    let expected: usize = local.iter().map(|vector| vector.iov_len).sum();
    let count = pairs.len() as libc::c_ulong;
    // SAFETY: both vectors describe live slices borrowed for the whole call, the remote ones
    // exclusively; the kernel only reads the local ones.
    let written = unsafe {
        libc::process_vm_writev(libc::getpid(), local.as_ptr(), count, remote.as_ptr(), count, 0)
    };
    if written < 0 {
        return Err(last("process_vm_writev"));
    }
    if written as usize != expected {
        return Err(format!("process_vm_writev wrote {written} of {expected} bytes"));
    }
    Ok(())
}

/// Stores a word into another process; the kernel copies 8 aligned bytes at once.
pub fn store_word(pid: i32, addr: usize, value: u64) -> TextResult<()> {
    let local = libc::iovec { iov_base: (&raw const value).cast_mut().cast(), iov_len: 8 };
    let remote = libc::iovec { iov_base: addr as *mut _, iov_len: 8 };
    // SAFETY: the kernel reads `value`, which lives through the call, and checks the address in the
    // other process.
    match unsafe { libc::process_vm_writev(pid, &local, 1, &remote, 1, 0) } {
        8 => Ok(()),
        _ => Err(last("process_vm_writev")),
    }
}

/// Sleeps until `word` is no longer `seen` (or for no reason, as futexes may).
pub fn futex_wait(word: &AtomicU32, seen: u32) {
    let forever = ptr::null::<libc::timespec>();
    // SAFETY: `word` is a live, aligned 32-bit integer; a null timeout means none.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, seen, forever) };
}

/// Wakes one sleeper on `word`.
pub fn futex_wake(word: &AtomicU32) {
    // SAFETY: `word` is a live, aligned 32-bit integer; FUTEX_WAKE does not write it.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, 1) };
}

pub fn set_socket_buffers(stream: &TcpStream, bytes: usize) -> TextResult<()> {
    let value =
        libc::c_int::try_from(bytes).map_err(|_| format!("{bytes} is no socket buffer size"))?;
    for option in [libc::SO_SNDBUF, libc::SO_RCVBUF] {
        set_option(stream, (libc::SOL_SOCKET, option), &value.to_ne_bytes())?;
    }
    Ok(())
}

/// No pacing for connections that this socket accepts later, whatever the host's default is.
pub fn accept_unpaced(listener: &TcpListener) -> TextResult<()> {
    set_option(listener, (libc::IPPROTO_TCP, libc::TCP_CONGESTION), b"reno")
}

fn set_option(
    socket: &impl AsRawFd,
    (level, name): (libc::c_int, libc::c_int),
    value: &[u8],
) -> TextResult<()> {
    let len = value.len() as libc::socklen_t;
    // SAFETY: the descriptor is open while `socket` lives; pointer and length are of `value`.
    let result =
        unsafe { libc::setsockopt(socket.as_raw_fd(), level, name, value.as_ptr().cast(), len) };
    if result == 0 {
        Ok(())
    } else {
        Err(last("setsockopt"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_routine_copies_every_byte_at_any_length_and_alignment() {
        let source: Vec<u8> = (0..70_000u32).map(|i| (i * 31 % 251) as u8).collect();
        for routine in Routine::available_here() {
            for (skip, len) in
                [(0, 0), (0, 1), (0, 63), (0, 64), (1, 4096), (0, 16_384), (0, 65_601)]
            {
                let mut target = Mapping::shared(1 << 20).unwrap();
                let room = target.bytes_mut();
                routine.copy(&source[..len], &mut room[skip..skip + len]);
                assert_eq!(&room[skip..skip + len], &source[..len], "{routine:?} {skip} {len}");
                assert!(
                    room[skip + len..].iter().all(|&byte| byte == 0),
                    "{routine:?} went too far"
                );
            }
        }
    }

    #[test]
    fn vectors_land_where_they_point() {
        let source = [7u8; 100];
        let mut target = [0u8; 200];
        let (low, high) = target.split_at_mut(100);
        write_vectors(&mut [(&source[..60], &mut high[..60]), (&source[..10], &mut low[90..])])
            .unwrap();
        assert_eq!(target.iter().filter(|&&byte| byte == 7).count(), 70);
        assert!(target[90..160].iter().all(|&byte| byte == 7));
    }
}
