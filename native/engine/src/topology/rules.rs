//! The user's rules for rails, which override the defaults.

use super::{
    glob::{is_pattern, matches},
    pair::RailTarget,
};

/// Largest number of rails of one group.
pub const DEFAULT_MAX_RAILS: usize = 4;

/// Parsed rules such as `gpu0=mlx5_0,mlx5_1; host=mlx5_2; exclude=mlx5_bond_*`.
///
/// The left side of `=` is `gpuN`, a GPU's PCI address, `host` (all NUMA nodes), `hostN` (node N),
/// or `exclude`. On both sides `*` and `?` match any characters. The last rule for a target wins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rules {
    assignments: Vec<Assignment>,
    excluded: Vec<String>,
    /// Largest number of rails for one GPU or node, where no rule names them.
    pub max_rails: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Assignment {
    /// The rule's text, for messages.
    pub text: String,
    target: String,
    pub nics: Vec<String>,
}

impl Default for Rules {
    fn default() -> Self {
        Self { assignments: Vec::new(), excluded: Vec::new(), max_rails: DEFAULT_MAX_RAILS }
    }
}

impl Rules {
    /// # Errors
    /// A sentence that quotes the invalid rule.
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
                return Err(wrong("it names no GPU"));
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

    /// The same rules, with at most `max` rails per group.
    pub(super) fn limited_to(&self, max: usize) -> Self {
        Self { max_rails: self.max_rails.min(max).max(1), ..self.clone() }
    }

    /// Whether an `exclude` matches this device.
    pub(super) fn excludes(&self, nic: &str) -> bool {
        self.excluded.iter().any(|pattern| matches(pattern, nic))
    }

    /// The rule for a target, if there is one.
    pub(super) fn for_target(&self, target: &RailTarget) -> Option<&Assignment> {
        self.assignments.iter().rev().find(|rule| target.matches_rule(&rule.target))
    }

    /// Every rule must match something: a misspelt rule would leave the defaults without notice.
    pub(super) fn check(&self, targets: &[RailTarget], nics: &[String]) -> Result<(), String> {
        for rule in &self.assignments {
            if !targets.iter().any(|target| target.matches_rule(&rule.target)) {
                let there =
                    list(targets.iter().map(RailTarget::label), "neither GPUs nor NUMA nodes");
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
    /// The devices that the rule names, in its order; those that match a pattern in their order.
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

    /// Whether the rule names this device literally.
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
