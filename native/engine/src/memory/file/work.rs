//! Work on one file: ranges that are all written or all read.

use std::sync::{
    atomic::{
        AtomicBool,
        Ordering::{Acquire, Release},
    },
    Arc,
};

use smallvec::SmallVec;

use super::FileMemory;
use crate::{
    error::DomainError,
    locks::{Condvar, Mutex},
    memory::device::CopyRange,
};

#[derive(Debug)]
enum WorkState {
    Queued,
    Running,
    Over(Result<(), DomainError>),
}

/// See the module. Ranges name the file's side by its offset in the file.
#[derive(Debug)]
pub(crate) struct FileWork {
    pub file: Arc<FileMemory>,
    /// Into the file.
    pub inward: bool,
    pub pieces: SmallVec<[CopyRange; 4]>,
    state: Mutex<WorkState>,
    /// Told when it is over.
    end: Condvar,
    over: AtomicBool,
}

/// The part of a range that is not moved yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RemainingRange {
    /// In this process's memory.
    pub addr: usize,
    /// In the file.
    pub at: u64,
    pub len: usize,
}

/// The result of one call on a file.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Progress {
    All,
    /// The system moved less than requested, or nothing yet.
    Some(RemainingRange),
    Failed(DomainError),
}

impl FileWork {
    pub fn new(file: &Arc<FileMemory>, inward: bool, pieces: &[CopyRange]) -> Arc<Self> {
        Arc::new(Self {
            file: Arc::clone(file),
            inward,
            pieces: pieces.into(),
            state: Mutex::new(WorkState::Queued),
            end: Condvar::new(),
            over: AtomicBool::new(false),
        })
    }

    pub fn is_over(&self) -> bool {
        self.over.load(Acquire)
    }

    /// The result; `None` while it is in flight.
    pub fn result(&self) -> Option<Result<(), DomainError>> {
        if !self.is_over() {
            return None;
        }
        match &*self.state.lock() {
            WorkState::Over(result) => Some(result.clone()),
            WorkState::Queued | WorkState::Running => None,
        }
    }

    /// Cancels it if it has not begun, else waits for its end. After this no byte of its memory is
    /// touched (MR-1).
    pub fn quiesce(&self) {
        let mut state = self.state.lock();
        if matches!(*state, WorkState::Queued) {
            *state = WorkState::Over(Err(DomainError::Unavailable("the engine is closed".into())));
            self.over.store(true, Release);
            return;
        }
        while !matches!(*state, WorkState::Over(_)) {
            self.end.wait(&mut state);
        }
    }

    /// Begins to execute it; false if it was cancelled.
    pub(super) fn begin(&self) -> bool {
        let mut state = self.state.lock();
        let queued = matches!(*state, WorkState::Queued);
        if queued {
            *state = WorkState::Running;
        }
        queued
    }

    pub(super) fn finish(&self, result: Result<(), DomainError>) {
        *self.state.lock() = WorkState::Over(result);
        self.over.store(true, Release);
        self.end.notify_all();
    }

    pub(super) fn range(&self, piece: usize) -> Option<RemainingRange> {
        let p = self.pieces.get(piece)?;
        let (addr, at) = if self.inward { (p.from, p.to) } else { (p.to, p.from) };
        Some(RemainingRange { addr, at: at as u64, len: p.len })
    }

    /// The remaining range after a call that returned `n`, or its error. Missing bytes are an error
    /// (RS-1).
    pub(super) fn after(
        &self,
        rest: RemainingRange,
        n: Result<usize, rustix::io::Errno>,
    ) -> Progress {
        use rustix::io::Errno;
        let (done, to) = if self.inward { ("writing", "to") } else { ("reading", "from") };
        let what = |why: &str| {
            let (RemainingRange { at, len, .. }, name) = (rest, self.file.name());
            let text = format!("file {name}: {why}, {done} {len} bytes {to} offset {at}");
            Progress::Failed(DomainError::Storage(text))
        };
        match n {
            Ok(0) if self.inward => what("the system takes no byte"),
            Ok(0) => what("it ends before that: it was cut short since it was registered"),
            Ok(n) if n < rest.len => Progress::Some(RemainingRange {
                addr: rest.addr + n,
                at: rest.at + n as u64,
                len: rest.len - n,
            }),
            Ok(_) => Progress::All,
            Err(Errno::INTR | Errno::AGAIN | Errno::CANCELED) => Progress::Some(rest),
            Err(e) => what(&std::io::Error::from(e).to_string()),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;
    use rustix::io::Errno;

    use super::{super::FileOptions, *};

    fn work(inward: bool) -> Arc<FileWork> {
        let path = std::env::current_exe().unwrap();
        let options = FileOptions { writable: false, ..Default::default() };
        let (file, _) = FileMemory::open(&path, options).unwrap();
        let piece = CopyRange { to: 1000, from: 5000, len: 70 };
        FileWork::new(&Arc::new(file), inward, &[piece])
    }

    #[test]
    fn the_file_s_side_is_an_offset() {
        assert_eq!(work(true).range(0), Some(RemainingRange { addr: 5000, at: 1000, len: 70 }));
        assert_eq!(work(false).range(0), Some(RemainingRange { addr: 1000, at: 5000, len: 70 }));
        assert_eq!(work(false).range(1), None);
    }

    #[test]
    fn rs_1_errors_and_ends_of_files_name_the_file_and_never_pass_for_success() {
        let name = std::env::current_exe().unwrap().file_name().unwrap().to_owned();
        let name = name.to_str().unwrap();
        for (inward, n, said) in [
            (true, Ok(0), "takes no byte"),
            (false, Ok(0), "cut short"),
            (true, Err(Errno::NOSPC), "No space left"),
            (false, Err(Errno::IO), "Input/output error"),
        ] {
            let work = work(inward);
            let Progress::Failed(e) = work.after(work.range(0).unwrap(), n) else {
                panic!("{n:?}")
            };
            let e = e.to_string();
            assert!(e.contains(said) && e.contains(name), "{e}");
        }
    }

    #[test]
    fn mr_1_what_has_not_begun_never_does_once_it_was_given_up() {
        let given_up = work(true);
        given_up.quiesce();
        assert!(!given_up.begin() && given_up.result().unwrap().is_err());
    }

    proptest! {
        #[test]
        fn short_calls_go_on_where_they_stopped(steps in proptest::collection::vec(0usize..40, 1..20)) {
            let work = work(true);
            let mut rest = work.range(0).unwrap();
            let mut moved = 0;
            for n in steps {
                let n = match n { 0 => Err(Errno::INTR), n => Ok(n.min(rest.len)) };
                prop_assert_eq!(rest, RemainingRange { addr: 5000 + moved, at: 1000 + moved as u64, len: 70 - moved });
                moved += n.unwrap_or(0);
                match work.after(rest, n) {
                    Progress::Some(left) => rest = left,
                    end => {
                        prop_assert_eq!(end, Progress::All);
                        prop_assert_eq!(moved, 70);
                        break;
                    }
                }
            }
        }
    }
}
