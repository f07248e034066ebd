//! `fabric_ray._native`: the Python face of the native core. No logic lives here: arguments come
//! in, the GIL is released where anything may take time, errors become exceptions.

use pyo3::prelude::*;

mod attach;
mod callback;
mod detached_drop;
mod engine;
mod errors;
mod kvcache;
mod logging;
mod moe;
mod plan;
mod simulate;
mod survey;
mod throughput;
mod topology;

#[pymodule]
fn _native(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add("__version__", env!("CARGO_PKG_VERSION"))?;
    logging::install();
    m.add_function(wrap_pyfunction!(errors::_one_of_each_error, m)?)?;
    plan::register(m)?;
    simulate::register(m)?;
    survey::register(m)?;
    topology::register(m)?;
    kvcache::register(m)?;
    moe::register(m)?;
    throughput::register(m)?;
    engine::register(m)
}
