//! What the time of a push went to: from its end back to its begin, always to what was waited for.

use crate::{
    pipeline::{Cause, Pipeline, Times},
    push::{Stage, STAGES},
};

/// The time until `end` by stages.
pub(crate) fn critical(pipelines: &[Pipeline<'_>], end: u64) -> [u64; STAGES] {
    let mut path = [0; STAGES];
    let last = |p: &Pipeline<'_>| p.times.iter().map(|t| t.sent).max().unwrap_or(0);
    let Some(mut trainer) = (0..pipelines.len()).max_by_key(|t| last(&pipelines[*t])) else {
        return path;
    };
    let times = &pipelines[trainer].times;
    let Some(mut step) = (0..times.len()).max_by_key(|s| times[*s].sent) else { return path };
    // What rollouts see later than trainers do.
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

/// Back from a submitted write to a step that the processor took up as soon as it was ready.
fn submitted(times: &[Times], mut step: usize, path: &mut [u64; STAGES]) -> usize {
    path[Stage::Submit as usize] += times[step].last - times[step].submitting;
    while times[step].submitting > times[step].prepared {
        step -= 1;
        path[Stage::Submit as usize] += times[step].submitted - times[step].submitting;
    }
    step
}

/// Back from a step that is ready to one that was sent before; `None` at the begin.
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
