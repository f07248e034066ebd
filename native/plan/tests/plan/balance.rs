//! Replicas share the load; boxes are cut only where that levels it.

use crate::cases;
use crate::common::{container, leaf, mesh, tensor};
use fabric_plan::Placement::{Replicate, Shard};
use fabric_plan::{plan, ContainerSpec, Options, Plan, Role, Side, SideSpec};
use proptest::prelude::*;

fn planned(
    ranks: (u32, u32),
    containers: (Vec<ContainerSpec>, Vec<ContainerSpec>),
    min_split_bytes: u64,
) -> Plan {
    let side = |role, ranks, containers| {
        Side::from_spec(role, SideSpec { ranks: (0..ranks).collect(), containers }).unwrap()
    };
    let options = Options { min_split_bytes, ..Options::default() };
    let source = side(Role::Source, ranks.0, containers.0);
    plan(source, side(Role::Target, ranks.1, containers.1), options).unwrap()
}

#[test]
fn replicas_of_every_shard_send_alike() {
    // Hybrid sharding: 3 replicas of 4 shards push to 5 whole engines.
    let t = tensor("w", &[4096, 64], 2);
    let ranks: Vec<u32> = (0..12).collect();
    let held = container("w", leaf(&t, &mesh(&ranks, &[3, 4]), &[Replicate, Shard { dim: 0 }]));
    let wanted = container("w", leaf(&t, &mesh(&ranks[..5], &[5]), &[Replicate]));
    let plan = planned((12, 5), (vec![held], vec![wanted]), 1024);
    let b = plan.balance();
    assert!(b.sender_imbalance < 1.05, "{b:?}");
    assert!((b.receiver_imbalance - 1.0).abs() < 1e-9);
}

#[test]
fn one_box_is_cut_when_that_levels_the_load() {
    let t = tensor("w", &[1024, 128], 2);
    let held = container("w", leaf(&t, &mesh(&[0, 1, 2, 3], &[4]), &[Replicate]));
    let wanted = container("w", leaf(&t, &mesh(&[0], &[1]), &[Replicate]));
    let plan = planned((4, 1), (vec![held], vec![wanted]), 1024);
    let b = plan.balance();
    assert!(b.sender_imbalance < 1.05, "{b:?}");
    assert_eq!(plan.expected_pages(0).unwrap(), 4, "each replica sends one run");
}

#[test]
fn small_boxes_are_never_cut_and_keep_to_few_sources() {
    let held: Vec<ContainerSpec> = (0..64)
        .map(|i| {
            let t = tensor(&format!("w{i}"), &[64], 4);
            container(&t.name, leaf(&t, &mesh(&[0, 1, 2, 3], &[4]), &[Replicate]))
        })
        .collect();
    let wanted = (0..64)
        .map(|i| {
            let t = tensor(&format!("w{i}"), &[64], 4);
            container(&t.name, leaf(&t, &mesh(&[0, 1, 2, 3], &[4]), &[Replicate]))
        })
        .collect();
    let plan = planned((4, 4), (held, wanted), 64 << 10);
    assert_eq!(plan.total_copies(), 64 * 4);
    assert_eq!(plan.links().count(), 4, "one replica sends to each target");
    assert!(plan.balance().sender_imbalance < 1.05);
}

#[test]
fn fixed_loads_steer_what_can_be_chosen() {
    // Rank 0 alone holds `a`; `b` is on both, so rank 1 sends all of it.
    let (a, b) = (tensor("a", &[1024], 4), tensor("b", &[1024], 4));
    let both = mesh(&[0, 1], &[2]);
    let held = vec![
        container("a", leaf(&a, &mesh(&[0], &[1]), &[Replicate])),
        container("b", leaf(&b, &both, &[Replicate])),
    ];
    let wanted = [&a, &b].map(|t| container(&t.name, leaf(t, &mesh(&[0], &[1]), &[Replicate])));
    let plan = planned((2, 1), (held, wanted.to_vec()), 16);
    assert_eq!(plan.balance().sent, vec![(0, 4096), (1, 4096)]);
}

#[test]
fn sources_start_with_different_targets() {
    let t = tensor("w", &[64], 4);
    let ranks: Vec<u32> = (0..4).collect();
    let held = container("w", leaf(&t, &mesh(&ranks, &[4]), &[Shard { dim: 0 }]));
    let wanted = container("w", leaf(&t, &mesh(&ranks, &[4]), &[Replicate]));
    let plan = planned((4, 4), (vec![held], vec![wanted]), 1);
    let first: Vec<u32> =
        ranks.iter().map(|&r| plan.for_source(r).unwrap().next().unwrap().peer).collect();
    assert_eq!(first, vec![0, 1, 2, 3]);
}

proptest! {
    #![proptest_config(cases(200))]

    #[test]
    fn with_replicas_everywhere_senders_are_balanced_within_a_few_percent(
        sources in 1u32..9,
        targets in 1u32..9,
        rows in prop::collection::vec(64u64..512, 1..12),
    ) {
        let everyone = |n: u32| mesh(&(0..n).collect::<Vec<_>>(), &[n]);
        let hold = |n: u32| -> Vec<ContainerSpec> {
            rows.iter()
                .enumerate()
                .map(|(i, &r)| {
                    let t = tensor(&format!("w{i}"), &[r, 32], 2);
                    container(&t.name, leaf(&t, &everyone(n), &[Replicate]))
                })
                .collect()
        };
        let plan = planned((sources, targets), (hold(sources), hold(targets)), 1);
        let b = plan.balance();
        prop_assert!(b.sender_imbalance <= 1.1, "{}", b.sender_imbalance);
        prop_assert!((b.receiver_imbalance - 1.0).abs() < 1e-9);
    }
}
