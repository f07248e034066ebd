//! One suite for every transport. Each test runs on every world below; its name begins with the
//! promise (design §3) that it checks. Tests that need NICs are ignored: `tests/rdma` runs them in
//! a guest with soft-RoCE devices.

mod admission;
mod grants;
mod losses;
mod nics;
mod opening;
mod rails;
mod suite;
mod tags;
mod worlds;

/// A module of tests named after the transport that they run over.
macro_rules! on_threads {
    ($transport:ident: $($test:ident),*) => {
        mod $transport {
            $(#[test] fn $test() {
                crate::suite::$test(&mut crate::worlds::Threads::new(stringify!($transport)));
            })*
        }
    };
}

macro_rules! on_every_transport {
    ($($test:ident),* $(,)?) => {
        on_threads! { shm: $($test),* }
        on_threads! { tcp: $($test),* }
        mod sim {
            $(#[test] fn $test() {
                for seed in 0..20 {
                    crate::suite::$test(&mut crate::worlds::Sim::new(seed));
                }
            })*
        }
        mod sim_rails {
            $(#[test] fn $test() {
                for seed in 0..20 {
                    crate::suite::$test(&mut crate::worlds::Sim::with_rails(seed));
                }
            })*
        }
        mod verbs {
            $(#[test] #[ignore = "needs RDMA devices"] fn $test() {
                crate::suite::$test(&mut crate::nics::verbs());
            })*
        }
        mod libfabric_verbs {
            $(#[test] #[ignore = "needs RDMA devices"] fn $test() {
                crate::nics::libfabric("verbs;ofi_rxm", None, crate::suite::$test);
            })*
        }
        mod libfabric_tcp {
            $(#[test] fn $test() { crate::nics::libfabric("tcp", None, crate::suite::$test) })*
        }
        mod libfabric_shm {
            $(#[test] fn $test() { crate::nics::libfabric("shm", None, crate::suite::$test) })*
        }
        mod libfabric_srd {
            $(#[test] fn $test() {
                crate::nics::libfabric("tcp", Some(7), crate::suite::$test);
            })*
        }
    };
}

on_every_transport! {
    a_write_arrives_and_counts_once,
    ic_1_counts_are_logical,
    ic_1_a_cut_write_counts_once,
    ic_1_a_write_in_pieces_counts_once,
    ic_2_bytes_have_landed_when_the_counter_counts_them,
    ic_5_early_arrivals_are_kept,
    ic_6_a_released_counter_sees_no_late_arrivals,
    counters_fire_in_order_and_rounds_do_not_mix,
    shuffled_pages_land_where_they_belong,
    reads_fetch,
    batches_mix_operations_and_peers,
    preparing_moves_and_counts_nothing,
    scatter_and_barrier_reach_every_peer,
    messages_arrive_whole_and_wait_for_room,
    a_sender_of_many_messages_keeps_out_no_other,
    messages_too_long_for_the_pool_are_refused,
    mr_2_a_deregistered_region_is_stale,
    mr_1_deregistration_waits_for_peers,
    mr_1_nothing_lands_once_a_region_is_quiet,
    mr_1_an_abandoned_transfer_reports_when_it_is_quiet,
    mr_2_revoking_one_peers_grant_leaves_the_others,
    mr_3_bounds_hold_on_both_sides,
    mr_3_memory_beside_a_region_is_out_of_reach,
    mr_3_a_grant_reaches_no_further_than_its_part,
    mr_3_a_grant_to_one_peer_is_refused_to_all_others,
    mr_2_a_grant_expires,
    mr_2_a_nested_grant_gives_no_more_than_its_parent,
    mr_1_a_region_is_quiet_when_all_its_grants_are,
    rs_1_no_read_ends_well_without_its_bytes,
    rs_2_the_transport_in_use_is_visible,
    rs_4_a_closed_peer_ends_everything,
    rs_4_an_expectation_ends_by_its_deadline,
    ic_5_a_cancelled_wait_takes_no_arrivals,
    an_engine_can_write_to_itself,
    both_sides_connect_at_once,
    bad_requests_are_refused_before_anything_is_sent,
    foreign_memory_is_reached,
    files_are_reached_or_refused_with_a_reason,
    many_small_writes_all_count,
    many_small_writes_of_few_requests_all_count,
    memory_of_another_engine_of_the_process_is_reached_through_either,
    each_tag_is_reported_once_with_its_bytes,
    closing_in_any_order_is_safe,
}
