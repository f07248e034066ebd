//! The engine's classes.

use pyo3::prelude::*;

mod batch;
mod config;
mod core;
mod counter;
mod digest;
mod keep;
mod memory;
mod peers;
mod queue;
mod segment;
mod transfer;
mod values;
mod watcher;

pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    keep::register(m)?;
    m.add_class::<batch::Batch>()?;
    m.add_class::<core::Engine>()?;
    m.add_class::<peers::Message>()?;
    m.add_class::<peers::Peer>()?;
    m.add_class::<peers::PeerGroup>()?;
    m.add_class::<counter::Counter>()?;
    m.add_class::<digest::Digest>()?;
    m.add_class::<memory::Pages>()?;
    m.add_class::<memory::Region>()?;
    m.add_class::<memory::RemoteRegion>()?;
    m.add_class::<segment::RemoteSegment>()?;
    m.add_class::<segment::Segment>()?;
    m.add_class::<queue::CompletionQueue>()?;
    m.add_class::<transfer::Flag>()?;
    m.add_class::<transfer::Transfer>()?;
    m.add_class::<values::CounterRef>()?;
    m.add_class::<values::EngineAddress>()?;
    m.add_class::<values::RegionDescriptor>()?;
    m.add_class::<values::SegmentDescriptor>()?;
    m.add_class::<watcher::Watcher>()
}

/// Seconds as a duration; `None` means `default`.
fn seconds(value: Option<f64>, default: std::time::Duration) -> PyResult<std::time::Duration> {
    match value {
        None => Ok(default),
        Some(s) => std::time::Duration::try_from_secs_f64(s).map_err(|_| {
            pyo3::exceptions::PyValueError::new_err(format!(
                "a timeout of {s} seconds is not a length of time"
            ))
        }),
    }
}
