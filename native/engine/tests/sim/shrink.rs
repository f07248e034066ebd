//! Shrinks a case that breaks a promise to a small one that breaks the same promise.

use crate::{case::Case, check::Violation, run::Outcome};

/// Removes faults and steps one by one, while the promise stays broken.
pub fn shrink(
    case: &Case,
    found: &Violation,
    run: &dyn Fn(&Case) -> Result<Outcome, Violation>,
) -> (Case, Violation) {
    let (mut best, mut why) = (case.clone(), found.clone());
    loop {
        let before = best.faults.len() + best.work.len();
        for part in [Part::Faults, Part::Work] {
            let mut at = part.len(&best);
            while at > 0 {
                at -= 1;
                let smaller = part.without(&best, at);
                if let Err(v) = run(&smaller) {
                    if v.promise == why.promise {
                        (best, why) = (smaller, v);
                    }
                }
            }
        }
        if best.faults.len() + best.work.len() == before {
            return (best, why);
        }
    }
}

#[derive(Clone, Copy)]
enum Part {
    Faults,
    Work,
}

impl Part {
    fn len(self, case: &Case) -> usize {
        match self {
            Self::Faults => case.faults.len(),
            Self::Work => case.work.len(),
        }
    }

    fn without(self, case: &Case, at: usize) -> Case {
        let mut case = case.clone();
        match self {
            Self::Faults => drop(case.faults.remove(at)),
            Self::Work => drop(case.work.remove(at)),
        }
        case
    }
}
