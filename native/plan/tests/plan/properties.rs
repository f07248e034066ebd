//! Properties of every pair of sides, checked against the element by element model.

use std::collections::{HashMap, HashSet};

use crate::cases;
use crate::common::arrays::{buffers, elements};
use crate::common::scenario::{scenario, Scenario};
use fabric_plan::{apply, plan, Copy, Extra, Options, Plan, Role, Side};
use proptest::prelude::*;

fn planned(s: &Scenario, min_split_bytes: u64) -> fabric_plan::Result<Plan> {
    let source = Side::from_spec(Role::Source, s.source.clone())?;
    let target = Side::from_spec(Role::Target, s.target.clone())?;
    plan(source, target, Options { extra: Extra::Ignore, min_split_bytes })
}

fn tape() -> impl Strategy<Value = Vec<u32>> {
    prop::collection::vec(any::<u32>(), 0..200)
}

/// Source and target offset of every byte of a copy.
fn bytes_of(copy: &Copy<'_>) -> Vec<(u64, u64)> {
    let mut runs = vec![(copy.src_offset, copy.dst_offset)];
    for l in copy.loops {
        runs = runs
            .iter()
            .flat_map(|(s, d)| {
                (0..l.count).map(move |i| (s + i * l.src_stride, d + i * l.dst_stride))
            })
            .collect();
    }
    runs.iter().flat_map(|(s, d)| (0..copy.run).map(move |b| (s + b, d + b))).collect()
}

proptest! {
    #![proptest_config(cases(1500))]

    #[test]
    fn every_target_byte_arrives_and_no_other_changes(tape in tape(), split in 0u64..64) {
        let s = scenario(&tape);
        let plan = planned(&s, split).unwrap();
        let sources = buffers(&s.source, true);
        let expected = buffers(&s.target, true);
        let mut got = buffers(&s.target, false);
        let from: HashMap<_, _> = sources.iter().map(|(&k, v)| (k, v.as_slice())).collect();
        let mut to: HashMap<_, _> = got.iter_mut().map(|(&k, v)| (k, v.as_mut_slice())).collect();
        apply(&plan, &from, &mut to).unwrap();
        prop_assert_eq!(got, expected);
    }

    #[test]
    fn every_target_byte_is_written_exactly_once(tape in tape(), split in 0u64..64) {
        let s = scenario(&tape);
        let plan = planned(&s, split).unwrap();
        let mut written = HashSet::new();
        for &src in &s.source.ranks {
            for t in plan.for_source(src).unwrap() {
                for (_, offset) in bytes_of(&t.copy) {
                    prop_assert!(written.insert((t.peer, t.copy.dst_container, offset)));
                }
            }
        }
        let mut wanted = 0;
        for container in &s.target.containers {
            for &rank in &s.target.ranks {
                let size = u64::from(container.dtype.itemsize);
                wanted += elements(container, rank).len() as u64 * size;
            }
        }
        prop_assert_eq!(written.len() as u64, wanted);
        prop_assert_eq!(plan.balance().total, wanted);
    }

    #[test]
    fn runs_are_as_few_as_the_two_layouts_allow(tape in tape(), split in 0u64..64) {
        let s = scenario(&tape);
        let plan = planned(&s, split).unwrap();
        for &dst in &s.target.ranks {
            let mut by_byte = HashMap::new();
            for t in plan.for_target(dst).unwrap() {
                for (from, to) in bytes_of(&t.copy) {
                    by_byte.insert((t.copy.dst_container, to), (t.peer, t.copy.src_container, from));
                }
            }
            let starts = by_byte.iter().filter(|((c, to), (peer, from_c, from))| {
                let before = to.checked_sub(1).and_then(|b| by_byte.get(&(*c, b)));
                before != from.checked_sub(1).map(|f| (*peer, *from_c, f)).as_ref()
                    || before.is_none()
            });
            let fewest = starts.count() as u64;
            let pages = plan.expected_pages(dst).unwrap();
            prop_assert!(pages <= 2 * fewest, "{pages} runs where {fewest} would do");
            let copies = plan.for_target(dst).unwrap().count() as u64;
            prop_assert!(copies <= pages);
        }
    }

    #[test]
    fn equal_sides_give_equal_bytes_and_bytes_give_the_plan_back(tape in tape()) {
        let s = scenario(&tape);
        let (a, b) = (planned(&s, 8).unwrap(), planned(&s, 8).unwrap());
        let bytes = a.to_bytes();
        prop_assert_eq!(&bytes, &b.to_bytes());
        let back = Plan::from_bytes(&bytes).unwrap();
        prop_assert_eq!(back.digest(), a.digest());
        prop_assert_eq!(back, a);
    }

    #[test]
    fn counters_links_and_both_ends_agree(tape in tape()) {
        let s = scenario(&tape);
        let plan = planned(&s, 8).unwrap();
        for &dst in &s.target.ranks {
            let pages: u64 = plan.for_target(dst).unwrap().map(|t| t.copy.pages()).sum();
            prop_assert_eq!(plan.expected_pages(dst).unwrap(), pages);
        }
        for l in plan.links() {
            let sent: u64 = plan.for_source(l.src).unwrap()
                .filter(|t| t.peer == l.dst).map(|t| t.copy.bytes()).sum();
            prop_assert_eq!(sent, l.bytes);
            prop_assert_eq!(plan.bytes_on_link(l.src, l.dst), l.bytes);
        }
        for &src in &s.source.ranks {
            let order: Vec<u32> =
                plan.for_source(src).unwrap().map(|t| t.copy.dst_container).collect();
            prop_assert!(order.windows(2).all(|w| w[0] <= w[1]), "urgent containers come first");
            let mut seen = HashSet::new();
            let mut first: Vec<u32> =
                plan.for_source(src).unwrap().map(|t| t.copy.src_container).collect();
            first.retain(|&container| seen.insert(container));
            prop_assert_eq!(plan.sending_order(src).unwrap(), first);
        }
    }

    #[test]
    fn local_containers_are_what_the_model_says(tape in tape()) {
        let s = scenario(&tape);
        let plan = planned(&s, 8).unwrap();
        for &rank in &s.target.ranks {
            let found = plan.target().local_containers(Role::Target, rank).unwrap();
            for (index, container) in s.target.containers.iter().enumerate() {
                let size = u64::from(container.dtype.itemsize);
                let reach = elements(container, rank).iter().map(|(o, _)| o + size).max();
                let local = found.iter().find(|c| c.index == index as u32);
                let bytes = local.map_or(0, |c| c.bytes);
                prop_assert!(bytes >= reach.unwrap_or(0));
                if !matches!(container.layout, fabric_plan::Layout::Pad { .. }) {
                    prop_assert_eq!(bytes, reach.unwrap_or(0));
                }
            }
        }
    }

    #[test]
    fn every_plan_can_be_explained(tape in tape()) {
        let s = scenario(&tape);
        let plan = planned(&s, 8).unwrap();
        for container in &s.target.containers {
            let text = plan.explain(Some(&container.name), None).unwrap();
            prop_assert!(text.contains(&container.name) || text.contains("nothing moves"));
        }
    }
}
