//! Glob patterns with `*` and `?`, as in a shell.

pub(super) fn is_pattern(text: &str) -> bool {
    text.contains(['*', '?'])
}

/// Takes time proportional to the product of the lengths: only the last `*` is remembered.
pub(crate) fn matches(pattern: &str, name: &str) -> bool {
    let (pattern, name) = (pattern.as_bytes(), name.as_bytes());
    let (mut p, mut n) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    while n < name.len() {
        match pattern.get(p) {
            Some(b'*') => {
                star = Some((p, n));
                p += 1;
            }
            Some(c) if *c == b'?' || *c == name[n] => {
                p += 1;
                n += 1;
            }
            _ => {
                let Some((at, from)) = star else { return false };
                star = Some((at, from + 1));
                p = at + 1;
                n = from + 1;
            }
        }
    }
    pattern[p..].iter().all(|c| *c == b'*')
}

#[cfg(test)]
mod tests {
    use super::matches;

    #[test]
    fn patterns_match_as_in_a_shell() {
        for (pattern, name) in [
            ("mlx5_0", "mlx5_0"),
            ("mlx5_*", "mlx5_10"),
            ("*", ""),
            ("*bond*", "mlx5_bond_0"),
            ("mlx5_?", "mlx5_7"),
            ("*_1", "mlx5_1_1"),
            ("a*b*c", "a-bb-bc"),
        ] {
            assert!(matches(pattern, name), "{pattern} {name}");
        }
        for (pattern, name) in
            [("mlx5_?", "mlx5_10"), ("mlx5_1", "mlx5_10"), ("*_1", "mlx5_10"), ("", "a"), ("?", "")]
        {
            assert!(!matches(pattern, name), "{pattern} {name}");
        }
    }
}
