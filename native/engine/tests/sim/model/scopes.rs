//! The explored scopes: two nodes, a few operations, and a budget of faults.

use crate::case::{Case, Shape, Step, MS, US};

#[derive(Clone, Copy, Debug, Default)]
pub struct Budget {
    /// Lost ends of links, wherever that changes anything.
    pub losses: u8,
    /// Crashed nodes.
    pub crashes: u8,
    /// Timers that fire while events are pending.
    pub hurries: u8,
}

#[derive(Clone, Debug)]
pub struct Scope {
    pub name: String,
    pub case: Case,
    pub budget: Budget,
    /// The user takes each step at any time; otherwise all steps come first.
    pub anywhere: bool,
}

/// What a link's receipt reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tells {
    InOrder,
    /// As `InOrder`, with a count for each page.
    PagesInOrder,
    Numbers,
    Nothing,
}

const BYTES: u64 = 64;

fn shape(tells: Tells, rails: u8) -> Shape {
    Shape {
        rails: vec![rails; 2],
        ordered: matches!(tells, Tells::InOrder | Tells::PagesInOrder),
        page_counts: matches!(tells, Tells::PagesInOrder | Tells::Nothing),
        half_open: 0,
        max_bytes: BYTES,
        window: 16,
        longest_delay: US,
        rate: None,
        peer_timeout: 2000 * MS,
        skew: 0,
        connected: true,
    }
}

/// Makes steps from their names.
fn work(names: &str) -> Vec<Step> {
    let write =
        |len, within| Step::Write { from: 0, to: 1, len, counter: Some(0), rail: None, within };
    let pages =
        |pages| Step::Pages { from: 0, to: 1, len: 8, pages, counter: Some(0), within: None };
    let step = |name: &str| match name {
        "write" => write(16, None),
        "hurried write" => write(16, Some(MS)),
        // One slice more than fits one work request, so that a count must confirm them.
        "cut write" => write(BYTES + 8, None),
        "hurried cut write" => write(BYTES + 8, Some(MS)),
        "plain write" => {
            Step::Write { from: 0, to: 1, len: 16, counter: None, rail: None, within: None }
        }
        "pages" => pages(2),
        "chunks of pages" => pages(5),
        "read" => Step::Read { from: 0, of: 1, len: 16, pages: 1, within: None },
        "back" => {
            Step::Write { from: 1, to: 0, len: 16, counter: Some(0), rail: None, within: None }
        }
        "message" => Step::Message { from: 0, to: 1, len: 8 },
        "expect" => Step::Expect { at: 1, counter: 0, n: 1, writer: Some(0), within: 10_000 * MS },
        _ => unreachable!("{name}"),
    };
    names.split(", ").map(step).collect()
}

fn scope(names: &str, tells: Tells, rails: u8, budget: Budget) -> Scope {
    let work = work(names).into_iter().map(|s| (0, s)).collect();
    let case = Case { seed: 1, shape: shape(tells, rails), work, faults: Vec::new() };
    let Budget { losses, crashes, hurries } = budget;
    let name = format!(
        "{names}; {tells:?}, {rails} rails, {losses} losses, {crashes} crashes, {hurries} timers"
    );
    Scope { name, case, budget, anywhere: false }
}

fn losses(losses: u8) -> Budget {
    Budget { losses, ..Budget::default() }
}

/// The scopes of `cargo test`. Half of all runs are those of three of them, which are left out
/// where few runs are asked for.
pub fn small(few: bool) -> Vec<Scope> {
    use Tells::*;
    let mut scopes = Vec::new();
    let mut both = |scope: &dyn Fn(Tells) -> Scope| scopes.extend([InOrder, Numbers].map(scope));
    for names in ["write, write", "cut write", "pages", "read", "write, expect", "message, write"] {
        both(&|tells| scope(names, tells, 1, losses(1)));
    }
    for names in ["write, write", "cut write"] {
        both(&|tells| scope(names, tells, 2, losses(1)));
    }
    let crash = Budget { losses: 1, crashes: 1, hurries: 0 };
    both(&|tells| scope("write, expect", tells, 1, crash));
    let hurry = Budget { losses: 1, crashes: 0, hurries: 1 };
    both(&|tells| scope("hurried cut write", tells, 1, hurry));
    both(&|tells| anywhere(scope("write, write", tells, 1, losses(1))));
    if few {
        scopes.pop();
    } else {
        scopes.extend([InOrder, Numbers].map(|tells| scope("write", tells, 1, losses(2))));
    }
    scopes.push(scope("pages", PagesInOrder, 1, losses(1)));
    scopes.push(scope("write, write", Nothing, 1, losses(1)));
    only(scopes)
}

/// The scopes of `make soak`: two losses, two rails, three operations.
pub fn large() -> Vec<Scope> {
    use Tells::*;
    let mut scopes = Vec::new();
    for tells in [InOrder, PagesInOrder, Numbers, Nothing] {
        for names in ["cut write", "write, write", "pages", "write, back", "chunks of pages, read"]
        {
            for rails in [1, 2] {
                scopes.push(scope(names, tells, rails, losses(2)));
            }
            scopes.push(scope(names, tells, 1, Budget { losses: 1, crashes: 1, hurries: 1 }));
            scopes.push(anywhere(scope(names, tells, 2, losses(1))));
        }
        scopes.push(scope("write, cut write, read", tells, 2, losses(1)));
    }
    only(scopes)
}

fn anywhere(scope: Scope) -> Scope {
    Scope { name: format!("{}, steps at any time", scope.name), anywhere: true, ..scope }
}

/// Keeps the scopes whose name contains `FABRIC_MODEL`.
fn only(mut scopes: Vec<Scope>) -> Vec<Scope> {
    let part = std::env::var("FABRIC_MODEL").unwrap_or_default();
    scopes.retain(|s| s.name.contains(&part));
    scopes
}
