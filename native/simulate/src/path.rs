//! The critical_path path of a push, found from its end back to its begin.

use crate::{
    pipeline::{Cause, Pipeline, Times},
    push::{Stage, STAGES},
};

/// The critical_path path until `end`, divided by stages.
pub(crate) fn critical_path(pipelines: &[Pipeline<'_>], end: u64) -> [u64; STAGES] {
    let mut path = [0; STAGES];
    let last = |p: &Pipeline<'_>| p.times.iter().map(|t| t.sent).max().unwrap_or(0);
    let Some(mut trainer) = (0..pipelines.len()).max_by_key(|t| last(&pipelines[*t])) else {
        return path;
    };
    let times = &pipelines[trainer].times;
    let Some(mut step) = (0..times.len()).max_by_key(|s| times[*s].sent) else { return path };
    // Rollouts see the end later than trainers do.
    path[Stage::Write as usize] += end - times[step].sent;
    loop {
        let times = &pipelines[trainer].times;
        path[Stage::Write as usize] += times[step].sent - times[step].last;
        step = submitted(times, step, &mut path);
        (trainer, step) = match prepared(pipelines, trainer, step, &mut path) {
            Some(before) => before,
            None => return path,
        };
    }
}

/// Walks back from a submitted write to a step that was submitted as soon as it was ready.
fn submitted(times: &[Times], mut step: usize, path: &mut [u64; STAGES]) -> usize {
    path[Stage::Submit as usize] += times[step].last - times[step].submitting;
    while times[step].submitting > times[step].prepared {
        step -= 1;
        path[Stage::Submit as usize] += times[step].submitted - times[step].submitting;
    }
    step
}

/// Walks back from a prepared step to the sent step that let it begin; `None` at the start.
fn prepared(
    pipelines: &[Pipeline<'_>],
    mut trainer: usize,
    mut step: usize,
    path: &mut [u64; STAGES],
) -> Option<(usize, usize)> {
    loop {
        let Pipeline { times, steps, .. } = &pipelines[trainer];
        let mut add = |step: usize, stages: std::ops::Range<usize>| {
            stages.for_each(|stage| path[stage] += steps[step].ready[stage]);
        };
        add(step, 1..4);
        while times[step].preparing > times[step].copied {
            step -= 1;
            add(step, 1..4);
        }
        add(step, 0..1);
        while times[step].cause == Cause::Copied {
            step -= 1;
            add(step, 0..1);
        }
        match times[step].cause {
            Cause::Sent(before) => return Some((trainer, before)),
            Cause::Group(other) => {
                let group = steps[step].group;
                let of = &pipelines[other];
                (trainer, step) = (other, of.steps.iter().rposition(|s| s.group < group)?);
            }
            Cause::Start | Cause::Copied => return None,
        }
    }
}
