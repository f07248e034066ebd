//! Summary of a run: share of the rails' capacity, transfer times, and the cost of losses and
//! returns.

use serde::Serialize;

use super::{
    run::{Run, SliceEnd},
    scenario::{RailChange, Scenario},
};

const MS: u64 = 1_000_000;
/// Rates are looked at over so long, at steps of a millisecond.
const SPAN: usize = 10;
/// As good as all of it.
const AIM: f64 = 0.95;

#[derive(Debug, Clone, Serialize)]
pub struct Summary {
    pub phases: Vec<Phase>,
    pub losses: Vec<RailLoss>,
    pub returns: Vec<RailReturn>,
    /// Of all transfers
    pub times: Times,
    /// GB/s over the whole run
    pub rate: f64,
    /// Bytes sent once more, and all bytes that arrived
    pub again: u64,
    pub bytes: u64,
}

/// The time between two changes.
#[derive(Debug, Clone, Serialize)]
pub struct Phase {
    pub from_ms: f64,
    pub to_ms: f64,
    /// What the rails that are up can carry, GB/s
    pub capacity: f64,
    /// What arrived, of that
    pub share: f64,
    /// The same without what losing or finding a rail took: see [`RailLoss`] and [`RailReturn`]
    pub settled: f64,
    /// Of the transfers that were begun in it
    pub times: Times,
}

#[derive(Debug, Clone, Serialize)]
pub struct Times {
    pub transfers: usize,
    pub median_us: f64,
    pub p99_us: f64,
}

#[derive(Debug, Clone, Serialize)]
pub struct RailLoss {
    pub at_ms: f64,
    pub rail: u8,
    /// Transfers in flight then, and when the last of them was over
    pub in_flight: usize,
    pub over_ms: f64,
    /// What the longest of them took beyond the median before
    pub added_ms: f64,
}

#[derive(Debug, Clone, Serialize)]
pub struct RailReturn {
    pub at_ms: f64,
    pub rail: u8,
    /// Until the rail was used again, and until what arrives was 0.95 of what the rails can carry
    pub used_ms: Option<f64>,
    pub recovered_ms: Option<f64>,
}

/// Gb/s of each rail from some time on, ns.
fn capacities(scenario: &Scenario) -> Vec<(u64, Vec<f64>)> {
    let mut rails = scenario.rails.clone();
    let mut up = vec![true; rails.len()];
    let mut all = vec![(0, rails.clone())];
    for change in &scenario.changes {
        let rail = usize::from(change.rail);
        match change.what {
            RailChange::Rate(gbits) => rails[rail] = gbits,
            RailChange::Lost(_) | RailChange::Silent => up[rail] = false,
            RailChange::Back => up[rail] = true,
        }
        let now = rails.iter().zip(&up).map(|(r, up)| if *up { *r } else { 0.0 }).collect();
        all.push(((change.at_ms * MS as f64) as u64, now));
    }
    all
}

/// Bytes that arrived in each millisecond, by rail.
pub fn by_rail(scenario: &Scenario, run: &Run) -> Vec<Vec<u64>> {
    let mut bytes = vec![vec![0; scenario.run_ms.ceil() as usize]; scenario.rails.len()];
    for slice in run.slices.iter().filter(|s| s.fate == SliceEnd::Done) {
        if let Some(bucket) = bytes[usize::from(slice.rail)].get_mut((slice.ended / MS) as usize) {
            *bucket += slice.bytes;
        }
    }
    bytes
}

pub fn summary(scenario: &Scenario, run: &Run) -> Summary {
    let by_rail = by_rail(scenario, run);
    let arrived: Vec<u64> = (0..scenario.run_ms.ceil() as usize)
        .map(|ms| by_rail.iter().map(|r| r[ms]).sum())
        .collect();
    let capacities = capacities(scenario);
    let losses: Vec<RailLoss> = scenario
        .changes
        .iter()
        .filter(|c| matches!(c.what, RailChange::Lost(_) | RailChange::Silent))
        .map(|c| loss(run, c.at_ms, c.rail))
        .collect();
    let returns: Vec<RailReturn> = scenario
        .changes
        .iter()
        .filter(|c| c.what == RailChange::Back)
        .map(|c| {
            let at = (c.at_ms * MS as f64) as u64;
            let rates = capacities.iter().rfind(|(t, _)| *t <= at).map(|(_, rates)| rates);
            let capacity = rates.map_or(0.0, |r| r.iter().sum::<f64>() / 8.0);
            let seen = |s: &&super::run::Slice| {
                s.rail == c.rail && s.ended > at && s.fate == SliceEnd::Done
            };
            let used = run.slices.iter().filter(seen).map(|s| s.ended).min();
            RailReturn {
                at_ms: c.at_ms,
                rail: c.rail,
                used_ms: used.map(|t| (t - at) as f64 / MS as f64),
                recovered_ms: recovered(&arrived, c.at_ms, capacity),
            }
        })
        .collect();
    let end = (scenario.run_ms * MS as f64) as u64;
    let ends = capacities.iter().skip(1).map(|(t, _)| *t).chain([end]);
    let phases = capacities.iter().zip(ends).map(|((from, rates), to)| {
        let capacity = rates.iter().sum::<f64>() / 8.0;
        let from_ms = *from as f64 / MS as f64;
        let quiet = losses.iter().filter(|l| l.at_ms == from_ms).map(|l| l.over_ms);
        let found = returns.iter().filter(|r| r.at_ms == from_ms).filter_map(|r| r.recovered_ms);
        let begin = from + (quiet.chain(found).fold(0.0, f64::max) * MS as f64) as u64;
        Phase {
            from_ms,
            to_ms: to as f64 / MS as f64,
            capacity,
            share: share(run, (*from, to), capacity),
            settled: share(run, (begin.min(to), to), capacity),
            times: times(run, *from, to),
        }
    });
    let bytes = run.slices.iter().filter(|s| s.fate == SliceEnd::Done).map(|s| s.bytes).sum();
    Summary {
        phases: phases.collect(),
        times: times(run, 0, end),
        rate: bytes as f64 / end as f64,
        again: run.slices.iter().filter(|s| s.again).map(|s| s.bytes).sum(),
        bytes,
        losses,
        returns,
    }
}

/// Bytes arrived between two times, as a share of the capacity.
fn share(run: &Run, (from, to): (u64, u64), capacity: f64) -> f64 {
    let inside = |s: &&super::run::Slice| s.fate == SliceEnd::Done && (from..to).contains(&s.ended);
    let bytes: u64 = run.slices.iter().filter(inside).map(|s| s.bytes).sum();
    bytes as f64 / (capacity * to.saturating_sub(from).max(1) as f64)
}

fn times(run: &Run, from: u64, to: u64) -> Times {
    let begun = run.transfers.iter().filter(|t| (from..to).contains(&t.submitted));
    let mut took: Vec<u64> = begun.map(|t| t.ended - t.submitted).collect();
    took.sort_unstable();
    let at =
        |share: usize| took.get(took.len() * share / 100).map_or(f64::NAN, |t| *t as f64 / 1e3);
    Times { transfers: took.len(), median_us: at(50), p99_us: at(99) }
}

fn loss(run: &Run, at_ms: f64, rail: u8) -> RailLoss {
    let at = (at_ms * MS as f64) as u64;
    let flying: Vec<_> =
        run.transfers.iter().filter(|t| t.submitted < at && t.ended >= at).collect();
    // What has not ended counts as long as it was seen.
    let last = run.transfers.iter().map(|t| t.ended).max().unwrap_or(at);
    let stuck = run.unfinished.iter().filter(|s| **s < at).map(|s| last.max(at) - s);
    let longest = flying.iter().map(|t| t.ended - t.submitted).chain(stuck.clone()).max();
    let over = flying.iter().map(|t| t.ended - at).chain(stuck.clone()).max().unwrap_or(0);
    let before = times(run, 0, at).median_us / 1e3;
    RailLoss {
        at_ms,
        rail,
        in_flight: flying.len() + stuck.count(),
        over_ms: over as f64 / MS as f64,
        added_ms: longest.unwrap_or(0) as f64 / MS as f64 - before,
    }
}

/// Time from `at_ms` to the end of the first span in which the expected bytes arrive.
fn recovered(arrived: &[u64], at_ms: f64, capacity: f64) -> Option<f64> {
    let from = at_ms.ceil() as usize;
    let enough = AIM * capacity * (SPAN as u64 * MS) as f64;
    let spans = arrived.get(from..)?.windows(SPAN);
    let first = spans.into_iter().position(|span| span.iter().sum::<u64>() as f64 >= enough)?;
    Some((from + first + SPAN) as f64 - at_ms)
}
