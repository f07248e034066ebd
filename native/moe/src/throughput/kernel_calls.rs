//! The calls of an exchange whose rows kernels move. The same machine decides; kernels have the row
//! addresses that a caller would pass.

use std::{sync::Arc, time::Duration};

use fabric_engine::{
    api::EngineConfig, locks::MutexGuard, EngineError, Region, Result, TransferEngine,
};
use fabric_proxy::{raw::AtomicWords, Engines};

use super::{
    admission::check_all_here,
    context::{Io, KernelIo},
    device::{Device, WorkerLifecycle},
    machine::Machine,
    membership::Member,
    spec::Spec,
    Throughput,
};
use crate::kernels::Part;

/// The memory that kernels and their exchange share.
#[derive(Debug)]
pub struct KernelMemory {
    /// This rank's part of the memory.
    pub region: Region,
    /// Zero words, as many as [`QueueLayout`](super::device::QueueLayout) needs.
    pub words: AtomicWords,
    pub workers: u32,
}

impl Throughput {
    /// As [`Throughput::open`], with rows in memory that kernels reach, and kernels that move them.
    ///
    /// # Errors
    /// As [`Throughput::open`]; [`EngineError::Invalid`] for too little memory.
    pub fn open_with_kernels(
        engine: &EngineConfig,
        spec: Spec,
        member: Member,
        timeout: Duration,
        memory: KernelMemory,
    ) -> Result<Self> {
        let (worker, lifecycle) = Device::new(&spec, memory.workers, memory.words)?;
        let open = |i: u32| {
            let name = format!("{}.{i}", engine.name);
            let engine = TransferEngine::open(EngineConfig { name, ..engine.clone() })?;
            let part = engine.register_again(&memory.region)?;
            Ok((Arc::new(engine), part))
        };
        let engines = (0..spec.threads).map(open).collect::<Result<_>>()?;
        let mut this = Self::over(Engines(engines), spec, member, timeout, Box::new(worker))?;
        this.lifecycle = Some(lifecycle);
        Ok(this)
    }

    /// Begins a call: returns the number with which its workers are launched.
    /// [`Throughput::end_work`] ends them.
    ///
    /// # Errors
    /// [`EngineError::Invalid`]: no kernels carry the exchange out.
    pub fn begin_work(&self) -> Result<u64> {
        self.lifecycle().map(WorkerLifecycle::begin)
    }

    fn lifecycle(&self) -> Result<&WorkerLifecycle> {
        let text = "no kernels carry this exchange out; use the calls that are given rows";
        self.lifecycle.as_ref().ok_or_else(|| EngineError::Invalid(text.into()))
    }

    /// As [`Throughput::enter`], for a call whose rows kernels move.
    fn enter_kernel_call(&self) -> Result<(MutexGuard<'_, ()>, MutexGuard<'_, Machine>)> {
        self.lifecycle()?;
        self.enter()
    }

    /// Ends the workers of a call, after their current job if the call failed.
    pub fn end_work(&self, call: u64) {
        if let Some(lifecycle) = &self.lifecycle {
            lifecycle.end(call);
        }
    }

    /// As [`Throughput::dispatch_send`].
    ///
    /// # Errors
    /// As [`Throughput::dispatch_send`].
    pub fn kernel_dispatch_send(&self, indices: &[i64], weights: Option<Part<'_>>) -> Result<()> {
        let (_caller, mut machine) = self.enter_kernel_call()?;
        check_all_here(&machine)?;
        machine.check_may_dispatch("dispatch_send")?;
        machine.check_routes(indices, weights)?;
        self.drive(&mut machine, &mut Io::Nothing, |machine| machine.may_begin())?;
        machine.begin_on_kernels(indices, weights)?;
        self.drive(&mut machine, &mut Io::Kernels(KernelIo::Tokens), |machine| machine.is_packed())
    }

    /// As [`Throughput::dispatch_recv`], with room for `rows` rows.
    ///
    /// # Errors
    /// As [`Throughput::dispatch_recv`].
    pub fn kernel_dispatch_recv(&self, rows: u64) -> Result<()> {
        let (_caller, mut machine) = self.enter_kernel_call()?;
        machine.check_kernel_room(rows)?;
        self.drive(&mut machine, &mut Io::Kernels(KernelIo::Rows), |machine| machine.is_collected())
    }

    /// As [`Throughput::combine_send`], with answers to `rows` rows.
    ///
    /// # Errors
    /// As [`Throughput::combine_send`].
    pub fn kernel_combine_send(&self, rows: u64) -> Result<()> {
        let (_caller, mut machine) = self.enter_kernel_call()?;
        machine.begin_kernel_answers(rows)?;
        self.drive(&mut machine, &mut Io::Kernels(KernelIo::Answers), |machine| {
            machine.is_answered()
        })
    }

    /// As [`Throughput::combine_recv`]; returns the number of tokens whose sums kernels have
    /// stored.
    ///
    /// # Errors
    /// As [`Throughput::combine_recv`].
    pub fn kernel_combine_recv(&self) -> Result<u32> {
        let (_caller, mut machine) = self.enter_kernel_call()?;
        machine.check_kernel_sums()?;
        self.drive(&mut machine, &mut Io::Nothing, |machine| machine.is_summed())?;
        *self.left_out.lock() = machine.left_out().to_vec();
        machine.take_kernel_sums()
    }
}
