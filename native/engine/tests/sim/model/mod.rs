//! Model checking: every order of events at small scope, not only the orders that delays happen to
//! cause. The code under test is the engine itself, on a network without time.

mod explore;
mod path;
mod scopes;

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use explore::{explore, explore_one_by_one, walk, Explored};
use scopes::Scope;

use crate::env;
use fabric_engine::locks::Mutex;

/// Explores all scopes, two at a time.
fn explore_all(scopes: &[Scope], most: usize) -> Vec<(String, Explored)> {
    let next = AtomicUsize::new(0);
    let done: Mutex<Vec<(String, Explored)>> = Mutex::default();
    let is_broken = || done.lock().iter().any(|(_, e)| e.broken.is_some());
    std::thread::scope(|s| {
        for _ in 0..2 {
            s.spawn(|| {
                while let Some(scope) = scopes.get(next.fetch_add(1, SeqCst)) {
                    if is_broken() {
                        return;
                    }
                    let mut explored = explore(scope, most);
                    println!("{}: {explored}", scope.name);
                    if explored.cut_short {
                        explored.broken = walk(scope, most);
                        println!("{}: {most} random paths beside", scope.name);
                    }
                    done.lock().push((scope.name.clone(), explored));
                }
            });
        }
    });
    done.into_inner()
}

fn few() -> bool {
    env("FABRIC_SIM_RUNS", 20_000) < 20_000
}

fn all_hold(scopes: &[Scope], most: usize) {
    let explored = explore_all(scopes, most);
    let broken = explored.iter().filter_map(|(name, e)| Some((name, e.broken.as_ref()?)));
    let broken: Vec<_> = broken.map(|(name, broken)| format!("{name}: {broken}")).collect();
    assert!(broken.is_empty(), "{}", broken.join("\n"));
    let states: usize = explored.iter().map(|(_, e)| e.states).sum();
    let runs: usize = explored.iter().map(|(_, e)| e.runs).sum();
    let orders: f64 = explored.iter().map(|(_, e)| e.orders).sum();
    println!("{} scopes: {states} states, {runs} runs, {orders:.3e} orders", scopes.len());
}

#[test]
fn every_order_at_small_scope_keeps_the_promises() {
    all_hold(&scopes::small(few()), usize::MAX);
}

/// The state is a digest of what engines have seen: equal states must have equal continuations.
#[test]
fn pruned_orders_equal_explored_orders() {
    let scopes = scopes::small(few());
    let most = if few() { 3 } else { 8 };
    for scope in scopes.iter().filter(|s| s.budget.losses == 1).take(most) {
        let (pruned, each) = (explore(scope, usize::MAX), explore_one_by_one(scope));
        assert_eq!(pruned.orders, each.orders, "{}", scope.name);
        assert_eq!((pruned.states, pruned.longest), (each.states, each.longest), "{}", scope.name);
        assert_eq!(each.runs as f64, each.orders, "{}", scope.name);
    }
}

/// Minutes to hours: `make soak`.
#[test]
#[ignore = "takes long; make soak"]
fn every_order_at_larger_scope_keeps_the_promises() {
    all_hold(&scopes::large(), env("FABRIC_MODEL_RUNS", 200_000) as usize);
}
