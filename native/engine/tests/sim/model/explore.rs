//! Explores every path. A run follows a prefix of choices, and takes the first untried choice after
//! it. It stops at a state that was seen before.

use std::{
    collections::HashMap,
    fmt,
    panic::{catch_unwind, AssertUnwindSafe},
};

use super::{path::Path, scopes::Scope};
use crate::check::Violation;

/// Runs between two lines of progress.
const PROGRESS: usize = 100_000;

/// The result of an exploration.
#[derive(Debug, Default)]
pub struct Explored {
    /// Distinct states with a choice.
    pub states: usize,
    /// Runs from the start.
    pub runs: usize,
    /// Complete orders of events that these runs stand for.
    pub orders: f64,
    pub longest: usize,
    /// The limit of runs was reached before all paths were explored.
    pub cut_short: bool,
    pub broken: Option<Broken>,
}

/// A broken promise, and the path to it.
#[derive(Debug)]
pub struct Broken {
    pub violation: Violation,
    pub choices: Vec<usize>,
    pub words: Vec<String>,
}

impl fmt::Display for Explored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { states, runs, orders, longest, .. } = self;
        let all = if self.cut_short { "not all: " } else { "" };
        write!(
            f,
            "{all}{states} states, {runs} runs, {orders:.3e} orders of up to {longest} events"
        )
    }
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}\n  {}\n  choices: {:?}",
            self.violation,
            self.words.join("\n  "),
            self.choices
        )
    }
}

impl Broken {
    fn new(scope: &Scope, violation: Violation, choices: Vec<usize>) -> Self {
        let words = tell(scope, &choices);
        Self { violation, choices, words }
    }
}

/// A state on the current path, and the choice that is explored.
struct Fork {
    state: u64,
    at: usize,
    of: usize,
    /// Complete orders from here that were counted so far.
    orders: f64,
}

/// Explores all paths, with at most `most` runs.
pub fn explore(scope: &Scope, most: usize) -> Explored {
    Explorer::default().explore(scope, most)
}

/// Explores every order in a run of its own, for comparison.
pub fn explore_one_by_one(scope: &Scope) -> Explored {
    Explorer { forgetful: true, ..Explorer::default() }.explore(scope, usize::MAX)
}

/// Takes random paths, for scopes that are too large to explore.
pub fn walk(scope: &Scope, walks: usize) -> Option<Broken> {
    for seed in 0..walks as u64 {
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut choices = Vec::new();
        let went = guarded(|| {
            let mut path = Path::new(scope);
            loop {
                let moves = path.moves()?;
                if moves.is_empty() {
                    return path.end();
                }
                let choice = rng.usize(..moves.len());
                choices.push(choice);
                path.take(moves[choice])?;
            }
        });
        if let Err(violation) = went {
            return Some(Broken::new(scope, violation, choices));
        }
    }
    None
}

/// Reports a panic of the engine as a violation.
fn guarded<T>(f: impl FnOnce() -> Result<T, Violation>) -> Result<T, Violation> {
    catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(|panic| {
        let what = panic.downcast_ref::<String>().cloned().unwrap_or_default();
        Err(Violation { promise: "a panic", at: 0, what })
    })
}

#[derive(Default)]
struct Explorer {
    trail: Vec<Fork>,
    /// The number of complete orders from each state, and of its choices.
    seen: HashMap<u64, (f64, usize)>,
    /// Continues at states that were seen before.
    forgetful: bool,
    explored: Explored,
}

impl Explorer {
    fn explore(mut self, scope: &Scope, most: usize) -> Explored {
        while self.explored.broken.is_none() {
            if self.explored.runs == most {
                self.explored.cut_short = true;
                break;
            }
            self.explored.runs += 1;
            if self.explored.runs.is_multiple_of(PROGRESS) {
                println!("  {}: {} runs so far", scope.name, self.explored.runs);
            }
            match guarded(|| self.run(scope)) {
                Ok(orders) => {
                    if !self.turn_back(orders) {
                        break;
                    }
                }
                Err(violation) => {
                    let choices = self.trail.iter().map(|f| f.at).collect();
                    self.explored.broken = Some(Broken::new(scope, violation, choices));
                }
            }
        }
        self.explored.states = self.seen.len();
        self.explored
    }

    /// Follows the trail, then continues to the end or to a known state. Returns the number of
    /// orders from there.
    fn run(&mut self, scope: &Scope) -> Result<f64, Violation> {
        let mut path = Path::new(scope);
        for depth in 0.. {
            let moves = path.moves()?;
            if moves.is_empty() {
                self.explored.longest = self.explored.longest.max(depth);
                path.end()?;
                return Ok(1.0);
            }
            if depth == self.trail.len() {
                let state = path.state();
                if let Some((orders, of)) = self.seen.get(&state).filter(|_| !self.forgetful) {
                    assert_eq!(*of, moves.len(), "equal states have different choices");
                    return Ok(*orders);
                }
                self.trail.push(Fork { state, at: 0, of: moves.len(), orders: 0.0 });
            }
            let fork = &self.trail[depth];
            assert_eq!(fork.of, moves.len(), "a run is not deterministic");
            path.take(moves[fork.at])?;
        }
        unreachable!("a run ends")
    }

    /// Moves the trail to the next untried choice; false if there is none.
    fn turn_back(&mut self, mut orders: f64) -> bool {
        while let Some(fork) = self.trail.last_mut() {
            fork.orders += orders;
            fork.at += 1;
            if fork.at < fork.of {
                return true;
            }
            orders = fork.orders;
            self.seen.insert(fork.state, (orders, fork.of));
            self.trail.pop();
        }
        self.explored.orders = orders;
        false
    }
}

/// Describes the choices, up to the step that breaks a promise.
fn tell(scope: &Scope, choices: &[usize]) -> Vec<String> {
    let mut words = Vec::new();
    let told = catch_unwind(AssertUnwindSafe(|| {
        let mut path = Path::new(scope);
        for choice in choices {
            let Some(next) = path.moves().ok().and_then(|m| m.get(*choice).copied()) else {
                return;
            };
            words.push(path.describe(next));
            if path.take(next).is_err() {
                return;
            }
        }
    }));
    if told.is_err() {
        words.push("and the engine panics".into());
    }
    words
}
