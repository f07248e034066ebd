//! Pairs of instances and requests between them.

use std::ops::Range;

use fabric_kvcache::layout::CacheLayout;
use fabric_kvcache::pairing::Pairing;
use proptest::prelude::*;
use proptest::sample::Index;

use crate::caches::{cache, forms, instance, models, Form, Model};
use crate::replay::{first_needed, sent_tokens, Request};

/// How the heads are given to an instance's ranks.
#[derive(Clone, Debug)]
pub enum Holding {
    /// In order: divided, or repeated by neighbours.
    Divided(u32),
    /// Any stretch each, and all of them for the last.
    Any(Vec<(Index, Index)>),
}

/// Two instances of the same model.
#[derive(Clone, Debug)]
pub struct Instances {
    pub groups: Vec<(Model, Form, Form)>,
    pub source: Holding,
    pub target: Holding,
}

pub fn instances() -> impl Strategy<Value = Instances> {
    let groups = prop::collection::vec((models(), forms(48), forms(48)), 1..3);
    let blocks = prop::collection::vec(prop::option::of(1u32..4), 2);
    (groups, blocks, holdings(), holdings()).prop_map(|(mut groups, blocks, source, target)| {
        for (i, (model, source, target)) in groups.iter_mut().enumerate() {
            model.name = format!("g{i}");
            if model.is_state {
                (source.page_tokens, target.page_tokens) = (1, 1);
            } else if let Some(pages) = blocks[i] {
                let needed = pages * target.page_tokens;
                target.block_tokens = Some(needed);
                source.block_tokens = Some(needed * source.page_tokens);
            }
        }
        Instances { groups, source, target }
    })
}

fn holdings() -> impl Strategy<Value = Holding> {
    let any = prop::collection::vec((any::<Index>(), any::<Index>()), 0..4);
    prop_oneof![2 => (1u32..9).prop_map(Holding::Divided), 1 => any.prop_map(Holding::Any)]
}

impl Instances {
    pub fn source(&self) -> Vec<CacheLayout> {
        layouts(self.groups.iter().map(|(m, s, _)| (m.clone(), s.clone())).collect(), &self.source)
    }

    pub fn target(&self) -> Vec<CacheLayout> {
        layouts(self.groups.iter().map(|(m, _, t)| (m.clone(), t.clone())).collect(), &self.target)
    }

    /// The tokens that are sent of each group.
    pub fn sent(&self, pairing: &Pairing, tokens: &Range<u64>) -> Vec<Range<u64>> {
        let of = |(g, group): (usize, &(Model, Form, Form))| match group.0.is_state {
            true => 0..u64::from(tokens.start < tokens.end),
            false => sent_tokens(pairing, g, tokens.clone(), &group.0, &group.2),
        };
        self.groups.iter().enumerate().map(of).collect()
    }
}

fn layouts(groups: Vec<(Model, Form)>, holding: &Holding) -> Vec<CacheLayout> {
    match holding {
        Holding::Divided(ranks) => instance(&groups, *ranks),
        Holding::Any(stretches) => {
            let some = |(first, count): &(Index, Index)| {
                cache(&groups, |heads| {
                    let first = first.index(heads as usize) as u32;
                    (first, count.index((heads - first) as usize) as u32 + 1)
                })
            };
            let all = cache(&groups, |heads| (0, heads));
            stretches.iter().map(some).chain([all]).collect()
        }
    }
}

/// Choices that make a request once the page sizes are known.
pub type Choices = (u64, Index, Index, Vec<Index>, u64);

pub fn choices() -> impl Strategy<Value = Choices> {
    let chunks = prop::collection::vec(any::<Index>(), 0..4);
    (any::<u64>(), any::<Index>(), any::<Index>(), chunks, any::<u64>())
}

/// A request of 1 to 40 tokens; the target may have any number of whole pages of all groups.
///
/// Pages are mixed, and entries that must not be read are invalid.
pub fn request(of: &Instances, (salt, tokens, have, chunks, seed): Choices) -> Request {
    let n = tokens.index(40) as u64 + 1;
    let whole = |t: &u64| of.groups.iter().all(|(_, _, f)| t.is_multiple_of(f.page_tokens.into()));
    let prefixes: Vec<u64> = (0..=n).filter(whole).collect();
    let have = *have.get(&prefixes);
    let mut ends: Vec<u64> = chunks.iter().map(|c| c.index(n as usize + 1) as u64).collect();
    ends.push(n);
    ends.sort_unstable();
    let mut random = fastrand::Rng::with_seed(seed);
    let mut table = |model: &Model, form: &Form| {
        let mut pages: Vec<u32> = (0..form.pages).collect();
        random.shuffle(&mut pages);
        if model.is_state {
            return vec![pages[0]];
        }
        let first = have.max(first_needed(model, form, n));
        let page_tokens = u64::from(form.page_tokens);
        pages.truncate(n.div_ceil(page_tokens) as usize);
        pages[..(first / page_tokens) as usize].fill(u32::MAX);
        pages
    };
    let src_tables = of.groups.iter().map(|(m, f, _)| table(m, f)).collect();
    let dst_tables = of.groups.iter().map(|(m, _, f)| table(m, f)).collect();
    Request { tokens: have..n, salt, src_tables, dst_tables, chunks: ends }
}
