//! Page tables: which page holds which tokens of a request.

use rustc_hash::FxHashSet;

use crate::layout::CacheGroup;

/// Pages that the tables of one request name in all.
pub(crate) const MAX_ENTRIES: u64 = 1 << 22;

/// Pages of `tokens` tokens, in all groups; bounded, whatever a message of a few bytes claims.
pub(crate) fn entries(groups: &[CacheGroup], tokens: u64) -> Result<u64, String> {
    let fill = |g: &CacheGroup| g.pages_of(tokens);
    let sum = groups.iter().map(fill).try_fold(0u64, u64::checked_add);
    match sum.filter(|sum| *sum <= MAX_ENTRIES) {
        Some(sum) => Ok(sum),
        None => Err(format!(
            "{tokens} tokens fill more than {MAX_ENTRIES} pages; ask for fewer, or take larger pages"
        )),
    }
}

/// Whether a table is one of `tokens` tokens: as many pages as they fill, each of them there, none
/// twice. Entries of pages that lie before the window may be anything.
pub(crate) fn check(group: &CacheGroup, tokens: u64, table: &[u32]) -> Result<(), String> {
    let page = u64::from(group.page_tokens);
    let should = group.pages_of(tokens);
    if table.len() as u64 != should {
        return Err(match group.is_state {
            true => format!("a table of {} pages, where a request has one state", table.len()),
            false => format!(
                "a table of {} pages, where {tokens} tokens fill {should} of {page}",
                table.len()
            ),
        });
    }
    let mut used = FxHashSet::default();
    for &number in &table[(group.first_needed(tokens) / page) as usize..] {
        if number >= group.pages {
            return Err(format!("page {number} of {} pages", group.pages));
        }
        if !used.insert(number) {
            return Err(format!("page {number} twice"));
        }
    }
    Ok(())
}
