//! Pushes on a virtual clock; `fabric_ray.weights.simulation` gives them types.

use fabric_engine::EngineError;
use fabric_simulate::{simulate as run, steps_of, Division, Network, Push, Step};
use pyo3::prelude::*;

use crate::{
    errors,
    plan::{raise, PlanCore},
};

pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_function(wrap_pyfunction!(simulate, m)?)
}

/// A step: its containers, its stages, its memory, how many steps must have been sent before, its
/// group.
#[derive(FromPyObject)]
struct StepView(Vec<u32>, [u64; 4], u64, usize, u32);

#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct NetworkView {
    nics: u8,
    rate: f64,
    latency: u64,
    call: u64,
    request: u64,
    page: u64,
}

#[derive(IntoPyObject)]
struct OutcomeView {
    time: u64,
    path: Vec<u64>,
    ended: Vec<u64>,
    busy: Vec<Vec<u64>>,
    peak: u64,
    calls: Vec<usize>,
    requests: Vec<u64>,
    posted: u64,
    digest: u64,
}

/// The push of a plan, by the steps of its source ranks in their order.
#[pyfunction]
fn simulate(
    py: Python<'_>,
    plan: &PlanCore,
    steps: Vec<Vec<StepView>>,
    network: NetworkView,
) -> PyResult<OutcomeView> {
    let plan = &plan.plan;
    let trainers = py
        .detach(|| {
            let divided = plan.source().ranks.iter().zip(steps);
            let trainers = divided.map(|(rank, steps)| steps_of(plan, *rank, &divisions(steps)));
            trainers.collect::<Result<Vec<_>, _>>()
        })
        .map_err(|e| raise(py, &e))?;
    let push = Push { trainers, rollouts: plan.target().ranks.len() };
    let NetworkView { nics, rate, latency, call, request, page } = network;
    let network = Network { nics, rate, latency, call, request, page };
    let out = py
        .detach(|| run(&push, &network))
        .map_err(|problem| errors::raise(py, &EngineError::Invalid(problem.0)))?;
    let calls = |steps: &Vec<Step>| steps.iter().map(|s| s.writes.len()).sum();
    let requests =
        |steps: &Vec<Step>| steps.iter().flat_map(|s| &s.writes).map(|w| w.requests).sum();
    Ok(OutcomeView {
        time: out.time,
        path: out.path.to_vec(),
        ended: out.ended,
        busy: out.busy.iter().map(|b| b.to_vec()).collect(),
        peak: out.peak,
        calls: push.trainers.iter().map(calls).collect(),
        requests: push.trainers.iter().map(requests).collect(),
        posted: out.posted,
        digest: out.digest,
    })
}

fn divisions(steps: Vec<StepView>) -> Vec<Division> {
    let division = |StepView(containers, ready, memory, after, group)| Division {
        containers,
        step: Step { ready, memory, after, group, writes: Vec::new() },
    };
    steps.into_iter().map(division).collect()
}
