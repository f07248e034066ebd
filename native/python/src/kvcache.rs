//! The two ends of KV cache transfer. Layouts and offers come in as MessagePack; what becomes of
//! requests is told to Python callbacks, on an engine's callback thread.

use std::{sync::Arc, time::Duration};

use fabric_engine as fe;
use fabric_kvcache as kv;
use fabric_kvcache::{
    layout::CacheLayout,
    wire::{Offer, RefusalReason},
};
use pyo3::{prelude::*, types::PyBytes};

use crate::{
    callback::RecurringCallback,
    detached_drop::DetachedDrop,
    engine::{checked_int, current_span, Engine, Region, Watcher},
    errors::{raise, OrRaise},
};

pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<KvDecoder>()?;
    m.add_class::<KvTimeline>()?;
    m.add_class::<KvPrefiller>()
}

/// One rank: its number, engine, buffers, and slots for tails.
type RankArg<'py> = (u32, PyRef<'py, Engine>, Vec<PyRef<'py, Region>>, Option<PyRef<'py, Region>>);

fn local(ranks: &[RankArg<'_>]) -> Vec<kv::LocalRank> {
    let one = |(rank, engine, buffers, tail): &RankArg<'_>| kv::LocalRank {
        rank: *rank,
        engine: Arc::clone(&engine.engine),
        buffers: buffers.iter().map(|r| r.0.clone()).collect(),
        tail: tail.as_ref().map(|r| r.0.clone()),
    };
    ranks.iter().map(one).collect()
}

fn layouts(py: Python<'_>, layouts: &[Vec<u8>]) -> PyResult<Vec<CacheLayout>> {
    layouts.iter().map(|bytes| CacheLayout::from_msgpack(bytes).or_raise(py)).collect()
}

/// Beat, silence, the longest message, bytes of a tail, of payloads in all.
type TermsArg = (f64, f64, usize, u64, u64);

fn terms(
    py: Python<'_>,
    (beat, silence, max_message, tail_nbytes, max_payloads): TermsArg,
) -> PyResult<kv::Terms> {
    let seconds = |what: &str, value: f64| {
        Duration::try_from_secs_f64(value).map_err(|_| {
            let text = format!("{what} of {value} seconds is not a length of time: give 0 or more");
            raise(py, &fe::EngineError::Invalid(text))
        })
    };
    let (beat, silence) = (seconds("a beat", beat)?, seconds("a silence", silence)?);
    Ok(kv::Terms { beat, silence, max_message, tail_nbytes, max_payloads })
}

/// The name of a cause, for the exception that stands for it.
fn cause(cause: &kv::Cause) -> &'static str {
    match cause {
        kv::Cause::Cancelled => "cancelled",
        kv::Cause::Lost(_) => "lost",
        kv::Cause::TimedOut(_) => "timed_out",
        kv::Cause::Refused { reason: RefusalReason::Busy, .. } => "refused_busy",
        kv::Cause::Refused { reason: RefusalReason::TooLong, .. } => "refused_too_long",
        kv::Cause::Refused { elsewhere: true, .. } => "refused_here",
        kv::Cause::Refused { .. } => "refused",
        kv::Cause::Closed => "closed",
        _ => "failed",
    }
}

fn duration(py: Python<'_>, timeout: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(timeout).map_err(|_| {
        let text =
            format!("a timeout of {timeout} seconds is not a length of time: give 0 or more");
        raise(py, &fe::EngineError::Invalid(text))
    })
}

/// A decoder instance's process; `fabric_ray.kvcache.Decoder` is the class to use.
#[pyclass(frozen, module = "fabric_ray._native")]
struct KvDecoder(DetachedDrop<kv::Decoder>);

#[pymethods]
impl KvDecoder {
    #[new]
    #[pyo3(signature = (*, name, layouts, ranks, terms, on_event))]
    fn new(
        py: Python<'_>,
        name: &str,
        layouts: Vec<Vec<u8>>,
        #[pyo3(from_py_with = checked_int)] ranks: Vec<RankArg<'_>>,
        #[pyo3(from_py_with = checked_int)] terms: TermsArg,
        on_event: RecurringCallback,
    ) -> PyResult<Self> {
        let (layouts, local) = (self::layouts(py, &layouts)?, local(&ranks));
        let terms = self::terms(py, terms)?;
        let report = move |seq: u64, event: kv::Event| {
            let (what, why, text) = match &event {
                kv::Event::Ready => ("ready", "", String::new()),
                kv::Event::Failed(c) => ("failed", cause(c), c.to_string()),
                kv::Event::Released => ("released", "", String::new()),
            };
            on_event.call(|py, f| (f, seq, what, why, text).into_pyobject(py));
        };
        let decoder = py.detach(|| kv::Decoder::new(name, layouts, local, terms, report));
        decoder.map(|d| Self(DetachedDrop::new(d))).or_raise(py)
    }

    /// Makes a prefiller known by its offer; returns its number.
    fn connect(&self, py: Python<'_>, offer: &[u8]) -> PyResult<u64> {
        py.detach(|| Offer::from_bytes(offer).and_then(|offer| self.0.connect(&offer))).or_raise(py)
    }

    /// Asks a prefiller for pages; returns the request's number.
    #[allow(clippy::too_many_arguments)] // keyword arguments
    #[pyo3(signature = (prefiller, *, tokens, have, salt, tables, tail_slot, payload, timeout))]
    fn request(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = checked_int)] prefiller: u64,
        #[pyo3(from_py_with = checked_int)] tokens: u64,
        #[pyo3(from_py_with = checked_int)] have: u64,
        #[pyo3(from_py_with = checked_int)] salt: u64,
        #[pyo3(from_py_with = checked_int)] tables: Vec<Vec<u32>>,
        #[pyo3(from_py_with = checked_int)] tail_slot: u32,
        payload: Vec<u8>,
        timeout: f64,
    ) -> PyResult<u64> {
        let timeout = duration(py, timeout)?;
        let span = current_span(py)?;
        let pull = kv::Pull { tokens, have, salt, tables, tail_slot, payload, timeout, span };
        py.detach(|| self.0.request(prefiller, pull)).or_raise(py)
    }

    fn cancel(&self, py: Python<'_>, #[pyo3(from_py_with = checked_int)] request: u64) -> bool {
        py.detach(|| self.0.cancel(request))
    }

    /// Renews a prefiller's leases by the next beat.
    fn renew(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = checked_int)] prefiller: u64,
        #[pyo3(from_py_with = checked_int)] leases: Vec<u64>,
    ) {
        py.detach(|| self.0.renew(prefiller, leases));
    }

    fn disconnect(&self, py: Python<'_>, #[pyo3(from_py_with = checked_int)] prefiller: u64) {
        py.detach(|| self.0.disconnect(prefiller));
    }

    fn is_connected(&self, #[pyo3(from_py_with = checked_int)] prefiller: u64) -> bool {
        self.0.is_connected(prefiller)
    }

    /// Requests whose pages aren't released.
    #[getter]
    fn open(&self) -> usize {
        self.0.open()
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.0.close());
    }
}

/// A layer's number in the model, and when it was computed, posted and delivered.
type LayerTimes = (u32, Option<u64>, Option<u64>, Option<u64>);

/// Progress of the layers of a job; `fabric_ray.kvcache.Job.timeline` gives types to it.
#[pyclass(frozen, module = "fabric_ray._native")]
struct KvTimeline(Arc<kv::Timeline>);

#[pymethods]
impl KvTimeline {
    /// Nanoseconds of the monotonic clock, by layer.
    fn layers(&self) -> Vec<LayerTimes> {
        let ns = |time: Option<fe::Time>| time.map(|t| t.0);
        let one = |l: &kv::LayerTimes| (l.layer, ns(l.computed), ns(l.posted), ns(l.delivered));
        self.0.layers().iter().map(one).collect()
    }
}

/// A prefiller instance's process; `fabric_ray.kvcache.Prefiller` is the class to use.
#[pyclass(frozen, module = "fabric_ray._native")]
struct KvPrefiller {
    prefiller: DetachedDrop<kv::Prefiller>,
    word: Py<Watcher>,
}

#[pymethods]
impl KvPrefiller {
    #[new]
    #[pyo3(signature = (
        *, name, layouts, ranks, terms, on_event, on_request, on_renewal, device=None
    ))]
    #[allow(clippy::too_many_arguments)] // keyword arguments
    fn new(
        py: Python<'_>,
        name: &str,
        layouts: Vec<Vec<u8>>,
        #[pyo3(from_py_with = checked_int)] ranks: Vec<RankArg<'_>>,
        #[pyo3(from_py_with = checked_int)] terms: TermsArg,
        on_event: RecurringCallback,
        on_request: RecurringCallback,
        on_renewal: RecurringCallback,
        #[pyo3(from_py_with = checked_int)] device: Option<i32>,
    ) -> PyResult<Self> {
        let (layouts, local) = (self::layouts(py, &layouts)?, local(&ranks));
        let terms = self::terms(py, terms)?;
        let engine = local.first().map(|rank| Arc::clone(&rank.engine));
        let report = move |job: u64, event: kv::JobEvent| match event {
            kv::JobEvent::Requested(asked) => on_request.call(|py, f| {
                let payload = PyBytes::new(py, &asked.payload);
                let timeline = Py::new(py, KvTimeline(asked.timeline))?;
                (f, job, asked.decoder, asked.tokens, asked.have, payload, timeline)
                    .into_pyobject(py)
            }),
            kv::JobEvent::Stopped(c) => {
                on_event
                    .call(|py, f| (f, job, "stopped", cause(&c), c.to_string()).into_pyobject(py));
            }
            kv::JobEvent::Released => {
                on_event.call(|py, f| (f, job, "released", "", "").into_pyobject(py))
            }
        };
        let made = py.detach(|| {
            let prefiller = kv::Prefiller::new(name, layouts, local, terms, report)?;
            prefiller.on_renewal(move |leases| {
                on_renewal.call(|py, f| (f, leases.to_vec()).into_pyobject(py));
            });
            let advance = prefiller.advancer();
            let word = match (engine, device) {
                (Some(engine), Some(device)) => engine.watch_device(device, advance)?,
                (Some(engine), None) => engine.watch(advance)?,
                (None, _) => return Err(fe::EngineError::Closed),
            };
            Ok((prefiller, word))
        });
        let (prefiller, word) = made.or_raise(py)?;
        Ok(Self { prefiller: DetachedDrop::new(prefiller), word: Py::new(py, Watcher(word))? })
    }

    /// The offer of this prefiller for decoders.
    fn offer<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.prefiller.offer().to_bytes())
    }

    /// The word that counts layers.
    #[getter]
    fn word(&self, py: Python<'_>) -> Py<Watcher> {
        self.word.clone_ref(py)
    }

    /// One more layer is in the cache.
    fn layer_done(&self, py: Python<'_>) -> PyResult<()> {
        let word = &self.word.get().0;
        self.prefiller.mark(word.load().wrapping_add(1));
        word.add(1).or_raise(py)
    }

    /// Layers of a pass.
    #[getter]
    fn layers(&self) -> usize {
        self.prefiller.layers()
    }

    fn accept(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = checked_int)] job: u64,
        #[pyo3(from_py_with = checked_int)] tables: Vec<Vec<u32>>,
        #[pyo3(from_py_with = checked_int)] computed: u64,
    ) -> PyResult<()> {
        py.detach(|| self.prefiller.accept(job, tables, computed)).or_raise(py)
    }

    #[pyo3(signature = (requests, counted=None))]
    fn begin(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = checked_int)] requests: Vec<(u64, u64)>,
        #[pyo3(from_py_with = checked_int)] counted: Option<u64>,
    ) -> PyResult<()> {
        let counted = counted.unwrap_or_else(|| self.word.get().0.load());
        py.detach(|| self.prefiller.begin(&requests, counted)).or_raise(py)
    }

    fn finish(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = checked_int)] job: u64,
        #[pyo3(from_py_with = checked_int)] slot: u32,
    ) -> PyResult<()> {
        py.detach(|| self.prefiller.finish(job, slot)).or_raise(py)
    }

    fn fail(&self, py: Python<'_>, #[pyo3(from_py_with = checked_int)] job: u64, why: &str) {
        py.detach(|| self.prefiller.fail(job, why));
    }

    /// Refuses a request: `reason` is `busy` or `too_long`.
    fn refuse(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = checked_int)] job: u64,
        reason: &str,
        why: &str,
    ) -> PyResult<()> {
        let reason = match reason {
            "busy" => RefusalReason::Busy,
            "too_long" => RefusalReason::TooLong,
            _ => {
                let text =
                    format!("reason of a refusal: got {reason:?}, expected busy or too_long");
                return Err(raise(py, &fe::EngineError::Invalid(text)));
            }
        };
        py.detach(|| self.prefiller.refuse(job, reason, why));
        Ok(())
    }

    /// Jobs that aren't released.
    #[getter]
    fn jobs(&self) -> usize {
        self.prefiller.jobs()
    }

    /// Decoders that it talks to.
    #[getter]
    fn decoders(&self) -> usize {
        self.prefiller.decoders()
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.prefiller.close());
    }
}
