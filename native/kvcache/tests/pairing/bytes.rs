//! Every byte of every needed row arrives once, from the right place, and nothing else is touched.

use fabric_kvcache::pairing::Pairing;
use proptest::prelude::*;

use crate::replay::{check, fewest, send};
use crate::requests::{choices, instances, request};

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, ..ProptestConfig::default() })]

    #[test]
    fn every_needed_byte_arrives_once_and_from_the_right_place(
        of in instances(),
        choices in choices(),
    ) {
        let (source, target) = (of.source(), of.target());
        let pairing = Pairing::new(&source, &target).unwrap();
        let request = request(&of, choices);
        let sent = of.sent(&pairing, &request.tokens);
        for (rank, layout) in target.iter().enumerate() {
            let memory = send(&pairing, &source, layout, rank, &request);
            check(&memory, &source, layout, &request, &sent);
        }
    }

    /// IC-1: the decoder knows what to wait for before anything is sent.
    #[test]
    fn however_a_request_is_chunked_the_target_counts_what_it_expects(
        of in instances(),
        choices in choices(),
    ) {
        let (source, target) = (of.source(), of.target());
        let pairing = Pairing::new(&source, &target).unwrap();
        let request = request(&of, choices);
        for (rank, layout) in target.iter().enumerate() {
            let memory = send(&pairing, &source, layout, rank, &request);
            let expected = pairing.expected(rank, request.salt, request.tokens.clone()).unwrap();
            prop_assert_eq!(memory.counted, expected);
        }
    }

    #[test]
    fn a_cell_takes_as_few_writes_as_it_has_contiguous_runs(
        of in instances(),
        choices in choices(),
    ) {
        let (source, target) = (of.source(), of.target());
        let pairing = Pairing::new(&source, &target).unwrap();
        let request = request(&of, choices);
        let sent = of.sent(&pairing, &request.tokens);
        for (rank, layout) in target.iter().enumerate() {
            let memory = send(&pairing, &source, layout, rank, &request);
            let fewest = fewest(&memory, &pairing, layout, &request, &sent);
            prop_assert_eq!(memory.counted, fewest);
        }
    }
}
