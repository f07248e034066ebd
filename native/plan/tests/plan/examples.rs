//! Layouts of real systems, each checked bit by bit against the element by element model.

use std::collections::HashMap;

use crate::common::arrays::buffers;
use crate::common::{container, leaf, mesh, tensor};
use fabric_plan::Placement::{Replicate, Shard, StridedShard};
use fabric_plan::{
    apply, plan, ContainerSpec, Extra, Layout, Options, Plan, Role, Side, SideSpec, TensorSpec,
};

fn moved(source: Vec<ContainerSpec>, target: Vec<ContainerSpec>, ranks: u32) -> Plan {
    let side = |containers| SideSpec { ranks: (0..ranks).collect(), containers };
    let (source, target) = (side(source), side(target));
    let sides = (
        Side::from_spec(Role::Source, source.clone()).unwrap(),
        Side::from_spec(Role::Target, target.clone()).unwrap(),
    );
    let plan =
        plan(sides.0, sides.1, Options { extra: Extra::Refuse, min_split_bytes: 1 }).unwrap();
    let from = buffers(&source, true);
    let mut got = buffers(&target, false);
    let from: HashMap<_, _> = from.iter().map(|(&k, v)| (k, v.as_slice())).collect();
    let mut to: HashMap<_, _> = got.iter_mut().map(|(&k, v)| (k, v.as_mut_slice())).collect();
    apply(&plan, &from, &mut to).unwrap();
    assert_eq!(got, buffers(&target, true));
    plan
}

fn slice(tensor: &TensorSpec, rows: (u64, u64), on: &[u32]) -> Layout {
    let mut slice: Vec<(u64, u64)> = tensor.shape.iter().map(|&n| (0, n)).collect();
    slice[0] = rows;
    Layout::Leaf {
        tensor: tensor.clone(),
        mesh: mesh(on, &[on.len() as u32]),
        placements: vec![Shard { dim: 0 }],
        slice: Some(slice),
    }
}

#[test]
fn fsdp_over_tensor_parallel_trainers_fill_fused_gate_up() {
    let (gate, up) = (tensor("gate", &[22, 6], 2), tensor("up", &[22, 6], 2));
    let trainers = mesh(&[0, 1, 2, 3], &[2, 2]);
    let placed = [StridedShard { dim: 0, split_factor: 2 }, Shard { dim: 0 }];
    let engines = mesh(&[3, 1], &[2]);
    let fused = Layout::Concat {
        axis: 0,
        parts: vec![
            leaf(&gate, &engines, &[Shard { dim: 0 }]),
            leaf(&up, &engines, &[Shard { dim: 0 }]),
        ],
    };
    moved(
        vec![
            container("gate", leaf(&gate, &trainers, &placed)),
            container("up", leaf(&up, &trainers, &placed)),
        ],
        vec![container("gate_up", fused)],
        4,
    );
}

#[test]
fn few_kv_heads_are_replicated_over_many_engine_ranks() {
    let heads = |name, n: u64| tensor(name, &[n * 4, 8], 2);
    let (q, k) = (heads("q", 8), heads("k", 2));
    let trainers = mesh(&[0, 1, 2], &[3]);
    let engines = [mesh(&[0, 1, 2, 3], &[4]), mesh(&[0, 1, 2, 3], &[2, 2])];
    let qk = Layout::Concat {
        axis: 0,
        parts: vec![
            leaf(&q, &engines[0], &[Shard { dim: 0 }]),
            leaf(&k, &engines[1], &[Shard { dim: 0 }, Replicate]),
        ],
    };
    moved(
        vec![
            container("q", leaf(&q, &trainers, &[Shard { dim: 0 }])),
            container("k", leaf(&k, &trainers, &[Shard { dim: 0 }])),
        ],
        vec![container("qk", qk)],
        4,
    );
}

#[test]
fn interleaved_attention_of_megatron_is_a_concat_of_slices() {
    let (q, k, v) = (tensor("q", &[16, 4], 2), tensor("k", &[4, 4], 2), tensor("v", &[4, 4], 2));
    let groups = |rank: u32, owned: [u64; 2]| {
        let parts = owned
            .iter()
            .flat_map(|&g| {
                [
                    slice(&q, (g * 4, 4), &[rank]),
                    slice(&k, (g, 1), &[rank]),
                    slice(&v, (g, 1), &[rank]),
                ]
            })
            .collect();
        container(&format!("qkv{rank}"), Layout::Concat { axis: 0, parts })
    };
    let engines = mesh(&[0, 1], &[2]);
    let wanted = [&q, &k, &v].map(|t| leaf(t, &engines, &[Shard { dim: 0 }]));
    moved(
        vec![groups(0, [0, 1]), groups(1, [2, 3])],
        vec![container("qkv", Layout::Concat { axis: 0, parts: wanted.to_vec() })],
        2,
    );
}

#[test]
fn named_experts_become_stacked_ones_and_back() {
    let experts: Vec<TensorSpec> = (0..6).map(|e| tensor(&format!("e{e}"), &[4, 8], 2)).collect();
    let named: Vec<ContainerSpec> = experts
        .iter()
        .enumerate()
        .map(|(e, t)| {
            let group = if e < 3 { mesh(&[0, 1], &[2]) } else { mesh(&[2, 3], &[2]) };
            container(&t.name, leaf(t, &group, &[Shard { dim: 0 }]))
        })
        .collect();
    let stacked = Layout::Stack {
        parts: (0..6)
            .map(|e| leaf(&experts[e], &mesh(&[e as u32 % 3], &[1]), &[Replicate]))
            .collect(),
    };
    moved(named.clone(), vec![container("w", stacked.clone())], 4);
    moved(vec![container("w", stacked)], named, 4);
}

#[test]
fn a_stack_keeps_only_the_parts_a_rank_has_rows_of() {
    let (a, b) = (tensor("a", &[2, 3], 4), tensor("b", &[2, 3], 4));
    let parts = vec![
        leaf(&a, &mesh(&[0, 1, 2], &[3]), &[Shard { dim: 0 }]),
        leaf(&b, &mesh(&[2, 1, 0], &[3]), &[Shard { dim: 0 }]),
    ];
    let whole = |t| {
        container(
            &format!("all {}", t),
            leaf(if t == "a" { &a } else { &b }, &mesh(&[0], &[1]), &[Replicate]),
        )
    };
    let plan =
        moved(vec![whole("a"), whole("b")], vec![container("both", Layout::Stack { parts })], 3);
    let shape = |rank| plan.target().local_containers(Role::Target, rank).unwrap()[0].shape.clone();
    assert_eq!([shape(0), shape(1), shape(2)], [vec![1, 1, 3], vec![2, 1, 3], vec![1, 1, 3]]);
}

#[test]
fn overlapping_slices_of_equal_size_keep_their_own_origins() {
    let t = tensor("t", &[8, 2], 2);
    let source =
        vec![container("low", slice(&t, (0, 5), &[0])), container("high", slice(&t, (3, 5), &[1]))];
    let wanted = container("all", leaf(&t, &mesh(&[0, 1], &[2]), &[Replicate]));
    moved(source, vec![wanted], 2);
}

#[test]
fn vocabulary_padding_is_left_alone() {
    let t = tensor("embed", &[10, 3], 2);
    let rows = |r: u64| slice(&t, (r * 4, 4.min(10 - r * 4)), &[r as u32]);
    let padded = (0..3).map(|r| Layout::Pad { part: Box::new(rows(r)), shape: vec![4, 3] });
    let wanted = container("embed", Layout::Concat { axis: 0, parts: padded.collect() });
    let held = leaf(&t, &mesh(&[0, 1, 2], &[3]), &[Shard { dim: 0 }]);
    moved(vec![container("embed", held)], vec![wanted], 3);
}

#[test]
fn adjacent_tensors_of_one_buffer_travel_as_one_run() {
    let (q, k, v) = (tensor("q", &[8, 4], 2), tensor("k", &[2, 4], 2), tensor("v", &[2, 4], 2));
    let one = mesh(&[0], &[1]);
    let fused = Layout::Concat {
        axis: 0,
        parts: [&q, &k, &v].map(|t| leaf(t, &one, &[Replicate])).to_vec(),
    };
    let plan = moved(vec![container("a", fused.clone())], vec![container("b", fused)], 1);
    assert_eq!(plan.expected_pages(0).unwrap(), 1);
    assert_eq!(plan.total_copies(), 1);
}
