//! What the user says about rails, over what the machine suggests.

use super::{
    glob::{is_pattern, matches},
    pair::Spot,
};

/// The most rails of one group.
pub const MOST_RAILS: usize = 4;

/// `gpu0=mlx5_0,mlx5_1; host=mlx5_2; exclude=mlx5_bond_*`, taken apart.
///
/// To the left of `=` stands `gpuN`, a GPU's PCI address, `host` (all NUMA nodes), `hostN` (node
/// N), or `exclude`; on both sides `*` and `?` stand for any characters. Of several rules for one
/// place the last counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rules {
    assignments: Vec<Assignment>,
    excluded: Vec<String>,
    /// The most rails for one GPU or node, where no rule names them.
    pub max_rails: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Assignment {
    /// As written, for messages.
    pub text: String,
    target: String,
    pub nics: Vec<String>,
}

impl Default for Rules {
    fn default() -> Self {
        Self { assignments: Vec::new(), excluded: Vec::new(), max_rails: MOST_RAILS }
    }
}

impl Rules {
    /// # Errors
    /// A sentence that quotes what isn't a rule.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut rules = Self::default();
        for rule in text.split([';', '\n']).map(str::trim).filter(|r| !r.is_empty()) {
            let wrong = |why: &str| {
                format!(
                    "`{rule}` isn't a rule for rails: {why}; write for example `gpu0=mlx5_0,mlx5_1; \
                     host=mlx5_2; exclude=mlx5_bond_*`"
                )
            };
            let (target, nics) = rule.split_once('=').ok_or_else(|| wrong("it has no `=`"))?;
            let target = target.trim();
            let nics: Vec<String> =
                nics.split(',').map(|n| n.trim().to_owned()).filter(|n| !n.is_empty()).collect();
            if target.is_empty() {
                return Err(wrong("it doesn't say for which GPU"));
            }
            if nics.is_empty() {
                return Err(wrong("it names no device"));
            }
            if target == "exclude" {
                rules.excluded.extend(nics);
            } else {
                let (text, target) = (rule.to_owned(), target.to_owned());
                rules.assignments.push(Assignment { text, target, nics });
            }
        }
        Ok(rules)
    }

    /// The same rules, for groups of at most `max` rails.
    pub(super) fn limited_to(&self, max: usize) -> Self {
        Self { max_rails: self.max_rails.min(max).max(1), ..self.clone() }
    }

    /// Whether some `exclude` names this device.
    pub(super) fn excludes(&self, nic: &str) -> bool {
        self.excluded.iter().any(|pattern| matches(pattern, nic))
    }

    /// The rule for a place, if there is one.
    pub(super) fn for_spot(&self, spot: &Spot) -> Option<&Assignment> {
        self.assignments.iter().rev().find(|rule| spot.is_named_by(&rule.target))
    }

    /// Every rule must mean something here: a misspelt one would quietly leave the defaults.
    pub(super) fn check(&self, spots: &[Spot], nics: &[String]) -> Result<(), String> {
        for rule in &self.assignments {
            if !spots.iter().any(|spot| spot.is_named_by(&rule.target)) {
                let there = list(spots.iter().map(Spot::shown), "neither GPUs nor NUMA nodes");
                return Err(format!(
                    "the rule `{}` matches nothing: there is no `{}` here, only {there}",
                    rule.text, rule.target
                ));
            }
            self.check_nics(&rule.text, &rule.nics, nics)?;
        }
        let exclude = format!("exclude={}", self.excluded.join(","));
        self.check_nics(&exclude, &self.excluded, nics)
    }

    fn check_nics(&self, rule: &str, patterns: &[String], nics: &[String]) -> Result<(), String> {
        let missing = |p: &&String| !nics.iter().any(|nic| matches(p, nic));
        let Some(pattern) = patterns.iter().find(missing) else { return Ok(()) };
        let there = list(nics.iter().cloned(), "no RDMA devices");
        Err(format!(
            "the rule `{rule}` matches nothing: there is no device `{pattern}` here, only {there}"
        ))
    }
}

impl Assignment {
    /// The devices that the rule names, in its order; what a pattern stands for in theirs.
    pub fn select(&self, nics: &[String]) -> Vec<String> {
        let mut chosen: Vec<String> = Vec::new();
        for pattern in &self.nics {
            for nic in nics.iter().filter(|nic| matches(pattern, nic)) {
                if !chosen.contains(nic) {
                    chosen.push(nic.clone());
                }
            }
        }
        chosen
    }

    /// Whether the rule names this device itself rather than by a pattern.
    pub fn names(&self, nic: &str) -> bool {
        self.nics.iter().any(|pattern| !is_pattern(pattern) && pattern == nic)
    }
}

fn list(items: impl Iterator<Item = String>, none: &str) -> String {
    let items: Vec<String> = items.collect();
    if items.is_empty() {
        return none.to_owned();
    }
    items.join(", ")
}
