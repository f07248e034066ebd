//! Work on the bytes of weights, in several threads.

use std::sync::{Mutex, PoisonError};

use fabric_engine as fe;

/// Runs `work` on all tasks, in several threads; returns results in order of tasks.
pub(super) fn on_threads<T: Send, R: Send>(
    tasks: Vec<T>,
    threads: usize,
    work: impl Fn(T) -> fe::Result<R> + Sync,
) -> fe::Result<Vec<R>> {
    let threads = threads.clamp(1, tasks.len().max(1));
    if threads == 1 {
        return tasks.into_iter().map(work).collect();
    }
    let left = Mutex::new(tasks.into_iter().enumerate());
    let next = || left.lock().unwrap_or_else(PoisonError::into_inner).next();
    let run = || -> fe::Result<Vec<(usize, R)>> {
        let mut done = Vec::new();
        while let Some((number, task)) = next() {
            done.push((number, work(task)?));
        }
        Ok(done)
    };
    let mut all = Vec::new();
    std::thread::scope(|scope| -> fe::Result<()> {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(run)).collect();
        all.extend(run()?);
        for other in others {
            let done = other.join().map_err(|_| {
                fe::EngineError::Invalid("a thread that reads weights has panicked".into())
            })?;
            all.extend(done?);
        }
        Ok(())
    })?;
    all.sort_unstable_by_key(|(number, _)| *number);
    Ok(all.into_iter().map(|(_, result)| result).collect())
}
