//! Every byte of every needed row arrives once, from the right place, and nothing else is touched.

use proptest::prelude::*;
use proptest::sample::Index;

use fabric_kvcache::pairing::Pairing;

use crate::caches::{forms, instance, models, Form, Model};
use crate::replay::{check, send, sent_tokens, Request};

/// Two instances of the same model.
#[derive(Clone, Debug)]
struct Instances {
    groups: Vec<(Model, Form, Form)>,
    sources: u32,
    targets: u32,
}

fn instances() -> impl Strategy<Value = Instances> {
    let groups = prop::collection::vec((models(), forms(48), forms(48)), 1..3);
    (groups, 1u32..6, 1u32..6).prop_map(|(mut groups, sources, targets)| {
        for (i, (model, _, _)) in groups.iter_mut().enumerate() {
            model.name = format!("g{i}");
        }
        Instances { groups, sources, targets }
    })
}

/// Choices that make a request once the page sizes are known.
type Choices = (u64, Index, Index, Vec<Index>, u64);

fn choices() -> impl Strategy<Value = Choices> {
    let chunks = prop::collection::vec(any::<Index>(), 0..4);
    (any::<u64>(), any::<Index>(), any::<Index>(), chunks, any::<u64>())
}

/// A request of 1 to 40 tokens; the target may have any number of whole pages of all groups.
fn request(of: &Instances, (salt, tokens, have, chunks, seed): Choices) -> Request {
    let n = tokens.index(40) as u64 + 1;
    let whole = |t: &u64| of.groups.iter().all(|(_, _, f)| t % u64::from(f.page_tokens) == 0);
    let prefixes: Vec<u64> = (0..=n).filter(whole).collect();
    let have = *have.get(&prefixes);
    let mut ends: Vec<u64> = chunks.iter().map(|c| c.index(n as usize + 1) as u64).collect();
    ends.push(n);
    ends.sort_unstable();
    let mut random = fastrand::Rng::with_seed(seed);
    let mut table = |form: &Form| {
        let mut pages: Vec<u32> = (0..form.pages).collect();
        random.shuffle(&mut pages);
        pages.truncate(n.div_ceil(form.page_tokens.into()) as usize);
        pages
    };
    let src_tables = of.groups.iter().map(|(_, f, _)| table(f)).collect();
    let dst_tables = of.groups.iter().map(|(_, _, f)| table(f)).collect();
    Request { tokens: have..n, salt, src_tables, dst_tables, chunks: ends }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn every_needed_byte_arrives_once_and_from_the_right_place(
        of in instances(),
        choices in choices(),
    ) {
        let side = |target: bool| -> Vec<(Model, Form)> {
            let form = |(m, s, t): &(Model, Form, Form)| (m.clone(), if target { t } else { s }.clone());
            of.groups.iter().map(form).collect()
        };
        let source = instance(&side(false), of.sources);
        let target = instance(&side(true), of.targets);
        let pairing = Pairing::new(&source, &target).unwrap();
        let request = request(&of, choices);
        let sent: Vec<_> = (0..of.groups.len())
            .map(|g| sent_tokens(&pairing, g, request.tokens.clone(), of.groups[g].0.window))
            .collect();
        for (rank, layout) in target.iter().enumerate() {
            let memory = send(&pairing, &source, layout, rank, &request);
            check(&memory, &source, layout, &request, &sent);
            let expected = pairing.expected(rank, request.salt, request.tokens.clone()).unwrap();
            prop_assert_eq!(memory.counted, expected);
        }
    }
}
